"""``kinetic accelerators``: what can be asked for, and what it costs by the lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kinetic.cli import output
from kinetic.cli.where import json_option

if TYPE_CHECKING:
    from kinetic.prices import Price, Row

__all__ = ["accelerators"]

COLUMNS = ("accelerator", "chips", "hosts", "memory_gb", "usd_hour", "spot_hour")


@click.command()
@click.option(
    "--zone", metavar="TEXT", help="The zone whose prices are shown (the configured one)."
)
@json_option
def accelerators(zone: str | None, as_json: bool) -> None:
    """List what accelerator= takes, with list prices an hour: estimates, in US dollars.

    JSON has the source and the date of each figure. What none is known for shows a dash.
    """
    from kinetic import configuration
    from kinetic.prices import rows

    where = configuration.resolve(zone=zone).zone
    found = [_shown(one) for one in rows(where)]
    output.table("accelerators", COLUMNS, found, as_json=as_json, empty="")


def _shown(row: Row) -> dict[str, Any]:
    one = row.accelerator
    return {
        "accelerator": str(one),
        "kind": one.kind,
        "chips": one.chips_per_host * one.hosts,
        "hosts": one.hosts,
        "machine": one.machine,
        "memory_gb": row.memory_gb,
        "usd_hour": _figure(row.on_demand),
        "spot_hour": _figure(row.spot),
        "source": row.on_demand and row.on_demand.source,
        "date": row.on_demand and row.on_demand.date,
    }


def _figure(price: Price | None) -> float | None:
    return None if price is None else round(price.usd_per_hour, 4)
