"""The pages of docs/reference say what is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/reference/imports.md"
ROW = re.compile(r"^\| `(kinetic[\w.]*)` \| (.*) \|$", re.MULTILINE)
LISTED = {module: re.findall(r"`(\w+)`", names) for module, names in ROW.findall(PAGE.read_text())}


@pytest.mark.parametrize("module", LISTED)
def test_every_public_name_can_be_imported_from_where_the_reference_says(module: str) -> None:
    there = importlib.import_module(module)
    assert [name for name in LISTED[module] if not hasattr(there, name)] == []
    assert {*LISTED[module]} <= {*there.__all__}


def test_all_names_of_the_packages_and_all_errors_are_in_the_reference() -> None:
    for module in ("kinetic", "kinetic.aio", "kinetic.errors", "kinetic.jobs", "kinetic.outcome"):
        assert {*importlib.import_module(module).__all__} == {*LISTED[module]}, module
