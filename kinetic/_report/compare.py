"""Merge the reports of several batches into one, which a page shows as a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kinetic._progress.tally import State
from kinetic._report.digest import begin_of
from kinetic._report.facts import BatchReport, Curve, Curves, Example, Item, Part


def merge(reports: Sequence[BatchReport]) -> BatchReport:
    """Return one report with the items of all *reports*, as if they had begun at the same time.

    The items are numbered on from batch to batch. The merged report is that of a sweep if all
    batches search for the same.
    """
    starts = [begin_of(report) for report in reports]
    latest = max(starts)
    parts: list[Part] = []
    items: list[Item] = []
    examples: dict[int, Example] = {}
    curves: dict[int, Curve] = {}
    reported = 0
    # A search on the page can have no quotation mark inside a value.
    names = [report.name.replace('"', "'") for report in reports]
    for report, name, start in zip(reports, names, starts, strict=True):
        first = len(items)
        label = name if name and names.count(name) == 1 else report.group_id  # unlike the others
        parts.append(Part(label=label, report=report, first=first))
        items += _moved(report, first, latest - start)
        examples |= {first + index: example for index, example in report.examples.items()}
        curves |= {first + index: curve for index, curve in report.curves.by_item.items()}
        reported += report.curves.reported
    functions = {report.function for report in reports}
    goals = {report.goal for report in reports}
    totals = [report.total for report in reports]
    return BatchReport(
        group_id=", ".join(report.group_id for report in reports),
        name=" and ".join(part.label for part in parts),
        function=functions.pop() if len(functions) == 1 else "",
        created=latest,
        read_at=max(report.read_at for report in reports),
        total=None if None in totals else len(items),
        direction=reports[0].direction,
        metric=reports[0].metric,
        goal=goals.pop() if len(goals) == 1 else None,
        curves=Curves(by_item=curves, reported=reported),
        parts=tuple(parts),
        items=tuple(items),
        examples=examples,
    )


def _moved(report: BatchReport, first: int, seconds: float) -> Iterator[Item]:
    """Yield the items with other numbers, *seconds* later."""
    for item in report.items:
        attempts = [
            attempt._replace(
                begun=None if attempt.begun is None else attempt.begun + seconds,
                ended=None if attempt.ended is None else attempt.ended + seconds,
            )
            for attempt in item.attempts
        ]
        # The snapshots of two batches differ in how long their items can have run.
        if item.state is State.RUNNING and attempts and attempts[-1].ended is None:
            attempts[-1] = attempts[-1]._replace(ended=report.read_at + seconds)
        yield replace(item, index=first + item.index, attempts=tuple(attempts))
