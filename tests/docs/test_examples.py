"""The examples run as a user runs them, at a size for tests, and bring the right answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.face.child import listener

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DEADLINE = 100.0


def started(example: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLES / example), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(example: str, *arguments: str) -> str:
    process = started(example, *arguments)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0 and "Traceback" not in err, out + err
    return out


def numbers(text: str) -> list[float]:
    return [float(one) for one in re.findall(r"\d+\.?\d*(?:e-?\d+)?", text)]


@pytest.mark.parametrize("example", ["detached.py", "async_app.py"])
def test_the_example_runs(example: str) -> None:
    """sweep.py is README's first command, which CI runs as it stands there."""
    assert output(example)


def best_of(throws: int) -> tuple[float, float]:
    """Metres and angle of the best throw, computed right here."""
    namespace = runpy.run_path(str(EXAMPLES / "throwing.py"))
    reach, angles = namespace["reach"], namespace["angles"]
    return max((reach.local(angle), angle) for angle in angles(throws))


def test_the_sweep_finds_the_angle_that_carries_farthest() -> None:
    metres, angle = best_of(45)
    assert 35 < angle < 45, "with air, flatter than without"
    assert numbers(output("sync_sweep.py", "45")) == [45, round(angle, 2), round(metres, 2)]


def test_the_search_finds_what_the_measurements_were_made_with() -> None:
    trials, stiffness, friction, error = numbers(output("adaptive.py", "90"))
    assert trials == 90
    assert stiffness == pytest.approx(3.7, abs=0.2)
    assert friction == pytest.approx(0.42, abs=0.2)
    assert error < 1.5


# --- the web application, over HTTP ---


class Server:
    """The example, listening on a port of its own."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.process = started("web_sweep.py", str(port))

    def until_it_listens(self) -> None:
        deadline = time.monotonic() + DEADLINE
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            assert self.process.poll() is None and time.monotonic() < deadline, self.end()
            time.sleep(0.02)

    def ask(self, method: str, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE)
        connection.request(method, path, headers={"Connection": "close"})
        return connection.getresponse()

    def json(self, method: str, path: str) -> tuple[int, Any]:
        with self.ask(method, path) as answer:
            return answer.status, json.loads(answer.read())

    def events(self, path: str) -> Generator[dict[str, Any]]:
        with self.ask("GET", path) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            for line in answer:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

    def end(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, err


@pytest.fixture
def server() -> Iterator[Server]:
    with listener() as probe:
        port = probe.getsockname()[1]
    server = Server(port)
    try:
        server.until_it_listens()
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def test_a_sweep_is_started_watched_and_cancelled_over_http(server: Server) -> None:
    status, long = server.json("POST", "/sweeps?throws=1000")
    assert status == 201
    watching = server.events(f"/sweeps/{long['id']}")
    assert next(watching)["total"] in (None, 1000)
    status, short = server.json("POST", "/sweeps?throws=40")
    told = [*server.events(f"/sweeps/{short['id']}")]
    assert (told[-1]["succeeded"], told[-1]["total"]) == (40, 40)
    assert [one["succeeded"] for one in told] == sorted(one["succeeded"] for one in told)
    assert told[-1]["trouble"] == ""
    assert (told[-1]["best"]["metres"], told[-1]["best"]["angle"]) == best_of(40)
    status, counts = server.json("DELETE", f"/sweeps/{long['id']}")
    assert status == 200 and counts["NOT_FOUND"] > 0
    last = [*watching][-1]
    assert last["succeeded"] + last["cancelled"] + last["failed"] == 1000
    assert server.json("GET", "/sweeps/nothing")[0] == 404
    assert server.end()[0] == 0


def test_the_application_ends_its_sweeps_when_it_ends(server: Server) -> None:
    _, sweep = server.json("POST", "/sweeps?throws=1000")
    watching = server.events(f"/sweeps/{sweep['id']}")
    while next(watching)["succeeded"] == 0:
        pass
    watching.close()  # whoever watched has gone away
    status, err = server.end()
    assert status == 0 and "Traceback" not in err, err
    code = f"import kinetic; print(kinetic.attach_batch({sweep['id']!r}).status_counts())"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    counts = json.loads(found.stdout.replace("'", '"'))
    assert counts.keys() == {"SUCCEEDED", "NOT_FOUND"} and sum(counts.values()) == 1000
