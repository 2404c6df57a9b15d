"""Tests that every cluster must pass. Import them all and define the fixture `place`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from kinetic.aio.ports import Cluster, JobSpec, Observation, Phase
from kinetic.errors import BackendError, LaunchError, NotFound, Unavailable
from kinetic.job_status import Reason
from kinetic.testing import Run
from tests import jobs
from tests.jobs import DEADLINE_S, job_spec, watching
from tests.orders import facts_of


@dataclass
class Place:
    """A cluster whose jobs print lines, wait for a gate, print their executor and end."""

    cluster: Cluster
    again: Callable[[], Cluster]
    folder: Path
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    open_files: list[int] = field(default_factory=list)
    keeps_secrets: bool = True

    def job(
        self,
        name: str,
        *,
        lines: list[str] | None = None,
        gate: str = "",
        code: int = 0,
        **more: Any,
    ) -> JobSpec:
        """Make a job that prints *lines*, waits for *gate* if given, and ends with *code*."""
        path = self.folder / gate
        if gate and gate not in self.gates:
            self.gates[gate] = asyncio.Event()
            os.mkfifo(path)
        facts = {"lines": lines or [], "gate": str(path) if gate else "", "code": code}
        return job_spec(name, facts, **more)

    async def work(self, run: Run) -> int:
        """Do in a coroutine what such a job does."""
        order = facts_of(run.spec.order)
        run.print("\n".join(order["lines"]))
        if order["gate"]:
            await self.gates[Path(order["gate"]).name].wait()
        run.print("last")
        run.print(run.executor)
        return int(order["code"])

    def open(self, gate: str) -> None:
        """Let the jobs that wait for *gate* continue."""
        self.gates[gate].set()
        self.open_files.append(os.open(self.folder / gate, os.O_RDWR | os.O_NONBLOCK))

    async def until(
        self, name: str, *phases: Phase, after: Observation | None = None
    ) -> Observation:
        """See `jobs.until`."""
        return await jobs.until(self.cluster, name, *phases, after=after)

    async def running(self, count: int, among: set[str]) -> set[str]:
        """Return the names of the first *count* of these jobs that run."""
        found: set[str] = set()
        async with asyncio.timeout(DEADLINE_S), watching(self.cluster) as watch:
            async for seen in watch:
                if seen.name in among and seen.phase is Phase.RUNNING:
                    found.add(seen.name)
                if len(found) == count:
                    return found
        raise AssertionError("a watch never ends")

    async def gone(self, *names: str) -> None:
        """Wait until these jobs no longer exist."""
        await jobs.gone(self.cluster, *names)

    async def names(self, **labels_or_names: Any) -> list[str]:
        """Return the sorted names of the jobs that match."""
        return await jobs.names(self.cluster, **labels_or_names)

    async def lines(self, name: str, **options: Any) -> list[str]:
        """Read the job's log."""
        return await jobs.lines(self.cluster, name, **options)


# --- launch ---


async def test_a_job_runs_and_its_end_is_reported(place: Place) -> None:
    await place.cluster.launch(place.job("one", lines=["hello"], code=7))
    seen = await place.until("one")
    assert (seen.phase, seen.exit_code) == (Phase.ENDED, 7)
    assert seen.labels == {"test": "yes", "name": "one"}
    assert "exit code 7" in seen.message
    assert seen.created_at.endswith("+00:00")


async def test_the_reported_executor_is_the_one_the_job_knows(place: Place) -> None:
    await place.cluster.launch(place.job("one"))
    seen = await place.until("one")
    assert (await place.lines("one"))[-1] == seen.executor != ""


async def test_launching_twice_starts_once(place: Place) -> None:
    job = place.job("same")
    await asyncio.gather(*(place.cluster.launch(job) for _ in range(5)))
    seen = await place.until("same")
    await place.cluster.launch(job)  # succeeds: the job has ended but still exists
    assert await place.cluster.find(names=["same"]) == [seen]
    assert len(await place.lines("same")) == 3


async def test_a_name_is_free_again_when_its_job_is_gone(place: Place) -> None:
    await place.cluster.launch(place.job("again", gate="never"))
    first = await place.until("again", Phase.RUNNING)
    await place.cluster.delete(names=["again"])
    await place.cluster.launch(place.job("again", code=5))
    second = await place.until("again", Phase.ENDED, after=first)
    assert second.exit_code == 5
    assert second.executor != first.executor


async def test_a_job_without_a_name_is_refused(place: Place) -> None:
    with pytest.raises(LaunchError, match="name"):
        await place.cluster.launch(place.job(""))
    assert await place.cluster.find() == []


