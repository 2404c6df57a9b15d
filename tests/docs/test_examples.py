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
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.report.browser import CHROMIUM, MISSING, Browser
from tests.scripts import listener

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))
DEADLINE = 100.0
FACTS = (
    r"\*(\d+ jobs t|T)ook [\d.]+ s on \d+ cores \(.+\), \w+\. "
    r"Python 3\..+ Recorded on [\d-]{10}\.\*"
)
RECORDED = ROOT / "docs" / "examples" / "recorded"


def start_example(example: str, *arguments: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLES / example), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
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


def test_every_example_has_a_page_with_its_program_and_a_card() -> None:
    cards = (ROOT / "docs" / "examples.md").read_text()
    for name in NAMES:
        page = (ROOT / "docs" / "examples" / name).with_suffix(".md").read_text()
        assert f"```{{literalinclude}} ../../examples/{name}\n" in page
        assert f":link: examples/{name.removesuffix('.py')}\n" in cards


def test_every_page_has_a_recorded_output_or_says_why_not() -> None:
    for page in sorted((ROOT / "docs" / "examples").glob("*.md")):
        names = re.findall(r"^```\{include\} (\S+)\n```$", page.read_text(), re.M)
        assert names == [f"recorded/{page.stem}.txt"] or "We haven't recorded" in page.read_text()
        for name in names:
            facts = (page.parent / name).read_text().splitlines()[-1]
            assert re.fullmatch(FACTS, facts), facts


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
@pytest.mark.xdist_group(programs.MYPY)
def test_the_types_of_the_examples_are_right() -> None:
    checked = programs.mypy(*(EXAMPLES / name for name in NAMES))
    assert checked.returncode == 0, checked.stdout + checked.stderr


VARYING = (
    (r"(?:job|grp)-local-[0-9a-f]{12}|[0-9a-f]{8}-[0-9a-f-]{27}", "ID"),
    (r"\b(?:complete|pruned|RUNNING|SUCCEEDED)\b", "STATE"),
    (r"-?\d[\d,]*(?:\.\d*)?(?:e[+-]?\d+)?", "N"),
    (r"(?:N (?:min|h) )*N m?s\b|Nm?s\b", "TIME"),
    (r"\s+", " "),
)
"""Patterns of what differs between runs of an example, and their replacements, in this order."""


def shape(recorded: str) -> set[str]:
    """Return the lines of a recording without numbers; how often each occurs may differ.

    Lines of progress are left out: a quick batch shows none.
    """
    assert re.fullmatch(FACTS, recorded.splitlines()[-1])
    (text,) = re.findall(r"^```text\n(.*?)^```$", recorded, re.M | re.S)
    for pattern, replacement in VARYING:
        text = re.sub(pattern, replacement, text) if replacement != " " else text
    return {" ".join(line.split()) for line in text.splitlines() if "━" not in line}


def recording(script: str, *arguments: str | Path) -> str:
    """Run a script of docs/ that records something, and return what it prints."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    return programs.python(ROOT / "docs" / script, *arguments, env=environ, timeout=580)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("example", "libraries", "expected"),
    [
        ("sweep", [], r"best: \{'rate': 0\.001, 'epochs': 1000\}"),
        ("optuna_search", [], r"height \S+ with \{'rate'"),
        ("cross_validation", [], r"(?s)support vectors +0\.9.*logistic regression +0\.9"),
        ("batch_inference", [], r"(?s)40 files in 5 jobs.*worst: review-\d\d\.txt"),
        ("data_and_artifacts", [], r"(?s)'hill': 7\.\d.*wrote chart\.svg.*fetched \d{3} bytes"),
        ("checkpointing", [], r"(?s)('resumed at': 600, 'attempts': 2.*){3}"),
        ("detached", [], r"348,513 primes"),
        # `tox run -e frameworks` installs the libraries of these:
        ("keras_training", ["jax", "keras"], r"(?s)'backend': 'jax'.*saved model\.keras in"),
        ("jax_training", ["jax"], r"(?s)process 0: 2 devices.*process 1: 2 devices"),
        ("multi_host", ["jax"], r"'hosts': 1, 'mesh'.*'loss': 0\."),
        ("pytorch_training", ["torch"], r"(?s)('device': '.*'loss': 0\.0.*){2}"),
        ("gemma4_finetuning", ["jax", "keras_hub"], r"saved gemma\.lora\.h5 in"),
        ("llm_finetuning", ["torch", "peft"], r"(?s)(saved .*adapter_model\.safetensors.*){2}"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_the_example_prints_what_its_page_shows(
    example: str, libraries: list[str], expected: str, tmp_path: Path
) -> None:
    """The script fails if the example writes beside its source."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; `tox run -e frameworks` installs it")
    recording("record_examples.py", "--to", tmp_path, example)
    found, shown = ((folder / f"{example}.txt").read_text() for folder in (tmp_path, RECORDED))
    assert re.search(expected, found)
    assert re.search(expected, shown) and shape(found) == shape(shown)


