"""Pickle the function and its arguments; each pickle has a digest.

An error names the part that can't be pickled. A pickle also has the values of the project's modules
that the program has changed (see `changes`), because the job imports these modules.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from absl import logging

from kinetic import configuration
from kinetic._binding import signature_of
from kinetic._messages import format_size
from kinetic._packing import changes, culprit, tree
from kinetic._packing.culprit import Part
from kinetic._packing.discover import Project
from kinetic._packing.modules import Modules
from kinetic._packing.pickler import CallPickler, Changed, Started, refuse_data_as_key
from kinetic._packing.pickler import DataTable as DataTable
from kinetic._runner.protocol import frames, pickles
from kinetic._runner.protocol.spool import NO_SPACE_ERRNOS, Spool, Spooled
from kinetic._tracebacks import without_own_frames
from kinetic.errors import KineticError, PackError, StoreFull

MEMORY_BYTES = 1024 * 1024
"""Pickles above this size are written to a file."""


class ByteCounter:
    """Count bytes and discard them."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: bytes | memoryview, /) -> int:
        size = memoryview(data).nbytes
        self.size += size
        return size


class _NotPlainError(Exception):
    """The call has an object that isn't built-in, or the call's pickle isn't small."""


class _PlainPickler(pickle.Pickler):
    """Pickle only built-in values; for others, the C pickler calls `reducer_override`."""

    def reducer_override(self, obj: object) -> Any:
        raise _NotPlainError


class _OneFrame:
    """Take a pickle that the pickler writes at once, because it has less than 64 KiB."""

    content = b""

    def write(self, data: bytes | memoryview, /) -> int:
        if self.content:
            raise _NotPlainError
        self.content = bytes(data)
        return len(self.content)


PLAIN_BYTES = 64 * 1024
"""Maximum size of a plain pickle; the C pickler writes more in several pieces."""

_NUMBERS = frozenset({bool, int, float, type(None)})


def pickle_plain_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
    """Pickle small values of built-in types, without the spool that `dump_arguments` needs.

    Return the container of ``(args, kwargs)``, or None if a value is large or of another type.
    """
    if not kwargs and _NUMBERS.issuperset(map(type, args)):  # this needs no pickler of our own
        content = pickle.dumps((args, kwargs), protocol=5)
        return frames.pack([content]) if len(content) <= PLAIN_BYTES else None
    sink = _OneFrame()
    try:
        _PlainPickler(sink, protocol=5).dump((args, kwargs))
    except (_NotPlainError, RuntimeError):  # nested too deeply, or changed by another thread
        return None
    return frames.pack([sink.content])


FUNCTION_BYTES = 1_000_000
"""Above this size, a warning names what the function captures."""

SIZE_VARIABLE = "KINETIC_PAYLOAD_SIZE_WARN_MB"
NOTABLE_BYTES = 100_000
"""A part below this size is not named in a warning."""


def dump_function(
    function: Callable[..., Any],
    project: Project,
    table: DataTable,
    spool: Callable[[], Path] | None = None,
) -> Spooled:
    """Pickle *function* with the current values of what it captures.

    The pickle has the arguments of this program, because the function, or a module that the job
    imports, may parse them. *table* gets the `Data` that the function captures. A large function
    goes to a file in the directory that *spool* makes, if given.

    Raises:
        PackError: *function* can't be pickled; ``culprit`` names the captured value.
        DataError: *function* captures a `Data` in a set or as a key.
    """
    name = getattr(function, "__qualname__", None) or repr(function)

    def parts() -> list[Part]:
        if culprit.is_instance(function, types.FunctionType):
            return list(culprit.captured_parts(cast("types.FunctionType", function)))
        return [Part(f"function {name!r}", function)]

    pickling = _Pickling(project, table, name, parts)
    pickled = pickling.dump(function, spool, _program_arguments())
    if pickled.size > FUNCTION_BYTES:
        logging.warning(
            "The function %s is %s when pickled.%s Pass large values as arguments or as Data.",
            name,
            format_size(pickled.size),
            pickling.describe_largest(parts(), " It captures"),
        )
    return pickled


