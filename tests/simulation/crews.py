"""The workers of the platform: rounds of pods, each with the decisions of the real worker.

The platform keeps the ranks of a round running by the supervisor's own `Rounds`. `Crews` is also
the world of the pods: it lets their operations take effect in the one store of the simulation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinetic._labels import ATTEMPT, INDEX, SUBMISSION
from kinetic._runner.protocol import frames, outcomes, pickles, wire
from kinetic._runner.protocol.workers import (
    EXIT_DONE,
    EXIT_SURPLUS,
    Requests,
    WorkerId,
)
from kinetic._runner.worker import pull
from kinetic._supervisor.protocol import JobHeader
from kinetic._supervisor.rounds import Rounds, Start
from kinetic.aio.ports import JobSpec, Observation, Phase
from kinetic.errors import LaunchError, NotFound
from kinetic.job_status import Reason
from tests.workers.actors import Disturber, Odds, Pod, Process

from .oracle import Oracle

if TYPE_CHECKING:
    from .world import Watch, World

HOUR_S = 3600.0
"""How long each attempt takes by its outcome, which a budget counts."""


def replay(entries: Iterable[wire.Request]) -> Requests:
    """Return the effect of requests on workers."""
    requests = Requests()
    for request in entries:
        requests.add(request)
    return requests


class ItemPod(Pod):
    """A worker whose items have the values of this simulation."""

    world: Crews

    def outcome_of(self, start: pull.Start, *, stopped: bool) -> pull.Ended:
        """Return how the child has ended; the seed decides."""
        world = self.world
        world.note(self.executor, f"ends {start.item}.{start.attempt}")
        if self.counted:
            world.truth.ends(self.executor, start.item, start.attempt)
        times: dict[str, Any] = {"phase": "execute", "started": 1.0, "ended": 1.0 + HOUR_S}
        kind, reason = wire.Kind.VALUE, ""
        if stopped or world.rng.random() < world.odds.errors:
            kind, reason = wire.Kind.ERROR, "preempted" if stopped else "user error"
            text = outcomes.ErrorText(qualname="ValueError", message="no", traceback="")
            body = outcomes.encode_error(text, None)
        else:
            value = {"input": world.values[start.item], "by": self.executor}
            body = outcomes.encode_value(value, Path("unused"))
        assert isinstance(body.content, bytes)
        digest = outcomes.digest(body.content)
        return pull.Ended(wire.Outcome(kind, reason, body=digest, **times), body.content)


@dataclass
class Entry:
    """A job that the platform shows: a worker, or the item that it runs."""

    seen: Observation
    start: Start | None = None
    pod: ItemPod | None = None
    began: float = 0.0
    deleted: bool = False
    surplus: bool = False


class Crews(Disturber):
    """The rounds of workers, and the world of their pods."""

    def __init__(self, world: World, odds: Odds, oracle: Oracle) -> None:
        super().__init__(self)
        self.world = world
        oracle.is_alive = lambda executor: any(it.executor == executor for it in self.living)
        oracle.served_since = lambda: min((it.rank.began for it in self.living), default=self.now)
        self.odds = odds
        self.rng = world.rng
        self.faults = world.faults
        self.behavior = self
        self.platform = self
        self.values: dict[int, Any] = {}
        self.entries: dict[str, Entry] = {}
        self.pods: list[ItemPod] = []
        self.watches: dict[Watch, None] = {}
        self.refusing: LaunchError | None = None
        self.clustered = False
        self._numbers = itertools.count()
        self._supervisors = 0
        self._rounds = self._new_rounds()
        self._dropped = set[str]()
        self._jobs: dict[str, JobSpec] = {}

    def _new_rounds(self) -> Rounds:
        self._supervisors += 1
        return Rounds(f"s{self._supervisors}")

    # --- what pods need of their world ---

    pull = staticmethod(pull.Pull)

    @property
    def oracle(self) -> Crews:
        return self

    @property
    def truth(self) -> Oracle:
        """The oracle of the simulation."""
        return self.world.oracle

    @property
    def now(self) -> float:
        return self.world.loop.now

    @property
    def calm(self) -> bool:
        return self.world.calm

    @property
    def over(self) -> bool:
        return self.world.over

    def at(self, time: float, effect: Callable[[], None]) -> None:
        self.world.after(max(0.0, time - self.now), effect)

    def after(self, seconds: float, effect: Callable[[], None]) -> None:
        self.world.after(seconds, effect)

    def chance(self, fault: str) -> bool:
        return not self.calm and self.rng.random() < getattr(self.odds, fault)

    def note(self, actor: str, text: str) -> None:
        self.world.note(actor, text)

    def delay(self) -> float:
        """Return how long a request or its answer is under way."""
        if self.chance("slow"):
            self.faults["slow"] += 1
            return self.rng.random() * self.odds.slow_s
        return self.rng.expovariate(20.0)

    def slowness(self, process: Process, operation: Any) -> float:
        return 0.0

    def opening_failure(self, pod: ItemPod) -> pull.OpeningFailure | None:
        """Return why the worker can't open the submission; None if it can."""
        if not self.chance("unopened"):
            return None
        self.faults["unopened"] += 1
        text = outcomes.ErrorText(qualname="ImportError", message="no x", traceback="")
        body = outcomes.encode_error(text, None).content
        assert isinstance(body, bytes)
        outcome = wire.Outcome(wire.Kind.ERROR, "error", phase="setup", body=outcomes.digest(body))
        return pull.OpeningFailure(outcome, body, "no module named x", self.rng.random() < 0.3)

    def apply(self, pod: ItemPod, operation: Any) -> Any:
        """Let an operation of a worker take effect in the store."""
        pod.late = self.truth.inputs_gone
        world = self.world
        match operation:
            case pull.Create(name, body, metadata):
                created = world.create(pod.executor, name, body, metadata)
                if name.endswith(".outcome"):
                    self._committed(pod, name, created=created)
                return created
            case pull.Read(name):
                try:
                    found = world.get(name)
                except NotFound:
                    return None
                return found.body, found.metadata
            case pull.List(prefix):
                return [(info.name, info.metadata) for info in world.list(prefix)]
            case pull.Delete(name):
                world.delete(pod.executor, [name])
                return None
            case pull.Fetch(item, slot):
                return self._fetch(item, slot)
            case _:
                raise TypeError(operation)

    def _fetch(self, item: int, slot: int) -> bool:
        """Read the input of an item; return whether it exists."""
        name = wire.input_key(self.world.oracle.scope, slot)
        try:
            found = self.world.get(name)
        except NotFound:
            return False
        first = int(found.metadata["first"])
        args, _ = pickles.load(frames.unpack(found.body).frames[item - first])
        self.values[item] = args[0]
        return True

    def _committed(self, pod: ItemPod, name: str, *, created: bool) -> None:
        """Note an outcome that a worker has stored: its own item's, or a dead worker's."""
        index, number = (int(part) for part in name.rsplit("/", 1)[1].split(".")[:2])
        if not created:
            zombie = not (pod.counted and pod.alive)
            self.truth.refused(pod.executor, index, number, zombie=zombie)
        entry = self.entries.get(self._item_name(pod, index, number))
        if entry is not None and entry.pod is pod:
            del self.entries[entry.seen.name]
            if self.clustered:  # a line in the log of the pod says so
                self._emit(replace(entry.seen, leaving=True))
                return
            submission, ended = entry.seen.labels[SUBMISSION], ((index, number),)
            self._emit(replace(pod.rank.seen, name=submission, executor=pod.executor, ended=ended))

    def started(self, pod: ItemPod, index: int, number: int) -> None:
        """User code starts in the child of a worker."""
        others = [it for it in self.living if it.running is not None and it is not pod]
        truth, value = self.truth, self.values[index]
        self.note(pod.executor, f"runs {index}.{number} with {value!r}")
        objection = truth.objection(index, number) if pod.counted else ""
        seen = pod.pull.requests.count, objection
        truth.started(pod.executor, index, number, value, seen, is_late=pod.late)
        if pod.counted:
            # A worker that was asked to leave ends its item beside those that replace it.
            leaving = replay(truth.batch.control).leaving
            places = [
                (it.executor, it.job)
                for it in others
                if not {it.worker.rank, pod.worker.rank} & leaving
            ]
            truth.runs(pod.executor, pod.job, places, (index, number))
        name = self._item_name(pod, index, number)
        labels = {**pod.rank.seen.labels, INDEX: str(index), ATTEMPT: str(number)}
        shown = replace(pod.rank.seen, name=name, labels=labels, executor=pod.executor)
        if pod.counted:
            self.entries[name] = Entry(shown, pod=pod)
            self._emit(shown)

    def _item_name(self, pod: ItemPod, index: int, number: int) -> str:
        return f"{pod.rank.seen.labels[SUBMISSION]}-{index}-{number}"

    def _forget_item(self, entry: Entry, **facts: Any) -> None:
        del self.entries[entry.seen.name]
        if not self.clustered:
            self._emit(replace(entry.seen, phase=Phase.GONE, **facts))

    # --- what the platform shows ---

    @property
    def living(self) -> list[ItemPod]:
        """The pods that the platform takes for alive."""
        return [pod for pod in self.pods if pod.counted and pod.alive]

    @property
    def is_busy(self) -> bool:
        """Whether a worker waits, runs, or will be replaced."""
        return any(it.seen.phase in (Phase.PENDING, Phase.RUNNING) for it in self.entries.values())

    def ranks(self, number: int) -> set[int]:
        """Return the ranks of a round that haven't left; none if the round is over."""
        found = set[int]()
        for entry in self.entries.values():
            worker = WorkerId.parse(entry.start.header.worker) if entry.start is not None else None
            if worker is not None and worker.round == number and not entry.deleted:
                if entry.seen.exit_code in (EXIT_DONE, EXIT_SURPLUS):
                    return set()
                found.add(worker.rank)
        return found

    def matching(
        self, names: Collection[str], labels: Mapping[str, str] | None
    ) -> list[Observation]:
        """Return what the platform shows of these jobs."""
        return [
            entry.seen
            for entry in self.entries.values()
            if (
                entry.seen.name in names
                or (labels is not None and labels.items() <= entry.seen.labels.items())
            )
            and not (self.clustered and INDEX in entry.seen.labels)
        ]

    def subscribe(self, watch: Watch) -> list[Observation]:
        """Begin a watch; return what there is."""
        self.watches[watch] = None
        while not watch.queue.empty():
            watch.queue.get_nowait()
        return self.matching((), watch.labels)

    def _emit(self, seen: Observation) -> None:
        """Send what the platform shows of a job to those who watch it."""
        for watch in tuple(self.watches):
            if not watch.labels.items() <= seen.labels.items():
                continue
            delay = 0.0
            if self.world.hits("shaky_watch"):
                delay = self.rng.random() * 10
                if self.rng.random() < 0.3:
                    self.after(delay + 1, functools.partial(watch.queue.put_nowait, seen))  # twice
                if self.rng.random() < 0.2:  # the connection breaks
                    self.after(delay, functools.partial(watch.queue.put_nowait, None))
                    continue
            self.after(delay, functools.partial(watch.queue.put_nowait, seen))

    def _show(self, entry: Entry, **facts: Any) -> None:
        entry.seen = replace(entry.seen, **facts)
        self._emit(entry.seen)

    # --- requests of clients ---

    def scale(self, party: str, job: JobSpec, number: int, workers: int) -> int:
        """Start the workers of a round, or more of them."""
        self._maybe_refuse()
        self.note(party, f"has {workers} workers in round {number}")
        self._jobs.setdefault(job.name, job)
        if self.clustered and job.name not in self._rounds._rounds:
            self._supervisors += 1  # each Job has its own uid
            self._rounds._job = f"u{self._supervisors}"
        header = JobHeader(name=job.name, labels=job.labels, command=(), runner="", edition="")
        return self._launch_all(job.name, self._rounds.scale(header, b"", number, workers))

    def grow(self, party: str, name: str, workers: int) -> int:
        """Start more workers of a round."""
        self._maybe_refuse()
        self.note(party, f"grows {name} to {workers} workers")
        return self._launch_all(name, self._rounds.grow(name, workers))

    def _launch_all(self, name: str, starts: Any) -> int:
        for start in starts:
            self._launch(start)
        return self._rounds.count(name)

    def _maybe_refuse(self) -> None:
        """Refuse workers for some time, for a cause that passes, or for good."""
        if self.refusing is not None:
            # One that may pass ends items only if no worker has ever claimed one.
            self.truth.refusals += not (self.refusing.passing and self.truth.ran)
            raise self.refusing

    def refuse(self, seconds: float, *, passing: bool) -> None:
        """Refuse workers from now on, for some time."""
        self.note("platform", "refuses workers")
        self.refusing = LaunchError("the quota is used up", passing=passing)
        self.after(seconds, lambda: setattr(self, "refusing", None))

    def tell(self, labels: Mapping[str, str]) -> None:
        """Tell workers that the store has changed."""
        for pod in () if self.clustered else self.living:
            if labels.items() <= pod.rank.seen.labels.items():
                pod.tell()

    def delete(self, party: str, names: Collection[str], labels: Mapping[str, str] | None) -> None:
        """Delete rounds and workers; a worker ends a stopped item itself."""
        for name in self._rounds.delete(names, labels):
            self._dropped.add(name)
        for entry in [*self.entries.values()]:
            seen = entry.seen
            if not (
                seen.name in names or (labels is not None and labels.items() <= seen.labels.items())
            ):
                continue
            if INDEX in seen.labels:
                if entry.pod is not None and not self.clustered:
                    entry.pod.tell()
            elif seen.phase is Phase.RUNNING and entry.pod is not None:
                entry.deleted = True
                if party:
                    self.truth.worker_deleted(party, entry.pod.running)
                entry.pod.terminate()
            else:
                self._remove(entry)

    def delete_by_hand(self) -> None:
        """Delete all rounds, as a user may do."""
        self.note("platform", "a user deletes all Jobs")
        self.delete("", (), {})

    def _remove(self, entry: Entry) -> None:
        self._dropped.add(entry.seen.name)
        del self.entries[entry.seen.name]
        self._emit(replace(entry.seen, phase=Phase.GONE))

    # --- keeping ranks running ---

    def _launch(self, start: Start) -> None:
        """Queue a worker, and start its pod."""
        name = start.header.name
        seen = Observation(name=name, phase=Phase.PENDING, labels=start.header.labels)
        entry = self.entries[name] = Entry(seen, start)
        self._emit(seen)
        late = self.lateness()
        self.after(self.rng.random() * 2 + late, lambda: self._place(entry))
        if self.chance("twin"):
            self.faults["twin"] += 1
            self.after(self.rng.random() * 6 + late, lambda: self._begin_twin(entry))

    def _place(self, entry: Entry) -> None:
        """Start the pod of a worker that waits, as soon as there is room."""
        if self.entries.get(entry.seen.name) is not entry or entry.seen.phase is not Phase.PENDING:
            return
        if self.over:
            return
        if not self.calm and len(self.living) >= self.odds.capacity:
            self.after(5.0, lambda: self._place(entry))
            return
        entry.pod = pod = self._make_pod(entry)
        entry.began = self.now
        self._show(entry, phase=Phase.RUNNING, executor=pod.executor)
        self.begin(pod)
        self.disturb(pod, 0.0)

    def _make_pod(self, entry: Entry) -> ItemPod:
        assert entry.start is not None
        header = entry.start.header
        worker = WorkerId.parse(header.worker)
        assert worker is not None
        job = self._jobs[header.name.rsplit(".", 3)[0]]
        assert job.crew is not None
        pod = ItemPod(
            self,
            worker,
            f"w{next(self._numbers)}",
            job.crew.terms,
            key=job.key,
            scope=job.order.scope,
            job=worker.place[:2],
            rank=entry,
        )
        self.pods.append(pod)
        return pod

    def _begin_twin(self, entry: Entry) -> None:
        """Start a second pod of the same worker, and end it later."""
        if entry.pod is None or not (entry.pod.counted and entry.pod.alive):
            return
        pod = self._make_pod(entry)
        pod.counted = False
        self.note(pod.executor, f"is a twin of {entry.pod.executor}")
        self.begin(pod)
        self.after(self.rng.random() * 60, pod.kill)

    def ended(self, pod: ItemPod, code: int) -> None:
        """Note the end of a pod's process."""
        self.note(pod.executor, f"has ended with {code}")
        if pod.counted:
            self._report(pod, code)

    def _report(self, pod: ItemPod, code: int) -> None:
        """Take a pod for ended, and replace it."""
        pod.counted = False
        entry: Entry = pod.rank
        reason = Reason.LOST if code == 137 else None
        for other in [*self.entries.values()]:
            if other.pod is pod and other is not entry:
                self._forget_item(other, exit_code=code, reason=reason)
        if self.entries.get(entry.seen.name) is not entry:
            return
        if entry.deleted:
            self._remove(entry)
            if self.clustered:  # its Job is gone
                return
        else:
            self._show(entry, phase=Phase.ENDED, exit_code=code, reason=reason)
        follows = self._rounds.ended(entry.seen.name, code, self.now - entry.began)
        if isinstance(follows, Start):
            self._replace(follows)
        elif follows:
            self._dismiss(follows)

    def _replace(self, start: Start) -> None:
        """Start the next worker of a rank after its pause."""
        name, rounds = start.header.name, self._rounds

        def launch() -> None:
            if name not in self._dropped and self._rounds is rounds:
                self._launch(start)

        self.after(start.pause_s, launch)

    def _dismiss(self, names: Collection[str]) -> None:
        """End the other workers of a round that is over."""
        for name in names:
            self._dropped.add(name)
            entry = self.entries.get(name)
            if entry is None:
                continue
            if entry.seen.phase is Phase.PENDING:
                self._show(entry, phase=Phase.ENDED)
            elif entry.pod is not None and entry.pod.counted:
                self.truth.worker_dismissed(entry.pod.executor, entry.pod.running)
                entry.pod.terminate()

    # --- faults ---

    def report_gone(self, pod: Pod) -> None:
        """Take a pod for ended although it runs on."""
        assert isinstance(pod, ItemPod)
        if pod.counted:
            self._report(pod, 137)

    def evict(self, pod: Pod) -> None:
        """Ask a pod to end; the platform replaces it."""
        if pod.counted and pod.alive:
            self.faults["evicted"] += 1
            self.note(pod.executor, "is evicted")
            pod.terminate()

    def die(self) -> None:
        """Let the supervisor die, with all workers; the next one knows only that they ended."""
        self.note("platform", "the supervisor dies, with its workers")
        self._rounds = self._new_rounds()
        for watch in self.watches:
            watch.queue.put_nowait(None)
        for pod in self.living:
            pod.counted = False
            Process.kill(pod)
            pod.running = None
        for entry in [*self.entries.values()]:
            if INDEX in entry.seen.labels:
                self._forget_item(entry, reason=Reason.LOST)
            elif entry.seen.phase is not Phase.ENDED:
                self._show(entry, phase=Phase.ENDED, reason=Reason.LOST)
