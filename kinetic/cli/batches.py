"""``kinetic batches``: list, watch, and manage batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Literal

import click

from kinetic._messages import one_line
from kinetic.cli import output
from kinetic.cli.client import (
    FilePath,
    Group,
    TargetOptions,
    json_option,
    with_batch,
    with_client,
    with_target_options,
)
from kinetic.cli.jobs import (
    MAX_ROWS,
    job_row,
    print_log,
    read_rows,
    timeout_option,
    without_log,
    yes_option,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kinetic import aio

MAX_ITEM_READS = 64
"""Maximum number of items that are read at once."""

MAX_BATCH_READS = 8
"""Maximum number of batches whose status is read at once."""

COLUMNS = ("group_id", "name", "status", "items", "age", "cost", "reason")
ITEM_COLUMNS = ("job_id", "status", "age", "waited", "ran", "reason")
WORKER_COLUMNS = ("worker", "round", "state", "item", "done", "reason")

JSON_ONLY_FIELDS = ("each", "counts", "estimate", "workers")
"""Fields of a batch that only JSON shows."""


@click.group(cls=Group)
def batches() -> None:
    """List batches, and manage one of them."""


async def batch_row(batch: aio.BatchHandle[Any]) -> dict[str, Any]:
    """Return what lists and ``status`` show of a batch, by field."""
    from kinetic.errors import KineticError

    fields: dict[str, Any] = {
        "group_id": batch.group_id,
        "name": batch.name,
        "tags": batch.tags,
        "created_at": batch.created_at,
        "age": output.age(batch.created_at),
    }
    try:
        statuses = await batch.shown_statuses()
        is_finished = batch.finished
        # When all items have ended, the workers are about to leave.
        workers = [] if is_finished else await batch.workers()
        reason = await batch.reason()
        if not is_finished and batch.finished:
            # The items have ended meanwhile, or the reason is that no more inputs can come.
            statuses, is_finished, workers = await batch.shown_statuses(), True, []
        counts = count_statuses(statuses, {worker.item for worker in workers})
        status = status_of(counts, finished=is_finished, is_cut=batch.is_cut)
        estimate = await batch.estimate(look=False)
        reason = "" if status == "SUCCEEDED" else reason
    except KineticError as exc:  # a damaged batch must not hide the others in a list
        unknown: dict[str, Any] = {"status": "UNKNOWN", "items": "", "counts": {}, "workers": []}
        return {**fields, **unknown, "reason": str(exc)}
    return {
        **fields,
        "status": status,
        "total": sum(counts.values()),
        "items": _format_counts(counts),
        "counts": counts,
        "cost": output.dollars(estimate.cost),
        "estimate": estimate.to_dict(),
        "reason": reason,
        "workers": [worker.to_dict() for worker in workers],
    }


def status_of(counts: dict[str, int], *, finished: bool, is_cut: bool = False) -> str:
    """Return the status of a batch, given how many of its items have each status.

    If it *is_cut*, its lazy inputs were ended early.
    """
    if not finished:
        return "RUNNING" if counts.keys() - {"PENDING"} else "PENDING"
    if counts.get("FAILED"):
        return "FAILED"
    return "CANCELLED" if counts.get("CANCELLED") or is_cut else "SUCCEEDED"


@batches.command("list")
@click.option("--name", help="Show only batches with this name.")
@click.option(
    "--tag",
    "tags",
    multiple=True,
    metavar="KEY=VALUE",
    help="Show only batches with this tag. Repeatable.",
)
@click.option(
    "--all", "everything", is_flag=True, help=f"Show all batches, not only the newest {MAX_ROWS}."
)
@json_option
@with_client
async def _list(
    client: aio.Client, name: str | None, tags: tuple[str, ...], everything: bool, as_json: bool
) -> None:
    """List batches with their status, newest first."""
    pairs = [tag.partition("=") for tag in tags]
    if invalid := [key for key, equals, _ in pairs if not (key and equals)]:
        raise click.BadParameter(f"{invalid[0]!r} isn't KEY=VALUE", param_hint="--tag")
    wanted = {key: value for key, _, value in pairs} or None
    limit = None if everything else MAX_ROWS + 1
    found = await client.list_batches(name=name, tags=wanted, limit=limit)
    shown = found if everything else found[:MAX_ROWS]
    rows = await read_rows(shown, batch_row, MAX_BATCH_READS)
    empty = "no matching batches found" if name or tags else "no batches found"
    rows = rows if as_json else without_log(rows)
    output.table("batches.list", COLUMNS, rows, as_json=as_json, empty=empty)
    if len(found) > len(shown):
        output.note("older batches are not shown; --all shows them")


@batches.command("status")
@click.option("--items", "show_items", is_flag=True, help="Also show each item.")
@json_option
@with_batch
async def _status(batch: aio.BatchHandle[Any], show_items: bool, as_json: bool) -> None:
    """Show what is known about a batch."""
    fields = await batch_row(batch)
    if show_items:
        handles = [await batch.job(index) for index, _ in await batch.statuses()]
        fields["each"] = await read_rows(handles, job_row, MAX_ITEM_READS)
    if as_json:
        output.fields("batches.status", fields, as_json=True)
        return
    shown = {name: value for name, value in fields.items() if name not in JSON_ONLY_FIELDS}
    output.fields("batches.status", shown, as_json=False)
    if fields["workers"]:
        rows = [
            {
                **worker,
                "worker": str(worker["number"]),
                "state": "leaving" if worker["leaving"] else worker["state"],
            }
            for worker in fields["workers"]
        ]
        output.table("batches.workers", WORKER_COLUMNS, rows, as_json=False)
    if fields.get("each"):
        output.table("batches.items", ITEM_COLUMNS, without_log(fields["each"]), as_json=False)


@batches.command("scale", short_help="Change how many workers a batch has.")
@json_option
@with_batch
@click.argument("workers", type=click.IntRange(min=1))
async def _scale(batch: aio.BatchHandle[Any], workers: int, as_json: bool) -> None:
    """Change how many workers a batch has, and so how many items run at once.

    A worker that has to leave first ends its item. The number also holds for items that run later.
    """
    able = await batch.scale(workers)
    if as_json:
        shown = [worker.to_dict() for worker in await batch.workers()]
        fields = {"group_id": batch.group_id, "asked": workers, "able": able, "workers": shown}
        output.fields("batches.scale", fields, as_json=True)
        return
    fewer = f"; {able} of them can run at once" if able < workers else ""
    count = "1 worker" if workers == 1 else f"{workers:,} workers"
    await batch.statuses()  # `finished` knows what was read
    when = "when items run again, as it has ended" if batch.finished else f"from now on{fewer}"
    output.note(f"{batch.group_id} has {count} {when}")


@batches.command("watch", short_help="Show a batch's progress until the batch ends.")
@json_option
@with_batch
async def _watch(batch: aio.BatchHandle[Any], as_json: bool) -> int:
    """Show a batch's progress until the batch ends. Press q to leave; the batch continues.

    Without a terminal, kinetic prints a line at most every 5 seconds, when something has changed.
    With --json, it prints one object per line. The exit code is 1 if the batch ended and an item
    failed.
    """
    from kinetic.cli.watch import follow

    progress = await follow(batch, as_json=as_json)
    return int(progress.finished and progress.failed + progress.lost > 0)


@batches.command("report", short_help="Write an HTML report about a batch, or compare batches.")
@click.argument("group_ids", metavar="GROUP_ID...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    "path",
    type=FilePath(dir_okay=False),
    help="The file to write. Default: ID.html in the current directory, with the first ID.",
)
@click.option(
    "--direction",
    type=click.Choice(["minimize", "maximize"]),
    help="Whether the lowest or the highest metric is best. Default: as a sweep searches; minimize "
    "for other batches.",
)
@click.option(
    "--metric",
    metavar="NAME",
    help="The result that ranks the items, such as loss. Default: that of a sweep; for other "
    "batches, kinetic chooses a result.",
)
@click.option(
    "--live",
    is_flag=True,
    help="Serve the page on this machine, and refresh it until the batches end; then write the "
    "file.",
)
@json_option
@with_client
async def _report(
    client: aio.Client,
    group_ids: tuple[str, ...],
    path: Path | None,
    direction: Literal["minimize", "maximize"] | None,
    metric: str | None,
    live: bool,
    as_json: bool,
) -> None:
    """Write an HTML report about a batch: one self-contained file.

    With several IDs, the page compares the batches.
    """
    first, *others = [
        await client.attach_batch(await client.full_id(group_id)) for group_id in group_ids
    ]
    target = path or f"{first.group_id}.html"
    if live:
        from kinetic._report.file import check_path
        from kinetic.cli import live_report  # it imports a web server

        check_path(target)
        await live_report.serve([first, *others], first.snapshots(direction, metric, others))
    file = str(await first.report(target, direction=direction, metric=metric, compare=others))
    if as_json:
        output.json_line("batches.report", {"group_id": first.group_id, "file": file}, indent=2)
    else:
        output.lines([file])


@batches.command("results", short_help="Wait for a batch, and show how each item ended.")
@timeout_option
@click.option("--failed", is_flag=True, help="Show only items that didn't succeed.")
@click.option("--unpickle", is_flag=True, help="Unpickle the values here, and show their repr.")
@json_option
@with_batch
async def _results(
    batch: aio.BatchHandle[Any], timeout: float | None, failed: bool, unpickle: bool, as_json: bool
) -> int:
    """Wait for a batch, and show how each item ended, in input order.

    With --json, kinetic prints one object per line. Unpickling can run code, so kinetic unpickles
    values only with --unpickle. The exit code is 1 if an item failed.
    """
    from kinetic._tasks import all_or_none

    await _wait_until_ended(batch, timeout)
    statuses = await batch.shown_statuses()
    wanted = [entry for entry in statuses if not failed or entry[1] not in ("SUCCEEDED", "PRUNED")]
    for start in range(0, len(wanted), MAX_ITEM_READS):
        chunk = wanted[start : start + MAX_ITEM_READS]
        for row in await all_or_none(*(_result_row(batch, *entry, unpickle) for entry in chunk)):
            if as_json:
                output.json_line("batches.result", row)
                continue
            notes = ", ".join(f"{name}={value}" for name, value in row["noted"].items())
            text = str(row.get("value") or row["reason"] or notes)
            summary = one_line(text, output.MAX_TEXT_LENGTH)
            output.lines([f"{row['index']}\t{row['status']}\t{summary}"])
    return int("FAILED" in count_statuses(statuses))


def count_statuses(
    statuses: Iterable[tuple[int, str]], running: Collection[int | None] = ()
) -> dict[str, int]:
    """Count items by status; those that workers are *running* aren't pending any more."""
    return Counter(
        "RUNNING" if status == "PENDING" and index in running else status
        for index, status in statuses
    )


