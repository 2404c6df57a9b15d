"""The store of the cloud platforms: a bucket of Google Cloud Storage, or a folder of one."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from kinetic.aio.ports import RECORD_BYTES, Object, ObjectInfo
from kinetic.aio.stores import _gcs_age, _gcs_batch, _gcs_download, _gcs_list, _gcs_upload
from kinetic.aio.stores._gcs_content import opened
from kinetic.aio.stores._gcs_errors import Refusal, Verb
from kinetic.aio.stores._gcs_http import EMULATOR, Http, Limits
from kinetic.aio.stores._gcs_names import Location
from kinetic.aio.stores._gcs_object import described
from kinetic.errors import Conflict

__all__ = ["GcsStore", "Limits"]


DELETE = _gcs_batch.Task(verb=Verb.DELETE, method="DELETE")


class GcsStore:
    """`kinetic.aio.ports.Store` over ``gs://bucket`` or ``gs://bucket/folder``.

    It belongs to the event loop that uses it first. STORAGE_EMULATOR_HOST, a URL,
    names a server to use instead of Google's, without credentials.

    Raises:
        ConfigurationError: *url* names no bucket.
    """

    def __init__(
        self,
        url: str,
        environ: Mapping[str, str] = os.environ,
        *,
        endpoint: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        emulator = environ.get(EMULATOR, "")
        if emulator and "://" not in emulator:
            emulator = f"http://{emulator}"
        self._http = Http(
            Location.from_url(url),
            endpoint or emulator or None,
            limits or Limits(),
            authorized=not emulator,
        )

    @property
    def url(self) -> str:
        return self._http.place.url

    async def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        shared: bool = False,
    ) -> bool:
        """See the port. A body of up to 1 MiB takes one request, a larger one two and no memory.

        Raises:
            AuthError: The credentials are missing, or lack a permission.
            Unavailable: The service did not answer for two minutes.
        """
        used = _gcs_age.now() if shared else ""
        return await self._made(name, body, metadata or {}, used) is not None

    async def begin(self, name: str, body: bytes) -> int | None:
        """See the port."""
        return await self._made(name, body, {}, "")

    async def _made(
        self, name: str, body: bytes | Path, metadata: Mapping[str, str], used: str
    ) -> int | None:
        """The generation of a new object; None when there is one."""
        async with opened(body, self._http.limits.piece_bytes) as content:
            return await _gcs_upload.write(
                self._http, Verb.CREATE, name, content, metadata, generation=0, used=used
            )

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        """See the port."""
        async with opened(body, self._http.limits.piece_bytes) as content:
            made = await _gcs_upload.write(
                self._http, Verb.REPLACE, name, content, {}, generation=generation
            )
        if made is not None:
            return made
        try:
            await described(self._http, name)
        except Refusal as refusal:
            raise self._http.explained(refusal, Verb.GET, name) from None
        raise Conflict(f"{name} is no longer of generation {generation}")

    async def get(self, name: str, *, limit: int | None = RECORD_BYTES) -> Object:
        """See the port. Two requests at once: the API gives metadata and content by one each."""
        return await _gcs_download.get(self._http, name, limit)

    async def fetch(self, name: str, path: Path) -> None:
        """See the port. A large object comes in several ranges at once."""
        await _gcs_download.fetch(self._http, name, path)

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """See the port. One request for each thousand objects."""
        return await _gcs_list.listed(self._http, prefix)

    async def look(self, name: str) -> ObjectInfo | None:
        """See the port. One request, of the cheaper kind."""
        try:
            return (await described(self._http, name)).info(name)
        except Refusal as refusal:
            if refusal.status == _gcs_batch.ABSENT:
                return None
            raise self._http.explained(refusal, Verb.GET, name) from None

    async def renew(self, names: Collection[str]) -> set[str]:
        """See the port. One request for each hundred objects; it is their custom time."""
        return await _gcs_age.renewed(self._http, names)

    async def delete(self, names: Collection[str]) -> None:
        """See the port. One request for each hundred objects."""
        await _gcs_batch.each(self._http, DELETE, names)

    async def aclose(self) -> None:
        """Close the connections; requests under way fail."""
        await self._http.aclose()
