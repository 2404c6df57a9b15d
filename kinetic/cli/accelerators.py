"""``kinetic accelerators``: list accelerators with their prices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kinetic.cli import output
from kinetic.cli.client import TargetOptions, json_option, run_async, with_target_options

if TYPE_CHECKING:
    from kinetic.prices import Row

COLUMNS = ("accelerator", "chips", "hosts", "memory_gb", "usd_hour", "spot_hour")


@click.command(short_help="List what accelerator= takes, with list prices.")
@click.option("--live", is_flag=True, help="Also count the nodes that offer each accelerator.")
@json_option
@with_target_options
def accelerators(options: TargetOptions, live: bool, as_json: bool) -> None:
    """List what accelerator= takes, with list prices per hour in US dollars.

    The prices are estimates for the configured zone; a dash means that the price is unknown. JSON
    has the source and date of each price. --live doesn't count nodes that a node pool could add.
    """
    from kinetic import configuration
    from kinetic.prices import rows

    options.set_context()
    target = configuration.resolve(
        backend=options.backend if live else "local",
        project=options.project,
        zone=options.zone,
        cluster=options.cluster,
    )
    price_rows = rows(target.zone)
    if not any(row.on_demand for row in price_rows):
        output.note(f"no list prices are known for zone {target.zone}; check --zone")
    table_rows = [_table_row(row) for row in price_rows]
    if not live:
        output.table("accelerators", COLUMNS, table_rows, as_json=as_json)
        return
    if target.backend == "local":
        raise click.UsageError(f"--live needs a cluster, and the backend is local ({target.why})")
    from kinetic.aio.kubernetes.inventory import nodes_for

    counts = run_async(nodes_for([row.accelerator for row in price_rows], target))
    for table_row, count in zip(table_rows, counts, strict=True):
        table_row["nodes"] = count
    output.table("accelerators", (*COLUMNS, "nodes"), table_rows, as_json=as_json)


def _table_row(row: Row) -> dict[str, Any]:
    accelerator = row.accelerator
    return {
        "accelerator": str(accelerator),
        "kind": accelerator.kind,
        "chips": accelerator.chips_per_host * accelerator.hosts,
        "hosts": accelerator.hosts,
        "machine": accelerator.machine,
        "memory_gb": row.memory_gb,
        "usd_hour": row.on_demand and round(row.on_demand.usd_per_hour, 4),
        "spot_hour": row.spot and round(row.spot.usd_per_hour, 4),
        "source": row.on_demand and row.on_demand.source,
        "date": row.on_demand and row.on_demand.date,
    }
