"""A job's first steps, taken by the supervisor: nothing is left of them when it has no process."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.fork import fork_server
from kinetic._runner.job import opening, spares
from kinetic._runner.job.workspace import Weight, shared
from kinetic._runner.protocol import pickles, wire
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic._supervisor.jobs import Job, State
from kinetic._supervisor.parents import Ended, Parent, Parents, Sweeper
from kinetic._supervisor.protocol import Order, Places, Shared, edition
from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.ports import Image, JobSpec, Phase
from kinetic.job_status import Reason
from tests.local.conftest import DEADLINE_S, spec, until

PAUSE_S = 5.0
"""How long a job waits for its signal: it is not there in time if it was lost."""

SCOPE = "jobs/job-1/"
KEY = b"k" * 32
RUNNER = Path(opening.__file__).parents[1]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def objects(tmp_path: Path) -> DirectoryObjects:
    return DirectoryObjects(tmp_path / "store")


@pytest.fixture
async def cluster(home: Path, environ: dict[str, str]) -> AsyncIterator[LocalCluster]:
    """With the runner itself: no first step is taken for another one."""
    cluster = LocalCluster(home, {**environ, "KINETIC_LOCAL_SLOTS": "1"})
    yield cluster
    await cluster.aclose()


def assignment(objects: DirectoryObjects, home: Path, source: str = "") -> dict[str, Any]:
    """An order to execute *source*, in a project that was unpacked before."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(f"def work():\n    {source or 'return 1'}", space)
    parts: list[wire.Input] = []
    for content in (pickles.dumps(space["work"]), pickles.dumps(((), {}))):
        digest = hashlib.sha256(content).hexdigest()
        objects.create(digest, content)
        parts.append(wire.Input(name=digest, start=0, stop=len(content), digest=digest))

    def build(part: str) -> Weight:
        Path(part, "pyproject.toml").touch()
        return Weight(1, 0)

    digest = "1" * 64
    Places(home).cache.mkdir(parents=True, exist_ok=True)
    shared(f"{Places(home).cache}/code/{digest}", build)
    return wire.Assignment(
        store=objects.url,
        scope=SCOPE,
        job_id="job-1",
        index=0,
        attempt=1,
        function=parts[0],
        arguments=parts[1],
        code=wire.Code(name="code/1", digest=digest),
        output_dir=str(objects.root / "outputs" / "0"),
    ).to_json()


CLAIM, OUTCOME = (wire.attempt_key(SCOPE, 0, 1, what) for what in ("claim", "outcome"))


def first_steps(objects: DirectoryObjects, home: Path, **changes: Any) -> JobSpec:
    return replace(spec("one"), assignment=assignment(objects, home), **changes)


REFUSING = """#!{python}
import errno, os, socket, struct, sys
sock, word = socket.socket(fileno=3), struct.Struct({word!r})
head = struct.Struct({command!r})
sock.send(word.pack({ready!r}, 0, 0, 0))
while True:
    what, one, two = head.unpack(sock.recv(head.size, socket.MSG_WAITALL) or sys.exit())
    sock.recv(two, socket.MSG_WAITALL)
    if what == {fork!r}:
        assert os.path.exists({claim!r})
        sock.send(word.pack({refused!r}, one, 0, errno.EAGAIN))
"""


@pytest.mark.parametrize("how", ["refused", "broken", "missing"])
async def test_a_claim_is_withdrawn_when_no_process_can_be_made(
    cluster: LocalCluster, home: Path, objects: DirectoryObjects, tmp_path: Path, how: str
) -> None:
    interpreter = tmp_path / "python"
    if how == "refused":
        interpreter.write_text(
            REFUSING.format(
                python=sys.executable,
                word=fork_server.WORD.format,
                command=fork_server.COMMAND.format,
                ready=fork_server.READY,
                fork=fork_server.FORK,
                refused=fork_server.REFUSED,
                claim=str(objects.root / CLAIM),
            )
        )
    elif how == "broken":
        interpreter.write_text(f"#!/bin/sh\ntest -e {objects.root / CLAIM} && exit 1\nexec cat\n")
    interpreter.touch(0o700)
    interpreter.chmod(0o700 if how != "missing" else 0o600)
    image = Image(uri="", command=(str(interpreter),))
    await cluster.launch(first_steps(objects, home, image=image))
    seen = await until(cluster, "one")
    assert (seen.phase, seen.reason) == (Phase.ENDED, Reason.SETUP)
    assert not objects.exists(CLAIM)
    assert not Places(home).work.joinpath("one").exists()


@contextmanager
def supervising(home: Path) -> Iterator[Parents]:
    """What a supervisor does about its parents; it ends every child that is none of them."""
    places = Places(home)
    for folder in (
        places.state,
        places.logs,
        places.work,
        places.refuse,
        places.spares,
        places.cache,
    ):
        folder.mkdir(parents=True, exist_ok=True)
    parents = Parents(places, os.environ, Sweeper(places.refuse, places.spares))
    yield parents
    parents.dismiss_all()
    until = time.monotonic() + DEADLINE_S
    while parents.dying and time.monotonic() < until:
        parents.reap()