def _program_arguments() -> list[str]:
    # An embedded Python may have none. Those of a notebook's kernel aren't the user's.
    program, *arguments = map(str, getattr(sys, "argv", None) or [""])
    return [] if program.endswith("kernel_launcher.py") else arguments


def dump_init(
    init: Mapping[str, Callable[[], Any]],
    project: Project,
    table: DataTable,
    spool: Callable[[], Path] | None,
    function_name: str,
) -> Spooled:
    """Pickle the functions of ``init``, by the names of their arguments, like a function.

    Raises:
        PackError: A function can't be pickled; ``culprit`` names it and the captured value.
        DataError: A function captures a `Data` in a set or as a key.
    """

    def parts() -> list[Part]:
        return [Part(f"init[{name!r}]", make) for name, make in init.items()]

    return _Pickling(project, table, function_name, parts).dump(dict(init), spool)


def dump_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    project: Project,
    table: DataTable,
    spool: Callable[[], Path] | None,
    function_name: str,
    *,
    function: Callable[..., Any] | None = None,
) -> Spooled:
    """Pickle ``(args, kwargs)``; a `Data` anywhere in them becomes its path in the job.

    *function_name* is for messages; with *function*, errors name parameters. Content over 1 MiB
    goes to a file in the directory that *spool* makes, if given. Arrays are not copied on the way.

    Raises:
        PackError: An argument can't be pickled; ``culprit`` names the argument and the part of it.
            Or there is no space for the file.
        DataError: A `Data` is in a set or is a key.
        ConfigurationError: `KINETIC_PAYLOAD_SIZE_WARN_MB` is not a number.
    """

    def parts() -> list[Part]:
        named = [*zip(_argument_names(function, len(args)), args, strict=True)]
        named += [(repr(name), value) for name, value in kwargs.items()]
        return [Part(f"argument {name}", value) for name, value in named]

    pickling = _Pickling(project, table, function_name, parts)
    pickled = pickling.dump((args, kwargs), spool)
    if pickled.size > MEMORY_BYTES:
        limit = configuration.number(SIZE_VARIABLE, 50.0, os.environ)
        if pickled.size > limit * tree.MEGABYTE:
            logging.warning(
                "The arguments of %s are %s, more than %s=%g.%s Files travel better as Data: "
                "they are uploaded once.",
                function_name,
                format_size(pickled.size),
                SIZE_VARIABLE,
                limit,
                pickling.describe_largest(parts(), " Largest:"),
            )
    return pickled


def _argument_names(function: Callable[..., Any] | None, count: int) -> list[str]:
    """Return names for the first *count* positional arguments."""
    names = [f"number {index + 1}" for index in range(count)]
    try:
        parameters = list(signature_of(function).parameters.values()) if function else []
    except (ValueError, TypeError):
        return names
    for index, parameter in enumerate(parameters[:count]):
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = range(count - index)
            names[index:] = [f"{parameter.name!r}[{offset}]" for offset in rest]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names[index] = repr(parameter.name)
    return names


