"""``kinetic jobs`` and ``kinetic outputs``: single jobs and items of batches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import click

from kinetic.cli import output
from kinetic.cli.where import FilePath, Where, carry_out, json_option, placed

if TYPE_CHECKING:
    from pathlib import Path

    from kinetic import aio

SHOWN = 50
"""Rows in a list without ``--all``."""

AT_ONCE = 16
HIDDEN = ("estimate", "price")
"""Facts about one job that only JSON shows."""

COLUMNS = ("job_id", "function", "status", "age", "accelerator", "cost", "reason")


@click.group()
def jobs() -> None:
    """List jobs, and manage one of them."""


async def rows_of(handles: Sequence[aio.JobHandle[Any]]) -> list[dict[str, Any]]:
    """Return a row for each handle, in their order, read now."""
    from kinetic._tasks import bounded

    rows: dict[str, dict[str, Any]] = {}

    async def look(handle: aio.JobHandle[Any]) -> None:
        rows[handle.job_id] = await _row(handle)

    await bounded(look, handles, at_once=AT_ONCE)
    return [rows[handle.job_id] for handle in handles]


async def _row(handle: aio.JobHandle[Any]) -> dict[str, Any]:
    from kinetic.errors import KineticError

    known = {
        "job_id": handle.job_id,
        "function": handle.func_name,
        "age": output.age(handle.created_at),
        **handle.to_dict(),
    }
    try:
        status = (await handle.status()).value
        known["age"] = output.age(handle.began_at())
        found = await handle.estimate()
        cost = {"cost": output.dollars(found.cost), "estimate": found.to_dict()}
        reason = "" if status == "SUCCEEDED" else await handle.reason()
        return {**known, "status": status, "reason": reason, **cost}
    except KineticError as exc:  # the others are to be shown
        return {**known, "status": "UNKNOWN", "reason": str(exc), "cost": None}


def _by_number(handles: Sequence[aio.JobHandle[Any]]) -> list[aio.JobHandle[Any]]:
    """Sort the items of each batch by their number; the batches and jobs keep their order."""
    places: dict[str, int] = {}
    for one in handles:
        places.setdefault(one.group_id or one.job_id, len(places))
    return sorted(
        handles, key=lambda one: (places[one.group_id or one.job_id], one.group_index or 0)
    )


@jobs.command("list")
@click.option(
    "--all", "everything", is_flag=True, help=f"Show all jobs, not only the newest {SHOWN}."
)
@json_option
@placed
def _list(where: Where, everything: bool, as_json: bool) -> None:
    """List the newest jobs with their status."""

    async def work() -> tuple[list[dict[str, Any]], bool]:
        async with where.client() as client:
            found = await client.list_jobs(limit=None if everything else SHOWN + 1)
            shown = _by_number(found if everything else found[:SHOWN])
            return await rows_of(shown), len(found) > len(shown)

    rows, older = carry_out(work())
    output.table("jobs.list", COLUMNS, rows, as_json=as_json, empty="there is no job here")
    if older:
        output.note("older jobs are not shown; --all shows them")


@jobs.command("status")
@click.argument("job_id")
@json_option
@placed
def _status(where: Where, job_id: str, as_json: bool) -> None:
    """Show what is known about a job."""

    async def work() -> dict[str, Any]:
        async with where.client() as client:
            handle = await client.attach(await client.full_id(job_id))
            return {**await _row(handle), "output_dir": handle.output_dir}

    known = carry_out(work())
    output.facts("jobs.status", known if as_json else _for_people(known), as_json=as_json)


def _for_people(known: dict[str, Any]) -> dict[str, Any]:
    """Order the facts for people, and leave out unknown ones and defaults."""
    hidden = {*HIDDEN, "func_name"}
    if not known["project"]:
        hidden |= {"cluster_name", "zone"}
    first = ("job_id", "status", "reason", "function", "age", "cost")
    names = [name for name in dict.fromkeys((*first, *known)) if name not in hidden]
    return {name: known[name] for name in names if known.get(name) not in (None, "")}


@jobs.command("logs")
@click.argument("job_id")
@click.option("-f", "--follow", is_flag=True, help="Follow the log until the job ends.")
@click.option("-n", "--tail", type=click.IntRange(min=0), help="Show only this many last lines.")
@placed
def _logs(where: Where, job_id: str, follow: bool, tail: int | None) -> None:
    """Print a job's output."""
    if follow and tail is not None:
        raise click.UsageError("--follow shows all of it, and --tail its end: give one of them")

    async def work() -> None:
        async with where.client() as client:
            handle = await client.attach(await client.full_id(job_id))
            if tail is not None:
                output.lines((await handle.tail(tail)).splitlines())
                return
            async with aclosing(handle.logs(follow=follow)) as lines:
                async for line in lines:
                    output.lines([line])

    carry_out(work())


