"""Copy the versions of the build tools from constraints.txt to pyproject.toml.

``tox run -e pins`` runs this module after it has written constraints.txt.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD_PACKAGES = ("editables", "hatchling", "packaging", "pathspec", "pluggy", "trove-classifiers")
"""hatchling, what it imports, and what it asks for in an editable build."""


def constraints() -> list[str]:
    """Return the lines of constraints.txt that name a package."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.lstrip().startswith("#")]


def build_requires() -> list[str]:
    """Return ``[build-system] requires`` as constraints.txt wants it."""
    return [line for line in constraints() if line.partition("==")[0] in BUILD_PACKAGES]


def main() -> None:
    """Write the versions of the build tools to pyproject.toml."""
    pyproject = ROOT / "pyproject.toml"
    names = "".join(f'    "{line}",\n' for line in build_requires())
    pyproject.write_text(
        re.sub(
            r"(?s)(\[build-system\]\nrequires = )\[.*?\]", rf"\1[\n{names}]", pyproject.read_text()
        )
    )


if __name__ == "__main__":
    main()
