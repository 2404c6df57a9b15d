"""The invariants of every course of events, checked at each effect.

The oracle sees every effect on the store and the platform, and every outcome that a party receives.
It implements the rule of an item a second time, and compares it with the engine's whenever an item
changes.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kinetic._runner.protocol import frames, pickles, signing, wire
from kinetic._runner.protocol.retry_budgets import RetryBudgets

NAME = re.compile(r"attempts/\d+/(\d+)\.(\d+)\.(claim|outcome)$")
FINAL = ("succeeded", "failed", "cancelled")
ROOT = b"k" * 32
"""The root key; a forger doesn't have it."""


class Violation(AssertionError):
    """An invariant doesn't hold; ``invariant`` is its name in docs/protocol.md."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


@dataclass
class Batch:
    """The true contents of the store for the one batch."""

    claims: dict[tuple[int, int], str] = field(default_factory=dict)
    outcomes: dict[tuple[int, int], wire.Outcome] = field(default_factory=dict)
    control: list[wire.Request] = field(default_factory=list)
    inputs: dict[int, tuple[bytes, dict[str, str]]] = field(default_factory=dict)
    fence: int = 0
    holder: str = ""


def judge(batch: Batch, index: int, budgets: RetryBudgets) -> tuple[str, int]:
    """Apply the rule of an item as docs/protocol.md has it, independently of the engine."""
    base, stopped = standing(batch, index)
    used, last, number = {"user": 0, "infrastructure": 0}, 0, 0
    hopeless = False
    while True:
        number += 1
        outcome = batch.outcomes.get((index, number))
        if outcome is None:
            if number > base:
                break
            continue
        if outcome.kind == "value":
            return "succeeded", number
        if number > base and outcome.kind in ("error", "lost"):
            infrastructure = outcome.reason in ("preempted", "node lost", "evicted")
            used["infrastructure" if infrastructure else "user"] += 1
            last, hopeless = number, outcome.reason == "submission"
    spent = (
        hopeless or used["user"] > budgets.user or used["infrastructure"] > budgets.infrastructure
    )
    if not stopped:
        return ("failed", last) if spent else ("open", number)
    if (index, number) in batch.claims:
        return "cancelling", number
    return ("failed", last) if last else ("cancelled", number)


def standing(batch: Batch, index: int, upto: int | None = None) -> tuple[int, bool]:
    """Return the number of retired attempts, and whether the item is stopped."""
    base, stopped = 0, False
    for entry in batch.control[:upto]:
        if entry.kind == "stop" and (entry.items is None or index in entry.items):
            stopped = True
        elif entry.kind == "retry" and index in entry.bases:
            base, stopped = entry.bases[index], False
    return base, stopped


LOOKS_AGAIN_S = 60.0
"""How often workers without a client sum up what a batch has spent."""

SEEN_S = 20.0
"""How long a client may not know that a worker runs."""


class Oracle:
    """Receive every event, and raise at the first one that breaks an invariant.

    ``is_alive`` tells whether the platform takes a worker's process for alive.
    """

    def __init__(self, budgets: RetryBudgets, max_concurrent: int) -> None:
        self.budgets = budgets
        self.max_concurrent = max_concurrent
        self.batch = Batch()
        self.scope = ""
        self.final: dict[int, tuple[str, int]] = {}
        """The final state that each item has reached; it must not change."""
        self.ran: dict[tuple[int, int], str] = {}
        self.values: dict[int, object] = {}
        self.cleaning = -1
        self.collected = False
        self.removed: set[tuple[int, int]] = set()
        """The attempts whose objects a collection has deleted."""
        self.inputs_gone = False
        self.gone = False
        self.over = False
        self.clock: Callable[[], float] = lambda: 0.0
        self.seen: Counter[str] = Counter()
        self.is_alive: Callable[[str], bool] = lambda executor: False
        self.served_since: Callable[[], float] = lambda: 0.0
        """Since when a worker lives; now, if none does."""
        self.refusals = 0
        self.may_time_out = False
        self.stop_patience = math.inf
        """For how many seconds a stopped item may run on."""
        self._stops: list[tuple[int, float]] = []
        self.spent_at = math.inf
        """When the attempts had used up the budget."""
        self.budget_hours = math.inf

    def state(self, index: int) -> tuple[str, int]:
        return judge(self.batch, index, self.budgets)

    @property
    def end(self) -> int | None:
        """Return the number of items once the end of the inputs is stored."""
        for _, metadata in self.batch.inputs.values():
            if "first" not in metadata:
                return int(metadata["total"])
        return None

    @property
    def stored(self) -> int:
        """Return the number of items that are stored."""
        chunks = [chunk for _, chunk in self.batch.inputs.values() if "first" in chunk]
        return max((int(chunk["first"]) + int(chunk["count"]) for chunk in chunks), default=0)

    def claimed_too_late(self, index: int) -> bool:
        """Tell whether a worker claimed an item after its end, and died."""
        state, number = self.state(index)
        is_late = index in self.final and state == "cancelling"
        return is_late and not self.is_alive(self.batch.claims[index, number])

    # --- the store ---

    def created(self, actor: str, name: str, body: bytes, metadata: dict[str, str]) -> None:
        """Check an object that *actor* created."""
        if not name.startswith("batches/") or self.over or self.gone:
            return
        scope, _, rest = name.removeprefix("batches/").partition("/")
        self.scope = self.scope or f"batches/{scope}/"
        if rest == "lease":
            self._lease(actor, body)
        elif rest.startswith("inputs/"):
            self._input(int(rest.removeprefix("inputs/")[:8]), body, metadata)
        elif rest.startswith("control/"):
            self._control(actor, name, body, metadata)
        elif rest == "collected":
            self._collect(actor)
        elif found := NAME.search(name):
            self._attempt(int(found[1]), int(found[2]), found[3], metadata)

    def replaced(self, actor: str, name: str, body: bytes) -> None:
        """Check an object that *actor* overwrote."""
        if self.over or self.gone:
            return
        if not name.endswith("/lease"):
            raise Violation("I1", f"{name} was overwritten by {actor}")
        self._lease(actor, body)

    def deleted(self, actor: str, name: str) -> None:
        """Check an object that *actor* deleted."""
        if self.over or self.gone:
            return
        if found := NAME.search(name):
            key = int(found[1]), int(found[2])
            if self.collected:
                self.removed.add(key)  # the oracle keeps the outcome: it stays true
                return
            if found[3] == "outcome" and self.cleaning < 0:
                raise Violation("I1", f"{name} was deleted by {actor}")
            (self.batch.claims if found[3] == "claim" else self.batch.outcomes).pop(key, None)
        elif "/inputs/" in name:
            self.inputs_gone = True
        elif name.endswith("/lease") and self.cleaning >= 0:
            self.batch.fence = 0  # a party that makes a new lease finds the stop or no manifest
        elif "/control/" in name:
            self.gone = True

    def _collect(self, actor: str) -> None:
        """Check that all items have values when *actor* starts to delete their objects."""
        if self.cleaning >= 0:
            return
        items = range(self.stored)
        unfinished = [index for index in items if self.state(index)[0] != "succeeded"]
        if self.end is None or unfinished:
            raise Violation(
                "I10", f"{actor} collects although {unfinished} of {self.end} have no value"
            )
        self.collected = True
        self.seen["collected"] += 1

    def _lease(self, actor: str, body: bytes) -> None:
        content = json.loads(body)
        fence, batch = content["fence"], self.batch
        if fence < batch.fence and self.cleaning < 0:  # an interrupted cleanup may delete the lease
            raise Violation("I3", f"{actor} sets the fence from {batch.fence} back to {fence}")
        if fence > batch.fence:
            batch.fence, batch.holder = fence, actor
        elif actor != batch.holder:
            raise Violation("I3", f"{actor} writes the lease that {batch.holder} holds")

    def _input(self, slot: int, body: bytes, metadata: dict[str, str]) -> None:
        inputs = self.batch.inputs
        if self.inputs_gone:
            return  # an abandoned write arrives after the cleanup; nobody reads it
        if slot in inputs:
            raise Violation("I7", f"slot {slot} of the inputs was written twice")
        if any("first" not in chunk for other, (_, chunk) in inputs.items() if other <= slot):
            raise Violation("I7", f"slot {slot} of the inputs was written after the end")
        if "first" not in metadata and any(other > slot for other in inputs):
            raise Violation("I7", f"the end at slot {slot} was written before others")
        inputs[slot] = body, metadata

    def _control(self, actor: str, name: str, body: bytes, metadata: dict[str, str]) -> None:
        batch, slot = self.batch, int(name.rpartition("/")[2])
        if slot != len(batch.control):
            raise Violation(
                "I7", f"slot {slot} of control was written, {len(batch.control)} is next"
            )
        key = signing.submission_key(ROOT, self.scope)
        if metadata.get("mac") != signing.sign(key, self.scope, name, body):
            batch.control.append(wire.Request(kind="forged"))  # it takes a slot without effect
            self.seen["control: forged"] += 1
            return
        entry = wire.Request.from_bytes(body)
        batch.control.append(entry)
        self.seen[f"control: {entry.kind} {entry.cause}".strip()] += 1
        if entry.kind == "stop" and entry.cause == "cleanup":
            self.cleaning = slot
        if entry.kind == "scale":
            self.max_concurrent = max(self.max_concurrent, int(entry.cause))
        elif entry.kind == "stop" and not entry.keep_running:
            self._stops.append((len(batch.control), self.clock()))
        items = range(self.stored) if entry.items is None else entry.items
        for index in entry.bases if entry.kind == "retry" else items:
            if entry.kind == "retry":
                if self.final.get(index, ("", 0))[0] == "succeeded":
                    raise Violation("I1", f"{actor} retries item {index}, which has a value")
                self.final.pop(index, None)
            self._check_item(index, f"control slot {slot}")

    def _attempt(self, index: int, number: int, kind: str, metadata: dict[str, str]) -> None:
        batch, key = self.batch, (index, number)
        if kind == "claim":
            batch.claims[key] = metadata["executor"]
            self._check_item(index, f"the claim of attempt {number}")
            return
        outcome = wire.Outcome.parse(metadata["header"])
        before = batch.outcomes.get(key, outcome)
        if key in self.removed and before.kind == "value" and outcome.kind != "value":
            return  # a slow write arrives after the collection; nobody reads it
        if (before.kind, before.executor) != (outcome.kind, outcome.executor):
            raise Violation("I1", f"{index}.{number} ended as {before}, and then as {outcome}")
        batch.outcomes[key] = outcome
        self.seen[f"outcome: {outcome.kind}"] += 1
        if sum(k[0] == index and o.kind == "value" for k, o in batch.outcomes.items()) > 1:
            raise Violation("I1", f"item {index} has two values")
        self._check_item(index, f"the outcome of attempt {number}")
        if self.cleaning < 0:
            self._check_closing(index, number, outcome)
        hours = sum(bool(outcome.started) for outcome in batch.outcomes.values())
        if self.spent_at == math.inf and hours >= self.budget_hours:
            self.spent_at = self.clock()

    def _check_closing(self, index: int, number: int, outcome: wire.Outcome) -> None:
        """Check that no process lives whose attempt another process closes."""
        what = f"{index}.{number}, which ends as {outcome.kind} ({outcome.reason})"
        if outcome.executor == wire.VOID and outcome.kind in ("lost", "error"):
            if index < self.stored and not (self.refusals or self.may_time_out):
                raise Violation("I4", f"no worker was refused, and a client closes {what}")
            served_s = self.clock() - self.served_since()
            if outcome.reason == "unschedulable" and served_s > SEEN_S:
                raise Violation("I4", f"workers run since {served_s:.0f} s, a client closes {what}")
        elif (outcome.phase == "lost" or outcome.kind == "lost") and self.is_alive(
            outcome.executor
        ):
            raise Violation("I4", f"{outcome.executor} lives, and another process closes {what}")

    def _check_item(self, index: int, cause: str) -> None:
        now, before = self.state(index), self.final.get(index)
        computed = wire.item_state(
            wire.standing(index, self.batch.control), self._attempts(index), self.budgets
        )
        if (computed.state.value, computed.attempt) != now:
            raise Violation("rule", f"the engine computes {computed}, the oracle {now}")
        if now[0] not in FINAL or self.cleaning >= 0:
            return
        changed = before is not None and (
            before[0] != now[0] or (now[0] != "cancelled" and before != now)
        )
        if changed:
            raise Violation("I1", f"{cause} changes item {index} from {before} to {now}")
        self.final[index] = now

    def _attempts(self, index: int) -> dict[int, wire.Attempt]:
        numbers = {n for i, n in (*self.batch.claims, *self.batch.outcomes) if i == index}
        return {
            n: wire.Attempt(self.batch.claims.get((index, n)), self.batch.outcomes.get((index, n)))
            for n in numbers
        }

    # --- starting attempts ---

    def objection(self, index: int, number: int) -> str:
        """Return why an attempt must not run given the store's contents, or an empty string."""
        base, _ = standing(self.batch, index)
        kinds = [outcome.kind for key, outcome in self.batch.outcomes.items() if key[0] == index]
        if "value" in kinds:
            return "there is a value"
        missing = [n for n in range(base + 1, number) if (index, n) not in self.batch.outcomes]
        return f"{missing} are open" if missing else ""

    def started(
        self,
        executor: str,
        index: int,
        number: int,
        value: object,
        seen: tuple[int, str],
        *,
        is_late: bool,
    ) -> None:
        """Check the start of user code.

        *seen* is the number of requests that the worker read, and the objection at that time.
        *is_late* says that the worker's last request came after the inputs were removed, if so.
        """
        upto, objection = seen
        if (index, number) in self.ran:
            raise Violation(
                "I2",
                f"{executor} starts {index}.{number}, {self.ran[index, number]} has done so before",
            )
        is_removed = (self.inputs_gone or self.gone) and is_late
        if is_removed or 0 <= self.cleaning < upto:
            invariant = "I10" if self.collected else "I6"
            raise Violation(invariant, f"{executor} starts {index}.{number} of a cleaned batch")
        if standing(self.batch, index, upto)[1]:
            raise Violation("I3", f"{executor} starts {index}.{number}, it has seen the stop")
        if objection:
            raise Violation("I2", f"{executor} starts {index}.{number}, {objection}")
        self.ran[index, number] = executor
        self.values[index] = value

    def refused(self, executor: str, index: int, number: int, zombie: bool) -> None:
        """Check a worker that couldn't commit because another process closed its attempt."""
        if self.over or self.cleaning >= 0:
            return
        if self.batch.claims.get((index, number)) == executor and not zombie:
            raise Violation(
                "I4", f"{executor} has done {index}.{number}, and its outcome is refused"
            )

    # --- workers ---

    def runs(
        self,
        executor: str,
        place: tuple[int, str],
        others: list[tuple[str, tuple[int, str]]],
        item: tuple[int, int],
    ) -> None:
        """Check which workers run items when another begins one; a zombie doesn't count."""
        foreign = [other for other, its in others if its != place]
        if foreign:
            raise Violation("I5", f"{executor} of {place} runs beside {foreign} of another round")
        if len(others) + 1 > self.max_concurrent:
            raise Violation(
                "I5",
                f"{executor} runs beside {[it for it, _ in others]}, {self.max_concurrent} may run",
            )
        late = self.clock() - self.spent_at
        retried = any(request.kind == "retry" for request in self.batch.control)
        if late > self.stop_patience + LOOKS_AGAIN_S and not retried:
            raise Violation("I9", f"{executor} starts {item}, {late:.0f} s after the budget")

    def ends(self, executor: str, index: int, number: int) -> None:
        """Check that a worker ends an item's process soon after the item was stopped."""
        for count, when in self._stops:
            late = self.clock() - when
            base, stopped = standing(self.batch, index, count)
            later = self.batch.control[count:]
            retried = any(it.kind == "retry" and index in it.bases for it in later)
            if stopped and number > base and not retried and late > self.stop_patience:
                raise Violation(
                    "I3", f"{executor} runs {index}.{number} until {late:.0f} s after its stop"
                )

    def worker_deleted(self, party: str, running: tuple[int, int] | None) -> None:
        """Check a worker that *party* deletes from the platform."""
        if running is None or self.cleaning >= 0:
            return
        if self.state(running[0]) == ("open", running[1]):
            raise Violation("I8", f"{party} deletes the worker that runs {running}")

    def worker_dismissed(self, executor: str, running: tuple[int, int] | None) -> None:
        """Check a worker that the platform ends because another one has exited with 0."""
        if running is None or self.cleaning >= 0:
            return
        if self.state(running[0]) == ("open", running[1]):
            raise Violation("I4", f"the exit of another worker ends {executor} and {running}")

    # --- received outcomes and inputs ---

    def received(self, party: str, index: int, state: str) -> None:
        """Check an item's outcome that a handle of *party* delivers."""
        now = self.state(index)[0]
        if now in FINAL and state != now and self.cleaning < 0:
            retried = any(
                request.kind == "retry" and index in request.bases for request in self.batch.control
            )
            if not retried:
                raise Violation("I1", f"{party} receives {state} for item {index}, it is {now}")

    def check_inputs(self) -> None:
        """Check that every item ran with the input at its index."""
        for body, metadata in self.batch.inputs.values():
            if "first" not in metadata:
                continue
            content = frames.unpack(body).frames
            for offset in range(int(metadata["count"])):
                index = int(metadata["first"]) + offset
                if index not in self.values:
                    continue
                stored = pickles.load(content[offset])[0][0]
                if stored != self.values[index]:
                    raise Violation(
                        "I7", f"item {index} ran with {self.values[index]!r}, not {stored!r}"
                    )
