"""The log of a build, read while it is written."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection
from urllib.parse import quote

from kinetic.aio.images._http import Http
from kinetic.errors import AuthError

__all__ = ["BuildLog", "failing_lines"]

KEPT = 1000
"""Lines that are kept for telling what failed."""

TOLD = 20
LONGEST = 400
_STEP = re.compile(r"Step #(\d+)(?: - \"[^\"]*\")?: ?")


class BuildLog:
    """The object ``{folder}log-{id}.txt`` of a bucket, which Cloud Build goes on writing.

    *server* is the address of the storage API.
    """

    def __init__(self, http: Http, server: str, bucket: str, name: str) -> None:
        self._http = http
        self._url = f"{server}/storage/v1/b/{quote(bucket, safe='')}/o/{quote(name, safe='')}"
        self._read = 0
        self._rest = b""
        self.lines: deque[str] = deque(maxlen=KEPT)

    async def more(self, *, last: bool = False) -> list[str]:
        """The lines that have come since, without their newlines.

        *last* says that nothing more will come: an unfinished line is one.

        Raises:
            AuthError: It may not be read, or there are no credentials.
            Unavailable: The server does not answer.
        """
        headers = {"Range": f"bytes={self._read}-", "Accept-Encoding": "identity"}
        answer = await self._http.ask("GET", f"{self._url}?alt=media", headers)
        if answer.status in (401, 403):
            raise AuthError(
                f"it was refused ({answer.status}): you need storage.objects.get on the bucket "
                "of builds, which roles/storage.objectAdmin has"
            )
        body = answer.body if answer.status in (200, 206) else b""
        if answer.status == 200:  # it does not know ranges
            body = body[self._read :]
        self._read += len(body)
        *whole, self._rest = (self._rest + body).split(b"\n")
        if last and self._rest:
            whole, self._rest = [*whole, self._rest], b""
        # A progress bar ends its pieces by a carriage return: the last one counts.
        lines = [line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2] for line in whole]
        self.lines += lines
        return lines


def failing_lines(lines: Collection[str], step: int | None, count: int = TOLD) -> list[str]:
    """The last lines of step number *step*, or of the whole log where lines name no step."""
    named = [(_STEP.match(line), line) for line in lines]
    of_step = [
        line[match.end() :] for match, line in named if match is not None and match[1] == str(step)
    ]
    chosen = of_step or list(lines)
    told = [line[:LONGEST] for line in chosen if line.strip()]
    return told[-count:]
