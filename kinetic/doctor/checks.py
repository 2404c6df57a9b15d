"""Run a table of checks concurrently, each after the checks that it depends on."""

from __future__ import annotations

import enum
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import anyio

from kinetic.errors import KineticError

__all__ = ["Report", "Result", "State"]

LIMIT_S = 30.0
"""Timeout of one check in seconds, without the wait for the checks that it needs."""


class State(enum.StrEnum):
    """The state of a check that ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a check: the ``evidence``, and the command or setting that fixes a problem."""

    state: State
    evidence: str
    advice: str = ""


def ok(evidence: str) -> Finding:
    """Return the finding of a check that found no problem."""
    return Finding(State.OK, evidence)


def warning(evidence: str, advice: str = "") -> Finding:
    """Return a finding about a problem that affects only some jobs, or is temporary."""
    return Finding(State.WARNING, evidence, advice)


def failed(evidence: str, advice: str = "") -> Finding:
    """Return a finding about a problem that prevents every job."""
    return Finding(State.FAILED, evidence, advice)


def skipped(evidence: str) -> Finding:
    """Return the finding of a check that couldn't run."""
    return Finding(State.SKIPPED, evidence)


def failed_by(error: Exception) -> Finding:
    """Return the finding of a check that raised *error*.

    The messages of kinetic's errors have the advice after the last semicolon of the first line.
    """
    first, newline, rest = str(error).partition("\n")
    evidence, semicolon, advice = first.rpartition("; ")
    if not semicolon:
        evidence, advice = first, ""
    return failed(evidence, f"{advice}{newline}{rest}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check; it runs only if the checks that it ``needs`` have not failed.

    A finding about a problem without advice gets this ``advice``.
    """

    name: str
    group: str
    probe: Callable[[], Awaitable[Finding]]
    needs: tuple[str, ...] = ()
    advice: str = ""
    limit_s: float = LIMIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one check ended; ``because`` names the failed check that caused a skip."""

    name: str
    group: str
    state: State
    evidence: str
    advice: str = ""
    because: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all checks, in the order of the table."""

    results: tuple[Result, ...]

    @property
    def healthy(self) -> bool:
        """Whether no check failed; warnings don't count."""
        return all(result.state is not State.FAILED for result in self.results)

    def __getitem__(self, name: str) -> Result:
        return next(result for result in self.results if result.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {"healthy": self.healthy, "checks": [asdict(result) for result in self.results]}


async def run_checks(checks: Sequence[Check]) -> Report:
    """Run *checks* concurrently, each after the checks that it needs.

    Raises:
        ValueError: A check needs a check that doesn't come before it in *checks*.

    Cancelled: all checks end.
    """
    ended_events: dict[str, anyio.Event] = {}
    for check in checks:
        if unknown := [name for name in check.needs if name not in ended_events]:
            raise ValueError(f"{check.name} must come after {', '.join(unknown)}, which it needs")
        ended_events[check.name] = anyio.Event()
    results: dict[str, Result] = {}

    async def run(pending: Check) -> None:
        for name in pending.needs:
            await ended_events[name].wait()
        results[pending.name] = await _run_check(pending, results)
        ended_events[pending.name].set()

    async with anyio.create_task_group() as task_group:
        for check in checks:
            task_group.start_soon(run, check)
    return Report(tuple(results[check.name] for check in checks))


async def _run_check(check: Check, results: dict[str, Result]) -> Result:
    """Run *check*; skip it if a check that it needs, also indirectly, has failed in *results*."""
    cause, started = "", time.monotonic()
    for name in check.needs:
        cause = cause or (name if results[name].state is State.FAILED else results[name].because)
    finding = (
        skipped(f"not checked, because {cause!r} failed") if cause else await _run_probe(check)
    )
    has_problem = finding.state in (State.FAILED, State.WARNING)
    return Result(
        name=check.name,
        group=check.group,
        state=finding.state,
        evidence=finding.evidence,
        advice=finding.advice or (check.advice if has_problem else ""),
        because=cause,
        seconds=round(time.monotonic() - started, 3),
    )


async def _run_probe(check: Check) -> Finding:
    try:
        with anyio.fail_after(check.limit_s):
            return await check.probe()
    except TimeoutError:
        return failed(f"no answer within {check.limit_s:g} s")
    except (KineticError, OSError) as exc:
        return failed_by(exc)
    except Exception as exc:  # a defect in one check must not end the other checks
        return failed(f"the check itself failed: {exc!r}")
