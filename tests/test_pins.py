"""README installs pinned versions, so that a new release of a dependency can't break it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import pins

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = {canonicalize_name(pin.name): pin for pin in map(Requirement, pins.constraints())}


def declared() -> set[str]:
    """Return every requirement of pyproject.toml, except the package itself."""
    lists = [
        PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"].values(),
        *PROJECT["dependency-groups"].values(),
    ]
    requirements = {requirement for names in lists for requirement in names}
    return {name for name in requirements if not name.startswith("kinetic-aio")}


def test_every_requirement_has_one_version() -> None:
    loose = [pin for pin in PINNED.values() if not re.match(r"==[^*]+$", str(pin.specifier))]
    missing = [
        name for name in declared() if canonicalize_name(Requirement(name).name) not in PINNED
    ]
    assert (loose, missing) == ([], [])


def test_a_pinned_version_satisfies_pyproject() -> None:
    for wanted in map(Requirement, declared()):
        (pin,) = PINNED[canonicalize_name(wanted.name)].specifier
        assert wanted.specifier.contains(pin.version), f"run `tox run -e pins`: {wanted}, {pin}"


def test_the_build_has_the_same_versions() -> None:
    assert PROJECT["build-system"]["requires"] == pins.build_requires()
    assert {line.partition("==")[0] for line in pins.build_requires()} == {*pins.BUILD_PACKAGES}


def test_every_installation_in_readme_has_the_constraints() -> None:
    commands = re.findall(
        r"pip install[^&\n]*",
        "".join(re.findall(r"```sh\n.*?```", (ROOT / "README.md").read_text(), re.S)),
    )
    assert commands and all("-c constraints.txt" in command for command in commands)
