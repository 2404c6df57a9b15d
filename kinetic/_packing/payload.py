"""Pickle the function and its arguments; each pickle has a digest.

An error names the part that can't be pickled. If a module of the project has such a part, such as
a lock, the job imports the module from the archive instead. A warning reports that, because the job
then doesn't get values that were changed in memory.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from absl import logging

from kinetic import configuration
from kinetic._messages import amount
from kinetic._packing import culprit, discover, tree
from kinetic._packing.culprit import Part
from kinetic._packing.discover import Project
from kinetic._packing.pickler import (
    CallPickler,
    Fate,
    Fates,
    importable_there,
    refuse_hidden,
)
from kinetic._packing.pickler import (
    DataTable as DataTable,
)
from kinetic._runner.protocol import frames, pickles
from kinetic._runner.protocol.spool import Spool, Stored
from kinetic._tracebacks import without_own_frames
from kinetic.errors import KineticError, PackError

MEMORY_BYTES = 1024 * 1024
"""Pickles above this size are written to a file."""


class SpoolError(Exception):
    """Writing the spool file failed, not the pickling."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Counter:
    """Count bytes and discard them."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: bytes | memoryview, /) -> int:
        size = memoryview(data).nbytes
        self.size += size
        return size


class _Spool(Spool):
    """A spool whose failures raise `SpoolError`, so that they aren't taken for pickling errors."""

    def __init__(self, directory: Path | None) -> None:
        path = None if directory is None else directory / f"{os.urandom(8).hex()}.pkl"
        super().__init__(path, MEMORY_BYTES)

    def write(self, data: bytes | memoryview, /) -> int:
        try:
            return super().write(data)
        except OSError as exc:
            raise SpoolError(exc) from exc

    def finish(self) -> Stored:
        try:
            return super().finish()
        except OSError as exc:
            raise SpoolError(exc) from exc


PLAIN = frozenset({type(None), bool, int, float})
TEXT = frozenset({str, bytes})
LONGEST, MOST = 4096, 64
"""Maximum characters of a text, and values in a call; pickling these blocks the event loop."""


def plain_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
    """Pickle ``(args, kwargs)`` into a container; return None if they aren't plain and small.

    Plain values are numbers and short texts, alone or in lists, tuples, and dicts.
    `dump_arguments` returns the same bytes for them, but needs a thread and a spool file.
    """
    if len(args) == 1 and not kwargs and type(args[0]) in PLAIN and _is_small(args[0]):
        return _packed((args, kwargs))
    left = [MOST]
    if _are_plain(args, left) and _are_plain(kwargs, left) and _are_plain(kwargs.values(), left):
        return _packed((args, kwargs))
    return None


def _packed(call: Any) -> bytes:
    return frames.pack([pickle.dumps(call, protocol=5)])


def _are_plain(values: Iterable[object], left: list[int], depth: int = 4) -> bool:
    for one in values:
        left[0] -= 1
        if left[0] < 0:
            return False
        kind, value = type(one), cast("Any", one)  # `__class__` may name another type
        if kind in PLAIN:
            if not _is_small(value):
                return False
        elif kind in TEXT:
            if len(value) > LONGEST:
                return False
        elif depth == 0:
            return False
        elif kind is list or kind is tuple:
            if not _are_plain(value, left, depth - 1):
                return False
        elif kind is dict:
            inside = (*value, *value.values())
            if not _are_plain(inside, left, depth - 1):
                return False
        else:
            return False
    return True


def _is_small(number: object) -> bool:
    return type(number) is not int or -(1 << 63) <= number < 1 << 63


class Binding:
    """The parameters of a function; a function without a readable signature accepts anything."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._signature: inspect.Signature | None
        try:  # the wrapper is called, not the function it wraps
            self._signature = signature_of(function, follow_wrapped=False)
        except Exception:  # builtins may have none, and __signature__ may be anything
            self._signature = None
        self._known: dict[tuple[Any, ...], str] = {}

    @property
    def positional(self) -> list[str]:
        """The names of the positional parameters."""
        parameters = self._signature.parameters.values() if self._signature is not None else ()
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [one.name for one in parameters if one.kind in by_place]

    def takes(self, name: str) -> bool:
        """Return whether the function takes a keyword argument of this name."""
        if self._signature is None or name in self._signature.parameters:
            return True
        kinds = [one.kind for one in self._signature.parameters.values()]
        return inspect.Parameter.VAR_KEYWORD in kinds

    def misfit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return why the function can't be called with these arguments; empty if it can.

        Calls of one shape, such as those of a batch, are checked once.
        """
        shape = (len(args), *kwargs)
        if (found := self._known.get(shape)) is None:
            found = self._known[shape] = self._bind(args, kwargs)
        return found

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if self._signature is None:
            return ""
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            return f"{self._signature_text()}: {exc}"
        return ""

    def _signature_text(self) -> str:
        name: str = getattr(self._function, "__name__", type(self._function).__name__)
        try:
            shown = str(self._signature)
        except Exception:  # the repr of a default is user code
            shown = ""
        return f"{name}{shown}" if 0 < len(shown) <= 200 else f"{name}()"


