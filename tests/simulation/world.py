"""The store of a simulation, and the unreliable connections of its parties.

There is one store, strongly consistent. A party reaches it, and the workers' platform, through its
own `Gate`. There, requests may arrive late, take effect after the party gave up, lose their
replies, or fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinetic._runner.protocol import wire
from kinetic.aio.ports import (
    Image,
    ImageRequest,
    ItemOutput,
    JobSpec,
    Object,
    ObjectInfo,
    Observation,
    Phase,
)
from kinetic.errors import NotFound, Unavailable
from kinetic.testing import MemoryStore
from tests.workers.actors import Odds as CrewOdds

from .crews import Crews
from .oracle import ROOT, Oracle, Violation
from .virtual import VirtualLoop, _context


@dataclass
class Odds:
    """The probability of each fault."""

    slow: float = 0.0  # a request takes seconds
    late: float = 0.0  # a request takes longer than a lease
    late_answer: float = 0.0  # a platform's answer arrives late and is outdated
    down: float = 0.0  # a request fails without effect
    lost: float = 0.0  # a reply is lost, and the adapter sends the request again
    gave_up: float = 0.0  # the adapter gives up, but the request takes effect later
    shaky_watch: float = 0.0  # events come twice, late, in another order, or again


class World:
    """The true state of the store, and the trace of what happened."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        odds: Odds,
        oracle: Oracle,
        crew: CrewOdds,
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.odds = odds
        self.oracle = oracle
        self.calm = False
        self.over = False
        self.store = MemoryStore()
        self.root = _context("world")
        self.trace: list[tuple[float, str, str]] = []
        self.faults: Counter[str] = Counter()
        self.violation: BaseException | None = None
        self.secrets: dict[str, bytes] = {}
        self.nonces: dict[str, str] = {}
        self.crews = Crews(self, crew, oracle)
        oracle.clock = lambda: loop.now

    def note(self, actor: str, event: str) -> None:
        self.trace.append((self.loop.now, actor, event))

    def hits(self, fault: str) -> bool:
        """Draw whether *fault* happens now, and count it."""
        odds: float = getattr(self.odds, fault)
        if self.calm or not odds or self.rng.random() >= odds:
            return False
        self.faults[fault] += 1
        return True

    def after(self, delay: float, call: Callable[..., Any], *args: Any) -> None:
        """Call a function after *delay* seconds; an exception in it ends the run."""
        self.loop.call_at(self.loop.now + delay, self._call, call, args, context=self.root)

    def _call(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            call(*args)
        except Exception as exc:
            self.fail(exc)

    def fail(self, exc: BaseException) -> None:
        """End the run with the first violation, or with an error of the simulation itself."""
        if self.violation is None and not self.over:
            self.violation = exc
            self.note("oracle", f"{type(exc).__name__}: {exc}")

    # --- effects ---

    def create(
        self, actor: str, name: str, body: bytes, metadata: Mapping[str, str] | None
    ) -> bool:
        if not result_of(self.store.create(name, body, metadata)):
            self.note(actor, f"create {short(name)}: exists")
            return False
        self.note(actor, f"create {short(name)}{described(name, body, metadata)}")
        self.oracle.created(actor, name, body, dict(metadata or {}))
        return True

    def get(self, name: str) -> Object:
        found: Object = result_of(self.store.get(name))
        return found

    def list(self, prefix: str) -> list[ObjectInfo]:
        found: list[ObjectInfo] = result_of(self.store.list(prefix))
        return found

    def replace(self, actor: str, name: str, body: bytes, generation: int) -> int:
        replaced: int = result_of(self.store.replace(name, body, generation=generation))
        self.note(actor, f"replace {short(name)}{described(name, body, None)}")
        self.oracle.replaced(actor, name, body)
        return replaced

    def delete(self, actor: str, names: Collection[str]) -> None:
        existing = {info.name for info in self.list("")}
        for name in names:
            if name in existing:
                self.note(actor, f"delete {short(name)}")
                result_of(self.store.delete([name]))
                self.oracle.deleted(actor, name)


def result_of(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, and return its result."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine waits")


def short(name: str) -> str:
    return name.split("/", 2)[-1] if name.startswith("batches/") else name


def described(name: str, body: bytes, metadata: Mapping[str, str] | None) -> str:
    if name.endswith("claim"):
        return f" by {(metadata or {})['executor']}"
    if name.endswith("outcome"):
        outcome = wire.Outcome.parse((metadata or {})["header"])
        return f" = {outcome.kind} ({outcome.reason or outcome.phase}) of {outcome.executor}"
    if "/control/" in name or name.endswith("/lease"):
        return f" {body.decode()}"
    return f" {dict(metadata)}" if "/inputs/" in name and metadata else ""


# --- the connections of a party ---------------------------------------------------------


class Gate:
    """The connection of one party to the store and the platform."""

    def __init__(self, world: World, party: str) -> None:
        self.world = world
        self.party = party
        self.cut = False
        self._nonce = 0

    async def send(self, request: str, effect: Callable[[], Any], *, again: bool = True) -> Any:
        """Make a request; with *again*, repeat it if the reply is lost."""
        world, loop, rng = self.world, self.world.loop, self.world.rng
        if world.over:
            raise Unavailable("the simulation is over")
        future: asyncio.Future[Any] = loop.create_future()
        delay = rng.random() * 0.02
        if world.hits("slow"):
            delay += rng.random() * 5
        elif world.hits("late"):
            delay += rng.random() * 90
        if self.cut or world.hits("down"):
            if self.cut and rng.random() < 0.3:
                world.after(delay, self._arrive, request, effect, None)
            world.note(self.party, f"{request}: no answer")
            world.after(delay + (5.0 if self.cut else 0.0), _fail, future, request)
        elif world.hits("gave_up"):
            world.after(delay + rng.random() * 30, self._arrive, request, effect, None)
            world.note(self.party, f"{request}: given up")
            world.after(delay + 1.0, _fail, future, request)
        elif again and world.hits("lost"):
            world.note(self.party, f"{request}: reply lost, sent again")
            world.after(delay, self._arrive, request, effect, None)
            world.after(delay + 1.0 + rng.random() * 3, self._arrive, request, effect, future)
        else:
            world.after(delay, self._arrive, request, effect, future)
        return await future

    def _arrive(
        self, request: str, effect: Callable[[], Any], future: asyncio.Future[Any] | None
    ) -> None:
        outcome: Any = None
        error: Exception | None = None
        try:
            outcome = effect()
        except Violation:
            raise
        except Exception as exc:
            error = exc
        if future is not None:
            delay = self.world.rng.random() * 0.02
            if request.startswith("find") and self.world.hits("late_answer"):
                delay += self.world.rng.random() * 4
            self.world.after(delay, _reply, future, outcome, error)

    def nonce(self) -> str:
        self._nonce += 1
        return f"{self.party}-{self._nonce}"


def _fail(future: asyncio.Future[Any], request: str) -> None:
    if not future.done():
        future.set_exception(Unavailable(f"{request}: 503"))


def _reply(future: asyncio.Future[Any], outcome: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(outcome)


class PartyStore:
    """`kinetic.aio.ports.Store`, as one party reaches it."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.world = gate.world
        self.party = gate.party

    @property
    def url(self) -> str:
        return "memory:"

    async def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        shared: bool = False,
        check: Callable[[], object] | None = None,
    ) -> bool:
        content = body if isinstance(body, bytes) else body.read_bytes()
        if check is not None:
            check()
        nonces, nonce = self.world.nonces, self.gate.nonce()

        def effect() -> bool:
            if self.world.create(self.party, name, content, metadata):
                nonces[name] = nonce
                return True
            return nonces.get(name) == nonce  # the repeated request finds its own object

        return bool(await self.gate.send(f"create {short(name)}", effect))

    async def begin(self, name: str, body: bytes) -> int | None:
        return 1 if await self.create(name, body) else None

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        def effect() -> int:
            return self.world.replace(self.party, name, body, generation)

        return int(await self.gate.send(f"replace {short(name)}", effect, again=False))

    async def get(self, name: str, **where: Any) -> Object:
        found: Object = await self.gate.send(f"get {short(name)}", lambda: self.world.get(name))
        return found

    async def get_many(self, names: Collection[str]) -> dict[str, Object]:
        found: dict[str, Object] = {}
        for name in names:
            with contextlib.suppress(NotFound):
                found[name] = await self.get(name)
        return found

    async def fetch(self, name: str, path: Path) -> None:
        found = await self.get(name)
        path.write_bytes(found.body)

    async def list(self, prefix: str) -> list[ObjectInfo]:
        return await self.gate.send(f"list {short(prefix)}", lambda: self.world.list(prefix))

    async def look(self, name: str) -> ObjectInfo | None:
        if name.startswith(("code/", "functions/")):  # not part of the protocol
            return ObjectInfo(name=name, size=0, metadata={}, generation=1, used=time.time())
        return next((info for info in await self.list(name) if info.name == name), None)

    async def renew(self, names: Collection[str]) -> set[str]:
        return set()

    async def delete(self, names: Collection[str]) -> None:
        # A collection deletes one by one, because others may see it half done, or it may crash.
        chunks = [[name] for name in names] if self.world.oracle.collected else [[*names]]
        for chunk in chunks:
            effect = functools.partial(self.world.delete, self.party, chunk)
            await self.gate.send(f"delete {len(chunk)} objects", effect)

    async def aclose(self) -> None: ...


class PartyImages:
    """`kinetic.aio.ports.Images` whose images always exist."""

    async def resolve(self, request: ImageRequest) -> Image:
        return Image(uri="", command=())

    async def aclose(self) -> None: ...


class PartyCluster:
    """`kinetic.aio.ports.Cluster`, as one party reaches it."""

    replaces = True

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.world = gate.world
        self.party = gate.party
        self.shows_items = not gate.world.crews.clustered

    async def delete(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        keep_logs: bool = False,
    ) -> None:
        fixed_names, crews = tuple(names), self.world.crews
        await self.gate.send("delete jobs", lambda: crews.delete(self.party, fixed_names, labels))

    async def find(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        explained: bool = False,
    ) -> list[Observation]:
        fixed_names, crews = tuple(names), self.world.crews
        found: list[Observation] = await self.gate.send(
            "find jobs", lambda: crews.matching(fixed_names, labels)
        )
        return found

    async def watch(self, labels: Mapping[str, str]) -> AsyncIterator[Observation]:
        crews = self.world.crews
        watch = Watch(dict(labels))
        known: set[str] = set()
        while True:
            listed: list[Observation] = await self.gate.send(
                "watch", lambda: crews.subscribe(watch)
            )
            try:
                for gone in sorted(known - {seen.name for seen in listed}):
                    yield Observation(name=gone, phase=Phase.GONE, labels=watch.labels_of[gone])
                known = set()
                for seen in listed:
                    known.add(seen.name)
                    watch.labels_of[seen.name] = seen.labels
                    yield seen
                while not self.gate.cut:
                    change = await watch.queue.get()
                    if change is None:
                        break  # the connection broke: list and watch again
                    known -= {f"{change.name}-{index}-{number}" for index, number in change.ended}
                    if not change.ended:
                        known.add(change.name)
                        watch.labels_of[change.name] = change.labels
                        if change.phase is Phase.GONE:
                            known.discard(change.name)
                    yield change
            finally:
                crews.watches.pop(watch, None)

    def logs(
        self, name: str, *, follow: bool = False, tail: int | None = None
    ) -> AsyncIterator[str]:
        return self._logs(name)

    async def _logs(self, name: str) -> AsyncIterator[str]:
        for line in ():
            yield line

    async def scale(self, job: JobSpec, *, number: int, ranks: range) -> int:
        crews = self.world.crews
        return await self.gate.send(
            f"scale round {number}",
            lambda: crews.scale(self.party, job, number, ranks.stop),
        )

    async def grow(self, name: str, workers: int) -> int:
        crews = self.world.crews
        return await self.gate.send(f"grow {name}", lambda: crews.grow(self.party, name, workers))

    async def extend(self, name: str, seconds: float) -> None:
        """Do nothing: only the workers themselves limit their time."""

    async def tell(self, labels: Mapping[str, str]) -> None:
        await self.gate.send("tell", lambda: self.world.crews.tell(labels))

    def item_log(self, place: ItemOutput, **_: Any) -> AsyncIterator[str]:
        return self._logs(place.worker)

    async def root_key(self) -> bytes:
        return ROOT

    async def keep_secret(self, name: str, content: bytes) -> None:
        await self.gate.send("keep secret", lambda: self.world.secrets.__setitem__(name, content))

    async def secret(self, name: str) -> bytes:
        def effect() -> bytes:
            if name not in self.world.secrets:
                raise NotFound(f"there is no secret {name}")
            return self.world.secrets[name]

        return await self.gate.send("secret", effect)

    async def drop_secret(self, names: Collection[str]) -> None:
        fixed_names = [*names]
        await self.gate.send(
            "drop secret", lambda: [self.world.secrets.pop(name, None) for name in fixed_names]
        )

    async def finish(self, name: str, fence: int) -> None:
        await self.gate.send("finish", lambda: None)

    async def aclose(self) -> None: ...


class Watch:
    """The notifications that one party gets; they may come in another order or repeatedly."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = labels
        self.labels_of: dict[str, Mapping[str, str]] = {}
        self.queue: asyncio.Queue[Observation | None] = asyncio.Queue()
