"""Pickles inside `frames`: large buffers travel beside the pickle, not through it.

The pickler writes through Python-level files on purpose: each write lets other
threads run, so pickling in a worker thread never holds an event loop up for
long (a C pickler that writes to memory keeps the GIL to its end). For the same
reason large plain values are pickled, and rebuilt, slice by slice.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import cloudpickle

from . import frames, hints, slices
from .slices import FEW, KINDS  # asked for every object
from .slotted import slotted

__all__ = [
    "OUT_OF_BAND_BYTES",
    "Gathered",
    "OtherPythonError",
    "Pickler",
    "Unpickler",
    "dump",
    "dumps",
    "load",
    "load_file",
]

OUT_OF_BAND_BYTES = 64 * 1024

PYTHON = "python"
"""The field that names the version whose bytecode a container has."""

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"

CHUNK = 4 * 1024 * 1024

MANY = 5000
"""A plain container of as many elements is pickled in slices."""

EARLY_BYTES = 512 * 1024
"""Once the pickle has so many, smaller ones are, too: together they fill the table as well."""


class OtherPythonError(ValueError):
    """The pickle has bytecode, which another version of Python does not survive."""

    def __init__(self, version: str) -> None:
        super().__init__(f"it has functions or classes of Python {version}; this is Python {HERE}")
        self.version = version


class _Counting:
    """A file that counts; its write is a Python call, which is the point."""

    def __init__(self, sink: frames.Sink) -> None:
        self._sink = sink
        self.size = 0

    def write(self, data: bytes | memoryview, /) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, CHUNK) if view.nbytes > CHUNK else (0,):
            self._sink.write(view[start : start + CHUNK] if view.nbytes > CHUNK else view)
        self.size += view.nbytes
        return view.nbytes


class Pickler(cloudpickle.Pickler):  # type: ignore[misc,unused-ignore]
    """cloudpickle that lays buffers of 64 KiB and more beside the pickle, and cuts large values.

    *sink* is a `_Counting`.
    """

    def __init__(self, sink: Any) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self.has_code = False
        self._sink = sink
        self._seen: dict[int, tuple[Any, _Sliced | None]] = {}
        self._in_band = set[int]()
        arguments: Any = {"protocol": 5, "buffer_callback": self._keep_in_band}
        super().__init__(sink, **arguments)  # pyright: ignore[reportUnknownMemberType]

    def persistent_id(self, obj: Any) -> Any:
        """What *obj* is pickled as, where it is not pickled as itself; asked for every object."""
        if type(obj) in KINDS and len(obj) >= FEW:
            return self._stand_in(obj)
        return None

    def reducer_override(self, obj: object) -> Any:
        """How to pickle *obj*; called for everything but the plainest values."""
        kind = type(obj)
        if kind in hints.KINDS and not hints.is_found(obj):
            return hints.KINDS[kind](obj)
        found: Any = super().reducer_override(obj)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if found is not NotImplemented and isinstance(obj, type):
            return slotted(obj, hints.completed(obj, found))
        return found

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        """How cloudpickle reduces a function that goes by value."""
        self.has_code = True
        return super()._dynamic_function_reduce(hints.carried(func))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def _stand_in(self, obj: Any) -> _Sliced | None:
        if type(obj) is str and len(obj) < slices.LONG:
            return None
        seen = self._seen.get(id(obj))
        if seen is None:
            seen = self._seen[id(obj)] = (obj, self._sliced(obj))  # kept: its id stays its own
        return seen[1]

    def _sliced(self, obj: Any) -> _Sliced | None:
        if type(obj) is not str and len(obj) < MANY and self._sink.size < EARLY_BYTES:
            return None
        counts = slices.divide(obj)
        return None if counts is None else _Sliced(obj, counts, self._in_band)

    def _keep_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        if id(buffer) in self._in_band:
            return True
        with memoryview(buffer) as view:
            if view.nbytes < OUT_OF_BAND_BYTES or not view.contiguous:
                return True
        self.buffers.append(buffer)
        return False


class _Sliced:
    """Stands for a large plain value in the pickle; `Gathered` is made of it."""

    def __init__(self, value: Any, counts: list[int], in_band: set[int]) -> None:
        self._value = value
        self._counts = counts
        self._in_band = in_band

    def __reduce__(self) -> tuple[Any, ...]:
        return Gathered, (type(self._value).__name__,), None, self._pickled()

    def _pickled(self) -> Iterator[Any]:
        """One slice after the other, of which the pickler would keep all.

        It is done with one when it asks for the next but one.
        """
        done: list[pickle.PickleBuffer] = []
        parts = slices.parts(self._value, self._counts)
        for count, part in zip(self._counts, parts, strict=True):
            if count < 0:
                yield part
                continue
            buffer = pickle.PickleBuffer(_pickled(part, alone=count == 1))
            self._in_band.add(id(buffer))
            done.append(buffer)
            yield buffer
            if len(done) > 1:
                done.pop(0).release()


def _pickled(part: Any, *, alone: bool) -> bytes:
    if isinstance(part, str):
        return part.encode("utf-8", "surrogatepass")
    if not alone:
        return pickle.dumps(part, 5)
    sink = io.BytesIO()  # it may be a long string
    pickling: Any = Pickler(_Counting(sink))
    pickling.dump(part)
    return sink.getvalue()


_BEGINNINGS: dict[str, Callable[[], Any]] = {
    "str": str,
    "list": list,
    "tuple": list,
    "dict": dict,
    "set": set,
    "frozenset": set,
}


class Gathered:
    """A value that is rebuilt from slices."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._value: Any = _BEGINNINGS[kind]()
        self._whole = False

    def extend(self, some: Iterable[Any]) -> None:
        """Add slices: pickled, or as they are."""
        if self._kind == "str":
            self._value = _joined(self._value, some)
            return
        value = self._value
        add = value.extend if self._kind in ("list", "tuple") else value.update
        for one in some:
            add(_unpickled(memoryview(one)) if isinstance(one, bytes) else one)

    def append(self, one: Any) -> None:
        """Add a slice."""
        self.extend([one])

    @property
    def value(self) -> Any:
        """All of it; no more can be added."""
        if not self._whole and self._kind in ("tuple", "frozenset"):
            self._value = tuple(self._value) if self._kind == "tuple" else frozenset(self._value)
        self._whole = True
        return self._value


