"""Pickles inside `frames`: large buffers travel beside the pickle, not through it.

The pickler writes through a Python-level file, and the unpickler reads through
one. Python can switch threads at each of these calls, about every 64 KiB, so an
event loop keeps running while a worker thread pickles. A C pickler that writes to memory
holds the GIL until it has finished.
"""

from __future__ import annotations

import enum
import io
import mmap
import operator
import os
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, cast

import cloudpickle

from . import by_value, class_ids, exceptions
from .frames import FramesError, Sink, unpack, write_footer

_cloudpickle: Any = cloudpickle.cloudpickle

OUT_OF_BAND_BYTES = 64 * 1024
"""From this size on, a buffer becomes a frame beside the pickle; smaller ones are padding."""

ALIGNMENT = 64
"""A buffer begins at a multiple of this many bytes, because NumPy copies other arrays to compute.
"""

PYTHON = "python"
"""The field that names the version whose bytecode a container has."""

THIS_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"

ONE_READ_BYTES = 64 * 1024
"""Read a pickle up to this size in one step; a `_Reader` would take ten times as long."""

CHUNK_BYTES = 4 * 1024 * 1024
"""The most bytes that one call writes or reads."""


class OtherPythonError(ValueError):
    """The pickle has bytecode of another version of Python, which would crash this one."""

    def __init__(self, version: str) -> None:
        super().__init__(
            f"the pickle has functions or classes of Python {version}; this is Python {THIS_PYTHON}"
        )
        self.version = version


class _CountingSink:
    """A file that counts its bytes; `write` is a Python call on purpose (see the module)."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.size = 0

    def write(self, data: bytes | memoryview, /) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, CHUNK_BYTES):
            self._sink.write(view[start : start + CHUNK_BYTES])
        self.size += view.nbytes
        return view.nbytes


_FILE_NAME_POSITION = 10
"""The position of ``co_filename`` among the arguments of `types.CodeType`."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc,unused-ignore]
    """cloudpickle that collects large buffers and marks pickles that have code.

    *sink* is a file to write to.
    """

    def __init__(self, sink: Any) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self.has_code = False
        self._cells: dict[int, tuple[types.CellType, types.CellType]] = {}
        arguments: Any = {"protocol": 5, "buffer_callback": self._keep_in_band}
        super().__init__(sink, **arguments)  # pyright: ignore[reportUnknownMemberType]

    def reducer_override(self, obj: object) -> Any:
        """Return how to pickle *obj*; the C pickler asks for all types except the plainest."""
        kind = type(obj)
        if issubclass(kind, BaseException):
            return exceptions.reduce(cast("BaseException", obj))
        if kind in by_value.NAMED_REDUCERS and not by_value.is_importable(obj):
            return by_value.NAMED_REDUCERS[kind](obj)
        if issubclass(kind, enum.Enum) and kind.__reduce_ex__ is enum.Enum.__reduce_ex__:
            member = cast("enum.Enum", obj)
            # By its value, as pickle does it, a member with a value such as a lambda isn't found.
            if kind.__members__.get(member.name) is member:
                return operator.getitem, (kind, member.name)
        if kind is types.CodeType:
            # cloudpickle 3.1.3 and later leaves out the name of the file.
            reduced: Any = self.dispatch_table[types.CodeType](obj)
            make, args = reduced
            before, after = args[:_FILE_NAME_POSITION], args[_FILE_NAME_POSITION + 1 :]
            return make, (*before, self._file_name(cast("types.CodeType", obj)), *after)
        if kind in by_value.REDUCERS:
            return by_value.REDUCERS[kind](obj)
        is_definition = issubclass(kind, type) or kind is types.FunctionType
        has_other_name = is_definition and not by_value.is_importable(obj)
        if has_other_name and (found := by_value.reduce_importable(obj)) is not None:
            return found
        if issubclass(kind, type):
            if not _cloudpickle._should_pickle_by_reference(obj):
                class_ids.assign(cast("type", obj))
            return self._reduce_class(cast("type", obj), super().reducer_override(obj))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        if kind is types.FunctionType:
            return super().reducer_override(obj)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if kind.__name__ == "ValidateCallWrapper" and kind.__module__.startswith("pydantic."):
            return by_value.reduce_validated(obj)
        return by_value.reduce_marker(obj) or NotImplemented

    @staticmethod
    def _reduce_class(defined: type, reduced: Any) -> Any:
        """Complete cloudpickle's form of a class, if the class is pickled by value."""
        if reduced is NotImplemented or len(reduced) < 6:
            return reduced
        return by_value.reduce_class(defined, by_value.with_annotations(defined, reduced))

    def _file_name(self, code: types.CodeType) -> Any:
        """Return the file name to pickle with *code*."""
        # A new string: sharing one with other code would make the digest depend on interning.
        return "".join(code.co_filename)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        """Reduce a function by value, as cloudpickle does, and note that the pickle has code.

        Functions that share a variable, by ``nonlocal``, share it also after unpickling.
        """
        self.has_code = True
        func = by_value.with_text_annotations(func)
        reduced: Any = super()._dynamic_function_reduce(func)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        make, (code, namespace, name, defaults, _), (attributes, state), *rest = reduced
        by_value.add_submodules(func, state)
        # cloudpickle gives each function new cells, and then copies the values into them.
        cells = func.__closure__ and tuple(self._empty_cell(cell) for cell in func.__closure__)
        return make, (code, namespace, name, defaults, cells), (attributes, state), *rest

    def _empty_cell(self, cell: types.CellType) -> types.CellType:
        """Return the empty cell that stands for *cell* in this pickle; the state fills it."""
        _, empty = self._cells.setdefault(id(cell), (cell, types.CellType()))  # keeps both alive
        return empty

    def _keep_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether *buffer* goes into the pickle; otherwise, collect it as a frame."""
        with memoryview(buffer) as view:
            if view.nbytes < OUT_OF_BAND_BYTES or not view.contiguous:
                return True
        self.buffers.append(buffer)
        return False


def dump(
    value: Any,
    sink: Sink,
    *,
    pickler: Callable[[Any], Pickler] = Pickler,
    fields: Mapping[str, Any] | None = None,
) -> int:
    """Write *value* to *sink* as one container and return the number of bytes."""
    counting = _CountingSink(sink)
    pickling: Any = pickler(counting)
    pickling.dump(value)
    sizes = [counting.size]
    for buffer in pickling.buffers:
        if padding := -counting.size % ALIGNMENT:
            sizes.append(counting.write(bytes(padding)))
        with buffer.raw() as view:
            counting.write(view)
            sizes.append(view.nbytes)
    all_fields = {**(fields or {}), **({PYTHON: THIS_PYTHON} if pickling.has_code else {})}
    return counting.size + write_footer(sink, sizes, all_fields)


def dumps(
    value: Any,
    *,
    pickler: Callable[[Any], Pickler] = Pickler,
    fields: Mapping[str, Any] | None = None,
) -> bytes:
    """Pickle *value* as `dump` does, and return the bytes."""
    sink = io.BytesIO()
    dump(value, sink, pickler=pickler, fields=fields)
    return sink.getvalue()


class _Reader(io.RawIOBase):
    """A file over a view; its reads are Python calls on purpose (see the module)."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        size = min(len(buffer), self._view.nbytes - self._position, CHUNK_BYTES)
        buffer[:size] = self._view[self._position : self._position + size]
        self._position += size
        return size


