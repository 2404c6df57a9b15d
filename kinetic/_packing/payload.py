"""Pickle the function and its arguments; each pickle has a digest.

An error names the part that can't be pickled. If a module of the project has such a part, such as
a lock, the job imports the module from the archive instead. A warning reports that, because the job
then doesn't get the changes that this process made to the module's values.
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
from kinetic._messages import format_size
from kinetic._packing import culprit, discover, tree
from kinetic._packing.culprit import Part
from kinetic._packing.discover import Project
from kinetic._packing.pickler import (
    CallPickler,
    PicklingMode,
    PicklingModes,
    is_importable_in_job,
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


class ByteCounter:
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


PLAIN_TYPES = frozenset({type(None), bool, int, float})
TEXT_TYPES = frozenset({str, bytes})
MAX_CHARACTERS, MAX_VALUES = 4096, 64
"""Maximum characters of a text, and values in a call, that the event loop itself pickles."""


def pickle_plain_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
    """Pickle ``(args, kwargs)`` into a container; return None if they aren't plain and small.

    Plain values are numbers and short texts, alone or in lists, tuples, and dicts.
    `dump_arguments` returns the same bytes for them, but needs a thread and a spool file.
    """
    if len(args) == 1 and not kwargs and type(args[0]) in PLAIN_TYPES and _is_small(args[0]):
        return _pack_call((args, kwargs))
    allowance = [MAX_VALUES]
    if (
        _are_plain_values(args, allowance)
        and _are_plain_values(kwargs, allowance)
        and _are_plain_values(kwargs.values(), allowance)
    ):
        return _pack_call((args, kwargs))
    return None


def _pack_call(call: Any) -> bytes:
    return frames.pack([pickle.dumps(call, protocol=5)])


def _are_plain_values(values: Iterable[object], allowance: list[int], depth: int = 4) -> bool:
    """Return whether *values* are plain and small; count them off from *allowance*."""
    for item in values:
        allowance[0] -= 1
        if allowance[0] < 0:
            return False
        kind, value = type(item), cast("Any", item)  # `__class__` may name another type
        if kind in PLAIN_TYPES:
            if not _is_small(value):
                return False
        elif kind in TEXT_TYPES:
            if len(value) > MAX_CHARACTERS:
                return False
        elif depth == 0:
            return False
        elif kind is list or kind is tuple:
            if not _are_plain_values(value, allowance, depth - 1):
                return False
        elif kind is dict:
            keys_and_values = (*value, *value.values())
            if not _are_plain_values(keys_and_values, allowance, depth - 1):
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
        try:  # the job calls the wrapper, so the wrapper's own parameters count
            self._signature = signature_of(function, follow_wrapped=False)
        except Exception:  # builtins may have no signature, and __signature__ may be anything
            self._signature = None
        self._mismatches: dict[tuple[Any, ...], str] = {}

    @property
    def positional(self) -> list[str]:
        """The names of the positional parameters."""
        parameters = self._signature.parameters.values() if self._signature is not None else ()
        positional_kinds = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        return [parameter.name for parameter in parameters if parameter.kind in positional_kinds]

    def accepts_keyword(self, name: str) -> bool:
        """Return whether the function takes a keyword argument of this name."""
        if self._signature is None or name in self._signature.parameters:
            return True
        kinds = [parameter.kind for parameter in self._signature.parameters.values()]
        return inspect.Parameter.VAR_KEYWORD in kinds

    def find_mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return why the function can't be called with these arguments; empty if it can.

        Calls of one shape, such as those of a batch, are checked once.
        """
        shape = (len(args), *kwargs)
        if (mismatch := self._mismatches.get(shape)) is None:
            mismatch = self._mismatches[shape] = self._check(args, kwargs)
        return mismatch

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
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
            signature = str(self._signature)
        except Exception:  # the repr of a default is user code
            signature = ""
        return f"{name}{signature}" if 0 < len(signature) <= 200 else f"{name}()"


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
        is_function = culprit.is_instance(function, types.FunctionType)
        return (
            list(culprit.captured_parts(cast("types.FunctionType", function)))
            if is_function
            else whole
        )

    whole = [Part(f"function {name!r}", function)]
    pickling = _Pickling(project, table, name, parts)
    pickled = pickling.dump(function, spool, own_modules=_modules_of(function))
    if pickled.size > FUNCTION_BYTES:
        logging.warning(
            "The function %s is %s when pickled.%s Pass large values as arguments or as Data.",
            name,
            format_size(pickled.size),
            pickling.describe_largest(parts(), " It captures"),
        )
    return pickled


