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
"""Maximum time of one check, not counting the checks that it needs."""


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
    """Return the finding that all is well."""
    return Finding(State.OK, evidence)


def warning(evidence: str, advice: str = "") -> Finding:
    """Return a finding that hinders only some jobs, or only for now."""
    return Finding(State.WARNING, evidence, advice)


def failed(evidence: str, advice: str = "") -> Finding:
    """Return a finding that prevents every job."""
    return Finding(State.FAILED, evidence, advice)


def skipped(evidence: str) -> Finding:
    """Return the finding that a check couldn't examine its subject."""
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

    ``advice`` is the advice of findings that have none.
    """

    name: str
    group: str
    look: Callable[[], Awaitable[Finding]]
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
        return all(one.state is not State.FAILED for one in self.results)

    def __getitem__(self, name: str) -> Result:
        return next(one for one in self.results if one.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {"healthy": self.healthy, "checks": [asdict(one) for one in self.results]}


async def run_checks(checks: Sequence[Check]) -> Report:
    """Run *checks* concurrently, each after the checks that it needs.

    Raises:
        ValueError: A check needs a check that doesn't come before it in *checks*.

    Cancelled: all checks end.
    """
    ended: dict[str, anyio.Event] = {}
    for one in checks:
        if unknown := [name for name in one.needs if name not in ended]:
            raise ValueError(f"{one.name} needs {', '.join(unknown)}, which isn't before it")
        ended[one.name] = anyio.Event()
    results: dict[str, Result] = {}

    async def run(check: Check) -> None:
        for name in check.needs:
            await ended[name].wait()
        results[check.name] = await _result(check, results)
        ended[check.name].set()

    async with anyio.create_task_group() as group:
        for one in checks:
            group.start_soon(run, one)
    return Report(tuple(results[one.name] for one in checks))


async def _result(check: Check, results: dict[str, Result]) -> Result:
    cause, began = "", time.monotonic()
    for name in check.needs:
        cause = cause or (name if results[name].state is State.FAILED else results[name].because)
    finding = skipped(f"not checked, because {cause!r} failed") if cause else await _look(check)
    troubled = finding.state in (State.FAILED, State.WARNING)
    return Result(
        name=check.name,
        group=check.group,
        state=finding.state,
        evidence=finding.evidence,
        advice=finding.advice or (check.advice if troubled else ""),
        because=cause,
        seconds=round(time.monotonic() - began, 3),
    )


async def _look(check: Check) -> Finding:
    try:
        with anyio.fail_after(check.limit_s):
            return await check.look()
    except TimeoutError:
        return failed(f"no answer within {check.limit_s:g} s")
    except (KineticError, OSError) as exc:
        return failed_by(exc)
    except Exception as exc:  # a defect in one check must not end the others
        return failed(f"the check itself failed: {exc!r}")
