"""The types users see, under mypy and pyright."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = (HERE / "positive.py", HERE / "negative.py")
WANTED = {
    (path.name, number)
    for path in FILES
    for number, line in enumerate(path.read_text().splitlines(), 1)
    if line.endswith("# error")
}

Found = dict[tuple[str, int], str]


def mypy() -> Found:
    options = ["--strict", "--output=json", "--follow-imports=silent", "--no-error-summary"]
    cache = ROOT / ".mypy_cache" / "typing-tests"
    answer = subprocess.run(
        [sys.executable, "-m", "mypy", *options, f"--cache-dir={cache}", *FILES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert answer.returncode in (0, 1), answer.stderr + answer.stdout
    found = [json.loads(line) for line in answer.stdout.splitlines()]
    return {
        (Path(one["file"]).name, one["line"]): one["message"]
        for one in found
        if one["severity"] == "error"
    }


def pyright() -> Found:
    answer = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *FILES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert answer.returncode in (0, 1), answer.stderr + answer.stdout
    return {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1): one["message"]
        for one in json.loads(answer.stdout)["generalDiagnostics"]
        if one["severity"] == "error"
    }


@pytest.mark.parametrize("check", [mypy, pytest.param(pyright, marks=pytest.mark.full)])
def test_what_is_right_passes_and_what_is_wrong_does_not(check: Callable[[], Found]) -> None:
    found = check()
    surplus = {place: message for place, message in found.items() if place not in WANTED}
    assert not surplus
    assert WANTED - set(found) == set()
