"""The objects of a store in a bucket of Google Cloud Storage, as a job in the cloud uses them.

Every write carries the precondition that there is no such object, and a random
nonce in its hidden metadata: of a write whose reply was lost one finds out
afterwards whose it was. The client's adapter does the same.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import gcs_transfer
from .directory import Stored
from .gcs_http import Answer, Http, Patience, Refused, Trouble, persist
from .gcs_names import Place

__all__ = ["NONCE", "GcsObjects"]

NONCE = "kinetic-nonce"
TYPE = "application/octet-stream"
WHOLE_BYTES = 8 * 1024 * 1024
"""Up to so much is sent in one request, from memory."""

PAGE = 1000
DAMAGED_TRIES = 3
FIELDS = "nextPageToken,items(name,size,generation,metadata)"
Listing = list[Stored]


class GcsObjects:
    """Objects in ``gs://bucket`` or ``gs://bucket/folder``. Safe for any number of threads.

    A missing object is a ``KeyError`` with its name; everything else that goes
    wrong is an ``OSError``, after ten minutes where it may pass.
    """

    def __init__(
        self, url: str, environ: Mapping[str, str] = os.environ, patience: Patience | None = None
    ) -> None:
        self._http = Http(Place.from_url(url), environ, patience)
        self._crc32c: Any = importlib.import_module("google_crc32c")

    @property
    def url(self) -> str:
        """Where another process finds the same objects."""
        return self._http.place.url

    def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        consume: bool = False,
    ) -> bool:
        """Create *name* if it is absent; False when it exists.

        A large file takes several requests, and goes on where it was cut. With
        *consume* nothing is different here.
        """
        nonce = secrets.token_hex(8)
        resource: dict[str, Any] = {
            "name": self._http.place.object_name(name),
            "contentType": TYPE,
            "metadata": {**(metadata or {}), NONCE: nonce},
        }
        if isinstance(body, Path) and body.stat().st_size > WHOLE_BYTES:
            upload: _Upload = gcs_transfer.Upload(self._http, name, resource, body)
        else:
            content = body.read_bytes() if isinstance(body, Path) else body
            upload = _Whole(self._http, name, resource, content)
        for tries in range(1, DAMAGED_TRIES + 1):
            try:
                return self._created(name, upload, nonce)
            except _Damaged:
                if tries == DAMAGED_TRIES:
                    raise
        raise AssertionError

    def _created(self, name: str, upload: _Upload, nonce: str) -> bool:
        try:
            answer = upload.run().json()
        except Refused as refused:
            if refused.damaged:
                raise _Damaged(str(refused)) from refused
            if refused.status != 412:
                raise
            # Of several tries one may have been heard, and its reply lost.
            return upload.tries > 1 and self._is_own(name, nonce)
        if answer.get("crc32c", upload.crc32c) == upload.crc32c:
            return True
        self._remove(name, generation=answer["generation"])
        words = f"{name} arrived in {self.url} as something else than was sent; check the network"
        raise _Damaged(words)

    def _is_own(self, name: str, nonce: str) -> bool:
        try:
            metadata: dict[str, str] = self._about(name).get("metadata") or {}
            return metadata.get(NONCE) == nonce
        except KeyError:
            return False

    def get(
        self, name: str, start: int | None = None, stop: int | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        """Content, or its bytes from *start* to *stop*. Of metadata it gives none: see `stat`."""
        if stop is not None and stop <= (start or 0):
            self._about(name)
            return b"", {}
        headers: dict[str, str] = {}
        if start or stop is not None:
            last = "" if stop is None else str(stop - 1)
            headers["Range"] = f"bytes={start or 0}-{last}"
        url, what = self._http.url(self._http.place.object_name(name)), f"read {name}"

        def work() -> bytes:
            answer = self._http.once(
                what, "GET", url, params={"alt": "media"}, headers=headers, accepted=(404, 416)
            )
            if answer.status == 416:  # it ends before *start*, or is empty
                return b""
            self._found(what, name, answer)
            if answer.status == 200:
                self._check(what, answer)
                return answer.content[start:stop]
            return answer.content

        return persist(work, self._http.patience), {}

    def _check(self, what: str, answer: Answer) -> None:
        """By the checksum that comes along; the service knows it for most objects."""
        for part in answer.headers.get("X-Goog-Hash", "").split(","):
            kind, _, told = part.strip().partition("=")
            if (
                kind == "crc32c"
                and told
                and told != gcs_transfer.checksum(self._crc32c.value(answer.content))
            ):
                raise Trouble(f"cannot {what}: it arrived as something else", passing=True)

    def fetch(self, name: str, path: Path) -> None:
        """Write the content to a new file: in several ranges at once, in flat memory."""
        about = self._about(name)
        gcs_transfer.download(self._http, name, about, path)

    def path(self, name: str) -> Path | None:
        """No object is a file here."""
        return None

    def stat(self, name: str) -> Stored:
        """What a listing tells, of one object."""
        return _stored(name, self._about(name))

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""
        try:
            self._about(name)
        except KeyError:
            return False
        return True

    def holds(self, folder: str) -> bool:
        """Whether there is an object below *folder*."""
        return bool(self._page(f"{folder}/", "", 1)[0])

    def list(self, prefix: str) -> Listing:
        """All objects whose name starts with *prefix*, sorted by name."""
        found: Listing = []
        token: str | None = ""
        while token is not None:
            page, token = self._page(prefix, token, PAGE)
            found += page
        return sorted(found, key=lambda one: one.name)

    def look_up(self, names: Iterable[str]) -> Listing:
        """Those of *names* that exist: by one listing of what their names have in common."""
        wanted = set(names)
        if not wanted:
            return []
        first, last = min(wanted), max(wanted)  # what these begin with, all do
        same = (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
        return [one for one in self.list(first[: next(same, len(first))]) if one.name in wanted]

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are not there count as deleted."""
        for name in names:
            self._remove(name)

    def _remove(self, name: str, generation: str = "") -> None:
        url = self._http.url(self._http.place.object_name(name))
        params = {"ifGenerationMatch": generation} if generation else {}
        self._http.ask(f"delete {name}", "DELETE", url, params=params, accepted=(404, 412))

    def _about(self, name: str) -> dict[str, Any]:
        what = f"look at {name}"
        url = self._http.url(self._http.place.object_name(name))
        answer = self._http.ask(what, "GET", url, accepted=(404,))
        self._found(what, name, answer)
        return answer.json()

    def _found(self, what: str, name: str, answer: Answer) -> None:
        if answer.status != 404:
            return
        refused = Refused(what, 404, answer.content.decode(errors="replace"))
        if refused.about_bucket:
            raise refused
        raise KeyError(name)

    def _page(self, prefix: str, token: str, size: int) -> tuple[Listing, str | None]:
        params = {
            "prefix": self._http.place.object_name(prefix),
            "maxResults": str(size),
            "fields": FIELDS,
            **({"pageToken": token} if token else {}),
        }
        answer = self._http.ask(f"list {prefix}", "GET", self._http.url(), params=params).json()
        found: Listing = []
        for resource in answer.get("items") or ():
            name = self._http.place.name(resource["name"])
            if name is not None:
                found.append(_stored(name, resource))
        return found, answer.get("nextPageToken") or None