_PACKAGE = __name__.removesuffix(".protocol.pickles")


class Unpickler(pickle.Unpickler):
    """An unpickler that finds the runner's package by its name in a client and in a job."""

    def find_class(self, module: str, name: str, /) -> Any:
        for prefix in ("kinetic._runner.", "kinetic_runner."):
            if module.startswith(prefix):
                module = f"{_PACKAGE}.{module.removeprefix(prefix)}"
        return super().find_class(module, name)


def bare_pickle(data: bytes) -> bytes | None:
    """Return the pickle in a container if `pickle.loads` alone reads it as `load` does."""
    try:
        content = unpack(data)
    except FramesError:
        return None
    if len(content.frames) != 1 or PYTHON in content.fields:
        return None
    pickled = bytes(content.frames[0])
    return None if len(pickled) > ONE_READ_BYTES or b"kinetic" in pickled else pickled


def load(
    data: bytes | bytearray | memoryview, *, unpickler: Callable[..., Unpickler] = Unpickler
) -> Any:
    """Return the value in a container; its arrays are writable.

    Raises:
        FramesError: The container is damaged.
        OtherPythonError: The value has bytecode of another version.
        Exception: A class of the pickle failed while it was rebuilt.
    """
    content = unpack(data)
    if len(content.frames) > 1 and content.frames[0].readonly:
        content = unpack(bytearray(data))  # arrays share this memory and must be writable
    if not content.frames:
        raise FramesError("the container holds no pickle")
    if (version := content.fields.get(PYTHON, THIS_PYTHON)) != THIS_PYTHON:
        raise OtherPythonError(version)
    view = content.frames[0]
    buffers = [frame for frame in content.frames[1:] if frame.nbytes >= OUT_OF_BAND_BYTES]
    if view.nbytes > ONE_READ_BYTES:
        reader: Any = io.BufferedReader(_Reader(view), buffer_size=256 * 1024)
        return unpickler(reader, buffers=buffers).load()
    pickled = bytes(view)
    if unpickler is Unpickler and b"kinetic" not in pickled:
        # `pickle.loads` writes to fewer of the memory pages that a fork shares.
        return pickle.loads(pickled, buffers=buffers)
    return unpickler(io.BytesIO(pickled), buffers=buffers).load()


def load_file(path: str | os.PathLike[str]) -> Any:
    """Load a container from a file; the system reads a buffer when you access it."""
    with open(path, "rb") as file:
        # The mapping is private: writes to it don't change the file.
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return load(mapped)
