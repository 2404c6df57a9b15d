"""Check the installation: the interpreter, the packages, and which ``kinetic`` a shell runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement

from kinetic._version import __version__
from kinetic.doctor.checks import Check, Finding, failed, ok, warning

GROUP = "installation"
OWN_PACKAGE, PUBLIC_PACKAGE = "kinetic-aio", "keras-kinetic"
SCRIPT = "kinetic"


def installation(environ: Mapping[str, str]) -> list[Check]:
    """Return the checks of this interpreter and what is installed in it."""
    find_script = partial(_find_script, environ.get("PATH", os.defpath))
    upgrade = f"pip install --upgrade {OWN_PACKAGE}"
    return [
        Check(name="python", group=GROUP, probe=_python),
        Check(name="packages", group=GROUP, probe=_packages, advice=upgrade),
        Check(name="script", group=GROUP, probe=find_script),
    ]


async def _python() -> Finding:
    version = f"{platform.python_implementation()} {platform.python_version()}"
    machine = f"{platform.system()} {platform.machine()}"
    return ok(f"kinetic {__version__}, {version} on {machine}, {sys.executable}")


async def _packages() -> Finding:
    try:
        lines = importlib.metadata.requires(OWN_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        evidence = f"{OWN_PACKAGE} is not installed; kinetic runs from {Path(__file__).parents[2]}"
        return warning(evidence, f"pip install {OWN_PACKAGE}")
    requirements = [
        requirement
        for requirement in map(Requirement, lines)
        if not requirement.marker or requirement.marker.evaluate()
    ]
    if problems := [*filter(None, map(_problem_with, requirements))]:
        return failed("; ".join(problems))
    return ok(f"all {len(requirements)} required packages are installed")


def _problem_with(requirement: Requirement) -> str:
    """Return why the installed packages don't meet *requirement*; empty if they do."""
    version = _installed_version(requirement.name)
    if version is None:
        return f"{requirement.name} is missing"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} is {version}, but kinetic needs {requirement.specifier}"
    return ""


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


async def _find_script(path: str) -> Finding:
    """Check which ``kinetic`` a shell runs, because keras-kinetic has a script of that name."""
    script, public_version = shutil.which(SCRIPT, path=path), _installed_version(PUBLIC_PACKAGE)
    same_command = f"`{sys.executable} -m kinetic`"
    if script is None:
        evidence = f"`{SCRIPT}` isn't on the PATH; {same_command} is the same command"
        return warning(evidence, f"add {Path(sys.executable).parent} to the PATH")
    owners = [package for package in (OWN_PACKAGE, PUBLIC_PACKAGE) if _owns(package, script)]
    evidence = f"`{SCRIPT}` runs {script}"
    if owners == [OWN_PACKAGE]:
        return ok(evidence)
    evidence += f", of {' and '.join(owners) or 'another environment'}"
    if public_version is None and not owners:
        return ok(evidence)
    if public_version is not None:
        evidence += f"; {PUBLIC_PACKAGE} {public_version} is installed too and has files of the "
        evidence += "same names"
    reinstall = f"pip uninstall -y {PUBLIC_PACKAGE} {OWN_PACKAGE} && pip install {OWN_PACKAGE}"
    return warning(evidence, f"{same_command}, or {reinstall}")


def _owns(package: str, script: str) -> bool:
    """Return whether *package* installed the file *script* in this environment."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return False
    path = Path(script).resolve()
    return any(file.name == SCRIPT and Path(str(file.locate())).resolve() == path for file in files)
