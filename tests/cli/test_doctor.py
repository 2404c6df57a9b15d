"""The output and exit codes of ``kinetic doctor``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import Kinetic


@pytest.fixture(autouse=True)
def project(small_project: Path) -> Path:
    return small_project


def test_a_healthy_machine_gives_exit_code_0_and_run_starts_a_job(kinetic: Kinetic) -> None:
    completed = kinetic("doctor", "--run")
    assert completed.code == 0, completed.out
    assert "this machine" in completed.out.splitlines()
    assert re.search(
        r"^  job +ok +submitted in .*, done after .*; it ran Python", completed.out, re.M
    )
    assert "FAILED" not in completed.out
    shown = kinetic("doctor", "--json")
    assert shown.code == 0
    assert shown.json["schema"] == "kinetic.doctor/1" and shown.json["healthy"] is True
    names = [check["name"] for check in shown.json["checks"]]
    assert names[-1] == "supervisor" and "job" not in names


def test_a_failed_check_is_shown_with_its_fix_and_gives_exit_code_1(
    kinetic: Kinetic, home: Path
) -> None:
    home.chmod(0o777)
    completed = kinetic("doctor")
    home.chmod(0o700)
    assert completed.code == 1
    lines = completed.out.splitlines()
    (at,) = [number for number, line in enumerate(lines) if "FAILED" in line]
    assert "mode 0777" in lines[at]
    assert lines[at + 1].strip() == f"-> `chmod go-w {home}`"
    assert "not checked, because 'home' failed" in completed.out
    assert " 1 failed" in lines[-1]


def test_the_manifest_of_a_namespace_is_printed_for_kubectl(kinetic: Kinetic) -> None:
    completed = kinetic("doctor", "--manifest")
    assert completed.code == 0
    kinds = re.findall(r"^kind: (\w+)$", completed.out, re.MULTILINE)
    assert kinds == ["ServiceAccount", "Role", "RoleBinding", "Role", "RoleBinding"]
