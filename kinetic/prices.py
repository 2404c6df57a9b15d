"""Estimate what accelerators cost per hour, and what a submission costs.

``prices.json`` beside this file has list prices in US dollars, each with its source and date.
KINETIC_PRICES names a JSON file with your own prices, which take precedence:
``{"gpu-l4": 0.71, "tpu-v6e-8:spot": 6.5}``, in US dollars per hour of the whole accelerator.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kinetic import accelerators
from kinetic._tracebacks import own_frames_left_out
from kinetic.accelerators import Accelerator
from kinetic.errors import ConfigurationError

__all__ = ["HOUR_S", "Estimate", "Price", "Row", "budget_price", "estimate", "price_of", "rows"]

VARIABLE = "KINETIC_PRICES"
HOUR_S = 3600.0
"""Seconds per hour: prices are per hour, durations of attempts in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of one accelerator with all its hosts: ``usd_per_hour`` is in US dollars.

    ``source`` is a URL, or the file that KINETIC_PRICES names. ``date`` is the date of the
    source, in ISO 8601; empty for your own file.
    """

    usd_per_hour: float
    source: str
    date: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An accelerator of the catalogue; ``memory_gb`` is the memory of one GPU or chip, if known."""

    accelerator: Accelerator
    memory_gb: int | None
    on_demand: Price | None
    spot: Price | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The cost so far and in total: an estimate by list prices, not a bill.

    ``hours`` counts the hours that ended attempts used the accelerator, with all its chips and
    hosts. ``expected_hours`` counts those of all attempts, also future ones; None if unknown. The
    time of waiting, starting, and idle machines doesn't count.
    """

    accelerator: str
    price: Price | None
    hours: float
    expected_hours: float | None

    @property
    def cost(self) -> float | None:
        """US dollars so far; None without a price."""
        return None if self.price is None else self.hours * self.price.usd_per_hour

    @property
    def expected_cost(self) -> float | None:
        """US dollars in total; None without a price, or if unknown."""
        if self.price is None or self.expected_hours is None:
            return None
        return self.expected_hours * self.price.usd_per_hour

    def __str__(self) -> str:
        end = "—" if self.expected_hours is None else f"{self.expected_hours:.2f}"
        return (
            f"estimate: {self.hours:.2f} of {end} hours of {self.accelerator}, "
            f"{_dollars(self.cost)} of {_dollars(self.expected_cost)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as a dict for JSON."""
        price = self.price
        return {
            "estimate": True,
            "accelerator": self.accelerator,
            "hours": self.hours,
            "expected_hours": self.expected_hours,
            "usd": self.cost,
            "expected_usd": self.expected_cost,
            "usd_per_hour": None if price is None else price.usd_per_hour,
            "source": None if price is None else price.source,
            "date": None if price is None else price.date,
        }


def _dollars(amount: float | None) -> str:
    return "—" if amount is None else f"${amount:,.2f}"


def price_of(
    accelerator: Accelerator,
    zone: str,
    environ: Mapping[str, str] = os.environ,
    *,
    listed: bool = True,
) -> Price | None:
    """Return the price of *accelerator* in the region of *zone*; None if unknown.

    If *listed* is false, use only your own prices, because the list prices are those of GKE.

    Raises:
        ConfigurationError: The file that KINETIC_PRICES names is invalid.
    """
    if (own := _own_prices(environ).get(str(accelerator))) is not None:
        return Price(usd_per_hour=own, source=environ[VARIABLE])
    if accelerator.kind == "cpu" or not listed:
        return None
    by_chip = accelerator.kind == "tpu"
    prices = _list_prices()["chips" if by_chip else "machines"]
    region = "-".join(zone.split("-")[:2])
    entry = prices.get(accelerator.name if by_chip else accelerator.machine, {}).get(region)
    if entry is None:
        return None
    source = _list_prices()["sources"][entry["source"]]
    units = accelerator.count if by_chip else accelerator.hosts
    unit_price = entry["spot" if accelerator.spot else "hour"]
    return Price(usd_per_hour=unit_price * units, source=source["url"], date=source["date"])


def budget_price(
    accelerator: Accelerator,
    zone: str,
    environ: Mapping[str, str] = os.environ,
    *,
    listed: bool = True,
) -> Price:
    """Return the price by which kinetic compares costs with a budget.

    Raises:
        ConfigurationError: No price is known, or the file that KINETIC_PRICES names is invalid.
    """
    if (price := price_of(accelerator, zone, environ, listed=listed)) is not None:
        return price
    # A function that names no accelerator asks for a TPU, which few machines have.
    is_substitute = not listed and accelerator.kind != "cpu"
    other = 'give a price for "cpu" and pass accelerator="cpu", ' if is_substitute else ""
    raise ConfigurationError(
        f"budget= is in US dollars, and no price of {accelerator} "
        f"{f'in {zone}' if listed else 'on this machine'} is known: write "
        f'{{"{accelerator}": US_DOLLARS_AN_HOUR}} to a file and set {VARIABLE} to its path, '
        f"{other}or leave budget= out"
    )


@own_frames_left_out
def estimate(
    accelerator: str,
    *,
    seconds: float,
    items: int = 1,
    zone: str = "us-central1-a",
    spot: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Estimate:
    """Estimate what *items* calls of *seconds* each on *accelerator* will cost.

    Raises:
        ConfigurationError: There is no such accelerator, or the file of KINETIC_PRICES is invalid.
    """
    parsed = accelerators.parse(accelerator, spot=spot)
    return Estimate(
        accelerator=str(parsed),
        price=price_of(parsed, zone, environ),
        hours=0.0,
        expected_hours=items * seconds / HOUR_S,
    )


def rows(zone: str, environ: Mapping[str, str] = os.environ) -> list[Row]:
    """List the accelerators of the catalogue, with their prices in the region of *zone*.

    Raises:
        ConfigurationError: The file that KINETIC_PRICES names is invalid.
    """
    memory: Mapping[str, int] = _list_prices()["memory_gb"]
    return [
        Row(
            accelerator=accelerator,
            memory_gb=memory.get(accelerator.name),
            on_demand=price_of(accelerator, zone, environ),
            spot=price_of(accelerators.parse(str(accelerator), spot=True), zone, environ),
        )
        for accelerator in accelerators.catalogue()
    ]


@functools.cache
def _list_prices() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return content


def _own_prices(environ: Mapping[str, str]) -> Mapping[str, float]:
    """Return the user's own prices in US dollars per hour, by ``str(accelerator)``."""
    path = environ.get(VARIABLE)
    if not path:
        return {}
    try:
        content: Any = json.loads(Path(path).expanduser().read_text())
        if not isinstance(content, dict):
            raise ValueError("it isn't an object of names and numbers")
    except (OSError, ValueError) as exc:
        raise ConfigurationError(
            f"{VARIABLE} names {path}, which isn't a file of prices: {exc}; write US dollars an "
            'hour to it, such as {"gpu-l4": 0.71}'
        ) from exc
    entries = cast("dict[str, Any]", content)
    prices: dict[str, float] = {}
    for name, value in entries.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)  # bool is an int
        if not (is_number and 0 <= value < math.inf):
            raise ConfigurationError(
                f"{VARIABLE}: the price of {name} is {value!r}; write a number of at least 0"
            )
        try:
            accelerator = accelerators.parse(name)
        except ConfigurationError as exc:
            raise ConfigurationError(f"{VARIABLE} names {path}: {exc}") from exc
        prices[str(accelerator)] = float(value)
    return prices
