"""The runner's entry point: ``python3 -u remote_runner.py``, in a pod or in a local process.

With the argument ``{descriptor}``, it is the fork server of the supervisor that has the other end
of this socket; see `fork.fork_server`.

As a script, this module makes its folder the package ``kinetic_runner``, and removes
the folder from ``sys.path``. So no file in the folder can hide a module of the user.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import faulthandler
import importlib
import importlib.util
import io
import json
import os
import sys
import time
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any, NoReturn

MINIMUM_PYTHON = (3, 11)
EXIT_FINAL = 42
"""The same as `wire.EXIT_FINAL`; Python versions below `MINIMUM_PYTHON` can't import `wire`."""


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


def run_in_pod() -> int:
    """Carry out the pod's order, or print what its image lacks; return the exit code."""
    version = ".".join(map(str, sys.version_info[:3]))
    problem = ""
    if sys.version_info < MINIMUM_PYTHON:
        submitted = json.loads(os.environ["KINETIC_ORDER"])["client"].get("python")
        problem = f"has Python {version}, and the job was submitted from Python {submitted}"
    else:
        try:
            pod: Any = importlib.import_module("kinetic_runner.pod.main")
        except ImportError as exc:
            problem = (
                f"lacks {exc.name}; install cloudpickle, google-cloud-storage and absl-py into it"
            )
        else:
            code: int = pod.main()
            return code
    sys.stderr.write(f"kinetic: this job cannot be run: its image {problem}\n")
    return EXIT_FINAL


def main() -> int:
    """Carry out the order in the descriptor of ``KINETIC_ORDER_FD``, or else the pod's order."""
    folder = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    packages = os.environ.pop("KINETIC_RUNNER_PACKAGES", "")
    if packages:  # `pod.bootstrap` has installed them; what the image has comes first
        sys.path.append(packages)
    load_runner(folder)
    if len(sys.argv) > 1:
        fork_server: Any = importlib.import_module("kinetic_runner.fork.fork_server")
        fork_server.serve(int(sys.argv[1]))
        return 0
    if "KINETIC_ORDER_FD" not in os.environ:
        return run_in_pod()
    with open(int(os.environ.pop("KINETIC_ORDER_FD")), "rb") as file:
        message = file.read()
    child: Any = importlib.import_module("kinetic_runner.fork.child")
    code: int = child.run_here(*child.read_message(message))
    return code


def enable_crash_tracebacks() -> None:
    """Print the Python traceback if this process crashes in C.

    Python 3.14 would also print the C stack. It is long, and the client shows only the last lines
    of a log.
    """
    if sys.version_info >= (3, 14):
        faulthandler.enable(c_stack=False)
    else:
        faulthandler.enable()


EXIT_LIMIT_S = 8.0
"""How long, in seconds, the interpreter may take to exit after the function has returned."""

HELPERS_LIMIT_S = 0.5
"""How long, in seconds, the exit waits for the helper processes of `multiprocessing`.

They don't end while a process that the job has forked still runs.
"""

REPORT_EXIT_S = 0.1
"""If the exit takes longer (seconds), the job tells the supervisor that its function returned."""


def exit_process(code: int, report: Callable[[], object] | None = None) -> NoReturn:
    """Exit as an interpreter does, but don't wait for the user's threads.

    Callbacks of `threading` run first, because pools of workers need this order. Then the callbacks
    of `atexit` run. If they take longer than `REPORT_EXIT_S` seconds, this process tells the
    supervisor (or with *report*, its worker) that the job has ended, so that the client doesn't
    wait for them. After
    `EXIT_LIMIT_S` seconds the process exits without the remaining callbacks, and the supervisor
    kills the other processes of the job.
    """
    try:
        callbacks = _threading_callbacks()
        if callbacks or _has_exitfuncs():
            # Without a free thread, don't limit the exit.
            with contextlib.suppress(RuntimeError, MemoryError):
                _thread.start_new_thread(_limit_exit, (code, os.getpid(), report))
        for callback in reversed(callbacks):
            try:
                callback()
            except Exception as exc:
                sys.excepthook(type(exc), exc, exc.__traceback__)
        _run_exitfuncs()
        if "multiprocessing.resource_tracker" in sys.modules:
            import threading  # `multiprocessing` has loaded it

            stopping = threading.Thread(target=_stop_helpers, daemon=True)
            stopping.start()
            stopping.join(HELPERS_LIMIT_S)
    finally:
        try:
            flush()
        finally:
            os._exit(code)


def exits_at_once() -> bool:
    """Return whether `exit_process` has nothing to do but to flush the streams."""
    has_helpers = "multiprocessing.resource_tracker" in sys.modules
    return not (_threading_callbacks() or _has_exitfuncs() or has_helpers)


def _stop_helpers() -> None:
    """End the helper processes of `multiprocessing`, and wait for them."""
    # They remove shared memory and semaphores that the job has left. They can't do so later: the
    # supervisor kills the other processes of the job when this process has ended.
    for module, helper in (
        ("multiprocessing.forkserver", "_forkserver"),
        ("multiprocessing.resource_tracker", "_resource_tracker"),
    ):
        stop = getattr(getattr(sys.modules.get(module), helper, None), "_stop", None)
        if stop is not None:
            with contextlib.suppress(OSError):  # the helper has ended, or its socket was removed
                stop()


def _threading_callbacks() -> list[Callable[[], object]]:
    """Return the callbacks that libraries registered with ``threading._register_atexit``."""
    return [*getattr(sys.modules.get("threading"), "_threading_atexits", ())]


def _has_exitfuncs() -> bool:
    """Return whether a library has a callback of `atexit` that does anything."""
    # `logging`, which cloudpickle loads, always has one: it flushes the handlers, and does nothing
    # if there is only the handler of last resort.
    handlers: Sized = getattr(sys.modules.get("logging"), "_handlerList", ())
    return _count_exitfuncs() > (len(handlers) == 1)


def _limit_exit(code: int, job_pid: int, report: Callable[[], object] | None) -> None:
    """Report an exit that takes long, and end the process after `EXIT_LIMIT_S` seconds."""
    time.sleep(REPORT_EXIT_S)
    if os.getpid() == job_pid:
        try:
            if report is None:
                processes: Any = importlib.import_module("kinetic_runner.job.processes")
                processes.tell_supervisor("leaving")
            else:
                report()
        except Exception:  # the supervisor notices later that the process has ended
            pass
    time.sleep(EXIT_LIMIT_S - REPORT_EXIT_S)
    if os.getpid() == job_pid:
        sys.stderr.write(
            "kinetic: the function has returned, but its process still runs after "
            f"{EXIT_LIMIT_S:g} s; kinetic ends it, and all processes that it has started\n"
        )
        flush()
        os._exit(code)


def prepare_streams() -> None:
    """Let a client follow standard output and standard error in the log."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # With line buffering, a client can follow the log; with an error handler, `print` can't
            # fail on a character.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


def flush() -> None:
    """Flush standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


_run_exitfuncs: Callable[[], None] = getattr(atexit, "_run_exitfuncs")  # noqa: B009
_count_exitfuncs: Callable[[], int] = getattr(atexit, "_ncallbacks")  # noqa: B009


if __name__ == "__main__":
    if "KINETIC_ORDER_FD" in os.environ:
        prepare_streams()
    exit_process(main())
