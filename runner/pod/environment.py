"""The environment of a pod, and the streams of its processes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import remote_runner
from ..job import processes
from ..job.hosts import Hosts
from ..job.workspace import JobPlace
from ..protocol import wire
from ..protocol.workers import Crew, WorkerId

KEY_FILE = "/var/run/kinetic/key"
TERMINATION_LOG = "/dev/termination-log"
RUNNER_VARIABLES = (
    "KINETIC_ORDER",
    "KINETIC_CREW",
    "KINETIC_ROUND",
    "KINETIC_JOB_UID",
    "KINETIC_RANK",
    "KINETIC_FAILURES",
    "KINETIC_DISRUPTIONS",
    "KINETIC_KEY_FILE",
    "KINETIC_POD_NAME",
)
"""Variables of the runner, which the job doesn't get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """The order, the key, and the worker that the environment of a pod names.

    ``name`` is the pod's own, and empty in a set of hosts. ``receipt`` is the file for the receipt,
    and empty if there is none. With ``hosts``, the pod is one host of a set, and the first host is
    the worker. ``group`` is the name of the set if it is a LeaderWorkerSet, which restarts its
    hosts; else empty.
    """

    order: wire.Order
    key: bytes
    executor: str
    name: str
    receipt: str
    me: WorkerId
    crew: Crew
    hosts: Hosts | None = None
    group: str = ""

    @property
    def follows(self) -> bool:
        """Whether the pod is a host that runs what the first host has taken."""
        return self.hosts is not None and not self.hosts.is_first


def read_pod(environ: Mapping[str, str]) -> Pod:
    """Read the environment of a pod.

    Raises:
        ValueError: The environment is incomplete, or this runner can't read its format.
        OSError: The key cannot be read.
    """
    order = wire.Order.decode(environ.get("KINETIC_ORDER", "null"))
    executor = environ.get("KINETIC_POD_UID", "")
    if not executor:
        raise ValueError("KINETIC_POD_UID is not set, so the attempt cannot be claimed")
    receipt = environ.get("KINETIC_TERMINATION_LOG", TERMINATION_LOG)
    key = Path(environ.get("KINETIC_KEY_FILE", KEY_FILE)).read_bytes()
    crew = environ.get("KINETIC_CREW")
    if crew is None:
        raise ValueError("KINETIC_CREW is not set, so this pod is no worker")
    job = environ.get("KINETIC_JOB_UID", "")
    # In a set, the index in a Job is the number of the host.
    rank = environ.get("KINETIC_RANK") or environ.get("JOB_COMPLETION_INDEX", "")
    if not rank or not job:
        raise ValueError("JOB_COMPLETION_INDEX or KINETIC_JOB_UID is not set")
    failures = int(environ.get("KINETIC_FAILURES") or 0)
    disruptions = int(environ.get("KINETIC_DISRUPTIONS") or 0)
    number = int(environ.get("KINETIC_ROUND") or 0)
    return Pod(
        order=order,
        key=key,
        executor=executor,
        name=environ.get("KINETIC_POD_NAME", ""),
        receipt=receipt if os.path.exists(receipt) else "",
        me=WorkerId(number, job, int(rank), failures + disruptions, disruptions),
        crew=Crew.decode(crew),
        hosts=Hosts.of(environ),
        group=environ.get("KINETIC_LWS", ""),
    )


def begin_child(parent: int) -> None:
    """Prepare this fork of *parent*; the kernel kills it if *parent* dies."""
    processes.die_with(parent)
    remote_runner.enable_crash_tracebacks()
    sys.stdout = sys.__stdout__ = _open_stream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _open_stream(2)  # type: ignore[misc]
    sys.argv[:] = [""]


def _open_stream(fd: int) -> io.TextIOWrapper:
    """Open a stream that writes at once and escapes what can't be encoded."""
    raw = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115 - it lives as long as the job
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def make_place(folder: str, log: Callable[[], str]) -> JobPlace:
    """Make the directory in *folder* that the job runs in, and enter it."""
    work = os.path.join(folder, "work")
    os.mkdir(work, 0o700)
    os.chdir(work)
    return JobPlace(
        work=work, cache=os.path.join(folder, "cache"), mounts=False, exclusive=True, log=log
    )
