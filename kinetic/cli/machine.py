"""``kinetic gc`` and ``kinetic local``: what kinetic keeps and runs on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kinetic.cli import output
from kinetic.cli.where import Where, carry_out, json_option, placed

if TYPE_CHECKING:
    from kinetic.collection import Collection


@click.command(short_help="Remove what nobody uses from the store and the caches.")
@json_option
@placed
def gc(where: Where, as_json: bool) -> None:
    """Remove what nobody uses any more from the store and from the caches of this machine.

    From the store, a bucket as well: code, functions, requirements and Data that nothing refers to
    and nobody has used for a day.
    """

    async def work() -> Collection:
        async with where.client() as client:
            return await client.collect()

    freed = carry_out(work())
    rows = [
        {"folder": folder, "files": one.files, "bytes": one.size}
        for folder, one in freed.freed.items()
    ]
    columns = ("folder", "files", "bytes")
    output.table("gc", columns, rows, as_json=as_json, empty="there was nothing to remove")


@click.group()
def local() -> None:
    """Look after the supervisor, which runs jobs on this machine."""


@local.command("status")
@json_option
def _status(as_json: bool) -> None:
    """Show whether a supervisor runs, and how many jobs it has."""
    from kinetic import configuration
    from kinetic.aio.local.supervisor import running

    home = configuration.home()
    found = carry_out(running(home))
    known: dict[str, Any] = {"home": str(home), "running": found is not None}
    if found is not None:
        known |= {"pid": found.pid, "log": found.log, "jobs": dict(found.jobs)}
    output.facts("local.status", known, as_json=as_json)


@local.command("stop")
@click.option("-y", "--yes", is_flag=True, help="Do not ask, also when jobs run.")
def _stop(yes: bool) -> None:
    """End the supervisor, and with it all jobs that run on this machine."""
    from kinetic import configuration
    from kinetic.aio.local.supervisor import end, running

    found = carry_out(running(configuration.home()))
    if found is None:
        output.note("no supervisor runs")
        return
    if live := found.jobs.get("running", 0) + found.jobs.get("pending", 0):
        output.confirm(f"End the supervisor and {live} jobs with it?", yes=yes)
    carry_out(end(found))
    output.note("the supervisor has ended")
