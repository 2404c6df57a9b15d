"""The API reference names everything public."""

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
def test_every_public_name_can_be_imported_from_where_the_reference_says(module: str) -> None:
    there = importlib.import_module(module)
    assert [name for name in LISTED[module] if not hasattr(there, name)] == []
    assert {*LISTED[module]} <= {*there.__all__}


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
    fields = [one for one in dataclasses.fields(options) if one.init]
    assert list(found) == [one.name for one in fields]
    plain = {name: default.strip("`").replace('"', "'") for name, default in found.items()}
    given = {one.name: repr(one.default) for one in fields if one.default is not None}
    assert {name: plain[name] for name in given} == given
