"""The description of a job, which a handle keeps and can read without a connection."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Self

__all__ = ["JobRecord", "utc_now"]

_OPTIONAL = ("group_id", "group_kind", "group_index", "price")


def utc_now() -> str:
    """Return the time as handles carry it: UTC, ISO 8601, whole seconds, ``Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class JobRecord:
    """Durable description of a submitted job; every field is JSON-safe.

    The record has neither the function nor its arguments, only what any machine needs to find,
    collect, and clean up the job.
    """

    job_id: str
    backend: str
    project: str
    cluster_name: str
    zone: str
    namespace: str
    bucket_name: str
    k8s_name: str
    image_uri: str
    accelerator: str
    func_name: str
    display_name: str
    created_at: str
    group_id: str | None = None
    group_kind: str | None = None
    group_index: int | None = None
    debug: bool = False
    price: dict[str, Any] | None = None
    """The price of its accelerator at the submission: the fields of a `kinetic.prices.Price`."""

    @classmethod
    def from_job_context(cls, ctx: Any, backend_name: str, namespace: str, k8s_name: str) -> Self:
        """Build the record from an object that has the other fields as attributes.

        A context without ``func_name`` may have the function itself as ``func``. A context without
        ``created_at`` gets the time of this call.

        Raises:
            TypeError: A required field is missing.
        """
        arguments = {"backend": backend_name, "namespace": namespace, "k8s_name": k8s_name}
        values = {name: getattr(ctx, name) for name in _names() if hasattr(ctx, name)}
        if (func := getattr(ctx, "func", None)) is not None:
            values.setdefault("func_name", getattr(func, "__name__", type(func).__name__))
        return cls.from_dict({"created_at": utc_now()} | values | arguments)

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        """Rebuild the record from `to_dict`; ignore keys of a later version.

        Raises:
            TypeError: A required field is missing.
        """
        known = _names()
        return cls(**{name: value for name, value in d.items() if name in known})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-safe dict, without optional fields that are None."""
        values = {name: getattr(self, name) for name in _names()}
        return {
            name: value
            for name, value in values.items()
            if not (name in _OPTIONAL and value is None)
        }


def _names() -> list[str]:
    return [record_field.name for record_field in fields(JobRecord)]
