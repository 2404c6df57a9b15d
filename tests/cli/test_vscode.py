"""The entry that attaches to a job gets into VS Code's file, and everything else there stays."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from kinetic.cli.vscode import ENTRY_NAME, write_launch


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_entry_replaces_the_old_one_and_keeps_others(project: Path) -> None:
    file = write_launch({"name": "Attach to one", "request": "attach", "port": 1})
    assert file == project / ".vscode" / "launch.json"
    saved = json.loads(file.read_text())
    assert saved["version"] == "0.2.0"
    assert saved["configurations"] == [{"name": ENTRY_NAME, "request": "attach", "port": 1}]
    mine = {"name": "Mine", "request": "launch"}
    file.write_text(json.dumps({"inputs": [1], "configurations": [mine, *saved["configurations"]]}))
    write_launch({"name": "Attach to two", "port": 2})
    assert json.loads(file.read_text()) == {
        "inputs": [1],
        "configurations": [mine, {"name": ENTRY_NAME, "port": 2}],
    }


@pytest.mark.parametrize("content", ["// mine\n{}", "[]", '{"configurations": [1]}', ""])
def test_a_file_that_is_not_plain_json_stays_as_it_is(project: Path, content: str) -> None:
    file = project / ".vscode" / "launch.json"
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(click.ClickException, match="leave out --vscode"):
        write_launch({"name": "Attach"})
    assert file.read_text() == content