def dump_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    project: Project,
    table: DataTable,
    spool: Path,
    function_name: str,
    *,
    function: Callable[..., Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Stored:
    """Pickle ``(args, kwargs)``; a `Data` anywhere in them becomes its path in the job.

    *function_name* is for messages; with *function*, errors name parameters. Content over 1 MiB
    goes to a file in the directory *spool*. Arrays are not copied on the way.

    Raises:
        PackError: An argument cannot be pickled, ``culprit`` says which and
            where in it; or there is no space for the file.
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
        limit = configuration.number(SIZE_VARIABLE, 50.0, environ)
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


def _modules_of(function: Any) -> frozenset[str]:
    """Return the modules of *function*, which the job must not import: they may submit jobs."""
    candidates = (function, discover.unwrap_callable(function))
    names = {"__main__", *(getattr(candidate, "__module__", None) for candidate in candidates)}
    return frozenset(name for name in names if isinstance(name, str))


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
        self._modes = PicklingModes(project)

    def dump(
        self, value: Any, spool: Path | None, own_modules: frozenset[str] = frozenset()
    ) -> Stored:
        """Pickle *value*; the job imports modules that fail to pickle, except *own_modules*."""
        while True:
            sink, uses = _Spool(spool), self._table.uses
            try:
                self._write(value, sink)
                if self._table.uses > uses:
                    refuse_hidden(self._parts(), self._function_name)
                return sink.finish()
            except BaseException as exc:
                sink.discard()
                if isinstance(exc, SpoolError):
                    raise _spool_failure(exc.cause, self._function_name, sink.size) from exc.cause
                if isinstance(exc, KineticError) or not isinstance(exc, Exception):
                    raise
                self._replace_module(exc, value, own_modules)

    def _replace_module(self, exc: Exception, value: Any, own_modules: frozenset[str]) -> None:
        """Have the job import the module whose part failed with *exc*.

        Raises:
            PackError: No module has the part, or the job can't import it.
        """
        found = culprit.find(self._parts(), self._try_pickle, self._is_by_value, value)
        module = self._replaceable_module(found, own_modules | self._project.unpicklable)
        if found is None or module is None:
            # A traceback helps only if it has a line of user code.
            exc.__traceback__ = without_own_frames(exc.__traceback__)
            raise self._pack_error(found, exc) from exc if exc.__traceback__ else None
        logging.warning(
            "The job imports %s, which can't travel with %s: %s. Values of that module that were "
            "changed in memory don't travel.",
            module,
            self._function_name,
            _describe(found),
        )
        self._project.unpicklable.add(module)
        self._modes = PicklingModes(self._project)

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
        self, value: Any, sink: _Spool | ByteCounter, excluded_ids: Collection[int] = ()
    ) -> None:
        """Pickle *value* into *sink*, with None for the objects of *excluded_ids*."""
        pickler: Any = functools.partial(
            CallPickler,
            project=self._project,
            modes=self._modes,
            table=self._table,
            excluded_ids=excluded_ids,
        )
        pickles.dump(value, sink, pickler=pickler)

    def _try_pickle(self, excluded_ids: Collection[int], value: Any) -> Exception | None:
        try:
            self._write(value, ByteCounter(), excluded_ids)
        except Exception as exc:
            return exc
        return None

    def _is_by_value(self, module: str) -> bool:
        return module == "__main__" or self._modes.mode_of(module) is PicklingMode.VALUE

    def _replaceable_module(
        self, found: culprit.Culprit | None, excluded: frozenset[str]
    ) -> str | None:
        """Return the module that defines the culprit, if the job can import it."""
        module = found.modules[-1] if found is not None and found.modules else None
        if module is None or module in excluded or not is_importable_in_job(module, self._project):
            return None
        return None if _uses_kinetic(module) else module

    def _pack_error(self, found: culprit.Culprit | None, exc: Exception) -> PackError:
        """Return an error about the culprit *found*, or about *exc* if there is no culprit."""
        if found is None:
            return PackError(f"{exc}: {self._function_name} cannot be shipped")
        return PackError(
            f"{_describe(found)}. So {self._function_name} cannot be shipped: pass the data to "
            "create it, and create it in the function.",
            culprit=found.location,
        )


def _uses_kinetic(module: str) -> bool:
    """Return whether importing *module* needs kinetic, which a job may lack."""
    for value in list(vars(sys.modules[module]).values()):
        name = value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__
        if name == "kinetic" or name.startswith("kinetic."):
            return True
    return False


def _describe(found: culprit.Culprit) -> str:
    cls = type(cast("object", found.value))
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    type_name = f"{module}{cls.__qualname__}"
    return f"{found.location} ({type_name}) cannot be pickled: {found.error}"


def _spool_failure(cause: OSError, function_name: str, size: int) -> PackError:
    return PackError(
        f"{function_name} cannot be shipped: writing its pickle to "
        f"{cause.filename or 'a temporary file'} failed after {format_size(size)}: "
        f"{cause.strerror}. Free some space, or point TMPDIR to another disk."
    )
