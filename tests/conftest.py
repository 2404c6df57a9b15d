"""Fixtures of all tests: a private home, a clean environment, and a check that processes end.

Each process that kinetic starts on this machine has the path of its home in its environment. So
the home identifies the processes of a test.
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

CONTROL_PLANE_TEST_S = 180.0
"""Maximum seconds of a test on a control plane; the first one starts it."""

LONG_OF_GKE = "test_endings", "test_faults", "test_pathways"
"""The modules that take half of the time of tests/gke."""

EXIT_DEADLINE = 30.0
"""Maximum seconds until the processes of a test end, after their supervisor has a signal."""

MAX_BLOCK = 0.050
"""Maximum seconds for which a test with `loop_guard` may block the event loop."""

# Images of Python often set this. Then each process that the tests start compiles kinetic again,
# which was a third of the time of tests on clusters.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Otherwise Python 3.11 creates a loop for the main thread when the asyncio plugin asks for the
# current one. Nothing closes that loop, and its warning fails some later test.
asyncio.set_event_loop(None)

# The time of one example depends more on the machine than on the tested code.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_xdist_auto_num_workers() -> int:
    """Return 2.5 workers per core: tests wait more than half of their time."""
    return round(2.5 * (os.cpu_count() or 1))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose the tier and the worker of a test by its fixtures.

    A test that needs the control plane belongs to the full tier, unless it has the mark of another
    one. Three workers run them, in parts that take equally long, because a control plane takes
    seconds to start. They come first, because they take longest. Tests that share their jobs
    (`crew`) run on one worker per module.
    """
    clusters, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        has_other_tier = any(item.get_closest_marker(tier) for tier in ("everyday", "node", "slow"))
        if "control_plane" in fixtures or item.get_closest_marker("control_plane") is not None:
            part = "gke" if "tests/gke/" in item.nodeid else "others"
            part = "endings on gke" if item.path.stem in LONG_OF_GKE else part
            item.add_marker(pytest.mark.xdist_group(f"control plane of {part}"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(CONTROL_PLANE_TEST_S))
            if not has_other_tier:
                item.add_marker(pytest.mark.full)
            clusters.append(item)
            continue
        if "crew" in fixtures:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
        others.append(item)
    items[:] = [*clusters, *others]


@pytest.fixture(autouse=True)
def verbosity() -> Iterator[None]:
    """Restore the level of absl's logger after each test."""
    logger = logging.getLogger("absl")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a private ``KINETIC_HOME``; fail the test if one of its processes doesn't end."""
    with private_home(monkeypatch) as path:
        yield path


@pytest.fixture
def small_project(
    home: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Make the folder of the test the project, so that each job packs only that folder."""
    assert os.environ["KINETIC_HOME"] == str(home)
    monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(request.path.parent))
    monkeypatch.chdir(request.path.parent)  # the module search path of builtins
    return request.path.parent


@contextlib.contextmanager
def private_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a ``KINETIC_HOME`` in a clean environment; at the end, check that its processes end.

    The home is directly under /tmp, because the path of a Unix socket has at most 104 bytes.
    """
    for name in [*os.environ]:
        if name.startswith("KINETIC_"):
            monkeypatch.delenv(name)
    for name in ("GOOGLE_CLOUD_PROJECT", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    path = Path(tempfile.mkdtemp(prefix="kn-", dir="/tmp"))
    monkeypatch.setenv("KINETIC_HOME", str(path))
    monkeypatch.setenv("KINETIC_LOCAL_IDLE_S", "60")  # in case the tests are killed
    try:
        yield path
        survivors = end_processes(path) if any(path.iterdir()) else []
        assert not survivors, "processes outlived their supervisor:\n" + "\n".join(survivors)
    finally:
        from kinetic._runner.job import temporary

        # Of a killed supervisor. Unlike glob, `os.walk` ignores folders that vanish.
        for folder, subfolders, _ in os.walk(path / "local"):
            if "tmp" in subfolders:
                temporary.remove_all([f"{folder}/tmp"])
        shutil.rmtree(path, ignore_errors=True)


def processes_of(home: Path) -> list[psutil.Process]:
    """Return the processes whose home is *home*, oldest first."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        # The process may have ended, be a zombie, or belong to another user.
        with contextlib.suppress(psutil.Error, OSError):
            if any(str(home) in value for value in process.environ().values()):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def end_processes(home: Path, deadline: float = EXIT_DEADLINE) -> list[str]:
    """Ask the processes of *home* to end; kill and describe those that don't.

    Only the outermost of the new processes are asked, because each must end what it has started.
    """
    known: set[int] = set()
    give_up_at = time.monotonic() + deadline
    while (survivors := processes_of(home)) and time.monotonic() < give_up_at:
        pids = {process.pid for process in survivors}
        for process in survivors:
            with contextlib.suppress(psutil.Error):
                if process.pid not in known and process.ppid() not in pids:
                    process.send_signal(signal.SIGTERM)
        known |= pids
        psutil.wait_procs(survivors, timeout=0.05)
    described = [_describe(process) for process in survivors]
    for process in survivors:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return described


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return f"  {process.pid} (parent {process.ppid()}, {process.status()}): {command}"
    return f"  {process.pid} (ended meanwhile)"


@pytest.fixture
def loop_guard() -> type[LoopGuard]:
    """Return a class: ``with loop_guard():`` fails the test if the loop is blocked for 50 ms.

    ``loop_guard(limit_s)`` sets another limit.
    """
    return LoopGuard


class LoopGuard:
    """Time a heartbeat in the running loop; a thread records the stack that delays it.

    Time in which the process waits for a processor doesn't count, see `withheld_seconds`. The
    garbage collector ignores the objects of earlier tests, which might take it 100 ms.
    """

    PERIOD = 0.010

    def __init__(self, limit_s: float = MAX_BLOCK) -> None:
        self.limit_s = limit_s
        self.worst = 0.0
        self.culprit = "  nothing: a long call into C held the interpreter, too"
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._stopped = threading.Event()
        self._sampled: tuple[float, str] | None = None

    def __enter__(self) -> Self:
        gc.collect()
        gc.freeze()
        self._beat = time.monotonic()
        self._watcher = threading.Thread(target=self._watch, name="loop guard", daemon=True)
        self._watcher.start()  # which can take long on a busy machine
        self._waits, self._beat = measure_waits(), time.monotonic()
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
        self._waits = measure_waits()
        withheld_s = withheld_seconds(before, self._waits)
        held = now - self._beat - self.PERIOD - withheld_s
        if held > self.worst:
            self.worst = held
            if self._sampled is not None and self._sampled[0] == self._beat:
                self.culprit = self._sampled[1]
        self._beat = time.monotonic()  # the measurement itself takes time

    def _watch(self) -> None:
        while not self._stopped.wait(self.PERIOD):
            beat = self._beat
            if (self._sampled is None or self._sampled[0] != beat) and (
                time.monotonic() - beat > self.limit_s
            ):
                frame = sys._current_frames().get(self._thread)
                self._sampled = (beat, "".join(traceback.format_stack(frame)[-5:]))


def measure_waits() -> dict[str, float]:
    """Return how long each thread here waited for a processor, and the steal time of the host."""
    found = {"": 0.0}
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            found[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    with contextlib.suppress(OSError):
        stolen = Path("/proc/stat").read_text().split(maxsplit=9)[8]
        found["host"] = int(stolen) / os.sysconf("SC_CLK_TCK")
    return found


def withheld_seconds(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Return for how long the machine may have delayed this thread, between two `measure_waits`.

    This is the sum of its own wait for a processor, the steal time of the host, and the longest
    wait of another thread, which may hold the interpreter. A new thread counts with 0 s before.
    """
    waited_by = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    own = waited_by.pop(str(threading.get_native_id()), 0.0)
    return own + waited_by.pop("host", 0.0) + max(waited_by.values(), default=0.0)
