"""The examples run as a user runs them, at a small size, and print the right answers."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.face.child import listener
from tests.report.browser import CHROMIUM, MISSING, Browser

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))
DEADLINE = 100.0


def start_example(example: str, *arguments: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLES / example), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(example: str, *arguments: str, cwd: Path = ROOT, deadline: float = DEADLINE) -> str:
    process = start_example(example, *arguments, cwd=cwd)
    out, err = process.communicate(timeout=deadline)
    assert process.returncode == 0 and "Traceback" not in err, out + err
    return out


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_example_has_at_most_80_lines() -> None:
    lengths = {name: (EXAMPLES / name).read_text().count("\n") for name in NAMES}
    assert {name: length for name, length in lengths.items() if length > 80} == {}


def test_the_index_has_every_example() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    assert [name for name in NAMES if f"../examples/{name})" not in page] == []


def test_an_excerpt_on_a_page_is_in_an_example() -> None:
    """`py` marks an excerpt; a `python` block runs in test_code_blocks.py."""
    sources = [re.sub(r"\s+", " ", (EXAMPLES / name).read_text()) for name in NAMES]
    pages = [ROOT / "docs" / "examples.md", *(ROOT / "docs" / "examples").glob("*.md")]
    excerpts = [
        re.sub(r"\s+", " ", excerpt).strip()
        for page in pages
        for excerpt in re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.M | re.S)
    ]
    assert excerpts
    text = "\n".join(sources)
    assert [excerpt for excerpt in excerpts if excerpt not in text] == []


@pytest.mark.full
def test_the_types_of_the_examples_are_right() -> None:
    """Missing libraries don't matter, because mypy still checks the calls of kinetic."""
    options = ["--strict", "--ignore-missing-imports", "--allow-untyped-decorators"]
    cache = {"MYPY_CACHE_DIR": str(ROOT / ".mypy_cache" / "examples")}
    arguments = ("-m", "mypy", *options, "--follow-imports=silent", *NAMES)
    programs.python(*arguments, cwd=EXAMPLES, env={**os.environ, **cache})


