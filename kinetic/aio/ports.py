"""What the engine needs from the world: a store, images and a cluster.

Adapters implement these protocols structurally; nothing here knows them.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.wire import Input, Receipt
from kinetic.accelerators import CPU, Accelerator
from kinetic.errors import WireError
from kinetic.job_status import Reason

if TYPE_CHECKING:
    from anyio.abc import ByteStream

__all__ = [
    "Cluster",
    "Image",
    "ImageRequest",
    "Images",
    "JobSpec",
    "Object",
    "ObjectInfo",
    "Observation",
    "Phase",
    "Resources",
    "Store",
    "displaced",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object of a listing; ``size`` is in bytes.

    ``used`` is when something that many share was created, or renewed last: in
    seconds since 1970, by the clock of who did it. None where nothing is known
    of that. ``metageneration`` tells one renewal from the next where the store counts them.
    """

    name: str
    size: int
    metadata: Mapping[str, str]
    generation: int
    used: float | None = None
    metageneration: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """One object with its content."""

    name: str
    body: bytes
    metadata: Mapping[str, str]
    generation: int


RECORD_BYTES = 64 * 1024 * 1024
"""What is read whole is not longer: outcomes, manifests, requests, leases. Inputs may be."""


class Store(Protocol):
    """Objects under names, created once, strongly consistent."""

    @property
    def url(self) -> str:
        """Where a runner finds the same objects, e.g. ``file:///home/me/.kinetic/store``."""
        ...

    async def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        shared: bool = False,
    ) -> bool:
        """Create *name* if it is absent; False when it already exists.

        A lost reply is resolved inside: the answer is about this very call.
        What is *shared* belongs to nobody, and may be collected when nobody
        has created or renewed it for long.
        """
        ...

    async def begin(self, name: str, body: bytes) -> int | None:
        """`create` of what is to be replaced: its generation, or None when it already exists."""
        ...

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        """Overwrite generation *generation*, returning the new one; Conflict if it moved on."""
        ...

    async def get(self, name: str, *, limit: int | None = RECORD_BYTES, start: int = 0) -> Object:
        """The object; NotFound if there is none.

        One of more than *limit* bytes comes without its content: nobody here has written it.
        With *start* the content begins at that byte, and its *limit* counts from there; whether
        such a part is whole and right is for the caller to verify.
        """
        ...

    async def fetch(self, name: str, path: Path) -> None:
        """Write the object's content to a new file at *path*, in flat memory."""
        ...

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose name starts with *prefix*, sorted by name."""
        ...

    async def look(self, name: str) -> ObjectInfo | None:
        """What a listing tells of this very object; None if there is none."""
        ...

    async def renew(self, names: Collection[str]) -> set[str]:
        """These shared objects are in use now; returns those of them that are not there."""
        ...

    async def collect(self, objects: Sequence[ObjectInfo]) -> bool:
        """Delete these shared objects, each unless it was renewed since it was listed.

        The first goes first: if it stays, all do. Whether all are gone.
        """
        ...

    async def delete(self, names: Collection[str]) -> None:
        """Delete these objects; those that are absent already do not matter."""
        ...

    async def aclose(self) -> None: ...


def displaced(name: str, store: Store) -> WireError:
    """Make the error about a name that is taken although it names no object."""
    return WireError(
        f"something that is no object, such as a directory, lies in the place of {name} in "
        f"{store.url}; remove it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """What decides the image of a submission.

    ``mode`` is "bundled", "prebuilt" or the name of an image. Which packages the
    project wants is looked for from ``entry_dir`` up to ``root``, where the mode
    needs it; None means that there is no project.
    """

    mode: str
    category: str
    base_image_repo: str | None
    python: str
    entry_dir: Path | None = None
    root: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Where a job's interpreter comes from.

    ``uri`` names a container image, or is empty for a process of this machine;
    ``command`` is what starts the interpreter there. ``requirements`` is an
    object of the store, a requirements file that the job installs before all else.
    ``user`` is the unprivileged user ID that the image is made for; None means that
    nobody knows.
    """

    uri: str
    command: tuple[str, ...]
    requirements: Input | None = None
    user: int | None = None


