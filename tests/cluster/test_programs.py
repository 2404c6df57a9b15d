"""The control plane's programs: built by nobody who did not ask, and ended with the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
WANTS_A_CLUSTER = "tests/gke/test_set_up.py"


@pytest.mark.full
@pytest.mark.parametrize(("ci", "word"), [("", "skipped"), ("1", "error")])
def test_a_run_of_the_tests_builds_nothing_but_says_how_to(
    tmp_path: Path, ci: str, word: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "go").write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/built\n")
    (tmp_path / "bin" / "go").chmod(0o755)
    environ = {"PATH": f"{tmp_path}/bin:{os.defpath}", "HOME": str(tmp_path), "CI": ci}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-m", ""]
    command += [WANTS_A_CLUSTER]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=110, check=False
    )
    assert f"1 {word}" in done.stdout and "python -m tests.cluster.binaries" in done.stdout
    assert done.returncode == (1 if ci else 0)
    assert not (tmp_path / "built").exists()


SLEEPER = """
import sys
from pathlib import Path
from tests.cluster import children
command = [sys.executable, "-c", "import time; time.sleep(600)"]
process = children.start(command, Path(sys.argv[1]), {})
print(process.pid, flush=True)
process.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_program_does_not_outlive_tests_that_are_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLEEPER, str(tmp_path / "program.log")]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as tests:
        assert tests.stdout is not None
        program = psutil.Process(int(tests.stdout.readline()))
        tests.send_signal(signal.SIGKILL)
        psutil.wait_procs([program], timeout=60)
    assert not program.is_running()
