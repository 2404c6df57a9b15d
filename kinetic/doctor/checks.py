"""A table of checks and what runs it: all at once, each after what it needs."""

from __future__ import annotations

import enum
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from kinetic.errors import KineticError

__all__ = ["Check", "Finding", "Report", "Result", "State", "carry_out"]

LIMIT_S = 30.0
"""How long one check may take; what it needs is not counted."""


class State(enum.Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has seen (``evidence``), and a command or setting that mends it (``advice``)."""

    state: State
    evidence: str
    advice: str = ""

    @classmethod
    def of(cls, failure: Exception) -> Finding:
        """Errors of ours say what to do in the words after the last semicolon of a line."""
        first, newline, rest = str(failure).partition("\n")
        evidence, semicolon, advice = first.rpartition("; ")
        if not semicolon:
            evidence, advice = first, ""
        return cls(State.FAILED, evidence, f"{advice}{newline}{rest}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question. It is asked only when the checks it *needs* have not failed.

    ``advice`` is for findings that have none of their own.
    """

    name: str
    group: str
    look: Callable[[], Awaitable[Finding]]
    needs: tuple[str, ...] = ()
    advice: str = ""
    limit_s: float = LIMIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one check ended. ``because`` names the failed check for which it was skipped."""

    name: str
    group: str
    state: State
    evidence: str
    advice: str = ""
    because: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` shows it."""
        return {
            "name": self.name,
            "group": self.group,
            "state": self.state.value,
            "evidence": self.evidence,
            "advice": self.advice,
            "because": self.because,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The results in the order of the table."""

    results: tuple[Result, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing has failed; warnings do not count."""
        return all(one.state is not State.FAILED for one in self.results)

    def __getitem__(self, name: str) -> Result:
        return next(one for one in self.results if one.name == name)

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` shows it."""
        return {
            "healthy": self.healthy,
            "checks": [one.to_dict() for one in self.results],
        }


async def carry_out(
    checks: Sequence[Check], told: Callable[[Result], None] = lambda result: None
) -> Report:
    """Run *checks* at once, each after those it needs, which stand before it in the table.

    *told* hears of each result as it comes. Cancelled: all checks end.

    Raises:
        ValueError: A check needs one that does not stand before it.
    """
    over: dict[str, anyio.Event] = {}
    for one in checks:
        if unknown := [name for name in one.needs if name not in over]:
            raise ValueError(f"{one.name} needs {', '.join(unknown)}, which is not before it")
        over[one.name] = anyio.Event()
    results: dict[str, Result] = {}

    async def settle(check: Check) -> None:
        for name in check.needs:
            await over[name].wait()
        results[check.name] = result = await _result(check, results)
        over[check.name].set()
        told(result)

    async with anyio.create_task_group() as group:
        for one in checks:
            group.start_soon(settle, one)
    return Report(tuple(results[one.name] for one in checks))


async def _result(check: Check, results: dict[str, Result]) -> Result:
    for name in check.needs:
        needed = results[name]
        root = name if needed.state is State.FAILED else needed.because
        if root:
            return Result(
                name=check.name,
                group=check.group,
                state=State.SKIPPED,
                evidence=f"not asked, because {root!r} failed",
                because=root,
            )
    began = time.monotonic()
    finding = await _looked(check)
    troubled = finding.state in (State.FAILED, State.WARNING)
    return Result(
        name=check.name,
        group=check.group,
        state=finding.state,
        evidence=finding.evidence,
        advice=finding.advice or (check.advice if troubled else ""),
        seconds=time.monotonic() - began,
    )


async def _looked(check: Check) -> Finding:
    try:
        with anyio.fail_after(check.limit_s):
            return await check.look()
    except TimeoutError:
        return Finding(State.FAILED, f"no answer within {check.limit_s:g} s")
    except (KineticError, OSError) as exc:
        return Finding.of(exc)
    except Exception as exc:  # one broken check leaves the others their answers
        return Finding(State.FAILED, f"the check itself failed: {exc!r}")
