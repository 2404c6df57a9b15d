"""``kinetic run``: run a function of a file, once or for each input in another file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kinetic._messages import one_line
from kinetic.cli import output
from kinetic.cli.client import (
    FilePath,
    TargetOptions,
    format_error,
    json_option,
    run_async,
    with_target_options,
)

if TYPE_CHECKING:
    from pathlib import Path


@click.command(
    short_help="Run a function of a file, once or for many inputs.",
    context_settings={"allow_extra_args": True},  # refused below, with a hint
)
@click.argument("target", metavar="FILE.py:FUNCTION", type=click.Path())
@click.option(
    "-a",
    "--arg",
    "args",
    multiple=True,
    metavar="NAME=VALUE",
    help="Argument of the function, converted to its annotation. Without one: JSON if VALUE parses "
    "as JSON, else text. Repeatable.",
)
@click.option(
    "--map",
    "file",
    type=FilePath(exists=True, dir_okay=False),
    help="Run a batch: one call per line of a .jsonl file, or per row of a .csv with a header.",
)
@click.option(
    "--accelerator", help="Accelerator, such as gpu-l4. Default: that of the function's decorator."
)
@click.option("--name", help="Name of the batch. Requires --map.")
@click.option(
    "--max-concurrent",
    type=click.IntRange(min=1),
    metavar="COUNT",
    help="Maximum number of items that run at once. Requires --map.",
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    metavar="COUNT",
    help="Retries per item. Requires --map. Default: 0.",
)
@click.option(
    "--budget",
    type=float,
    metavar="DOLLARS",
    help="Estimated cost in US dollars above which no more items start. Requires --map.",
)
@click.option("--detach", is_flag=True, help="Print the job's ID and exit; the job keeps running.")
@json_option
@with_target_options
def run(
    options: TargetOptions,
    target: str,
    args: tuple[str, ...],
    file: Path | None,
    accelerator: str | None,
    detach: bool,
    as_json: bool,
    **batch_options: Any,
) -> int:
    """Run a function of a file, and print its output and its value.

    The function may also be named as PACKAGE.MODULE:FUNCTION.

    With --map, kinetic runs a batch, and prints the value or the error of each item when the item
    ends. The exit code is 1 if an item failed.
    """
    from kinetic.cli import functions

    if extra := click.get_current_context().args:
        raise click.UsageError(
            f"unexpected argument {extra[0]!r}; pass the function's arguments as -a NAME=VALUE"
        )
    named = ("backend", "project", "zone", "cluster", "namespace")
    chosen: dict[str, Any] = {
        name: value for name, value in options.given().items() if name in named
    }
    if accelerator is not None:
        chosen["accelerator"] = accelerator
    function = _with_settings(functions.load_function(target), chosen)
    arguments = functions.parse_arguments(args, function)
    settings = {name: value for name, value in batch_options.items() if value is not None}
    if file is None:
        if settings:
            raise click.UsageError("--name, --max-concurrent, --retries, --budget require --map")
        functions.check(function, arguments)
        run_async(_run_job(options, function, arguments, detach, as_json))
        return 0
    if detach:
        raise click.UsageError(
            "--detach excludes --map: to leave, start the command with nohup and &"
        )
    located_inputs = [
        (location, {**arguments, **row_arguments})
        for location, row_arguments in functions.read_inputs(file, function)
    ]
    for location, row_arguments in located_inputs:
        functions.check(function, row_arguments, f"{location}: ")
    inputs = [row_arguments for _, row_arguments in located_inputs]
    return run_async(_run_batch(options, function, inputs, settings, as_json))


async def _run_job(
    options: TargetOptions, function: Any, arguments: dict[str, Any], detach: bool, as_json: bool
) -> None:
    """Submit one call; print its ID with *detach*, otherwise its output and its value."""
    import asyncio

    from kinetic._tasks import release
    from kinetic.aio._plain_call import cancelled_on_sigterm

    with cancelled_on_sigterm():
        async with options.client(creates_store=True) as client:
            job = await client.submit(function, **arguments)
            if detach:
                output.fields("run", {"job_id": job.job_id}, as_json=as_json)
                return
            output.note(f"{job.job_id} was submitted to {job.backend}")
            if job.debug:
                output.note(
                    f"to debug the job, run in another terminal: kinetic jobs debug {job.job_id}"
                )
            try:
                value = await job.result(stream_logs=not as_json)
            except asyncio.CancelledError:  # by Ctrl-C or SIGTERM: this process must remove the job
                await release(job.cleanup(), operation=f"removing {job.job_id}")
                output.note(f"{job.job_id} was cancelled and removed")
                raise
            if as_json:
                output.json_line("run", {"job_id": job.job_id, "value": repr(value)})
            elif value is not None:
                output.lines([repr(value)])


async def _run_batch(
    options: TargetOptions,
    function: Any,
    inputs: Sequence[dict[str, Any]],
    settings: dict[str, Any],
    as_json: bool,
) -> int:
    """Run a batch, print how each item ends, and return 1 if one failed, else 0."""
    from kinetic.outcome import Succeeded

    code = 0
    async with options.client(creates_store=True) as client:
        batch = await client.run_async_map(
            function, inputs, input_mode="kwargs", progress=True, **settings
        )
        output.note(f"{batch.group_id}: {output.items(len(inputs))}")
        async with batch:
            async for index, _, outcome in batch.outcomes():
                code = code if outcome.ok else 1
                if isinstance(outcome, Succeeded):
                    key, text = "value", repr(outcome.value)
                else:
                    key, text = "error", format_error(outcome.error)
                if as_json:
                    row = {"group_id": batch.group_id, "index": index, "ok": outcome.ok, key: text}
                    output.json_line("run.item", row)
                else:
                    output.lines([f"{index}\t{one_line(text, output.MAX_TEXT_LENGTH)}"])
    return code


def _with_settings(function: Any, chosen: dict[str, Any]) -> Any:
    """Return *function*, decorated or not, with the *chosen* settings in place of its own."""
    from kinetic.function import run as decorate

    if not chosen:
        return function
    if hasattr(function, "options"):
        return function.options(**chosen)
    return decorate(**chosen)(function)
