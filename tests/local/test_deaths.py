"""Whichever process dies, clients learn how each job ended, and no process stays."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import psutil
import pytest

from kinetic._labels import ATTEMPT, INDEX, SUBMISSION
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.messages import Decoder, encode
from kinetic._runner.protocol.workers import Crew, Terms
from kinetic._supervisor.protocol import VERSION, SupervisorPaths
from kinetic.aio.local import supervisor
from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.ports import Observation, Phase
from kinetic.errors import ConfigurationError, Unavailable
from kinetic.job_status import Reason
from tests.jobs import DEADLINE_S, eventually, gone, lines, until

from .conftest import (
    alive,
    hear_job,
    marked,
    parents,
    run_job,
    signal_supervisor,
    spec,
    supervisor_pid,
    supervisors,
)

SLEEP = "import time; time.sleep(60)"
ITEM = {INDEX: "0", ATTEMPT: "1", "test": "yes"}
AWAIT_SIGNAL = "import time\nwhile True: time.sleep(0.05)"
"""A loop of short sleeps: a signal right before one long sleep would be handled after it."""


class Watch:
    """A watch over all jobs of the test, which has begun, and what it has said last of each."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._observations = cluster.watch({"test": "yes"})
        self.seen: dict[str, Observation] = {}

    async def until(self, **phases: Phase) -> None:
        """Read until each job has its phase."""
        async with asyncio.timeout(DEADLINE_S):
            while any(name not in self.seen for name in phases) or any(
                self.seen[name].phase is not phase for name, phase in phases.items()
            ):
                seen = await anext(self._observations)
                self.seen[seen.name] = seen

    async def aclose(self) -> None:
        await self._observations.aclose()  # type: ignore[attr-defined]


@pytest.fixture
async def watch(cluster: LocalCluster) -> AsyncIterator[Watch]:
    watch = Watch(cluster)
    yield watch
    await watch.aclose()


async def test_a_killed_supervisor_s_jobs_are_lost_and_gone(
    cluster: LocalCluster,
    watch: Watch,
    home: Path,
    environ: dict[str, str],
    runner: Path,
) -> None:
    await run_job(cluster, spec("done", "print('kept')"))
    for name in ("r1", "r2", "queued"):
        await cluster.launch(spec(name, SLEEP, grace=30.0))
    await watch.until(r1=Phase.RUNNING, r2=Phase.RUNNING, queued=Phase.PENDING)
    running = {name: watch.seen[name].executor for name in ("r1", "r2", "queued")}
    jobs = marked(home)
    pid = signal_supervisor(home, signal.SIGKILL)
    second = LocalCluster(home, environ, runner=runner)
    assert await second.find() == [], "the next supervisor doesn't know the jobs of this one"
    await watch.until(r1=Phase.GONE, r2=Phase.GONE, queued=Phase.GONE)
    for name in running:
        seen = watch.seen[name]
        assert seen.executor == running[name]
        assert seen.message == f"its supervisor (process {pid}) died, and its jobs with it"
    assert not any(alive(job) for job in jobs)
    assert await lines(second, "done") == ["kept"]
    # The first client reconnects without help.
    assert (await run_job(cluster, spec("next"))).exit_code == 0
    await second.aclose()


