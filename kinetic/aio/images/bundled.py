"""Images with the project's dependencies inside, built once for each set of them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace

from absl import logging

from kinetic._messages import one_line
from kinetic._progress.steps import Step, step
from kinetic._tasks import in_thread, release, shared
from kinetic.aio._lease import (
    EXPIRY_S,
    RENEW_S,
    Clock,
    Holding,
    Place,
    ProcessIdentity,
    Record,
    Sight,
)
from kinetic.aio.images import recipe
from kinetic.aio.images.cloud_build import Builder, Order
from kinetic.aio.images.recipe import Wheel, dependencies_of, installed_wheel, runner_files
from kinetic.aio.images.registry import Places, Registry
from kinetic.aio.platforms import lifetime
from kinetic.aio.ports import Image, ImageRequest, Store
from kinetic.errors import BuildError, ClientClosed, Conflict, NotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds between renewals, between looks, and until a marker standing still is given up."""

    beat_s: float = RENEW_S
    look_s: float = 3.0
    patience_s: float = EXPIRY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marker(Record):
    """The content of a marker. ``token`` tells one holder's turn from another."""

    token: str = ""
    build: str = ""
    over: bool = False
    failure: str = ""
    log_url: str = ""

    @property
    def holding(self) -> str:
        return self.token


class Held(Holding[_Marker]):
    """It is our turn. ``build`` is what the holder before us had under way, or empty."""

    def __init__(
        self, place: Place[_Marker], marker: _Marker, generation: int, clock: Clock
    ) -> None:
        super().__init__(place, marker, generation, clock, clock())
        self.build = marker.build
        self._lost = False

    async def renew(self) -> None:
        """Say that this process is there, unless another one has the marker now."""
        await self._tell()

    async def note(self, build: str) -> None:
        """Tell others which build it is."""
        await self._tell(build=build)

    async def fail(self, message: str, log_url: str) -> None:
        """Tell those who wait why there will be no image."""
        await self._tell(over=True, failure=message[:8000], log_url=log_url)

    async def end(self) -> None:
        """Let the next one have it."""
        if self._record.failure:
            return
        await self._tell(over=True)  # marked, nobody takes it before it is gone
        if not self._lost:
            await self._place.store.delete([self._place.name])

    async def _tell(self, **changes: object) -> None:
        async with self._turn:
            if not self._lost:
                await self._write(**changes)

    def _lost_to(self, now: _Marker | None) -> None:
        self._lost = True
        what = "another process has taken over %s; the build goes on"
        logging.warning(what, self._place.name)


@contextlib.asynccontextmanager
async def turn(
    store: Store,
    name: str,
    done: Callable[[], Awaitable[bool]],
    *,
    pace: Pace | None = None,
    clock: Clock = lifetime,
) -> AsyncGenerator[Held | None]:
    """Wait until it is our turn, or until *done* says that there is nothing left to do: None.

    Raises:
        BuildError: The process that built it failed while we waited.
    """
    pace = pace or Pace()
    mine = _Marker(token=uuid.uuid4().hex, owner=ProcessIdentity.me())
    held = await _taken(Place(store, name, _Marker), done, mine, pace, clock)
    if held is None:
        yield None
        return
    keeping = asyncio.create_task(held.keep(pace.beat_s), name=f"kinetic keep {name}")
    try:
        yield held
    finally:
        keeping.cancel()
        await release(_ended(keeping, held), what=f"leaving {name}")


async def _taken(
    place: Place[_Marker],
    done: Callable[[], Awaitable[bool]],
    mine: _Marker,
    pace: Pace,
    clock: Clock,
) -> Held | None:
    sight, waited_for = Sight(place, clock, pace.patience_s), ""
    while not await done():
        await sight.look()
        marker = sight.seen[0] if sight.seen is not None else None
        if marker is not None and marker.failure and marker.token == waited_for:
            raise _failed_elsewhere(marker)
        if marker is None or marker.failure or marker.owner.dead or sight.expired:
            build = "" if marker is None or marker.over else marker.build
            held = await _claimed(place, replace(mine, build=build), sight.seen, clock)
            if held is None:
                continue
            try:
                if build or not await done():
                    return held
            except BaseException:
                await release(held.end(), what=f"giving up {place.name}")
                raise
            await held.end()  # between our look and our turn somebody else had his
            return None
        if waited_for != marker.token:
            waited_for = marker.token
            logging.info("another process builds this image (build %s)", marker.build or "to come")
        await asyncio.sleep(pace.look_s)
    return None


