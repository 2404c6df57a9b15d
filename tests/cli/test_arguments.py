"""How `kinetic run` finds a function, and makes arguments from text."""

from __future__ import annotations

import datetime
import decimal
import enum
import functools
import json
import numbers
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType, Optional, TypedDict

import click
import pytest

import kinetic
from kinetic.cli.client import UserError
from kinetic.cli.functions import (
    check,
    load_function,
    parameter_types,
    parse_arguments,
    read_inputs,
)
from kinetic.cli.sweep import parse_domain
from kinetic.sweeps import Choice, Float, Int

if TYPE_CHECKING:
    from nowhere import Absent


class Color(enum.Enum):
    RED = "r"
    NONE = 0


class Count(int):
    pass


@dataclass
class Config:
    rate: float


class Row(TypedDict):
    rate: float


class Level(enum.IntEnum):
    LOW = 0


Name = NewType("Name", str)


def takes(
    text: str,
    number: int,
    ratio: float,
    flag: bool,
    maybe: int | None,
    place: Path | None,
    words: Optional[str],  # noqa: UP045
    either: str | int,
    choice: Literal["1", 2],
    color: Color,
    level: Level,
    path: Path,
    pure: PurePosixPath,
    name: Name,
    noted: Annotated[str, "a note"],
    amount: decimal.Decimal,
    day: datetime.date,
    key: uuid.UUID,
    pair: tuple[int, str],
    many: list[str],
    table: dict[str, int],
    paths: list[Path],
    sizes: dict[int, Sequence[float]],
    quoted: "Optional[list[Color]]",  # noqa: UP037, UP045
    numbered: float | str,
    count: Count,
    real: numbers.Real,
    row: Row,
    config: Config | None,
    absent: Absent,
    plain,
    anything: Any,
    implicit: int = None,  # noqa: RUF013 - users write it
    bare_flag=False,
    bare_text="",
    **others: str,
) -> None:
    """Has a parameter of each kind."""


ID = uuid.UUID(int=7)
CONVERTED: list[tuple[str, str, object]] = [
    *(("text", text, text) for text in ("1.10", "297e3", "true", "null", "007", '"x"', "", "[1]")),
    ("number", "5", 5),
    ("ratio", "1e3", 1000.0),
    ("ratio", "1", 1.0),
    ("flag", "true", True),
    ("flag", "False", False),
    ("maybe", "null", None),
    ("maybe", "", None),
    ("maybe", "7", 7),
    ("words", "null", None),
    ("words", "1.10", "1.10"),
    ("words", "", ""),
    ("either", "12", 12),
    ("either", "1.10", "1.10"),
    ("choice", "1", "1"),
    ("choice", "2", 2),
    ("color", "RED", Color.RED),
    ("color", "r", Color.RED),
    ("color", "0", Color.NONE),
    ("level", "LOW", Level.LOW),
    ("path", "1.10", Path("1.10")),
    ("pure", "a", PurePosixPath("a")),
    ("name", "1.10", "1.10"),
    ("noted", "1.10", "1.10"),
    ("amount", "1.10", decimal.Decimal("1.10")),
    ("day", "2026-02-03", datetime.date(2026, 2, 3)),
    ("key", str(ID), ID),
    ("pair", '[1, "2"]', (1, "2")),
    ("many", '["1.10"]', ["1.10"]),
    ("table", '{"a": 1}', {"a": 1}),
    ("maybe", "None", None),
    ("place", "null", None),
    ("many", '["1.10", "null"]', ["1.10", "null"]),
    ("paths", '["1.10"]', [Path("1.10")]),
    ("sizes", '{"1": [2, "3"]}', {1: [2.0, 3.0]}),
    ("quoted", '["RED", 0]', [Color.RED, Color.NONE]),
    ("quoted", "null", None),
    ("numbered", "1e3", 1000.0),
    ("numbered", "007", "007"),
    ("numbered", "nan", "nan"),
    ("count", "5", Count(5)),
    ("real", "0.5", 0.5),
    ("row", '{"rate": 1}', {"rate": 1}),
    ("config", "null", None),
    ("implicit", "null", None),
    ("implicit", "07", 7),
    ("bare_flag", "False", False),
    ("bare_text", "1.10", "1.10"),
    ("plain", "False", False),
    ("plain", "None", None),
    *((name, "1.10", 1.1) for name in ("absent", "plain", "anything")),
    *((name, "text", "text") for name in ("absent", "plain", "anything")),
    ("other", "1.10", "1.10"),
]


@pytest.mark.parametrize(("name", "text", "expected"), CONVERTED)
def test_an_argument_and_a_cell_become_values_of_the_annotated_type(
    name: str, text: str, expected: object, tmp_path: Path
) -> None:
    (argument,) = parse_arguments([f"{name}={text}"], takes).values()
    table = tmp_path / "in.csv"
    cell = text.replace('"', '""')
    table.write_text(f'{name},extra\n"{cell}",1\n')
    ((_, cells),) = read_inputs(table, takes)
    for value in (argument, cells[name]):
        assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    "pair",
    ["number=1e3", "number=", "ratio=x", "flag=maybe", "maybe=x", "choice=3", "color=blue",
     "level=9", "many=a", "many={}", "many=[1]", "pair=[1]", "pair=[1, 2, 3]", "table=[]",
     'table={"a": "b"}', "sizes=1", "paths=[null]", "bare_flag=1", "amount=x", "day=soon",
     "count=x", "real=x", "config=1", 'config={"rate": 1}'],
)  # fmt: skip
def test_a_text_that_is_no_value_of_the_type_is_refused(pair: str) -> None:
    with pytest.raises(click.UsageError, match=f"-a {pair.partition('=')[0]} must be .*, not "):
        parse_arguments([pair], takes)


