"""The URLs of stores in a directory.

``file://`` is a local store, of one machine. ``shared://`` is on a volume that several machines
mount at the same path.
"""

from __future__ import annotations

import urllib.parse

LOCAL, SHARED = "file://", "shared://"


def url_of(directory: str, *, shared: bool) -> str:
    """Return the URL of the store in *directory*."""
    return (SHARED if shared else LOCAL) + urllib.parse.quote(directory)


def directory_of(url: str) -> str | None:
    """Return the directory of a store; None if *url* has another scheme."""
    if not url.startswith((LOCAL, SHARED)):
        return None
    path = url.partition("://")[2]
    return urllib.parse.unquote(path) if "%" in path else path
