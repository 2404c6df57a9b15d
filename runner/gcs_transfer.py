"""Large contents on their way to Cloud Storage and back: in flat memory, going on where cut."""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .gcs_http import Answer, Http, Refused, Trouble, persist

__all__ = ["Upload", "checksum", "download"]

PIECE_BYTES = 16 * 1024 * 1024
"""One request of an upload; a multiple of 256 KiB, as the service asks for."""

PART_BYTES = 32 * 1024 * 1024
PARTS = 8
READ_BYTES = 1024 * 1024
DONE = re.compile(r"bytes=0-(\d+)")
RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")
DAMAGED_TRIES = 3


class Upload:
    """A file of any size, piece by piece; after a failure the service says how far it came."""

    def __init__(self, http: Http, name: str, resource: Mapping[str, Any], path: Path) -> None:
        self.tries = 0
        self._http = http
        self._what = f"write {name}"
        self._path = path
        self._size = path.stat().st_size
        self.crc32c = checksum(_of_file(path))
        self._resource = {**resource, "crc32c": self.crc32c}
        self._session = ""
        self._offset = 0
        self._doubtful = False

    def run(self) -> Answer:
        """Send it."""
        return persist(self._once, self._http.patience, progress=lambda: self._offset)

    def _once(self) -> Answer:
        self.tries += 1
        try:
            if not self._session:
                self._begin()
            answer = self._put(f"bytes */{self._size}", b"") if self._doubtful else None
            with self._path.open("rb") as file:
                while answer is None:
                    self._doubtful = True
                    answer = self._send(file)
                    self._doubtful = False
            self._session = ""
            return answer
        except Refused as refused:
            lost = refused.status in (404, 410) and self._session != ""
            if lost or refused.status in (400, 412):
                self._session = ""  # it has ended, in one way or another
            if lost:
                raise Trouble(f"{refused}; the upload starts again", passing=True) from refused
            raise

    def _begin(self) -> None:
        self._doubtful, self._offset = False, 0
        answer = self._http.once(
            self._what,
            "POST",
            self._http.upload_url,
            params={
                "uploadType": "resumable",
                "ifGenerationMatch": "0",
                "fields": "generation,crc32c",
            },
            headers={
                "Content-Type": "application/json; charset=UTF-8",
                "X-Upload-Content-Type": str(self._resource["contentType"]),
                "X-Upload-Content-Length": str(self._size),
            },
            data=json.dumps(self._resource).encode(),
        )
        self._session = answer.headers["Location"]

    def _send(self, file: Any) -> Answer | None:
        start = self._offset
        file.seek(start)
        piece = file.read(PIECE_BYTES)
        last = start + len(piece) - 1
        answer = self._put(f"bytes {start}-{last}/{self._size}", piece)
        if answer is None and self._offset <= start:
            raise Trouble(f"cannot {self._what}: Cloud Storage takes nothing of it", passing=True)
        return answer

    def _put(self, content_range: str, data: bytes) -> Answer | None:
        """The object if it is complete, else None: `_offset` says how far it is."""
        headers = {"Content-Range": content_range, "Content-Length": str(len(data))}
        answer = self._http.once(
            self._what, "PUT", self._session, headers=headers, data=data, accepted=(308,)
        )
        if answer.status != 308:
            return answer
        done = DONE.fullmatch(answer.headers.get("Range", ""))
        self._offset = int(done[1]) + 1 if done else 0
        return None


def download(http: Http, name: str, about: Mapping[str, Any], path: Path) -> None:
    """The object that *about* describes, in a new file at *path*; nothing is left of a failure.

    Raises:
        KeyError: It has been deleted or replaced meanwhile.
        FileExistsError: There is something at *path*.
        Trouble: It cannot be had.
    """
    for tries in range(1, DAMAGED_TRIES + 1):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _fill(http, name, about, file)
            told = about.get("crc32c", "")
            if about.get("contentEncoding") or told in ("", checksum(_of_file(path))):
                return
            if tries == DAMAGED_TRIES:
                raise Trouble(f"{name} arrives as something else than is kept; check the network")
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(file)
        os.unlink(path)


def _fill(http: Http, name: str, about: Mapping[str, Any], file: int) -> None:
    size = int(about.get("size", 0))
    if about.get("contentEncoding"):  # it is decoded on its way, and has no ranges then
        _Stream(http, name, about, file, 0, None).run()
        return
    if size <= PART_BYTES:
        if size:
            _Stream(http, name, about, file, 0, size).run()
        return
    os.ftruncate(file, size)
    parts = iter(range(0, size, PART_BYTES))
    turn = threading.Lock()

    def stream() -> None:
        while (start := _next(parts, turn)) is not None:
            _Stream(http, name, about, file, start, min(size, start + PART_BYTES)).run()

    with ThreadPoolExecutor(min(PARTS, -(-size // PART_BYTES)), "kinetic-fetch") as pool:
        running = [pool.submit(stream) for _ in range(min(PARTS, -(-size // PART_BYTES)))]
        for one in running:
            one.result()


def _next(parts: Iterator[int], turn: threading.Lock) -> int | None:
    with turn:
        return next(parts, None)


class _Stream:
    """Bytes *start* to *stop* of an object into their place in a file; cut, it goes on."""

    def __init__(
        self,
        http: Http,
        name: str,
        about: Mapping[str, Any],
        file: int,
        start: int,
        stop: int | None,
    ) -> None:
        self._http = http
        self._name = name
        self._url = http.url(str(about["name"]))
        self._generation = str(about["generation"])
        self._file = file
        self._offset = start
        self._stop = stop

    def run(self) -> None:
        """Read it to its end."""
        persist(self._once, self._http.patience, progress=lambda: self._offset)

    def _once(self) -> None:
        headers: dict[str, str] = {}
        if self._stop is None:
            self._offset = 0  # of what is decoded on its way no range can be asked for
        elif self._offset >= self._stop:
            return
        else:
            headers["Range"] = f"bytes={self._offset}-{self._stop - 1}"
        what = f"read {self._name}"
        params = {"alt": "media", "generation": self._generation}
        with self._http.streamed(
            what, "GET", self._url, params=params, headers=headers, accepted=(404,)
        ) as answer:
            if answer.status_code == 404:
                raise KeyError(self._name)
            begins = RANGE.match(answer.headers.get("Content-Range", "bytes 0-0/*"))
            if begins is None or int(begins[1]) != self._offset:
                raise Trouble(f"cannot {what}: another range came than asked for", passing=True)
            while chunk := answer.raw.read(READ_BYTES, decode_content=self._stop is None):
                self._take(chunk)
        if self._stop is not None and self._offset < self._stop:
            raise Trouble(f"cannot {what}: it ended early", passing=True)

    def _take(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view.nbytes:
            try:
                written = os.pwrite(self._file, view, self._offset)
            except OSError as exc:  # or it would pass for a failure of the network
                raise Trouble(f"cannot write {self._name} to the disk: {exc}") from exc
            view = view[written:]
            self._offset += written


def _of_file(path: Path) -> int:
    crc32c: Any = importlib.import_module("google_crc32c")
    value = 0
    with path.open("rb", buffering=0) as file, contextlib.closing(file):
        while chunk := file.read(READ_BYTES):
            value = crc32c.extend(value, chunk)
    return value


def checksum(value: int) -> str:
    """A CRC32C as Cloud Storage writes it."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()
