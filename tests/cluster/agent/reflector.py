"""What a controller hears: of every object of a kind, as often as it changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from tests.cluster.rest import Refused, Session

Json = dict[str, Any]
UNREACHABLE = (aiohttp.ClientError, TimeoutError, OSError)
RETRY_S = 0.2


async def reflect(
    session: Session, path: str, handle: Callable[[str, Json], Awaitable[None]], label: str = ""
) -> None:
    """Hand every object below *path* to *handle*, with ADDED, MODIFIED or DELETED. Never ends.

    What *handle* cannot do now (`Refused`: a conflict, something that is still there) is done
    again with the next list, and keeps nothing else from being done.
    """
    chosen = {"labelSelector": label} if label else {}
    while True:
        with contextlib.suppress(Refused, *UNREACHABLE):
            listed = await session.call("GET", path, **chosen)
            done = [await _handled(handle, "ADDED", item) for item in listed["items"]]
            since = listed["metadata"]["resourceVersion"]
            if all(done):
                async for event in session.watch(path, since, **chosen):
                    if not await _handled(handle, event["type"], event["object"]):
                        break
        await asyncio.sleep(RETRY_S)


async def _handled(handle: Callable[[str, Json], Awaitable[None]], kind: str, found: Json) -> bool:
    try:
        await handle(kind, found)
    except Refused as refusal:
        # An object of a new kind may outlive its namespace: for that one nothing can be done.
        return refusal.code == 404
    return True


async def create(session: Session, path: str, body: Json) -> None:
    """Make an object that may be there."""
    try:
        await session.call("POST", path, body)
    except Refused as refusal:
        if refusal.code != 409:
            raise


async def delete(session: Session, path: str, policy: str = "Background") -> None:
    """Delete an object that may be gone."""
    try:
        await session.call("DELETE", path, {"propagationPolicy": policy})
    except Refused as refusal:
        if refusal.code != 404:
            raise


def owner(found: Json) -> Json:
    """The reference of what *found* makes."""
    return {
        "apiVersion": found["apiVersion"],
        "kind": found["kind"],
        "name": found["metadata"]["name"],
        "uid": found["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