def test_a_recording_of_something_else_is_found() -> None:
    text = (RECORDED / "sweep.txt").read_text()
    assert shape(text) == shape(re.sub(r"0\.\d+", "0.1", text))
    assert shape(text) != shape(text.replace("best:", "worst:"))


@pytest.mark.full
def test_a_search_continues_after_ctrl_c(tmp_path: Path) -> None:
    first = start_example("optuna_search.py", "500", cwd=tmp_path)
    assert first.stdout is not None
    ended = [first.stdout.readline() for _ in range(3)]
    first.send_signal(signal.SIGINT)
    # `communicate` doesn't return the lines that `readline` has already read into its buffer.
    ended += first.stdout.readlines()
    first.communicate(timeout=DEADLINE)
    assert first.returncode != 0
    counted = sum("complete" in line or "pruned" in line for line in ended)
    out = output("optuna_search.py", str(counted + 6), cwd=tmp_path)
    assert all(line in out for line in ended if "complete" in line or "pruned" in line)
    states = [line.split()[1] for line in out.splitlines() if line[:1].isdigit()]
    assert sum(state in ("complete", "pruned") for state in states) == counted + 6
    assert re.search(r"^height \S+ with \{'rate'", out, re.MULTILINE)


# --- the notebook ---


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_notebook_runs_as_its_page_shows(tmp_path: Path) -> None:
    """A run has a call, a map, a sweep, an error, an interrupt, and a second kernel."""
    recording("record_notebook.py", tmp_path / "notebook.txt")
    found, shown = ((folder / "notebook.txt").read_text() for folder in (tmp_path, RECORDED))
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for text in (found, shown):
        blocks = re.findall(r"^```(\w+)\n(.*?)\n```$", text, re.M | re.S)
        assert [block for language, block in blocks if language == "python"] == sources
        for expected in NOTEBOOK_SHOWS:
            assert re.search(expected, text), expected
        assert "ipykernel_" not in text
    kinds = (re.findall(r"^```\w+|^<div class.*|^## .*", text, re.M) for text in (found, shown))
    assert next(kinds) == next(kinds)


NOTEBOOK_SHOWS = (
    r"pi: 40 of 40 ended: 40 succeeded; took",
    r"<th>input\.seed</th>",
    r"valley: 40 of 40 ended[^<]*</div><table><caption>Best trials</caption>",
    r"(<circle [^>]*><title>[^<]*</title></circle>){20}",
    r'File "Cell In\[1\]", line 10, in estimate_pi\n    return 4 \* inside / points\n',
    r"long: [1-9]\d* of 300 ended",
    r"kinetic batches cancel grp-local-",
    r"(?m)^KeyboardInterrupt",
    r"\{.*'NOT_FOUND': [1-9]\d*.*\}",
)


# --- the web application ---


class Server:
    """The web server of an example on *port*."""

    def __init__(self, example: str, port: int) -> None:
        self.port = port
        self.process = start_example(example, str(port))

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

    def events(self, path: str) -> Generator[dict[str, Any]]:
        with self.request("GET", path) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

    def stop(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, err


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with listener() as probe:
        port = probe.getsockname()[1]
    server = Server(getattr(request, "param", "web_sweep.py"), port)
    try:
        until(server.listens)
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.mark.full
def test_a_sweep_is_started_watched_and_cancelled_over_http(server: Server) -> None:
    long_sweep = server.start(2000)
    events = server.events(f"/sweeps/{long_sweep}")
    assert next(events)["metres"] > 0
    *throws, last = server.events(f"/sweeps/{server.start(20)}")
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
@pytest.mark.parametrize("is_read", [False, True])
def test_the_application_cancels_its_sweeps_when_it_stops(server: Server, is_read: bool) -> None:
    sweep_id = server.start(2000)
    if is_read:
        events = server.events(f"/sweeps/{sweep_id}")
        assert next(events)["metres"] > 0  # this reader stays connected
    status, err = server.stop()
    assert status == 0, err
    # uvicorn logs the traceback of a request that it ends.
    assert ("Traceback" in err) == ("graceful shutdown exceeded" in err) == is_read, err
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


@pytest.mark.full
@pytest.mark.parametrize("server", ["web_progress.py"], indirect=True)
def test_a_request_streams_progress_and_a_disconnect_cancels_its_batch(server: Server) -> None:
    *progress, best = server.events("/throws?count=10")
    assert [*map(set, progress)] == [{"ended", "of", "running"}] * len(progress)
    assert progress[-1]["ended"] == progress[-1]["of"] == 10 and best["best angle"] == 40.5
    events = server.events("/throws?count=3000")
    assert next(events)["of"] == 3000
    events.close()  # closes the connection
    code = """
import kinetic
[batch] = kinetic.list_batches(name="throws", limit=1)
batch.wait(timeout=90)
print(batch.status_counts())
"""
    counts = json.loads(programs.python("-c", code).replace("'", '"'))
    assert counts["NOT_FOUND"] > 0 and sum(counts.values()) == 3000
