"""What an editor shows while somebody writes a call: the words that stand in the source itself."""

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


def written(thing: Any) -> str:
    """The docstring that its source has: an editor runs nothing that would put another there."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return ast.get_docstring(node) or ""


def named(text: str) -> set[str]:
    """The parameters that a docstring has an entry for."""
    entries = re.findall(r"^ {4}(\w+(?:, \w+)*): ", text, re.MULTILINE)
    return {name for entry in entries for name in entry.split(", ")}


def parameters(function: Any) -> set[str]:
    return {*inspect.signature(function).parameters} - {"self"}


def titled(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


@pytest.mark.parametrize("thing", [*STARTS, *HANDLES], ids=titled)
def test_the_help_of_what_people_write_first_has_its_own_parameters_and_an_example(
    thing: Any,
) -> None:
    text = written(thing)
    assert parameters(thing) - named(text) == set()
    assert "Example::" in text


@pytest.mark.parametrize(("owner", "name"), METHODS, ids=lambda one: getattr(one, "__name__", one))
def test_each_method_of_a_handle_says_what_it_does_and_names_its_parameters(
    owner: type[Any], name: str
) -> None:
    member = inspect.getattr_static(owner, name)
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    text = written(function)
    assert text
    if not text.splitlines()[0].endswith("internal."):
        mentioned = named(text) | {*re.findall(r"\*(\w+)\*", text)}
        assert parameters(function) - mentioned == set()


def test_help_of_the_decorator_names_the_ways_to_run() -> None:
    for way in ("f.run_async(", "f.run_async_map(", "f.local(", "f.options("):
        assert way in written(kinetic.run)
