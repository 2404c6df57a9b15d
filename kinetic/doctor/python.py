"""Check the installation: the interpreter, the packages, and which ``kinetic`` a shell runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement

from kinetic._version import __version__
from kinetic.doctor.checks import Check, Finding, failed, ok, warning

GROUP = "installation"
OURS, PUBLIC = "kinetic-aio", "keras-kinetic"
SCRIPT = "kinetic"


def installation(environ: Mapping[str, str]) -> list[Check]:
    """Return the checks of this interpreter and what is installed in it."""

    async def script() -> Finding:
        return _script(environ.get("PATH", os.defpath))

    upgrade = f"pip install --upgrade {OURS}"
    return [
        Check(name="python", group=GROUP, look=_python),
        Check(name="packages", group=GROUP, look=_packages, advice=upgrade),
        Check(name="script", group=GROUP, look=script),
    ]


async def _python() -> Finding:
    version = f"{platform.python_implementation()} {platform.python_version()}"
    machine = f"{platform.system()} {platform.machine()}"
    return ok(f"kinetic {__version__}, {version} on {machine}, {sys.executable}")


async def _packages() -> Finding:
    try:
        lines = importlib.metadata.requires(OURS) or []
    except importlib.metadata.PackageNotFoundError:
        evidence = f"{OURS} is not installed; it runs from {Path(__file__).parents[2]}"
        return warning(evidence, f"pip install {OURS}")
    wanted = [one for one in map(Requirement, lines) if not one.marker or one.marker.evaluate()]
    if missing := [words for one in wanted if (words := _missing(one))]:
        return failed("; ".join(missing))
    return ok(f"all {len(wanted)} required packages are installed")


def _missing(requirement: Requirement) -> str:
    version = _version(requirement.name)
    if version is None:
        return f"{requirement.name} is missing"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} is {version}, but kinetic needs {requirement.specifier}"
    return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _script(path: str) -> Finding:
    """Find which ``kinetic`` a shell runs: keras-kinetic installs a script of the same name."""
    found, public = shutil.which(SCRIPT, path=path), _version(PUBLIC)
    if found is None:
        evidence = (
            f"`{SCRIPT}` isn't on the PATH; `{sys.executable} -m kinetic` is the same command"
        )
        return warning(evidence, f"add {Path(sys.executable).parent} to the PATH")
    owners = [package for package in (OURS, PUBLIC) if _owns(package, found)]
    if public is None and PUBLIC not in owners:
        return ok(f"`{SCRIPT}` runs {found}" + ("" if owners else ", of another environment"))
    evidence = f"`{SCRIPT}` runs {found}"
    if owners == [OURS]:
        return ok(evidence)
    evidence += f", of {' and '.join(owners) or 'another environment'}"
    if public is not None:
        evidence += f"; {PUBLIC} {public} is installed too and has files of the same names"
    reinstall = f"pip uninstall -y {PUBLIC} {OURS} && pip install {OURS}"
    return warning(evidence, f"`{sys.executable} -m kinetic`, or {reinstall}")


def _owns(package: str, script: str) -> bool:
    """Return whether *package* installed the file *script* in this environment."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return False
    place = Path(script).resolve()
    return any(one.name == SCRIPT and Path(str(one.locate())).resolve() == place for one in files)
