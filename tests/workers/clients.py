"""What clients do with a submission: generators of operations, as the protocol's page says."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.workers import Requests
from kinetic._runner.worker.items import Items
from kinetic._runner.worker.pull import Create, Delete, List, Read, Wait

from .actors import Pod
from .world import KEY, SCOPE, Call, World

Steps = Generator[Any, Any, Any]

BEAT_S = 10.0
"""How often a producer replaces its lease, and reads the requests."""


class Client:
    """One client process, with what it has read."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.requests = Requests()
        self.items = Items(world.terms.budgets, self.requests)
        self.removed = False  # collected, or cleaned up

    # --- reading and writing ---

    def read_requests(self) -> Steps:
        while True:
            name = wire.control_key(SCOPE, self.requests.count)
            if (found := (yield Read(name))) is None:
                return
            request = wire.Request.verified(found[0], found[1], KEY, SCOPE, name)
            self.requests.add(request)
            if request.kind in ("stop", "retry"):
                self.items.read_requests(request.items or [*request.bases] or None)

    def read_slots(self) -> Steps:
        while self.items.total is None:
            name = wire.input_key(SCOPE, len(self.items.slots))
            if (found := (yield Read(name))) is None:
                return
            self.items.add_slot(wire.Slot.verified(found[1], KEY, SCOPE, name))

    def read(self) -> Steps:
        yield from self.read_requests()
        yield from self.read_slots()
        for block in self.items.open_blocks():
            listing = yield List(wire.block_prefix(SCOPE, block.start))
            self.items.merge(wire.attempts_of(listing, KEY, SCOPE))
            self.items.conclude(block)
        # A listing counts only if nothing was removed before it.
        self.removed = (yield Read(wire.collected_key(SCOPE))) is not None
        self.removed = (yield Read(f"{SCOPE}manifest")) is None or self.removed

    def open_items(self) -> list[int]:
        return [
            i for block in self.items.open_blocks() for i in block if not self.items.is_final(i)
        ]

    def append(self, build: Callable[[], wire.Request]) -> Steps:
        """Append a request at exactly the next slot; build it again if others come first."""
        while not self.requests.removing:
            request = build()
            name = wire.control_key(SCOPE, self.requests.count)
            content, metadata = request.signed(KEY, SCOPE, name)
            created = yield from self.put(name, content, metadata)
            yield from self.read_requests()
            if created:
                return

    def store_slot(self, number: int, slot: wire.Slot) -> Steps:
        """Store an input slot; return whether it holds what this client wanted to store."""
        name = wire.input_key(SCOPE, number)
        return (yield from self.put(name, b"", slot.signed(KEY, SCOPE, name)))

    def put(self, name: str, body: bytes, metadata: dict[str, str]) -> Steps:
        """Create an object; return whether it is there as this client wants it.

        An earlier try may have had an unknown result. If another client wanted the same, both go on
        in the same way.
        """
        if (yield Create(name, body, metadata)):
            return True
        return (yield Read(name)) == (body, metadata)

    # --- submitting ---

    def submit(self, count: int, workers: int) -> Steps:
        """Store all inputs, and create the workers. No client is needed afterwards."""
        yield Create(f"{SCOPE}manifest", b"", {})
        half = max(1, count // 2)
        yield from self.store_slot(0, wire.Slot(0, half))
        if count > half:
            yield from self.store_slot(1, wire.Slot(half, count - half))
        yield from self.store_slot(1 + (count > half), wire.Slot(total=count))
        yield self.create_workers(0, workers)

    def produce(self, count: int, workers: int, pause_s: float) -> Steps:
        """Store one input after the other, as an iterator gives them."""
        world = self.world
        yield Create(f"{SCOPE}manifest", b"", {})
        yield Create(f"{SCOPE}lease", b"", {})
        beat_at = world.now
        for index in range(count):
            if not (yield from self.store_slot(index, wire.Slot(index, 1))):
                return  # another process has sealed the batch
            self.items.add_slot(wire.Slot(index, 1))
            if index == 0:
                yield self.create_workers(0, workers)
            until = world.now + world.rng.random() * pause_s
            while world.now < until:
                yield Wait(min(BEAT_S, max(0.0, until - world.now)))
                if world.now - beat_at >= BEAT_S:
                    beat_at = world.now
                    text = f"{world.now}".encode()
                    yield Call("", lambda text=text: world.replace(f"{SCOPE}lease", text))
                    yield from self.read_requests()
                    if self.requests.done and not self.requests.removing:
                        yield from self.read()
                        if not (yield Call("", self.live_pods)):
                            yield from self.resume(workers)
        yield from self.store_slot(count, wire.Slot(total=count))
        # A worker that takes the producer for dead creates `done` at the next slot. After this
        # request, that is refused, and it reads on. If it came first, a new round is needed.
        yield from self.append(lambda: wire.Request(kind="sealed"))
        yield Delete(f"{SCOPE}lease")
        yield from self.read()
        if self.requests.done:
            yield from self.resume(workers)

    def live_pods(self) -> list[Pod]:
        """Return the pods of the current round that the platform takes for alive."""
        job = self.world.platform.jobs.get(self.requests.round)
        return [] if job is None else job.pods

    def create_workers(self, round: int, workers: int) -> Call:
        label = f"creates the workers of round {round}"
        return Call(label, lambda: self.world.platform.create(round, workers))

    # --- looking ---

    def observe(self, workers: int, *, once: bool = False) -> Steps:
        """Look again and again: close what is dead, and start what nobody starts.

        With *once*, leave after this client has opened a round.
        """
        pause = 5.0
        while True:
            yield from self.read()
            if self.requests.removing or self.removed:
                return
            yield from self.close_dead()
            if (yield from self.resume(workers)) and once:
                return
            yield Wait(pause)
            pause = min(pause * 1.5, 60.0)

    def close_dead(self) -> Steps:
        """Close the claims whose very process the platform reports gone."""
        claims = [
            (index, attempt, claim)
            for index in self.open_items()
            for attempt in (self.items.state(index).attempt,)
            if (claim := self.items.attempts(index).get(attempt)) is not None and claim.executor
        ]
        if not claims:
            return
        alive = yield Call("", lambda: {pod.executor for pod in self.world.platform.alive})
        for index, attempt, claim in claims:
            if claim.executor in alive:
                continue
            yield from self.read_requests()
            stopped = self.items.state(index).stopped
            kind = wire.Kind.CANCELLED if stopped else wire.Kind.LOST
            outcome = wire.Outcome(kind, kind.value, claim.executor or "")
            name = wire.attempt_key(SCOPE, index, attempt, "outcome")
            yield Create(name, b"", outcome.signed(KEY, SCOPE, index, attempt))

    def resume(self, workers: int) -> Steps:
        """Open a round if work is left, and the workers of the current round are gone.

        Return whether this client has opened one.
        """
        platform, number = self.world.platform, self.requests.round
        if not self.open_items():
            return False
        job = yield Call("", lambda: platform.jobs.get(number))
        if job is None:  # whoever opened the round died before it created the workers
            yield self.create_workers(number, workers)
            return False
        if not (job.ended or self.requests.done or all(rank.finished for rank in job.ranks)):
            return False
        live = "open_while_live" in self.world.behavior.flags
        while not live and (yield Call("", lambda: job.pods)):
            yield Wait(5.0)
        if "resume_before_close" not in self.world.behavior.flags:
            yield from self.read()
            yield from self.close_dead()
        yield from self.read()
        if number == self.requests.round and self.open_items() and not self.removed:
            return (yield from self.open_round(workers))
        return False

    def open_round(self, workers: int) -> Steps:
        number = self.requests.round
        name = wire.control_key(SCOPE, self.requests.count)
        content, metadata = wire.Request(kind="round").signed(KEY, SCOPE, name)
        created = yield from self.put(name, content, metadata)
        yield from self.read_requests()
        if created and self.requests.round != number:
            yield self.create_workers(self.requests.round, workers)
            return True
        return False

    # --- requests ---

    def stop(self, items: tuple[int, ...] | None) -> Steps:
        """Stop some items, or all."""
        yield from self.read_requests()
        if self.requests.removing:
            return
        yield from self.append(lambda: wire.Request(kind="stop", items=items, cause="cancelled"))
        if items is None:
            yield from self.delete_jobs(self.requests.count)
            yield from self.read()
            yield from self.close_dead()

    def delete_jobs(self, up_to: int) -> Steps:
        """Delete the workers of rounds up to a slot: those of a later retry stay."""
        platform, oracle = self.world.platform, self.world.oracle

        def delete() -> None:
            for number, job in [*platform.jobs.items()]:
                late = "stop_deletes_all" in self.world.behavior.flags
                if (number <= up_to or late) and not job.ended:
                    oracle.job_deleted(number, up_to)
                    platform.delete(number)

        yield Call(f"deletes the workers up to round {up_to}", delete)

    def retry_failed(self, workers: int) -> Steps:
        """Retry what has failed or was cancelled; open a round if the last one is over."""
        flags = self.world.behavior.flags
        yield from self.read()
        while not self.requests.removing:
            seen = self.requests
            bases = {
                index: base
                for index in range(self.items.stored)
                if (
                    base := wire.retry_base(
                        seen.standing(index), self.items.attempts(index), self.world.terms.budgets
                    )
                )
                is not None
            }
            if not bases or self.items.total is None or self.removed:
                return
            opens, in_place = bool(seen.done), "retry_in_place" in flags
            opens = opens and not in_place
            request = wire.Request(kind="retry", bases=bases, opens_round=opens)
            name = wire.control_key(SCOPE, seen.count)
            content, metadata = request.signed(KEY, SCOPE, name)
            created = yield from self.put(name, content, metadata)
            yield from self.read()
            if not created:
                continue
            if opens:
                yield self.create_workers(self.requests.round, workers)
            elif not in_place:  # the workers may have gone without `done`, as those of a single job
                yield from self.resume(workers)
            return

    def grow(self, workers: int) -> Steps:
        yield from self.read_requests()
        number = self.requests.round
        yield Call(f"grows to {workers}", lambda: self.world.platform.grow(number, workers))

    def leave(self, ranks: tuple[int, ...]) -> Steps:
        """Ask ranks to leave."""
        yield from self.read_requests()
        if "shrink_by_patch" in self.world.behavior.flags:
            yield Call("shrinks", lambda: self._shrink(ranks))
        else:
            yield from self.append(lambda: wire.Request(kind="leave", ranks=ranks))

    def _shrink(self, ranks: tuple[int, ...]) -> None:
        job = self.world.platform.jobs.get(self.requests.round)
        for rank in job.ranks if job is not None else ():
            if rank.number in ranks:
                rank.finished = True
                for pod in rank.placed:
                    pod.kill()

    # --- removing ---

    def cleanup(self) -> Steps:
        """Stop and remove everything."""
        flags = self.world.behavior.flags
        yield from self.read_requests()
        if self.requests.removing:
            return
        yield from self.append(lambda: wire.Request(kind="stop", cause=wire.CLEANUP))
        yield from self.delete_jobs(self.requests.count)
        while (yield Call("", lambda: self.world.platform.alive)):
            yield Wait(3.0)
            yield from self.delete_jobs(self.requests.count)  # a Job may have arrived late
        if "cleanup_control_first" in flags:
            yield from self.remove("control/")
        for part in ("inputs/", "attempts/", "workers/", "lease", "manifest", "control/"):
            yield from self.remove(part)
        yield from self.remove("")

    def remove(self, part: str) -> Steps:
        for name, _ in (yield List(f"{SCOPE}{part}")):
            yield Delete(name)

    def collect(self) -> Steps:
        """Remove the objects of the items, once each has its value."""
        yield from self.read()
        states = [self.items.state(index).state for index in range(self.items.stored)]
        all_values = all(state is wire.ItemState.SUCCEEDED for state in states)
        if self.items.total is None or not all_values or self.requests.removing:
            return
        yield Create(wire.collected_key(SCOPE), b"", {})
        yield from self.delete_jobs(self.requests.count)
        yield from self.remove("inputs/")
        yield from self.remove("attempts/")