async def test_a_job_being_deleted_is_gone_after_the_supervisor_s_death(
    cluster: LocalCluster, home: Path
) -> None:
    source = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up')\n" + SLEEP
    await hear_job(cluster, spec("stubborn", source, grace=60.0))
    watch = cluster.watch({"test": "yes"})
    assert (await anext(watch)).phase is Phase.RUNNING
    await cluster.delete(names=["stubborn"])
    signal_supervisor(home, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        seen = await anext(watch)
        while seen.phase is not Phase.GONE:
            seen = await anext(watch)
    assert await cluster.find() == []
    await watch.aclose()  # type: ignore[attr-defined]


async def test_supervisor_and_parent_die_together(
    cluster: LocalCluster, watch: Watch, home: Path
) -> None:
    """Then only the mark identifies the processes that a job has started."""
    daemon_source = (
        "import os, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork():\n        os._exit(0)\n"
        "    time.sleep(60)\n    os._exit(0)\n"
        "os.wait()\nprint('up', flush=True)\ntime.sleep(60)"
    )
    await hear_job(cluster, spec("both", daemon_source))
    (parent,) = parents(home)
    assert len(marked(home)) == 3  # the parent, the job, its daemon
    await watch.until(both=Phase.RUNNING)
    os.kill(parent, signal.SIGSTOP)
    signal_supervisor(home, signal.SIGKILL)
    os.kill(parent, signal.SIGKILL)
    await watch.until(both=Phase.GONE)
    assert marked(home) == []


async def test_a_stopped_parent_does_not_outlive_its_supervisor(
    cluster: LocalCluster, watch: Watch, home: Path
) -> None:
    await cluster.launch(spec("job", SLEEP))
    await watch.until(job=Phase.RUNNING)
    (parent,) = await eventually(lambda: parents(home))
    await eventually(lambda: len(marked(home)) == 2)
    os.kill(parent, signal.SIGSTOP)
    signal_supervisor(home, signal.SIGKILL)
    await watch.until(job=Phase.GONE)
    assert not alive(parent)


async def test_ending_the_supervisor_ends_jobs_politely(
    cluster: LocalCluster, watch: Watch, home: Path, tmp_path: Path
) -> None:
    source = (
        "import signal, sys\n"
        f"def stop(*a):\n    open({str(tmp_path / 'asked')!r}, 'w'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop); print('up')\n" + AWAIT_SIGNAL
    )
    await hear_job(cluster, spec("asked", source))
    await watch.until(asked=Phase.RUNNING)
    pid = signal_supervisor(home, signal.SIGTERM)
    await watch.until(asked=Phase.ENDED)
    seen = watch.seen["asked"]
    assert (seen.reason, "asked to stop" in seen.message) == (Reason.LOST, True)
    assert (tmp_path / "asked").exists()
    await eventually(lambda: not alive(pid))


async def test_a_job_whose_parent_has_just_died_can_be_deleted(
    cluster: LocalCluster, home: Path
) -> None:
    """The deletion arrives after the parent's death and before its processes are collected."""
    source = "import subprocess; subprocess.Popen(['sleep', '60']); print('up', flush=True)\n"
    await hear_job(cluster, spec("orphan", source + SLEEP))
    (parent,) = parents(home)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(SupervisorPaths(home).socket))
        sock.sendall(encode({"op": "hello", "protocol": VERSION, "id": 1}))
        sock.recv(1000)
        pid = signal_supervisor(home, signal.SIGSTOP)
        os.kill(parent, signal.SIGKILL)  # the supervisor sees this before the request
        await eventually(lambda: not alive(parent))
        sock.sendall(encode({"op": "delete", "names": ["orphan"], "id": 2}))
        os.kill(pid, signal.SIGCONT)
        await gone(cluster, "orphan")
    assert supervisor_pid(home) == pid
    await eventually(lambda: not marked(home))


@pytest.mark.full
async def test_requests_during_the_supervisor_s_end_go_to_the_next_one(
    cluster: LocalCluster, home: Path
) -> None:
    source = (
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *a: print('asked'))\n"
        "print('up')\nwhile True: time.sleep(60)"
    )
    await cluster.launch(spec("stubborn", source))
    pid = 0
    async with asyncio.timeout(DEADLINE_S):
        async for line in cluster.logs("stubborn", follow=True):
            if line == "asked":
                break
            pid = signal_supervisor(home, signal.SIGTERM)
    names = [f"next{i}" for i in range(3)]
    await asyncio.gather(*(cluster.launch(spec(name)) for name in names))
    for name in names:
        assert (await until(cluster, name, Phase.ENDED)).exit_code == 0
    assert supervisor_pid(home) != pid


async def test_many_starters_make_one_supervisor(
    home: Path, environ: dict[str, str], runner: Path
) -> None:
    clusters = [LocalCluster(home, environ, runner=runner) for _ in range(6)]
    await asyncio.gather(*(cluster.launch(spec(f"j{i}")) for i, cluster in enumerate(clusters)))
    for i, cluster in enumerate(clusters):
        await until(cluster, f"j{i}")
        assert len(await cluster.find()) == 6
    await eventually(lambda: len(supervisors(home)) == 1)  # the others exit
    await asyncio.gather(*(cluster.aclose() for cluster in clusters))


async def test_a_stale_socket_is_in_nobody_s_way(cluster: LocalCluster, home: Path) -> None:
    paths = SupervisorPaths(home)
    paths.state.mkdir(parents=True)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(paths.socket))
    stale.close()
    assert (await run_job(cluster, spec("one"))).exit_code == 0


