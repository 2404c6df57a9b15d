"""A fake platform for tests, in memory: store, images, and cluster."""

from __future__ import annotations

from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Image, ImageRequest
from kinetic.testing.attempts import carry_out
from kinetic.testing.cluster import MemoryCluster, Work
from kinetic.testing.memory import MemoryStore


class MemoryImages:
    """`kinetic.aio.ports.Images` for jobs that need no image."""

    async def resolve(self, request: ImageRequest) -> Image:
        """Implement `Images.resolve`."""
        return Image(uri="", command=())

    async def aclose(self) -> None:
        """Do nothing: there is no connection to close."""


def memory_platform(work: Work = carry_out, *, slots: int | None = None) -> Platform:
    """Make a platform without processes and files, for tests of code that uses kinetic.

    A client on it runs functions in the test's own event loop. Several clients may share it, at
    the same time or in turn: a client can attach to the jobs of another client.

    Args:
        work: The coroutine of every job. Default: `carry_out`, which runs the job's function.
        slots: How many jobs run at once. Default: any number.

    Returns:
        The platform.

    Example::

        async with kinetic.aio.Client(platform=memory_platform()) as client:
            assert await client.run(train, 0.1) == 1
    """
    store = MemoryStore()
    cluster = MemoryCluster(store, work, slots=slots)
    return Platform(store=store, images=MemoryImages(), cluster=cluster)
