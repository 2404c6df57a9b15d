"""What the end of a job's error says that a user can do about it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import traceback

@kinetic.run(backend="local", accelerator="cpu", memory="256Mi")
def fails(how):
    if how == "variable":
        return os.environ["WANTED"]
    if how == "other key":
        return {}["WANTED"]
    if how == "module":
        import nothing_of_this_name.inside
    return len(bytearray(1 << 40))

for how in ("variable", "module", "memory", "other key"):
    try:
        fails(how)
    except Exception:
        text = traceback.format_exc()
        last = text.rstrip().splitlines()[-1]
        print(text.count(last), last)
"""

HINTS = (
    ["'WANTED'", "capture_env_vars="],
    ["install nothing_of_this_name for", sys.executable],
    ["memory=", "256 MiB"],
)


def test_an_error_ends_with_what_to_do_about_it(script) -> None:
    with script(CODE) as process:
        for hint in HINTS:
            last = process.line()
            assert last.startswith("1 ") and all(word in last for word in hint), last
        last = process.line()
        assert last.endswith("KeyError: 'WANTED'"), "a key that names no variable gets no hint"
        assert process.end() == (0, "", "")


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts a small disk")
def test_a_value_that_does_not_fit_on_the_disk_says_so(script, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mounts")
    home = str(disk / "home")
    code = f"""
os.environ["KINETIC_HOME"] = {home!r}
@remote
def large():
    return os.urandom(32 << 20)

try:
    large()
except kinetic.errors.JobFailed as error:
    print("No space left" in str(error), "free some space" in str(error))
"""
    try:
        with script(code) as process:
            process.expect("True True")
            assert process.end()[0] == 0
    finally:
        stop = [sys.executable, "-m", "kinetic", "local", "stop"]
        subprocess.run(stop, env={**os.environ, "KINETIC_HOME": home}, check=True)
        subprocess.run(["umount", str(disk)], check=True)
