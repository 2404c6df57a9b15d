"""Compresses the files of a tree in a few threads; what comes out has the tree's order.

Small files go through in parcels, each compressed in one go. Large files are
cut into blocks that are compressed apart and still make up one stream, so one
large file keeps all threads busy and memory stays flat. What does not shrink
is stored. Where blocks begin depends on nothing but the file, so the bytes are
the same whatever the number of threads.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from kinetic._pack.tree import Entry, Stamp, stamp_of
from kinetic._pack.zipped import DEFLATED, STORED

__all__ = ["Begin", "Block", "End", "Part", "Refused", "Whole", "parts"]

T = TypeVar("T")

LARGE_BYTES = 4 * 1024 * 1024
BLOCK_BYTES = 1024 * 1024
PARCEL_BYTES = 512 * 1024
PARCEL_FILES = 64
SAMPLE_BYTES = 8 * 1024
WORTH = 0.9
"""Deflate what shrinks to this part of itself at most."""

_LEVEL = 1
_STREAM_END = b"\x03\x00"  # an empty last block
_READS = 3


@dataclass(frozen=True, slots=True)
class Whole:
    """A small file, or a directory, complete; *steady* when it was read as the scan saw it."""

    entry: Entry
    data: bytes
    method: int = STORED
    crc: int = 0
    size: int = 0
    steady: bool = True


@dataclass(frozen=True, slots=True)
class Begin:
    """A large file begins: blocks and an end follow."""

    entry: Entry
    method: int


@dataclass(frozen=True, slots=True)
class Block:
    """The next piece of a large file, compressed; *size* bytes before."""

    data: bytes
    size: int


@dataclass(frozen=True, slots=True)
class End:
    """A large file ends. It had *size* bytes, none of them read twice."""

    entry: Entry
    crc: int
    size: int
    steady: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A file that is gone or cannot be read; *steady* when that will be so next time."""

    entry: Entry
    why: str
    steady: bool


Part = Whole | Begin | Block | End | Refused


def parts(entries: Iterable[Entry]) -> Generator[Part]:
    """Read and compress *entries*, in order.

    What a file system refuses becomes `Refused`; other errors are raised. The
    threads end with the iterator.
    """
    workers = min(4, _processors())
    with ThreadPoolExecutor(workers, thread_name_prefix="kinetic-pack") as pool:
        for some in _in_order(pool, _tasks(entries), ahead=2 * workers):
            yield from some


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _in_order(
    pool: ThreadPoolExecutor, tasks: Iterable[Callable[[], T]], ahead: int
) -> Iterator[T]:
    """The results of *tasks*, at most *ahead* of them begun before they are asked for."""
    begun: deque[Future[T]] = deque()
    try:
        for task in tasks:
            begun.append(_started(pool, task))
            if len(begun) > ahead:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        for future in begun:
            future.cancel()


def _started(pool: ThreadPoolExecutor, task: Callable[[], T]) -> Future[T]:
    try:
        return pool.submit(task)
    except RuntimeError:
        # The interpreter is ending and lets no thread start; what is being submitted still goes.
        done: Future[T] = Future()
        done.set_result(task())
        return done


def _tasks(entries: Iterable[Entry]) -> Iterator[Callable[[], list[Part]]]:
    parcel: list[Entry] = []
    size = 0
    for entry in entries:
        if not entry.is_directory and entry.stamp.size > LARGE_BYTES:
            yield _Parcel(parcel)
            yield from _large(entry)
            parcel, size = [], 0
            continue
        parcel.append(entry)
        size += entry.stamp.size
        if size >= PARCEL_BYTES or len(parcel) >= PARCEL_FILES:
            yield _Parcel(parcel)
            parcel, size = [], 0
    yield _Parcel(parcel)