async def test_jobs_wait_in_order_for_a_slot(place: Place) -> None:
    for name in ("h1", "h2"):
        await place.cluster.launch(place.job(name, gate="hold"))
    await place.running(2, {"h1", "h2"})  # a cluster starts them in any order
    for number in range(3):
        await place.cluster.launch(place.job(f"q{number}"))
    waiting = await place.cluster.find(names=["q0", "q1", "q2"])
    assert {(seen.phase, seen.executor) for seen in waiting} == {(Phase.PENDING, "")}
    place.open("hold")
    for number in range(3):
        await place.until(f"q{number}", Phase.ENDED)


# --- limits ---


async def test_a_job_is_ended_at_its_timeout(place: Place) -> None:
    # The grace lets the job end by itself: a killed job has another reason.
    await place.cluster.launch(place.job("late", gate="never", timeout=0.2, grace=30.0))
    seen = await place.until("late")
    assert (seen.phase, seen.reason) == (Phase.ENDED, Reason.DEADLINE)
    assert "ran longer than its timeout" in seen.message


async def test_a_job_that_waits_too_long_never_starts(place: Place) -> None:
    for name in ("h1", "h2"):
        await place.cluster.launch(place.job(name, gate="hold"))
    await place.running(2, {"h1", "h2"})
    await place.cluster.launch(place.job("late", start_timeout=0.2))
    seen = await place.until("late")
    assert (seen.phase, seen.reason, seen.executor) == (Phase.ENDED, Reason.UNSCHEDULABLE, "")
    assert "start_timeout" in seen.message
    await place.cluster.delete(names=["h1", "h2"])
    await place.gone("h1", "h2")
    place.cluster = place.again()  # a client may extend the start timeouts of its jobs
    await place.cluster.launch(place.job("now", start_timeout=0.0))
    assert (await place.until("now")).exit_code == 0


# --- delete and find ---


async def test_one_call_deletes_all_that_carry_labels(place: Place) -> None:
    await place.cluster.launch(place.job("other", labels={"test": "yes", "group": "b"}))
    await place.until("other")
    numbers = {f"n{number}": str(number) for number in range(4)}
    for name, number in numbers.items():
        labels = {"test": "yes", "group": "a", "number": number}
        await place.cluster.launch(place.job(name, gate="never", labels=labels))
    running = await place.running(2, {*numbers})  # the other two wait
    waiting = max(numbers.keys() - running)
    await place.cluster.delete(labels={"group": "a", "number": numbers[waiting]})
    left = sorted(numbers.keys() - {waiting})
    await place.gone(waiting)  # a deleted job exists until none of its processes can run
    assert await place.names(labels={"group": "a"}) == left
    await place.cluster.delete(labels={"group": "a"})
    await place.gone(*left)
    assert await place.names() == ["other"]


async def test_deleting_what_is_not_there_does_not_matter(place: Place) -> None:
    await place.cluster.delete(names=["nobody"], labels={"no": "body"})
    assert await place.cluster.find() == []


async def test_find_is_by_name_by_label_or_all(place: Place) -> None:
    for name in ("a", "b", "c"):
        await place.cluster.launch(place.job(name))
        await place.until(name)
    assert await place.names() == ["a", "b", "c"]
    assert await place.names(names=["c", "x", "a"]) == ["a", "c"]
    assert await place.names(labels={"name": "b"}) == ["b"]
    assert await place.names(labels={"name": "b", "test": "no"}) == []
    assert await place.names(names=["a"], labels={"name": "b"}) == ["a", "b"]


async def test_what_was_launched_is_found_and_what_was_deleted_is_not(place: Place) -> None:
    for _ in range(5):
        await place.cluster.launch(place.job("one", gate="never"))
        assert await place.names(names=["one"]) == ["one"]
        await place.cluster.delete(names=["one"])
        await place.gone("one")


# --- watch ---


async def test_a_watch_tells_what_is_there_and_then_what_changes(place: Place) -> None:
    await place.cluster.launch(place.job("before"))
    await place.until("before")
    news: list[tuple[str, Phase]] = []
    async with asyncio.timeout(DEADLINE_S), watching(place.cluster) as watch:
        assert (first := await anext(watch)).name == "before"
        assert first.phase is Phase.ENDED
        await place.cluster.launch(place.job("other", labels={"test": "no"}))
        await place.cluster.launch(place.job("after", gate="gate"))
        async for seen in watch:
            news.append((seen.name, seen.phase))
            if news[-1] == ("after", Phase.RUNNING):
                place.open("gate")
            elif news[-1] == ("after", Phase.ENDED):
                await place.cluster.delete(names=["after", "before", "nobody"])
            if {("after", Phase.GONE), ("before", Phase.GONE)} <= {*news}:
                break
    assert not [pair for pair in news if pair[0] == "other"]
    assert [phase for name, phase in news if name == "after" and phase is not Phase.PENDING] == [
        Phase.RUNNING,
        Phase.ENDED,
        Phase.GONE,
    ]


