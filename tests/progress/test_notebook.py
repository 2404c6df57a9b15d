"""The output of cells in a real IPython kernel."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("ipykernel", reason="`pip install ipykernel` gets the kernel of a notebook")

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
WORK = """
import os
import kinetic

here = os.getcwd()

@kinetic.run(backend="local", accelerator="cpu")
def work(n):
    import os, time
    while not os.path.exists(f"{here}/seen"):
        time.sleep(0.01)
    return n
"""
CELL = f"""{WORK}
batch = work.run_async_map(range(6), max_concurrent=2, name="demo <b>")
print(sum(batch.results()))
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch):
    from jupyter_client import BlockingKernelClient, KernelManager
    from jupyter_client.kernelspec import KernelSpec

    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").touch()
    manager = KernelManager(transport="ipc", ip=str(tmp_path / "k"))
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=command, language="python")
    manager.start_kernel(cwd=project, env={**os.environ, "PYTHONPATH": str(ROOT)})
    client: BlockingKernelClient = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=DEADLINE_S)
        yield client, project / "seen"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def outputs(kernel, code: str, *, mark: bool = True) -> list[tuple[str, dict]]:
    """Run a cell, and return the type and the content of each message that it sends.

    With *mark*, the work waits until the cell displays something.
    """
    client, seen_file = kernel
    seen = []

    def hook(message: dict) -> None:
        seen.append((message["msg_type"], message["content"]))
        if mark and message["msg_type"] == "display_data":
            seen_file.touch()  # the work waits for this file

    if mark:
        seen_file.unlink(missing_ok=True)
    reply = client.execute_interactive(code, timeout=DEADLINE_S, output_hook=hook)
    assert reply["content"]["status"] == "ok", reply["content"]
    return seen


@pytest.mark.full
def test_a_cell_shows_one_output_that_is_updated(kernel) -> None:
    for cell in (CELL, CELL):
        seen = outputs(kernel, cell)
        streams = [content for kind, content in seen if kind == "stream"]
        printed = "".join(stream["text"] for stream in streams if stream["name"] == "stdout")
        assert printed == "15\n"
        shown = [content for kind, content in seen if kind == "display_data"]
        updates = [content for kind, content in seen if kind == "update_display_data"]
        assert len(shown) == 1, "each cell has its own output"
        name = shown[0]["transient"]["display_id"]
        assert {update["transient"]["display_id"] for update in updates} == {name}
        assert updates[-1]["data"]["text/plain"].startswith(
            "demo <b>: 6 of 6 ended: 6 succeeded; took"
        )
        html = updates[-1]["data"]["text/html"]
        assert '<progress max="1" value="1.0000"' in html and "demo &lt;b&gt;" in html


@pytest.mark.full
def test_a_cell_that_waits_gets_no_warning_about_the_event_loop(kernel) -> None:
    code = """
import kinetic

@kinetic.run(backend="local", accelerator="cpu")
def answer():
    return 42

print(answer())
"""
    streams = [content for kind, content in outputs(kernel, code) if kind == "stream"]
    assert "42" in "".join(stream["text"] for stream in streams)
    assert "blocks the event loop" not in "".join(stream["text"] for stream in streams)


def wait_for_output(kernel, wanted: str) -> dict:
    """Wait until the output of an earlier cell contains *wanted*; return its data.

    Check that there is only one output, and that it belongs to the cell that displayed the handle.
    """
    client, _ = kernel
    names, cells = set(), set()
    while True:
        message = client.get_iopub_msg(timeout=DEADLINE_S)
        if message["msg_type"] in ("display_data", "update_display_data"):
            content = message["content"]
            names.add(content["transient"]["display_id"])
            cells.add(message["parent_header"]["msg_id"])
            assert len(names) == len(cells) == 1
            if wanted in content["data"]["text/plain"]:
                return content["data"]


def result_of(seen: list[tuple[str, dict]]) -> dict:
    (result,) = [content["data"] for kind, content in seen if kind == "execute_result"]
    return result


@pytest.mark.full
def test_a_batch_shows_itself_and_its_progress_until_its_end(kernel) -> None:
    outputs(kernel, WORK, mark=False)
    code = 'batch = work.run_async_map(range(4), max_concurrent=2, name="</td><b>"); batch'
    seen = outputs(kernel, code, mark=False)
    shown = result_of(seen)
    assert shown["text/plain"].startswith("BatchHandle('grp-local-")
    assert "name='</td><b>'" in shown["text/plain"]
    assert "&lt;/td&gt;&lt;b&gt;" in shown["text/html"] and "<b>" not in shown["text/html"]
    assert '<th scope="col">waiting</th>' in shown["text/html"]
    assert "report" not in shown["text/html"]
    wait_for_output(kernel, "0 of 4 ended")
    kernel[1].touch()  # the jobs end, and no cell waits for them
    last = wait_for_output(kernel, "4 of 4 ended: 4 succeeded; took")
    assert '<progress max="1" value="1.0000"' in last["text/html"]
    assert "&lt;/td&gt;&lt;b&gt;" in last["text/html"]

    path = result_of(outputs(kernel, "str(batch.report('a report & more.html'))", mark=False))
    assert Path(path["text/plain"].strip("'")).exists()
    seen = outputs(kernel, "batch", mark=False)
    shown = result_of(seen)
    assert (
        '<a href="a%20report%20%26%20more.html">a report &amp; more.html</a>'
        in (shown["text/html"])
    )
    assert '<th scope="col">succeeded</th></tr><tr><td>4</td>' in shown["text/html"]
    assert [kind for kind, _ in seen if "display" in kind] == [], "a final state needs no updates"


