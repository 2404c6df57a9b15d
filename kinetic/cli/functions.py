"""Load the function of a command line, and read its arguments and inputs from text and files."""

from __future__ import annotations

import csv
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import click

from kinetic.cli.client import UserError


def load_function(target: str) -> Callable[..., Any]:
    """Import the file of ``FILE.py:NAME``, not as the main program, and return its function.

    Raises:
        click.UsageError: The file, or a function of that name, doesn't exist.
        UserError: The file raises an exception.
    """
    place, colon, name = target.rpartition(":")
    path = Path(place)
    if not (colon and name.isidentifier() and path.suffix == ".py"):
        raise click.UsageError(f"{target!r} names no function: write FILE.py:FUNCTION")
    if not path.is_file():
        raise click.UsageError(f"there is no file {place}")
    module = _module_of(path.resolve())
    found = getattr(module, name, None)
    if not callable(found):
        own = ((one, it) for one, it in vars(module).items() if callable(it))
        known = [one for one, it in own if getattr(it, "__module__", "") == module.__name__]
        hint = f"; it has {', '.join(known[:5])}" if known else ""
        raise click.UsageError(f"there is no function {name!r} in {place}{hint}")
    return cast("Callable[..., Any]", found)


def _module_of(path: Path) -> ModuleType:
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) != str(path):
        raise click.UsageError(f"{path.name} has the name of a module in use: rename the file")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as exc:
        del sys.modules[path.stem]
        raise UserError(f"{path.name} can't be imported:\n{_traceback_in(path, exc)}") from exc
    return module


def _traceback_in(path: Path, error: BaseException) -> str:
    """Format the traceback of *error* without the frames before the file at *path*."""
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def arguments_of(given: Iterable[str]) -> dict[str, Any]:
    """Read ``NAME=VALUE`` pairs as keyword arguments.

    Raises:
        click.BadParameter: One isn't NAME=VALUE, or repeats a name.
    """
    found: dict[str, Any] = {}
    for one in given:
        name, equals, text = one.partition("=")
        if not (equals and name.isidentifier()):
            raise click.BadParameter(f"{one!r} isn't NAME=VALUE", param_hint="-a")
        if name in found:
            raise click.BadParameter(f"{name!r} is given more than once", param_hint="-a")
        found[name] = _value_of(text)
    return found


def _value_of(text: str) -> Any:
    """Return the value of *text* if it is JSON, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def inputs_of(file: Path, function: Callable[..., Any]) -> list[tuple[str, dict[str, Any]]]:
    """Read the keyword arguments of each call, with the line where they are, from *file*.

    Raises:
        click.UsageError: The file is neither .jsonl nor .csv, or one of its lines is invalid.
    """
    if file.suffix not in (".csv", ".jsonl"):
        raise click.UsageError(f"--map takes a .jsonl or a .csv, and {file} is neither")
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            if file.suffix == ".csv":
                return _rows(csv.DictReader(lines, strict=True), _annotations(function), file)
            numbered = ((f"line {number} of {file}", text) for number, text in enumerate(lines, 1))
            return [(place, _line(text, place)) for place, text in numbered if text.strip()]
    except (csv.Error, UnicodeDecodeError) as exc:
        raise click.UsageError(f"{file} can't be read as {file.suffix}: {exc}") from exc


def _rows(
    rows: csv.DictReader[str], kinds: dict[str, Any], file: Path
) -> list[tuple[str, dict[str, Any]]]:
    header = rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
    if twice := [name for name in header if header.count(name) > 1]:
        raise click.UsageError(f"{file} has the column {twice[0]!r} more than once")
    found: list[tuple[str, dict[str, Any]]] = []
    for row in rows:
        place = f"line {rows.line_num} of {file}"
        if rows.restkey in row or rows.restval in row.values():
            words = f"{place} must have one cell for each column of the header"
            raise click.UsageError(f"{words}: {', '.join(header)}")
        found.append((place, {name: _cell(row[name], kinds, name, place) for name in header}))
    return found


def _line(text: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(text.rstrip())
    except ValueError as exc:
        column = f" (column {exc.colno})" if isinstance(exc, json.JSONDecodeError) else ""
        words = f"{place} isn't JSON{column}: {getattr(exc, 'msg', exc)}"
        raise click.UsageError(words) from exc
    if not isinstance(found, dict):
        raise click.UsageError(f"{place} must be an object that maps arguments to values")
    return cast("dict[str, Any]", found)


def _undecorated(function: Any) -> Any:
    return inspect.unwrap(getattr(function, "function", function))


def check(function: Any, given: dict[str, Any], place: str = "") -> None:
    """Check that the function takes the arguments *given*.

    Raises:
        click.UsageError: It takes no argument of a name, or lacks one.
    """
    function = _undecorated(function)
    signature = inspect.signature(function)
    taken = signature.parameters.values()
    unknown = [name for name in given if name not in signature.parameters]
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in taken):
        raise click.UsageError(f"{place}{function.__name__}{signature} takes no {unknown[0]!r}")
    try:
        signature.bind(**given)
    except TypeError as exc:
        raise click.UsageError(f"{place}{function.__name__}{signature}: {exc}") from exc


def _annotations(function: Any) -> dict[str, Any]:
    try:
        return inspect.get_annotations(_undecorated(function), eval_str=True)
    except Exception:  # evaluating the user's annotations can raise anything
        return {}


def _cell(text: str, kinds: dict[str, Any], name: str, place: str) -> Any:
    """Convert a cell to the type that its parameter's annotation asks for."""
    kind = kinds.get(name)
    if kind is str:
        return text
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError as exc:
            words = f"{place}, column {name!r}: {text!r} isn't {kind.__name__}"
            raise click.UsageError(words) from exc
    return _value_of(text)
