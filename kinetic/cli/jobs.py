"""``kinetic jobs`` and ``kinetic outputs``: single jobs and items of batches."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kinetic._messages import format_duration
from kinetic.cli import output
from kinetic.cli.client import FilePath, Group, json_option, with_client, with_job

if TYPE_CHECKING:
    from pathlib import Path

    from kinetic import aio

Handle = TypeVar("Handle")

MAX_ROWS = 50
"""Maximum number of rows in a list without ``--all``."""

MAX_JOB_READS = 16
"""Maximum number of jobs whose status is read at once."""

JSON_ONLY_FIELDS = ("estimate", "price", "func_name")
"""Fields of a job that only JSON shows."""

COLUMNS = ("job_id", "function", "status", "age", "waited", "ran", "accelerator", "cost", "reason")

timeout_option = click.option(
    "--timeout",
    type=float,
    metavar="SECONDS",
    help="Maximum time to wait; then the command exits with 5. Default: no limit.",
)
yes_option = click.option("-y", "--yes", is_flag=True, help="Don't ask for confirmation.")


@click.group(cls=Group)
def jobs() -> None:
    """List jobs, and manage one of them."""


async def read_rows(
    handles: Sequence[Handle], read_row: Callable[[Handle], Awaitable[dict[str, Any]]], limit: int
) -> list[dict[str, Any]]:
    """Return ``read_row(handle)`` for each handle, in order, at most *limit* at a time."""
    from kinetic._tasks import for_each

    rows: dict[int, dict[str, Any]] = {}

    async def read(index: int) -> None:
        rows[index] = await read_row(handles[index])

    await for_each(read, range(len(handles)), limit=limit)
    return [rows[index] for index in range(len(handles))]


def without_log(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return *rows* for a table: reasons of lost jobs without the lines of their logs."""
    from kinetic._runner.protocol.outcomes import LAST_LINES

    return [{**row, "reason": row["reason"].partition(LAST_LINES)[0]} for row in rows]


async def job_row(job: aio.JobHandle[Any]) -> dict[str, Any]:
    """Return what lists and ``status`` show of a job, by field."""
    from kinetic.errors import KineticError
    from kinetic.options import DEFAULT_ACCELERATOR

    fields = {
        "job_id": job.job_id,
        "function": job.func_name,
        "age": output.age(job.created_at),
        **job.to_dict(),
    }
    if job.backend == "local" and job.accelerator == DEFAULT_ACCELERATOR:
        fields["accelerator"] = None  # the user chose none, and this machine has no such TPU
    status = "UNKNOWN"
    try:
        status = await job.shown_status()
        fields["age"] = output.age(job.began_at())
        estimate, *times = await job.account()
        fields |= {
            name: None if seconds is None else format_duration(seconds)
            for name, seconds in zip(("waited", "ran"), times, strict=True)
        }
        cost = {"cost": output.dollars(estimate.cost), "estimate": estimate.to_dict()}
        reason = "" if status == "SUCCEEDED" else await job.reason()
        return {**fields, "status": status, "reason": reason, **cost}
    except KineticError as exc:  # a damaged job must not hide the others in a list
        # `results()` removes the times of an item, but its status stays.
        reason = "" if status == "SUCCEEDED" else str(exc)
        return {**fields, "status": status, "reason": reason, "cost": None}


def _sort_items(handles: Sequence[aio.JobHandle[Any]]) -> list[aio.JobHandle[Any]]:
    """Sort the items of each batch by their number; the batches and jobs keep their order."""
    positions: dict[str, int] = {}
    for handle in handles:
        positions.setdefault(handle.group_id or handle.job_id, len(positions))
    return sorted(
        handles,
        key=lambda handle: (positions[handle.group_id or handle.job_id], handle.group_index or 0),
    )


@jobs.command("list")
@click.option(
    "--all", "everything", is_flag=True, help=f"Show all jobs, not only the newest {MAX_ROWS}."
)
@click.option("--items", is_flag=True, help="Also show the items of batches.")
@json_option
@with_client
async def _list(client: aio.Client, everything: bool, items: bool, as_json: bool) -> None:
    """List the newest single jobs with their status. `kinetic batches list` lists batches."""
    found = await client.list_jobs(limit=None if everything else MAX_ROWS + 1, items=items)
    shown = found if everything else found[:MAX_ROWS]
    empty = "no jobs found" if items else "no single jobs found; --items shows items of batches"
    rows = await read_rows(_sort_items(shown), job_row, MAX_JOB_READS)
    rows = rows if as_json else without_log(rows)
    output.table("jobs.list", COLUMNS, rows, as_json=as_json, empty=empty)
    if len(found) > len(shown):
        output.note("older jobs are not shown; --all shows them")