class _Damaged(Trouble):
    """A content was not the same on both sides."""


class _Whole:
    """A content of one piece: metadata, content and checksum in one request."""

    def __init__(self, http: Http, name: str, resource: dict[str, Any], content: bytes) -> None:
        crc32c: Any = importlib.import_module("google_crc32c")
        self.tries = 0
        self.crc32c = gcs_transfer.checksum(crc32c.value(content))
        self._http = http
        self._name = name
        boundary = secrets.token_hex(16)
        about = json.dumps({**resource, "crc32c": self.crc32c}).encode()
        self._type = f"multipart/related; boundary={boundary}"
        self._body = b"".join(
            (
                b"--%s\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
                % boundary.encode(),
                about,
                b"\r\n--%s\r\nContent-Type: %s\r\n\r\n" % (boundary.encode(), TYPE.encode()),
                content,
                b"\r\n--%s--\r\n" % boundary.encode(),
            )
        )

    def run(self) -> Answer:
        """Send it."""
        return persist(self._once, self._http.patience)

    def _once(self) -> Answer:
        self.tries += 1
        return self._http.once(
            f"write {self._name}",
            "POST",
            self._http.upload_url,
            params={
                "uploadType": "multipart",
                "ifGenerationMatch": "0",
                "fields": "generation,crc32c",
            },
            headers={"Content-Type": self._type},
            data=self._body,
        )


_Upload = _Whole | gcs_transfer.Upload


def _stored(name: str, resource: Mapping[str, Any]) -> Stored:
    metadata = dict(resource.get("metadata") or {})
    metadata.pop(NONCE, None)
    return Stored(name, int(resource.get("size", 0)), metadata, int(resource["generation"]))
