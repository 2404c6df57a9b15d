"""``kinetic accelerators``: what can be asked for."""

from __future__ import annotations

import click

from kinetic.cli import output
from kinetic.cli.where import json_option

__all__ = ["accelerators"]

COLUMNS = ("accelerator", "kind", "chips", "hosts", "machine")


@click.command()
@json_option
def accelerators(as_json: bool) -> None:
    """List what accelerator= takes."""
    from kinetic.accelerators import catalogue

    rows = [
        {
            "accelerator": str(one),
            "kind": one.kind,
            "chips": one.chips_per_host * one.hosts,
            "hosts": one.hosts,
            "machine": one.machine,
        }
        for one in catalogue()
    ]
    output.table("accelerators", COLUMNS, rows, as_json=as_json, empty="")