def test_the_values_of_a_sweep_are_of_the_annotated_type() -> None:
    types = parameter_types(takes)
    for name, text, domain in [
        ("ratio", "1,.5", Choice([1.0, 0.5])),
        ("text", "1.10,x", Choice(["1.10", "x"])),
        ("color", "RED,0", Choice([Color.RED, Color.NONE])),
        ("anything", "1,x", Choice([1, "x"])),
        ("ratio", "1..4", Int(1, 4)),
        ("ratio", "1e-3..1:log", Float(1e-3, 1, log=True)),
        ("number", "1..9:2", Int(1, 9, step=2)),
    ]:
        assert parse_domain(text, types[name], "-s") == domain
    for name, text in [
        *(("ratio", "zz"), ("ratio", "1,zz"), ("flag", "1..2"), ("number", "0.5..2")),
        *(("number", "1..2:0.5"), ("choice", "1,3")),
    ]:
        with pytest.raises(click.UsageError, match=f"-s {name} must be .*, not "):
            parse_domain(text, types[name], f"-s {name}")


def test_a_value_of_json_becomes_a_value_of_the_annotated_type(tmp_path: Path) -> None:
    line = {"path": "a", "color": "RED", "day": "2026-02-03", "pair": [1, "2"], "text": "1.10"}
    line |= {"ratio": 1, "maybe": None, "numbered": "1", "anything": "1", "sizes": {"1": [2]}}
    (tmp_path / "in.jsonl").write_text(f"{json.dumps(line)}\n\n" + '{"text": 1.10}\n')
    with pytest.raises(click.UsageError, match=r"line 3 of .*, 'text' must be str, not 1.1"):
        read_inputs(tmp_path / "in.jsonl", takes)
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    ((_, values),) = read_inputs(tmp_path / "in.jsonl", takes)
    assert values == line | {
        "path": Path("a"),
        "color": Color.RED,
        "day": datetime.date(2026, 2, 3),
        "pair": (1, "2"),
        "sizes": {1: [2.0]},
    }


def test_partials_classes_and_methods_have_types() -> None:
    class Callable:
        def __init__(self, x: str) -> None:
            self.x = x

        def __call__(self, y: str) -> None:
            """Is the function."""

    for function in (functools.partial(takes, 1), Callable):
        name = "noted" if function is not Callable else "x"
        assert parse_arguments([f"{name}=1"], function) == {name: "1"}
    assert parse_arguments(["y=1"], Callable("x")) == {"y": "1"}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with packages, which is the working directory; forget their modules."""
    before, path = set(sys.modules), [*sys.path]
    for name, text in {
        "knpack/__init__.py": "",
        "knpack/deep/__init__.py": "from . import part",
        "knpack/deep/part.py": "VALUE = 7",
        "knpack/deep/json.py": "from .part import VALUE\nfrom . import part\ndef f(): return VALUE",
        "knpack/deep/aside.py": "import knbeside\ndef f(): return knbeside.VALUE",
        "knpack/deep/knbeside.py": "VALUE = 8",
        "knspace/part.py": "VALUE = 9",
        "knspace/user.py": "from .part import VALUE\ndef f(): return VALUE",
        "knwrong.py": "import knabsent",
        "kn.dots.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kinetic", "run", "knpack.deep.json:f"])
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.startswith("kn"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("target", "value", "module"),
    [
        ("knpack/deep/json.py:f", 7, "knpack.deep.json"),
        ("knpack.deep.json:f", 7, "knpack.deep.json"),
        ("knpack/deep/aside.py:f", 8, "knpack.deep.aside"),
        ("knspace.user:f", 9, "knspace.user"),
    ],
)
def test_a_function_of_a_package_is_loaded_with_the_imports_of_its_module(
    modules: Path, target: str, value: int, module: str
) -> None:
    function = load_function(target)
    assert (function(), function.__module__) == (value, module)
    assert json.loads("1") == 1
    assert len(sys.argv) == 1, "the arguments of the command aren't those of the module"


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("knspace/user.py:f", UserError, "PACKAGE.MODULE:FUNCTION"),
        ("knpack.absent:f", click.UsageError, "no module 'knpack.absent'"),
        ("knabsent.part:f", click.UsageError, "no module 'knabsent'"),
        ("knwrong:f", UserError, "No module named 'knabsent'"),
        ("kn.dots.py:f", click.UsageError, "no dot"),
        ("knpack.deep.json:g", click.UsageError, "it has f"),
    ],
)
def test_a_module_that_cannot_be_imported_is_an_error(
    modules: Path, target: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_function(target)
    assert os.getcwd() == str(modules)


def test_arguments_on_the_command_line_leave_out_those_of_init() -> None:
    def use(number: int, *, model: str) -> None: ...

    function = kinetic.run("cpu", init={"model": str})(use)
    check(function, {"number": 1})
    for arguments, message in (
        ({"number": 1, "model": "x"}, "init gives the argument 'model'"),
        ({}, "missing a required argument: 'number'"),
        ({"modle": 1}, "takes no argument 'modle'"),
    ):
        with pytest.raises(click.UsageError, match=f"^line 1: use.*{message}"):
            check(function, arguments, "line 1: ")
    with pytest.raises(click.UsageError, match="missing a required argument: 'model'"):
        check(use, {"number": 1})
