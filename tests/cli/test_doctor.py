"""``kinetic doctor``: what it prints, and what it ends with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import Kinetic


@pytest.fixture(autouse=True)
def project(small_project: Path) -> Path:
    return small_project


def test_a_healthy_machine_ends_with_0_and_a_job_is_run_if_asked_for(kinetic: Kinetic) -> None:
    said = kinetic("doctor", "--run")
    assert said.code == 0, said.out
    assert "this machine" in said.out.splitlines()
    assert re.search(r"^  job +ok +submitted in .*, done after .*; it ran Python", said.out, re.M)
    assert "FAILED" not in said.out
    shown = kinetic("doctor", "--json")
    assert shown.code == 0
    assert shown.json["schema"] == "kinetic.doctor/1" and shown.json["healthy"] is True
    names = [one["name"] for one in shown.json["checks"]]
    assert names[-1] == "supervisor" and "job" not in names


def test_what_fails_is_told_with_what_to_do_and_ends_with_1(kinetic: Kinetic, home: Path) -> None:
    home.chmod(0o777)
    said = kinetic("doctor")
    home.chmod(0o700)
    assert said.code == 1
    lines = said.out.splitlines()
    (at,) = [number for number, line in enumerate(lines) if "FAILED" in line]
    assert "mode 0777" in lines[at]
    assert lines[at + 1].strip() == f"-> `chmod go-w {home}`"
    assert "not checked, because 'home' failed" in said.out
    assert " 1 failed" in lines[-1]


def test_what_a_namespace_needs_is_printed_for_kubectl(kinetic: Kinetic) -> None:
    said = kinetic("doctor", "--manifest")
    assert said.code == 0
    kinds = re.findall(r"^kind: (\w+)$", said.out, re.MULTILINE)
    assert kinds == ["ServiceAccount", "Role", "RoleBinding", "Role", "RoleBinding"]
