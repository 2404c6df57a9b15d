"""The store of the cloud platforms: a Cloud Storage bucket, or a folder in one."""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kinetic._runner.protocol.wire import BILLING_PROJECT
from kinetic._tasks import for_each
from kinetic.aio._net.http import HttpError
from kinetic.aio.gcs import batch, http, transfer
from kinetic.aio.ports import RECORD_BYTES, Object, ObjectInfo
from kinetic.errors import Conflict, NotFound

T = TypeVar("T")

LIST_FIELDS = (
    "nextPageToken,items(name,size,generation,metageneration,metadata,customTime,timeCreated)"
)

EARLIER_TIME_STATUS = 400
"""The status with which the service refuses a custom time that is earlier than the stored one."""

NOT_FOUND = 404


class GcsStore:
    """`kinetic.aio.ports.Store` over ``gs://bucket`` or ``gs://bucket/folder``.

    A store belongs to the event loop that first uses it. If STORAGE_EMULATOR_HOST is set, the
    store uses the server at this URL instead of Google's, and sends no credentials.
    KINETIC_BILLING_PROJECT is the project that pays if the bucket's requester pays.

    Every method raises:
        AuthError: Credentials or a permission are missing.
        Refused: A policy, a key, or the bucket's settings forbid the request.
        NotFound: The bucket doesn't exist.
        Unavailable: The service didn't answer for two minutes.

    Raises:
        ConfigurationError: *url* names no bucket.
    """

    def __init__(
        self,
        url: str,
        environ: Mapping[str, str] = os.environ,
        *,
        endpoint: str | None = None,
        limits: http.Limits | None = None,
    ) -> None:
        emulator = environ.get(http.EMULATOR, "")
        if emulator and "://" not in emulator:
            emulator = f"http://{emulator}"
        self._client = http.BucketClient(
            http.Location.from_url(url),
            endpoint or emulator or None,
            limits or http.Limits(),
            authorized=not emulator,
            billing_project=environ.get(BILLING_PROJECT),
        )

    @property
    def url(self) -> str:
        return self._client.location.url

    def plain(self) -> GcsStore:
        """Implement `Store.plain`. The returned store uses the connections of this one."""
        plain = copy.copy(self)
        plain._client = self._client.plain()
        return plain

    async def settings(self) -> Mapping[str, Any]:
        """Return the bucket's resource; this needs the permission ``storage.buckets.get``."""
        client, bucket = self._client, self._client.location.bucket

        async def read() -> Mapping[str, Any]:
            return await client.storage.get_bucket_metadata(bucket, timeout=client.timeout)

        return await client.perform("get", bucket, read)

    async def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        shared: bool = False,
        check: Callable[[], object] | None = None,
    ) -> bool:
        """Implement `Store.create`. Sends one request; two if *body* has more than 1 MiB.

        If Cloud Storage says that the object exists, another request checks this.
        """
        used = _now() if shared else ""
        generation = await transfer.write(
            self._client, "create", name, body, metadata or {}, generation=0, used=used, check=check
        )
        return generation is not None

    async def begin(self, name: str, body: bytes) -> int | None:
        """Implement `Store.begin`."""
        return await transfer.write(self._client, "create", name, body, {}, generation=0)

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        """Implement `Store.replace`."""
        new_generation = await transfer.write(
            self._client, "replace", name, body, {}, generation=generation
        )
        if new_generation is None:
            await self._client.read_metadata(name)  # raises NotFound if the object was deleted
            raise Conflict(f"{name} is no longer of generation {generation}")
        return new_generation

    async def get(self, name: str, *, limit: int | None = RECORD_BYTES, start: int = 0) -> Object:
        """Implement `Store.get`. Sends one request; two if the object isn't empty."""
        return await transfer.get(self._client, name, limit, start)

    async def get_many(self, names: Collection[str]) -> dict[str, Object]:
        """Implement `Store.get_many`. Sends one request for each hundred empty objects.

        An object with content takes one or two more.
        """
        wanted, client, found = [*names], self._client, dict[str, Object]()

        async def get_one(name: str) -> None:
            with contextlib.suppress(NotFound):
                found[name] = await self.get(name)

        async def get_some(first: int) -> None:
            some = wanted[first : first + batch.MAX_REQUESTS]
            left = {*some}
            if len(some) > 1:
                requests = [batch.Request("GET", client.object_path(it, {})) for it in some]
                answers = await client.send_batch("get", requests)
                for name, answer in zip(some, answers, strict=False):  # there may be no answers
                    if answer.status == 200:
                        resource = json.loads(answer.content)
                        info = http.ObjectMetadata.from_resource(name, resource).info
                        if info.size:
                            continue
                        found[name] = Object(name, b"", info.metadata, info.generation)
                    if answer.status in (200, NOT_FOUND):
                        left.remove(name)
            # By itself, a request is retried, or shows why it is refused.
            await self._for_each(get_one, left)

        await self._for_each(get_some, range(0, len(wanted), batch.MAX_REQUESTS))
        return found

    async def fetch(self, name: str, path: Path) -> None:
        """Implement `Store.fetch`. Sends two requests, one after the other."""
        await transfer.fetch(self._client, name, path)

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """Implement `Store.list`. Sends one request for every thousand objects."""
        found: list[ObjectInfo] = []
        client, location = self._client, self._client.location
        params = {"prefix": location.object_name(prefix), "fields": LIST_FIELDS}

        async def read_page() -> Mapping[str, Any]:
            return await client.storage.list_objects(
                location.bucket, params=dict(params), timeout=client.timeout
            )

        while params.get("pageToken") != "":
            answer = await client.perform("list", prefix, read_page)
            found += (
                http.ObjectMetadata.from_resource(name, resource).info
                for resource in answer.get("items") or ()
                if (name := location.name(resource["name"])) is not None
            )
            params["pageToken"] = answer.get("nextPageToken") or ""
        # The service sorts by the encoded names in the bucket, whose order may differ.
        return sorted(found, key=lambda info: info.name)

    async def look(self, name: str) -> ObjectInfo | None:
        """Implement `Store.look`. Sends one request, which costs less than a listing."""
        try:
            return (await self._client.read_metadata(name)).info
        except NotFound:
            return None

    async def renew(self, names: Collection[str]) -> set[str]:
        """Implement `Store.renew`. A request for each object sets its custom time to now.

        Cancelled: some of the objects may be renewed.
        """
        now, absent, client = _now(), set[str](), self._client

        async def renew(name: str) -> None:
            status = await self._request(
                "renew",
                name,
                lambda: client.storage.patch_metadata(
                    *client.place(name), {"customTime": now}, timeout=client.timeout
                ),
                expected=(NOT_FOUND, EARLIER_TIME_STATUS),  # another client's clock may be ahead
            )
            if status == NOT_FOUND:
                absent.add(name)

        await self._for_each(renew, names)
        return absent

    async def collect(self, objects: Sequence[ObjectInfo]) -> bool:
        """Implement `Store.collect`. Reads metadata of the first object, then deletes each object.

        Cancelled: some of the objects may be deleted, the first before the others.
        """
        stored = await self.look(objects[0].name) if objects else None
        if stored is not None and stored.used != objects[0].used:
            return False
        # Of a `Data`, the first is the manifest, whose renewal keeps the files.
        for part in (objects[:1], objects[1:]):
            if not await self._delete_unchanged(part):
                return False
        return True

    async def _delete_unchanged(self, objects: Sequence[ObjectInfo]) -> bool:
        """Delete the *objects* that are as listed; return False if any has changed since."""
        deletions = [
            (
                info.name,
                {
                    "ifGenerationMatch": str(info.generation),
                    "ifMetagenerationMatch": str(info.metageneration),
                },
            )
            for info in objects
        ]
        return http.PRECONDITION_FAILED not in await self._delete(deletions)

    async def delete(self, names: Collection[str]) -> None:
        """Implement `Store.delete`. Sends a request for each hundred objects, up to 64 at once.

        Cancelled: some of the objects may be deleted.
        """
        await self._delete([(name, {}) for name in names])

    async def _delete(self, deletions: Sequence[tuple[str, Mapping[str, str]]]) -> set[int]:
        """Delete each object that meets its condition; return the statuses of refusals."""
        statuses, client = set[int](), self._client

        async def delete_one(name: str, condition: Mapping[str, str]) -> None:
            status = await self._request(
                "delete",
                name,
                lambda: client.storage.delete(
                    *client.place(name), params=dict(condition), timeout=client.timeout
                ),
                expected=(NOT_FOUND, http.PRECONDITION_FAILED) if condition else (NOT_FOUND,),
            )
            statuses.add(status)

        async def delete_some(first: int) -> None:
            some = deletions[first : first + batch.MAX_REQUESTS]
            if len(some) > 1:
                requests = [batch.Request("DELETE", client.object_path(*it)) for it in some]
                if answers := await client.send_batch("delete", requests):
                    done = [it.status < 300 or it.status == NOT_FOUND for it in answers]
                    # By itself, a request is retried, or shows why it is refused.
                    some = [it for it, ended in zip(some, done, strict=True) if not ended]
            await self._for_each(lambda it: delete_one(*it), some)

        await self._for_each(delete_some, range(0, len(deletions), batch.MAX_REQUESTS))
        return statuses

    async def _for_each(
        self, work: Callable[[T], Coroutine[Any, Any, object]], items: Collection[T]
    ) -> None:
        limit = min(len(items), self._client.limits.connections)
        await for_each(work, items, limit=limit)

    async def _request(
        self,
        verb: http.Verb,
        name: str,
        work: Callable[[], Awaitable[object]],
        *,
        expected: Collection[int],
    ) -> int:
        """Perform *work*. Return 0, or the HTTP status of a refusal if it is in *expected*."""
        try:
            await self._client.perform(verb, name, work, expected=expected)
        except HttpError as refusal:
            return refusal.status
        return 0

    async def aclose(self) -> None:
        """Close the connections; requests in progress fail."""
        await self._client.aclose()


def _now() -> str:
    """Return the current time in the format that the service accepts."""
    now = datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