@jobs.command("status")
@json_option
@with_job
async def _status(job: aio.JobHandle[Any], as_json: bool) -> None:
    """Show what is known about a job."""
    fields = {**await job_row(job), "output_dir": job.output_dir}
    output.fields("jobs.status", fields if as_json else _readable_fields(fields), as_json=as_json)


def _readable_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Put the important fields first, and leave out empty ones and unused defaults."""
    hidden = {*JSON_ONLY_FIELDS, *(() if fields["project"] else ("cluster_name", "zone"))}
    first = ("job_id", "status", "reason", "function", "age", "waited", "ran", "cost")
    names = [name for name in dict.fromkeys((*first, *fields)) if name not in hidden]
    renamed = {"bucket_name": "store"}  # it may be a directory
    return {
        renamed.get(name, name): fields[name]
        for name in names
        if fields.get(name) not in (None, "")
    }


async def print_log(
    job: aio.JobHandle[Any],
    *,
    follow: bool = False,
    tail: int | None = None,
    prefix: str = "",
    as_json: bool,
) -> bool:
    """Print the lines of a job's log; with *follow*, until the job ends.

    *tail* is the number of last lines to print; None means all. *prefix* is in front of each line,
    but not in JSON, where a line is an object. Return whether the log had lines.
    """
    printed = False

    def show(line: str) -> None:
        nonlocal printed
        printed = True
        if as_json:
            content = {"job_id": job.job_id, "index": job.group_index, "line": line}
            output.json_line("log", content)
        else:
            output.lines([prefix + line])

    if tail is not None:
        for line in (await job.tail(tail)).splitlines():
            show(line)
        return printed
    async with aclosing(job.logs(follow=follow)) as lines:
        async for line in lines:
            show(line)
    return printed


@jobs.command("logs")
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the job ends.")
@click.option(
    "-n",
    "--tail",
    type=click.IntRange(min=0),
    metavar="LINES",
    help="Number of last lines to print. Default: all.",
)
@json_option
@with_job
async def _logs(job: aio.JobHandle[Any], follow: bool, tail: int | None, as_json: bool) -> None:
    """Print a job's output. With --json, kinetic prints one object per line."""
    if follow and tail is not None:
        raise click.UsageError("pass --follow, which prints all lines, or --tail, but not both")
    printed = await print_log(job, follow=follow, tail=tail, as_json=as_json)
    if tail is None and not printed and (status := (await job.status()).value) == "PENDING":
        output.note(f"{job.job_id} has no log yet. It is {status}: {await job.reason()}")


@jobs.command("result", short_help="Wait for a job, and show its value or why it failed.")
@timeout_option
@click.option("--unpickle", is_flag=True, help="Unpickle the value here, and show its repr.")
@click.option(
    "-o",
    "--output",
    "file",
    type=FilePath(dir_okay=False, writable=True),
    help="Write the pickled value to a file, without unpickling it.",
)
@click.option(
    "--cleanup/--no-cleanup",
    default=False,
    help="Remove the job afterwards. Requires --unpickle or -o.",
)
@json_option
@with_job
async def _result(
    job: aio.JobHandle[Any],
    timeout: float | None,
    unpickle: bool,
    file: Path | None,
    cleanup: bool,
    as_json: bool,
) -> None:
    """Wait for a job, and show its value. If it failed, show why and exit with 1.

    Unpickling can run code, so kinetic unpickles the value only with --unpickle.
    """
    from kinetic.aio._submissions.ids import require_submission_id
    from kinetic.errors import JobCancelled, JobError

    if cleanup:
        require_submission_id(job.job_id)
        if not unpickle and file is None:
            raise click.UsageError("--cleanup removes the value: pass --unpickle or -o as well")
    if file is not None and not file.parent.is_dir():
        raise click.UsageError(f"there is no folder {file.parent}: make it first, or name another")
    await job.wait(timeout)
    status = await job.shown_status()
    fields: dict[str, Any] = {"job_id": job.job_id, "status": status}
    reason = await job.reason()
    if status not in ("SUCCEEDED", "PRUNED"):
        if as_json:
            output.fields("jobs.result", {**fields, "reason": reason}, as_json=True)
        message, kind = f"{job.job_id} has no value: {reason}", reason.partition(":")[0]
        error_type = JobCancelled if status == "CANCELLED" else JobError
        raise error_type(message, job_id=job.job_id, reason=kind)
    if status == "PRUNED":
        fields |= {"reason": reason, "noted": await job.noted()}
    elif unpickle or file is not None:
        if unpickle:
            fields["value"] = repr(await job.result(cleanup=False))
        if file is not None:
            fields |= {"file": str(file), "bytes": await job.save_result(file)}
    else:
        fields["noted"] = await job.noted()
        if not as_json:
            fields["value"] = "not unpickled: --unpickle shows it, -o FILE saves it"
    output.fields("jobs.result", fields, as_json=as_json)
    if cleanup:
        await job.cleanup()