async def _claimed(
    place: Place[_Marker], mine: _Marker, seen: tuple[_Marker, int] | None, clock: Clock
) -> Held | None:
    """The marker as ours, also in place of the one *seen*; None if somebody else was faster."""
    before, over = seen if seen is not None else (None, None)
    try:
        generation = await place.claim(mine, over)
    except BaseException:
        before = before if mine.build else None  # that build goes on
        await release(_give_back(place, mine, before), what=f"giving up {place.name}")
        raise
    return None if generation is None else Held(place, mine, generation, clock)


async def _give_back(place: Place[_Marker], mine: _Marker, before: _Marker | None) -> None:
    """Put the marker back as it was, or remove it, if it became ours without our knowing."""
    there = await place.read()
    if there is None or there[0].token != mine.token:
        return
    if before is None:
        await place.store.delete([place.name])
    else:
        with contextlib.suppress(Conflict, NotFound):
            await place.store.replace(place.name, before.to_bytes(), generation=there[1])


async def _ended(keeping: asyncio.Task[None], held: Held) -> None:
    await asyncio.wait({keeping})
    await held.end()


def _failed_elsewhere(marker: _Marker) -> BuildError:
    return BuildError(
        f"{marker.failure}\n(built by another process, on {marker.owner.host})",
        build_id=marker.build,
        log_url=marker.log_url,
    )


COMMAND = ("python3",)
"""The interpreter of the images that are made here, and of those of users."""

BELIEVED_S = 600.0
"""How long an image that was seen in the registry is believed to be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Everything about an image that can be known before anybody is asked.

    *key* is what no other image that is built here has, by its name and content: under it are
    the marker of who builds it, which a build that is gone on with is taken from, and its context.
    """

    uri: str
    context: Mapping[str, bytes]
    key: str
    again: bool = False

    @property
    def marker(self) -> str:
        """The object that tells who builds it."""
        return f"builders/{self.key}"

    @property
    def source(self) -> str:
        """The object with its context, as long as it is built."""
        return f"contexts/{self.key}.tar.gz"