async def _result_row(
    batch: aio.BatchHandle[Any], index: int, status: str, unpickle: bool
) -> dict[str, Any]:
    """Return what ``results`` shows of one item, by field."""
    job = await batch.job(index)
    row: dict[str, Any] = {"index": index, "status": status}
    row |= {"reason": await job.reason(), "noted": await job.noted()}
    if unpickle and status == "SUCCEEDED":
        row["value"] = repr(await job.result(cleanup=False))
    return row


@batches.command("logs", short_help="Print the last output lines of each item.")
@click.option(
    "--item",
    type=int,
    metavar="NUMBER",
    help="Show only this item. Default: all items, each line with the number of its item.",
)
@click.option(
    "-f", "--follow", is_flag=True, help="Print new lines until the item ends. Requires --item."
)
@click.option(
    "-n",
    "--tail",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    metavar="LINES",
    help="Number of last lines to print of each item.",
)
@json_option
@with_batch
async def _logs(
    batch: aio.BatchHandle[Any], item: int | None, follow: bool, tail: int, as_json: bool
) -> None:
    """Print the last output lines of each item of a batch.

    With --json, kinetic prints one object per line. The exit code is 3 if no item has a log.
    """
    from kinetic.errors import NotFound

    if item is not None:
        job = await batch.job(item)
        await print_log(job, follow=follow, tail=None if follow else tail, as_json=as_json)
        return
    if follow:
        raise click.UsageError("--follow follows one item: name the item with --item")
    printed, missing = False, None
    for index, _ in await batch.statuses():
        try:
            job = await batch.job(index)
            printed |= await print_log(job, tail=tail, prefix=f"[{index}] ", as_json=as_json)
        except NotFound as exc:  # the job hasn't started, or its log was removed
            missing = missing or exc
    if missing is not None and not printed:
        raise missing


