"""``kinetic accelerators``: what can be asked for, and what it costs by the lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kinetic.cli import output
from kinetic.cli.where import Where, carry_out, json_option, placed

if TYPE_CHECKING:
    from kinetic.prices import Price, Row

COLUMNS = ("accelerator", "chips", "hosts", "memory_gb", "usd_hour", "spot_hour")


@click.command(short_help="List what accelerator= takes, with list prices.")
@click.option("--live", is_flag=True, help="Count the nodes of the cluster that take each.")
@json_option
@placed
def accelerators(where: Where, live: bool, as_json: bool) -> None:
    """List what accelerator= takes, with list prices an hour: estimates, in US dollars.

    Prices are those of the configured zone; JSON has the source and the date of each figure. What
    none is known for shows a dash. With --live, nodes that a pool could add are not counted.
    """
    from kinetic import configuration
    from kinetic.prices import rows

    where.point()
    given = where.given()
    target = configuration.resolve(
        backend=given.get("backend") if live else "local",
        project=given.get("project"),
        zone=given.get("zone"),
        cluster=given.get("cluster"),
    )
    listed = rows(target.zone)
    if not any(one.on_demand for one in listed):
        output.note(f"no list prices are known for {target.zone}; check --zone")
    found = [_shown(one) for one in listed]
    if not live:
        output.table("accelerators", COLUMNS, found, as_json=as_json, empty="")
        return
    if target.backend == "local":
        raise click.UsageError(f"--live asks a cluster, and the backend is local ({target.why})")
    from kinetic.aio.kubernetes.inventory import nodes_for

    counts = carry_out(nodes_for([one.accelerator for one in listed], target))
    found = [{**one, "nodes": count} for one, count in zip(found, counts, strict=True)]
    output.table("accelerators", (*COLUMNS, "nodes"), found, as_json=as_json, empty="")


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