@pytest.mark.full
@pytest.mark.parametrize(
    ("example", "arguments", "expected"),
    [
        ("sweep.py", [], r"best: \{'rate': 0\.001, 'epochs': 1000\}"),
        ("detached.py", [], r"348,513 primes"),
        ("checkpointing.py", [], r"(?s)('resumed at': 600, 'attempts': 2.*){3}"),
        ("cross_validation.py", ["2"], r"(?s)support vectors +0\.9.*logistic regression +0\.9"),
        ("data_and_artifacts.py", [], r"(?s)'hill': 7\.\d.*wrote chart\.svg.*fetched \d{3} bytes"),
        ("batch_inference.py", [], r"(?s)40 files in 5 jobs.*worst: review-\d\d\.txt"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".py") else "",
)
def test_the_example_runs(example: str, arguments: list[str], expected: str) -> None:
    assert re.search(expected, output(example, *arguments))


@pytest.mark.full
def test_a_search_continues_after_ctrl_c(tmp_path: Path) -> None:
    first = start_example("optuna_search.py", "500", cwd=tmp_path)
    assert first.stdout is not None
    ended = [first.stdout.readline() for _ in range(3)]
    first.send_signal(signal.SIGINT)
    ended += first.communicate(timeout=DEADLINE)[0].splitlines(keepends=True)
    assert first.returncode != 0
    counted = sum("complete" in line or "pruned" in line for line in ended)
    out = output("optuna_search.py", str(counted + 6), cwd=tmp_path)
    assert all(line in out for line in ended if "complete" in line or "pruned" in line)
    states = [line.split()[1] for line in out.splitlines() if line[:1].isdigit()]
    assert sum(state in ("complete", "pruned") for state in states) == counted + 6
    assert re.search(r"^height \S+ with \{'rate'", out, re.MULTILINE)


# --- examples whose libraries `tox run -e frameworks` installs; vllm_inference.py needs a GPU ---


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("example", "libraries", "expected"),
    [
        ("keras_training.py", ["jax", "keras"], r"(?s)'backend': 'jax'.*saved model\.keras in"),
        ("jax_training.py", ["jax"], r"(?s)process 0: 2 devices.*process 1: 2 devices"),
        ("multi_host.py", ["jax"], r"'hosts': 1, 'mesh'.*'loss': 0\."),
        ("pytorch_training.py", ["torch"], r"(?s)('device': '.*'loss': 0\.0.*){2}"),
        ("gemma4_finetuning.py", ["jax", "keras_hub"], r"saved gemma\.lora\.h5 in"),
        ("llm_finetuning.py", ["torch", "peft"], r"(?s)(saved .*adapter_model\.safetensors.*){2}"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".py") else "",
)
def test_the_example_runs_at_a_stand_in_size(
    example: str, libraries: list[str], expected: str
) -> None:
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; `tox run -e frameworks` installs it")
    assert re.search(expected, output(example, deadline=500))


# --- the web application ---


class Server:
    """The example's web server on *port*."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.process = start_example("web_sweep.py", str(port))

    def listens(self) -> bool:
        assert self.process.poll() is None, self.process.communicate()
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        return False

    def request(self, method: str, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE)
        connection.request(method, path, headers={"Connection": "close"})
        return connection.getresponse()

    def start(self, throws: int) -> str:
        with self.request("POST", f"/sweeps?throws={throws}") as response:
            assert response.status == 201
            return json.loads(response.read())["id"]

    def events(self, sweep_id: str) -> Iterator[dict[str, Any]]:
        with self.request("GET", f"/sweeps/{sweep_id}") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

    def stop(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, err


@pytest.fixture
def server() -> Iterator[Server]:
    with listener() as probe:
        port = probe.getsockname()[1]
    server = Server(port)
    try:
        until(server.listens)
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.mark.full
def test_a_sweep_is_started_watched_and_cancelled_over_http(server: Server) -> None:
    long_sweep = server.start(2000)
    events = server.events(long_sweep)
    assert next(events)["metres"] > 0
    *throws, last = server.events(server.start(20))
    assert last == {"counts": {"SUCCEEDED": 20}}
    distance = runpy.run_path(str(EXAMPLES / "web_sweep.py"))["distance"]
    assert sorted((throw["angle"], throw["metres"]) for throw in throws) == [
        (angle, distance.local(angle)) for angle in (90 * (n + 0.5) / 20 for n in range(20))
    ]
    assert server.request("DELETE", f"/sweeps/{long_sweep}").status == 204
    counts = [*events][-1]["counts"]
    assert counts["NOT_FOUND"] > 0 and sum(counts.values()) == 2000
    assert server.request("GET", "/sweeps/nothing").status == 404


@pytest.mark.full
def test_the_application_cancels_its_sweeps_when_it_stops(server: Server) -> None:
    sweep_id = server.start(2000)
    status, err = server.stop()
    assert status == 0 and "Traceback" not in err, err
    code = f"import kinetic; print(kinetic.attach_batch({sweep_id!r}).status_counts())"
    found = programs.python("-c", code)
    counts = json.loads(found.replace("'", '"'))
    assert counts["NOT_FOUND"] > 0 and sum(counts.values()) == 2000


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_the_page_starts_a_sweep_shows_its_results_and_cancels_it(server: Server) -> None:
    with Browser() as browser:
        browser.call("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
        browser.until("document.readyState === 'complete' && document.forms.length")
        browser.ask("document.forms[0].throws.value = 12; document.forms[0].requestSubmit()")
        browser.until("status.textContent.includes('12 of 12')")
        assert browser.ask("document.querySelectorAll('circle').length") == 12
        assert browser.ask("document.querySelectorAll('.best').length") == 1
        assert browser.ask("document.querySelector('progress').position") == 1
        browser.ask("document.forms[0].throws.value = 3000; document.forms[0].requestSubmit()")
        browser.until("document.querySelectorAll('circle').length > 0 && !cancel.disabled")
        browser.ask("cancel.click()")
        browser.until("cancel.disabled")
        assert browser.ask("document.querySelectorAll('circle').length") < 3000
        own = f"it asked for http://127.0.0.1:{server.port}/"
        assert [text for text in browser.complaints if not text.startswith(own)] == []