@jobs.command("cancel")
@json_option
@with_job
async def _cancel(job: aio.JobHandle[Any], as_json: bool) -> None:
    """Stop a job. The files in its output directory stay."""
    await job.cancel()
    status = await job.shown_status()
    state = "is cancelled" if status == "CANCELLED" else f"had ended before: {status}"
    fields = {"job_id": job.job_id, "status": status}
    output.done("jobs.cancel", fields, f"{job.job_id} {state}", as_json=as_json)


@jobs.command("cleanup")
@json_option
@with_job
async def _cleanup(job: aio.JobHandle[Any], as_json: bool) -> None:
    """Remove a job and its objects. Its output directory stays."""
    from kinetic.aio._submissions.ids import require_submission_id

    require_submission_id(job.job_id)
    await job.cleanup()
    fields = {"job_id": job.job_id}
    output.done("jobs.cleanup", fields, f"{job.job_id} is cleaned up", as_json=as_json)


@jobs.command("debug", short_help="Forward a local port to a job's debugger.")
@click.option("--port", type=int, default=5678, show_default=True, help="Local port to forward.")
@click.option(
    "--vscode",
    is_flag=True,
    help="Put the entry that attaches into .vscode/launch.json of the current directory.",
)
@json_option
@with_job
async def _debug(job: aio.JobHandle[Any], port: int, vscode: bool, as_json: bool) -> None:
    """Forward a local port to the debugger that a job waits for. Press Ctrl-C to stop.

    With --json, kinetic prints an object that says how to attach, and one per line of output.
    """
    if as_json or vscode:
        from kinetic._tasks import in_thread
        from kinetic.aio._debugging.attaching import launch_configuration
        from kinetic.cli.vscode import ENTRY_NAME, write_launch

        _, debugger, port = await job.forward_debugger(port)
        launch = launch_configuration(debugger, port, None)
        file = str(await in_thread(write_launch, launch)) if vscode else None
        fields = {"job_id": job.job_id, "file": file, "launch": launch}
        if as_json:
            output.json_line("jobs.debug", fields)  # the lines of the log follow
        else:
            output.note(f"{job.job_id} waits for VS Code: start {ENTRY_NAME!r} in it")
    else:
        await job.debug_attach(port)
    await print_log(job, follow=True, as_json=as_json)


@click.group(cls=Group)
def outputs() -> None:
    """List or copy the files in a job's output directory."""


@outputs.command("ls")
@json_option
@with_job
async def _list_outputs(job: aio.JobHandle[Any], as_json: bool) -> None:
    """List the files in a job's output directory."""
    files = [{"file": name} for name in await job.outputs()]
    output.table("outputs.list", ("file",), files, as_json=as_json, empty="the job wrote no files")


@outputs.command("get")
@json_option
@with_job
@click.argument("folder", type=FilePath(file_okay=False), default=".")
async def _get_outputs(job: aio.JobHandle[Any], folder: Path, as_json: bool) -> None:
    """Copy a job's output files to FOLDER. Default: the current directory."""
    count = await job.fetch_outputs(folder)
    fields = {"job_id": job.job_id, "folder": str(folder), "files": count}
    message = f"{count} files are in {folder}" if count else "the job wrote no files"
    output.done("outputs.get", fields, message, as_json=as_json)
