"""What the tests start ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.cluster import children

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


def test_a_program_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    """For the kernel a child's parent is a thread, and its end the signal to go."""
    code = (
        "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)"
    )
    log, go = tmp_path / "program.log", tmp_path / "go"

    def start() -> subprocess.Popen[bytes]:
        process = children.start([sys.executable, "-c", f"{code}\nprint('alive')"], log, {})
        children.await_ready(lambda: b"up" in log.read_bytes(), process, log, 60)
        return process

    with ThreadPoolExecutor(1) as test:
        process = test.submit(start).result()
    go.touch()
    assert process.wait(timeout=60) == 0
    assert b"alive" in log.read_bytes()


def test_a_program_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "program.log"
    said = [sys.executable, "-c", "raise SystemExit('no such flag')"]
    process = children.start(said, log, {"PATH": os.defpath})
    with pytest.raises(children.DidNotStart, match=r"(?s)program ended: 1.*no such flag"):
        children.await_ready(lambda: False, process, log, 60)
