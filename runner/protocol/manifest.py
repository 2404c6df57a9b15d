"""The contents of one Data: its files by digest, and their names in the store.

This module does no I/O; client and runner share it. The client writes a manifest after all files
that it names. So a manifest in the store means that its files are in the store. A runner checks a
manifest against the Data's hash before it uses any of its entries.
"""

from __future__ import annotations

import hashlib
import json
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .frames import MALFORMED

VERSION = 1
PLAIN, EXECUTABLE = 0o644, 0o755
MAX_SEGMENT_BYTES = 220  # when quoted, because a directory store uses a segment as a file name
MAX_NAME_BYTES = 900  # Cloud Storage allows names of 1024 bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One file: *path* is relative with ``/``, *size* in bytes.

    *digest* is the hex SHA-256 of path, NUL and content.
    """

    path: str
    size: int
    executable: bool
    digest: str

    @property
    def mode(self) -> int:
        """The file's permissions in a job."""
        return EXECUTABLE if self.executable else PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of one Data in the order in which they are hashed.

    ``empty`` are the directories that hold nothing; all other directories follow
    from the paths of the files.
    """

    is_dir: bool
    entries: tuple[Entry, ...]
    empty: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(entry.size for entry in self.entries)

    def content_hash(self) -> str:
        """Return the SHA-256 over the kind and the digests of all files, in hex."""
        total = hashlib.sha256(b"dir:" if self.is_dir else b"file:")
        for entry in self.entries:
            total.update(bytes.fromhex(entry.digest))
        return total.hexdigest()

    def name(self, digest: str) -> str:
        """Return the name of the manifest's object for a content hash.

        The hash doesn't cover empty directories and executable bits. Trees that
        differ only in these share their files, but each has its own manifest.
        """
        details = [[entry.path for entry in self.entries if entry.executable], list(self.empty)]
        if details == [[], []]:
            return f"{prefix(digest)}manifest"
        return f"{prefix(digest)}manifest.{hashlib.sha256(_json(details)).hexdigest()[:16]}"

    def objects(self, digest: str) -> Iterator[tuple[Entry, str]]:
        """Yield each file with the name of its object.

        The name ends in the file's path, so a mounted bucket shows the original tree. A path
        that isn't a valid name in every store becomes a number.
        """
        for number, entry in enumerate(self.entries):
            is_usable = (
                entry.path.isprintable()  # no control characters, and no lone surrogates
                and len(entry.path.encode()) <= MAX_NAME_BYTES
                and max(map(len, urllib.parse.quote(entry.path).split("/"))) <= MAX_SEGMENT_BYTES
            )
            if is_usable:
                yield entry, f"{prefix(digest)}files/{entry.path}"
            else:
                yield entry, f"{prefix(digest)}unnamed/{number}"

    def to_bytes(self) -> bytes:
        """Return the content of the manifest's object."""
        rows = [(entry.path, entry.size, entry.mode, entry.digest) for entry in self.entries]
        kind = "dir" if self.is_dir else "file"
        return _json({"version": VERSION, "kind": kind, "empty": self.empty, "entries": rows})

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read a manifest.

        Raises:
            ValueError: *content* is damaged, of another version, or names a file outside its tree.
        """
        try:
            fields = json.loads(content)
            if fields["version"] != VERSION:
                raise ValueError(f"its version is {fields['version']}, not {VERSION}")
            entries = tuple(
                Entry(
                    _checked_path(path), int(size), bool(mode & 0o100), bytes.fromhex(digest).hex()
                )
                for path, size, mode, digest in fields["entries"]
            )
            empty = tuple(_checked_path(path) for path in fields["empty"])
            return cls(is_dir=fields["kind"] == "dir", entries=entries, empty=empty)
        except MALFORMED as exc:
            raise ValueError(f"a manifest cannot be read: {exc}") from exc


def prefix(digest: str) -> str:
    """Return the prefix of all objects of the content with this hash."""
    return f"data/{digest}/"


def file_hash(path: str) -> Any:
    """Return a SHA-256 that already includes the file's *path*; update it with the content."""
    return hashlib.sha256(path.encode(errors="surrogateescape") + b"\0")


def _checked_path(path: str) -> str:
    if "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise ValueError(f"{path!r} is not inside its tree")
    return path


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
