"""Images with the project's dependencies inside, built once for each set of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass

from absl import logging

from kinetic._pack.runner_file import runner_files
from kinetic._steps import Step, step
from kinetic._words import one_line
from kinetic.aio._release import in_thread, release, shared
from kinetic.aio.images import _recipe
from kinetic.aio.images._cloud_build import Builder, Order
from kinetic.aio.images._places import Places
from kinetic.aio.images._project import dependencies_of
from kinetic.aio.images._registry import Registry
from kinetic.aio.images._turn import Held, Pace, turn
from kinetic.aio.images._wheel import Wheel, installed_wheel
from kinetic.aio.ports import Image, ImageRequest, Store
from kinetic.errors import BuildError, ClientClosed

__all__ = ["COMMAND", "BundledImages"]

COMMAND = ("python3", "-u", "/app/remote_runner.py")
BELIEVED_S = 600.0
"""How long an image that was seen in the registry is believed to be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Everything about an image that can be known before anybody is asked."""

    uri: str
    context: Mapping[str, bytes]
    digest: str


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
        python_image: str = _recipe.PYTHON_IMAGE,
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
        return Image(uri=plan.uri, command=COMMAND)

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
        context = _recipe.bundled_context(
            request.category,
            request.python,
            self._wheel(),
            runner_files(),
            found.text,
            python_image=self._python_image,
        )
        tag = _recipe.tag(request.category, context)
        return _Plan(
            uri=f"{self._places.image}:{tag}", context=context, digest=_recipe.digest(context)
        )

    async def _ensured(self, plan: _Plan) -> None:
        async def there() -> bool:
            return await self._registry.has(plan.uri)

        marker = f"builders/{plan.uri.rpartition(':')[2]}"
        async with turn(self._builds, marker, there, pace=self._pace) as held:
            if held is not None:
                await self._built(plan, held)

    async def _built(self, plan: _Plan, held: Held) -> None:
        source = f"contexts/{plan.digest}.tar.gz"
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
            content = await in_thread(_recipe.packed, plan.context)
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