async def test_a_job_that_is_deleted_while_it_runs_is_reported_as_gone(place: Place) -> None:
    await place.cluster.launch(place.job("one", gate="never"))
    async with asyncio.timeout(DEADLINE_S), watching(place.cluster) as watch:
        async for seen in watch:
            if seen.phase is Phase.RUNNING:
                await place.cluster.delete(names=["one"])
            elif seen.phase is Phase.GONE:
                break
    assert seen.labels["name"] == "one"
    assert await place.cluster.find() == []


async def test_every_watcher_sees_everything(place: Place) -> None:
    async def ends(labels: dict[str, str]) -> set[str]:
        ended: set[str] = set()
        async with watching(place.cluster, labels) as watch:
            async for seen in watch:
                if seen.phase is Phase.ENDED:
                    ended.add(seen.name)
                if "last" in ended:
                    return ended
        raise AssertionError("a watch never ends")

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        watchers = [group.create_task(ends({"test": "yes"})) for _ in range(2)]
        watchers.append(group.create_task(ends({"name": "last"})))
        watchers.append(group.create_task(ends({})))
        for name in ("a", "b"):
            await place.cluster.launch(place.job(name))
            await place.until(name)
        await place.cluster.launch(place.job("last"))
    assert [watcher.result() for watcher in watchers] == [
        {"a", "b", "last"},
        {"a", "b", "last"},
        {"last"},
        {"a", "b", "last"},
    ]


async def test_a_watcher_that_does_not_read_gets_the_latest_state(place: Place) -> None:
    async with asyncio.timeout(DEADLINE_S), watching(place.cluster) as slow:
        await place.cluster.launch(place.job("first", gate="seen"))
        seen = await anext(slow)
        assert (seen.name, seen.phase is Phase.ENDED) == ("first", False)
        place.open("seen")  # only now: a watch reports a job that has already ended only once
        await place.until("first")
        await place.cluster.launch(place.job("one"))
        await place.until("one")
        last: dict[str, Phase] = {}
        async for seen in slow:
            last[seen.name] = seen.phase
            if last == {"first": Phase.ENDED, "one": Phase.ENDED}:
                break


# --- logs ---


async def test_a_log_is_lines_and_can_be_cut_to_its_last(place: Place) -> None:
    await place.cluster.launch(place.job("one", lines=["a", "", "ü"]))
    executor = (await place.until("one")).executor
    assert await place.lines("one") == ["a", "", "ü", "last", executor]
    assert await place.lines("one", tail=2) == ["last", executor]
    assert await place.lines("one", tail=0) == []
    assert await place.lines("one", tail=99) == ["a", "", "ü", "last", executor]
    assert await place.lines("one", follow=True) == ["a", "", "ü", "last", executor]


async def test_following_a_log_waits_for_the_end(place: Place) -> None:
    await place.cluster.launch(place.job("one", lines=["a"], gate="gate"))
    await place.until("one", Phase.RUNNING)
    lines: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        async for line in place.cluster.logs("one", follow=True):
            lines.append(line)
            if line == "a":
                place.open("gate")
    assert lines[:2] == ["a", "last"] and len(lines) == 3


async def test_there_is_no_log_of_what_is_not_there(place: Place) -> None:
    with pytest.raises(NotFound, match="no job 'nobody'"):
        await place.lines("nobody")
    await place.cluster.launch(place.job("one"))
    await place.until("one")
    await place.cluster.delete(names=["one"])
    await place.gone("one")
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(NotFound, match="no job 'one'"):
            while True:  # a pod, and its log with it, outlives the object that created it
                await place.lines("one")
                await asyncio.sleep(0.05)