class _Parcel:
    """Some small files, read and compressed by one call."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries

    def __call__(self) -> list[Part]:
        return [Whole(one, b"") if one.is_directory else _small(one) for one in self._entries]


def _small(entry: Entry) -> Part:
    try:
        data, steady = _read(entry)
    except OSError as exc:
        return _refused(entry, exc)
    crc = zlib.crc32(data)
    if len(data) < 2 * SAMPLE_BYTES or _is_worth(_samples(data)):
        packed = _deflated(data, _LEVEL, zlib.Z_FINISH)
        if len(packed) < len(data):
            return Whole(entry, packed, DEFLATED, crc, len(data), steady)
    return Whole(entry, data, STORED, crc, len(data), steady)


def _refused(entry: Entry, exc: OSError) -> Refused:
    # A right to read it would come with another time of change, which the scan sees.
    return Refused(entry, exc.strerror or str(exc), isinstance(exc, PermissionError))


def _read(entry: Entry) -> tuple[bytes, bool]:
    """The content, again when it changes meanwhile, and whether it is what the scan saw."""
    data, seen = b"", entry.stamp
    for _ in range(_READS):
        descriptor, before = _opened(entry.path)
        try:
            data = _up_to(descriptor, before.size)
            seen = stamp_of(os.fstat(descriptor))
        finally:
            os.close(descriptor)
        if seen == before and len(data) == before.size:
            break
    return data, seen == entry.stamp and len(data) == entry.stamp.size


def _opened(path: str) -> tuple[int, Stamp]:
    # Whatever has taken the file's place since: no link is followed, no pipe waited for.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no longer a file")
    return descriptor, stamp_of(status)


def _up_to(descriptor: int, size: int) -> bytes:
    """At most *size* bytes: a file that grows for ever is read only as far as it was."""
    read = os.read(descriptor, size)
    if len(read) == size or not read:
        return read
    pieces = [read]
    left = size - len(read)
    while left and (piece := os.read(descriptor, left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _large(entry: Entry) -> Iterator[Callable[[], list[Part]]]:
    """The tasks of a large file; it is read here, one block ahead of the threads."""
    try:
        descriptor, before = _opened(entry.path)
    except OSError as exc:
        yield _Done([_refused(entry, exc)])
        return
    try:
        method = DEFLATED if _is_worth(_samples_of(descriptor, before.size)) else STORED
        yield _Done([Begin(entry, method)])
        crc, left = 0, before.size
        while left and (data := _up_to(descriptor, min(left, BLOCK_BYTES))):
            crc = zlib.crc32(data, crc)
            left -= len(data)
            yield _Squeeze(data) if method == DEFLATED else _Done([Block(data, len(data))])
        if method == DEFLATED:
            yield _Done([Block(_STREAM_END, 0)])
        steady = left == 0 and stamp_of(os.fstat(descriptor)) == before == entry.stamp
        yield _Done([End(entry, crc, before.size - left, steady)])
    finally:
        os.close(descriptor)


class _Done:
    """A task with nothing to do, to keep its place in the order."""

    def __init__(self, result: list[Part]) -> None:
        self._result = result

    def __call__(self) -> list[Part]:
        return self._result


class _Squeeze:
    """Compresses one block of a stream."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __call__(self) -> list[Part]:
        level = _LEVEL if _is_worth(_samples(self._data)) else 0
        return [Block(_deflated(self._data, level), len(self._data))]


def _deflated(data: bytes, level: int, end: int = zlib.Z_SYNC_FLUSH) -> bytes:
    """A piece of a deflate stream that ends on a byte and refers to nothing before it."""
    squeezing = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS, 9)
    return squeezing.compress(data) + squeezing.flush(end)


def _is_worth(sample: bytes) -> bool:
    return len(zlib.compress(sample, _LEVEL)) < WORTH * len(sample)


def _samples(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:SAMPLE_BYTES] + data[middle : middle + SAMPLE_BYTES] + data[-SAMPLE_BYTES:]


def _samples_of(descriptor: int, size: int) -> bytes:
    places = (0, size // 2, max(0, size - SAMPLE_BYTES))
    return b"".join(os.pread(descriptor, SAMPLE_BYTES, place) for place in places)