@batches.command("resume", short_help="Continue a batch whose submitter died.")
@click.option("--seal", is_flag=True, help="Treat the stored inputs as all inputs of the batch.")
@timeout_option
@json_option
@with_batch
async def _resume(
    batch: aio.BatchHandle[Any], seal: bool, timeout: float | None, as_json: bool
) -> int:
    """Submit the rest of a batch whose submitter died, and wait until all items end.

    Workers run a batch whose inputs are stored, except on several hosts. This starts some if there
    are none, and waits.
    If the iterator of inputs raised an exception, or its process died before the iterator ended,
    pass `--seal`. Items that ended don't run again, even if they failed or were cancelled; to run
    such items again, use `kinetic batches retry ID`. The exit code is 1 if an item failed.
    """
    await batch.resume(seal=seal)
    await _wait_until_ended(batch, timeout)
    counts = count_statuses(await batch.shown_statuses())
    # A retry can't help an item whose input couldn't be sent; `failures` leaves it out.
    retryable = len(await batch.failures()) + counts.get("CANCELLED", 0)
    command = f"kinetic batches retry {batch.group_id}"
    hint = f"; to run {output.items(retryable)} again: {command}" if retryable else ""
    fields = {"group_id": batch.group_id, "counts": counts}
    message = f"{batch.group_id} has ended: {_format_counts(counts)}{hint}"
    output.done("batches.resume", fields, message, as_json=as_json)
    return int("FAILED" in counts)


