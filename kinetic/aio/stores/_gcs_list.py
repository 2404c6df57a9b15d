"""What is in the bucket under a prefix, page by page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kinetic.aio.ports import ObjectInfo
from kinetic.aio.stores._gcs_errors import Refusal, Verb
from kinetic.aio.stores._gcs_http import Http
from kinetic.aio.stores._gcs_object import Described

__all__ = ["listed"]

FIELDS = "nextPageToken,items(name,size,generation,metadata,customTime)"


async def listed(http: Http, prefix: str) -> list[ObjectInfo]:
    """All objects whose names begin with *prefix*, sorted by name."""
    found: list[ObjectInfo] = []
    token: str | None = ""
    while token is not None:
        page, token = await _page(http, prefix, token)
        found += page
    # The service sorts by the bytes of its own names, which are not quite ours.
    return sorted(found, key=lambda info: info.name)


async def _page(http: Http, prefix: str, token: str) -> tuple[list[ObjectInfo], str | None]:
    params = {
        "prefix": http.place.object_name(prefix),
        "maxResults": str(http.limits.page),
        "fields": FIELDS,
        **({"pageToken": token} if token else {}),
    }

    async def work() -> tuple[list[ObjectInfo], str | None]:
        answer = await http.storage.list_objects(
            http.place.bucket, params=dict(params), timeout=http.timeout
        )
        infos = (_info(http, resource) for resource in answer.get("items") or ())
        return [info for info in infos if info is not None], answer.get("nextPageToken") or None

    try:
        return await http.do(Verb.LIST, prefix, work)
    except Refusal as refusal:
        raise http.explained(refusal, Verb.LIST, prefix) from None


def _info(http: Http, resource: Mapping[str, Any]) -> ObjectInfo | None:
    """What a listing tells of one object, unless it is none of this store."""
    name = http.place.name(resource["name"])
    if name is None:
        return None
    return Described.from_resource(resource).info(name)
