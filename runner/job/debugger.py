"""A debugger in the job, to which a user attaches before the function is called.

The debugger listens on the loopback of the job's machine or pod, on a port that the system
chooses. The job writes the port to an object beside its claim, the object that reserves the
attempt. If several hosts run one call, all of them wait until a debugger has attached to one host.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
import types
from typing import TYPE_CHECKING, Any

from ..job_log import say
from ..protocol import pickles, wire

if TYPE_CHECKING:
    from ..stores.objects import Objects
    from .workspace import JobPlace

LOOPBACK = "127.0.0.1"
ATTACHED = "debug-begun"
"""The object by which a host tells the others that a debugger is attached to it."""

PACKAGE = "debugpy"
CLOUDPICKLE_MODULE = "cloudpickle.cloudpickle"


class DebuggerWait:
    """Wait for a debugger on the host with the index *host*, one of *hosts*."""

    def __init__(
        self, order: wire.Order, objects: Objects, place: JobPlace, host: int, hosts: int
    ) -> None:
        self._order = order
        self._objects = objects
        self._place = place
        self._root = _workspace(place)
        self._host = host
        self._hosts = hosts
        self._finished = threading.Event()
        self._give_up_message = ""
        self._debugpy: Any = None

    def listen(self) -> None:
        """Listen, and write the port to the store.

        Raises:
            RuntimeError: debugpy isn't installed.
            OSError: The object with the port can't be written.
        """
        self._debugpy = _load_debugpy(self._place)
        _, port = self._debugpy.listen((LOOPBACK, 0))
        sys.breakpointhook = self._debugpy.breakpoint
        name = self._order.part_name(wire.debugger_mark(self._host))
        metadata = {"port": str(port), "root": self._root, "project": self._order.root}
        if not self._objects.create(name, b"", metadata):
            self._objects.delete([name])  # an earlier process of the attempt has left the object
            self._objects.create(name, b"", metadata)

    def wait(self) -> None:
        """Return when a debugger has attached and is ready, or when the time limit has passed."""
        seconds = self._order.debug_s or 0.0
        if seconds > 0:
            say(f"waiting for a debugger, for {seconds:g} s at most")
            limiter = threading.Thread(
                target=self._limit_wait, name="kinetic-debugger", daemon=True
            )
            limiter.start()
            try:
                self._debugpy.wait_for_client()
            finally:
                self._finished.set()
        if self._give_up_message:
            say(self._give_up_message)
        elif self._hosts > 1:
            self._objects.create(self._order.part_name(ATTACHED), b"")

    def _limit_wait(self) -> None:
        """End the wait at its time limit, or when a debugger has attached to another host."""
        end = time.monotonic() + (self._order.debug_s or 0.0)
        attached = self._order.part_name(ATTACHED)
        while (left := end - time.monotonic()) > 0:
            if self._finished.wait(min(left, 1.0)):
                return
            with contextlib.suppress(OSError):  # the next check may succeed
                if self._hosts > 1 and self._objects.exists(attached):
                    message = "a debugger has attached to another host; the function starts"
                    break
        else:
            message = "no debugger has attached in time; the function starts without one"
        self._give_up_message = message
        while not self._finished.wait(0.05):
            try:
                self._debugpy.wait_for_client.cancel()
            except RuntimeError:
                continue  # `wait_for_client` has not started yet


def load(content: bytes, order: wire.Order, place: JobPlace) -> Any:
    """Unpickle a container, and give its code objects the file names that they have in the job.

    With the caller's file names, the debugger would find no file, and ignore all breakpoints.
    """
    caller_root, workspace = order.root.rstrip("/"), _workspace(place)

    def build_code(*parts: Any) -> types.CodeType:
        built = types.CodeType(*parts)
        file = os.path.normpath(os.path.join(order.stood, built.co_filename))
        if caller_root and file.startswith(f"{caller_root}/"):
            found = workspace + file[len(caller_root) :]
            if os.path.isfile(found):
                return built.replace(co_filename=found)
        return built

    class RelocatingUnpickler(pickles.Unpickler):
        def find_class(self, module: str, name: str, /) -> Any:
            found = super().find_class(module, name)
            if (module, name) != (CLOUDPICKLE_MODULE, "_builtin_type"):
                return found

            # cloudpickle creates each code object by ``_builtin_type("CodeType")(...)``.
            def resolve_builtin(kind: str) -> Any:
                return build_code if kind == "CodeType" else found(kind)

            return resolve_builtin

    return pickles.load(content, unpickler=RelocatingUnpickler)


def _workspace(place: JobPlace) -> str:
    return os.path.realpath(os.path.join(place.work, "workspace"))


def _load_debugpy(place: JobPlace) -> Any:
    """Import debugpy; if it is missing, install it first in a container that only this job uses."""
    # Without this, debugpy prints a warning about frozen modules.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as exc:
        error: Exception = exc
    if place.exclusive:  # no other job uses this interpreter
        try:
            requirements: Any = importlib.import_module(".requirements", __package__)
            requirements.add_package(PACKAGE, os.path.join(place.work, PACKAGE))
            return importlib.import_module(PACKAGE)
        except (ImportError, OSError, RuntimeError) as exc:
            error = exc
    raise RuntimeError(
        f"debug=True needs debugpy, which isn't installed where the job runs ({error}); "
        f"{place.install_advice(PACKAGE)}"
    ) from error
