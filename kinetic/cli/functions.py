"""Load the function of a command line, and read its arguments and inputs from text and files."""

from __future__ import annotations

import csv
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import click

from kinetic.cli.where import TheirError


def load_function(target: str) -> Callable[..., Any]:
    """The function that ``FILE.py:NAME`` names; its file is run, but not as the main program.

    Raises:
        click.UsageError: There is no such file, or no such function in it.
        TheirError: The file itself fails.
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
        there = f"; it has {', '.join(known[:5])}" if known else ""
        raise click.UsageError(f"there is no function {name!r} in {place}{there}")
    return cast("Callable[..., Any]", found)


def _module_of(path: Path) -> ModuleType:
    there = sys.modules.get(path.stem)
    if there is not None and getattr(there, "__file__", None) != str(path):
        raise click.UsageError(f"{path.name} has the name of a module that is in use: rename it")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as exc:
        del sys.modules[path.stem]
        raise TheirError(f"{path.name} cannot be run:\n{_traceback_in(path, exc)}") from exc
    return module


def _traceback_in(path: Path, error: BaseException) -> str:
    """As Python would print it, from the first line of that file on."""
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def arguments_of(given: Iterable[str]) -> dict[str, Any]:
    """``NAME=VALUE`` as keyword arguments."""
    found: dict[str, Any] = {}
    for one in given:
        name, equals, text = one.partition("=")
        if not (equals and name.isidentifier()):
            raise click.BadParameter(f"{one!r} is no NAME=VALUE", param_hint="-a")
        if name in found:
            raise click.BadParameter(f"{name!r} is given more than once", param_hint="-a")
        found[name] = value_of(text)
    return found


def value_of(text: str) -> Any:
    """JSON if it parses, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def inputs_of(file: Path, function: Callable[..., Any]) -> list[tuple[str, dict[str, Any]]]:
    """The keyword arguments of each call, and where they stand, from JSON lines or a table.

    Raises:
        click.UsageError: The file is neither, or a line of it is wrong.
    """
    if file.suffix not in (".csv", ".jsonl"):
        raise click.UsageError(f"--map takes a .jsonl or a .csv, and {file} is neither")
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            if file.suffix == ".csv":
                rows = csv.reader(lines, strict=True)
                return _rows(((rows.line_num, row) for row in rows), _annotations(function), file)
            numbered = ((f"line {number} of {file}", text) for number, text in enumerate(lines, 1))
            return [(place, _line(text, place)) for place, text in numbered if text.strip()]
    except (csv.Error, UnicodeDecodeError) as exc:
        raise click.UsageError(f"{file} cannot be read as {file.suffix}: {exc}") from exc


def _rows(
    rows: Iterator[tuple[int, list[str]]], kinds: dict[str, Any], file: Path
) -> list[tuple[str, dict[str, Any]]]:
    nothing: list[str] = []
    header = [name.strip() for name in next(rows, (0, nothing))[1]]
    if twice := [name for name in header if header.count(name) > 1]:
        raise click.UsageError(f"{file} has the column {twice[0]!r} more than once")
    found: list[tuple[str, dict[str, Any]]] = []
    for number, row in rows:
        place = f"line {number} of {file}"
        if row and len(row) != len(header):
            columns = f"{len(row)} column{'s' if len(row) > 1 else ''}"
            raise click.UsageError(f"{place} has {columns}, and its header {len(header)}")
        if row:
            pairs = zip(header, row, strict=True)
            found.append((place, {name: _cell(text, kinds, name, place) for name, text in pairs}))
    return found


def _line(text: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text.rstrip())
    except ValueError as exc:
        column = f" (column {exc.colno})" if isinstance(exc, json.JSONDecodeError) else ""
        raise click.UsageError(f"{what} is no JSON{column}: {getattr(exc, 'msg', exc)}") from exc
    if not isinstance(found, dict):
        raise click.UsageError(f"{what} must be an object with the arguments by their names")
    return cast("dict[str, Any]", found)


def _plain(function: Any) -> Any:
    return inspect.unwrap(getattr(function, "function", function))


def check(function: Any, given: dict[str, Any], place: str = "") -> None:
    """Refuse arguments that the function does not take.

    Raises:
        click.UsageError: It says which.
    """
    plain = _plain(function)
    signature = inspect.signature(plain)
    taken = signature.parameters.values()
    unknown = [name for name in given if name not in signature.parameters]
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in taken):
        raise click.UsageError(f"{place}{plain.__name__}{signature} takes no {unknown[0]!r}")
    try:
        signature.bind(**given)
    except TypeError as exc:
        raise click.UsageError(f"{place}{plain.__name__}{signature}: {exc}") from exc


def _annotations(function: Any) -> dict[str, Any]:
    try:
        return inspect.get_annotations(_plain(function), eval_str=True)
    except Exception:  # whatever the user's own annotations raise
        return {}


def _cell(text: str, kinds: dict[str, Any], name: str, place: str) -> Any:
    """A column's text as its parameter is annotated: a number only where one is wanted."""
    kind = kinds.get(name)
    if kind is str:
        return text
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError as exc:
            words = f"{place}, column {name!r}: {text!r} is no {kind.__name__}"
            raise click.UsageError(words) from exc
    return value_of(text)
