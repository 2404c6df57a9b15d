"""Watch every step of a course of events, and note the first that breaks an invariant.

The invariants are on the page about the protocol of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic._runner.protocol.workers import Requests

if TYPE_CHECKING:
    from .actors import Pod
    from .world import Job, World


class Violation(Exception):
    """An invariant is broken."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


class Oracle:
    """The truth about one submission, from what took effect in the store."""

    def __init__(self, world: World, budgets: RetryBudgets) -> None:
        self.violation: Violation | None = None
        self.requests = Requests()
        self.attempts: dict[int, dict[int, wire.Attempt]] = {}
        self.stored = 0
        self.total: int | None = None
        self.seen: Counter[str] = Counter()
        self.inputs_gone = False
        self.cleaning = False
        self.collected = False
        self._world = world
        self._budgets = budgets
        self._told: dict[int, wire.ItemState] = {}
        self._starts = set[tuple[int, int]]()
        self._stops_before: dict[tuple[int, int], bool] = {}

    def fail(self, invariant: str, message: str) -> None:
        if self.violation is None:
            self.violation = Violation(invariant, message)

    # --- the store ---

    def created(
        self, process: Any, name: str, metadata: Mapping[str, str], *, created: bool
    ) -> None:
        from .world import KEY, SCOPE

        if name.endswith(".outcome") and not created:
            self._refused(process, name)
        if not created:
            return
        if name.startswith(f"{SCOPE}control/"):
            body = self._world.objects[name][0]
            request = wire.Request.verified(body, metadata, KEY, SCOPE, name)
            self.requests.add(request)
            self.seen[f"{request.kind} {request.cause}".strip()] += 1
            for index in request.bases:
                self._told.pop(index, None)
            self.cleaning = self.requests.removing
            for index in range(self.stored):
                self._tell(index)
        elif name.startswith(f"{SCOPE}inputs/"):
            slot = wire.Slot.verified(metadata, KEY, SCOPE, name)
            if self.total is not None and not self.inputs_gone:
                self.fail("I7", f"{name} follows the end of the inputs")
            self.total = slot.total
            self.stored = max(self.stored, slot.first + slot.count)
        elif name.startswith(f"{SCOPE}attempts/") and not self.inputs_gone:
            self._attempt_created(name, metadata)
        elif name == wire.collected_key(SCOPE):
            values = [self.state(index) is wire.ItemState.SUCCEEDED for index in range(self.stored)]
            if self.total is None or not all(values):
                self.fail("I10", "collected exists, but an item has no value")
            self.collected = True
            self.seen["collected"] += 1

    def _attempt_created(self, name: str, metadata: Mapping[str, str]) -> None:
        from .world import KEY, SCOPE

        found = wire.attempts_of([(name, metadata)], KEY, SCOPE)
        for index, attempts in found.items():
            for number, new in attempts.items():
                known = self.attempts.setdefault(index, {})
                old = known.get(number, wire.Attempt())
                if new.outcome is not None:
                    self.seen[new.outcome.kind] += 1
                    self._check_outcome(index, number, new.outcome)
                    known[number] = old._replace(outcome=new.outcome)
                else:
                    standing = self.requests.standing(index)
                    over = self.requests.done or not new.worker.startswith(
                        f"{self.requests.round}."
                    )
                    self._stops_before[index, number] = standing.stopped or bool(over)
                    known[number] = new._replace(outcome=old.outcome)
            self._tell(index)

    def _check_outcome(self, index: int, number: int, outcome: wire.Outcome) -> None:
        values = [
            attempt
            for attempt in self.attempts[index].values()
            if attempt.outcome is not None and attempt.outcome.kind is wire.Kind.VALUE
        ]
        if outcome.kind is wire.Kind.VALUE and values:
            self.fail("I1", f"item {index} has two values")
        claim = self.attempts[index].get(number, wire.Attempt()).executor
        if claim is None:
            self.fail("I4", f"attempt {number} of item {index} was never claimed, and is closed")
        if outcome.kind is wire.Kind.LOST:
            pod = next((pod for pod in self._world.platform.alive if pod.executor == claim), None)
            if pod is not None:
                self.fail("I4", f"{pod.name} lives, and its attempt {index}.{number} is closed")

    def fetched(self, process: Any, index: int, metadata: Mapping[str, str]) -> None:
        """A worker reads an input from the slot with *metadata*."""
        first, count = int(metadata.get("first", "0")), int(metadata.get("count", "0"))
        if index not in range(first, first + count):
            self.fail("I7", f"{process.name} takes item {index}, whose input it doesn't know")

    def deleted(self, name: str) -> None:
        from .world import SCOPE

        if name.startswith(f"{SCOPE}inputs/"):
            self.inputs_gone = True
        if name.endswith(".claim") and not self.inputs_gone:
            self.fail("I6", f"{name} was withdrawn although the inputs exist")

    def _tell(self, index: int) -> None:
        """A final state, once it could be told, stays until a request retries the item."""
        state = self.state(index)
        told = self._told.get(index)
        if self.inputs_gone or not state.final:
            return
        if told is not None and told is not state:
            self.fail("I1", f"item {index} was {told}, and is {state}")
        self._told[index] = state

    def state(self, index: int) -> wire.ItemState:
        standing = self.requests.standing(index)
        return wire.item_state(standing, self.attempts.get(index, {}), self._budgets).state

    # --- workers ---

    def started(self, pod: Pod, index: int, number: int) -> None:
        """User code starts."""
        who = f"{pod.name} starts attempt {number} of item {index}"
        attempts = self.attempts.get(index, {})
        self.seen["started"] += 1
        if self.inputs_gone:
            # A worker may freeze after its check, but the check must come before the removal.
            if pod.late:
                self.fail("I6", f"{who} in a batch that is removed")
            return
        if (index, number) in self._starts:
            self.fail("I2", f"{who} again")
        self._starts.add((index, number))
        if self._stops_before.get((index, number)):
            self.fail("I3", f"{who}, but a stop or a newer round came before the claim")
        if not pod.counted:
            return  # what a zombie starts may be closed at any moment
        if attempts.get(number, wire.Attempt()).outcome is not None:
            self.fail("I2", f"{who}, which is closed")
        outcomes = [attempt.outcome for attempt in attempts.values() if attempt.outcome is not None]
        if any(outcome.kind is wire.Kind.VALUE for outcome in outcomes):
            self.fail("I2", f"{who}, which has a value")
        base = self.requests.standing(index).base
        before = [attempts.get(n, wire.Attempt()).outcome for n in range(base + 1, number)]
        if None in before:
            self.fail("I2", f"{who}, and an attempt before is open")
        reasons = [
            it.reason for it in before if it is not None and it.kind is not wire.Kind.CANCELLED
        ]
        if reasons and not self._budgets.cover(reasons):
            self.fail("I9", f"{who}, and its tries are used up: {reasons}")
        others = [other for other in self._world.platform.alive if other.running is not None]
        if any(other.job is not pod.job for other in others):
            self.fail("I5", f"{who} while workers of another round run")
        if len(others) + 1 > len(pod.job.ranks):
            self.fail("I5", f"{who} beyond the number of workers")

    def _refused(self, process: Any, name: str) -> None:
        """The outcome of a claimant is refused: only if the platform has ended its pod."""
        from .actors import Pod

        index, number = (int(part) for part in name.rsplit("/", 1)[1].split(".")[:2])
        attempt = self.attempts.get(index, {}).get(number)
        if not isinstance(process, Pod) or attempt is None or self.inputs_gone:
            return
        if attempt.executor == process.executor and process.counted and process.alive:
            self.fail("I4", f"the work of {process.name} on {index}.{number} is refused")

    def completed(self, alive: list[Pod], job: Job) -> None:
        """A worker exited with 0: the platform ends the others."""
        for pod in alive:
            if pod.job is job and pod.running is not None:
                self.fail("I4", f"the exit of another worker kills the item of {pod.name}")

    def job_created(self, round: int, alive: list[Pod]) -> None:
        """A round begins."""
        self.seen[f"round {min(round, 1)}"] += 1

    def job_deleted(self, round: int, up_to: int) -> None:
        if round > up_to:
            self.fail("I8", f"a stop in slot {up_to} deletes the workers of round {round}")

    # --- the end ---

    def audit(self, *, client: bool) -> None:
        """Check that everything has come to its end."""
        if not (self.inputs_gone or self.cleaning):
            for index in range(self.stored):
                self._audit_item(index, client=client)
        alive = [pod.name for pod in self._world.platform.alive]
        if alive:
            self.fail("L3", f"nothing will happen any more, and {alive} are left")

    def _audit_item(self, index: int, *, client: bool) -> None:
        state = self.state(index)
        if state.final or (state is wire.ItemState.CANCELLING and not client):
            return
        if self.total is not None or client:  # else its producer died: `resume` is needed
            self.fail("L1", f"item {index} stays {state}")