def _joined(text: str, more: Iterable[bytes]) -> str:
    # Most of the time the string grows in place, which `join` of 100 MB takes 80 ms for.
    for one in more:
        text += str(one, "utf-8", "surrogatepass")
    return text


def dump(
    value: Any,
    sink: frames.Sink,
    *,
    pickler: type[Pickler] = Pickler,
    fields: Mapping[str, Any] | None = None,
) -> int:
    """Write *value* to *sink* as one container and return the number of bytes."""
    counting = _Counting(sink)
    pickling: Any = pickler(counting)
    pickling.dump(value)
    sizes = [counting.size]
    for buffer in pickling.buffers:
        with buffer.raw() as view:
            counting.write(view)
            sizes.append(view.nbytes)
    told = {**(fields or {}), **({PYTHON: HERE} if pickling.has_code else {})}
    return counting.size + frames.write_footer(sink, sizes, told)


def dumps(
    value: Any, *, pickler: type[Pickler] = Pickler, fields: Mapping[str, Any] | None = None
) -> bytes:
    """`dump` to memory."""
    sink = io.BytesIO()
    dump(value, sink, pickler=pickler, fields=fields)
    return sink.getvalue()


class _Reader(io.RawIOBase):
    """A view as a file whose reads are Python calls (see the module's docstring)."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        size = min(len(buffer), self._view.nbytes - self._at, CHUNK)
        buffer[:size] = self._view[self._at : self._at + size]
        self._at += size
        return size


class Unpickler(pickle.Unpickler):
    """Finds this package under the name it has here."""

    def find_class(self, module: str, name: str, /) -> Any:
        for prefix in ("kinetic._runner", "kinetic_runner"):
            if module == prefix or module.startswith(prefix + "."):
                module = (__package__ or "") + module[len(prefix) :]
        return super().find_class(module, name)

    def persistent_load(self, pid: Any, /) -> Any:
        if not isinstance(pid, Gathered):
            raise pickle.UnpicklingError(f"an unknown persistent id: {type(pid).__name__}")
        return pid.value


def load(data: bytes | bytearray | memoryview, *, unpickler: type[Unpickler] = Unpickler) -> Any:
    """The value in a container; its arrays can be written to.

    Raises:
        FramesError: The container is damaged.
        OtherPythonError: It has bytecode of another version.
        Exception: Whatever the pickled classes raise while they are rebuilt.
    """
    content = frames.unpack(data)
    if len(content.frames) > 1 and content.frames[0].readonly:
        content = frames.unpack(bytearray(data))  # arrays that share it must not be read-only
    if not content.frames:
        raise frames.FramesError("the container holds no pickle")
    if (version := content.fields.get(PYTHON, HERE)) != HERE:
        raise OtherPythonError(version)
    return _unpickled(content.frames[0], content.frames[1:], unpickler)


SMALL = 64 * 1024
"""Bytes that are read in one go: a buffer of its own takes ten times as long as they do."""


def _unpickled(
    view: memoryview,
    buffers: Iterable[memoryview] = (),
    unpickler: type[Unpickler] = Unpickler,
) -> Any:
    if view.nbytes <= SMALL:
        reader: Any = io.BytesIO(view)
    else:
        reader = io.BufferedReader(_Reader(view), buffer_size=256 * 1024)
    return unpickler(reader, buffers=buffers).load()


def load_file(path: str | os.PathLike[str]) -> Any:
    """`load` from a file, without reading the buffers that are never touched."""
    with open(path, "rb") as file:
        # A private mapping: writable, and nothing written reaches the file.
        return load(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)))
