"""A worker on this machine: its supervisor starts it, and tells it what happens.

The worker and the supervisor share a connection. The supervisor tells when the store may have
changed, and its end is the worker's, too. The worker tells which item it has taken, and its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any

from ..job import workspace
from ..job.processes import LINUX, MARK
from ..protocol import directory_urls, wire
from ..protocol.workers import Crew, WorkerId
from ..stores.objects import open_store
from .main import Submission, Worker


def main(
    name: str,
    key: bytes,
    executor: str,
    submission: bytes,
    place: workspace.JobPlace,
    memory_bytes: int | None,
) -> int:
    """Run a worker in this process; return its exit code.

    Args:
        name: The text of its `WorkerId`.
        key: The key of the submission.
        executor: The supervisor's name of this process.
        submission: Two lines: an order without its item, and the crew.
        place: The directories of this worker.
        memory_bytes: The limit of an item's memory.
    """
    me = WorkerId.parse(name)
    if me is None:
        raise ValueError(f"{name!r} names no worker")
    order_line, crew_line = submission.decode().split("\n")
    order, crew = wire.Order.decode(order_line), Crew.decode(crew_line)
    base, group = crew.outputs, order.group_id
    worker = Worker(
        me,
        executor,
        open_store(order.store),
        Submission(
            order=order,
            key=key,
            terms=crew.terms,
            job_id=(lambda index: f"{group}-{index}") if group else (lambda index: order.job_id),
            output_dir=(lambda index: f"{base}/{index}") if group else (lambda index: base),
            isolation=crew.isolation,
            init=crew.init,
            recycle=crew.recycle,
            created=crew.created,
        ),
        place,
        channel=Supervisor(executor, order, single=crew.terms.single),
        memory_bytes=memory_bytes,
    )
    return worker.run()


class Supervisor:
    """The connection to the supervisor; see `main.Channel`."""

    def __init__(self, executor: str, order: wire.Order, *, single: bool) -> None:
        self._executor = executor
        self._order = order
        self._single = single  # then the job that the supervisor knows is the item
        self.has_slots = True
        self.asked_back = False
        self.gpus: str | None = None
        self._buffer = b""
        directory = os.environ.get(MARK, "").rpartition(":")[0]
        folder = os.open(directory, os.O_RDONLY)
        try:
            # A socket's path may have about 100 bytes, and a home directory's path may be longer.
            path = f"/proc/self/fd/{folder}" if LINUX else directory
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(f"{path}/socket")
        finally:
            os.close(folder)
        self._send({"op": "worker", "executor": executor})

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    def receive(self) -> bool | None:
        """Read messages. Return whether the store may have changed; None after the last one."""
        try:
            data = self._socket.recv(65536)
        except OSError:
            return None
        if not data:
            return None
        self._buffer += data
        changed = False
        while len(self._buffer) >= _HEAD.size:
            size, body_size = _HEAD.unpack_from(self._buffer)
            end = _HEAD.size + size + body_size
            if len(self._buffer) < end:
                break
            message = json.loads(self._buffer[_HEAD.size : _HEAD.size + size])
            self._buffer = self._buffer[end:]
            changed = changed or "news" in message
            if (slots := message.get("slots")) is not None:
                self.asked_back = not slots
            if "gpus" in message:  # otherwise the message only takes back that it asked
                self.has_slots, self.gpus = True, message["gpus"]
        return changed

    def give_back(self) -> None:
        """Give the slots back, and ask for others."""
        self.has_slots = self.asked_back = False
        self._send({"op": "idle"})

    def started(self, index: int, attempt: int, output: int) -> None:
        """Tell that an attempt begins, at *output* bytes of the worker's output file."""
        if not self._single:
            self._send({"op": "item", **self._item(index, attempt), "start": output})

    def ended(self, index: int, attempt: int, output: int | None) -> None:
        """Tell that an attempt has its outcome; its output ends at *output* bytes, if it began."""
        if self._single:
            self._send({"op": "leaving", "executor": self._executor})
        else:
            self._send({"op": "item", **self._item(index, attempt), "stop": output})

    def _item(self, index: int, attempt: int) -> dict[str, Any]:
        order, group = self._order, self._order.group_id
        outcome = wire.attempt_key(order.scope, index, attempt, "outcome")
        folder = directory_urls.directory_of(order.store)
        return {
            "name": f"{group}-{index}-{attempt}",
            "index": index,
            "attempt": attempt,
            "outcome": f"{folder}/{outcome}",
        }

    def _send(self, header: Mapping[str, Any]) -> None:
        """Send a message, framed as the supervisor's protocol says."""
        text = json.dumps(header).encode()
        with contextlib.suppress(OSError):  # the end of the supervisor also ends the next wait
            self._socket.sendall(_HEAD.pack(len(text), 0) + text)


_HEAD = struct.Struct("<II")  # the sizes of a message's header and body
