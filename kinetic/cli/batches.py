"""``kinetic batches``: list, watch, and manage batches."""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal

import click

from kinetic._messages import one_line
from kinetic.cli import output
from kinetic.cli.jobs import SHOWN, rows_of
from kinetic.cli.where import FilePath, Where, carry_out, json_option, placed

if TYPE_CHECKING:
    from pathlib import Path

    from kinetic import aio
    from kinetic.job_status import JobStatus
    from kinetic.progress import Progress

AT_ONCE = 64
"""Maximum number of items whose results are read at once."""

AT_ONCE_BATCHES = 8

COLUMNS = ("group_id", "name", "status", "items", "age", "cost", "reason")


@click.group()
def batches() -> None:
    """List batches, and manage one of them."""


async def attached(client: aio.Client, group_id: str) -> aio.BatchHandle[Any]:
    """Return the handle of the batch whose ID starts with *group_id*."""
    return await client.attach_batch(await client.full_id(group_id))


async def _row(batch: aio.BatchHandle[Any]) -> dict[str, Any]:
    from kinetic.errors import KineticError

    known: dict[str, Any] = {
        "group_id": batch.group_id,
        "name": batch.name,
        "tags": batch.tags,
        "created_at": batch.created_at,
        "age": output.age(batch.created_at),
    }
    try:
        counts = await batch.status_counts()
        found, reason = await batch.estimate(look=False), await batch.reason()
    except KineticError as exc:  # the others are to be shown
        return {**known, "status": "UNKNOWN", "items": "", "counts": {}, "reason": str(exc)}
    return {
        **known,
        "status": status_of(counts, finished=batch.finished),
        "total": sum(counts.values()),
        "items": _counts(counts),
        "counts": counts,
        "cost": output.dollars(found.cost),
        "estimate": found.to_dict(),
        "reason": reason,
    }


def status_of(counts: dict[str, int], *, finished: bool) -> str:
    """Return one word for a batch with so many items in each status."""
    if not finished:
        return "RUNNING" if counts.keys() - {"PENDING"} else "PENDING"
    if counts.get("FAILED"):
        return "FAILED"
    return "CANCELLED" if counts.get("NOT_FOUND") else "SUCCEEDED"


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
    "--all", "everything", is_flag=True, help=f"Show all batches, not only the newest {SHOWN}."
)
@json_option
@placed
def _list(
    where: Where, name: str | None, tags: tuple[str, ...], everything: bool, as_json: bool
) -> None:
    """List batches with their status, newest first."""

    async def work() -> tuple[list[dict[str, Any]], bool]:
        from kinetic._tasks import bounded

        async with where.client() as client:
            limit = None if everything else SHOWN + 1
            there = await client.list_batches(name=name, tags=_tags(tags), limit=limit)
            found = there if everything else there[:SHOWN]
            rows: dict[str, dict[str, Any]] = {}

            async def look(one: aio.BatchHandle[Any]) -> None:
                rows[one.group_id] = await _row(one)

            await bounded(look, found, at_once=AT_ONCE_BATCHES)
            return [rows[one.group_id] for one in found], len(there) > len(found)

    rows, older = carry_out(work())
    empty = "there is no such batch here" if name or tags else "there is no batch here"
    output.table("batches.list", COLUMNS, rows, as_json=as_json, empty=empty)
    if older:
        output.note("older batches are not shown; --all shows them")


def _tags(given: tuple[str, ...]) -> dict[str, str] | None:
    pairs = [one.partition("=") for one in given]
    if wrong := [key for key, equals, _ in pairs if not (key and equals)]:
        raise click.BadParameter(f"{wrong[0]!r} is no KEY=VALUE", param_hint="--tag")
    return {key: value for key, _, value in pairs} or None


@batches.command("status")
@click.argument("group_id")
@click.option("--items", "show_items", is_flag=True, help="Also show each item.")
@json_option
@placed
def _status(where: Where, group_id: str, show_items: bool, as_json: bool) -> None:
    """Show what is known about a batch."""

    async def work() -> dict[str, Any]:
        async with where.client() as client:
            batch = await attached(client, group_id)
            known = await _row(batch)
            if not show_items:
                return known
            handles = [await batch.job(index) for index, _ in await batch.statuses()]
            return {**known, "each": await rows_of(handles)}

    known = carry_out(work())
    each = known.get("each") or ()
    shown = known if as_json else {name: one for name, one in known.items() if name not in HIDDEN}
    output.facts("batches.status", shown, as_json=as_json)
    if each and not as_json:
        columns = ("job_id", "status", "age", "reason")
        output.table("batches.items", columns, each, as_json=False, empty="")


HIDDEN = ("each", "counts", "estimate")


@batches.command("watch", short_help="Show a batch's progress until it ends.")
@click.argument("group_id")
@json_option
@placed
def _watch(where: Where, group_id: str, as_json: bool) -> None:
    """Show a batch's progress until it ends. Press q to leave; the batch goes on.

    Without a terminal, prints a line at intervals; with --json, one object per line. Exits with 1
    if the batch ends and an item failed.
    """

    async def work() -> Progress:
        from kinetic.cli.watch import follow

        async with where.client() as client:
            return await follow(await attached(client, group_id), as_json=as_json)

    last = carry_out(work())
    _end(failed=last.finished and last.failed + last.lost > 0)


