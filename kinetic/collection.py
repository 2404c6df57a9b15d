"""The result of a collection: which unused caches and shared contents it removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Collection", "Freed"]


@dataclass(frozen=True, slots=True)
class Freed:
    """The number of removed files, and their size in bytes."""

    files: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class Collection:
    """The removed contents, by their folder: ``store/code``, ``cache/data``, ….

    ``freed`` leaves out folders from which nothing was removed.
    """

    freed: Mapping[str, Freed]

    @property
    def files(self) -> int:
        """The number of all removed files."""
        return sum(freed.files for freed in self.freed.values())

    @property
    def size(self) -> int:
        """The size of all removed files, in bytes."""
        return sum(freed.size for freed in self.freed.values())
