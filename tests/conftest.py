"""What every test gets: a home of its own, a clean environment, and no process left behind.

Everything kinetic starts on this machine carries the path of its home in the
environment it was started with, so the processes of a test are found by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.cluster.fixtures import (
    bucket,
    client,
    configured,
    control_plane,
    gcs_server,
    groups,
    kubelet,
    namespace,
    nodes,
)

__all__ = [
    "bucket",
    "client",
    "configured",
    "control_plane",
    "gcs_server",
    "groups",
    "kubelet",
    "namespace",
    "nodes",
]

pytest.register_assert_rewrite("tests.contract.cluster", "tests.kubernetes.verdicts")

FIRST_S = 180.0
"""How many seconds a test on a control plane may take: the first one starts it."""

EXIT_DEADLINE = 30.0
"""How many seconds the processes of a test may take to go once their supervisor was told to."""

MAX_BLOCK = 0.050
"""How many seconds the event loop may be held, in tests that ask for `loop_guard`."""

# Images of Python often set it. Then each of the hundreds of processes that the tests start would
# compile kinetic anew, which was a third of the time of tests on clusters.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Otherwise Python 3.11 makes up a loop for the main thread when the asyncio plugin asks for "the"
# loop; nobody closes it, and the warning fails whichever test the garbage collector runs in.
asyncio.set_event_loop(None)

# How long an example takes says more of the machine than of what is tested.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_xdist_auto_num_workers() -> int:
    """Half as many again as there are cores: a third of the time is waiting."""
    return max(1, round(1.5 * (os.cpu_count() or 1)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The fixtures of a test decide when it is run, and beside which others.

    What needs the control plane is of the full tier unless it is marked for another, and one
    process has all of it, since to start a control plane takes seconds. Behaviours that share
    their jobs (`crew`) stay together by module.
    """
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        elsewhere = any(item.get_closest_marker(tier) for tier in ("everyday", "node", "slow"))
        if "control_plane" in fixtures or item.get_closest_marker("control_plane") is not None:
            item.add_marker(pytest.mark.xdist_group("control plane"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(FIRST_S))
            if not elsewhere:
                item.add_marker(pytest.mark.full)
        elif "crew" in fixtures:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.fixture(autouse=True)
def verbosity() -> Iterator[None]:
    """What a test says about absl's logger ends with the test."""
    logger = logging.getLogger("absl")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private ``KINETIC_HOME``; fails the test when a process of it does not end."""
    with private_home(monkeypatch) as path:
        yield path


@pytest.fixture
def small_project(
    home: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The folder of the test is the project: else each job would pack and unpack all there is."""
    assert os.environ["KINETIC_HOME"] == str(home)
    monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(request.path.parent))
    monkeypatch.chdir(request.path.parent)  # where builtins are taken to be from
    return request.path.parent


@contextlib.contextmanager
def private_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ``KINETIC_HOME`` in a clean environment; on leaving, an error if a process does not end.

    It lies directly under /tmp: a path of a Unix socket has 104 bytes at most.
    """
    for name in [*os.environ]:
        if name.startswith("KINETIC_"):
            monkeypatch.delenv(name)
    for name in ("GOOGLE_CLOUD_PROJECT", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    path = Path(tempfile.mkdtemp(prefix="kn-", dir="/tmp"))
    monkeypatch.setenv("KINETIC_HOME", str(path))
    monkeypatch.setenv("KINETIC_LOCAL_IDLE_S", "60")  # should the tests be killed
    try:
        yield path
        survivors = end_processes(path) if any(path.iterdir()) else []
        assert not survivors, "processes outlived their supervisor:\n" + "\n".join(survivors)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def processes_of(home: Path) -> list[psutil.Process]:
    """The processes that were started under *home*, oldest first."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        # Gone meanwhile, a zombie, or somebody else's.
        with contextlib.suppress(psutil.Error, OSError):
            if any(str(home) in value for value in process.environ().values()):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def end_processes(home: Path, deadline: float = EXIT_DEADLINE) -> list[str]:
    """Ask the processes under *home* to end; kill and describe those that don't.

    Only the outermost of the new processes are asked, because each must end what it has started.
    """
    known: set[int] = set()
    until = time.monotonic() + deadline
    while (left := processes_of(home)) and time.monotonic() < until:
        pids = {process.pid for process in left}
        for process in left:
            with contextlib.suppress(psutil.Error):
                if process.pid not in known and process.ppid() not in pids:
                    process.send_signal(signal.SIGTERM)
        known |= pids
        psutil.wait_procs(left, timeout=0.05)
    described = [_describe(process) for process in left]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return described


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        words = " ".join(process.cmdline())
        return f"  {process.pid} (parent {process.ppid()}, {process.status()}): {words}"
    return f"  {process.pid} (ended meanwhile)"