async def test_an_idle_supervisor_leaves_and_the_logs_stay(
    home: Path, environ: dict[str, str], runner: Path
) -> None:
    cluster = LocalCluster(home, {**environ, "KINETIC_LOCAL_IDLE_S": "0.1"}, runner=runner)
    await run_job(cluster, spec("one", "print('hello')"))
    pid = supervisor_pid(home)
    await asyncio.sleep(0)  # it stays because a connection is open
    assert alive(pid)
    await cluster.aclose()
    await eventually(lambda: not alive(pid))
    assert marked(home) == [] and not SupervisorPaths(home).socket.exists()
    again = LocalCluster(home, environ, runner=runner)
    assert await lines(again, "one") == ["hello"]
    await again.aclose()


async def test_an_idle_supervisor_stays_until_a_client_has_heard_how_a_job_died(
    home: Path, environ: dict[str, str], runner: Path
) -> None:
    environ = {**environ, "KINETIC_LOCAL_IDLE_S": "0"}
    async with AsyncExitStack() as stack:
        cluster, again = (LocalCluster(home, environ, runner=runner) for _ in range(2))
        stack.push_async_callback(cluster.aclose)
        stack.push_async_callback(again.aclose)
        await cluster.launch(spec("killed", "import os; os.kill(os.getpid(), 9)", labels=ITEM))
        while (await cluster.find())[0].phase is not Phase.ENDED:  # this asks for all jobs
            await asyncio.sleep(0.01)
        pid = supervisor_pid(home)
        await cluster.aclose()
        (seen,) = await again.find(names=["killed"])
        assert seen.message.startswith("its process was killed by SIGKILL")
        assert supervisor_pid(home) == pid
        await again.aclose()
        await eventually(lambda: not alive(pid))


async def test_a_launch_that_is_repeated_at_the_next_supervisor_names_no_process(
    cluster: LocalCluster,
) -> None:
    """The process found the claim of another, which has died with its supervisor."""
    seen = await run_job(cluster, spec("again", f"code = {wire.EXIT_FINAL}", labels=ITEM))
    assert (seen.executor, seen.exit_code) == ("", wire.EXIT_FINAL)


async def test_clients_come_while_the_supervisor_leaves(
    home: Path, environ: dict[str, str], runner: Path
) -> None:
    """No request is lost when clients connect while the supervisor exits, again and again."""
    environ = {**environ, "KINETIC_LOCAL_IDLE_S": "0"}
    for i in range(12):
        cluster = LocalCluster(home, environ, runner=runner)
        async with asyncio.timeout(DEADLINE_S):
            await cluster.launch(spec(f"j{i}"))
            assert len(await cluster.find(names=[f"j{i}"])) == 1
        await cluster.aclose()
    assert await eventually(lambda: not supervisor_pid(home))


FORKS_WHILE_CONNECTING = """
import os, pathlib, sys
from kinetic.aio.local import supervisor

read_fd, write_fd = os.pipe()
forked = []

def fork(event, arguments):
    if event == "subprocess.Popen" and not forked:
        forked.append(os.fork())
        if forked == [0]:
            os.close(write_fd)
            os.read(read_fd, 1)  # until the program has ended
            os._exit(0)

sys.addaudithook(fork)
supervisor.connect(pathlib.Path(sys.argv[1]), os.environ).close()
assert forked
"""


async def test_a_program_may_fork_while_it_starts_a_supervisor(home: Path) -> None:
    """The forked process inherits the pipe to the supervisor, and keeps it open."""
    async with asyncio.timeout(DEADLINE_S):
        await run(sys.executable, "-c", FORKS_WHILE_CONNECTING, str(home))


async def test_a_long_home_works(tmp_path: Path, environ: dict[str, str], runner: Path) -> None:
    home = tmp_path / ("long " * 12) / ("name" * 20)
    home.mkdir(parents=True)
    environ |= {"KINETIC_HOME": str(home)}
    cluster = LocalCluster(home, environ, runner=runner)
    try:
        await run_job(cluster, spec("one", "print('far away')"))
        assert await lines(cluster, "one") == ["far away"]
    finally:
        await cluster.aclose()
        signal_supervisor(home, signal.SIGTERM)
        await eventually(lambda: not supervisor_pid(home))


