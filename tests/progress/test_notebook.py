"""What a cell shows, in a real IPython kernel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("ipykernel", reason="`pip install ipykernel` gets the kernel of a notebook")

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
CELL = """
import os
import kinetic

here = os.getcwd()

@kinetic.run(backend="local", accelerator="cpu")
def work(n):
    import os, time
    time.sleep(0.3)
    while not os.path.exists(f"{here}/seen"):
        time.sleep(0.01)
    return n

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


def outputs(kernel, code: str) -> list[tuple[str, dict]]:
    """Runs a cell; the type and the content of each message that came of it."""
    client, mark = kernel
    seen = []

    def hook(message: dict) -> None:
        seen.append((message["msg_type"], message["content"]))
        if message["msg_type"] == "display_data":
            mark.touch()  # what the work waits for

    mark.unlink(missing_ok=True)
    told = client.execute_interactive(code, timeout=DEADLINE_S, output_hook=hook)
    assert told["content"]["status"] == "ok", told["content"]
    return seen


def test_a_cell_shows_one_output_that_is_updated(kernel) -> None:
    for cell in (CELL, CELL):
        seen = outputs(kernel, cell)
        streams = [content for kind, content in seen if kind == "stream"]
        said = "".join(one["text"] for one in streams if one["name"] == "stdout")
        assert said == "15\n"
        shown = [content for kind, content in seen if kind == "display_data"]
        updates = [content for kind, content in seen if kind == "update_display_data"]
        assert len(shown) == 1, "each cell its own output"
        name = shown[0]["transient"]["display_id"]
        assert {one["transient"]["display_id"] for one in updates} == {name}
        assert updates[-1]["data"]["text/plain"].startswith(
            "demo <b>: 6 of 6 ended: 6 succeeded; took"
        )
        html = updates[-1]["data"]["text/html"]
        assert '<progress max="1" value="1.0000"' in html and "demo &lt;b&gt;" in html


def test_a_cell_that_waits_is_not_warned_of_that(kernel) -> None:
    code = """
import kinetic

@kinetic.run(backend="local", accelerator="cpu")
def answer():
    return 42

print(answer())
"""
    streams = [content for kind, content in outputs(kernel, code) if kind == "stream"]
    assert "42" in "".join(one["text"] for one in streams)
    assert "blocks the event loop" not in "".join(one["text"] for one in streams)
