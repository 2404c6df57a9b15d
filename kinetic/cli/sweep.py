"""``kinetic sweep``: search for the best arguments of a function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kinetic._messages import one_line
from kinetic.cli import output
from kinetic.cli.client import (
    TargetOptions,
    format_error,
    json_option,
    run_async,
    with_target_options,
)

if TYPE_CHECKING:
    from kinetic.sweeps import Domain, GridSearch, RandomSearch, Trial


@click.command(short_help="Search for the best arguments of a function.")
@click.argument("target", metavar="FILE.py:FUNCTION", type=click.Path())
@click.option(
    "-s",
    "--space",
    "spaces",
    multiple=True,
    required=True,
    metavar="NAME=DOMAIN",
    help="Values of an argument: LOW..HIGH, LOW..HIGH:log, LOW..HIGH:STEP, or a list A,B,C. Two "
    "ints give ints. Repeatable.",
)
@click.option(
    "-n",
    "--trials",
    type=click.IntRange(min=1),
    metavar="COUNT",
    help="How many trials to run. Required without --grid, whose default is the whole grid.",
)
@click.option("--grid", is_flag=True, help="Try all combinations, in place of random ones.")
@click.option("--seed", type=int, default=0, help="Seed of the random search. Default: 0.")
@click.option("--maximize", is_flag=True, help="Search for the highest value, not the lowest.")
@click.option("--prune", is_flag=True, help="End trials early that report weak values (ASHA).")
@click.option("--metric", metavar="NAME", help="Number to use if the function returns a dict.")
@click.option(
    "--on-failure",
    type=click.Choice(["tell", "retry", "ignore"]),
    default="tell",
    help="What to do when a trial fails. Default: tell the search.",
)
@click.option("--name", help="Name of the sweep.")
@click.option("--resume", is_flag=True, help="Continue the sweep of this name. Requires --name.")
@click.option(
    "--max-concurrent",
    type=click.IntRange(min=1),
    metavar="COUNT",
    help="Maximum number of trials that run at once. Default: 64.",
)
@json_option
@with_target_options
def sweep(
    options: TargetOptions,
    target: str,
    spaces: tuple[str, ...],
    trials: int | None,
    grid: bool,
    seed: int,
    maximize: bool,
    prune: bool,
    as_json: bool,
    max_concurrent: int | None,
    **settings: Any,
) -> int:
    """Search for the arguments of a function with the lowest value, and print each trial.

    The function may also be named as PACKAGE.MODULE:FUNCTION. The exit code is 1 if no trial has a
    value.
    """
    from kinetic.cli import functions
    from kinetic.sweeps import ASHA, GridSearch, RandomSearch

    function = functions.load_function(target)
    types = functions.parameter_types(function)
    space: dict[str, Domain] = {}
    for text in spaces:
        name, equals, domain = text.partition("=")
        if not (equals and name.isidentifier() and domain) or name in space:
            raise click.BadParameter(f"{text!r} isn't NAME=DOMAIN, once", param_hint="-s")
        space[name] = parse_domain(domain, types[name], f"-s {name}")
    functions.check(function, dict.fromkeys(space))
    pruner = ASHA() if prune else None
    search: GridSearch | RandomSearch
    if grid:
        search = GridSearch(space, direction="maximize" if maximize else "minimize", pruner=pruner)
    elif trials is None:
        raise click.UsageError("give --trials COUNT, or --grid")
    else:
        search = RandomSearch(
            space, seed=seed, direction="maximize" if maximize else "minimize", pruner=pruner
        )
    if max_concurrent is not None:
        settings["max_concurrent"] = max_concurrent
    return run_async(_run_sweep(options, function, search, trials, settings, as_json))


def parse_domain(text: str, annotation: Any, location: str) -> Domain:
    """Return the domain that *text* describes; see ``kinetic sweep --help``.

    The numbers of a range stay as they are, because their types say what lies between.

    Raises:
        click.BadParameter: The text describes no domain.
        click.UsageError: A part of the text isn't a value of the type *annotation*.
        ConfigurationError: The domain is empty, or otherwise wrong.
    """
    from kinetic.cli import functions
    from kinetic.sweeps import Choice, Float, Int

    def convert(part: str) -> Any:
        return functions.convert(part, functions.parse_value(part), annotation, location)

    low_text, dots, rest = text.partition("..")
    if not dots:
        return Choice([convert(option) for option in text.split(",")])
    high_text, _, how = rest.partition(":")
    low, high = functions.parse_value(low_text), functions.parse_value(high_text)
    step = functions.parse_value(how) if how not in ("", "log") else None
    if not all(isinstance(number, int | float) for number in (low, high, step or 0)):
        raise click.BadParameter(
            f"{text!r} isn't LOW..HIGH, LOW..HIGH:log, or LOW..HIGH:STEP", param_hint="-s"
        )
    for part in (low_text, high_text, how):
        if part not in ("", "log"):
            convert(part)
    if isinstance(low, int) and isinstance(high, int) and not isinstance(step, float):
        return Int(low, high, log=how == "log", step=1 if step is None else step)
    return Float(low, high, log=how == "log", step=step)


async def _run_sweep(
    options: TargetOptions,
    function: Any,
    search: Any,
    trials: int | None,
    settings: dict[str, Any],
    as_json: bool,
) -> int:
    """Run the sweep, print each trial that ends and then the best, and return the exit code."""
    from kinetic.errors import SweepError

    async with options.client(creates_store=True) as client:
        found = await client.sweep(function, search, trials=trials, progress=True, **settings)
        group_id = found.batch.group_id
        output.note(f"the batch of the sweep is {group_id}")
        async with found:
            async for trial in found:
                _print_trial("sweep.trial", "", trial, group_id, as_json)
        try:
            _print_trial("sweep.best", "best: ", found.best, group_id, as_json)
        except SweepError as exc:
            output.note(str(exc))
            return 1
    return 0


def _print_trial(schema: str, prefix: str, trial: Trial, group_id: str, as_json: bool) -> None:
    if as_json:
        content = {
            "group_id": group_id,
            "number": trial.number,
            "state": trial.state,
            "value": trial.value,
            "step": trial.step,
            "params": dict(trial.params),
            "error": None if trial.error is None else format_error(trial.error),
        }
        output.json_line(schema, content)
        return
    value = f"{trial.value:g}" if trial.value is not None else trial.error or ""
    params = " ".join(f"{name}={option}" for name, option in trial.params.items())
    cells = (f"{prefix}{trial.number}", trial.state, str(value), params)
    output.lines(["\t".join(one_line(cell, output.MAX_TEXT_LENGTH) for cell in cells)])