async def test_an_unusable_home_raises_an_error_that_names_the_variable(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for home in (file, file / "below", Path("/proc/kinetic")):
        cluster = LocalCluster(home, environ)
        with pytest.raises(Unavailable, match="set KINETIC_HOME to another"):
            await cluster.find()
        with pytest.raises(Unavailable):
            await anext(cluster.watch({}))
        with pytest.raises(ConfigurationError, match="set KINETIC_HOME to another"):
            await cluster.root_key()
        await cluster.aclose()


async def test_the_report_of_a_new_supervisor_may_name_a_long_path(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    parts = 9 if sys.platform == "linux" else 2  # macOS allows 1,024 bytes
    home = tmp_path.joinpath(*["漢" * 80] * parts)
    SupervisorPaths(home).lock.mkdir(parents=True)  # so that no supervisor can start
    async with aclosing(LocalCluster(home, environ)) as cluster:
        with pytest.raises(Unavailable, match=r"lock: .*set KINETIC_HOME to another"):
            await cluster.find()


async def test_a_damaged_key_is_reported(home: Path, environ: dict[str, str]) -> None:
    (home / "key").write_bytes(b"short")
    with pytest.raises(ConfigurationError, match="5 bytes instead of 32"):
        await LocalCluster(home, environ).root_key()


@pytest.mark.parametrize("name", ["logs", "work"])
async def test_a_folder_that_is_deleted_under_the_supervisor_is_recreated_and_logged(
    cluster: LocalCluster, home: Path, name: str
) -> None:
    await run_job(cluster, spec("before", "print('up')"))
    folder = SupervisorPaths(home).state / name
    shutil.rmtree(folder)
    assert (await run_job(cluster, spec("after", "print('fine')"))).exit_code == 0
    assert await lines(cluster, "after") == ["fine"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert SupervisorPaths(home).own_log.read_text().count(f"{folder} was deleted") == 1
    await cluster.delete(names=["before", "after"])
    await gone(cluster, "after")


async def run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == 0


def test_a_supervisor_that_says_nothing_is_given_up(
    home: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = SupervisorPaths(home)
    paths.state.mkdir(parents=True)
    blocker = socket.socket(socket.AF_UNIX)
    blocker.bind(str(paths.socket))
    paths.socket.unlink()
    paths.socket.mkdir()  # nothing can listen here
    with pytest.raises(supervisor.SupervisorError, match="set KINETIC_HOME to another"):
        supervisor.connect(home, environ)
    blocker.close()


async def test_a_client_that_does_not_read_delays_no_other(
    cluster: LocalCluster, home: Path
) -> None:
    await cluster.find()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(SupervisorPaths(home).socket))
        sock.sendall(encode({"op": "watch", "labels": {}}))
        labels = {"padding": "x" * 4000}
        await cluster.launch(spec("wide", SLEEP, labels=labels))
        for _ in range(3):
            await asyncio.gather(
                *(
                    cluster.launch(spec(f"n{i}", start_timeout=60.0, labels=labels))
                    for i in range(300)
                )
            )
            await cluster.delete(names=[f"n{i}" for i in range(300)])
        memory = psutil.Process(supervisor_pid(home)).memory_info().rss
        assert memory < 60 << 20
        sock.settimeout(DEADLINE_S)
        decoder, last = Decoder(), {}
        while last.get("n299") != "gone" or last.get("wide") != "running":
            for header, _ in decoder.feed(sock.recv(1 << 20)):
                last |= {view["name"]: view["state"] for view in header["jobs"]}


def test_on_windows_the_error_names_wsl(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigurationError, match="WSL"):
        LocalCluster(home, {})


async def first_message(cluster: LocalCluster, name: str) -> Observation:
    """Wait for the supervisor's message why the job doesn't run. It accepts no new connections."""
    async with asyncio.timeout(DEADLINE_S):
        while not (seen := (await cluster.find(names=[name]))[0]).message:
            await asyncio.sleep(0.01)
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process")
async def test_a_job_that_cannot_be_started_says_why_and_a_worker_is_started_again(
    cluster: LocalCluster, home: Path
) -> None:
    assert (await run_job(cluster, spec("first"))).exit_code == 0
    pid, (parent,) = supervisor_pid(home), parents(home)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    os.kill(parent, signal.SIGKILL)
    await eventually(lambda: not parents(home))
    await cluster.launch(spec("alone"))
    seen = await first_message(cluster, "alone")
    assert (seen.phase, seen.reason) == (Phase.ENDED, Reason.SETUP)
    assert "Too many open files" in seen.message
    batch = {SUBMISSION: "grp-local-1"}
    crew = Crew(terms=Terms(workers=1), outputs="", created=0.0)
    worker = spec("grp-local-1-r0", labels=batch, crew=crew)
    await cluster.scale(worker, number=0, ranks=range(1))

    async def waiting() -> Observation | None:
        found = await cluster.find(labels=batch)
        return next((it for it in found if it.phase is Phase.PENDING and it.message), None)

    async with asyncio.timeout(DEADLINE_S):
        while (worker := await waiting()) is None:
            await asyncio.sleep(0.01)
    assert "waiting to start again" in worker.message and "Too many open files" in worker.message
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    await eventually(lambda: len(marked(home)) > 1)  # the parent, and the worker
