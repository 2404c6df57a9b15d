"""This machine as a cluster: the user's supervisor runs each job as a process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
import site
import sys
import time
from collections.abc import AsyncGenerator, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from absl import logging

from kinetic import _tasks
from kinetic._labels import SUBMISSION
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.directory_urls import directory_of
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic._supervisor.protocol import JobHeader, SupervisorPaths, edition
from kinetic.aio.local.logs import LogPart, read_lines
from kinetic.aio.ports import ItemOutput, JobSpec, Observation, Phase
from kinetic.errors import ClientClosed, ConfigurationError, LaunchError, NotFound, Unavailable
from kinetic.job_status import Reason

if TYPE_CHECKING:
    from anyio.abc import ByteStream

    from kinetic.aio.local.supervisor import Connection

KEY_BYTES = 32


def root_key(home: Path) -> bytes:
    """Return the secret key in the folder *home*; the first of all callers creates it."""
    path = home / "key"
    if not path.exists():
        DirectoryObjects(home).create(path.name, os.urandom(KEY_BYTES))
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path} is damaged: {len(key)} bytes instead of {KEY_BYTES}")
    return key


MAX_TRIES = 4
"""Fail a request after this many supervisors have died while they handled it."""

_dumps = json.JSONEncoder(separators=(",", ":")).encode
RECONNECT_PAUSE_S = 1.0

WARNING_PAUSE_S = 60.0
"""Minimum pause between two warnings that a job waits for other clients' jobs, in seconds: a server
with several processes may have many such jobs."""


class LocalCluster:
    """`kinetic.aio.ports.Cluster` on this machine.

    The supervisor is started when it is first needed and outlives this object.
    *runner* is the folder of the runner's code, kinetic's own by default.

    Raises:
        ConfigurationError: This machine has neither Linux nor macOS.
    """

    shows_items = True
    replaces = True

    def __init__(
        self, home: Path, environ: Mapping[str, str] = os.environ, *, runner: Path | None = None
    ) -> None:
        if sys.platform not in ("linux", "darwin"):
            raise ConfigurationError(
                "kinetic needs Linux or macOS; on Windows, run Python in WSL "
                "(https://learn.microsoft.com/windows/wsl)"
            )
        self._home = Path(os.path.realpath(home))
        self._environ = environ
        self._runner = runner or Path(os.path.realpath(__file__)).parents[2] / "_runner"
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._watches: set[Connection] = set()
        self._closed = False
        self._warned_at = dict[tuple[bool, str], float]()
        self._launched = set[str]()
        """The submissions that this client has launched, without single jobs that are gone."""

    def _log_wait(self, observation: Observation) -> None:
        """Log why a job waits, unless it waits for its own batch."""
        submission, message = (
            observation.labels.get(SUBMISSION, observation.name),
            observation.message,
        )
        if observation.phase is not Phase.PENDING or not message or submission in message:
            return
        holders = message.rpartition(" with ")[2].split(", ")
        # If only jobs of this client hold what it waits for, the program expects it: log it once.
        is_expected = self._launched.issuperset(holders)
        cause, now = (is_expected, message.partition(":")[0]), time.monotonic()
        pause = math.inf if is_expected else WARNING_PAUSE_S
        if now - self._warned_at.get(cause, -math.inf) >= pause:
            self._warned_at[cause] = now
            logging.warning("%s is %s", submission, message)

    async def launch(self, job: JobSpec) -> None:
        """Start *job*; do nothing if a job of this name exists."""
        single: dict[str, Any] = {} if job.crew is None else {"single": True}
        await self._send(job, {"op": "launch", **single})

    async def scale(self, job: JobSpec, *, number: int, ranks: range) -> int:
        """Start the workers of a round; see `Workers.scale`."""
        assert job.crew is not None
        # The supervisor removes the folder of a worker's items, if it is empty at the worker's end.
        outputs = job.crew.outputs
        fields = {"op": "scale", "round": number, "workers": ranks.stop, "output_dir": outputs}
        count: int = (await self._send(job, fields))["workers"]
        return count

    async def grow(self, name: str, workers: int) -> int:
        """Start more workers of a round; see `Workers.grow`."""
        count: int = (await self._ask({"op": "grow", "name": name, "workers": workers}))["workers"]
        return count

    async def extend(self, name: str, seconds: float) -> None:
        """Do nothing: only the workers themselves limit their time."""

    async def tell(self, labels: Mapping[str, str]) -> None:
        """Tell the workers with *labels* that the store has changed."""
        await self._ask({"op": "news", "labels": labels})

    async def _send(self, job: JobSpec, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        self._launched.add(job.labels.get(SUBMISSION, job.name))
        secrets = _dumps({"key": job.key.hex(), "environment": dict(job.environment)})
        orders = [job.order.encode(), *([job.crew.encode()] if job.crew is not None else ())]
        body = "\n".join([secrets, *orders]).encode()
        answer = await self._ask({**self._header(job).fields(), **fields}, body)
        if "error" in answer:
            raise LaunchError(
                f"the local supervisor refused {job.name}: {answer['error']}",
                reason=str(answer.get("kind", "")),
            )
        return answer

    @functools.cached_property
    def _runner_edition(self) -> str:
        """The version of the runner's code."""
        return edition(self._runner)

    def _header(self, job: JobSpec) -> JobHeader:
        """Return the fields of *job* that the supervisor reads; only the runner reads the order."""
        resources, order = job.resources, job.order
        kind, count = resources.accelerator.kind, resources.accelerator.count
        return JobHeader(
            name=job.name,
            labels=job.labels,
            command=tuple(job.image.command),
            runner=os.fspath(self._runner),
            edition=f"{self._runner_edition}-{_packages_edition()}",
            fresh=_needs_fresh(self._environ, job.environment),
            cpus=max(1, math.ceil(resources.cpu)),
            gpus={"cpu": 0, "gpu": count, "tpu": 1}[kind],  # a TPU becomes one GPU
            memory_bytes=resources.memory_bytes,
            timeout=job.timeout,
            start_timeout=job.start_timeout,
            start_allowance=wire.start_allowance(order.debug_s),
            grace=order.grace,
            owned=job.owned,
            project=order.code.digest if order.code is not None else "",
            output_dir=order.output_dir,
            store=order.store,
            scope=order.scope,
        )

    async def delete(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        keep_logs: bool = False,
    ) -> None:
        """Stop and forget the jobs *names*, and all jobs with *labels*; see `Cluster.delete`.

        A running job gets SIGTERM. After its grace period, its whole process tree is killed.
        """
        header = {"op": "delete", "names": [*names], "labels": labels, "keep_logs": keep_logs}
        await self._ask(header)

    async def find(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        explained: bool = False,
    ) -> list[Observation]:
        """Return the states of jobs at one moment; without *names* and *labels*, of all jobs."""
        answer = await self._ask({"op": "find", "names": [*names], "labels": labels})
        return [_read_observation(view) for view in answer["jobs"]]

    async def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        """Yield the current state of each job, then every change; reconnect if disconnected."""
        from kinetic.aio.local.supervisor import ConnectionLost, open_connection

        known: dict[str, Observation] = {}
        last: Connection | None = None
        while True:
            self._refuse_closed()
            try:
                connection = await open_connection(self._home, self._environ)
            except Unavailable as exc:
                if last is None:
                    raise
                logging.warning("%s; trying again", exc)
                await asyncio.sleep(RECONNECT_PAUSE_S)
                continue
            cause = "it was deleted while this client was not connected to its supervisor"
            if last is not None and last.supervisor != connection.supervisor:
                cause = f"its supervisor (process {last.supervisor}) died, and its jobs with it"
            last, missing = connection, set(known)
            self._watches.add(connection)
            try:
                self._refuse_closed()  # `aclose` may have run while this method connected
                connection.send({"op": "watch", "labels": labels})
                while True:
                    message = await connection.event()
                    if (items := message.get("items")) is not None:
                        observation = _read_ends(items)
                        for index, attempt in observation.ended:
                            item = f"{observation.name}-{index}-{attempt}"
                            missing.discard(item)
                            known.pop(item, None)
                        yield observation
                    for view in message["jobs"]:
                        observation = _read_observation(view)
                        missing.discard(observation.name)
                        if observation.phase is Phase.GONE:
                            known.pop(observation.name, None)
                            submission = observation.labels.get(SUBMISSION, observation.name)
                            if observation.name.endswith(submission):  # it is a single job
                                self._launched.discard(submission)
                        else:
                            known[observation.name] = observation
                            self._log_wait(observation)
                        yield observation
                    if message.get("synced"):
                        for name in sorted(missing):
                            yield dataclasses.replace(
                                known.pop(name), phase=Phase.GONE, reason=None, message=cause
                            )
                        missing.clear()
            except ConnectionLost:
                continue
            finally:
                self._watches.discard(connection)
                connection.close()

    async def logs(
        self, name: str, *, follow: bool = False, tail: int | None = None
    ) -> AsyncGenerator[str]:
        """Yield the lines of the job's output; with *follow*, until the job has ended.

        The log exists until `delete` removes it, even if the supervisor has forgotten the job. For
        an item of a worker, this works while the item runs; later, use `item_log`.
        """
        paths = SupervisorPaths(self._home)
        part = LogPart(paths.log(name))
        answer = await self._ask({"op": "find", "names": [name], "labels": None})
        if answer["jobs"] and (log := answer["jobs"][0].get("log")):
            is_directory = directory_of(log["store"]) is not None
            part = LogPart(
                paths.log(log["worker"]),
                begin=log["begin"],
                outcome=log["outcome"],
                objects=DirectoryObjects.from_url(log["store"]) if is_directory else None,
            )
        elif not (answer["jobs"] or part.path.exists()):
            raise NotFound(f"there is no job {name!r} on this machine, or it was deleted")
        if not follow:
            async for line in read_lines(part, tail, None):
                yield line
            return
        ended = asyncio.create_task(self._ask({"op": "ended", "name": name}))
        # The task may fail after the caller has stopped reading: then no code awaits it.
        ended.add_done_callback(_retrieve_exception)
        try:
            async for line in read_lines(part, tail, ended):
                yield line
        finally:
            ended.cancel()
        if not ended.cancelled():
            ended.result()  # raise if the supervisor can't be reached

    async def item_log(
        self, place: ItemOutput, *, follow: bool = False, tail: int | None = None
    ) -> AsyncGenerator[str]:
        """Yield a part of the output of a worker.

        The supervisor shows each running item, so `logs` reads its log.

        Raises:
            NotFound: The item runs, or the log was removed.
        """
        path = SupervisorPaths(self._home).log(place.worker)
        if place.part is None or not path.exists():
            raise NotFound(f"the log of the worker {place.worker} was removed")
        async for line in read_lines(LogPart(path, *place.part), tail, None):
            yield line

    async def dial(self, name: str, port: int, *, host: int = 0) -> ByteStream:
        """Connect to *port* of this machine's loopback, which jobs share; each job has one host."""
        found = await self.find(names=[name])
        if host or not found or found[0].phase is not Phase.RUNNING:
            raise NotFound(f"no job {name!r} (host {host}) is running on this machine")
        try:
            return await anyio.connect_tcp("127.0.0.1", port)
        except OSError as exc:
            raise Unavailable(f"{name} does not listen on port {port} ({exc})") from exc

    async def root_key(self) -> bytes:
        """Return the secret of this user on this machine, 32 bytes; make it on first use."""
        try:
            return await asyncio.to_thread(root_key, self._home)
        except (OSError, ValueError) as exc:
            raise ConfigurationError(
                f"the key of this machine cannot be used: {exc}; "
                f"repair {self._home}, or set KINETIC_HOME to another folder"
            ) from exc

    async def keep_secret(self, name: str, content: bytes) -> None:
        """Do nothing: on this machine, a secret would be stored in a plain file.

        The process that submits a batch has *content* in memory. The supervisor also has it in
        memory, for the jobs that it has accepted.
        """

    async def secret(self, name: str) -> bytes:
        """Raise `NotFound`: the local platform stores no secrets."""
        raise NotFound(f"there is no secret {name!r}: this machine keeps none")

    async def drop_secret(self, names: Collection[str]) -> None:
        """Do nothing: the local platform stores no secrets that could be deleted."""

    async def finish(self, name: str, fence: int) -> None:
        """Do nothing: the local platform stores no secret of a batch that could be deleted."""

    async def aclose(self) -> None:
        """Disconnect from the supervisor; jobs keep running."""
        self._closed = True  # later requests must not connect again
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        if self._connection is not None:
            await self._connection.aclose()
            self._connection = None
        for connection in tuple(self._watches):
            await connection.aclose()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClientClosed(
                f"the client of the local platform ({self._home}) is closed; open another"
            )

    async def _ask(self, header: Mapping[str, Any], body: bytes = b"") -> dict[str, Any]:
        """Send a request, and return its answer; if the supervisor dies, ask the next one."""
        from kinetic.aio.local.supervisor import ConnectionLost

        for _ in range(MAX_TRIES):
            self._refuse_closed()
            connection = self._connection
            if connection is None or connection.lost:
                connection = await self._get_connection()
            try:
                answer = await connection.ask(header, body)
            except ConnectionLost:
                continue
            if answer.get("kind") != "ending":
                return answer
            await connection.aclose()  # the next one starts when the jobs of this one have ended
        raise Unavailable(
            f"the local supervisor of {self._home} died {MAX_TRIES} times over one request; "
            "see supervisor.log there"
        )

    async def _get_connection(self) -> Connection:
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect(), name="kinetic supervisor")
            # The task may fail after all callers were cancelled: then no code awaits it.
            self._connecting.add_done_callback(_retrieve_exception)
        return await _tasks.await_shared(self._connecting, "the client of the local platform")

    async def _connect(self) -> Connection:
        from kinetic.aio.local.supervisor import open_connection

        self._connection = await open_connection(self._home, self._environ)
        return self._connection


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Keep asyncio from logging that no code has seen the exception of *task*."""
    if not task.cancelled():
        task.exception()


def _needs_fresh(environ: Mapping[str, str], environment: Mapping[str, str]) -> bool:
    """Return whether a job with *environment* needs a new interpreter instead of a fork."""
    value = environ.get("KINETIC_LOCAL_FRESH", "").strip().lower()
    if value:
        return value not in ("0", "false", "no", "off")
    # Frameworks of macOS don't work in a forked process. Only a new interpreter reads variables
    # such as PYTHONHASHSEED.
    is_read_at_start = any(name.startswith(("PYTHON", "LD_", "DYLD_")) for name in environment)
    return sys.platform == "darwin" or is_read_at_start


def _packages_edition() -> str:
    """Return a version of the packages that this interpreter has, which an installation changes.

    A warm parent has read their ``.pth`` files, such as those of editable packages, at its start.
    """
    changes: list[int] = []
    for folder in (*site.getsitepackages(), site.getusersitepackages()):
        with contextlib.suppress(OSError):  # there is no such folder
            changes.append(os.stat(folder).st_mtime_ns)
    return f"{max(changes, default=0):x}"


def _read_ends(items: Mapping[str, Any]) -> Observation:
    """Return the observation of a worker that has ended *items*; its name is the submission's."""
    labels = items["labels"]
    return Observation(
        name=labels[SUBMISSION],
        phase=Phase.RUNNING,
        labels=labels,
        executor=items["executor"],
        ended=tuple((index, attempt) for index, attempt in items["ends"]),
    )


def _read_observation(view: Mapping[str, Any]) -> Observation:
    return Observation(
        name=view["name"],
        phase=Phase(view["state"]),
        labels=view["labels"],
        executor=view["executor"],
        leaving=view["leaving"],
        exit_code=view["exit_code"],
        reason=Reason(view["reason"]) if view["reason"] else None,
        message=view["message"],
        created_at=datetime.datetime.fromtimestamp(view["created"], datetime.UTC).isoformat(),
    )
