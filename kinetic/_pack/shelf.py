"""Keeps the archives that were made, so that an unchanged tree is not packed again.

``{fingerprint}.tree`` names the archive of a tree, ``{digest}.zip`` is one.
Both appear whole, by a rename, so any number of processes may work here at
once. Nothing here is ever needed: what is damaged, missing or cannot be
written costs one more packing.

An archive is sealed: its time of modification says which content it has.
Whatever writes to it later breaks the seal, and it is not used again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from absl import logging

from kinetic._runner.private import make_folder

__all__ = ["FULL", "Kept", "Shelf"]

MAX_AGE = 14 * 24 * 3600.0
"""Seconds after which an archive that nobody used goes."""

MAX_BYTES = 4 * 1024**3
"""Together the archives have at most so many bytes; the least recently used goes first."""

IN_USE = 3600.0
"""Seconds after its last use in which an archive is left alone: somebody may be uploading it."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a file system says when there is no space left for us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An archive on the shelf."""

    path: Path
    digest: str
    size: int
    files: int


class Shelf:
    """The archives under *directory*, which is private to the user."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._clock = clock

    def find(self, fingerprint: str) -> Kept | None:
        """The archive of a tree, if it is there and whole."""
        note = self._note(fingerprint)
        try:
            facts = json.loads(note.read_bytes())
            digest, size, files = str(facts["digest"]), int(facts["size"]), int(facts["files"])
            path = self._directory / f"{digest}.zip"
            if not _is_sealed(path, digest, size):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        with contextlib.suppress(OSError):  # on a read-only disk it cannot be marked as used
            os.utime(note)
        return Kept(path=path, digest=digest, size=size, files=files)

    def draft(self) -> Path:
        """A new, empty, private file for an archive; here, or where temporary files go.

        Raises:
            OSError: No file can be made anywhere.
        """
        try:
            make_folder(self._directory)
            return _new_file(self._directory)
        except OSError as exc:
            if exc.errno in FULL:
                raise
            logging.warning(
                "Archives are not kept, every submission packs again: %s cannot be written (%s).",
                self._directory,
                exc.strerror,
            )
            return _new_file(Path(tempfile.mkdtemp(prefix="kinetic-pack-")))

    def put(self, draft: Path, *, digest: str, size: int, files: int, fingerprint: str) -> Kept:
        """Keep a finished draft, as the archive of *fingerprint* unless that is empty.

        Raises:
            OSError: It cannot be moved.
        """
        if draft.parent != self._directory:
            return Kept(path=draft, digest=digest, size=size, files=files)
        seal = _seal(digest)
        os.utime(draft, ns=(seal, seal))
        path = self._directory / f"{digest}.zip"
        draft.replace(path)
        if fingerprint:
            self._write_note(fingerprint, {"digest": digest, "size": size, "files": files})
        self._prune(keep=path)
        return Kept(path=path, digest=digest, size=size, files=files)

    def discard(self, draft: Path) -> None:
        """Remove a draft, or an archive that is not kept; never raises."""
        with contextlib.suppress(OSError):
            draft.unlink()
        if draft.parent != self._directory:
            shutil.rmtree(draft.parent, ignore_errors=True)

    def _write_note(self, fingerprint: str, facts: dict[str, str | int]) -> None:
        with contextlib.suppress(OSError):  # without it, the next one packs again
            note = _new_file(self._directory)
            try:
                note.write_text(json.dumps(facts))
                note.replace(self._note(fingerprint))
            except OSError:
                note.unlink()

    def _note(self, fingerprint: str) -> Path:
        return self._directory / f"{fingerprint}.tree"

    def _prune(self, keep: Path) -> None:
        now = self._clock()
        used: dict[Path, float] = {}
        for note in self._listed("*.tree"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                last = note.stat().st_mtime
                archive = self._directory / f"{json.loads(note.read_bytes())['digest']}.zip"
                if now - last > MAX_AGE or not archive.exists():
                    note.unlink()
                    continue
                used[archive] = max(last, used.get(archive, 0.0))
        for leftover in self._listed("*.new"):
            with contextlib.suppress(OSError):
                # Not the time of modification: a sealed one is about to get its name.
                if now - leftover.stat().st_ctime > 24 * IN_USE:
                    leftover.unlink()
        self._drop(used, now, keep)

    def _drop(self, used: dict[Path, float], now: float, keep: Path) -> None:
        """Remove archives that are old, or too many; *used* is when each was used last."""
        total = 0
        aged: list[tuple[float, Path, int]] = []
        for archive in self._listed("*.zip"):
            with contextlib.suppress(OSError):
                status = archive.stat()
                # When it was put here; without a note nothing else is known.
                aged.append((used.get(archive, status.st_ctime), archive, status.st_size))
                total += status.st_size
        for last, archive, size in sorted(aged):
            unused = now - last
            if archive == keep or unused < IN_USE or (unused < MAX_AGE and total <= MAX_BYTES):
                continue
            with contextlib.suppress(OSError):
                archive.unlink()
                total -= size

    def _listed(self, pattern: str) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from sorted(self._directory.glob(pattern))


def _new_file(directory: Path) -> Path:
    descriptor, name = tempfile.mkstemp(suffix=".new", dir=directory)
    os.close(descriptor)
    return Path(name)


def _seal(digest: str) -> int:
    """A time in 2001 that follows from the content; nothing written today has it by chance."""
    return (1_000_000_000 + int(digest[:6], 16)) * 1_000_000_000


def _is_sealed(path: Path, digest: str, size: int) -> bool:
    status = path.stat()
    return status.st_size == size and status.st_mtime_ns == _seal(digest)
