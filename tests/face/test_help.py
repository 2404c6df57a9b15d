"""Test the docstrings in the source, which editors show without running code."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

import kinetic
import kinetic.aio
import kinetic.collections
import kinetic.jobs

STARTS: list[Callable[..., Any]] = [
    kinetic.run,
    kinetic.submit,
    kinetic.jobs.submit,
    kinetic.aio.Client.submit,
    kinetic.RemoteFunction.run_async,
    kinetic.RemoteFunction.run_async_map,
    kinetic.jobs.run_async_map,
    kinetic.aio.run_async_map,
    kinetic.aio.Client.run_async_map,
    kinetic.collections.map,
]
HANDLES: list[type[Any]] = [
    kinetic.JobHandle,
    kinetic.BatchHandle,
    kinetic.aio.JobHandle,
    kinetic.aio.BatchHandle,
]
METHODS = [
    (owner, name)
    for owner in HANDLES
    for name, member in vars(owner).items()
    if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property))
]


def source_docstring(thing: Any) -> str:
    """Return the docstring in the source; decorators may replace the one at run time."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return ast.get_docstring(node) or ""


def documented_parameters(text: str) -> set[str]:
    """Return the parameters for which a docstring has an entry."""
    entries = re.findall(r"^ {4}(\w+(?:, \w+)*): ", text, re.MULTILINE)
    return {name for entry in entries for name in entry.split(", ")}


def parameters(function: Any) -> set[str]:
    return {*inspect.signature(function).parameters} - {"self"}


def qualified_name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


@pytest.mark.parametrize("thing", [*STARTS, *HANDLES], ids=qualified_name)
def test_the_docstring_of_an_entry_point_has_its_parameters_and_an_example(thing: Any) -> None:
    text = source_docstring(thing)
    assert parameters(thing) - documented_parameters(text) == set()
    assert "Example::" in text


@pytest.mark.parametrize(
    ("owner", "name"), METHODS, ids=lambda value: getattr(value, "__name__", value)
)
def test_the_docstring_of_each_method_of_a_handle_names_its_parameters(
    owner: type[Any], name: str
) -> None:
    member = inspect.getattr_static(owner, name)
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    text = source_docstring(function)
    assert text
    if not text.splitlines()[0].endswith("internal."):
        mentioned = documented_parameters(text) | {*re.findall(r"\*(\w+)\*", text)}
        assert parameters(function) - mentioned == set()


def test_the_docstring_of_the_decorator_names_the_ways_to_run() -> None:
    for way in ("f.run_async(", "f.run_async_map(", "f.local(", "f.options("):
        assert way in source_docstring(kinetic.run)