@pytest.fixture
def loop_guard() -> type[LoopGuard]:
    """``with loop_guard():`` fails the test when its event loop is held for more than 50 ms.

    ``loop_guard(limit_s)`` allows more.
    """
    return LoopGuard


class LoopGuard:
    """A heartbeat in the running loop that is timed, and a thread that looks where it hangs.

    Time in which the machine kept the process waiting does not count, see `withheld`. What all
    tests before have left is kept from the garbage collector, which might take 100 ms for it.
    """

    PERIOD = 0.010

    def __init__(self, limit_s: float = MAX_BLOCK) -> None:
        self.limit_s = limit_s
        self.worst = 0.0
        self.culprit = "  nothing: the interpreter was held, too (a long call into C)"
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._stopped = threading.Event()
        self._sampled: tuple[float, str] | None = None

    def __enter__(self) -> Self:
        gc.collect()
        gc.freeze()
        self._beat = time.monotonic()
        self._watcher = threading.Thread(target=self._watch, name="loop guard", daemon=True)
        self._watcher.start()  # which may take as long as the machine likes
        self._waits, self._beat = waits(), time.monotonic()
        self._timer = self._loop.call_later(self.PERIOD, self._on_beat)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._timer.cancel()
        self._note()
        self._stopped.set()
        self._watcher.join()
        gc.unfreeze()
        if kind is None and self.worst > self.limit_s:
            held = f"the event loop was held for {self.worst * 1000:.0f} ms; seen meanwhile:"
            pytest.fail(f"{held}\n{self.culprit}", pytrace=False)

    def _on_beat(self) -> None:
        self._note()
        self._timer = self._loop.call_later(self.PERIOD, self._on_beat)

    def _note(self) -> None:
        now, before = time.monotonic(), self._waits
        self._waits = waits()
        kept = withheld(before, self._waits)
        held = now - self._beat - self.PERIOD - kept
        if held > self.worst:
            self.worst = held
            if self._sampled is not None and self._sampled[0] == self._beat:
                self.culprit = self._sampled[1]
        self._beat = time.monotonic()  # to look takes its time, while others have the interpreter

    def _watch(self) -> None:
        while not self._stopped.wait(self.PERIOD):
            beat = self._beat
            if (self._sampled is None or self._sampled[0] != beat) and (
                time.monotonic() - beat > self.limit_s
            ):
                frame = sys._current_frames().get(self._thread)
                self._sampled = (beat, "".join(traceback.format_stack(frame)[-5:]))


def waits() -> dict[str, float]:
    """Seconds that each thread here has waited for a processor, and the host has taken so far."""
    found = {"": 0.0}
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            found[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    with contextlib.suppress(OSError):
        stolen = Path("/proc/stat").read_text().split(maxsplit=9)[8]
        found["host"] = int(stolen) / os.sysconf("SC_CLK_TCK")
    return found


def withheld(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Seconds between two `waits` in which the machine may have kept this thread from its work.

    What it waited for a processor itself, what the host took, and what one other thread waited,
    which may have held the interpreter: that comes on top, one after the other. Who was not there
    before has begun meanwhile.
    """
    took = {who: late - before.get(who, 0.0) for who, late in after.items()}
    own = took.pop(str(threading.get_native_id()), 0.0)
    return own + took.pop("host", 0.0) + max(took.values(), default=0.0)