def heard(parent: Parent) -> list[Any]:
    """The next news of jobs."""
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    news: list[Any] = []
    while not news:
        parent.flush()
        assert poll.poll(DEADLINE_S * 1000)
        news = parent.hear() or []
    return news


@pytest.mark.parametrize("stopped", [True, False])
def test_a_signal_between_the_fork_and_its_listening_is_not_lost(
    home: Path, objects: DirectoryObjects, tmp_path: Path, stopped: bool
) -> None:
    """The parent finds both commands at once: the signal is sent long before there is a handler.

    In a process of its own: the servers that the tests have started are their children, too.
    """
    apart("early", home, tmp_path / "store", tmp_path / "ran", *(["stop"] * stopped))


def apart(what: str, *words: object) -> None:
    """Call the function *what* of this module, with *words* for its arguments, in a process."""
    code = f"from tests.local.test_prefetch import {what}; {what}()"
    command = [sys.executable, "-c", code, *map(str, words)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=2 * DEADLINE_S)


def early() -> None:
    """Start a job, and signal it at once; see the test."""
    home, store, ran, *stopped = map(Path, sys.argv[1:])
    with supervising(home) as parents:
        signal_at_once(parents, home, DirectoryObjects(store), ran, stopped=bool(stopped))


def signal_at_once(
    parents: Parents, home: Path, objects: DirectoryObjects, ran: Path, *, stopped: bool
) -> None:
    # The parent may be held up between the two commands: it waits for a signal that is not lost.
    source = f"import time; time.sleep({PAUSE_S}); open({str(ran)!r}, 'x').close()"
    job = due(objects, home, source)
    assert job.order is not None
    parent = parents.start(job, job.order, {})
    assert objects.exists(CLAIM)
    if stopped:
        name = wire.control_key(SCOPE, 0)
        objects.create(name, *wire.Request(kind="stop").signed(KEY, SCOPE, name))
    parent.signal(job, signal.SIGTERM)
    (end,) = heard(parent)
    assert isinstance(end, Ended)
    outcome = wire.Outcome.verified(objects.stat(OUTCOME).metadata, KEY, SCOPE, 0, 1)
    assert not ran.exists()
    if stopped:
        assert (outcome.kind, end.status) == (wire.Kind.CANCELLED, wire.EXIT_FINAL)
    else:
        assert outcome.kind is not wire.Kind.VALUE
    parents.ended(job)
    parents.tidy()
    assert not Places(home).work.joinpath("one").exists()


def due(objects: DirectoryObjects, home: Path, source: str = "", index: int = 0) -> Job:
    """A job whose turn it is, as the supervisor has it."""
    order = {**assignment(objects, home, source), "index": index}
    header = {
        "labels": {},
        "command": [sys.executable],
        "runner": str(RUNNER),
        "edition": edition(RUNNER),
    }
    own = {name: order.pop(name) for name in ("job_id", "index", "attempt", "arguments")}
    body = _json({"assignment": order, "environment": {}, "key": KEY.hex()})
    wanted = Order.from_json({"name": "one", "labels": {}}, Shared(header, body))
    return Job(
        name="one",
        labels={},
        created=0.0,
        order=wanted,
        body=_json({"assignment": own, "environment": {}}),
        state=State.RUNNING,
        executor=f"12345678-1234-4234-8234-{index:012}",
    )


def test_the_folder_of_who_has_ended_is_not_in_the_way_of_the_next_of_its_name(
    home: Path, objects: DirectoryObjects, tmp_path: Path
) -> None:
    """All in one turn of the supervisor's loop: an end is heard, and the name is wanted again."""
    apart("twice", home, tmp_path / "store")


def twice() -> None:
    """Start a job, and its namesake as soon as it has ended; see the test."""
    home, store = map(Path, sys.argv[1:])
    objects = DirectoryObjects(store)
    with supervising(home) as parents:
        for index in range(2):
            job = due(objects, home, "open('left', 'x').close()", index)
            assert job.order is not None
            parent = parents.start(job, job.order, {})
            (end,) = heard(parent)
            log = Places(home).log("one").read_text()
            assert isinstance(end, Ended) and end.status == 0, log
            assert objects.exists(wire.attempt_key(SCOPE, index, 1, "outcome"))
            parents.ended(job)
        parents.tidy()
    assert not Places(home).work.joinpath("one").exists()


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()


async def test_a_job_finds_the_project_as_packed_and_copies_none_of_it_after_the_first(
    cluster: LocalCluster, home: Path, objects: DirectoryObjects
) -> None:
    if not spares.can_keep(str(home)):
        pytest.skip("this file system doesn't show every change of a file")
    source = (
        "import os; print(os.listdir(), os.stat('pyproject.toml').st_ino, "
        "os.path.getsize('pyproject.toml')); open('left', 'x').close(); "
        "open('../beside', 'x').close()"
    )
    said: list[str] = []
    for index in range(3):
        order = {**assignment(objects, home, source), "index": index}
        await cluster.launch(replace(spec(f"job-{index}"), assignment=order))
        assert (await until(cluster, f"job-{index}")).exit_code == 0
        said.append(Places(home).log(f"job-{index}").read_text())
    assert said[0].startswith("['pyproject.toml'] ") and len(set(said)) == 1
    assert not os.listdir(Places(home).work)