class _Pickling:
    """Pickle one object, and explain a failure."""

    def __init__(
        self,
        project: Project,
        table: DataTable,
        function_name: str,
        parts: Callable[[], Sequence[Part]],
    ) -> None:
        self._project = project
        self._table = table
        self._function_name = function_name
        self._parts = parts
        self._modules = Modules(project)

    def dump(
        self, value: Any, spool: Callable[[], Path] | None, arguments: Sequence[str] = ()
    ) -> Spooled:
        """Pickle *value*, the *arguments* of this program, and what the project's modules need."""

        def started(value: Any) -> Any:
            return Started(value, arguments) if arguments else value

        locate = None if spool is None else lambda: spool() / f"{os.urandom(8).hex()}.pkl"
        sink, uses, used = Spool(locate, MEMORY_BYTES), self._table.uses, list[Any]()
        try:
            self._write(started(value), sink, used=used)
            if any(needed := self._find_changes(used)):
                sink.discard()
                sink = Spool(locate, MEMORY_BYTES)
                self._write(started(Changed(value, *needed)), sink)
            if self._table.uses > uses:
                refuse_data_as_key(self._parts(), self._function_name)
            return sink.finish()
        except BaseException as exc:
            sink.discard()
            if isinstance(exc, KineticError) or not isinstance(exc, Exception):
                raise
            found = culprit.find(self._parts(), self._try_pickle, self._modules.is_by_value, value)
            # A traceback helps only if it has a line of user code.
            exc.__traceback__ = without_own_frames(exc.__traceback__)
            raise self._pack_error(found, exc, sink.path) from exc if exc.__traceback__ else None

    def _find_changes(self, used: list[Any]) -> changes.Changes:
        """Find changes for the objects *used*; for classes alone, once per submission."""
        known, key = self._project.changes, tuple(map(id, used))
        _, found = known.get(key, (used, None))
        if found is None:
            found = changes.find(used, self._modules)
            # So all items of a batch see the same values, and a search doesn't slow each item.
            if all(isinstance(item, type) for item in used):
                known[key] = (used, found)  # keeps *used* alive, so Python reuses no ID
        return cast("changes.Changes", found)

    def describe_largest(self, parts: Iterable[Part], prefix: str) -> str:
        """Name the largest of *parts* in a sentence that begins with *prefix*."""
        sizes: list[tuple[int, str]] = []
        for part in parts:
            sink = ByteCounter()
            try:
                self._write(part.value, sink)
            except Exception:  # this is only a hint
                continue
            if sink.size >= NOTABLE_BYTES:
                sizes.append((sink.size, part.label))
        descriptions = [f"{label} ({format_size(size)})" for size, label in sorted(sizes)[:-6:-1]]
        return f"{prefix} {', '.join(descriptions)}." if descriptions else ""

    def _write(
        self,
        value: Any,
        sink: Spool | ByteCounter,
        excluded_ids: Collection[int] = (),
        used: list[Any] | None = None,
    ) -> None:
        """Pickle *value* into *sink*, with None for the objects of *excluded_ids*."""
        pickler: Any = functools.partial(
            CallPickler,
            project=self._project,
            modules=self._modules,
            table=self._table,
            excluded_ids=excluded_ids,
            used=used,
        )
        pickles.dump(value, sink, pickler=pickler)

    def _try_pickle(self, excluded_ids: Collection[int], value: Any) -> Exception | None:
        try:
            self._write(value, ByteCounter(), excluded_ids)
        except Exception as exc:
            return exc
        return None

    def _pack_error(
        self, found: culprit.Culprit | None, exc: Exception, file: str | Path | None
    ) -> PackError:
        """Return an error about the culprit *found*, or about *exc* if there is no culprit."""
        if found is None and isinstance(exc, OSError):  # the spool file can't be written
            error = PackError(
                f"{self._function_name} cannot be shipped: writing its pickle to "
                f"{exc.filename or file or 'a temporary file'} failed: {exc.strerror}. Free some "
                "space there, or point KINETIC_HOME to another disk."
            )
            if exc.errno in NO_SPACE_ERRNOS:
                error.code = StoreFull.code
            return error
        if found is None:
            return PackError(f"{exc}: {self._function_name} cannot be shipped")
        remedy = "pass the data to create it, and create it in the function."
        if "global " in found.location:
            remedy += (
                " Or move it from the script into a module of the project: the job imports it."
            )
        cls = type(cast("object", found.value))
        module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
        return PackError(
            f"{found.location} ({module}{cls.__qualname__}) cannot be pickled: {found.error}. So "
            f"{self._function_name} cannot be shipped: {remedy}",
            culprit=found.location,
        )
