"""No message ends the supervisor or its jobs."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kinetic._runner.protocol.messages import HEAD, MAX_MESSAGE_BYTES, Decoder, encode
from kinetic._supervisor.jobs import Job
from kinetic._supervisor.protocol import VERSION, JobHeader, SupervisorPaths
from kinetic._supervisor.server import Connection
from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.ports import Phase

from .conftest import hear_job, spec, supervisor_pid

HELLO = encode({"op": "hello", "id": 1, "protocol": VERSION})
OPERATIONS = ("hello", "launch", "delete", "find", "ended", "watch", "unheard")
FIELDS = (
    "id", "protocol", "name", "names", "labels", "command", "runner", "edition",
    "fresh", "cpus", "gpus", "memory_bytes", "timeout", "start_timeout", "grace",
)  # fmt: skip


def framed(header: bytes, body: bytes = b"") -> bytes:
    return HEAD.pack(len(header), len(body)) + header + body


def send(home: Path, *messages: bytes) -> bool:
    """Send *messages* and then hello; return whether the supervisor answers that."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(SupervisorPaths(home).socket))
        decoder = Decoder()
        try:
            sock.sendall(b"".join(messages) + HELLO)
            while data := sock.recv(65536):
                if any("protocol" in header for header, _ in decoder.feed(data)):
                    return True
        except (BrokenPipeError, ConnectionResetError):
            pass
        return False


@pytest.fixture
async def running(cluster: LocalCluster) -> LocalCluster:
    """A cluster that runs a sleeping job."""
    source = "import time; print('up', flush=True); time.sleep(100)"
    await hear_job(cluster, spec("sleeper", source))
    return cluster


@pytest.mark.parametrize(
    "message",
    [
        framed(b'{"a":' * 100_000),
        framed(b"[]"),
        framed(b"\xff\xfe"),
        framed(b'{"op": "hello", "id": 1}'),
        framed(b'{"op": "watch", "labels": ["a"]}'),
        framed(b'{"op": "watch", "labels": {"a": 1}}'),
        framed(b'{"op": "find", "id": 1, "names": 5}'),
        framed(b'{"op": "ended", "id": 1, "name": ["a"]}'),
        HEAD.pack(MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10,
    ],
    ids=[
        "deep", "no object", "no text", "nothing of a version", "labels in a list",
        "a number as label", "a number for names", "a list for a name", "too large", "http",
    ],
)  # fmt: skip
async def test_a_nonsense_message_disconnects_only_its_sender(
    running: LocalCluster, home: Path, message: bytes
) -> None:
    pid = supervisor_pid(home)
    assert not send(home, message)
    assert send(home), "other clients get answers"
    assert supervisor_pid(home) == pid
    [job] = await running.find(names=["sleeper"])
    assert job.phase is Phase.RUNNING


async def test_an_order_that_makes_no_sense_is_refused_and_starts_nothing(
    running: LocalCluster, home: Path
) -> None:
    launch = {
        "op": "launch", "id": 2, "name": "wrong", "labels": {}, "command": ["python"],
        "runner": "/r", "edition": "1", "fresh": False, "cpus": 1,
    }  # fmt: skip
    for field, value in {
        "labels": [1], "command": "python", "runner": 5, "fresh": "yes", "cpus": -1, "gpus": "1",
        "memory_bytes": 0.5, "timeout": "long", "grace": None, "name": "../up",
    }.items():  # fmt: skip
        send(home, encode({**launch, field: value}, b"{}\n{}"))
    assert [seen.name for seen in await running.find()] == ["sleeper"]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
headers = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6).flatmap(
    lambda fields: st.sampled_from(OPERATIONS).map(lambda op: {"op": op, **fields})
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(headers, min_size=1, max_size=3), body=st.binary(max_size=20))
def check_messages(home: Path, messages: list[dict[str, Any]], body: bytes) -> None:
    send(home, *(framed(json.dumps(header).encode(), body) for header in messages))
    assert send(home)


async def test_no_message_ends_the_supervisor_or_a_job(running: LocalCluster, home: Path) -> None:
    pid = supervisor_pid(home)
    check_messages(home)
    assert supervisor_pid(home) == pid
    [job] = await running.find(names=["sleeper"])
    assert job.phase is Phase.RUNNING


class CountingSocket(socket.socket):
    """A socket that counts what is sent."""

    sends = 0

    def send(self, *args: Any) -> int:
        self.sends += 1
        return super().send(*args)


def test_all_news_for_a_client_are_sent_at_once() -> None:
    ours, theirs = socket.socketpair()
    with CountingSocket(fileno=ours.detach()) as counting, theirs:
        connection = Connection(counting)
        header = JobHeader(name="w", labels={}, command=("python",), runner="", edition="")
        workers = [Job(name=f"w{n}", labels={}, created=0.0, header=header) for n in range(2)]
        connection.ends = {worker: [(0, 1)] for worker in workers}
        connection.changes = dict.fromkeys(workers)
        connection.pump(0.0, immediately=True)
        messages = [message for message, _ in Decoder().feed(theirs.recv(1 << 16))]
        assert [len(it["jobs"]) for it in messages] == [0, 0, 2]
        assert counting.sends == 1


def test_messages_are_the_same_wherever_the_stream_is_cut() -> None:
    stream = encode({"op": "a", "text": "ü"}, b"\x00body") + encode({"op": "b"})
    expected = [({"op": "a", "text": "ü"}, b"\x00body"), ({"op": "b"}, b"")]
    for size in (1, 2, 7, len(stream)):
        decoder = Decoder()
        parts = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [message for part in parts for message in decoder.feed(part)] == expected
