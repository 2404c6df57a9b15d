"""A release of somebody else changes nothing for README's commands."""

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
PINNED = {canonicalize_name(one.name): one for one in map(Requirement, pins.constraints())}


def declared() -> set[str]:
    """Return every requirement of pyproject.toml, except the package itself."""
    lists = [
        PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"].values(),
        *PROJECT["dependency-groups"].values(),
    ]
    return {one for names in lists for one in names if not one.startswith("kinetic-aio")}


def test_every_requirement_has_one_version() -> None:
    assert {
        str(one) for one in PINNED.values() if not re.match(r"==[^*]+$", str(one.specifier))
    } == set()
    assert {
        one for one in declared() if canonicalize_name(Requirement(one).name) not in PINNED
    } == set()


def test_a_pinned_version_satisfies_pyproject() -> None:
    for one in map(Requirement, declared()):
        (pin,) = PINNED[canonicalize_name(one.name)].specifier
        assert one.specifier.contains(pin.version), f"run `tox run -e pins`: {one}, {pin}"


def test_the_build_has_the_same_versions() -> None:
    assert PROJECT["build-system"]["requires"] == pins.build_requires()
    assert {line.partition("==")[0] for line in pins.build_requires()} == {*pins.BUILD_PACKAGES}


def test_every_installation_in_readme_has_the_constraints() -> None:
    commands = re.findall(
        r"pip install[^&\n]*",
        "".join(re.findall(r"```sh\n.*?```", (ROOT / "README.md").read_text(), re.S)),
    )
    assert commands and all("-c constraints.txt" in one for one in commands)
