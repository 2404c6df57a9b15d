"""``kinetic doctor``: find problems, and how to fix them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kinetic._messages import remove_control_sequences
from kinetic.cli import output
from kinetic.cli.client import TargetOptions, json_option, run_async, with_target_options

if TYPE_CHECKING:
    from kinetic.doctor.checks import Report

MARKS = {"ok": "ok", "warning": "WARNING", "failed": "FAILED", "skipped": "skipped"}


@click.command(short_help="Check everything that jobs need, and show how to fix problems.")
@click.option("--run", is_flag=True, help="After the checks, run a tiny job and time its steps.")
@click.option(
    "--image", metavar="IMAGE", help="Container image for --run. Default: one that kinetic builds."
)
@click.option(
    "--manifest",
    is_flag=True,
    help="Print the objects that a namespace needs, for kubectl apply; check nothing.",
)
@json_option
@with_target_options
def doctor(
    options: TargetOptions, run: bool, image: str | None, manifest: bool, as_json: bool
) -> int:
    """Check everything that jobs need, and show how to fix each problem.

    The checks leave nothing behind. The exit code is 1 if a check fails.
    """
    if manifest:
        if as_json:
            raise click.UsageError("--manifest prints YAML, not JSON: leave out --json")
        from importlib import resources

        manifests = resources.files("kinetic.doctor") / "namespace.yaml"
        output.lines([manifests.read_text(encoding="utf-8").rstrip()])
        return 0
    if image is not None and not run:
        raise click.UsageError("--image requires --run, whose job it gives a container image")
    from kinetic.doctor.examination import examine

    options.set_context()
    report = run_async(examine(**options.target(), run=run, container_image=image))
    if as_json:
        output.json_line("doctor", report.to_dict(), indent=2)
    else:
        show(report)
    return 0 if report.healthy else 1


def show(report: Report) -> None:
    """Print a heading per group, a line per check with its advice below, and a summary."""
    width = max(len(result.name) for result in report.results)
    lines: list[str] = []
    group = ""
    for result in report.results:
        if result.group != group:
            lines += ["", result.group] if lines else [result.group]
            group = result.group
        mark = MARKS[result.state.value]
        lines.append(
            f"  {result.name:<{width}}  {mark:<7}  {remove_control_sequences(result.evidence)}"
        )
        first, *rest = remove_control_sequences(result.advice).splitlines() or [""]
        advice = [f"-> {first}", *rest] if first else []
        lines += (f"  {'':<{width}}           {line}" for line in advice)
    counts = {
        state: sum(result.state.value == state for result in report.results) for state in MARKS
    }
    summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    output.lines([*lines, "", summary])
