"""What accelerators cost by the lists, and by a file of the user's own."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from kinetic import accelerators, prices
from kinetic.errors import ConfigurationError

HERE = "us-central1-a"
LISTED: dict[str, Any] = json.loads(Path(prices.__file__).with_suffix(".json").read_text())


def usd(name: str, zone: str = HERE, **environ: str) -> float | None:
    found = prices.price_of(accelerators.parse(name), zone, environ)
    return None if found is None else found.usd_per_hour


def test_each_figure_has_a_source_with_an_address_and_a_date() -> None:
    for source in LISTED["sources"].values():
        assert re.match(r"https://\S+/[0-9a-f]{40}/\S+$", source["url"])
        assert date.fromisoformat(source["date"])
    figures = [
        one
        for kind in ("machines", "chips")
        for regions in LISTED[kind].values()
        for one in regions.values()
    ]
    assert len(figures) > 50
    for one in figures:
        assert one["source"] in LISTED["sources"]
        assert 0 < one["spot"] < one["hour"]


def test_each_figure_is_of_something_that_can_be_asked_for() -> None:
    assert {*LISTED["chips"]} <= {*accelerators.TPUS}
    machines = {one.machine for one in accelerators.catalogue()}
    assert {*LISTED["machines"]} <= machines
    assert {*LISTED["memory_gb"]} <= {*accelerators.TPUS, *accelerators.GPUS}


def test_a_slice_costs_its_chips_and_a_machine_what_it_costs() -> None:
    assert usd("tpu-v6e-8") == pytest.approx(8 * 2.7)
    assert usd("tpu-v6e-16") == pytest.approx(16 * 2.7)  # four hosts, no more for it
    assert usd("tpu-v6e-8:spot") == pytest.approx(8 * 0.57285)
    assert usd("gpu-a100x8") == pytest.approx(29.38708)
    assert usd("tpu-v5e-4", "europe-west4-b") == pytest.approx(4 * 1.56)


@pytest.mark.parametrize("name", ["gpu-gb300", "cpu", "cpu:4"])
def test_what_no_source_is_known_for_has_no_figure(name: str) -> None:
    assert usd(name) is None
    assert usd("tpu-v6e-8", "mars-north1-a") is None


def test_prices_of_ones_own_go_first_by_any_name_of_the_accelerator(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text('{"nvidia-l4": 0.71, "cpu": 0.05, "v6e-8:spot": 6.5}')
    assert usd("gpu-l4", KINETIC_PRICES=str(file)) == 0.71
    assert usd("cpu", KINETIC_PRICES=str(file)) == 0.05
    assert usd("tpu-v6e-8:spot", KINETIC_PRICES=str(file)) == 6.5
    assert usd("tpu-v6e-8", KINETIC_PRICES=str(file)) == pytest.approx(21.6)
    own = prices.price_of(accelerators.parse("gpu-l4"), HERE, {"KINETIC_PRICES": str(file)})
    assert own is not None and (own.source, own.date) == (str(file), "")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "isn't an object of names"),
        ("{", "which is wrong"),
        ('{"gpu-l5": 1}', "there is no accelerator 'gpu-l5'"),
        ('{"gpu-l4": "1"}', "the price of gpu-l4 is '1'; write a number"),
        ('{"gpu-l4": -1}', "write one above 0"),
    ],
)
def test_a_file_that_cannot_be_used_is_told(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "prices.json"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        usd("gpu-l4", KINETIC_PRICES=str(file))
    with pytest.raises(ConfigurationError, match="KINETIC_PRICES names /nowhere"):
        usd("gpu-l4", KINETIC_PRICES="/nowhere")


def test_a_submission_is_estimated_and_says_that_it_is() -> None:
    found = prices.estimate("tpu-v6e-8", seconds=1800, items=10, zone=HERE, environ={})
    assert (found.hours, found.expected_hours, found.cost) == (0.0, 5.0, 0.0)
    assert found.expected_cost == pytest.approx(5 * 21.6)
    assert str(found) == "estimate: 0.00 of 5.00 hours of tpu-v6e-8, $0.00 of $108.00"
    assert found.to_dict()["estimate"] is True
    unknown = prices.estimate("cpu", seconds=60, environ={})
    assert unknown.expected_cost is None
    assert str(unknown).endswith("hours of cpu, — of —")


def test_the_catalogue_has_a_row_for_each() -> None:
    found = prices.rows(HERE, {})
    assert [one.accelerator for one in found] == [*accelerators.catalogue()]
    (l4,) = (one for one in found if str(one.accelerator) == "gpu-l4")
    assert l4.memory_gb == 24


def test_a_budget_without_a_price_says_how_to_give_one() -> None:
    words = r'no price of cpu in us-central1-a.*"cpu": US_DOLLARS_AN_HOUR.*set KINETIC_PRICES'
    with pytest.raises(ConfigurationError, match=words):
        prices.budget_price(accelerators.parse("cpu"), HERE, {})
