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
    """Import the file of ``FILE.py:NAME``, but not as ``__main__``; return the function NAME.

    Raises:
        click.UsageError: The file, or a function of that name, doesn't exist.
        UserError: The file raises an exception.
    """
    file_name, colon, name = target.rpartition(":")
    path = Path(file_name)
    if not (colon and name.isidentifier() and path.suffix == ".py"):
        raise click.UsageError(f"{target!r} names no function: write FILE.py:FUNCTION")
    if not path.is_file():
        raise click.UsageError(f"there is no file {file_name}")
    module = _import_module(path.resolve())
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            attribute
            for attribute, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        hint = f"; it has {', '.join(functions[:5])}" if functions else ""
        raise click.UsageError(f"there is no function {name!r} in {file_name}{hint}")
    return cast("Callable[..., Any]", function)


def _import_module(path: Path) -> ModuleType:
    """Import the file at *path* as a module that is named after it."""
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) != str(path):
        raise click.UsageError(f"{path.name} has the name of a module in use; rename the file")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as exc:
        del sys.modules[path.stem]
        raise UserError(f"{path.name} can't be imported:\n{_format_traceback(path, exc)}") from exc
    return module


def _format_traceback(path: Path, error: BaseException) -> str:
    """Format the traceback of *error* without the frames before the file at *path*."""
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def parse_arguments(pairs: Iterable[str]) -> dict[str, Any]:
    """Read ``NAME=VALUE`` pairs as keyword arguments."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (equals and name.isidentifier()):
            raise click.BadParameter(f"{pair!r} isn't NAME=VALUE", param_hint="-a")
        if name in arguments:
            raise click.BadParameter(f"{name!r} is given more than once", param_hint="-a")
        arguments[name] = _parse_value(text)
    return arguments


def _parse_value(text: str) -> Any:
    """Return the value of *text* if it is JSON, otherwise *text* itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_inputs(file: Path, function: Callable[..., Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return (location, keyword arguments) of each call; a location is "line NUMBER of *file*"."""
    if file.suffix not in (".csv", ".jsonl"):
        raise click.UsageError(f"--map takes a .jsonl or a .csv, and {file} is neither")
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            if file.suffix == ".csv":
                return _read_csv(csv.DictReader(lines, strict=True), _annotations(function), file)
            inputs: list[tuple[str, dict[str, Any]]] = []
            for number, text in enumerate(lines, 1):
                if text.strip():
                    location = f"line {number} of {file}"
                    inputs.append((location, _parse_json_line(text, location)))
            return inputs
    except (csv.Error, UnicodeDecodeError) as exc:
        raise click.UsageError(f"{file} can't be read as {file.suffix}: {exc}") from exc


def _read_csv(
    rows: csv.DictReader[str], annotations: dict[str, Any], file: Path
) -> list[tuple[str, dict[str, Any]]]:
    """Return (location, keyword arguments) of each row below the header."""
    header = rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
    if repeated := [name for name in header if header.count(name) > 1]:
        raise click.UsageError(f"{file} has the column {repeated[0]!r} more than once")
    inputs: list[tuple[str, dict[str, Any]]] = []
    for row in rows:
        location = f"line {rows.line_num} of {file}"
        if rows.restkey in row or rows.restval in row.values():
            message = f"{location} must have one cell for each column of the header"
            raise click.UsageError(f"{message}: {', '.join(header)}")
        cells = {name: _convert_cell(row[name], annotations, name, location) for name in header}
        inputs.append((location, cells))
    return inputs


def _parse_json_line(text: str, location: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text.rstrip())
    except ValueError as exc:
        column = f" (column {exc.colno})" if isinstance(exc, json.JSONDecodeError) else ""
        message = f"{location} isn't JSON{column}: {getattr(exc, 'msg', exc)}"
        raise click.UsageError(message) from exc
    if not isinstance(arguments, dict):
        raise click.UsageError(f"{location} must be an object that maps arguments to values")
    return cast("dict[str, Any]", arguments)


def _undecorated(function: Any) -> Any:
    return inspect.unwrap(getattr(function, "function", function))


def check(function: Any, arguments: dict[str, Any], prefix: str = "") -> None:
    """Check that the function takes *arguments*.

    Raises:
        click.UsageError: The function has no such parameter, or a required argument is missing.
            The message begins with *prefix*.
    """
    function = _undecorated(function)
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    unknown = [name for name in arguments if name not in signature.parameters]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise click.UsageError(
            f"{prefix}{function.__name__}{signature} takes no argument {unknown[0]!r}"
        )
    try:
        signature.bind(**arguments)
    except TypeError as exc:
        raise click.UsageError(f"{prefix}{function.__name__}{signature}: {exc}") from exc


def _annotations(function: Any) -> dict[str, Any]:
    try:
        return inspect.get_annotations(_undecorated(function), eval_str=True)
    except Exception:  # evaluating the user's annotations can raise anything
        return {}


def _convert_cell(text: str, annotations: dict[str, Any], name: str, location: str) -> Any:
    """Convert a cell to its parameter's type if that is str, int, or float; otherwise read JSON."""
    expected_type = annotations.get(name)
    if expected_type is str:
        return text
    if expected_type in (int, float):
        try:
            return expected_type(text)
        except ValueError as exc:
            message = f"{location}, column {name!r}: {text!r} isn't {expected_type.__name__}"
            raise click.UsageError(message) from exc
    return _parse_value(text)
