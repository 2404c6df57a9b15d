"""One container: a process in a session of its own, its log, and what kubelet says of it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.agent.log import Log

Json = dict[str, Any]

DRAIN_S = 1.0
"""Seconds that what a process left in its pipe may take, when somebody else keeps it open."""

WATCH_S = 0.1
LONGEST_MESSAGE = 4096
EPOCH = "1970-01-01T00:00:00Z"


def clock() -> str:
    """The time as Kubernetes writes it."""
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"


class Container:
    """Runs, perhaps several times; ``state`` and ``last`` are in the words of the API."""

    def __init__(self, spec: Json, folder: Path) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.state: Json = {"waiting": {"reason": "ContainerCreating"}}
        self.last: Json = {}
        self.restarts = 0
        self.logs: list[Log] = []
        self.started = False

        self._folder = folder
        self._pid: int | None = None
        self._oom = False

    @property
    def running(self) -> bool:
        return "running" in self.state

    @property
    def exit_code(self) -> int | None:
        """None until it has ended."""
        ended = self.state.get("terminated")
        return None if ended is None else ended["exitCode"]

    def wait_for(self, reason: str, message: str = "") -> None:
        """It waits, for this reason."""
        self.state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}

    def again(self, message: str) -> None:
        """It ended and is to be started again, a little later."""
        self.last = self.state
        self.restarts += 1
        self.state = {"waiting": {"reason": "CrashLoopBackOff", "message": message}}

    def lost(self) -> None:
        """It was never started, and will not be."""
        message = "The container could not be located when the pod was terminated"
        ended = {"reason": "ContainerStatusUnknown", "message": message, "exitCode": 137}
        self.state = {"terminated": {**ended, "startedAt": None, "finishedAt": None}}

    async def run(
        self, command: Sequence[str], env: Mapping[str, str], work: Path, begun: asyncio.Event
    ) -> None:
        """Start it and wait until it has ended; *begun* is set once it runs."""
        log = Log(self._folder / f"{self.name}.{len(self.logs)}.log")
        self.logs.append(log)
        message = self._folder / f"{self.name}.termination"
        message.write_bytes(b"")
        read, write = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                cwd=work,
                env={**env, "KINETIC_TERMINATION_LOG": str(message)},
                start_new_session=True,
            )
        except OSError as error:
            os.close(read)
            log.close()
            self._never_started(command[0], error)
            return
        finally:
            os.close(write)
        self._pid, self._oom, self.started = process.pid, False, True
        began = clock()
        identity = f"containerd://{uuid.uuid4().hex}"
        self.state = {"running": {"startedAt": began}}
        begun.set()
        watched = asyncio.create_task(self._watch_memory(process.pid), name="memory")
        kept = asyncio.create_task(self._keep(read, log), name="log")
        try:
            code = await process.wait()
        finally:
            self.kill()  # who is the first in a container takes the others along
            self._pid = None
            watched.cancel()
            await asyncio.wait({watched})
            await asyncio.wait({kept}, timeout=DRAIN_S)
            kept.cancel()
            await asyncio.wait({kept})
            log.close()
        self._ended(128 - code if code < 0 else code, began, identity, self._message(message, code))

    def _ended(self, code: int, began: str, identity: str, message: str) -> None:
        oom = self._oom and code == 137
        reason = "OOMKilled" if oom else "Error" if code else "Completed"
        self.state = {
            "terminated": {
                "exitCode": code,
                "reason": reason,
                "startedAt": began,
                "finishedAt": clock(),
                "containerID": identity,
                **({"message": message} if message else {}),
            }
        }

    def _never_started(self, program: str, error: OSError) -> None:
        missing = isinstance(error, FileNotFoundError) and "/" not in program
        why = "executable file not found in $PATH" if missing else str(error.strerror).lower()
        message = (
            "failed to create containerd task: failed to create shim task: OCI runtime create "
            "failed: runc create failed: unable to start container process: "
            f'exec: "{program}": {why}: unknown'
        )
        ended = {"exitCode": 128, "reason": "StartError", "message": message}
        self.state = {"terminated": {**ended, "startedAt": EPOCH, "finishedAt": clock()}}

    def _message(self, path: Path, code: int) -> str:
        message = b""
        with contextlib.suppress(OSError):
            message = path.read_bytes()[:LONGEST_MESSAGE]
        wanted = self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError"
        if not message and code and wanted:
            return self.logs[-1].last()
        return message.decode(errors="replace")

    async def _keep(self, read: int, log: Log) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        pipe = os.fdopen(read, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while data := await reader.read(64 * 1024):
                log.feed(data)
        finally:
            transport.close()

    # Ending it

    def terminate(self) -> None:
        """SIGTERM, to the first process, as the runtime sends it."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)

    def kill(self, *, oom: bool = False) -> None:
        """SIGKILL, to all of it."""
        if self._pid is not None:
            self._oom = self._oom or oom
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)

    async def _watch_memory(self, pid: int) -> None:
        limits: Mapping[str, str] = (self.spec.get("resources") or {}).get("limits") or {}
        if "memory" not in limits or sys.platform != "linux":
            return
        limit = quantity(limits["memory"])
        while True:
            if resident(pid) > limit:
                self.kill(oom=True)
            await asyncio.sleep(WATCH_S)


def resident(pid: int) -> int:
    """Bytes of memory that a process and its descendants have to themselves, on Linux."""
    total = 0
    with contextlib.suppress(OSError, ValueError):
        _, held, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        total += (int(held) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(resident(int(one)) for one in (task / "children").read_text().split())
    return total


UNITS = {
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "m": 10**-3,
}  # fmt: skip


def quantity(text: str) -> float:
    """``1Gi`` in bytes, ``500m`` as a half."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text)
