"""Checks of the installation: the interpreter, the packages, and which ``kinetic`` a shell runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from kinetic._version import __version__
from kinetic.doctor.checks import Check, Finding, State

OURS, PUBLIC = "kinetic-aio", "keras-kinetic"
SCRIPT = "kinetic"
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*(>=\s*(?P<least>[0-9.]+))?")


class Installation:
    """This interpreter and what is installed in it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def checks(self) -> list[Check]:
        """Those of the installation."""
        again = f"pip install --upgrade {OURS}"
        return [
            Check(name="python", group="installation", look=self._python),
            Check(name="packages", group="installation", look=self._packages, advice=again),
            Check(name="script", group="installation", look=self._script),
        ]

    async def _python(self) -> Finding:
        words = f"{platform.python_implementation()} {platform.python_version()}"
        where = f"{words} on {platform.system()} {platform.machine()}, {sys.executable}"
        return Finding(State.OK, f"kinetic {__version__}, {where}")

    async def _packages(self) -> Finding:
        try:
            required = importlib.metadata.requires(OURS) or []
        except importlib.metadata.PackageNotFoundError:
            evidence = f"{OURS} is not installed; it runs from {Path(__file__).parents[2]}"
            return Finding(State.WARNING, evidence, f"pip install {OURS}")
        wanted = [one for one in required if "extra ==" not in one]
        lacking = [words for one in wanted if (words := _lack(one))]
        if lacking:
            return Finding(State.FAILED, "; ".join(lacking))
        return Finding(State.OK, f"all {len(wanted)} that it requires are there")

    async def _script(self) -> Finding:
        found = shutil.which(SCRIPT, path=self._environ.get("PATH", os.defpath))
        theirs = _version(PUBLIC)
        if found is None:
            evidence = f"no {SCRIPT!r} is on the PATH; `{sys.executable} -m kinetic` is the same"
            return Finding(State.WARNING, evidence, f"add {_scripts()} to the PATH")
        owners = _owners(found)
        if owners == [OURS] or (not owners and theirs is None):
            return Finding(State.OK, f"`{SCRIPT}` runs {found}")
        if theirs is None and not owners:
            return Finding(State.OK, f"`{SCRIPT}` runs {found}, of another environment")
        whose = " and of ".join(owners) if owners else "another environment"
        evidence = f"`{SCRIPT}` runs {found}, of {whose}"
        if theirs is not None:
            evidence += f"; {PUBLIC} {theirs} is installed beside this one, with files of one name"
        mend = f"pip uninstall -y {PUBLIC} {OURS} && pip install {OURS}"
        return Finding(State.WARNING, evidence, f"`{sys.executable} -m kinetic`, or {mend}")


def _lack(requirement: str) -> str:
    """What of one line of requirements is not there; empty if all is well."""
    parts = REQUIREMENT.match(requirement)
    assert parts is not None  # they are our own
    there = _version(parts["name"])
    if there is None:
        return f"{parts['name']} is missing"
    if parts["least"] and _numbers(there) < _numbers(parts["least"]):
        return f"{parts['name']} is {there}, and {parts['least']} is the least"
    return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(one) for one in re.findall(r"\d+", version)[:3])


def _owners(script: str) -> list[str]:
    """Which of the two packages have installed the file *script* in this environment."""
    there = Path(script).resolve()
    owners: list[str] = []
    for package in (OURS, PUBLIC):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if any(one.name == SCRIPT and Path(str(one.locate())).resolve() == there for one in files):
            owners.append(package)
    return owners


def _scripts() -> Path:
    return Path(sys.executable).parent
