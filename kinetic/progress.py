"""How far a batch is, as one value: counts, speed, what is left, and the first failure."""

from __future__ import annotations

from dataclasses import dataclass

from kinetic._messages import span

__all__ = ["Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a batch is.

    Every item is counted in exactly one of ``waiting``, ``running``,
    ``succeeded``, ``failed``, ``cancelled`` and ``lost``; together they are the
    items known so far. ``total`` is how many there will be, None while nobody
    knows. ``retried`` counts the attempts after the first of all items, and
    ``retried_after`` has pairs of what they followed, such as ``preempted``, and
    how many, the most frequent first; what nobody here saw is not in it.

    ``elapsed`` is seconds since the batch was made. ``rate`` is items ended a
    second, lately: over half a minute, or the last 20 items where they are
    slower. ``eta`` is seconds until the last item ends at this rate, None
    while the total is unknown or nothing ended yet.

    ``first_failure`` is the message of the first item that failed for good, on
    one line, empty when none did. ``stopped`` says why nothing more starts, as when
    a budget is spent; mostly it is empty. So is ``step``, which names a long single
    step that this process is in, such as an upload.
    """

    total: int | None = None
    waiting: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    lost: int = 0
    retried: int = 0
    retried_after: tuple[tuple[str, int], ...] = ()
    elapsed: float = 0.0
    rate: float = 0.0
    eta: float | None = None
    first_failure: str = ""
    stopped: str = ""
    step: str = ""

    @property
    def known(self) -> int:
        """How many items there are so far."""
        return self.waiting + self.running + self.ended

    @property
    def ended(self) -> int:
        """How many items ended, however they did."""
        return self.succeeded + self.failed + self.cancelled + self.lost

    @property
    def finished(self) -> bool:
        """Whether every item there will be has ended."""
        return self.total is not None and self.ended >= self.total

    @property
    def fraction(self) -> float | None:
        """Which part of the items ended, 0 to 1; None while the total is unknown."""
        if self.total is None:
            return None
        return min(1.0, self.ended / self.total) if self.total else 1.0

    def line(self) -> str:
        """Everything as one plain line."""
        words = [self.counts()]
        if self.finished:
            words.append(f"took {span(self.elapsed)}")
        else:
            words += [self.speed()] if self.rate > 0 else []
            words += [f"{span(max(1.0, self.eta))} left"] if self.eta is not None else []
        words += [f"stopped: {self.stopped}"] if self.stopped else []
        words += [self.step] if self.step else []
        words += [self.failure()] if self.first_failure else []
        return "; ".join(words)

    def failure(self) -> str:
        """The first failure, and what lists the others; empty when there is none."""
        bad = self.failed + self.lost
        rest = f" (batch.failures() lists all {bad:,})" if bad > 1 else ""
        return f"first failure{rest}: {self.first_failure}" if self.first_failure else ""

    def counts(self) -> str:
        """How many items are where, without those states that none is in."""
        named = [
            (self.succeeded, "succeeded"),
            (self.failed, "failed"),
            (self.lost, "lost"),
            (self.cancelled, "cancelled"),
            (self.running, "running"),
            (self.waiting, "waiting"),
            (self.retried, "retried"),
        ]
        there = ", ".join(f"{count:,} {name}" for count, name in named if count)
        of = f" of {self.total:,}" if self.total is not None else ""
        return f"{self.ended:,}{of} ended" + (f": {there}" if there else "")

    def speed(self) -> str:
        """The rate, in the unit in which it is a number to be read."""
        for unit, seconds in (("s", 1), ("min", 60), ("h", 3600)):
            if (rate := self.rate * seconds) >= 1 or unit == "h":
                return f"{rate:.0f}/{unit}" if rate >= 10 else f"{rate:.1f}/{unit}"
        raise AssertionError
