"""The Secret of a submission: the key its runners sign with, and the captured environment."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from kinetic.aio.clusters._names import label_value
from kinetic.aio.ports import JobSpec
from kinetic.errors import ConfigurationError

__all__ = ["KEY", "LIMIT", "carried", "secret_manifest"]

KEY = "key"
LIMIT = 1024 * 1024
"""The most bytes of a Secret's content."""

_VARIABLE = re.compile(r"[ -<>-~]+")


def carried(spec: JobSpec) -> dict[str, str]:
    """Which variables of *spec* are in the Secret, and under what key of it.

    The environment that all jobs of a submission share was captured from the
    user's own and may hold secrets. Where nothing says what is shared, all is.
    A variable's name need not be legal as a key, so keys are numbers.

    Raises:
        ConfigurationError: A name cannot be that of a variable in a container.
    """
    shared = spec.shared.environment if spec.shared is not None else spec.environment
    names = sorted(shared)
    for name in spec.environment:
        if not _VARIABLE.fullmatch(name):
            raise ConfigurationError(
                f"the environment variable {name!r} cannot be set in a container: Kubernetes takes "
                "printable ASCII without '='; leave it out of capture_env_vars"
            )
    return {name: f"env.{number}" for number, name in enumerate(names)}


def secret_manifest(
    spec: JobSpec,
    name: str,
    namespace: str,
    *,
    labels: Mapping[str, str] | None = None,
    owner: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The Secret *name* for the submission of *spec*, the same for all its jobs.

    With *owner*, the Job (or the set of pods) of a single job as the API returned it, Kubernetes
    removes the Secret with it. Another submission's content cannot get in:
    the Secret is immutable.

    Raises:
        ConfigurationError: The environment is too large for a Secret.
    """
    values = spec.shared.environment if spec.shared is not None else spec.environment
    keys = carried(spec)
    content = {keys[one]: value.encode(errors="surrogateescape") for one, value in values.items()}
    content[KEY] = spec.key
    size = sum(len(value) for value in content.values())
    if size > LIMIT:
        raise ConfigurationError(
            f"the captured environment has {size} bytes, and a Secret holds {LIMIT}; capture "
            "fewer variables, or ship the content as Data"
        )
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "labels": {key: label_value(value) for key, value in (labels or {}).items()},
    }
    if owner is not None:
        metadata["ownerReferences"] = [
            {
                "apiVersion": owner.get("apiVersion") or "batch/v1",
                "kind": owner.get("kind") or "Job",
                "name": owner["metadata"]["name"],
                "uid": owner["metadata"]["uid"],
            }
        ]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": metadata,
        "data": {key: base64.b64encode(value).decode() for key, value in content.items()},
    }
