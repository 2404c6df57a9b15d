"""The protocol between clients and the supervisor: the fields of messages, and files of both.

A client sends ``hello`` first. An answer has the ``id`` of its request; answers come in any order.
After ``watch``, a client also gets messages without an ``id``, with the states of changed jobs.
"""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinetic._runner.protocol.messages import ChannelError, Decoder, Message, encode

RECEIVE_BYTES = 256 * 1024


class Stream:
    """One end of a connection that never blocks; its owner polls `fileno`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._out = bytearray()

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._sock.fileno()

    @property
    def unsent(self) -> int:
        """The number of queued bytes that `flush` has not sent yet."""
        return len(self._out)

    def flush(self) -> None:
        """Send what the socket takes without blocking; raise `OSError` if the peer has ended."""
        while self._out:
            try:
                sent = self._sock.send(self._out)
            except BlockingIOError:
                return
            del self._out[:sent]

    def read(self) -> bytes | None:
        """Return the bytes that have arrived; None if the peer has disconnected."""
        try:
            return self._sock.recv(RECEIVE_BYTES) or None
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError:
            return None

    def close(self) -> None:
        """Close the connection and drop unsent bytes."""
        self._sock.close()


class Channel(Stream):
    """The supervisor's end of the connection to a client."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._decoder = Decoder()

    def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Queue a message for the next `flush`."""
        self._out += encode(header, body)

    def receive(self) -> list[Message] | None:
        """Return the messages that have arrived; None if the peer has disconnected."""
        data = self.read()
        return self._decoder.feed(data) if data is not None else None


VERSION = (1, 8)
"""Major and minor version. Both sides need the same version: both use the runner's files.

Raise the minor version when the runner's files move. Each major version has its own socket path.
"""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class OrderError(ValueError):
    """The supervisor can't accept this job."""


_NAMES, _LABELS = (list, type(None)), (dict, type(None))
_COUNT, _SECONDS = (int, type(None)), (int, float, type(None))
_TYPES: Mapping[str, tuple[type, ...]] = {
    "id": (int,), "protocol": (list,), "name": (str,), "executor": (str,), "names": _NAMES,
    "labels": _LABELS, "command": (list,), "runner": (str,), "edition": (str,), "fresh": (bool,),
    "owned": (bool,), "cpus": (int,), "gpus": (int,), "memory_bytes": _COUNT, "timeout": _SECONDS,
    "start_timeout": _SECONDS, "start_allowance": (int, float), "grace": (int, float),
    "project": (str,), "output_dir": (str,), "store": (str,), "scope": (str,),
    "round": (int,), "workers": (int,), "ended": (list,), "running": (list,), "urgent": (bool,),
    "single": (bool,), "keep_logs": (bool,), "message": (str,),
}  # fmt: skip
_ELEMENTS: Mapping[str, type] = {"protocol": int, "ended": list, "running": int}
_LIMITS = (
    "cpus", "gpus", "memory_bytes", "timeout", "start_timeout", "start_allowance", "grace",
)  # fmt: skip


def check(header: Mapping[str, Any]) -> None:
    """Check the types of a request's fields, or raise `ChannelError`."""
    for name, types in _TYPES.items():
        if name not in header:
            continue
        value: Any = header[name]
        kind: Any = value.__class__
        elements: Iterable[Any] = value if kind is list else value.values() if kind is dict else ()
        element_type = _ELEMENTS.get(name, str)
        if kind not in types or any(type(element) is not element_type for element in elements):
            raise ChannelError(f"the request's {name} has a wrong type: {value!r:.100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHeader:
    """The fields of a ``launch`` message that the supervisor reads; its body is for the runner.

    ``command`` starts the job's interpreter; ``runner`` is the folder of the runner's code, and
    ``edition`` differs if that code or the interpreter's packages differ. A ``fresh`` job gets a
    new interpreter, not a fork. ``timeout``, ``start_timeout``, ``start_allowance`` and ``grace``
    are seconds. An ``owned`` job ends with the connection over which it was launched. ``project``
    is the digest of the job's code. ``store`` and ``scope`` say where the job's objects are. The
    process of a ``single`` job is a worker with one item. ``worker`` names a worker; it is empty
    for another process, and in messages.
    """

    name: str
    labels: Mapping[str, str]
    command: tuple[str, ...]
    runner: str
    edition: str
    fresh: bool = False
    cpus: int = 1
    gpus: int = 0
    memory_bytes: int | None = None
    timeout: float | None = None
    start_timeout: float | None = None
    start_allowance: float = 0.0
    grace: float = 30.0
    owned: bool = False
    project: str = ""
    output_dir: str = ""
    store: str = ""
    scope: str = ""
    single: bool = False
    worker: str = ""

    def fields(self) -> dict[str, Any]:
        """Return the fields of a message."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "worker"}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> JobHeader:
        """Read a ``launch`` message that passed `check`, or raise `OrderError`."""
        known: dict[str, Any] = {name: fields[name] for name in cls.__slots__ if name in fields}
        known.pop("worker", None)  # the supervisor alone names workers
        try:
            known["command"] = tuple(known["command"])
            header = cls(**known)
        except (KeyError, TypeError) as exc:
            raise OrderError(f"the job is incomplete: {exc}") from exc
        if not _NAME.fullmatch(header.name):
            raise OrderError(
                f"{header.name!r} isn't a valid name for a job: use at most 200 letters, digits, "
                "dots, dashes and underscores, the first a letter or digit"
            )
        if not header.command:
            raise OrderError("the job names no interpreter")
        for name in _LIMITS:
            limit: float = getattr(header, name) or 0
            if not 0 <= limit < math.inf:
                raise OrderError(f"{name}={limit!r} isn't a finite number of at least 0")
        return header


def edition(runner: Path) -> str:
    """Return a version of the runner's code: the time of the latest change of a file, in hex."""
    latest = max((file.stat().st_mtime_ns for file in runner.rglob("*.py")), default=0)
    return f"{latest:x}"


_PASSED_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TMPDIR", "TZ")


def inherited_variables(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return the variables that the supervisor and its parents inherit, and those of *names*."""
    return {
        name: value
        for name, value in environ.items()
        if name in _PASSED_VARIABLES or name in names or name.startswith("LC_")
    }


class SupervisorPaths:
    """The files of one supervisor; the path of ``state`` has the protocol's major version."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.cache = home / "cache"  # unpacked code and data that jobs share, by digest
        self.state = home / "local" / f"v{VERSION[0]}"  # private; all that follows is in it
        self.socket = self.state / "socket"
        self.lock = self.state / "lock"  # held while the supervisor runs
        self.starting = self.state / "starting"  # a lock, held while a supervisor starts or stops
        self.own_log = self.state / "supervisor.log"  # the standard error, also of warm parents
        self.logs = self.state / "logs"
        self.work = self.state / "work"  # a folder for each running job
        self.trash = self.state / "trash"  # folders that a helper process removes
        self.spares = self.state / "spares"  # folders of ended jobs, which later jobs reuse

    def log(self, name: str) -> Path:
        """Return the log file of a job."""
        return self.logs / f"{name}.log"
