"""The interfaces of a store, images, and a cluster that the engine uses.

Adapters implement these protocols structurally; this module imports no adapter.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.wire import Input, Receipt
from kinetic.accelerators import CPU, Accelerator
from kinetic.errors import WireError
from kinetic.job_status import Reason

if TYPE_CHECKING:
    from anyio.abc import ByteStream

    from kinetic._runner.protocol.workers import Crew

__all__ = [
    "Cluster",
    "Image",
    "ImageRequest",
    "Images",
    "ItemOutput",
    "JobSpec",
    "Object",
    "ObjectInfo",
    "Observation",
    "Phase",
    "Resources",
    "Store",
    "Workers",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object of a listing; ``size`` is in bytes.

    ``used`` is when a process created or last renewed the object; None if unknown. The unit is
    seconds since 1970 by the clock of that process, or of the store. ``metageneration`` grows with
    each renewal, where the store counts them.
    """

    name: str
    size: int
    metadata: Mapping[str, str]
    generation: int
    used: float | None = None
    metageneration: int = 1


class Object(NamedTuple):
    """One object with its content."""

    name: str
    body: bytes
    metadata: Mapping[str, str]
    generation: int


RECORD_BYTES = 64 * 1024 * 1024
"""Limit of objects that are read whole: outcomes, manifests, requests, leases."""


class Store(Protocol):
    """Store named objects: each is created once, and reads are strongly consistent."""

    @property
    def url(self) -> str:
        """The address of the store for a runner, such as ``file:///home/me/.kinetic/store``."""
        ...

    def plain(self) -> Store:
        """Return this store with all names as they are, also those that other programs chose."""
        ...

    async def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        shared: bool = False,
        check: Callable[[], object] | None = None,
    ) -> bool:
        """Create *name* if it is absent; return False if it exists.

        The adapter resolves lost replies, so the result tells what this call did. A *shared* object
        belongs to no submission; a collection removes it when it is unused. *check* is called,
        maybe in a thread, when all of *body* was read. If it raises, the object isn't created.
        """
        ...

    async def begin(self, name: str, body: bytes) -> int | None:
        """Create an object to `replace` later; return its generation, or None if it exists."""
        ...

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        """Overwrite *generation* and return the new one; `Conflict` if the object has another."""
        ...

    async def get(self, name: str, *, limit: int | None = RECORD_BYTES, start: int = 0) -> Object:
        """Return the object; raise `NotFound` if there is none.

        An object of more than *limit* bytes isn't kinetic's, and is returned with an empty body.
        With *start*, the content begins at that byte and *limit* counts from there; the caller
        verifies such a part.
        """
        ...

    async def get_many(self, names: Collection[str]) -> dict[str, Object]:
        """Return the objects that exist, by name; each like `get`."""
        ...

    async def fetch(self, name: str, path: Path) -> None:
        """Write the object's content to a new file at *path*, a piece at a time."""
        ...

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """List the objects whose name starts with *prefix*, sorted by name."""
        ...

    async def look(self, name: str) -> ObjectInfo | None:
        """Return the object's entry in a listing; None if there is none."""
        ...

    async def renew(self, names: Collection[str]) -> set[str]:
        """Set the time of last use of these objects to now; return the names that don't exist.

        Several submissions share such an object, which a collection deletes once it is unused.
        """
        ...

    async def collect(self, objects: Sequence[ObjectInfo]) -> bool:
        """Delete these objects of a listing, except objects that were renewed after the listing.

        If the first was renewed, delete none. Return whether all were deleted.
        """
        ...

    async def delete(self, names: Collection[str]) -> None:
        """Delete these objects; ignore those that don't exist."""
        ...

    async def aclose(self) -> None: ...


def displaced(name: str, store: Store) -> WireError:
    """Return the error for a name under which the store has something other than an object."""
    return WireError(
        f"something that isn't an object, such as a directory, is in the place of {name} in "
        f"{store.url}; remove it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """The facts that decide the image of a submission.

    ``mode`` is "bundled", "prebuilt", or the name of an image. The adapter looks for the project's
    dependencies in ``scripts``, then from ``entry_dir`` up to ``root``; None means that there is no
    project.
    """

    mode: str
    category: str
    base_image_repo: str | None
    python: str
    entry_dir: Path | None = None
    root: Path | None = None
    scripts: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Where a job's interpreter comes from.

    ``uri`` names a container image, or is empty for a process of this machine; ``command`` starts
    the interpreter, and may need the variables in ``environment``. ``requirements`` is an object of
    the store: a requirements file that the job installs first. ``runner`` names the object with the
    runner, for an image that may lack it. ``user`` is the unprivileged user ID that the image is
    made for; None: unknown.
    """

    uri: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False, hash=False)
    requirements: Input | None = None
    runner: str = ""
    user: int | None = None


