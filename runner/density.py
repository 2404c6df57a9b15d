"""How densely a warm parent's memory is laid out: its forks copy it by pages.

A job writes to some thousand objects, if only to count references to them.
They lie wherever there was room when they were made, a few on each page.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

__all__ = ["draw_together", "fill_holes", "seen"]

PAGE = 4096
STEP, LARGEST = 16, 512
"""Python's own allocator has pools for each multiple of 16 bytes, up to 512."""

LARGE = 16 * 1024
MOST, MOST_LARGE = 1 << 18, 1 << 20
"""So many bytes of one size, or of all that are larger, are spent on it at most."""

_kept: list[Any] = []  # what is let go leaves holes, which are what is filled first


@contextmanager
def seen(codes: set[CodeType]) -> Generator[None]:
    """Note in *codes* which code is run."""
    sys.setprofile(lambda frame, event, argument: codes.add(frame.f_code))
    try:
        yield
    finally:
        sys.setprofile(None)


def draw_together(codes: set[CodeType]) -> None:
    """Lay *codes* side by side: Python counts in the code it runs."""
    copies: dict[CodeType, CodeType] = {}

    def copy(code: CodeType) -> CodeType:
        if code not in copies:
            inner = [copy(one) if isinstance(one, CodeType) else one for one in code.co_consts]
            copies[code] = code.replace(co_consts=tuple(inner))
        return copies[code]

    for function in [one for one in gc.get_objects() if isinstance(one, FunctionType)]:
        if function.__code__ in codes:
            _kept.append(function.__code__)
            function.__code__ = copy(function.__code__)


def fill_holes() -> None:
    """Fill the holes between objects, so that new ones lie side by side."""
    for size in range(3 * STEP, LARGEST + 1, STEP):
        length = size - sys.getsizeof(b"")
        made: list[bytes] = []
        row, last = 0, 0
        while row < PAGE // size and len(made) * size < MOST:
            made.append(bytes(length))
            row = row + 1 if id(made[-1]) == last + size else 0
            last = id(made[-1])
        for _ in range(row):
            made.pop()  # what is let go last is filled first: the lowest of them
        _kept.append(made)
    _fill_large_holes()


def _fill_large_holes() -> None:
    """The same for what is larger, or not Python's: the C library's holes below its last piece."""
    malloc = ctypes.CDLL(None).malloc
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    end = max(malloc(LARGE) or 0, malloc(LARGE) or 0)
    left = MOST_LARGE
    for size in (*range(LARGE, 1024, -512), *range(1024, STEP, -STEP)):
        while left > 0:
            left -= size
            if (malloc(size) or end) >= end:
                break
