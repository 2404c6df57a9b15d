"""A job on several hosts at once: who leads, how they find each other, and how one ends for all.

The first host claims and commits, as the only one of a single job does. The
others run the same call beside it. Whichever host fails commits that at once:
the attempt has ended then, and every host looks whether it has.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import results, wire
from .invoke import Invocation
from .objects import Objects
from .stopping import Stopped

__all__ = ["HostCall", "Hosts", "Watch", "claimant", "done"]

PORT = 8476
"""Where JAX looks for its coordinator, unless the address says so."""

JOIN_S = 600
CLAIM_S = 600.0
LOOK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """How many hosts there are, which of them this is, and where the first one listens."""

    count: int
    index: int
    coordinator: str

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Hosts | None:
        """What the environment says; None for a job on a single host.

        Raises:
            ValueError: It says too little.
        """
        count = int(environ.get("KINETIC_HOSTS") or environ.get("LWS_GROUP_SIZE") or 1)
        if count < 2 and not environ.get("KINETIC_LWS"):  # which starts its pods again
            return None
        names = ("KINETIC_HOST", "LWS_WORKER_INDEX", "JOB_COMPLETION_INDEX")
        index = next((environ[name] for name in names if environ.get(name)), "")
        where = environ.get("KINETIC_COORDINATOR") or environ.get("LWS_LEADER_ADDRESS") or ""
        if not index or not where or not 0 <= int(index) < count:
            raise ValueError(
                f"this is one of {count} hosts, but the environment does not say which, or where "
                "the first one is (KINETIC_HOST, KINETIC_COORDINATOR)"
            )
        address = where if ":" in where else f"{where}:{PORT}"
        return cls(count=count, index=int(index), coordinator=address)

    @property
    def leads(self) -> bool:
        """Whether this is the host that claims, and whose value counts."""
        return self.index == 0

    @property
    def name(self) -> str:
        """For people."""
        return f"host {self.index} of {self.count}"

    def join(self) -> None:
        """Make the hosts one for JAX, if it is there and was not told otherwise.

        Raises:
            Exception: They do not find each other within ten minutes.
        """
        if (
            self.count < 2
            or importlib.util.find_spec("jax") is None
            or os.environ.get("KINETIC_JAX") == "0"
        ):
            return
        jax: Any = importlib.import_module("jax")
        bind: dict[str, str] = {}
        if self.leads and set(self.coordinator) <= set("0123456789.:"):
            bind["coordinator_bind_address"] = self.coordinator  # else it would take all addresses
        jax.distributed.initialize(
            coordinator_address=self.coordinator,
            num_processes=self.count,
            process_id=self.index,
            initialization_timeout=JOIN_S,
            **bind,
        )


class HostCall(Invocation):
    """The call on one of several hosts. What a host returns that does not lead is not kept."""

    hosts: Hosts
    watch: Watch

    def watched(self) -> tuple[wire.Outcome, results.Stored]:
        """Make the call, and look meanwhile whether another host has ended it.

        The host that leads has its value when all the others have ended well, too.
        """
        try:
            outcome, body = self.run()
            if outcome.kind is wire.Kind.VALUE and self.hosts.leads:
                self._phase = "waiting for the other hosts"
                pause = 0.05
                while not self.watch.all_done(self.hosts.count):
                    time.sleep(pause)
                    pause = min(1.0, pause * 1.5)
                    if self._stopping.requested:
                        return self._stopped(Stopped())
            return outcome, body
        finally:
            self.watch.stop()

    def _join(self) -> None:
        self._phase = "joining the hosts"
        self.watch.start()
        self.hosts.join()

    def _encoded(self, value: Any) -> tuple[wire.Outcome, results.Stored]:
        if self.hosts.leads:
            return super()._encoded(value)
        return self._outcome(wire.Kind.VALUE), results.Stored(b"", "", 0)

    def _place(self) -> tuple[int, int]:
        return self.hosts.index, self.hosts.count

    def _worded(self, text: results.ErrorText) -> results.ErrorText:
        text = super()._worded(text)
        return replace(text, traceback=f"On {self.hosts.name}:\n{text.traceback}")


class Watch:
    """Looks now and then whether the attempt has ended by what another host did."""

    def __init__(self, order: wire.Assignment, objects: Objects, ended: Callable[[], None]) -> None:
        self._place = (order.scope, order.index, order.attempt)
        self._name = wire.attempt_key(*self._place, "outcome")
        self._objects = objects
        self._ended = ended
        self._over = threading.Event()

    def start(self) -> None:
        """Begin, in a thread of its own: what the hosts wait for may never come."""
        threading.Thread(target=self._look, name="kinetic-hosts", daemon=True).start()

    def all_done(self, count: int) -> bool:
        """Whether every host but the first has said that it has ended well."""
        names = [wire.attempt_key(*self._place, done(index)) for index in range(1, count)]
        return len(self._objects.look_up(names)) == len(names)

    def stop(self) -> None:
        """The own part is over."""
        self._over.set()

    def _look(self) -> None:
        pause = 0.5
        while not self._over.wait(pause):
            pause = min(LOOK_S, pause * 1.5)
            try:
                there = self._objects.exists(self._name)
            except OSError as exc:
                print(f"kinetic: {exc}", file=sys.stderr)
                continue
            if there and not self._over.is_set():
                print("kinetic: another host has ended this attempt", file=sys.stderr)
                self._ended()
                os.kill(os.getpid(), signal.SIGTERM)
                return


def done(index: int) -> str:
    """What a host leaves when its part has ended well; see `wire.attempt_key`."""
    return f"host-{index}.done"


def claimant(name: str, objects: Objects, patience: float = CLAIM_S) -> str:
    """Who has made the claim *name*; waits until somebody has. Empty: nobody did in time."""
    end, pause = time.monotonic() + patience, 0.1
    while True:
        try:
            return objects.stat(name).metadata.get("executor", "")
        except KeyError:
            if time.monotonic() > end:
                return ""
        time.sleep(pause)
        pause = min(2.0, pause * 1.5)
