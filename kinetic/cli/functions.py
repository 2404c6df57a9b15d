"""Load the function of a command line, and read its arguments and inputs from text and files."""

from __future__ import annotations

import contextlib
import csv
import datetime
import importlib
import inspect
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from numbers import Number
from pathlib import Path, PurePath
from types import ModuleType, NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NewType,
    Optional,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)
from uuid import UUID

import click

from kinetic._binding import Binding
from kinetic.cli.client import UserError
from kinetic.options import settings_of


def load_function(target: str) -> Callable[..., Any]:
    """Import the file of ``FILE.py:NAME``, or the module of ``PACKAGE.MODULE:NAME``, as a module.

    Return the function NAME.

    Raises:
        click.UsageError: The file, the module, or a function of that name doesn't exist.
        UserError: The file raises an exception.
    """
    place, colon, name = target.rpartition(":")
    path = Path(place)
    is_file = path.suffix == ".py"
    is_module = all(part.isidentifier() for part in place.split("."))
    if not (colon and name.isidentifier() and (is_file or is_module)):
        raise click.UsageError(
            f"{target!r} names no function: write FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"
        )
    if not is_file:
        module = _import_module(place, None, [os.getcwd()])
    elif path.is_file():
        if "." in path.stem:
            raise click.UsageError(f"{place} can't be imported: a module's name has no dot")
        module = _import_module(*_module_of(path.resolve()))
    else:
        raise click.UsageError(f"there is no file {place}")
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            attribute
            for attribute, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        hint = f"; it has {', '.join(functions[:5])}" if functions else ""
        raise click.UsageError(f"there is no function {name!r} in {place}{hint}")
    return cast("Callable[..., Any]", function)


def _module_of(path: Path) -> tuple[str, Path, list[str]]:
    """Return the module's name, the file at *path* that has it, and the folders to import it."""
    name, folder = path.stem, path.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        name, folder = f"{folder.name}.{name}", folder.parent
    # Python puts the folder of a script first on ``sys.path``. That of a module in a package comes
    # last: the package's modules may have names of the standard library.
    folders = [folder, path.parent] if folder != path.parent else [folder]
    return name.removesuffix(".__init__"), path, [str(folder) for folder in folders]


def _import_module(name: str, path: Path | None, folders: list[str]) -> ModuleType:
    """Import the module *name*, which must be the file at *path*, if that isn't None.

    The first of *folders* goes to the start of ``sys.path``, the others to its end.
    """
    label = name if path is None else path.name
    taken = click.UsageError(f"{label} has the name of a module in use; rename the file")
    loaded = sys.modules.get(name)
    if path is not None and loaded is not None and getattr(loaded, "__file__", None) != str(path):
        raise taken
    sys.path[:] = [folders[0], *sys.path, *folders[1:]]
    sys.argv[:] = [label]  # the module, or its function in a job, may parse them
    importlib.invalidate_caches()  # a folder that was on the path may have new files
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as exc:
        missing = exc.name if isinstance(exc, ModuleNotFoundError) else None
        if path is None and missing is not None and f"{name}.".startswith(f"{missing}."):
            raise click.UsageError(
                f"there is no module {missing!r}; run the command in the folder that has it"
            ) from exc
        hint = ""
        if isinstance(exc, ImportError) and "no known parent package" in str(exc):
            hint = "\nto import a module with relative imports, write PACKAGE.MODULE:FUNCTION"
        elif missing is not None:
            hint = (
                f"\nthis command runs in {sys.executable}, which has no module {missing!r}: "
                "install it there, or use the command `kinetic` of your project's environment"
            )
        raise UserError(f"{label} can't be imported:\n{_format_traceback(exc)}{hint}") from exc
    if path is not None and module.__file__ != str(path):
        raise taken
    return module


def _format_traceback(error: BaseException) -> str:
    """Format the traceback of *error* without the frames of the import before the user's code."""
    import traceback

    trace = error.__traceback__
    while trace is not None and (
        trace.tb_frame.f_code.co_filename in (__file__, importlib.__file__)
        or trace.tb_frame.f_code.co_filename.startswith("<frozen importlib")
    ):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def parse_arguments(pairs: Iterable[str], function: Callable[..., Any]) -> dict[str, Any]:
    """Read ``NAME=VALUE`` pairs as keyword arguments of *function*."""
    types = parameter_types(function)
    arguments: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (equals and name.isidentifier()):
            raise click.BadParameter(f"{pair!r} isn't NAME=VALUE", param_hint="-a")
        if name in arguments:
            raise click.BadParameter(f"{name!r} is given more than once", param_hint="-a")
        arguments[name] = convert(text, parse_value(text), types[name], f"-a {name}")
    return arguments


