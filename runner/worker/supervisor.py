"""The connection of a worker on this machine to its supervisor.

The supervisor tells when the store may have changed, and its end is the worker's, too. The worker
tells which item it has taken, and its end.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..job.processes import MARK
from ..protocol import messages

TELL_PAUSE_S = 0.01
"""The least pause between two messages about items, in seconds: short items share a message.

After this time, the worker reports an item that still runs to the supervisor.
"""


class Supervisor:
    """The connection to the supervisor.

    ``has_slots`` says whether the worker may run items. ``asked_back`` says that the supervisor
    wants the slots after the current item, because another submission waits for them. ``gpus`` is
    the value of ``CUDA_VISIBLE_DEVICES`` for the slots that the worker got last; None: as it began.
    ``flush_at`` is when to call `flush`, by the clock; infinite if there is nothing to report.
    """

    def __init__(
        self, executor: str, *, single: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._executor = executor
        self._clock = clock
        self._single = single  # then the job that the supervisor knows is the item
        self.has_slots = True
        self.asked_back = False
        self.gpus: str | None = None
        self._decoder = messages.Decoder()
        # Items to report to the supervisor, with the beginning or the end of their output.
        self._running: tuple[int, int, int] | None = None
        self._ended: list[tuple[int, int, int | None]] = []
        self._told_at = -math.inf
        self._cause = ""  # why the worker can't go on
        self.flush_at = math.inf
        directory = os.environ.get(MARK, "").rpartition(":")[0]
        self._socket = socket.socket(socket.AF_UNIX)
        messages.connect(self._socket, f"{directory}/socket")
        self._send({"op": "worker", "executor": executor})

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

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
        changed = False
        for message, _ in self._decoder.feed(data):
            changed = changed or "news" in message
            if (slots := message.get("slots")) is not None:
                self.asked_back = not slots
            if "gpus" in message:  # otherwise the message only takes back that it asked
                self.has_slots, self.gpus = True, message["gpus"]
        return changed

    def give_back(self) -> None:
        """Give the slots back, and ask for others."""
        self.flush()
        self.has_slots = self.asked_back = False
        self._send({"op": "idle"})

    def started(self, index: int, attempt: int, output: int) -> None:
        """Note that an attempt begins, at *output* bytes of the worker's output file."""
        if self._single:
            return
        now = self._clock()
        if now >= self.flush_at:
            self.flush()
        self._running = index, attempt, output
        self.flush_at = min(self.flush_at, now + TELL_PAUSE_S)

    def ended(self, index: int, attempt: int, output: int | None) -> None:
        """Note that an attempt has its outcome; its output ends at *output* bytes, if it began."""
        if self._single:
            self._send({"op": "leaving", "executor": self._executor})
            return
        self._running = None  # the worker needn't report that it ran
        self._ended.append((index, attempt, output))
        self.flush_at = min(self.flush_at, self._told_at + TELL_PAUSE_S)

    def waits(self, cause: str) -> None:
        """Report why the worker can't go on; an empty *cause*: it goes on."""
        if cause != self._cause:
            self._cause = cause
            self._send({"op": "waits", "message": cause})

    def flush(self, *, urgent: bool = False) -> None:
        """Report which items began and ended; if *urgent*, clients get this immediately."""
        if self.flush_at == math.inf:
            return
        self._told_at, self.flush_at = self._clock(), math.inf
        message: dict[str, Any] = {"op": "items", "ended": self._ended}
        if self._running is not None:
            message["running"] = self._running
        if urgent:
            message["urgent"] = True
        self._running, self._ended = None, []
        self._send(message)

    def _send(self, header: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the end of the supervisor also ends the next wait
            self._socket.sendall(messages.encode(header))