async def _wait_until_ended(batch: aio.BatchHandle[Any], timeout: float | None) -> None:
    """Wait until *batch* ends, and show its progress on standard error."""
    from kinetic._progress.display import showing_steps

    with showing_steps(True):
        await batch.wait(timeout=timeout)


@batches.command("retry", short_help="Run failed and cancelled items again.")
@click.option(
    "--item",
    "items",
    type=int,
    multiple=True,
    metavar="NUMBER",
    help="Retry only this item. Repeatable. Default: all failed and cancelled items.",
)
@timeout_option
@json_option
@with_batch
async def _retry(
    batch: aio.BatchHandle[Any], items: tuple[int, ...], timeout: float | None, as_json: bool
) -> int:
    """Run the items that failed or were cancelled again, and wait until they end.

    Items that succeeded don't run again. The exit code is 1 if an item fails again; `kinetic
    batches results --failed ID` then shows why. Ctrl-C ends the wait, and the batch continues; on
    several hosts, run `kinetic batches resume ID`.
    """
    count = await batch.retry_failed(items or None)
    if count:
        await _wait_until_ended(batch, timeout)
    statuses = await batch.shown_statuses()
    counts = count_statuses(statuses)
    fields = {"group_id": batch.group_id, "retried": count, "counts": counts}
    message = f"retried {output.items(count)}; now {_format_counts(counts)}"
    message = message if count else "there are no items to retry"
    output.done("batches.retry", fields, message, as_json=as_json)
    # Without a retry, old failures don't count; with --item, those of other items don't.
    retried = [entry for entry in statuses if count and (not items or entry[0] in items)]
    return int("FAILED" in count_statuses(retried))


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name.lower()}" for name, count in sorted(counts.items()))


def _confirm(options: TargetOptions, group_id: str, question: str, *, yes: bool) -> str:
    """Put the full ID of *group_id* into *question*, ask the question, and return the ID."""
    from kinetic.aio._submissions.ids import is_full_id, require_batch_id

    if is_full_id(group_id):  # the beginning of an ID may look like the ID of an item
        require_batch_id(group_id)
    batch_id = options.run(lambda client: client.full_id(group_id, exists=True))
    output.confirm(question.format(batch_id), yes=yes)
    return batch_id


@batches.command("cancel")
@click.argument("group_id")
@yes_option
@json_option
@with_target_options
def _cancel(options: TargetOptions, group_id: str, yes: bool, as_json: bool) -> None:
    """Stop all jobs of a batch. Items that ended keep their results."""
    batch_id = _confirm(options, group_id, "Stop all jobs of {}?", yes=yes)

    async def cancel(client: aio.Client) -> tuple[bool, dict[str, int]]:
        batch = await client.attach_batch(batch_id)
        await batch.statuses()  # `finished` knows what was read
        had_ended = batch.finished
        await batch.cancel()
        return had_ended, count_statuses(await batch.shown_statuses())

    had_ended, counts = options.run(cancel)
    state = "had ended before" if had_ended and not counts.get("CANCELLED") else "is cancelled"
    fields = {"group_id": batch_id, "counts": counts}
    message = f"{batch_id} {state}: {_format_counts(counts)}"
    output.done("batches.cancel", fields, message, as_json=as_json)


@batches.command("cleanup")
@click.argument("group_id")
@yes_option
@json_option
@with_target_options
def _cleanup(options: TargetOptions, group_id: str, yes: bool, as_json: bool) -> None:
    """Remove a batch with all its jobs and results. Output directories stay."""
    batch_id = _confirm(options, group_id, "Remove {} with all its results?", yes=yes)
    # `Client.cleanup` also removes a damaged batch, for which `attach_batch` fails.
    options.run(lambda client: client.cleanup(batch_id))
    fields = {"group_id": batch_id}
    output.done("batches.cleanup", fields, f"{batch_id} is cleaned up", as_json=as_json)
