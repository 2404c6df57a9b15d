"""The steps of the guide to VS Code lead to a breakpoint in a job, with an editor of the tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.face.editor import stopped_at

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "vscode.md").read_text()


@pytest.mark.full
def test_the_steps_of_the_guide_stop_a_job_at_a_breakpoint(home: Path, tmp_path: Path) -> None:
    (program,) = re.findall(r"```py\n(.*?)```", PAGE, re.S)
    file = tmp_path / "fit.py"
    file.write_text(program)
    (tmp_path / "pyproject.toml").touch()
    run_command, debug_command = re.findall(r"^ *\$ kinetic (.*)$", PAGE, re.M)

    def start(command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "kinetic", *command.split()],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    running = start(run_command)
    assert running.stderr is not None
    line = next(line for line in running.stderr if "kinetic jobs debug job-" in line)
    shown_id = debug_command.split()[2]
    job_id = line.split()[-1]
    debugging = start(f"{debug_command.replace(shown_id, job_id)} --port 0")
    assert debugging.stderr is not None
    line = next(line for line in debugging.stderr if "waits for VS Code" in line)
    assert f"{job_id} waits for VS Code: start 'Attach to a kinetic job' in it" in line
    saved = json.loads((tmp_path / ".vscode" / "launch.json").read_text())
    (entry,) = saved["configurations"]
    at = program.splitlines().index("    return loss") + 1
    frame, variables = stopped_at(entry, file, at)
    assert (frame["name"], frame["line"], variables["rate"]) == ("fit", at, "0.1")
    out, _ = running.communicate(timeout=60)
    waits = "kinetic: waiting for a debugger, for 600 s at most\n"
    assert waits in PAGE.replace("   ", "")
    assert (running.returncode, out) == (0, f"{waits}0.5904900000000001\n")
    debugging.communicate(timeout=60)
    assert debugging.returncode == 0