@pytest.mark.full
def test_a_sweep_shows_its_best_trial_so_far(kernel) -> None:
    outputs(kernel, WORK, mark=False)
    code = """
from kinetic.sweeps import Choice, GridSearch
sweep = work.sweep(GridSearch({"n": Choice([3, 1, 2])}), trials=None, name="grid")
sweep
"""
    assert result_of(outputs(kernel, code, mark=False))["text/plain"].startswith("Sweep('grp-local")
    wait_for_output(kernel, "running")  # progress appears after half a second
    kernel[1].touch()
    wait_for_output(kernel, "3 of 3 ended: 3 succeeded; best 1 (item 1); took")
    shown = result_of(outputs(kernel, "sweep.wait(); sweep", mark=False))["text/html"]
    assert '<th scope="row">best</th><td>1.0</td>' in shown and "n=1" in shown


@pytest.mark.full
def test_a_batch_without_progress_shows_only_known_facts(kernel) -> None:
    outputs(kernel, WORK, mark=False)
    code = "batch = work.run_async_map(range(2), progress=False); batch"
    assert "waiting" in result_of(outputs(kernel, code, mark=False))["text/html"]
    kernel[1].touch()
    seen = outputs(kernel, "batch.wait(); batch", mark=False)
    assert "2 of 2" in result_of(seen)["text/html"]
    assert [kind for kind, _ in seen if "display" in kind] == []


def test_a_job_shows_itself_and_its_end(kernel) -> None:
    outputs(kernel, WORK, mark=False)
    shown = result_of(outputs(kernel, "job = work.run_async(1); job", mark=False))
    assert shown["text/plain"].startswith("JobHandle('job-local-")
    assert '<th scope="row">function</th><td>work</td>' in shown["text/html"]
    wait_for_output(kernel, "0 of 1 ended")  # progress appears after half a second
    kernel[1].touch()
    wait_for_output(kernel, "1 of 1 ended: 1 succeeded")
    assert "<td>SUCCEEDED</td>" in result_of(outputs(kernel, "job", mark=False))["text/html"]
    assert "1" in result_of(outputs(kernel, "job.result()", mark=False))["text/plain"]
    seen = outputs(kernel, "job", mark=False)
    assert "<td>SUCCEEDED</td>" in result_of(seen)["text/html"], "even after its cleanup"
    assert [kind for kind, _ in seen if "display" in kind] == [], "a final state needs no updates"


@pytest.mark.full
def test_asyncio_handles_show_themselves_on_the_loop_of_the_notebook(kernel) -> None:
    outputs(kernel, WORK, mark=False)
    code = """
from kinetic import aio
client = aio.Client(backend="local")
batch = await client.run_async_map(work, range(3), max_concurrent=1, name="aio")
batch
"""
    assert "waiting" in result_of(outputs(kernel, code, mark=False))["text/html"]
    wait_for_output(kernel, "aio: 0 of 3 ended")
    kernel[1].touch()
    wait_for_output(kernel, "aio: 3 of 3 ended: 3 succeeded; took")
    listed = """
async with aio.Client(backend="local") as other:
    [again] = await other.list_batches()
    shown = again
shown
"""
    seen = outputs(kernel, listed, mark=False)
    assert "succeeded" not in result_of(seen)["text/html"], "its items were not read"
    assert "0 of 3" not in result_of(seen)["text/html"]
    assert "not read yet" in result_of(seen)["text/plain"]
    assert "stream" not in [kind for kind, _ in seen]
    outputs(kernel, "await client.aclose()", mark=False)
    assert "3 of 3" in result_of(outputs(kernel, "batch", mark=False))["text/html"]


@pytest.mark.full
def test_a_remote_traceback_names_the_cell_and_shows_its_lines(kernel) -> None:
    client, _ = kernel
    define = """import kinetic

def divide(n):
    return 1 / n

@kinetic.run(backend="local", accelerator="cpu")
def invert(n):
    return divide(n)
"""
    outputs(kernel, "1", mark=False)
    outputs(kernel, define, mark=False)
    raised = []

    def hook(message: dict) -> None:
        if message["msg_type"] == "error":
            raised.append("\n".join(message["content"]["traceback"]))

    reply = client.execute_interactive("invert(0)", timeout=DEADLINE_S, output_hook=hook)
    assert reply["content"]["status"] == "error"
    text = re.sub(r"\x1b\[[\d;]*m", "", "".join(raised))
    cell = reply["content"]["execution_count"] - 1
    assert f'File "Cell In[{cell}]", line 8, in invert\n    return divide(n)\n' in text
    assert f'File "Cell In[{cell}]", line 4, in divide\n    return 1 / n\n' in text
    assert "ipykernel" not in text


@pytest.mark.full
def test_a_sweep_shows_its_best_trials_and_a_plot_while_it_runs(kernel) -> None:
    outputs(kernel, WORK, mark=False)
    code = """
import time
from kinetic.sweeps import GridSearch, Int

@kinetic.run(backend="local", accelerator="cpu")
def trial(n):
    import os, time
    while n == 3 and not os.path.exists(f"{here}/seen"):
        time.sleep(0.01)
    return float(n)

sweep = trial.sweep(GridSearch({"n": Int(0, 3)}), trials=None)
"""
    outputs(kernel, code, mark=False)
    client, seen_file = kernel
    while True:
        shown = client.get_iopub_msg(timeout=DEADLINE_S)["content"].get("data", {})
        if shown.get("text/html", "").count("<circle") == 3:
            break
    assert "<caption>Best trials</caption>" in shown["text/html"]
    seen_file.touch()
    last = wait_for_output(kernel, "4 of 4 ended: 4 succeeded; best 0 (item 0); took")
    assert last["text/html"].count("<circle") == 4, "also the trial that ended last"
    shown = result_of(outputs(kernel, "sweep", mark=False))
    assert shown["text/html"].count("<circle") == 4