class BundledImages:
    """`kinetic.aio.ports.Images` for ``container_image="bundled"``.

    *builds*, a bucket or a folder of one, keeps contexts while they are built,
    logs, and who builds what. *wheel* makes kinetic's own, by default of what is
    running; images begin with *python_image*.
    """

    def __init__(
        self,
        places: Places,
        builds: Store,
        registry: Registry,
        builder: Builder,
        *,
        pace: Pace | None = None,
        wheel: Callable[[], Wheel] = installed_wheel,
        python_image: str = recipe.PYTHON_IMAGE,
    ) -> None:
        self._places = places
        self._builds = builds
        self._registry = registry
        self._builder = builder
        self._pace = pace
        self._wheel = wheel
        self._python_image = python_image
        self._said: set[str] = set()
        self._seen: dict[str, float] = {}
        self._flights: set[_Flight] = set()
        self._closed = False

    async def resolve(self, request: ImageRequest) -> Image:
        """The image of these dependencies, built if nobody has built it yet.

        Raises:
            PackError: The dependencies cannot be read, or are on this machine only.
            BuildError: It cannot be built.
            AuthError: Something is not allowed.
            Unavailable: The registry, the store or Cloud Build does not answer.
            ClientClosed: This was closed.

        Cancelled: so is the build, unless somebody else here waits for it.
        """
        plan = await in_thread(self._planned, request)
        if time.monotonic() - self._seen.get(plan.uri, -BELIEVED_S) >= BELIEVED_S:
            await self._flight(plan).joined()
            self._seen[plan.uri] = time.monotonic()
        return Image(uri=plan.uri, command=COMMAND, user=recipe.USER)

    async def publish(self, uri: str, context: Mapping[str, bytes], *, again: bool = False) -> None:
        """Have *context* built and pushed as *uri*, if it is not there yet, or *again*.

        Errors and cancellation are those of `resolve`.
        """
        place, _, key = uri.rpartition(":")
        if place != self._places.image:  # the tags of those tell their content
            content = hashlib.sha256(f"{uri} {recipe.digest(context)}".encode()).hexdigest()
            key = f"{place.rpartition('/')[2]}-{key}-{content[:12]}"
        plan = _Plan(uri=uri, context=context, key=key, again=again)
        await self._flight(plan).joined()

    async def aclose(self) -> None:
        """End what is being built here; what was handed in is closed by who did."""
        self._closed = True
        for flight in tuple(self._flights):
            await flight.ended()

    def _flight(self, plan: _Plan) -> _Flight:
        """The one that leads to this image; one that is being ended leads nowhere."""
        for flight in self._flights:
            if flight.uri == plan.uri and not flight.ending:
                return flight
        if self._closed:
            raise ClientClosed("the client that has images built is closed; open another")
        flight = _Flight(plan.uri, self._ensured(plan), self._flights.discard)
        self._flights.add(flight)
        return flight

    def _planned(self, request: ImageRequest) -> _Plan:
        found = dependencies_of(request, self._said)
        context = recipe.bundled_context(
            request.category,
            request.python,
            self._wheel(),
            runner_files(),
            found.text,
            python_image=self._python_image,
        )
        tag = recipe.tag(request.category, context)
        return _Plan(uri=f"{self._places.image}:{tag}", context=context, key=tag)

    async def _ensured(self, plan: _Plan) -> None:
        async def there() -> bool:
            return not plan.again and await self._registry.has(plan.uri)

        async with turn(self._builds, plan.marker, there, pace=self._pace) as held:
            if held is not None:
                await self._built(plan, held)

    async def _built(self, plan: _Plan, held: Held) -> None:
        source = plan.source
        bucket, _, folder = self._builds.url.partition("://")[2].partition("/")
        folder = f"{folder.rstrip('/')}/" if folder else ""
        order = Order(
            project=self._places.project,
            uri=plan.uri,
            bucket=bucket,
            source=f"{folder}{source}",
            logs=f"{folder}logs",
            account=self._places.service_account,
        )
        with step(f"building {plan.uri.rpartition('/')[2]}") as building:
            try:
                await self._ship(plan, source, held)
                logging.info("Building %s, which takes some minutes", plan.uri)
                await self._builder.build(
                    order,
                    adopt=held.build,
                    begun=held.note,
                    told=lambda line: _told(line, building),
                )
            except BuildError as exc:
                if exc.build_id:  # else it is something of this process
                    await held.fail(str(exc), exc.log_url)
                raise
            finally:
                await release(self._builds.delete([source]), what=f"removing {source}")
        logging.info("Built %s", plan.uri)

    async def _ship(self, plan: _Plan, source: str, held: Held) -> None:
        """Put the context where a build finds it.

        If that fails, the build that we were to go on with is ended: with our marker goes
        the only word of it.
        """
        try:
            content = await in_thread(recipe.packed, plan.context)
            await self._builds.create(source, content, shared=True)
        except BaseException:
            if held.build:
                ending = self._builder.cancel(self._places.project, held.build)
                await release(ending, what=f"cancelling build {held.build}")
            raise


def _told(line: str, building: Step) -> None:
    if shown := one_line(line):
        logging.info("[build] %s", shown)
        building.title = one_line(f"building: {shown}", 60)
        building.update(0, 0)


class _Flight:
    """One piece of work that several wait for; it ends when none of them does any more."""

    def __init__(
        self, uri: str, work: Coroutine[object, object, None], over: Callable[[_Flight], object]
    ) -> None:
        self.uri = uri
        self.ending = False
        self._waiting = 0
        self._task = asyncio.create_task(work, name="kinetic build")
        self._task.add_done_callback(lambda _: over(self))

    async def joined(self) -> None:
        """Wait for it; the last one that is cancelled ends it.

        Raises:
            ClientClosed: It was ended by the client's end.
        """
        self._waiting += 1
        try:
            await shared(self._task, "the client that has images built")
        except asyncio.CancelledError:
            if self._waiting == 1 and not self._task.done():
                await release(self.ended(), what="ending a build", grace=60.0)
            raise
        finally:
            self._waiting -= 1

    async def ended(self) -> None:
        """Cancel it, and wait until it is over."""
        self.ending = True
        self._task.cancel()
        await asyncio.wait({self._task})
