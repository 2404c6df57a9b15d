"""Run examples/notebook.ipynb in a Jupyter kernel, and write its cells and outputs as Markdown.

    pip install -e '.[test]'
    python docs/record_notebook.py [FILE]    default: docs/examples/recorded/notebook.txt

The kernel works in an empty project, with a new KINETIC_HOME. A cell with the tag `interrupt` is
interrupted when its output says that an item has ended. A cell with the tag `another-kernel` runs
in a second kernel, while the first one still exists.
"""

from __future__ import annotations

import html
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from record_examples import RECORDED, ROOT, machine

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
DEADLINE_S = 120.0
COLOR = re.compile(r"\x1b\[[\d;]*m")
HAS_ENDED = re.compile(r": [1-9]\d* of \d+ ended")
KINDS = ("display_data", "error", "execute_result", "stream", "update_display_data")


class Kernel:
    """A kernel of Jupyter, and the outputs of its cells."""

    def __init__(self, folder: Path, home: Path, number: int) -> None:
        self._manager = KernelManager(transport="ipc", ip=str(home.parent / f"k{number}"))
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._manager._kernel_spec = KernelSpec(argv=command, language="python")
        environ = {"KINETIC_HOME": str(home), "IPYTHONDIR": str(home.parent)}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._manager.start_kernel(cwd=folder, env={**os.environ, **environ, "PYTHONPATH": path})
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=DEADLINE_S)

    def run(self, code: str, *, interrupt: bool) -> list[dict[str, Any]]:
        """Run a cell, and return its outputs; an output that is updated has its last content."""
        ran, outputs = self._client.execute(code), list[dict[str, Any]]()
        by_name: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            message = self._client.get_iopub_msg(timeout=DEADLINE_S)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != ran:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                return outputs
            if kind not in KINDS:
                continue
            name = content.get("transient", {}).get("display_id", "")
            if name in by_name:
                by_name[name]["content"] = content
            elif outputs and kind == "stream" == outputs[-1]["kind"]:
                outputs[-1]["content"]["text"] += content["text"]
            else:
                outputs.append({"kind": kind, "content": content})
                by_name |= {name: outputs[-1]} if name else {}
            shown = content.get("data", {}).get("text/plain", "")
            if interrupt and HAS_ENDED.search(shown):
                interrupt = False
                self._manager.interrupt_kernel()
        sys.exit(f"a cell took more than {DEADLINE_S:.0f} s:\n{code}")

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@contextmanager
def kernels() -> Iterator[tuple[Kernel, Kernel]]:
    """Start two kernels in one empty project."""
    with tempfile.TemporaryDirectory() as scratch:
        project, home = Path(scratch, "project"), Path(scratch, "home")
        project.mkdir()
        (project / "pyproject.toml").touch()
        opened = [Kernel(project, home, number) for number in range(2)]
        try:
            yield opened[0], opened[1]
        finally:
            for kernel in opened:
                kernel.close()
            os.environ["KINETIC_HOME"] = str(home)
            os.spawnv(  # its jobs would outlive this program
                os.P_WAIT, sys.executable, [sys.executable, "-m", "kinetic", "local", "stop", "-y"]
            )


def shown(output: dict[str, Any]) -> str:
    """Return an output as Markdown: HTML as it is, everything else as text."""
    content = output["content"]
    if output["kind"] == "error":
        text = "\n".join(content["traceback"])
    elif output["kind"] == "stream":
        text = content["text"]
    elif "text/html" in content["data"]:
        cell = re.sub(
            r'<style.*?</style>| border="1"', "", content["data"]["text/html"], flags=re.S
        )
        cell = re.sub(r"\s*\n\s*", "\n", cell)  # an empty line would end the HTML in Markdown
        return f'<div class="cell-output" style="overflow-x: auto">\n{cell}\n</div>\n'
    else:
        text = content["data"]["text/plain"]
    return f"```text\n{COLOR.sub('', text).strip()}\n```\n" if text.strip() else ""


def record() -> str:
    """Run all cells, and return them with their outputs."""
    parts, began = list[str](), time.monotonic()
    with kernels() as (first, second):
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
            source, tags = "".join(cell["source"]), cell["metadata"].get("tags", [])
            if cell["cell_type"] == "markdown":
                parts.append(re.sub(r"^# .*\n+", "", source) + "\n")  # the page has the title
                continue
            kernel = second if "another-kernel" in tags else first
            outputs = kernel.run(source, interrupt="interrupt" in tags)
            failed = [output for output in outputs if output["kind"] == "error"]
            if bool(failed) is not ("raises-exception" in tags):
                sys.exit(f"unexpected outputs of\n{source}\n{html.unescape(str(outputs))}")
            parts.append(f"```python\n{source}\n```\n")
            parts += [text for output in outputs if (text := shown(output))]
    parts.append(f"*{machine(time.monotonic() - began, 'ipykernel', 'pandas')}*\n")
    return "\n".join(parts)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDED / "notebook.txt"
    target.write_text(record(), encoding="utf-8")
    sys.stdout.write(f"wrote {target}: {target.stat().st_size:,} bytes\n")
