"""Run commands in this process, as the console script does."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kinetic.cli.app import main
from tests.scripts import Program, until
from tests.terminals import terminal

__all__ = ["terminal"]

FILE = str(Path(__file__).parent / "functions.py")


@dataclass(frozen=True)
class Completed:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


Kinetic = Callable[..., Completed]


@pytest.fixture
def kinetic(capsys: pytest.CaptureFixture[str]) -> Kinetic:
    """Return a function that runs the command with these arguments."""

    def run(*arguments: str) -> Completed:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(arguments)
        out, err = capsys.readouterr()
        return Completed(int(end.value.code or 0), out, err)

    return run


@contextlib.contextmanager
def submitted(home: Path, *options: str) -> Iterator[tuple[str, Program]]:
    """Submit a batch of two items that wait; yield its ID and the process that submits it."""
    inputs = home / "in.jsonl"
    inputs.write_text('{"x": 1}\n{"x": 2}\n')
    command = ["run", f"{FILE}:waits", "--map", str(inputs), *options]
    with Program("-m", "kinetic", *command) as submitter:
        (line,) = until(lambda: re.findall(r".*2 items.*\n", submitter.errors)[:1])
        yield line.split()[1].rstrip(":"), submitter
        submitter.end()