class Images(Protocol):
    """Build it, find it, or take it as it is."""

    async def resolve(self, request: ImageRequest) -> Image: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one job asks for. ``memory_bytes`` None means the platform's default."""

    accelerator: Accelerator = CPU
    cpu: float = 1.0
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One attempt, ready to be started.

    The client computes ``name`` before the first request, so that a repeated launch finds the
    job of the first. ``order`` is for the runner. ``environment`` is the same for all jobs of a
    submission. It may hold the user's secrets: it goes to the job's process and nowhere else;
    the runner adds `wire.Order.variables`. A job that is ``owned`` ends when the process that
    launched it dies, and leaves nothing, where the platform can tell.
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
    grace: float = 30.0
    owned: bool = False


class Phase(enum.Enum):
    """What the platform says of one attempt; a hint about the future, never the truth."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The platform's word about one attempt.

    ``executor`` is the process or pod the word is about: the same id as in the
    claim. ``created_at`` is UTC, ISO 8601, or empty when unknown. ``last`` says that the
    platform, where it replaces attempts itself, makes no other after this one. ``leaving`` says
    that the attempt has stored its outcome and only its process still runs; not every platform can
    tell. ``receipt`` is a copy of the attempt's outcome, as the process that committed it has told
    the platform; it has to be verified like the outcome itself. ``host`` is
    the host that failed first, for a job on several hosts.
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


class Cluster(Protocol):
    """A place where attempts run."""

    async def launch(self, job: JobSpec) -> None:
        """Start *job*; one with this name already there is success.

        Raises:
            LaunchError: It was refused.
            Unavailable: The platform does not answer.

        Cancelled: the job may or may not exist; delete it by name.
        """
        ...

    async def delete(
        self, *, names: Collection[str] = (), labels: Mapping[str, str] | None = None
    ) -> None:
        """Stop and forget jobs by name, or all that carry *labels*; absent ones do not matter.

        Returns when the request is accepted; the process gets its grace first.
        """
        ...

    async def find(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        explained: bool = False,
    ) -> list[Observation]:
        """A consistent read: a name that is missing here is gone.

        *explained* asks as well why jobs wait, as a watch does by itself: of a few,
        and with requests of their own.
        """
        ...

    def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        """What is there now, then every change, for ever; reconnects by itself."""
        ...

    def logs(
        self, name: str, *, follow: bool = False, tail: int | None = None
    ) -> AsyncGenerator[str]:
        """Lines of the job's output, without their newline; *follow* waits for more until it ends.

        Raises:
            NotFound: There is no such job, or its log is gone.
        """
        ...

    async def dial(self, name: str, port: int, *, host: int = 0) -> ByteStream:
        """A connection to *port* of the loopback that a running job has.

        Of a job on several hosts *host* says whose. What is refused there
        may only be noticed when something is sent or received.

        Raises:
            NotFound: No such job is running.
            AuthError: A right is missing.
            Unavailable: The platform does not answer, or nothing listens there.
        """
        ...

    async def root_key(self) -> bytes:
        """The secret all submissions' keys are derived from; made on first use, 32 bytes."""
        ...

    async def keep_secret(self, name: str, content: bytes) -> None:
        """Keep *content* under *name*, a submission's id, in place of what was there.

        It is no object of the store: who can read a bucket cannot read this. A platform that
        could keep it only in plain files keeps nothing.
        """
        ...

    async def secret(self, name: str) -> bytes:
        """What is kept under *name*.

        Raises:
            NotFound: Nothing is.
        """
        ...

    async def drop_secret(self, names: Collection[str]) -> None:
        """Keep these no longer; those that are absent do not matter."""
        ...

    async def finish(self, name: str, fence: int) -> None:
        """Every job of the batch *name* has ended: keep nothing more for processes of it.

        What `keep_secret` has kept stays. A further `launch` provides for its
        process again. Where somebody has launched under a later *fence*, nothing is done.
        """
        ...

    async def aclose(self) -> None:
        """Let go of it; jobs go on. Who still asks or follows through it gets a `BackendError`."""
        ...
