"""Examine the installation: the packages, and the ``kinetic`` that a shell runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = """
import asyncio, json, os, sys
from dataclasses import asdict
from kinetic.doctor.checks import run_checks
from kinetic.doctor.python import installation
report = asyncio.run(run_checks(installation(os.environ)))
print(json.dumps({result.name: asdict(result) for result in report.results}))
"""


def install(site: Path, package: str, version: str, *files: str, requires: str = "") -> None:
    """Write what pip writes for *package*: its metadata and the list of its files."""
    folder = site / f"{package.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    requirement = f"Requires-Dist: {requires}\n" if requires else ""
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n{requirement}"
    (folder / "METADATA").write_text(metadata)
    (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def script(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "kinetic"
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return file


def check_installation(site: Path, path: Path) -> dict[str, dict[str, str]]:
    """Run the checks in a fresh interpreter that searches *site* first."""
    environ = {**os.environ, "PATH": str(path), "PYTHONPATH": f"{site}:{ROOT}"}
    completed = subprocess.run(
        [sys.executable, "-c", CHECK], env=environ, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    found: dict[str, dict[str, str]] = json.loads(completed.stdout)
    return found


def test_kinetics_own_script_is_ok(tmp_path: Path) -> None:
    install(tmp_path / "site", "kinetic-aio", "0.1.0", "../bin/kinetic")
    ours = script(tmp_path / "bin")
    found = check_installation(tmp_path / "site", ours.parent)["script"]
    assert (found["state"], found["evidence"]) == ("ok", f"`kinetic` runs {ours}")


def test_the_public_packages_script_is_a_warning_with_the_fix(tmp_path: Path) -> None:
    install(tmp_path / "site", "kinetic-aio", "0.1.0")
    install(tmp_path / "site", "keras-kinetic", "0.0.4", "../bin/kinetic")
    theirs = script(tmp_path / "bin")
    found = check_installation(tmp_path / "site", theirs.parent)["script"]
    assert found["state"] == "warning"
    assert f"runs {theirs}, of keras-kinetic; keras-kinetic 0.0.4 is inst" in found["evidence"]
    assert "-m kinetic`, or pip uninstall -y keras-kinetic" in found["advice"]


def test_a_missing_script_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = check_installation(tmp_path, tmp_path / "empty")["script"]
    assert found["state"] == "warning" and "-m kinetic" in found["evidence"]


@pytest.mark.parametrize(
    ("requires", "message"),
    [
        ("nowhere-to-be-found>=1", "nowhere-to-be-found is missing"),
        ("anyio>=99.1", "but kinetic needs >=99.1"),
    ],
)
def test_a_package_that_is_missing_or_too_old_fails(
    tmp_path: Path, requires: str, message: str
) -> None:
    install(tmp_path / "site", "kinetic-aio", "0.1.0", requires=requires)
    found = check_installation(tmp_path / "site", tmp_path)["packages"]
    assert found["state"] == "failed" and message in found["evidence"]
    assert found["advice"] == "pip install --upgrade kinetic-aio"
