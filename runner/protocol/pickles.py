"""Pickles inside `frames`: large buffers travel beside the pickle, not through it.

The pickler writes through Python-level files on purpose: each write lets other
threads run, so pickling in a worker thread never holds an event loop up for
long (a C pickler that writes to memory keeps the GIL to its end). For the same
reason large plain values are pickled, and rebuilt, slice by slice.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, groupby, islice
from typing import Any, cast

import cloudpickle

from . import import_hints
from .frames import FramesError, Sink, unpack, write_footer

KINDS: frozenset[type] = frozenset({list, tuple, dict, set, frozenset, str})
"""The types, but not their subclasses, of what can be cut."""

FEW = 32
"""A container of fewer elements is never cut."""

LONG = 1024 * 1024
"""The characters from which on a string is cut."""

_SCALARS: frozenset[type] = frozenset({type(None), bool, int, float})  # no table has these
_TEXTS: frozenset[type] = frozenset({str, bytes})
_ATOMS = _SCALARS | _TEXTS
_CONTAINERS = KINDS - {str}
_FIXED: frozenset[type] = frozenset({tuple, frozenset})

# Weights, about the bytes of a pickle, with more for what a pickler's table has: 10,000 entries
# are some 3 ms.
_SCALAR, _ENTRY = 8, 48
_SLICE = 512 * 1024
_HEAVY = 1024  # a text; one that others have too would be in the slice of each
_TOGETHER = 64  # elements that are looked at in one go
_INSIDE = 128 * 1024  # of what is looked at, at one depth
_DEPTH = 20
_TOO_MUCH, _NOT_PLAIN = 2.0**60, math.inf
_OTHERS = 16  # elements that are not plain: so many, and one of so many


class _NotPlainError(Exception):
    """Something in the value has to be pickled with all the rest."""


class _TooMuchError(Exception):
    """There is more in it than should be looked at, or pickled, in one go."""


def divide(value: Any) -> list[int] | None:
    """How many elements each slice of *value* has; None if it cannot be cut.

    A negative number stands for so many elements (fewer than `FEW`) that have
    to be pickled with the rest of the world: the loop variable left over from
    the making of a list refers to one of its elements, too.

    *value* is of one of `KINDS`. Each element is looked at, in a worker thread.
    """
    kind = type(cast("object", value))
    if kind is str:
        return [LONG] * -(-len(value) // LONG)
    columns: list[Iterator[Any]] = [iter(value)]
    if kind is dict:
        columns.append(iter(value.values()))
    counts: list[int] = []
    count = elements = others = 0
    weight = 0.0
    while (together := [list(islice(column, _TOGETHER)) for column in columns])[0]:
        size = len(together[0])
        elements += size
        if (added := _weight_together(together)) <= _SLICE:
            alone = []
        else:
            alone = _one_by_one(together, merged=added == _NOT_PLAIN)
            others -= sum(number for number in alone if number < 0)
            if others > (0 if kind in _FIXED else _OTHERS + elements // _OTHERS):
                return None  # what cannot change cannot be made before what refers to it, either
        if count and (alone or weight + added > _SLICE):
            counts.append(count)
            count, weight = 0, 0.0
        if alone:
            counts += alone
        else:
            count, weight = count + size, weight + added
    return [*counts, count] if count else counts


def parts_of(value: Any, counts: Iterable[int]) -> Iterator[Any]:
    """The slices: lists of the elements, dicts for a dict, strings for a string."""
    kind = type(cast("object", value))
    if kind is str:
        place = 0
        for count in counts:
            yield value[place : place + count]
            place += count
        return
    elements: Iterator[Any] = iter(value.items() if kind is dict else value)
    for count in counts:
        part = islice(elements, abs(count))
        yield dict(part) if kind is dict else list(part)


def _weight_together(columns: list[list[Any]]) -> float:
    # Until an exception is gone, its traceback refers to what was looked at.
    try:
        return sum(_weight(column, _DEPTH) for column in columns)
    except _NotPlainError:
        return _NOT_PLAIN
    except _TooMuchError:
        return _TOO_MUCH


def _one_by_one(columns: list[list[Any]], *, merged: bool) -> list[int]:
    """The slices of a few elements of which some are not plain or, not to be *merged*, large."""
    plain = [
        all(_is_plain(column[place : place + 1]) for column in columns)
        for place in range(len(columns[0]))
    ]
    counts: list[int] = []
    for is_plain, group in groupby(plain):
        size = len(list(group))
        if is_plain:
            counts += [size] if merged else [1] * size
        else:
            counts += [-min(_OTHERS, size - start) for start in range(0, size, _OTHERS)]
    return counts


def _is_plain(one: list[Any]) -> bool:
    try:
        _weight(one, _DEPTH, slack=1)
    except (_NotPlainError, _TooMuchError):
        return False
    return True


def _weight(values: list[Any], depth: int, slack: int = 0) -> int:
    """The weight of *values*, a list whose elements are referred to by their container, by
    this list, and by *slack* lists of the caller's.
    """
    kinds = set(map(type, values))
    if kinds <= _SCALARS:
        return _SCALAR * len(values)
    if kinds <= _TEXTS and max(sizes := list(map(len, values))) < _HEAVY:
        return _ENTRY * len(values) + sum(sizes)
    if not (kinds <= _ATOMS | _CONTAINERS and depth):
        raise _NotPlainError
    heavy = [value for value in values if type(value) in _TEXTS and len(value) >= _HEAVY]
    if heavy and max(_references(heavy)) > _SOLE + slack:
        raise _NotPlainError
    containers: list[Any] = [value for value in values if type(value) in _CONTAINERS]
    if _are_shared(containers, slack):
        raise _NotPlainError
    if sum(map(len, containers)) > _INSIDE:
        raise _TooMuchError
    texts = [value for value in values if type(value) in _TEXTS]
    own = _SCALAR * len(values) + _ENTRY * (len(texts) + len(containers)) + sum(map(len, texts))
    named: Iterator[Any] = (one.values() for one in containers if _is_dict(one))
    inside: list[Any] = [*chain.from_iterable(containers), *chain.from_iterable(named)]
    return own + _weight(inside, depth - 1)


def _are_shared(containers: list[Any], slack: int) -> bool:
    """Whether others may refer to one of *containers*, or to what can change in it."""
    if not containers or max(references := _references(containers)) <= _SOLE + slack:
        return False
    return any(
        count > _SOLE + slack and not (type(one) in _FIXED and _ATOMS.issuperset(map(type, one)))
        for one, count in zip(containers, references, strict=True)
    )


def _is_dict(value: object) -> bool:
    return type(value) is dict


def _references(values: list[Any]) -> list[int]:
    return list(map(sys.getrefcount, values))


_SOLE = _references([*[[]]])[0] + 2
"""The references to what one container has, while it is in two lists here as well."""


def slotted(defined: type, reduced: Any) -> Any:
    """What cloudpickle makes of a class that goes by value, with the slots of the class."""
    slots: Any = vars(defined).get("__slots__")
    match reduced:
        case (make, (kind, name, bases, {**facts}, *more), ({**state}, later), *rest) if (
            isinstance(slots, (str, tuple, list, dict))
            and make.__name__ == "_make_skeleton_class"
            and not issubclass(defined, tuple)  # a named one may have none, and needs none
        ):
            for slot in cast("Iterable[str]", [slots] if isinstance(slots, str) else slots):
                state.pop(_mangled(slot, defined.__name__), None)  # making the class makes it
            facts["__slots__"] = slots
            return (make, (kind, name, bases, facts, *more), (state, later), *rest)
        case _:
            return reduced


def _mangled(slot: str, owner: str) -> str:
    owner = owner.lstrip("_")
    private = slot.startswith("__") and not slot.endswith("__")
    return f"_{owner}{slot}" if private and owner else slot


# asked for every object


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

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.size = 0

    def write(self, data: bytes | memoryview, /) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, CHUNK) if view.nbytes > CHUNK else (0,):
            self._sink.write(view[start : start + CHUNK] if view.nbytes > CHUNK else view)
        self.size += view.nbytes
        return view.nbytes


_FILE_NAME = 10
"""The position of ``co_filename`` among the arguments of `types.CodeType`."""


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
        if kind in import_hints.KINDS and not import_hints.is_found(obj):
            return import_hints.KINDS[kind](obj)
        if kind is types.CodeType:
            return self._code(cast("types.CodeType", obj))
        found: Any = super().reducer_override(obj)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if found is not NotImplemented and isinstance(obj, type):
            return slotted(obj, import_hints.completed(obj, found))
        return found

    def _code(self, code: types.CodeType) -> Any:
        """Reduce *code* with the name of its file, which cloudpickle 3.1.3 and later leaves out."""
        reduced: Any = self.dispatch_table[types.CodeType](code)
        make, args = reduced
        return make, (*args[:_FILE_NAME], self._file_name(code), *args[_FILE_NAME + 1 :])

    def _file_name(self, code: types.CodeType) -> Any:
        """Return what is pickled as the name of the file of *code*."""
        # A new string: sharing one with other code would make the digest depend on interning.
        return "".join(code.co_filename)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        """How cloudpickle reduces a function that goes by value."""
        self.has_code = True
        return super()._dynamic_function_reduce(import_hints.carried(func))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def _stand_in(self, obj: Any) -> _Sliced | None:
        if type(obj) is str and len(obj) < LONG:
            return None
        seen = self._seen.get(id(obj))
        if seen is None:
            seen = self._seen[id(obj)] = (obj, self._sliced(obj))  # kept: its id stays its own
        return seen[1]

    def _sliced(self, obj: Any) -> _Sliced | None:
        if type(obj) is not str and len(obj) < MANY and self._sink.size < EARLY_BYTES:
            return None
        counts = divide(obj)
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
        parts = parts_of(self._value, self._counts)
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
    sink: Sink,
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
    return counting.size + write_footer(sink, sizes, told)


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


_PACKAGE = __name__.removesuffix(".protocol.pickles")

_MOVED = {
    **dict.fromkeys(("pickles", "slices", "slotted"), "protocol.pickles"),
    "decorated": "protocol.stand_ins",
    "exceptions": "protocol.exceptions",
    "frames": "protocol.frames",
    "hints": "protocol.import_hints",
    "views": "protocol.stand_ins",
    "wire": "protocol.wire",
}
"""Where what pickles of version 0.1 name is now, below the package."""


class Unpickler(pickle.Unpickler):
    """Finds this package under the name it has here."""

    def find_class(self, module: str, name: str, /) -> Any:
        for prefix in ("kinetic._runner.", "kinetic_runner."):
            if module.startswith(prefix):
                name_here = module.removeprefix(prefix)
                module = f"{_PACKAGE}.{_MOVED.get(name_here, name_here)}"
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
    content = unpack(data)
    if len(content.frames) > 1 and content.frames[0].readonly:
        content = unpack(bytearray(data))  # arrays that share it must not be read-only
    if not content.frames:
        raise FramesError("the container holds no pickle")
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
