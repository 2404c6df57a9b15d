"""Connect to the local supervisor, the process that runs this user's jobs on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kinetic._labels import INDEX
from kinetic._runner.protocol import messages
from kinetic._runner.protocol.private import make_folder
from kinetic._supervisor.protocol import VERSION, SupervisorPaths, inherited_variables
from kinetic.errors import Unavailable

MAX_STARTS = 6
"""How many supervisors `connect` starts before it gives up."""

START_S = 30.0
"""How long (seconds) a supervisor may take to start, to accept a client, or to end."""

REPORT_BYTES = 1 << 16
"""Maximum bytes of a new supervisor's report; the path in it may be long."""

NO_SUPERVISOR = (FileNotFoundError, ConnectionRefusedError, ConnectionResetError)
"""Errors that say that no supervisor runs, or that it has just ended."""

_SETTINGS = (
    "CUDA_VISIBLE_DEVICES", "KINETIC_LOCAL_IDLE_S", "KINETIC_LOCAL_SLOTS", "KINETIC_JOB_TTL_S",
    "KINETIC_STORE", "KINETIC_CACHE_AGE_S", "KINETIC_CACHE_SIZE_MB",
)  # fmt: skip

_RUN_MODULE = """
import runpy, sys
sys.path.append(sys.argv.pop())
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""
"""Run a module of kinetic. The folder that contains kinetic, such as ``site-packages``, comes after
the standard library, because it may contain old copies of modules such as ``pathlib``.
"""


class SupervisorError(OSError):
    """No supervisor runs, and none can be started."""


def connect(home: Path, environ: Mapping[str, str]) -> socket.socket:
    """Connect to the supervisor of *home*, and start it if needed; or raise `SupervisorError`."""
    paths = SupervisorPaths(home)
    deadline = time.monotonic() + START_S
    pause = 0.0
    for _ in range(MAX_STARTS):
        try:
            return _dial(paths)
        except NO_SUPERVISOR:
            pass
        except OSError as exc:
            raise _unusable_error(home, exc.strerror or str(exc), str(paths.socket)) from exc
        time.sleep(pause)  # first no pause, then growing pauses if new supervisors end at once
        pause = pause * 2 or 0.02
        if not _start(home, paths, environ, deadline):
            break
    raise SupervisorError(
        f"the supervisor of {home} can't be started, or ends at once; its log is {paths.own_log}"
    )


def _dial(paths: SupervisorPaths) -> socket.socket:
    """Return a socket that is connected to a running supervisor, or raise `OSError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(START_S)
        messages.connect(sock, os.fspath(paths.socket))
    except BaseException:
        sock.close()
        raise
    return sock


def _start(home: Path, paths: SupervisorPaths, environ: Mapping[str, str], deadline: float) -> bool:
    """Start a supervisor and wait until it listens; return False if *deadline* has passed."""
    try:
        make_folder(paths.state)
        log_fd = os.open(paths.own_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as exc:
        raise _unusable_error(home, exc.strerror or str(exc), str(exc.filename)) from exc
    environment = inherited_variables(environ, *_SETTINGS)
    environment["KINETIC_HOME"] = environ.get("KINETIC_HOME") or str(home)
    arguments = ["kinetic._supervisor", str(home), str(Path(__file__).parents[3])]
    with open(log_fd, "ab") as log:
        try:
            process = subprocess.Popen(
                # -S: a supervisor needs only the standard library, and kinetic.
                [sys.executable, "-S", "-P", "-c", _RUN_MODULE, *arguments],
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        except OSError as exc:
            raise SupervisorError(f"no supervisor can be started: {exc}") from exc
    with process:
        report = _read_report(process, deadline)
    if report is None:
        return False
    result: dict[str, str] = json.loads(report or "{}")
    if "error" in result:
        raise _unusable_error(home, result["error"], result["file"])
    return True


def _read_report(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """Return the report of a new supervisor, empty if there is none; None at the *deadline*."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
        process.kill()
        return None
    # The supervisor writes its report at once. The pipe may stay open: if another thread of this
    # program forks now, the new process inherits it.
    return os.read(process.stdout.fileno(), REPORT_BYTES)


def _unusable_error(home: Path, error: str, file: str) -> SupervisorError:
    return SupervisorError(
        f"{file}: {error}; jobs on this machine need a writable folder: "
        f"repair {home}, or set KINETIC_HOME to another folder"
    )


class ConnectionLost(ConnectionError):
    """The connection broke; the supervisor may have acted on requests without an answer."""


class Connection(asyncio.Protocol):
    """A connection to the supervisor, for concurrent requests or for the messages of a watch."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._decoder = messages.Decoder()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last_id = 0
        self._unsent = bytearray()
        self._events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # None: lost
        self._closed = asyncio.Event()
        self.lost = False
        self.supervisor = 0
        """The process ID of the supervisor, once it has answered the first message."""

    # --- what the loop calls -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport. (A method of `asyncio.Protocol`.)"""
        # uvloop's transport has another class.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass messages to the callers of `ask` and `event`. (A method of `asyncio.Protocol`.)"""
        try:
            received = self._decoder.feed(data)
        except messages.ChannelError:
            self.close()
            return
        for header, _ in received:
            if (request_id := header.get("id")) is None:
                self._events.put_nowait(header)
            elif (answer := self._answers.pop(request_id, None)) is not None and not answer.done():
                answer.set_result(header)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let all open calls of `ask` and `event` fail. (A method of `asyncio.Protocol`.)"""
        self.lost = True
        self._closed.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionLost("the local supervisor has ended"))
                answer.exception()  # otherwise asyncio logs it if the caller was cancelled
        self._answers.clear()
        self._events.put_nowait(None)

    # --- what the client calls -----------------------------------------------------------------

    def ask(self, header: Mapping[str, Any], body: bytes = b"") -> asyncio.Future[dict[str, Any]]:
        """Send a request; the future returns the answer, or raises `ConnectionLost`.

        Requests that are made in the same turn of the event loop are sent together.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[dict[str, Any]] = loop.create_future()
        if self.lost:
            answer.set_exception(ConnectionLost("the local supervisor has ended"))
            return answer
        self._last_id += 1
        self._answers[self._last_id] = answer
        self.send({**header, "id": self._last_id}, body)
        return answer

    def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a message that gets no answer."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += messages.encode(header, body)

    async def event(self) -> dict[str, Any]:
        """Return the next message of the watch, or raise `ConnectionLost`."""
        event = await self._events.get()
        if event is None:
            raise ConnectionLost("the local supervisor has ended")
        return event

    def close(self) -> None:
        """Send unsent messages, and drop the connection in the next turn of the event loop."""
        self._flush()
        if self._transport is not None:
            self._transport.abort()

    async def aclose(self) -> None:
        """Drop the connection, and wait until it is closed."""
        self.close()
        await self._closed.wait()

    def _flush(self) -> None:
        if self._unsent and self._transport is not None:
            self._transport.write(bytes(self._unsent))
            self._unsent.clear()


async def _greet(sock: socket.socket) -> tuple[Connection, dict[str, Any]]:
    """Return the connection over *sock*, and the supervisor's answer to the first message."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_unix_connection(Connection, sock=sock)
    try:
        hello = await connection.ask({"op": "hello", "protocol": VERSION})
        connection.supervisor = int(hello["pid"])
        return connection, hello
    except BaseException:
        connection.close()
        raise


async def open_connection(home: Path, environ: Mapping[str, str]) -> Connection:
    """Connect to the supervisor of the folder *home*; start a supervisor if none runs.

    Raises:
        Unavailable: The supervisor can't be reached.

    Cancelled:
        A supervisor may have started; it ends by itself when it is idle.
    """
    loop = asyncio.get_running_loop()
    for _ in range(5):
        dialing = loop.run_in_executor(None, connect, home, environ)
        try:
            sock = await asyncio.shield(dialing)
        except asyncio.CancelledError:
            dialing.add_done_callback(_close_socket)
            raise
        except OSError as exc:
            raise Unavailable(f"the local platform can't be used: {exc}") from exc
        try:
            connection, hello = await _greet(sock)
        except ConnectionLost:
            continue  # the supervisor was about to shut down
        if "error" in hello or tuple(hello["protocol"]) != VERSION:
            connection.close()
            raise Unavailable(
                f"the local supervisor of {home} (process {hello['pid']}) is of another version of "
                "kinetic; run `kinetic local stop`, which ends it and its jobs, and try again"
            )
        return connection
    raise Unavailable(f"the local supervisor of {home} ends as soon as it is started; see its log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A running supervisor: its process, its log, and its numbers of jobs and workers by phase.

    ``protocol`` is the version of its protocol. ``jobs`` and ``workers`` are empty if this client
    has another version of the protocol.
    """

    pid: int
    protocol: tuple[int, ...]
    log: str
    jobs: Mapping[str, int]
    workers: Mapping[str, int]


async def running(home: Path) -> Running | None:
    """Return the running supervisor of the folder *home*; None if none runs. This starts none."""
    paths, loop = SupervisorPaths(home), asyncio.get_running_loop()
    try:
        sock = await loop.run_in_executor(None, _dial, paths)
    except NO_SUPERVISOR:
        return None
    except OSError as exc:
        raise Unavailable(f"the local platform doesn't answer: {exc}") from exc
    try:
        connection, hello = await _greet(sock)
        jobs, workers = Counter[str](), Counter[str]()
        with contextlib.closing(connection):
            if tuple(hello["protocol"]) == VERSION:
                answer = await connection.ask({"op": "find", "names": [], "labels": {}})
                for job in answer["jobs"]:
                    counts = jobs if INDEX in job["labels"] else workers
                    counts[str(job["state"])] += 1
    except ConnectionLost:  # the supervisor was about to shut down
        return None
    return Running(
        pid=int(hello["pid"]),
        protocol=tuple(hello["protocol"]),
        log=str(paths.own_log),
        jobs=jobs,
        workers=workers,
    )


async def end(supervisor: Running) -> None:
    """Stop a supervisor and its jobs, and wait up to 30 s until its process has ended."""
    try:
        os.kill(supervisor.pid, signal.SIGTERM)
        async with asyncio.timeout(START_S):
            while True:
                os.kill(supervisor.pid, 0)
                await asyncio.sleep(0.05)
    except ProcessLookupError:
        return
    except TimeoutError as exc:
        raise Unavailable(
            f"the supervisor {supervisor.pid} has not ended after {START_S:g} s; "
            f"see {supervisor.log}"
        ) from exc


def _close_socket(dialing: asyncio.Future[socket.socket]) -> None:
    if not dialing.cancelled() and dialing.exception() is None:
        dialing.result().close()
