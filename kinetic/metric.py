"""A metric that a running job has reported by `kinetic.report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["JobMetric", "Metric"]


class Metric(NamedTuple):
    """A report of an item of a batch.

    ``index`` is the item's place in the inputs, and ``attempt`` counts its attempts from 1: each
    attempt begins a new curve. ``value`` is a number, or numbers by name.
    """

    # A tuple has a method of that name, which this field replaces.
    index: int  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleMethodOverride]
    attempt: int
    step: int
    value: float | Mapping[str, float]


class JobMetric(NamedTuple):
    """A report of one job; the fields are those of `Metric`."""

    attempt: int
    step: int
    value: float | Mapping[str, float]
