"""Run commands in this process, as the console script does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kinetic.cli.app import main
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
