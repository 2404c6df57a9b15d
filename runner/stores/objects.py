"""The interface of the stores that a job uses, and the function that opens a store."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..protocol.directory_urls import directory_of
from .directory import DirectoryObjects, Listing, Stored


class Objects(Protocol):
    """A store as a job uses it; `DirectoryObjects` documents the methods.

    A missing object raises ``KeyError``, any other failure ``OSError``.
    """

    def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        consume: bool = False,
    ) -> bool: ...

    def get(
        self, name: str, start: int | None = None, stop: int | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        """Return the content, and the metadata if they cost no request; `stat` always has them."""
        ...

    def path(self, name: str) -> Path | None: ...

    def fetch(self, name: str, path: Path, size: int = 0) -> None: ...

    def stat(self, name: str) -> Stored: ...

    def exists(self, name: str) -> bool: ...

    def list(self, prefix: str) -> Listing: ...

    def look_up(self, names: Iterable[str]) -> Listing: ...

    def delete(self, names: Iterable[str]) -> None: ...


def open_store(url: str) -> Objects:
    """Open the store of a ``file://``, ``shared://``, or ``gs://`` URL.

    Raises:
        ValueError: The URL has another scheme.
        OSError: A library that the store needs isn't installed.
    """
    if directory_of(url) is not None:
        return DirectoryObjects.from_url(url)
    if url.startswith("gs://"):
        gcs: Any = importlib.import_module(".gcs", __package__)
        store: Objects = gcs.GcsObjects(url)
        return store
    raise ValueError(f"this runner doesn't support the store {url!r}")
