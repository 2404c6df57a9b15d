"""The runner as the first process of a pod: a real process, with the environment of one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kinetic._runner.protocol import frames, pickles, wire
from kinetic._runner.stores.objects import Objects

KEY = b"k" * 32
SCOPE = "batches/grp-1/"
RUNNER = Path(__file__).resolve().parents[2] / "runner" / "remote_runner.py"
KEPT = ("PATH", "LANG", "LD_LIBRARY_PATH")


@dataclass
class Pods:
    """Puts calls into a store, starts pods for them, and reads what they leave."""

    folder: Path
    objects: Objects
    store: str
    environ: Mapping[str, str] = field(default_factory=dict)
    key: bytes = KEY
    command: tuple[str, ...] = (sys.executable, "-u", str(RUNNER))

    def __post_init__(self) -> None:
        (self.folder / "key").write_bytes(self.key)
        self.started: list[Pod] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.started:
            pod.end()

    def order(self, function: Callable[..., Any], *args: Any, **changes: Any) -> wire.Order:
        """Put a call into the store and describe it; *changes* are of the order."""
        code, arguments = pickles.dumps(function), pickles.dumps((args, {}))
        digest = hashlib.sha256(code).hexdigest()
        self.objects.create(f"functions/{digest}.pkl", code)
        self.objects.create(wire.input_key(SCOPE, 0), arguments)
        given: dict[str, Any] = {"group_id": "grp-1", "grace": 60.0} | changes
        return wire.Order(
            store=self.store,
            scope=SCOPE,
            job_id="grp-1-0",
            index=0,
            attempt=given.pop("attempt", 1),
            function=_input(f"functions/{digest}.pkl", code),
            arguments=_input(wire.input_key(SCOPE, 0), arguments),
            **given,
        )

    def start(self, order: wire.Order, uid: str = "uid-1", **own: str) -> Pod:
        """A pod with this order; *own* are variables of its environment."""
        self.started.append(Pod(self, order, uid, self.folder / f"pod-{len(self.started)}", own))
        return self.started[-1]

    def run(self, order: wire.Order, uid: str = "uid-1", **own: str) -> Pod:
        """A pod that has ended."""
        pod = self.start(order, uid, **own)
        pod.wait()
        return pod

    def name(self, what: str, attempt: int = 1) -> str:
        """The name of a claim or an outcome."""
        return wire.attempt_key(SCOPE, 0, attempt, what)

    def outcome(self, attempt: int = 1) -> wire.Outcome:
        """The verified header of what was committed."""
        name = self.name("outcome", attempt)
        outcome = wire.Outcome.verified(
            self.objects.stat(name).metadata, self.key, SCOPE, 0, attempt
        )
        assert hashlib.sha256(self.objects.get(name)[0]).hexdigest() == outcome.body
        return outcome

    def value(self, attempt: int = 1) -> Any:
        """What was returned."""
        outcome = self.outcome(attempt)
        assert outcome.kind is wire.Kind.VALUE, self.error(attempt)
        name = outcome.value[0] if outcome.value is not None else self.name("outcome", attempt)
        return pickles.load(self.objects.get(name)[0])

    def error(self, attempt: int = 1) -> dict[str, str]:
        """What went wrong, in words."""
        words: dict[str, str] = frames.unpack(
            self.objects.get(self.name("outcome", attempt))[0]
        ).fields["error"]
        return words

    def claim(self, executor: str, attempt: int = 1) -> None:
        """Claim an attempt as another pod."""
        claim = {"executor": executor, "fence": "1"}
        assert self.objects.create(self.name("claim", attempt), b"", claim)

    def close(self, outcome: wire.Outcome, attempt: int = 1) -> None:
        """Commit an outcome as somebody else."""
        outcome = outcome._replace(body=hashlib.sha256(b"").hexdigest())
        metadata = outcome.signed(self.key, SCOPE, 0, attempt)
        assert self.objects.create(self.name("outcome", attempt), b"", metadata)

    def stop(self) -> None:
        """Ask for a stop of everything."""
        name = wire.control_key(SCOPE, 0)
        self.objects.create(name, *wire.Request(kind="stop").signed(self.key, SCOPE, name))


class Pod:
    """The first process of a container."""

    def __init__(
        self, pods: Pods, order: wire.Order, uid: str, folder: Path, own: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self.log = folder / "log"
        environment = environment_of(pods, order, uid, folder, own)
        with self.log.open("wb") as log:
            self.process = _started(pods.command, environment, folder, log)

    @staticmethod
    def unread(pods: Pods, order: wire.Order) -> subprocess.Popen[bytes]:
        """The process of a pod whose output goes into a pipe that is not read."""
        folder = pods.folder / "pod-unread"
        environment = environment_of(pods, order, "uid", folder, {})
        return _started(pods.command, environment, folder, subprocess.PIPE)

    def end(self) -> None:
        """What a node does with a container that is to go, and what is left in it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, timeout: float = 60.0) -> int:
        """The exit code."""
        return self.process.wait(timeout)

    @property
    def code(self) -> int | None:
        """The exit code, once it has one."""
        return self.process.returncode

    @property
    def output(self) -> str:
        """What it has written."""
        return self.log.read_text(errors="replace")

    @property
    def receipt(self) -> wire.Receipt | None:
        """What the container leaves as its termination message."""
        return wire.parse((self.folder / "termination-log").read_text())


def environment_of(
    pods: Pods, order: wire.Order, uid: str, folder: Path, own: Mapping[str, str]
) -> dict[str, str]:
    """What the container's process finds; makes the *folder* of the pod."""
    (folder / "tmp").mkdir(parents=True)
    (folder / "termination-log").touch()
    return {
        **{name: os.environ[name] for name in KEPT if name in os.environ},
        "HOME": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "KINETIC_ORDER": order.encode(),
        "KINETIC_KEY_FILE": str(pods.folder / "key"),
        "KINETIC_POD_UID": uid,
        "KINETIC_FAILURES": "0",
        "KINETIC_DISRUPTIONS": "",
        "KINETIC_TERMINATION_LOG": str(folder / "termination-log"),
        **pods.environ,
        **own,
    }


def _started(
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


def _input(name: str, content: bytes) -> wire.Input:
    digest = hashlib.sha256(content).hexdigest()
    return wire.Input(name=name, start=0, stop=len(content), digest=digest)
