"""The control plane's programs are used where they are, and built by nobody who did not ask."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.binaries import NAMES, VARIABLE, MissingBinaries, built, find

ROOT = Path(__file__).parents[2]
WANTS_A_CLUSTER = "tests/cluster/test_control_plane.py::test_requests_of_a_user_are_counted"


def put(folder: Path, *names: str, script: str = "#!/bin/sh\n") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)


def test_without_binaries_it_is_said_how_to_get_them() -> None:
    with pytest.raises(MissingBinaries, match=r"(?s)KUBEBUILDER_ASSETS.*tests.cluster.binaries"):
        find({"PATH": "/nowhere", "XDG_CACHE_HOME": "/nowhere"})


def test_the_folder_that_was_named_comes_before_the_path_and_that_before_what_was_built(
    tmp_path: Path,
) -> None:
    named, path, cache = (tmp_path / name for name in ("named", "path", "cache"))
    environ = {VARIABLE: str(named), "PATH": str(path), "XDG_CACHE_HOME": str(cache)}
    for folder in (built(environ), path, named):
        put(folder, *NAMES)
        assert find(environ).apiserver == folder / "kube-apiserver"


def test_a_folder_that_lacks_one_is_passed_over(tmp_path: Path) -> None:
    put(tmp_path / "some", *NAMES[1:])
    put(tmp_path / "all", *NAMES)
    environ = {VARIABLE: str(tmp_path / "some"), "PATH": str(tmp_path / "all")}
    assert find({**environ, "XDG_CACHE_HOME": "/nowhere"}).etcd == tmp_path / "all" / "etcd"


@pytest.mark.parametrize(("ci", "word"), [("", "skipped"), ("1", "error")])
def test_a_run_of_the_tests_builds_nothing_but_says_how_to(
    tmp_path: Path, ci: str, word: str
) -> None:
    put(tmp_path / "bin", "go", script=f"#!/bin/sh\necho $@ >> {tmp_path}/built\n")
    environ = {"PATH": f"{tmp_path}/bin:{os.defpath}", "HOME": str(tmp_path), "CI": ci}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-m", ""]
    command += [WANTS_A_CLUSTER]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=110, check=False
    )
    assert f"1 {word}" in done.stdout and "python -m tests.cluster.binaries" in done.stdout
    assert done.returncode == (1 if ci else 0)
    assert not (tmp_path / "built").exists()
