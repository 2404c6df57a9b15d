"""What the bucket says of one object, without its content."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kinetic.aio.ports import ObjectInfo
from kinetic.aio.stores._gcs_errors import Verb
from kinetic.aio.stores._gcs_http import Http

__all__ = ["NONCE", "Described", "described"]

NONCE = "kinetic-nonce"
"""The key of the metadata that says whose write an object is; users never see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What the bucket says of one object; ``size`` in bytes, ``used`` in seconds since 1970."""

    size: int
    generation: int
    crc32c: str
    metadata: Mapping[str, str]
    nonce: str
    used: float | None

    @classmethod
    def from_resource(cls, resource: Mapping[str, Any]) -> Described:
        """Read an object resource of the JSON API."""
        metadata = dict(resource.get("metadata") or {})
        nonce = metadata.pop(NONCE, "")
        return cls(
            size=int(resource.get("size", 0)),
            generation=int(resource["generation"]),
            crc32c=resource.get("crc32c", ""),
            metadata=metadata,
            nonce=nonce,
            used=_seconds(resource.get("customTime")),
        )

    def info(self, name: str) -> ObjectInfo:
        """The same in the port's words."""
        return ObjectInfo(
            name=name,
            size=self.size,
            metadata=self.metadata,
            generation=self.generation,
            used=self.used,
        )


def _seconds(text: str | None) -> float | None:
    if not text:
        return None
    moment = datetime.datetime.fromisoformat(text)
    return moment.timestamp() if moment.year > 1 else None  # some servers have a time of nothing


async def described(http: Http, name: str) -> Described:
    """What there is under *name*.

    Raises:
        Refusal: There is nothing, or it may not be read.
    """
    object_name = http.place.object_name(name)

    async def work() -> Described:
        resource = await http.storage.download_metadata(
            http.place.bucket, object_name, timeout=http.timeout
        )
        return Described.from_resource(resource)

    return await http.do(Verb.GET, name, work)
