"""Test the listed prices of accelerators, and prices in a user's file."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from kinetic import accelerators, prices
from kinetic.errors import ConfigurationError

ZONE = "us-central1-a"
LISTED: dict[str, Any] = json.loads(Path(prices.__file__).with_suffix(".json").read_text())


def usd(name: str, zone: str = ZONE, **environ: str) -> float | None:
    found = prices.price_of(accelerators.parse(name), zone, environ)
    return None if found is None else found.usd_per_hour


def test_each_price_has_a_source_with_a_url_and_a_date() -> None:
    for source in LISTED["sources"].values():
        assert re.match(r"https://\S+/[0-9a-f]{40}/\S+$", source["url"])
        assert date.fromisoformat(source["date"])
    listed_prices = [
        price
        for kind in ("machines", "chips")
        for regions in LISTED[kind].values()
        for price in regions.values()
    ]
    assert len(listed_prices) > 50
    for price in listed_prices:
        assert price["source"] in LISTED["sources"]
        assert 0 < price["spot"] < price["hour"]


def test_each_price_is_of_an_accelerator_in_the_catalogue() -> None:
    assert {*LISTED["chips"]} <= {*accelerators.TPUS}
    machines = {entry.machine for entry in accelerators.catalogue()}
    assert {*LISTED["machines"]} <= machines
    assert {*LISTED["memory_gb"]} <= {*accelerators.TPUS, *accelerators.GPUS}


def test_a_slice_costs_the_sum_of_its_chips() -> None:
    assert usd("tpu-v6e-8") == pytest.approx(8 * 2.7)
    assert usd("tpu-v6e-16") == pytest.approx(16 * 2.7)  # four hosts at the same price per chip
    assert usd("tpu-v6e-8:spot") == pytest.approx(8 * 0.57285)
    assert usd("gpu-a100x8") == pytest.approx(29.38708)
    assert usd("tpu-v5e-4", "europe-west4-b") == pytest.approx(4 * 1.56)


@pytest.mark.parametrize("name", ["gpu-gb300", "cpu", "cpu:4"])
def test_an_accelerator_without_a_source_has_no_price(name: str) -> None:
    assert usd(name) is None
    assert usd("tpu-v6e-8", "mars-north1-a") is None


def test_prices_of_the_users_file_come_first(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text('{"nvidia-l4": 0.71, "cpu": 0.05, "v6e-8:spot": 6.5}')
    assert usd("gpu-l4", KINETIC_PRICES=str(file)) == 0.71
    assert usd("cpu", KINETIC_PRICES=str(file)) == 0.05
    assert usd("tpu-v6e-8:spot", KINETIC_PRICES=str(file)) == 6.5
    assert usd("tpu-v6e-8", KINETIC_PRICES=str(file)) == pytest.approx(21.6)
    own = prices.price_of(accelerators.parse("gpu-l4"), ZONE, {"KINETIC_PRICES": str(file)})
    assert own is not None and (own.source, own.date) == (str(file), "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "isn't an object of names"),
        ("{", "isn't a file of prices"),
        ('{"gpu-l5": 1}', "prices.json: there is no accelerator 'gpu-l5'"),
        ('{"gpu-l4": "1"}', "the price of gpu-l4 is '1'; write a number"),
        ('{"gpu-l4": -1}', "write a number of at least 0"),
    ],
)
def test_an_invalid_file_of_prices_is_an_error(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "prices.json"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        usd("gpu-l4", KINETIC_PRICES=str(file))
    with pytest.raises(ConfigurationError, match="KINETIC_PRICES names /nowhere"):
        usd("gpu-l4", KINETIC_PRICES="/nowhere")


def test_the_estimate_of_a_submission() -> None:
    found = prices.estimate("tpu-v6e-8", seconds=1800, items=10, zone=ZONE, environ={})
    assert (found.hours, found.expected_hours, found.cost) == (0.0, 5.0, 0.0)
    assert found.expected_cost == pytest.approx(5 * 21.6)
    assert str(found) == "estimate: 0.00 of 5.00 hours of tpu-v6e-8, $0.00 of $108.00"
    assert found.to_dict()["estimate"] is True
    unknown = prices.estimate("cpu", seconds=60, environ={})
    assert unknown.expected_cost is None
    assert str(unknown).endswith("hours of cpu, — of —")


def test_each_accelerator_has_a_row() -> None:
    found = prices.rows(ZONE, {})
    assert [row.accelerator for row in found] == [*accelerators.catalogue()]
    (l4,) = (row for row in found if str(row.accelerator) == "gpu-l4")
    assert l4.memory_gb == 24


def test_a_budget_without_a_price_says_how_to_give_one() -> None:
    message = r'no price of cpu in us-central1-a.*"cpu": US_DOLLARS_AN_HOUR.*set KINETIC_PRICES'
    with pytest.raises(ConfigurationError, match=message):
        prices.budget_price(accelerators.parse("cpu"), ZONE, {})
    with pytest.raises(ConfigurationError, match=r'on this machine .*pass accelerator="cpu", or'):
        prices.budget_price(accelerators.parse("tpu-v5e-1"), ZONE, {}, listed=False)
