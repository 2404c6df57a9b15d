"""The API reference lists every public name, and the defaults of all options."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from kinetic.options import MapSettings, Options

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| `(kinetic[\w.]*)` \| (.*) \|$", re.MULTILINE)
LISTED = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in ROW.findall((DOCS / "api.md").read_text())
}


@pytest.mark.parametrize("module", LISTED)
def test_every_listed_name_can_be_imported_from_its_module(module: str) -> None:
    imported = importlib.import_module(module)
    assert [name for name in LISTED[module] if not hasattr(imported, name)] == []
    assert {*LISTED[module]} <= {*imported.__all__}


def test_all_names_of_the_packages_and_all_errors_are_in_the_reference() -> None:
    for module in (
        *("kinetic", "kinetic.aio", "kinetic.aio.infra"),
        *("kinetic.errors", "kinetic.jobs", "kinetic.outcome"),
    ):
        assert {*importlib.import_module(module).__all__} == {*LISTED[module]}, module


@pytest.mark.parametrize(("call", "options"), [("run", Options), ("run_async_map", MapSettings)])
def test_the_options_of_a_call_are_in_the_reference_with_their_defaults(
    call: str, options: type[Options | MapSettings]
) -> None:
    text = (DOCS / "reference/batches.md").read_text()
    table = text.partition(f"| option of `{call}` |")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ")[:2] for row in table.splitlines()[2:]]
    found = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    fields = [field for field in dataclasses.fields(options) if field.init]
    assert list(found) == [field.name for field in fields]
    shown = {name: default.strip("`").replace('"', "'") for name, default in found.items()}
    defaults = {field.name: repr(field.default) for field in fields if field.default is not None}
    assert {name: shown[name] for name in defaults} == defaults