def _end(*, failed: bool) -> None:
    """Exit with 1 if the batch that the command waited for *failed*."""
    if failed:
        raise click.exceptions.Exit(1)


@batches.command("report", short_help="Write an HTML report about a batch.")
@click.argument("group_id")
@click.option(
    "-o",
    "--output",
    "path",
    type=FilePath(dir_okay=False),
    help="The file to write. Default: ID.html in the current directory.",
)
@click.option(
    "--direction",
    type=click.Choice(["minimize", "maximize"]),
    default="minimize",
    show_default=True,
    help="Whether the lowest or the highest metric is best.",
)
@click.option("--metric", help="The result that ranks the items, such as loss.")
@placed
def _report(
    where: Where,
    group_id: str,
    path: Path | None,
    direction: Literal["minimize", "maximize"],
    metric: str | None,
) -> None:
    """Write an HTML report about a batch: one self-contained file."""

    from pathlib import Path

    async def work() -> Path:
        async with where.client() as client:
            batch = await attached(client, group_id)
            return await batch.report(
                path or Path(f"{batch.group_id}.html"), direction=direction, metric=metric
            )

    output.lines([str(carry_out(work()))])


@batches.command("results", short_help="Wait for a batch, and show how each item ended.")
@click.argument("group_id")
@click.option("--timeout", type=float, help="Seconds to wait. Exits with 5 if they pass.")
@click.option("--failed", is_flag=True, help="Show only items without a value.")
@click.option("--unpickle", is_flag=True, help="Unpickle the values here, and show their repr.")
@json_option
@placed
def _results(
    where: Where, group_id: str, timeout: float | None, failed: bool, unpickle: bool, as_json: bool
) -> None:
    """Wait for a batch, and show how each item ended, in input order.

    With --json, prints one object per line. Unpickling can run code, so values are unpickled only
    with --unpickle. Exits with 1 if an item failed.
    """

    async def work() -> Counter[str]:
        from kinetic._tasks import all_or_none

        async with where.client() as client:
            batch = await attached(client, group_id)
            await _until_ended(batch, timeout)
            statuses = await batch.statuses()
            wanted = [one for one in statuses if not failed or one[1].value != "SUCCEEDED"]
            for start in range(0, len(wanted), AT_ONCE):
                some = wanted[start : start + AT_ONCE]
                for row in await all_or_none(*(_ended(batch, *one, unpickle) for one in some)):
                    _tell(row, as_json=as_json)
        return Counter(state.value for _, state in statuses)

    _end(failed=carry_out(work())["FAILED"] > 0)


async def _ended(
    batch: aio.BatchHandle[Any], index: int, state: JobStatus, unpickle: bool
) -> dict[str, Any]:
    handle = await batch.job(index)
    row: dict[str, Any] = {"index": index, "status": state.value}
    row |= {"reason": await handle.reason(), "noted": await handle.noted()}
    if unpickle and state.value == "SUCCEEDED":
        row["value"] = repr(await handle.result(cleanup=False))
    return row


