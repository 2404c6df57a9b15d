"""The progress of a batch: counts, speed, time left, and the first failure."""

from __future__ import annotations

from dataclasses import dataclass

from kinetic._messages import format_duration

__all__ = ["Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a batch is.

    Attributes:
        total: How many items there will be; None while unknown.
        waiting, running, succeeded, failed, cancelled, lost, pruned: How many items are in each
            state. A pruned item doesn't count as succeeded.
        retried: How many attempts were retries.
        retried_after: Pairs of a reason, such as ``preempted``, and the number of retries after it.
            The most frequent reason is first. Only retries that this process has seen count.
        elapsed: Seconds since the batch was submitted; 0 if the batch had ended before kinetic
            counted its items.
        rate: Items that ended per second, over the last 30 s or the last 20 items.
        eta: Seconds until the last item ends at this rate; None while unknown.
        first_failure: One line about the first item that failed finally; empty if none failed.
        best: In a sweep, the item with the best value so far, and this value; None without one.
        rungs: In a sweep, pairs of a rung of the pruner, which is a step, and how many trials were
            pruned after they had reached it, and no later one. If kinetic doesn't know the rungs,
            it uses 1, 2, 4, 8, and so on. 0 is before the first rung.
        stopped: Why no more items start, such as a spent budget; empty if they may start.
        step: A long step that this process carries out, such as an upload; else empty.
    """

    total: int | None = None
    waiting: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    lost: int = 0
    pruned: int = 0
    retried: int = 0
    retried_after: tuple[tuple[str, int], ...] = ()
    elapsed: float = 0.0
    rate: float = 0.0
    eta: float | None = None
    first_failure: str = ""
    best: tuple[int, float] | None = None
    rungs: tuple[tuple[int, int], ...] = ()
    stopped: str = ""
    step: str = ""

    @property
    def known(self) -> int:
        """How many items there are so far."""
        return self.waiting + self.running + self.ended

    @property
    def ended(self) -> int:
        """How many items ended, in any way."""
        return self.succeeded + self.failed + self.cancelled + self.lost + self.pruned

    @property
    def finished(self) -> bool:
        """Whether the total is known and all items have ended."""
        return self.total is not None and self.ended >= self.total

    @property
    def fraction(self) -> float | None:
        """The fraction of items that ended, 0 to 1; None while the total is unknown."""
        if self.total is None:
            return None
        return min(1.0, self.ended / self.total) if self.total else 1.0

    def line(self) -> str:
        """Format the progress as one plain line."""
        parts = [self.counts()]
        parts += [f"best {self.best_value()}"] if self.best is not None else []
        if self.finished:
            parts += [f"took {format_duration(self.elapsed)}"] if self.elapsed else []
        else:
            parts += [self.speed()] if self.rate > 0 else []
            parts += [f"{format_duration(max(1.0, self.eta))} left"] if self.eta is not None else []
        parts += [f"stopped: {self.stopped}"] if self.stopped else []
        parts += [self.step] if self.step else []
        parts += [self.failure()] if self.first_failure else []
        return "; ".join(parts)

    def failure(self) -> str:
        """Format the first failure, and how to list the others; empty without one."""
        unsuccessful = self.failed + self.lost
        hint = f" (batch.failures() lists all {unsuccessful:,})" if unsuccessful > 1 else ""
        return f"first failure{hint}: {self.first_failure}" if self.first_failure else ""

    def best_value(self) -> str:
        """Format the best value of a sweep, and its item; empty without one."""
        return f"{self.best[1]:.6g} (item {self.best[0]})" if self.best is not None else ""

    def counts(self) -> str:
        """Format the counts of all states that have items."""
        counts = [
            (self.succeeded, "succeeded"),
            (self.pruned, "pruned"),
            (self.failed, "failed"),
            (self.lost, "lost"),
            (self.cancelled, "cancelled"),
            (self.running, "running"),
            (self.waiting, "waiting"),
            (self.retried, "retried"),
        ]
        states = ", ".join(f"{count:,} {name}" for count, name in counts if count)
        of_total = f" of {self.total:,}" if self.total is not None else ""
        return f"{self.ended:,}{of_total} ended" + (f": {states}" if states else "")

    def speed(self) -> str:
        """Format the rate, per second, minute, or hour."""
        for unit, seconds in (("s", 1), ("min", 60), ("h", 3600)):
            if (rate := self.rate * seconds) >= 1 or unit == "h":
                return f"{rate:.0f}/{unit}" if rate >= 10 else f"{rate:.1f}/{unit}"
        raise AssertionError
