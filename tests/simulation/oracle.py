"""What must hold of every course of events, checked at each effect.

It sees what really happens: every effect on the store and the platform, and
what each party decides and is told. The rule of an item is written down here a
second time, and compared with the engine's whenever an item changes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kinetic._runner.protocol import frames, pickles, signing, wire
from kinetic._runner.protocol.retry_budgets import RetryBudgets

NAME = re.compile(r"attempts/\d+/(\d+)\.(\d+)\.(claim|outcome)$")
FINAL = ("succeeded", "failed", "cancelled")
ROOT = b"k" * 32
"""The root key; nobody who forges anything has it."""


class Violation(AssertionError):
    """An invariant does not hold; ``which`` is its name in docs/protocol.md."""

    def __init__(self, which: str, why: str) -> None:
        super().__init__(f"{which}: {why}")
        self.which = which


@dataclass
class Batch:
    """The objects of the one batch, as they really are."""

    claims: dict[tuple[int, int], str] = field(default_factory=dict)
    outcomes: dict[tuple[int, int], wire.Outcome] = field(default_factory=dict)
    control: list[wire.Request] = field(default_factory=list)
    inputs: dict[int, tuple[bytes, dict[str, str]]] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    fence: int = 0
    held: bool = False
    holder: str = ""


def judge(batch: Batch, index: int, budgets: RetryBudgets) -> tuple[str, int]:
    """The rule of an item, from docs/protocol.md and not from the engine."""
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
    """The number of retired attempts, and whether the item is stopped."""
    base, stopped = 0, False
    for entry in batch.control[:upto]:
        if entry.kind == "stop" and (entry.items is None or index in entry.items):
            stopped = True
        elif entry.kind == "retry" and index in entry.bases:
            base, stopped = entry.bases[index], False
    return base, stopped


class Oracle:
    """Takes every event; raises at the first that must not be."""

    def __init__(self, budgets: RetryBudgets, max_concurrent: int) -> None:
        self.budgets = budgets
        self.max_concurrent = max_concurrent
        self.batch = Batch()
        self.scope = ""
        self.told: dict[int, tuple[str, int]] = {}
        self.heard: dict[tuple[str, int], tuple[int, str]] = {}
        self.ran: dict[tuple[int, int], str] = {}
        self.values: dict[int, object] = {}
        self.asked: set[tuple[int, int]] = set()
        self.active: set[tuple[int, int]] = set()
        # Attempts whose end, or whose pod's end, the platform has reported.
        self.reported: set[tuple[int, int]] = set()
        self.late = 0
        self.floor: dict[str, int] = {}
        self.fences: dict[str, int] = {}
        self.superseded: dict[str, float] = {}
        self.read: dict[str, dict[int, float]] = {}
        self.cleaning = -1
        self.collected = False
        self.removed: set[tuple[int, int]] = set()
        """The attempts whose objects a collection has deleted."""
        self.inputs_gone = False
        self.gone = False
        self.over = False
        self.forced = False
        self.clock: Callable[[], float] = lambda: 0.0
        self.since = 0.0  # when the fence changed
        self.seen: Counter[str] = Counter()

    def state(self, index: int) -> tuple[str, int]:
        return judge(self.batch, index, self.budgets)

    @property
    def end(self) -> int | None:
        """How many items there are, once the end is stored."""
        for _, metadata in self.batch.inputs.values():
            if "first" not in metadata:
                return int(metadata["total"])
        return None

    @property
    def stored(self) -> int:
        """How many items are stored."""
        chunks = [m for _, m in self.batch.inputs.values() if "first" in m]
        return max((int(m["first"]) + int(m["count"]) for m in chunks), default=0)

    def claimed_too_late(self, index: int) -> bool:
        """Whether an item was claimed once more after it had ended and its end was stored."""
        kinds = [request.kind for request in self.batch.control]
        while kinds and kinds[-1] == "forged":  # written afterwards, and it changes nothing
            kinds.pop()
        ended = max(self.batch.released, default=-1) >= len(kinds) and index in self.told
        return ended and self.state(index)[0] == "cancelling"

    # --- the store ---

    def created(self, actor: str, name: str, body: bytes, metadata: dict[str, str]) -> None:
        """An object came into being."""
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
        """An object got another content."""
        if self.over or self.gone:
            return
        if not name.endswith("/lease"):
            raise Violation("I1", f"{name} was overwritten by {actor}")
        self._lease(actor, body)

    def deleted(self, actor: str, name: str) -> None:
        """An object is gone."""
        if self.over or self.gone:
            return
        if found := NAME.search(name):
            key = int(found[1]), int(found[2])
            if self.collected:
                self.removed.add(key)  # what it said stays true
                return
            if found[3] == "outcome" and self.cleaning < 0:
                raise Violation("I1", f"{name} was deleted by {actor}")
            (self.batch.claims if found[3] == "claim" else self.batch.outcomes).pop(key, None)
        elif "/inputs/" in name:
            self.inputs_gone = True
        elif name.endswith("/lease") and self.cleaning >= 0:
            self.batch.fence = 0  # whoever makes another finds the stop, or no manifest
        elif "/control/" in name:
            self.gone = True

    def _collect(self, actor: str) -> None:
        """Somebody says that all items have their values, and that their objects go."""
        if self.cleaning >= 0:
            return
        items = range(self.stored)
        without = [index for index in items if self.state(index)[0] != "succeeded"]
        if self.end is None or without:
            raise Violation("I10", f"{actor} collects, the end is {self.end}, {without} have none")
        self.collected = True
        self.seen["collected"] += 1

    def _lease(self, actor: str, body: bytes) -> None:
        content = json.loads(body)
        fence, batch = content["fence"], self.batch
        if fence < batch.fence and self.cleaning < 0:  # a cleanup that died has taken it away
            raise Violation("I3", f"{actor} brings fence {fence} back, it is {batch.fence}")
        if fence > batch.fence:
            batch.fence, batch.holder, self.since = fence, actor, self.clock()
            self.fences[actor] = fence
            self.floor[actor] = len(batch.control)
        elif actor != batch.holder:
            raise Violation("I3", f"{actor} writes the lease that {batch.holder} holds")
        batch.held = content["held"]
        if not batch.held:
            batch.released.add(content["control_seen"])

    def _input(self, slot: int, body: bytes, metadata: dict[str, str]) -> None:
        inputs = self.batch.inputs
        if self.inputs_gone:
            return  # a write that was given up arrives after all; what is left ages out
        if slot in inputs:
            raise Violation("I7", f"slot {slot} of the inputs was written twice")
        if any("first" not in m for s, (_, m) in inputs.items() if s <= slot):
            raise Violation("I7", f"slot {slot} of the inputs was written after the end")
        if "first" not in metadata and any(s > slot for s in inputs):
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
            batch.control.append(wire.Request(kind="forged"))  # taken, and it says nothing
            self.seen["control: forged"] += 1
            return
        entry = wire.Request.from_bytes(body)
        batch.control.append(entry)
        self.seen[f"control: {entry.kind} {entry.cause}".strip()] += 1
        if entry.kind == "stop" and entry.cause == "cleanup":
            self.cleaning = slot
        if entry.kind == "retry":
            self.was_read(actor, slot)  # who lets items run again knows that they may
        items = range(self.stored) if entry.items is None else entry.items
        for index in entry.bases if entry.kind == "retry" else items:
            if entry.kind == "retry":
                if self.told.get(index, ("", 0))[0] == "succeeded":
                    raise Violation("I1", f"{actor} lets item {index} run again, it has a value")
                self.told.pop(index, None)
            self._look(index, f"control slot {slot}")

    def _attempt(self, index: int, number: int, what: str, metadata: dict[str, str]) -> None:
        batch, key = self.batch, (index, number)
        if what == "claim":
            batch.claims[key] = metadata["executor"]
            self._look(index, f"the claim of attempt {number}")
            return
        outcome = wire.Outcome.parse(metadata["header"])
        before = batch.outcomes.get(key, outcome)
        if key in self.removed and before.kind == "value" and outcome.kind != "value":
            return  # a slow write arrives after the collection; nobody reads what is left
        if (before.kind, before.executor) != (outcome.kind, outcome.executor):
            raise Violation("I1", f"{index}.{number} has ended as {before}, and then as {outcome}")
        batch.outcomes[key] = outcome
        closed = outcome.executor == wire.VOID and outcome.phase in ("lost", "cancelled")
        late = key in self.asked and key not in self.reported
        if closed and late and self.cleaning < 0:  # what has no input is never asked for
            raise Violation("I4", f"{index}.{number} is closed, and nobody has said that it ended")
        self.active.discard(key)
        self.seen[f"outcome: {outcome.kind}"] += 1
        if sum(k[0] == index and o.kind == "value" for k, o in batch.outcomes.items()) > 1:
            raise Violation("I1", f"item {index} has two values")
        self._look(index, f"the outcome of attempt {number}")

    def _look(self, index: int, why: str) -> None:
        now, told = self.state(index), self.told.get(index)
        ruled = wire.item_state(
            wire.standing(index, self.batch.control), self._attempts(index), self.budgets
        )
        if (ruled.state.value, ruled.attempt) != now:
            raise Violation("rule", f"the engine says {ruled}, it is {now}")
        if now[0] not in FINAL or self.cleaning >= 0:
            return
        if told is not None and told[0] != now[0]:
            raise Violation("I1", f"item {index} was told to have {told}, {why} makes it {now}")
        if told is not None and now[0] != "cancelled" and told != now:
            raise Violation("I1", f"item {index} was told to have {told}, {why} makes it {now}")
        self.told[index] = now

    def _attempts(self, index: int) -> dict[int, wire.Attempt]:
        numbers = {n for i, n in (*self.batch.claims, *self.batch.outcomes) if i == index}
        return {
            n: wire.Attempt(self.batch.claims.get((index, n)), self.batch.outcomes.get((index, n)))
            for n in numbers
        }

    # --- who starts what ---

    def was_read(self, party: str, slot: int) -> None:
        """A slot of control has reached *party*."""
        self.read.setdefault(party, {}).setdefault(slot, self.clock())

    def decided(self, party: str, index: int, number: int) -> None:
        """*party* asks the platform for an attempt."""
        fence, batch = self.fences.get(party, 0), self.batch
        self.asked.add((index, number))
        if self.cleaning >= 0:
            return  # what is left of it was cleaned up under its holder
        now = self.clock()
        excused = self.forced and now - self.since < 30.0  # it cannot know yet
        if fence < batch.fence and not excused:
            raise Violation(
                "I3",
                f"{party} of fence {fence} starts {index}.{number}, {batch.holder} has "
                f"fence {batch.fence}",
            )
        base, stopped = standing(batch, index)
        before = standing(batch, index, self.floor.get(party, 0))[1]
        if fence > 1 and number > base and stopped and before:
            raise Violation(
                "I3", f"{party} starts {index}.{number}, stopped before its fence {fence}"
            )
        read = self.read.get(party, {})
        if not standing(batch, index, max(read, default=-1) + 1)[1]:
            return  # by all that it has read, the item was reopened
        for slot, when in read.items():
            if slot < len(batch.control) and now - when > 0.5:
                known = standing(batch, index, slot + 1)[1] and standing(batch, index)[1]
                if known:
                    raise Violation(
                        "I3",
                        f"{party} starts {index}.{number}, {now - when:.1f} s after it read "
                        f"the stop at slot {slot}",
                    )

    def launched(self, party: str, index: int, number: int) -> None:
        """A job came into being on the platform."""
        if (index, number) in self.batch.outcomes:
            return
        if self.fences.get(party, 0) < self.batch.fence:
            self.late += 1
        self.active.add((index, number))
        live = [
            key
            for key in self.active
            if self.state(key[0]) in (("open", key[1]), ("cancelling", key[1]))
        ]
        if len(live) > self.max_concurrent + self.late:
            raise Violation(
                "I5",
                f"{sorted(live)} are live, max_concurrent is {self.max_concurrent} and "
                f"{self.late} came late",
            )

    def ended(self, index: int, number: int) -> None:
        """The platform says that nothing of a job runs any more."""
        self.reported.add((index, number))
        self.active.discard((index, number))

    def job_deleted(self, party: str, index: int, number: int) -> None:
        """The platform is told that nobody wants a job any more."""
        if self.cleaning < 0 and self.state(index) == ("open", number):
            raise Violation("I8", f"{index}.{number} may run, and {party} has its job deleted")

    def may_run(self, index: int, number: int) -> str:
        """Why an attempt must not run, by all that there is now; a runner decides on it."""
        base, _ = standing(self.batch, index)
        if any(i == index and one.kind == "value" for (i, _), one in self.batch.outcomes.items()):
            return "there is a value"
        missing = [n for n in range(base + 1, number) if (index, n) not in self.batch.outcomes]
        return f"{missing} are open" if missing else ""

    def started(
        self, executor: str, index: int, number: int, value: object, seen: tuple[int, str]
    ) -> None:
        """User code starts; *seen* is how much of control the runner saw, and what was then."""
        upto, why = seen
        if (index, number) in self.ran:
            raise Violation(
                "I2",
                f"{executor} starts {index}.{number}, {self.ran[index, number]} has done so before",
            )
        if self.inputs_gone or self.gone or 0 <= self.cleaning < upto:
            which = "I10" if self.collected else "I6"
            raise Violation(which, f"{executor} starts {index}.{number} of a cleaned batch")
        if standing(self.batch, index, upto)[1]:
            raise Violation("I3", f"{executor} starts {index}.{number}, it has seen the stop")
        if why:
            raise Violation("I2", f"{executor} starts {index}.{number}, {why}")
        self.ran[index, number] = executor
        self.values[index] = value

    def refused(self, executor: str, index: int, number: int, zombie: bool) -> None:
        """A pod could not commit: somebody else has closed its attempt."""
        if self.over or self.cleaning >= 0:
            return
        if self.batch.claims.get((index, number)) == executor and not zombie:
            raise Violation(
                "I4", f"{executor} has done {index}.{number}, and its outcome is refused"
            )

    # --- who hears what ---

    def hears(self, party: str, index: int, said: str) -> None:
        """A handle of *party* delivers an item's outcome."""
        self.heard[party, index] = (len(self.batch.control), said)
        now = self.state(index)[0]
        if now in FINAL and said != now and self.cleaning < 0:
            retried = any(e.kind == "retry" and index in e.bases for e in self.batch.control)
            if not retried:
                raise Violation("I1", f"{party} hears {said} of item {index}, it is {now}")

    def check_budget(self, hours: float, most: int) -> None:
        """A holder starts nothing more once it has read as many hours of attempts."""
        told = [one for one in self.ran if (found := self.batch.outcomes.get(one)) and found.ended]
        allowed = hours + most * max(1, self.batch.fence)
        if len(told) > allowed:
            raise Violation("I9", f"{len(told)} attempts of an hour, and {allowed:g} are the most")

    def check_inputs(self) -> None:
        """Every item ran with the input that its index holds."""
        for body, metadata in self.batch.inputs.values():
            if "first" not in metadata:
                continue
            content = frames.unpack(body).frames
            for place in range(int(metadata["count"])):
                index = int(metadata["first"]) + place
                if index not in self.values:
                    continue
                held = pickles.load(content[place])[0][0]
                if held != self.values[index]:
                    raise Violation(
                        "I7", f"item {index} ran with {self.values[index]!r}, it holds {held!r}"
                    )
