"""Finding the supervisor, and starting one when there is none. Blocking; for a worker thread."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinetic._local.places import Places
from kinetic._runner.private import make_folder

__all__ = ["SupervisorError", "connect"]

STARTS = 6
START_S = 30.0
"""How long a supervisor may take until it listens."""

_PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TMPDIR", "TZ",
    "CUDA_VISIBLE_DEVICES", "KINETIC_LOCAL_IDLE_S", "KINETIC_LOCAL_SLOTS", "KINETIC_JOB_TTL_S",
    "KINETIC_STORE", "KINETIC_CACHE_AGE_S", "KINETIC_CACHE_SIZE_MB",
)  # fmt: skip
_LONGEST_PATH = 100


class SupervisorError(OSError):
    """There is no supervisor, and none can be started."""


def connect(home: Path, environ: Mapping[str, str]) -> socket.socket:
    """A connection to the supervisor of *home*, which is started if need be.

    Raises:
        SupervisorError: That was not possible.
    """
    places = Places(home)
    until = time.monotonic() + START_S
    pause = 0.0
    for _ in range(STARTS):
        try:
            return _dial(places)
        except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
            pass  # none is there, or it went without a word
        except OSError as exc:
            raise _unusable(home, exc.strerror or str(exc), str(places.socket)) from exc
        time.sleep(pause)  # the one that was there, or was just started, has gone: rare
        pause = pause * 2 or 0.02
        if not _start(home, places, environ, until):
            break
    raise SupervisorError(
        f"the supervisor of {home} cannot be started, or does not live; its log is {places.diary}"
    )


def _dial(places: Places) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(START_S)
        path = os.fspath(places.socket)
        if len(os.fsencode(path)) <= _LONGEST_PATH:
            sock.connect(path)
        else:  # a socket's path is short, a home's may not be
            with tempfile.TemporaryDirectory(prefix="kinetic-") as folder:
                os.symlink(places.state, f"{folder}/s")
                sock.connect(f"{folder}/s/{places.socket.name}")
    except BaseException:
        sock.close()
        raise
    return sock


def _start(home: Path, places: Places, environ: Mapping[str, str], until: float) -> bool:
    """Start a supervisor and wait until it, or another one, listens, or dies; False: too long.

    Raises:
        SupervisorError: It says that it cannot work.
    """
    try:
        make_folder(places.state)
        diary = os.open(places.diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as exc:
        raise _unusable(home, exc.strerror or str(exc), str(exc.filename)) from exc
    ready, theirs = os.pipe()
    try:
        package = Path(__file__).parents[2]
        # -S: it needs the standard library and this package, found by PYTHONPATH.
        argv = [sys.executable, "-S", "-P", "-m", "kinetic._local", str(home), str(theirs)]
        process = subprocess.Popen(
            argv,
            env=_environment(home, environ) | {"PYTHONPATH": str(package)},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=diary,
            stderr=diary,
            pass_fds=[theirs],
            start_new_session=True,
        )
        os.close(theirs)
        theirs = -1
        words = _read_line(ready, until)
        _collect(process)
    except OSError as exc:
        raise SupervisorError(f"no supervisor can be started: {exc}") from exc
    finally:
        for fd in (diary, ready, theirs):
            if fd >= 0:
                os.close(fd)
    if "error" in words:
        raise _unusable(home, str(words["error"]), str(words["file"]))
    return time.monotonic() < until


def _collect(process: subprocess.Popen[bytes]) -> None:
    """The first process has forked the supervisor and ended, if all is well."""
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _read_line(fd: int, until: float) -> dict[str, Any]:
    """What the supervisor says of itself; empty if it died, or did not say it in time."""
    said = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not said.endswith(b"\n"):
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            return {}
        part = os.read(fd, 4096)
        if not part:
            return {}
        said += part
    words: dict[str, Any] = json.loads(said)
    return words


def _environment(home: Path, environ: Mapping[str, str]) -> dict[str, str]:
    passed = {
        name: value
        for name, value in environ.items()
        if name in _PASSED_ON or name.startswith("LC_")
    }
    return {**passed, "KINETIC_HOME": environ.get("KINETIC_HOME") or str(home)}


def _unusable(home: Path, error: str, file: str) -> SupervisorError:
    return SupervisorError(
        f"{file}: {error}; jobs on this machine need a folder that can be written to: "
        f"repair {home}, or set KINETIC_HOME to another one"
    )
