"""CRC-32C, the checksum that Cloud Storage keeps of every object."""

from __future__ import annotations

import base64
import os
from typing import Any

import google_crc32c

__all__ = ["extended", "of", "of_file", "text"]

BLOCK = 1024 * 1024
LIBRARY: Any = google_crc32c  # it ships half of its types


def of(content: bytes) -> str:
    """The checksum of *content*, as the service writes it."""
    return text(extended(0, content))


def extended(value: int, content: bytes) -> int:
    """The checksum of something with *value*, and of *content* after it."""
    return int(LIBRARY.extend(value, content))


def of_file(file: int, start: int, stop: int, value: int = 0) -> int:
    """*value* extended by the bytes of an open file; it may end before *stop*."""
    while start < stop and (block := os.pread(file, min(BLOCK, stop - start), start)):
        value = extended(value, block)
        start += len(block)
    return value


def text(value: int) -> str:
    """As the service writes it: four bytes, the highest first, in base64."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()
