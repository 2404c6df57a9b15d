"""What a warm parent does before its first job: whole jobs, of which nothing stays but speed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUNNER = Path(__file__).parents[2] / "runner"

LOADED = """
import importlib, json, os, runpy, signal, sys
from pathlib import Path

runner, place = Path(sys.argv[1]), sys.argv[2]
runpy.run_path(str(runner / "remote_runner.py"))["load_runner"](runner)
attempt, density, rehearsal, workspace = (
    importlib.import_module(f"kinetic_runner.{name}")
    for name in ("attempt", "density", "rehearsal", "workspace")
)
"""


def run(code: str, place: Path) -> None:
    command = [sys.executable, "-P", "-W", "error", "-c", LOADED + code, str(RUNNER), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_rehearsal_is_a_whole_job_and_nothing_of_it_stays(tmp_path: Path) -> None:
    run(
        """
before = [*sys.path], signal.getsignal(signal.SIGTERM), os.fstat(1).st_ino, os.fstat(2).st_ino
with rehearsal.in_a_folder(place) as orders:
    shared = json.loads(orders.shared)
    terms = attempt.Terms(shared["assignment"], bytes.fromhex(shared["key"]))
    for _ in range(3):
        own = json.loads(orders.next())
        terms.prepare(own["assignment"])
        site = workspace.Site(work=own["work"], cache=place, mounts=False)
        code = terms.carry_out(own["assignment"], own["executor"], site, orders.arguments)
        assert code == 0
        assert os.getcwd() == own["work"] + "/workspace"
    folder = Path(own["work"]).parent
    outcomes = [*folder.glob("store/batches/rehearsal/attempts/*/*.outcome")]
    assert len(outcomes) == 3
after = [*sys.path], signal.getsignal(signal.SIGTERM), os.fstat(1).st_ino, os.fstat(2).st_ino
assert before == after
assert os.getcwd() == "/"
assert not os.listdir(place)
""",
        tmp_path,
    )


def test_code_that_was_moved_does_what_it_did(tmp_path: Path) -> None:
    run(
        """
def outer(value, *more, key=1):
    '''Says what it does.'''
    inner = [value + each for each in more]
    return inner, (lambda: key)()

before = outer.__code__
with density.seen(codes := set()):
    assert outer(1, 2, key=3) == ([3], 3)
density.fill_holes()
density.draw_together(codes)
assert outer.__code__ is not before and outer.__code__ == before
assert outer(1, 2, key=3) == ([3], 3) and outer.__doc__ == "Says what it does."
assert outer.__code__.co_firstlineno == before.co_firstlineno
assert sys.getprofile() is None
""",
        tmp_path,
    )