def _tell(row: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.json_line("batches.result", row)
        return
    noted = ", ".join(f"{name}={one}" for name, one in row["noted"].items())
    told = one_line(str(row.get("value") or row["reason"] or noted), 400)
    output.lines([f"{row['index']}\t{row['status']}\t{told}"])


@batches.command("logs", short_help="Print the last output lines of each item.")
@click.argument("group_id")
@click.option(
    "--item", type=int, help="Show only this item. Default: all, each line with its item's number."
)
@click.option(
    "-f", "--follow", is_flag=True, help="Follow the log until the item ends. Requires --item."
)
@click.option("-n", "--tail", type=click.IntRange(min=0), default=20, show_default=True)
@placed
def _logs(where: Where, group_id: str, item: int | None, follow: bool, tail: int) -> None:
    """Print the last output lines of each item of a batch."""
    if follow and item is None:
        raise click.UsageError("--follow follows one item: name it with --item")

    async def work() -> None:
        from kinetic.errors import NotFound

        async with where.client() as client:
            batch = await attached(client, group_id)
            if item is not None and follow:
                async with aclosing((await batch.job(item)).logs(follow=True)) as lines:
                    async for line in lines:
                        output.lines([line])
                return
            indices = [item] if item is not None else [one for one, _ in await batch.statuses()]
            for index in indices:
                try:
                    text = await (await batch.job(index)).tail(tail)
                except NotFound:
                    if item is not None:
                        raise
                    continue
                begin = "" if item is not None else f"[{index}] "
                output.lines(f"{begin}{line}" for line in text.splitlines())

    carry_out(work())


@batches.command("resume", short_help="Continue a batch whose submitter died.")
@click.argument("group_id")
@click.option("--timeout", type=float, help="Seconds to wait. Exits with 5 if they pass.")
@placed
def _resume(where: Where, group_id: str, timeout: float | None) -> None:
    """Submit the rest of a batch whose submitter died, and wait until all items end.

    Items that ended don't run again, also those that failed or were cancelled: run these with
    `kinetic batches retry ID`. Exits with 1 if an item failed.
    """

    async def work() -> tuple[str, dict[str, int]]:
        async with where.client() as client:
            batch = await attached(client, group_id)
            await batch.resume()
            await _until_ended(batch, timeout)
            return batch.group_id, await batch.status_counts()

    whole, counts = carry_out(work())
    output.note(f"{whole} has ended: {_counts(counts)}{_next_step(whole, counts)}")
    _end(failed=counts.get("FAILED", 0) > 0)


async def _until_ended(batch: aio.BatchHandle[Any], timeout: float | None) -> None:
    """Wait until *batch* ends, and show its progress on standard error."""
    from kinetic._progress.display import wanted

    with wanted(True):
        await batch.wait(timeout=timeout)


def _next_step(group_id: str, counts: dict[str, int]) -> str:
    """Name the command that reruns items without a value; empty if all have one."""
    bad = counts.get("FAILED", 0) + counts.get("NOT_FOUND", 0)
    return f"; to run the {bad:,} again: kinetic batches retry {group_id}" if bad else ""


@batches.command("retry", short_help="Run failed and cancelled items again.")
@click.argument("group_id")
@click.option("--item", "items", type=int, multiple=True, help="Only this item; repeatable.")
@click.option("--timeout", type=float, help="Seconds to wait. Exits with 5 if they pass.")
@placed
def _retry(where: Where, group_id: str, items: tuple[int, ...], timeout: float | None) -> None:
    """Run the items that failed or were cancelled again, and wait until they end.

    Items that succeeded don't run again. Exits with 1 if one fails again; `kinetic batches
    results --failed ID` then shows why. After Ctrl-C, `kinetic batches resume ID` goes on.
    """

    async def work() -> tuple[int, list[tuple[int, JobStatus]]]:
        async with where.client() as client:
            batch = await attached(client, group_id)
            count = await batch.retry_failed(items or None)
            if count:
                await _until_ended(batch, timeout)
            return count, await batch.statuses()

    count, statuses = carry_out(work())
    if not count:
        output.note("there is nothing to retry")
        return
    counts = Counter(state.value for _, state in statuses)
    output.note(f"tried again: {output.items(count)}; now {_counts(counts)}")
    wanted = items or [index for index, _ in statuses]
    _end(failed=any(state.value == "FAILED" for index, state in statuses if index in wanted))


def _counts(counts: dict[str, int]) -> str:
    words = {name: name.lower() for name in counts} | {"NOT_FOUND": "cancelled"}
    return ", ".join(f"{count} {words[name]}" for name, count in sorted(counts.items()))


def _confirmed(where: Where, group_id: str, question: str, *, yes: bool) -> str:
    """Ask *question* about the batch, with its full ID, and return the ID."""

    async def work() -> str:
        async with where.client() as client:
            return await client.full_id(group_id)

    if not output.asks(yes=yes):
        return group_id
    whole = carry_out(work())
    output.confirm(question.format(whole), yes=yes)
    return whole


@batches.command("cancel")
@click.argument("group_id")
@click.option("-y", "--yes", is_flag=True, help="Don't ask for confirmation.")
@placed
def _cancel(where: Where, group_id: str, yes: bool) -> None:
    """Stop all jobs of a batch. Items that ended keep their results."""
    group_id = _confirmed(where, group_id, "End all jobs of {}?", yes=yes)

    async def work() -> tuple[str, dict[str, int]]:
        async with where.client() as client:
            batch = await attached(client, group_id)
            await batch.cancel()
            return batch.group_id, await batch.status_counts()

    whole, counts = carry_out(work())
    done = "is cancelled" if counts.get("NOT_FOUND") else "had ended before"
    output.note(f"{whole} {done}: {_counts(counts)}")


@batches.command("cleanup")
@click.argument("group_id")
@click.option("--k8s/--no-k8s", default=True, help="Remove its jobs from the platform.")
@click.option("--gcs/--no-gcs", default=True, help="Remove its objects from the store.")
@click.option("-y", "--yes", is_flag=True, help="Don't ask for confirmation.")
@placed
def _cleanup(where: Where, group_id: str, k8s: bool, gcs: bool, yes: bool) -> None:
    """Remove a batch with all its jobs and results. Output directories stay."""
    group_id = _confirmed(where, group_id, "Remove {} with all its results?", yes=yes)

    async def work() -> str:
        async with where.client() as client:
            whole = await client.full_id(group_id)
            if k8s and gcs:  # also what cannot be attached to, for it is damaged
                await client.cleanup(whole)
            else:
                await (await client.attach_batch(whole)).cleanup(k8s=k8s, gcs=gcs)
            return whole

    output.note(f"{carry_out(work())} is cleaned up")
