"""A call that runs on several hosts at once: the hosts, and what they tell each other.

The first host claims the attempt, and its value is the call's. If another host fails first, it
stores the failure as the outcome. Every host watches for the outcome, which ends its call.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..job_log import say
from ..pauses import pauses
from ..protocol import outcomes, wire
from ..protocol.spool import Spooled
from .attempt import Invocation
from .processes import Stopped

if TYPE_CHECKING:
    from ..stores.objects import Objects

PORT = 8476
"""JAX's port on the first host, unless its address names a port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The number of hosts, the index of this host, and the address of the first host."""

    count: int
    index: int
    coordinator: str

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Hosts | None:
        """Read the environment; None for a single host without a LeaderWorkerSet.

        Raises:
            ValueError: The environment is incomplete.
        """
        count = int(environ.get("KINETIC_HOSTS") or environ.get("LWS_GROUP_SIZE") or 1)
        if count < 2 and not environ.get("KINETIC_LWS"):  # such a set restarts its hosts
            return None
        names = ("KINETIC_HOST", "LWS_WORKER_INDEX", "JOB_COMPLETION_INDEX")
        index = next((environ[name] for name in names if environ.get(name)), "")
        address = environ.get("KINETIC_COORDINATOR") or environ.get("LWS_LEADER_ADDRESS") or ""
        if not index or not address or not 0 <= int(index) < count:
            raise ValueError(
                f"this is one of {count} hosts, but the environment lacks its index or the "
                "first host's address (KINETIC_HOST, KINETIC_COORDINATOR)"
            )
        coordinator = address if ":" in address else f"{address}:{PORT}"
        return cls(count=count, index=int(index), coordinator=coordinator)

    @property
    def is_first(self) -> bool:
        """Whether this host claims the attempt and returns its value."""
        return self.index == 0

    @property
    def name(self) -> str:
        """The name of this host in messages."""
        return f"host {self.index} of {self.count}"

    def join(self) -> None:
        """Let JAX connect the hosts, if JAX is installed and ``KINETIC_JAX`` isn't ``0``.

        Raises:
            Exception: JAX doesn't find all hosts within ten minutes.
        """
        if (
            self.count < 2
            or importlib.util.find_spec("jax") is None
            or os.environ.get("KINETIC_JAX") == "0"
        ):
            return
        jax: Any = importlib.import_module("jax")
        bind: dict[str, str] = {}
        if self.is_first and set(self.coordinator) <= set("0123456789.:"):
            # Without this, JAX would listen on all addresses.
            bind["coordinator_bind_address"] = self.coordinator
        jax.distributed.initialize(
            coordinator_address=self.coordinator,
            num_processes=self.count,
            process_id=self.index,
            initialization_timeout=600,
            **bind,
        )


class HostCall(Invocation):
    """The call on one of several hosts; only the first host's value is kept."""

    hosts: Hosts
    watch: Watch

    def run(self) -> tuple[wire.Outcome, Spooled]:
        """Make the call; during it, watch whether another host ends the attempt.

        The first host waits for the success of all others before it returns its value.
        """
        try:
            outcome, body = super().run()
            # The other hosts of a pruned attempt run on until they see its outcome.
            is_awaited = self.hosts.is_first and outcome.reason != wire.PRUNED
            if outcome.kind is wire.Kind.VALUE and is_awaited:
                self._phase = "waiting for the other hosts"
                waits = pauses(0.05, 1.0)
                while not self.watch.all_done(self.hosts.count):
                    time.sleep(next(waits))
                    if self._stopping.requested:
                        return self._encode_stop(Stopped())
            return outcome, body
        finally:
            self.watch.stop()

    def _join_hosts(self) -> None:
        self._phase = "joining the hosts"
        self.watch.start()
        self.hosts.join()

    def _encode_value(self, value: Any) -> tuple[wire.Outcome, Spooled]:
        if self.hosts.is_first:
            return super()._encode_value(value)
        return self._outcome(wire.Kind.VALUE, None), Spooled(b"", "", 0)

    def _host_position(self) -> tuple[int, int]:
        return self.hosts.index, self.hosts.count

    def _add_log(self, text: outcomes.ErrorText) -> outcomes.ErrorText:
        text = super()._add_log(text)
        return replace(text, traceback=f"On {self.hosts.name}:\n{text.traceback}")


class Watch:
    """Check regularly whether another host has ended the attempt.

    In that case call *on_end*, and send SIGTERM to this process.
    """

    def __init__(
        self, order: wire.Order, objects: Objects, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self._order = order
        self._objects = objects
        self._on_end = on_end
        self._finished = threading.Event()

    def start(self) -> None:
        """Start a thread that checks, because the call may wait for a host that has failed."""
        threading.Thread(target=self._check_regularly, name="kinetic-hosts", daemon=True).start()

    def all_done(self, count: int) -> bool:
        """Return whether every host but the first has succeeded, as far as the store answers."""
        names = [self._order.part_name(host_done(index)) for index in range(1, count)]
        try:
            return len(self._objects.look_up(names)) == len(names)
        except TimeoutError as exc:
            say(str(exc))
            return False

    def stop(self) -> None:
        """End the checks: this host has finished."""
        self._finished.set()

    def _check_regularly(self) -> None:
        for pause in pauses(0.5, longest_s=5.0):
            if self._finished.wait(pause):
                return
            try:
                is_closed = self._objects.exists(self._order.part_name("outcome"))
            except OSError as exc:
                say(str(exc))
                continue
            if is_closed and not self._finished.is_set():
                say("another host has ended this attempt")
                self._on_end()
                os.kill(os.getpid(), signal.SIGTERM)
                return


def host_done(index: int) -> str:
    """Return the name of the object that marks a host's success; see `wire.attempt_key`."""
    return f"host-{index}.done"
