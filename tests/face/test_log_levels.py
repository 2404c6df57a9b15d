"""A job shows the log records that its program shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scripts import Script

PROGRAM = """
import json, logging
from absl import logging as absl_logging
import kinetic

class Own(logging.Logger): ...

def set_up(case):
    root, app = logging.getLogger(), logging.getLogger("app")
    stream = logging.StreamHandler()
    if case == "basic":
        logging.basicConfig(level=logging.INFO)
    elif case == "logger":
        logging.basicConfig()
        app.setLevel(logging.INFO)
    elif case == "own handler":
        app.setLevel(logging.INFO)
        app.addHandler(stream)
        app.propagate = False
    elif case == "file":
        logging.basicConfig(level=logging.INFO, filename="app.log")
    elif case == "file and console":
        file = logging.FileHandler("app.log")
        stream.setLevel(logging.INFO)
        logging.basicConfig(level=logging.DEBUG, handlers=[file, stream])
    elif case == "absl":
        absl_logging.set_verbosity(absl_logging.INFO)
    elif case == "one is quiet":
        logging.basicConfig(level=logging.INFO)
        logging.getLogger("app.deep").setLevel(logging.ERROR)
    elif case == "own class":
        logging.setLoggerClass(Own)
        logging.getLogger("own").setLevel(logging.DEBUG)

def speak():
    import logging
    from absl import logging as absl_logging
    for name in ("app", "app.deep", "own"):
        for level in (10, 20, 30):
            logging.getLogger(name).log(level, f"{name} {level}")
    absl_logging.debug("absl 10")
    absl_logging.info("absl 20")
    absl_logging.warning("absl 30")

if __name__ == "__main__":
    FOUND = {}
    for case in CASES:
        logging.shutdown()
        for logger in (logging.root, *map(logging.getLogger, ("app", "app.deep"))):
            logger.handlers.clear()
            logger.setLevel(logging.WARNING if logger is logging.root else logging.NOTSET)
            logger.propagate = True
        absl_logging.set_verbosity(absl_logging.WARNING)
        set_up(case)
        job = kinetic.run(backend="local", accelerator="cpu")(speak).run_async()
        job.result(cleanup=False)
        FOUND[case] = job.logs()
    open("out.json", "w").write(json.dumps(FOUND))
"""

WARNINGS = {"app 30", "app.deep 30", "own 30", "absl 30"}
INFOS = {"app 20", "app.deep 20"}
EXPECTED = {
    "nothing": WARNINGS,
    "own class": WARNINGS,
    "basic": WARNINGS | INFOS | {"own 20"},
    "logger": WARNINGS | INFOS,
    "own handler": WARNINGS | INFOS,
    "file": WARNINGS | INFOS | {"own 20"},
    "file and console": WARNINGS | INFOS | {"own 20"},
    "absl": WARNINGS | {"absl 20"},
    "one is quiet": (WARNINGS | {"app 20", "own 20"}) - {"app.deep 30"},
}


@pytest.mark.parametrize("level", ["", pytest.param("DEBUG", marks=pytest.mark.full)])
def test_a_job_shows_what_its_program_shows(level: str, tmp_path: Path) -> None:
    """KINETIC_LOG_LEVEL changes nothing for a job, which has no lines of kinetic."""
    env = {"KINETIC_LOG_LEVEL": level} if level else {}
    header = f"CASES = {[*EXPECTED]!r}\n"
    with Script(header + PROGRAM, folder=tmp_path, env=env, deadline=110) as process:
        exit_code, _, err = process.end()
    assert exit_code == 0, err
    for case, log in json.loads((tmp_path / "out.json").read_text()).items():
        shown = {line.rpartition(":")[2] for line in log.splitlines()}
        assert shown == EXPECTED[case], case