class Images(Protocol):
    """Build an image, find it in its registry, or use it as it is."""

    async def resolve(self, request: ImageRequest) -> Image: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources of one job; ``memory_bytes`` None means the platform's default."""

    accelerator: Accelerator = CPU
    cpu: float = 1.0
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One attempt, ready to be started.

    The client computes ``name`` before the first request, so that a repeated launch finds the
    first one's job. ``order`` is for the runner. ``environment`` is the same for all jobs of a
    submission; the runner adds `wire.Order.variables`. With a ``crew``, the job is a worker. An
    ``owned`` job ends, and leaves nothing, when the process that launched it dies, if the platform
    can detect that.
    """

    name: str
    labels: Mapping[str, str]
    image: Image
    order: wire.Order
    environment: Mapping[str, str] = field(repr=False)
    key: bytes = field(repr=False)
    resources: Resources
    timeout: float | None = None
    start_timeout: float | None = None
    owned: bool = False
    crew: Crew | None = None


class Phase(enum.Enum):
    """The state of an attempt as the platform reports it: a hint that an outcome may be there."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    GONE = "gone"

    @property
    def is_over(self) -> bool:
        """Whether the attempt, or the worker, neither waits nor runs."""
        return self in (Phase.ENDED, Phase.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the platform reports about one attempt.

    ``executor`` is the ID of the process or pod, as in the claim. ``created_at`` is UTC, ISO 8601,
    or empty if unknown. ``last`` says that the platform makes no other attempt after this one.
    ``leaving`` says that the attempt has stored its outcome and its process still runs; not every
    platform can tell. ``receipt`` is a copy of the outcome that the process gave the platform;
    verify it like the outcome itself. ``host`` is the number of the host that failed first.
    ``ended`` are items that this process, a worker, has ended, as pairs of index and attempt; the
    other facts are then those of the worker. ``disruptions`` says how many workers before this one
    the platform has ended, as far as it counts them; see `WorkerId`.
    """

    name: str
    phase: Phase
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    executor: str = ""
    exit_code: int | None = None
    reason: Reason | None = None
    message: str = ""
    host: int = 0
    created_at: str = ""
    last: bool = False
    leaving: bool = False
    receipt: Receipt | None = field(default=None, repr=False)
    ended: tuple[tuple[int, int], ...] = ()
    disruptions: int = 0


@dataclass(frozen=True, slots=True)
class ItemOutput:
    """Where the output of an item is in that of its *worker*, which is a name.

    ``part`` is the first byte, and the one after the last, or None for the end of the worker's
    output; it is None while the item runs. ``marks`` are the lines before and after those of the
    item. ``since`` is a time before the item began, in seconds since the epoch.
    """

    worker: str
    part: tuple[int, int | None] | None
    marks: tuple[str, str]
    since: float


class Workers(Protocol):
    """The part of a cluster that starts workers, which take items from the store and run them.

    A worker is a job whose labels name no item.
    """

    shows_items: bool
    """Whether the cluster shows an item, while a worker runs it, as a job with the process of the
    worker. Otherwise only the store says what the workers run."""

    replaces: bool
    """Whether the cluster replaces a worker that died. Otherwise each worker runs one item at most,
    and the process that submits the batch starts another."""

    async def scale(self, job: JobSpec, *, number: int, ranks: range) -> int:
        """Start the workers of a round, or more of them; those that it has don't change.

        Args:
            job: Each worker. Its name is that of the round, its order has no item, and its crew
                says how the workers run the items.
            number: The number of the round.
            ranks: The ranks of the workers. A cluster that replaces workers has those before, too.

        Returns:
            How many ranks the round has, with those that have left. 0: the round is over.

        Raises:
            LaunchError: The platform refused the workers.
        """
        ...

    async def grow(self, name: str, workers: int) -> int:
        """Start more workers of a round that has some; fewer than there are change nothing.

        Unlike `scale`, this needs no captured variables, so any process can do it.

        Args:
            name: The name of the round.
            workers: How many there are to be.

        Returns:
            How many ranks the round has, with those that have left. 0: the round is over, or was
            never begun here.
        """
        ...

    async def extend(self, name: str, seconds: float) -> None:
        """Let the round *name* go on for *seconds* from now: a retry gives it this time again."""
        ...

    async def tell(self, labels: Mapping[str, str]) -> None:
        """Tell the workers with *labels* that the store has changed."""
        ...

    def item_log(
        self, place: ItemOutput, *, follow: bool = False, tail: int | None = None
    ) -> AsyncGenerator[str]:
        """Yield what an item has written that `Cluster.logs` doesn't show.

        Args:
            place: Where the item has written.
            follow: Whether to wait for more lines, until the item ends.
            tail: How many of the last lines to begin with; None: all.

        Raises:
            NotFound: There is no such worker, its log was removed, or it has no such lines.
        """
        ...


class Cluster(Workers, Protocol):
    """A platform that runs attempts: in workers, or each as a job of its own."""

    async def launch(self, job: JobSpec) -> None:
        """Start *job*; succeed if a job with this name exists.

        Raises:
            LaunchError: The platform refused it.
            Unavailable: The platform does not answer.

        Cancelled: the job may or may not exist; delete it by name.
        """
        ...

    async def delete(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        keep_logs: bool = False,
    ) -> None:
        """Stop and remove jobs by name, or all with *labels*; ignore names that don't exist.

        With *keep_logs*, their logs stay until a call without it, unless a log is part of the job.
        Returns when the request is accepted; each process still gets its grace period.
        """
        ...

    async def find(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        explained: bool = False,
    ) -> list[Observation]:
        """Read jobs consistently: a job that is missing in the answer doesn't exist.

        With *explained*, also find why a few jobs wait, with a request each; `watch` always does.
        """
        ...

    def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        """Yield the current state, then every change, without end; reconnects automatically."""
        ...

    def logs(
        self, name: str, *, follow: bool = False, tail: int | None = None
    ) -> AsyncGenerator[str]:
        """Yield the lines of the job's output; *follow* waits for more until the job ends.

        `LogPieces` cuts a line of more than 1 MiB.

        Raises:
            NotFound: There is no such job, or its log was removed.
        """
        ...

    async def dial(self, name: str, port: int, *, host: int = 0) -> ByteStream:
        """Connect to *port* on the loopback of a running job; *host* is the number of its host.

        If nothing listens, the connection may fail only when you send or receive.

        Raises:
            NotFound: No such job is running.
            AuthError: A permission is missing.
            Unavailable: The platform does not answer, or nothing listens on the port.
        """
        ...

    async def root_key(self) -> bytes:
        """Return the 32-byte secret from which all submissions' keys derive; made on first use."""
        ...

    async def keep_secret(self, name: str, content: bytes) -> None:
        """Keep *content* under *name*, a submission's ID; replaces earlier content.

        The platform keeps it outside the store, so that readers of the bucket can't read it. A
        platform that has only plain files keeps nothing.
        """
        ...

    async def secret(self, name: str) -> bytes:
        """Return the content that `keep_secret` keeps under *name*.

        Raises:
            NotFound: Nothing is kept under *name*.
        """
        ...

    async def drop_secret(self, names: Collection[str]) -> None:
        """Drop the secrets of these names; ignore names that don't exist."""
        ...

    async def finish(self, name: str, fence: int) -> None:
        """Drop what the platform keeps for a batch's processes, after all its jobs have ended.

        The content of `keep_secret` stays. A later `launch` makes what its process needs. Does
        nothing if another process has launched under a later *fence*.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections; jobs keep running. A call in progress raises a `BackendError`."""
        ...


LONGEST_LINE = 1 << 20
"""Maximum bytes of a line; a longer one is yielded in pieces."""


@dataclass(frozen=True, slots=True)
class LogPiece:
    """A line, or piece *number* of a line that is too long to buffer."""

    content: bytes
    number: int

    @property
    def text(self) -> str:
        """The content as text; bytes that aren't UTF-8 are replaced."""
        return self.content.decode(errors="replace")


class LogPieces:
    """Cut the stream of a log into lines, independent of the chunks it arrives in.

    The buffer holds at most one piece of the longest length and the last chunk.
    """

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._rest = bytearray()
        self._number = 0

    def feed(self, content: bytes = b"", *, last: bool = False) -> Iterator[LogPiece]:
        """Yield the pieces that *content* completes; with *last*, also the rest."""
        self._rest += content
        while self._rest:
            cut = self._rest.find(b"\n", 0, self._longest + 1)
            ended = cut >= 0
            if not ended and len(self._rest) > self._longest:
                cut = self._longest
                while cut > self._longest - 4 and self._rest[cut] & 0xC0 == 0x80:
                    cut -= 1  # don't cut within a UTF-8 character
            elif not ended and last:
                cut = len(self._rest)
            elif not ended:
                return
            yield LogPiece(bytes(self._rest[:cut]), self._number)
            del self._rest[: cut + ended]
            self._number = 0 if ended else self._number + 1