def signature_of(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature:
    """Return the signature of *function*, with annotations as text where Python has them lazily.

    Raises:
        ValueError, TypeError: *function* has no signature.
    """
    if sys.version_info >= (3, 14):  # computing annotations may fail
        from annotationlib import Format

        return inspect.signature(
            function, follow_wrapped=follow_wrapped, annotation_format=Format.STRING
        )
    return inspect.signature(function, follow_wrapped=follow_wrapped)


FUNCTION_BYTES = 1_000_000
"""Above this size, a warning names what the function captures."""

SIZE_VARIABLE = "KINETIC_PAYLOAD_SIZE_WARN_MB"
NOTABLE_BYTES = 100_000
"""A part below this size is not named in a warning."""


def dump_function(
    function: Callable[..., Any],
    project: Project,
    table: DataTable,
    spool: Path | None = None,
) -> Stored:
    """Pickle *function* with the current values of what it captures.

    *table* gets the `Data` that the function captures. A large function goes to a file in the
    directory *spool*, if given.

    Raises:
        PackError: *function* can't be pickled; ``culprit`` names the captured value.
        DataError: *function* captures a `Data` in a set or as a key.
    """
    name = getattr(function, "__qualname__", None) or repr(function)

    def parts() -> list[Part]:
        plain = culprit.isa(function, types.FunctionType)
        return list(culprit.captured(cast("types.FunctionType", function))) if plain else whole

    whole = [Part(f"function {name!r}", function)]
    pickling = _Pickling(project, table, name, parts)
    pickled = pickling.dump(function, spool, own=_modules_of(function))
    if pickled.size > FUNCTION_BYTES:
        logging.warning(
            "The function %s is %s when pickled.%s Pass large values as arguments or as Data.",
            name,
            amount(pickled.size),
            pickling.largest(parts(), " It captures"),
        )
    return pickled


def dump_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    project: Project,
    table: DataTable,
    spool: Path,
    what: str,
    *,
    function: Callable[..., Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Stored:
    """Pickle ``(args, kwargs)``; a `Data` anywhere in them becomes its path in the job.

    *what* is the function's name, for messages; with *function*, errors call
    positional arguments by name. Content over 1 MiB goes to a file in the
    directory *spool*. Arrays are not copied on the way.

    Raises:
        PackError: An argument cannot be pickled, ``culprit`` says which and
            where in it; or there is no space for the file.
        DataError: A `Data` is in a set or is a key.
        ConfigurationError: `KINETIC_PAYLOAD_SIZE_WARN_MB` is not a number.
    """

    def parts() -> list[Part]:
        named = [*zip(_names(function, len(args)), args, strict=True)]
        named += [(repr(name), value) for name, value in kwargs.items()]
        return [Part(f"argument {name}", value) for name, value in named]

    pickling = _Pickling(project, table, what, parts)
    pickled = pickling.dump((args, kwargs), spool)
    if pickled.size > MEMORY_BYTES:
        limit = configuration.number(SIZE_VARIABLE, 50.0, environ)
        if pickled.size > limit * tree.MEGABYTE:
            logging.warning(
                "The arguments of %s are %s, more than %s=%g.%s Files travel better as Data: "
                "they are uploaded once.",
                what,
                amount(pickled.size),
                SIZE_VARIABLE,
                limit,
                pickling.largest(parts(), " Largest:"),
            )
    return pickled


def _names(function: Callable[..., Any] | None, count: int) -> list[str]:
    """Return names for the first *count* positional arguments."""
    plain = [f"number {place + 1}" for place in range(count)]
    try:
        parameters = list(signature_of(function).parameters.values()) if function else []
    except (ValueError, TypeError):
        return plain
    for place, parameter in enumerate(parameters[:count]):
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = range(count - place)
            plain[place:] = [f"{parameter.name!r}[{more}]" for more in rest]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            plain[place] = repr(parameter.name)
    return plain


def _modules_of(function: Any) -> frozenset[str]:
    """Return the modules of *function*, which the job must not import: they may submit jobs."""
    named = (function, discover.innermost(function))
    names = {"__main__", *(getattr(one, "__module__", None) for one in named)}
    return frozenset(name for name in names if isinstance(name, str))


class _Pickling:
    """Pickle one object, and explain a failure."""

    def __init__(
        self,
        project: Project,
        table: DataTable,
        what: str,
        parts: Callable[[], Sequence[Part]],
    ) -> None:
        self._project = project
        self._table = table
        self._what = what
        self._parts = parts
        self._fates = Fates(project)

    def dump(self, value: Any, spool: Path | None, own: frozenset[str] = frozenset()) -> Stored:
        while True:
            sink, uses = _Spool(spool), self._table.uses
            try:
                self._write(value, sink)
                if self._table.uses > uses:
                    refuse_hidden(self._parts(), self._what)
                return sink.finish()
            except BaseException as exc:
                sink.discard()
                if isinstance(exc, SpoolError):
                    raise _no_space(exc.cause, self._what, sink.size) from exc.cause
                if isinstance(exc, KineticError) or not isinstance(exc, Exception):
                    raise
                self._replace_module(exc, value, own)

    def _replace_module(self, exc: Exception, value: Any, own: frozenset[str]) -> None:
        """Have the job import the module whose part failed with *exc*.

        Raises:
            PackError: No module has the part, or the job can't import it.
        """
        found = culprit.find(self._parts(), self._failure, self._is_by_value, value)
        module = self._replaceable(found, own | self._project.unpicklable)
        if found is None or module is None:
            # A traceback helps only if it has a line of user code.
            exc.__traceback__ = without_own_frames(exc.__traceback__)
            raise self._pack_error(found, exc) from exc if exc.__traceback__ else None
        logging.warning(
            "The job imports %s, which can't travel with %s: %s. Values of that module that were "
            "changed in memory don't travel.",
            module,
            self._what,
            _description(found),
        )
        self._project.unpicklable.add(module)
        self._fates = Fates(self._project)

    def largest(self, parts: Iterable[Part], words: str) -> str:
        """Name the largest of *parts* in a sentence that begins with *words*."""
        sizes: list[tuple[int, str]] = []
        for part in parts:
            sink = Counter()
            try:
                self._write(part.value, sink)
            except Exception:  # this is only a hint
                continue
            if sink.size >= NOTABLE_BYTES:
                sizes.append((sink.size, part.label))
        named = [f"{label} ({amount(size)})" for size, label in sorted(sizes)[:-6:-1]]
        return f"{words} {', '.join(named)}." if named else ""

    def _write(self, value: Any, sink: _Spool | Counter, leave_out: Collection[int] = ()) -> None:
        pickler: Any = functools.partial(
            CallPickler,
            project=self._project,
            fates=self._fates,
            table=self._table,
            leave_out=leave_out,
        )
        pickles.dump(value, sink, pickler=pickler)

    def _failure(self, leave_out: Collection[int], value: Any) -> Exception | None:
        try:
            self._write(value, Counter(), leave_out)
        except Exception as exc:
            return exc
        return None

    def _is_by_value(self, module: str) -> bool:
        return module == "__main__" or self._fates.of(module) is Fate.VALUE

    def _replaceable(self, found: culprit.Culprit | None, not_these: frozenset[str]) -> str | None:
        """Return the module that defines the culprit, if the job can import it."""
        module = found.modules[-1] if found is not None and found.modules else None
        if module is None or module in not_these or not importable_there(module, self._project):
            return None
        return None if _uses_kinetic(module) else module

    def _pack_error(self, found: culprit.Culprit | None, exc: Exception) -> PackError:
        if found is None:
            return PackError(f"{exc}: {self._what} cannot be shipped")
        return PackError(
            f"{_description(found)}. So {self._what} cannot be shipped: pass the data to create "
            "it, and create it in the function.",
            culprit=found.where,
        )


def _uses_kinetic(module: str) -> bool:
    """Return whether importing *module* needs kinetic, which a job may lack."""
    for value in list(vars(sys.modules[module]).values()):
        name = value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__
        if name == "kinetic" or name.startswith("kinetic."):
            return True
    return False


def _description(found: culprit.Culprit) -> str:
    kind = type(cast("object", found.value))
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    named = f"{module}{kind.__qualname__}"
    return f"{found.where} ({named}) cannot be pickled: {found.error}"


def _no_space(cause: OSError, what: str, size: int) -> PackError:
    return PackError(
        f"{what} cannot be shipped: writing its pickle to {cause.filename or 'a temporary file'} "
        f"failed after {amount(size)}: {cause.strerror}. Free some space, or point TMPDIR "
        "to another disk."
    )