@jobs.command("result", short_help="Wait for a job, and show its value or why it failed.")
@click.argument("job_id")
@click.option("--timeout", type=float, help="Seconds to wait. Exits with 5 if they pass.")
@click.option("--unpickle", is_flag=True, help="Unpickle the value here, and show its repr.")
@click.option(
    "-o",
    "--output",
    "file",
    type=FilePath(dir_okay=False, writable=True),
    help="Write the pickled value to a file, without unpickling it.",
)
@click.option(
    "--cleanup/--no-cleanup", default=False, help="Remove the job after showing its value."
)
@json_option
@placed
def _result(
    where: Where,
    job_id: str,
    timeout: float | None,
    unpickle: bool,
    file: Path | None,
    cleanup: bool,
    as_json: bool,
) -> None:
    """Wait for a job, and show its value. If it failed, show why and exit with 1.

    Unpickling can run code, so the value is unpickled only with --unpickle.
    """

    if file is not None and not file.parent.is_dir():
        raise click.UsageError(f"there is no folder {file.parent}: make it first, or name another")

    async def work() -> None:
        from kinetic.errors import JobError

        async with where.client() as client:
            handle = await client.attach(await client.full_id(job_id))
            status = (await handle.wait(timeout)).value
            told: dict[str, Any] = {"job_id": handle.job_id, "status": status}
            if status != "SUCCEEDED":
                reason = await handle.reason()
                if as_json:
                    output.facts("jobs.result", {**told, "reason": reason}, as_json=True)
                raise JobError(reason, job_id=handle.job_id)
            if unpickle:
                told["value"] = repr(await handle.result(cleanup=False))
            elif file is not None:
                told |= {"file": str(file), "bytes": await handle.save_result(file)}
            else:
                told["noted"] = await handle.noted()
                if not as_json:
                    told["value"] = "not rebuilt here: --unpickle shows it, -o FILE saves it"
            output.facts("jobs.result", told, as_json=as_json)
            if cleanup:
                await handle.cleanup()

    carry_out(work())


@jobs.command("cancel")
@click.argument("job_id")
@click.option("--cleanup-timeout", type=float, default=180, show_default=True, metavar="SECONDS")
@click.option("--cleanup-poll-interval", type=float, default=2, hidden=True)
@placed
def _cancel(
    where: Where, job_id: str, cleanup_timeout: float, cleanup_poll_interval: float
) -> None:
    """Stop a job. Its output stays until you clean it up."""

    async def work() -> None:
        async with where.client() as client:
            handle = await client.attach(await client.full_id(job_id))
            await handle.cancel(cleanup_timeout, cleanup_poll_interval)
            ended = (await handle.status()).value
            done = "is cancelled" if ended == "NOT_FOUND" else f"had ended before: {ended}"
            output.note(f"{handle.job_id} {done}")

    carry_out(work())


@jobs.command("cleanup")
@click.argument("job_id")
@click.option("--k8s/--no-k8s", default=True, help="Remove the job from the platform.")
@click.option("--gcs/--no-gcs", default=True, help="Remove its objects from the store.")
@click.option("--cleanup-timeout", type=float, default=180, show_default=True, metavar="SECONDS")
@click.option("--cleanup-poll-interval", type=float, default=2, hidden=True)
@placed
def _cleanup(
    where: Where,
    job_id: str,
    k8s: bool,
    gcs: bool,
    cleanup_timeout: float,
    cleanup_poll_interval: float,
) -> None:
    """Remove a job and its objects. Its output directory stays."""

    async def work() -> None:
        async with where.client() as client:
            handle = await client.attach(await client.full_id(job_id))
            await handle.cleanup(k8s, gcs, cleanup_timeout, cleanup_poll_interval)
            output.note(f"{handle.job_id} is cleaned up")

    carry_out(work())


@jobs.command("debug", short_help="Forward a local port to a job's debugger.")
@click.argument("job_id")
@click.option("--port", type=int, default=5678, show_default=True, help="The port to forward.")
@placed
def _debug(where: Where, job_id: str, port: int) -> None:
    """Forward a local port to the debugger that a job waits for. Press Ctrl-C to stop."""

    async def work() -> None:
        async with where.client() as client:
            handle = await client.attach(await client.full_id(job_id))
            await handle.debug_attach(port)
            async with aclosing(handle.logs(follow=True)) as lines:
                async for line in lines:
                    output.lines([line])

    carry_out(work())


@click.group()
def outputs() -> None:
    """List or copy the files in a job's output directory."""


@outputs.command("ls")
@click.argument("job_id")
@json_option
@placed
def _list_outputs(where: Where, job_id: str, as_json: bool) -> None:
    """List the files in a job's output directory."""

    async def work() -> list[dict[str, Any]]:
        async with where.client() as client:
            handle = await client.attach(await client.full_id(job_id))
            return [{"file": name} for name in await handle.outputs()]

    found = carry_out(work())
    output.table("outputs.list", ("file",), found, as_json=as_json, empty="it has written none")


@outputs.command("get")
@click.argument("job_id")
@click.argument("folder", type=FilePath(file_okay=False), default=".")
@placed
def _get_outputs(where: Where, job_id: str, folder: Path) -> None:
    """Copy a job's output files to FOLDER. Default: the current directory."""

    async def work() -> int:
        async with where.client() as client:
            handle = await client.attach(await client.full_id(job_id))
            return await handle.fetch_outputs(folder)

    found = carry_out(work())
    output.note(f"{found} files are in {folder}" if found else "it has written none")
