"""``kinetic run``: one function of a file, once or for each line of another file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kinetic._messages import one_line
from kinetic.cli import output
from kinetic.cli.where import FilePath, Where, carry_out, json_option, placed, said_by

if TYPE_CHECKING:
    from pathlib import Path


@click.command(short_help="Run a function of a file, once or for many inputs.")
@click.argument("target", metavar="FILE.py:FUNCTION", type=click.Path())
@click.option("-a", "--arg", "args", multiple=True, metavar="NAME=VALUE", help="An argument.")
@click.option(
    "--map",
    "file",
    type=FilePath(exists=True, dir_okay=False),
    help="Call it for each line of a .jsonl, or each row of a .csv with a header.",
)
@click.option("--accelerator", help="What it runs on, instead of what the function says.")
@click.option("--name", help="The name of the batch.")
@click.option("--max-concurrent", type=click.IntRange(min=1), help="So many at once of a batch.")
@click.option("--retries", type=click.IntRange(min=0), help="So often an item is tried again.")
@click.option("--budget", type=float, help="US dollars, by estimate: then nothing more starts.")
@click.option("--detach", is_flag=True, help="Print the job's id and leave it running.")
@json_option
@placed
def run(
    where: Where,
    target: str,
    args: tuple[str, ...],
    file: Path | None,
    accelerator: str | None,
    name: str | None,
    max_concurrent: int | None,
    retries: int | None,
    budget: float | None,
    detach: bool,
    as_json: bool,
) -> None:
    """Run a function of a file, print what it writes, and its value.

    A VALUE is JSON if it can be read as that, else it is text.
    """
    from kinetic.cli import functions

    function: Any = functions.load_function(target)
    given = functions.arguments_of(args)
    function = _placed(function, accelerator)
    if file is None:
        if name or max_concurrent or retries is not None or budget is not None:
            raise click.UsageError("--name, --max-concurrent, --retries, --budget are of a --map")
        functions.check(function, given)
        carry_out(_once(where, function, given, detach, as_json))
        return
    if detach:
        raise click.UsageError("a --map is submitted by this process: --detach is of one call")
    found = [(place, {**given, **one}) for place, one in functions.inputs_of(file, function)]
    for place, one in found:
        functions.check(function, one, f"{place}: ")
    inputs = [one for _, one in found]
    settings = {
        "name": name,
        "max_concurrent": max_concurrent,
        "retries": retries,
        "budget": budget,
    }
    settings = {key: one for key, one in settings.items() if one is not None}
    if carry_out(_mapped(where, function, inputs, settings, as_json)):
        raise click.exceptions.Exit(1)


async def _once(
    where: Where, function: Any, given: dict[str, Any], detach: bool, as_json: bool
) -> None:
    import asyncio

    from kinetic._tasks import release

    async with where.client(begins=True) as client:
        job = await client.submit(function, **given)
        if detach:
            output.facts("run", {"job_id": job.job_id}, as_json=as_json)
            return
        output.note(f"{job.job_id} runs on {job.backend}")
        if job.debug:
            output.note(f"kinetic jobs debug {job.job_id}, elsewhere, leads a debugger to it")
        try:
            value = await job.result(stream_logs=not as_json)
        except asyncio.CancelledError:  # by Ctrl-C: what was begun here ends here
            await release(job.cleanup(), what=f"removing {job.job_id}")
            raise
        if as_json:
            output.json_line("run", {"job_id": job.job_id, "value": repr(value)})
        elif value is not None:
            output.lines([repr(value)])


async def _mapped(
    where: Where,
    function: Any,
    inputs: Sequence[dict[str, Any]],
    settings: dict[str, Any],
    as_json: bool,
) -> int:
    """How many failed."""
    from kinetic.outcome import Succeeded

    failed = 0
    async with where.client(begins=True) as client:
        batch = await client.run_async_map(
            function, inputs, input_mode="kwargs", progress=True, **settings
        )
        output.note(f"{batch.group_id}: {output.items(len(inputs))}")
        async with batch:
            async for index, _, outcome in batch.outcomes():
                failed += not outcome.ok
                if isinstance(outcome, Succeeded):
                    key, told = "value", repr(outcome.value)
                else:
                    key, told = "error", said_by(outcome.error)
                if as_json:
                    row = {"index": index, "ok": outcome.ok, key: told}
                    output.json_line("run.item", row)
                else:
                    output.lines([f"{index}\t{one_line(told, 400)}"])
    return failed


def _placed(function: Any, accelerator: str | None) -> Any:
    from kinetic.function import run as decorated

    if accelerator is None:
        return function
    if hasattr(function, "options"):
        return function.options(accelerator=accelerator)
    return decorated(accelerator=accelerator)(function)
