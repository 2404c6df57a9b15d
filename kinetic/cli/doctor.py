"""``kinetic doctor``: find problems, and how to fix them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kinetic._messages import shown
from kinetic.cli import output
from kinetic.cli.where import Where, carry_out, json_option, placed

if TYPE_CHECKING:
    from kinetic.doctor.checks import Report, Result

MARKS = {"ok": "ok", "warning": "WARNING", "failed": "FAILED", "skipped": "skipped"}


@click.command(short_help="Check everything that jobs need, and show how to fix problems.")
@click.option("--run", is_flag=True, help="Finally run a tiny job and time its steps.")
@click.option("--image", metavar="IMAGE", help="The container image for --run. Default: bundled.")
@click.option(
    "--manifest", is_flag=True, help="Print the objects a namespace needs, for kubectl apply."
)
@json_option
@placed
def doctor(where: Where, run: bool, image: str | None, manifest: bool, as_json: bool) -> int:
    """Check everything that jobs need, and show how to fix each problem.

    The checks leave nothing behind. Exits with 1 if a check fails.
    """
    if manifest:
        from importlib import resources

        manifests = resources.files("kinetic.doctor") / "namespace.yaml"
        output.lines([manifests.read_text(encoding="utf-8").rstrip()])
        return 0
    if image is not None and not run:
        raise click.UsageError("--image names the image of the job of --run: give both")
    from kinetic.doctor.examination import examine

    where.point()
    report = carry_out(
        examine(
            backend=where.backend,
            project=where.project,
            zone=where.zone,
            cluster=where.cluster,
            namespace=where.namespace,
            store=where.store,
            run=run,
            container_image=image,
        )
    )
    if as_json:
        output.json_line("doctor", report.to_dict(), indent=2)
    else:
        output.lines(_told(report))
    return 0 if report.healthy else 1


def _told(report: Report) -> list[str]:
    """Return a heading per group, a line per check, and its advice below it."""
    width = max(len(one.name) for one in report.results)
    told: list[str] = []
    group = ""
    for one in report.results:
        if one.group != group:
            told += ["", one.group] if told else [one.group]
            group = one.group
        told += _lines(one, width)
    counts = {state: sum(one.state.value == state for one in report.results) for state in MARKS}
    summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return [*told, "", summary]


def _lines(result: Result, width: int) -> list[str]:
    mark = MARKS[result.state.value]
    first = f"  {result.name:<{width}}  {mark:<7}  {shown(result.evidence)}"
    return [first, *(f"  {'':<{width}}           {line}" for line in _advice(result))]


def _advice(result: Result) -> list[str]:
    first, *rest = shown(result.advice).splitlines() or [""]
    return [f"-> {first}", *rest] if first else []
