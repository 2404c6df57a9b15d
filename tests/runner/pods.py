"""Run the runner as a pod's first process: a real process in the environment of a pod."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.workers import Crew, Terms
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic._runner.stores.gcs import EMULATOR, GcsObjects, Limits
from kinetic._runner.stores.objects import Objects
from tests.runner.calls import KEY, RUNNER, Calls

INHERITED = ("PATH", "LANG", "LD_LIBRARY_PATH")
QUICK = Limits(total_s=60.0, first_s=0.005, longest_s=0.02)


@dataclass
class Pods(Calls):
    """Start pods for calls in a store."""

    folder: Path
    objects: Objects
    store: str
    environ: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = (sys.executable, "-u", str(RUNNER))

    def __post_init__(self) -> None:
        (self.folder / "key").write_bytes(KEY)
        self.started: list[Pod] = []

    @classmethod
    def over_bucket(cls, folder: Path, url: str, store: str = "gs://kn-test/jobs") -> Self:
        """Return pods over a bucket of the server at *url*."""
        environ = {EMULATOR: url}
        return cls(folder, GcsObjects(store, environ, QUICK), store, environ)

    @classmethod
    def over_directory(cls, folder: Path, environ: Mapping[str, str] | None = None) -> Self:
        """Return pods over a directory, for behavior that doesn't depend on the store."""
        objects = DirectoryObjects(folder / "store")
        return cls(folder, objects, objects.url, environ or {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.started:
            pod.end()

    def start(self, order: wire.Order, uid: str = "uid-1", **variables: str) -> Pod:
        """Start a pod with *order* and with *variables* in its environment."""
        folder = self.folder / f"pod-{len(self.started)}"
        self.started.append(Pod(self, order, uid, folder, variables))
        return self.started[-1]

    def run(self, order: wire.Order, uid: str = "uid-1", **variables: str) -> Pod:
        """Start a pod, wait until it ends, and return it."""
        pod = self.start(order, uid, **variables)
        pod.wait()
        return pod


class Pod:
    """The first process of a container."""

    def __init__(
        self, pods: Pods, order: wire.Order, uid: str, folder: Path, variables: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self.log = folder / "log"
        environment = environment_of(pods, order, uid, folder, variables)
        with self.log.open("wb") as log:
            self.process = _start_process(pods.command, environment, folder, log)

    @staticmethod
    def unread(pods: Pods, order: wire.Order) -> subprocess.Popen[bytes]:
        """Start a pod whose output goes into a pipe that nobody reads."""
        folder = pods.folder / "pod-unread"
        environment = environment_of(pods, order, "uid", folder, {})
        return _start_process(pods.command, environment, folder, subprocess.PIPE)

    def end(self) -> None:
        """Kill all processes of the container, as a node does after the grace period."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, timeout: float = 60.0) -> int:
        """Wait until the pod ends and return its exit code."""
        return self.process.wait(timeout)

    @property
    def code(self) -> int | None:
        """The exit code, or ``None`` while the pod runs."""
        return self.process.returncode

    @property
    def output(self) -> str:
        """What the pod has written so far."""
        return self.log.read_text(errors="replace")

    @property
    def receipt(self) -> wire.Receipt | None:
        """The receipt in the container's termination message."""
        return wire.parse_receipt((self.folder / "termination-log").read_text())


def worker_variables(*, outputs: str = "", **terms: Any) -> dict[str, str]:
    """Return the variables of a pod that is a worker of a single job, or of a batch."""
    crew = Crew(terms=Terms(**{"single": True} | terms), outputs=outputs, created=time.time())
    return {"KINETIC_CREW": crew.encode(), "KINETIC_JOB_UID": "life", "KINETIC_RANK": "0"}


def environment_of(
    pods: Pods, order: wire.Order, uid: str, folder: Path, variables: Mapping[str, str]
) -> dict[str, str]:
    """Make the *folder* of the pod and return the environment of its container.

    Without a crew in *variables*, the pod is the worker of a single job.
    """
    (folder / "tmp").mkdir(parents=True)
    (folder / "termination-log").touch()
    worker: dict[str, str] = {}
    if "KINETIC_CREW" not in variables:
        order = replace(order, group_id=None)
        worker = worker_variables(outputs=order.output_dir, budgets=order.budgets)
    return {
        **{name: os.environ[name] for name in INHERITED if name in os.environ},
        "HOME": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "KINETIC_ORDER": order.encode(),
        "KINETIC_KEY_FILE": str(pods.folder / "key"),
        "KINETIC_POD_UID": uid,
        "KINETIC_FAILURES": "0",
        "KINETIC_DISRUPTIONS": "",
        "KINETIC_TERMINATION_LOG": str(folder / "termination-log"),
        **worker,
        **pods.environ,
        **variables,
    }


def _start_process(
    command: tuple[str, ...], environment: dict[str, str], folder: Path, log: Any
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def until(condition: Callable[[], object], pod: Pod) -> None:
    """Wait until *condition* holds; fail if the pod ends first or a minute passes."""
    deadline, ended = time.monotonic() + 60, False
    while not condition():
        assert time.monotonic() < deadline and not ended, pod.output
        ended = pod.process.poll() is not None  # then check the condition once more
        time.sleep(0.01)
