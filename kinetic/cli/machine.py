"""``kinetic gc`` and ``kinetic local``: manage caches and the supervisor of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kinetic.cli import output
from kinetic.cli.client import Group, json_option, run_async, with_client

if TYPE_CHECKING:
    from kinetic import aio


@click.command(short_help="Remove unused content of the store and the caches.")
@json_option
@with_client
async def gc(client: aio.Client, as_json: bool) -> None:
    """Remove unused content from the store and from the caches of this machine.

    The store is a folder or a bucket. kinetic removes code, functions, requirements, and Data from
    it, but keeps what a job or a batch refers to, and what was used within a day.
    """
    collection = await client.collect()
    rows = [
        {"folder": folder, "files": content.files, "bytes": content.size}
        for folder, content in collection.freed.items()
    ]
    columns = ("folder", "files", "bytes")
    output.table("gc", columns, rows, as_json=as_json, empty="nothing to remove")


@click.group(cls=Group)
def local() -> None:
    """Show or stop the supervisor, which runs local jobs."""


@local.command("status")
@json_option
def _status(as_json: bool) -> None:
    """Show whether the supervisor runs, and how many jobs it has."""
    from kinetic import configuration
    from kinetic.aio.local.supervisor import running

    home = configuration.home()
    supervisor = run_async(running(home))
    fields: dict[str, Any] = {"home": str(home), "running": supervisor is not None}
    if supervisor is not None:
        fields |= {"pid": supervisor.pid, "log": supervisor.log, "jobs": dict(supervisor.jobs)}
    output.fields("local.status", fields, as_json=as_json)


@local.command("stop")
@click.option("-y", "--yes", is_flag=True, help="Don't ask for confirmation, even if jobs run.")
def _stop(yes: bool) -> None:
    """Stop the supervisor and all local jobs."""
    from kinetic import configuration
    from kinetic.aio.local.supervisor import end, running

    supervisor = run_async(running(configuration.home()))
    if supervisor is None:
        output.note("the supervisor isn't running")
        return
    if job_count := supervisor.jobs.get("running", 0) + supervisor.jobs.get("pending", 0):
        output.confirm(f"Stop the supervisor and its {job_count} jobs?", yes=yes)
    run_async(end(supervisor))
    output.note("the supervisor has stopped")