def read_inputs(file: Path, function: Callable[..., Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return (location, keyword arguments) of each call; a location is "line NUMBER of *file*"."""
    if file.suffix not in (".csv", ".jsonl"):
        raise click.UsageError(f"--map takes a .jsonl or a .csv, and {file} is neither")
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            if file.suffix == ".csv":
                return _read_csv(csv.DictReader(lines, strict=True), function, file)
            return [*_read_jsonl(lines, function, file)]
    except (csv.Error, UnicodeDecodeError) as exc:
        raise click.UsageError(f"{file} can't be read as {file.suffix}: {exc}") from exc


def _read_csv(
    rows: csv.DictReader[str], function: Callable[..., Any], file: Path
) -> list[tuple[str, dict[str, Any]]]:
    """Return (location, keyword arguments) of each row below the header."""
    header = rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
    if repeated := [name for name in header if header.count(name) > 1]:
        raise click.UsageError(f"{file} has the column {repeated[0]!r} more than once")
    types = parameter_types(function)
    inputs: list[tuple[str, dict[str, Any]]] = []
    for row in rows:
        location = f"line {rows.line_num} of {file}"
        if rows.restkey in row or rows.restval in row.values():
            message = f"{location} must have one cell for each column of the header"
            raise click.UsageError(f"{message}: {', '.join(header)}")
        cells = {
            name: convert(
                row[name], parse_value(row[name]), types[name], f"{location}, column {name!r}"
            )
            for name in header
        }
        inputs.append((location, cells))
    return inputs


def _read_jsonl(
    lines: Iterable[str], function: Callable[..., Any], file: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, keyword arguments) of each line that isn't blank."""
    types = parameter_types(function)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        location = f"line {number} of {file}"
        try:
            values = json.loads(line.rstrip())
        except ValueError as exc:
            column = f" (column {exc.colno})" if isinstance(exc, json.JSONDecodeError) else ""
            message = f"{location} isn't JSON{column}: {getattr(exc, 'msg', exc)}"
            raise click.UsageError(message) from exc
        if not isinstance(values, dict):
            raise click.UsageError(f"{location} must be an object that maps arguments to values")
        yield (
            location,
            {
                name: convert(None, value, types[name], f"{location}, {name!r}")
                for name, value in cast("dict[str, Any]", values).items()
            },
        )


def _undecorated(function: Any) -> Any:
    return inspect.unwrap(getattr(function, "function", function))


def check(function: Any, arguments: dict[str, Any], prefix: str = "") -> None:
    """Check that the function takes *arguments*.

    Raises:
        click.UsageError: The function has no such parameter, or a required argument is missing.
            The message begins with *prefix*.
    """
    init = settings_of(function)[1].init
    function = _undecorated(function)
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    unknown = [name for name in arguments if name not in signature.parameters]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise click.UsageError(
            f"{prefix}{function.__name__}{signature} takes no argument {unknown[0]!r}"
        )
    if misfit := Binding(function, init).find_mismatch((), arguments):
        raise click.UsageError(f"{prefix}{misfit}")


def parameter_types(function: Any) -> defaultdict[str, Any]:
    """Return the annotations of the parameters by name; `Any` for one that can't be evaluated."""
    from kinetic._packing.discover import unwrap_callable

    function = _undecorated(function)
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        signature = inspect.signature(function, annotation_format=Format.FORWARDREF)
    else:
        signature = inspect.signature(function)
    namespace = vars(sys.modules[unwrap_callable(function).__module__])
    types: dict[str, Any] = {}
    others: Any = Any
    for parameter in signature.parameters.values():
        annotation: Any = parameter.annotation
        if annotation is parameter.empty:
            # The text "False" is true, and 1.10 isn't the text "1.10".
            kinds = (kind for kind in (bool, str) if isinstance(parameter.default, kind))
            annotation = next(kinds, Any)
        try:
            hints = SimpleNamespace(__annotations__={"hint": annotation})
            annotation = get_type_hints(hints, namespace, include_extras=True)["hint"]
        except Exception:  # evaluating the user's annotation can raise anything
            annotation = Any
        if parameter.default is None and annotation is not Any:
            annotation = Optional[annotation]  # noqa: UP045 - `|` doesn't take every annotation
        if parameter.kind is parameter.VAR_KEYWORD:
            others = annotation
        else:
            types[parameter.name] = annotation
    return defaultdict(lambda: others, types)


_FROM_TEXT: Mapping[Any, Callable[[str], Any]] = {
    **{kind: kind for kind in (str, int, float, complex, Decimal, Fraction, UUID)},
    **{kind: kind.fromisoformat for kind in (datetime.datetime, datetime.date, datetime.time)},
    bool: lambda text: {"true": True, "false": False}[text.strip().lower()],
    bytes: str.encode,
    NoneType: {"null": None, "None": None}.__getitem__,
}
"""What makes a value of a type from text; it raises an exception if it can't."""

_NUMBERS = (int, float, complex, Decimal, Fraction)
_CONTAINERS: tuple[Any, ...] = (list, set, tuple, frozenset, dict)
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def parse_value(text: str) -> Any:
    """Return what *text* means without an annotation: JSON, a word of Python, or text."""
    try:
        return json.loads(text)
    except ValueError:
        return _PYTHON_WORDS.get(text, text)


def convert(text: str | None, value: Any, annotation: Any, location: str) -> Any:
    """Return a value of the type *annotation*; without a known type, *value*.

    *text* is what *value* was parsed from; None if a file of JSON has the value.

    Raises:
        click.UsageError: The text, or the value, isn't of that type.
    """
    try:
        return _part(value, annotation) if text is None else _as_type(text, value, annotation)
    except Exception as exc:  # the constructor of a type can raise anything
        expected = getattr(annotation, "__name__", str(annotation))
        if (origin := get_origin(annotation)) is not None:
            expected = str(annotation).removeprefix("typing.")
        if annotation is bool:
            expected = "true or false"
        elif (origin or annotation) in (list, tuple, set):
            expected += ' in JSON, such as [1, 2] or ["a", "b"]'
        shown = json.dumps(value) if text is None else repr(text)
        raise click.UsageError(f"{location} must be {expected}, not {shown}") from exc


def _unwrap(annotation: Any) -> Any:
    """Return the type behind an `Annotated`, a `NewType`, or an alias."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        elif hasattr(annotation, "__value__"):  # TypeAliasType, of Python 3.12
            annotation = annotation.__value__
        else:
            return annotation


def _part(value: Any, annotation: Any) -> Any:
    """Return *value*, which JSON gave, as a value of the type *annotation*."""
    annotation = _unwrap(annotation)
    is_union = get_origin(annotation) in (Union, UnionType)
    if isinstance(value, str) and is_union and str in get_args(annotation):
        return value
    takes_any_text = annotation in (str, bytes) or (
        inspect.isclass(annotation) and issubclass(annotation, PurePath)
    )
    if takes_any_text and not isinstance(value, str):
        raise ValueError(value)  # the text of a number is lost: 1.10 is 1.1
    return _as_type(value if isinstance(value, str) else json.dumps(value), value, annotation)


def _as_type(text: str, value: Any, annotation: Any) -> Any:
    """Return *text* as a value of the type *annotation*; raise any exception if it isn't one.

    *value* is the text without a known type.
    """
    annotation = _unwrap(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        if not text and NoneType in arguments and str not in arguments:
            return None  # an empty cell of a table
        # Any text is a str, and a path.
        for choice in sorted(arguments, key=lambda kind: (kind is str) - (kind is NoneType)):
            if choice in _NUMBERS and str in arguments and isinstance(value, str):
                continue  # such as 007
            with contextlib.suppress(Exception):
                return _as_type(text, value, choice)
        raise ValueError(text)
    if origin is Literal:
        return next(choice for choice in arguments if text in (choice, json.dumps(choice)))
    kind = origin or annotation
    if kind in _FROM_TEXT:
        return _FROM_TEXT[kind](text)
    if not inspect.isclass(kind):
        return value
    if issubclass(kind, Enum):
        by_value = (member for member in kind if text == str(member.value))
        return kind[text] if text in kind.__members__ else next(by_value)
    if issubclass(kind, PurePath):
        return kind(text)
    if kind.__module__ in ("builtins", "collections.abc") and kind is not object:
        for container in _CONTAINERS:
            if issubclass(container, kind):
                return _contents(value, container, arguments)
    try:
        is_instance = isinstance(value, kind)
    except TypeError:  # such as a TypedDict or a protocol
        return value
    if is_instance:
        return value
    if issubclass(kind, (Number, str)):  # such as numpy.float32
        return cast("Callable[[str], Any]", kind)(text)
    raise ValueError(text)


def _contents(value: object, container: Any, arguments: tuple[Any, ...]) -> Any:
    """Return *value*, an array or object of JSON, as a *container* of the types *arguments*."""
    kind: object = container
    if type(value) is not (dict if kind is dict else list):
        raise ValueError(value)
    if kind is dict:
        key, inner = arguments or (Any, Any)
        items = cast("dict[str, Any]", value).items()
        return {_as_type(name, name, key): _part(part, inner) for name, part in items}
    parts = cast("list[Any]", value)
    is_fixed = kind is tuple and arguments and arguments[-1] is not Ellipsis
    types = arguments if is_fixed else (arguments or (Any,))[:1] * len(parts)
    return container(_part(part, inner) for part, inner in zip(parts, types, strict=True))
