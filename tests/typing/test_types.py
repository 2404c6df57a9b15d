"""Test that mypy and pyright accept positive.py and report each marked line of negative.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import programs

HERE = Path(__file__).parent
FILES = (HERE / "positive.py", HERE / "negative.py")
EXPECTED = {
    (path.name, number)
    for path in FILES
    for number, line in enumerate(path.read_text().splitlines(), 1)
    if line.endswith("# error")
}

Found = dict[tuple[str, int], str]


def mypy() -> Found:
    result = programs.mypy("--output=json", "--no-error-summary", *FILES)
    assert result.returncode in (0, 1), result.stderr + result.stdout
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    return {
        (Path(report["file"]).name, report["line"]): report["message"]
        for report in reports
        if report["severity"] == "error"
    }


def pyright() -> Found:
    command = (sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable)
    result = programs.run(*command, *FILES)
    assert result.returncode in (0, 1), result.stderr + result.stdout
    return {
        (Path(report["file"]).name, report["range"]["start"]["line"] + 1): report["message"]
        for report in json.loads(result.stdout)["generalDiagnostics"]
        if report["severity"] == "error"
    }


@pytest.mark.full
@pytest.mark.xdist_group(programs.MYPY)
@pytest.mark.parametrize("check", [mypy, pyright])
def test_a_type_checker_reports_exactly_the_marked_lines(check: Callable[[], Found]) -> None:
    found = check()
    unexpected = {line: message for line, message in found.items() if line not in EXPECTED}
    assert not unexpected
    assert EXPECTED - set(found) == set()
