"""Test the checks of `kinetic.report`, and the format of stored reports."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from typing import Any

import pytest

import kinetic
from kinetic._runner.protocol import metrics
from kinetic._runner.protocol.metrics import Reports
from kinetic.errors import KineticError

KEY, SCOPE = b"k" * 32, "batches/grp-1/"


class Scalar:
    """A scalar as NumPy, JAX, and PyTorch have it."""

    shape = ()

    def item(self) -> float:
        return 0.25


class Array(Scalar):
    shape = (1,)


class Recording:
    def __init__(self) -> None:
        self.taken: list[tuple[int, metrics.Value]] = []

    def add(self, step: int, value: metrics.Value) -> None:
        self.taken.append((step, value))

    def should_stop(self) -> bool:
        return False


class Step:
    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((value, ValueError) for value in (math.nan, math.inf, -math.inf, 10**400, {})),
        *((value, TypeError) for value in (None, "0.5", b"1", True, [1.0], Array(), Fraction(1))),
        ({"loss": math.nan}, ValueError),
        ({"loss": None}, TypeError),
        ({1: 1.0}, TypeError),
        ({"x" * 101: 1.0}, TypeError),
        ({str(number): 1.0 for number in range(65)}, ValueError),
    ],
)
def test_a_wrong_value_is_refused_outside_a_job_as_in_one(value: Any, error: type[Any]) -> None:
    with pytest.raises(error, match=r"kinetic\.report: .*step 7"):
        kinetic.report(7, value)


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (-1, ValueError),
        (Step(-1), ValueError),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
)
def test_a_wrong_step_is_refused(step: Any, error: type[Any]) -> None:
    with pytest.raises(error, match="the step must be an int of at least 0"):
        kinetic.report(step, 1.0)


def test_outside_a_job_a_report_does_nothing() -> None:
    kinetic.report(1, 0.5)
    kinetic.report(0, {"loss": 0.5})  # no job, so no earlier step
    assert not kinetic.should_stop()


def test_values_become_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Recording()
    monkeypatch.setattr(metrics, "sink", sink)
    kinetic.report(Step(2), 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    kinetic.report(3, Scalar())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    kinetic.report(4, {"loss": Scalar(), "n": 2})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    assert sink.taken == [(2, 3.0), (3, 0.25), (4, {"loss": 0.25, "n": 2.0})]
    assert {type(sink.taken[0][0]), type(sink.taken[0][1])} == {int, float}


def test_reports_are_valid_only_under_their_name_and_key() -> None:
    name = metrics.metrics_key(SCOPE, 3, 1, 0)
    reports = Reports("w", 4, [(1, 0.5), (2, {"loss": 1.0})])
    content, metadata = reports.signed(KEY, SCOPE, name)
    assert Reports.verified(content, metadata, KEY, SCOPE, name) == reports
    other = metrics.metrics_key(SCOPE, 3, 1, 1)
    for wrong in ((KEY, SCOPE, other), (b"x" * 32, SCOPE, name), (KEY, "batches/grp-2/", name)):
        with pytest.raises(ValueError, match="forged"):
            Reports.verified(content, metadata, *wrong)
    with pytest.raises(ValueError, match="forged"):
        Reports.verified(content + b" ", metadata, KEY, SCOPE, name)


@pytest.mark.parametrize("fields", [{}, {"entries": [1]}, {"writer": "", "first": "x"}])
def test_damaged_reports_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="damaged"):
        Reports.of(fields)


def test_pruned_is_an_error_an_outcome_and_can_be_pickled() -> None:
    pruned = kinetic.Pruned(3, 0.5)
    copy = pickle.loads(pickle.dumps(pruned))
    assert (copy.step, copy.value, str(copy)) == (3, 0.5, str(pruned))
    assert isinstance(pruned, KineticError)
    assert not pruned.ok
    assert pruned.error is pruned
    with pytest.raises(kinetic.Pruned):
        pruned.unwrap()
    match pruned:
        case kinetic.Pruned(step=step, value=value):
            assert (step, value) == (3, 0.5)


def test_what_user_code_puts_into_pruned_fits_into_an_outcome() -> None:
    assert metrics.plain(3, 0.5) == (3, 0.5)
    assert metrics.plain(3, None) == (3, None)
    assert metrics.plain(3, math.nan) == (3, None)
    assert metrics.plain("a step", object()) == (0, None)
