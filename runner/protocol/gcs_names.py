"""Translate names of a store to names of a bucket's objects, and back.

Cloud Storage refuses a few names, and its tools can't handle some others. So this module
percent-encodes control characters, lone surrogates, a leading dot, and the percent sign. All other
characters stay: the names are readable in the console, and listing by prefix works.
"""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass
from typing import Self

SCHEME = "gs://"
MAX_NAME_BYTES = 1024
UNSAFE = re.compile("[%\x00-\x1f\x7f-\x9f\ud800-\udfff]|^\\.")
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


@dataclass(frozen=True, slots=True)
class BucketFolder:
    """A bucket, or a folder in it; ``folder`` is empty or ends with a slash."""

    bucket: str
    folder: str = ""

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Parse ``gs://bucket`` or ``gs://bucket/folder``.

        Raises:
            ValueError: *url* doesn't have this form.
        """
        bucket, _, folder = url.removeprefix(SCHEME).partition("/")
        if not url.startswith(SCHEME) or not BUCKET.fullmatch(bucket):
            raise ValueError(f"{url!r} names no bucket; write gs://BUCKET or gs://BUCKET/FOLDER")
        folder = folder.strip("/")
        return cls(bucket, f"{folder}/" if folder else "")

    @property
    def url(self) -> str:
        """The URL of this bucket or folder, without a slash at the end."""
        return f"{SCHEME}{self.bucket}/{self.folder}".rstrip("/")

    def object_name(self, name: str) -> str:
        """Return the bucket's name for the store's object *name*, or for a prefix of names.

        Raises:
            OSError: Cloud Storage allows no name of this length.
        """
        full = self.folder + UNSAFE.sub(_percent_encode, name)
        if (size := len(full.encode())) > MAX_NAME_BYTES:
            raise OSError(
                f"the name {name[:60]!r}… takes {size} bytes in {self.url}, and Cloud Storage "
                f"allows {MAX_NAME_BYTES}"
            )
        return full

    def name(self, object_name: str) -> str | None:
        """Invert `object_name`; None if the object has no name in this store."""
        relative = object_name.removeprefix(self.folder)
        if "%" not in relative:
            return relative
        try:
            name = urllib.parse.unquote_to_bytes(relative).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:  # a program wrote the object itself
            return None
        return name if UNSAFE.sub(_percent_encode, name) == relative else None


def _percent_encode(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))
