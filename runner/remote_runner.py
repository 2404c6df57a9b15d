"""The runner's entry: ``python3 -u remote_runner.py``, in a pod or in a process of this machine.

Run as a script it knows its neighbours by their folder alone. They become the
package ``kinetic_runner``, and the folder leaves ``sys.path``, so that none of
their names can hide a module of the user's.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LEAST = (3, 11)
EXIT_FINAL = 42
"""As in `wire`, which an older Python cannot read."""


def load_runner(folder: Path) -> None:
    """Make *folder* importable as the package ``kinetic_runner``."""
    if "kinetic_runner" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "kinetic_runner", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["kinetic_runner"] = package
    spec.loader.exec_module(package)


def read_order(message: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Split the message that makes a process of this machine a job.

    It has three lines of JSON. The supervisor writes the first: where the job runs. The client
    writes the second, its key and environment, and the third, the order (`wire.Order.encode`).
    """
    local, secrets, order = message.split(b"\n", 2)
    return json.loads(local), json.loads(secrets), order


def in_a_pod() -> int:
    """Carry out a pod's order, or say what its image lacks for that."""
    here = ".".join(map(str, sys.version_info[:3]))
    words = ""
    if sys.version_info < LEAST:
        submitted = json.loads(os.environ["KINETIC_ORDER"]).get("client", {}).get("python")
        words = f"has Python {here}, and the job was submitted from Python {submitted}"
    else:
        try:
            pod: Any = importlib.import_module("kinetic_runner.pod.main")
        except ImportError as exc:
            words = (
                f"lacks {exc.name}; install cloudpickle, google-cloud-storage and absl-py into it"
            )
        else:
            code: int = pod.main()
            return code
    sys.stderr.write(f"kinetic: this job cannot be run: its image {words}\n")
    return EXIT_FINAL


def main() -> int:
    """Carry out an order: from the descriptor in ``KINETIC_ORDER_FD``, or that of a pod."""
    folder = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    load_runner(folder)
    if "KINETIC_ORDER_FD" not in os.environ:
        return in_a_pod()
    attempt: Any = importlib.import_module("kinetic_runner.job.attempt")
    workspace: Any = importlib.import_module("kinetic_runner.job.workspace")
    importlib.import_module("kinetic_runner.job.by_value").teach_multiprocessing()
    wire: Any = importlib.import_module("kinetic_runner.protocol.wire")
    with open(int(os.environ.pop("KINETIC_ORDER_FD")), "rb") as file:
        local, secrets, text = read_order(file.read())
    order = wire.Order.decode(text)
    os.environ.update(order.variables())
    site = workspace.Site(
        work=Path(local["work"]),
        cache=Path(local["cache"]),
        mounts=local["mounts"],
        kept=local["spares"],
    )
    code: int = attempt.main(order, bytes.fromhex(secrets["key"]), local["executor"], site)
    return code


def tell_crashes() -> None:
    """Where this process crashes in C, its log shall say in which line of Python.

    Not where in C, which Python 3.14 says, too: of what was printed before,
    the last lines of the log would show nothing.
    """
    if sys.version_info >= (3, 14):
        faulthandler.enable(c_stack=False)
    else:
        faulthandler.enable()


LEAVE_S = 8.0
"""How long the end of the interpreter may take once the function has returned."""

TELL_S = 0.1
"""After how much of this time the supervisor of the job hears that only the process is left."""


def leave(code: int) -> None:
    """End the process as an interpreter ends, but wait for no thread of the user's.

    Callbacks of `threading` run first, as pools of workers need it, then those of `atexit`.
    After `TELL_S` seconds the supervisor hears that the job has ended, so that nobody waits for
    the callbacks. After `LEAVE_S` seconds the process ends without the rest, and the other
    processes of its job are killed with it.
    """
    try:
        callbacks = _threading_callbacks()
        if callbacks or _count_exitfuncs():
            import _thread  # no page of `threading` is touched

            try:  # noqa: SIM105 - `suppress` would touch more of the memory
                _thread.start_new_thread(_end_later, (code, os.getpid()))
            except (RuntimeError, MemoryError):  # a limit of the job's; its end is not bounded
                pass
        for callback in reversed(callbacks):
            try:
                callback()
            except Exception as exc:
                sys.excepthook(type(exc), exc, exc.__traceback__)
        _run_exitfuncs()
    finally:
        flush()
        os._exit(code)


def _threading_callbacks() -> list[Callable[[], object]]:
    """What libraries have registered with ``threading._register_atexit``."""
    return [*getattr(sys.modules.get("threading"), "_threading_atexits", ())]


def _end_later(code: int, owner: int) -> None:
    time.sleep(TELL_S)
    if os.getpid() == owner:
        try:  # noqa: SIM105 - `suppress` would touch more of the memory
            importlib.import_module("kinetic_runner.job.processes").tell_leaving()
        except Exception:  # whoever waits for the job looks by itself, later
            pass
    time.sleep(LEAVE_S - TELL_S)
    if os.getpid() == owner:
        sys.stderr.write(
            f"kinetic: the function has ended, but its process did not end within {LEAVE_S:g} s: "
            "something that it started still runs, and is killed\n"
        )
        flush()
        os._exit(code)


def flush() -> None:
    """Write out what was printed."""
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 - `suppress` would touch more of the memory
            stream.flush()
        except (OSError, ValueError):
            pass


_run_exitfuncs: Callable[[], None] = getattr(atexit, "_run_exitfuncs")  # noqa: B009
_count_exitfuncs: Callable[[], int] = getattr(atexit, "_ncallbacks")  # noqa: B009


if __name__ == "__main__":
    leave(main())