# --- ports ---


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what arrives, until "end"."""
    while (data := await reader.read(65536)) not in (b"", b"end"):
        writer.write(data)
        await writer.drain()
    writer.close()
    await writer.wait_closed()


async def test_a_port_of_a_running_job_is_reached(place: Place) -> None:
    """Data flows both ways on several connections; the jobs share this process's loopback."""
    content = os.urandom(300_000)

    async def exchanged() -> bytes:
        stream = await place.cluster.dial("one", port)
        async with stream:
            await stream.send(content)
            received = b""
            while len(received) < len(content):
                received += await stream.receive()
            await stream.send(b"end")
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
        return received

    async with asyncio.timeout(DEADLINE_S), await asyncio.start_server(echo, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        await place.cluster.launch(place.job("one", gate="gate"))
        await place.until("one", Phase.RUNNING)
        assert await asyncio.gather(exchanged(), exchanged()) == [content, content]
        for name, host in (("one", 7), ("nobody", 0)):
            with pytest.raises(NotFound, match=name):
                await place.cluster.dial(name, port, host=host)
        with pytest.raises(Unavailable, match="port 1 "):
            async with await place.cluster.dial("one", 1) as stream:
                await stream.receive()
        place.open("gate")
        await place.until("one")
        with pytest.raises(NotFound, match="one"):
            await place.cluster.dial("one", port)


# --- keys and secrets ---


async def test_the_root_key_is_always_the_same(place: Place) -> None:
    clients = place.cluster, place.again()
    keys = await asyncio.gather(*(client.root_key() for client in clients for _ in range(4)))
    assert len({*keys}) == 1 and len(keys[0]) == 32


async def test_a_secret_is_kept_until_it_is_dropped(place: Place) -> None:
    """A cluster that would keep it in a plain file doesn't keep it."""
    cluster: Any = place.cluster
    if not place.keeps_secrets:
        await cluster.keep_secret("grp-a", b"1")
        with pytest.raises(NotFound, match="grp-a"):
            await cluster.secret("grp-a")
        await cluster.drop_secret(["grp-a"])
        return
    for name, content in (("grp-a", b"1\x00\xff"), ("grp-b", b""), ("grp-c", b"x" * 100_000)):
        await cluster.keep_secret(name, content)
    other: Any = place.again()
    assert await other.secret("grp-a") == b"1\x00\xff"
    assert [len(await other.secret(name)) for name in ("grp-b", "grp-c")] == [0, 100_000]
    await other.drop_secret(["grp-a", "grp-c", "nobody"])
    for name in ("grp-a", "grp-c", "nobody"):
        with pytest.raises(NotFound, match=name):
            await cluster.secret(name)
    assert await cluster.secret("grp-b") == b""
    await cluster.keep_secret("grp-b", b"new")
    assert await cluster.secret("grp-b") == b"new"


# --- the end ---


async def test_jobs_go_on_when_a_client_is_closed(place: Place) -> None:
    await place.cluster.launch(place.job("one", gate="gate", code=3))
    first = await place.until("one", Phase.RUNNING)
    await place.cluster.aclose()
    place.cluster = place.again()
    assert await place.cluster.find(names=["one"]) == [first]
    place.open("gate")
    assert (await place.until("one")).exit_code == 3


async def test_a_client_that_is_closed_follows_no_log_any_more(place: Place) -> None:
    await place.cluster.launch(place.job("one", lines=["a"], gate="gate", code=3))
    await place.until("one", Phase.RUNNING)
    closed, place.cluster = place.cluster, place.again()
    if place.cluster is closed:
        pytest.skip("all clients of this cluster are one object, which holds nothing open")
    printed = asyncio.Event()

    async def follow() -> None:
        async for line in closed.logs("one", follow=True):
            assert line == "a"
            printed.set()

    following = asyncio.create_task(follow())
    async with asyncio.timeout(DEADLINE_S), watching(closed) as watch:
        await printed.wait()
        await anext(watch)
        await closed.aclose()
        requests: list[Callable[[], Awaitable[object]]] = [
            lambda: following,
            lambda: anext(watch),
            lambda: closed.find(names=["one"]),
            lambda: closed.delete(names=["one"]),
            lambda: closed.launch(place.job("two")),
            lambda: closed.dial("one", 1),
        ]
        for request in requests:
            with pytest.raises(BackendError, match="closed"):
                await request()
    async with asyncio.timeout(DEADLINE_S), watching(closed) as watch:
        with pytest.raises(BackendError, match="closed"):
            await anext(watch)
    assert await place.names() == ["one"]
    place.open("gate")
    assert (await place.until("one")).exit_code == 3


async def test_a_request_during_a_close_succeeds_or_fails_as_closed(place: Place) -> None:
    other = place.again()
    asking = [asyncio.create_task(other.find()) for _ in range(3)]
    await asyncio.sleep(0)  # start the tasks
    await other.aclose()
    async with asyncio.timeout(DEADLINE_S):
        for answer in await asyncio.gather(*asking, return_exceptions=True):
            assert answer == [] or (isinstance(answer, BackendError) and "closed" in str(answer))
