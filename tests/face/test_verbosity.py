"""Test KINETIC_LOG_LEVEL: it sets the level of kinetic's log and of no other library's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import Script

PROGRAM = """
import logging
import kinetic
from absl import logging as absl_logging

@kinetic.run(backend="local", accelerator="cpu")
def square(x):
    return x * x

if __name__ == "__main__":
    assert square.run_async(3).result() == 9
    assert square.run_async_map([1, 2]).results() == [1, 4]
    absl_logging.info("another library")
    absl_logging.warning("its warning")
    assert logging.getLogger().level == logging.WARNING
    {after}
    print(kinetic.log_level)
"""


def run(folder: Path, level: str, after: str = "") -> tuple[int, str, str]:
    """Run the program with *level* as KINETIC_LOG_LEVEL."""
    env = {"KINETIC_LOG_LEVEL": level}
    with Script(PROGRAM.format(after=after), folder=folder, env=env, deadline=110) as process:
        return process.end()


LATER = "kinetic.Data('gs://bucket/folder')"


def test_without_the_variable_only_warnings_appear(tmp_path: Path) -> None:
    """One of them names a misspelt variable."""
    env = {"KINETIC_LOCALSLOTS": "1", "KINETIC_OF_MY_PROGRAM": "1"}
    with Script(PROGRAM.format(after=LATER), folder=tmp_path, env=env) as process:
        code, out, err = process.end()
    assert (code, out) == (0, "WARNING\n")
    misspelt, others, kinetics = err.splitlines()
    hint = "LOCALSLOTS has no effect on kinetic: did you mean KINETIC_LOCAL_SLOTS?"
    assert misspelt.startswith("WARNING:kinetic:") and hint in misspelt
    assert others == "WARNING:absl:its warning"
    assert kinetics.startswith("WARNING:kinetic:gs://bucket/folder names one object")


def test_a_warning_before_any_call_has_the_name_of_kinetic(tmp_path: Path) -> None:
    with Script(f"import kinetic\n{LATER}", folder=tmp_path) as process:
        _, _, err = process.end()
    assert err.startswith("WARNING:kinetic:gs://bucket/folder names one object")


def test_level_info_shows_packing_uploads_and_started_jobs(tmp_path: Path, home: Path) -> None:
    code, out, err = run(tmp_path, "info")
    assert (code, out) == (0, "INFO\n")
    assert f"Packed {tmp_path}: 2 files, " in err
    for message in (
        "Uploaded code/",
        "Uploaded functions/",
        "Started job-local-",
        "Started grp-local-",
    ):
        assert message in err
    assert f".zip is in file://{home}/store already" in err, "the batch doesn't send it again"


@pytest.mark.full
def test_a_level_set_by_the_program_applies_to_other_libraries(tmp_path: Path) -> None:
    later = "absl_logging.set_verbosity(absl_logging.INFO); absl_logging.info('now heard')"
    _, _, err = run(tmp_path, "DEBUG", later)
    assert "now heard" in err and "its warning" in err and "another library" not in err


@pytest.mark.full
def test_level_error_hides_only_kinetics_warnings(tmp_path: Path) -> None:
    assert run(tmp_path, "ERROR", LATER)[2].splitlines() == ["WARNING:absl:its warning"]


@pytest.mark.parametrize("level", ["warnign", "17"])
def test_an_unknown_level_is_refused_before_anything_is_uploaded(
    tmp_path: Path, home: Path, level: str
) -> None:
    code, _, err = run(tmp_path, level)
    assert code == 1 and f"KINETIC_LOG_LEVEL is '{level}', which isn't a level" in err
    assert err.count("Traceback") == 1, err
    assert not (home / "store").exists()
