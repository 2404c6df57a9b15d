"""A whole platform in memory, to hand to a client."""

from __future__ import annotations

from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Image, ImageRequest
from kinetic.testing.attempts import carry_out
from kinetic.testing.cluster import MemoryCluster, Work
from kinetic.testing.memory import MemoryStore

__all__ = ["MemoryImages", "memory_platform"]


class MemoryImages:
    """`kinetic.aio.ports.Images` where nothing runs in an image."""

    async def resolve(self, request: ImageRequest) -> Image:
        """See the port."""
        return Image(uri="", command=())

    async def aclose(self) -> None:
        """Nothing is held."""


def memory_platform(work: Work = carry_out, *, slots: int | None = None) -> Platform:
    """A platform without processes and files, for tests of code that uses kinetic.

    ``Client(platform=memory_platform())`` runs functions in the test's own
    event loop. Several clients may share it, one after the other as well: what
    one has submitted, the next can attach to. *work* replaces what a job does,
    *slots* bounds how many run at once.
    """
    store = MemoryStore()
    cluster = MemoryCluster(store, work, slots=slots)
    return Platform(store=store, images=MemoryImages(), cluster=cluster)
