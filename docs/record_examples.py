"""Run examples in a terminal, and write what each prints, how long it took, and on what machine.

    pip install -e '.[test]'
    python docs/record_examples.py [NAME...]    default: all examples that can run here
    python docs/record_examples.py --to FOLDER NAME...

The gallery's pages include these files of docs/examples/recorded. An example needs its libraries:
`pip install -e '.[examples]' jax keras keras-hub peft torch transformers` installs all of them.
Each runs with a new KINETIC_HOME, in a new folder that has only the examples.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pyte

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "docs" / "examples" / "recorded"
COLUMNS, ROWS = 100, 500
"""The size that programs see; longer lines don't wrap."""
NOISE = re.compile(r"^(WARNING: All log messages before absl|[IWE]\d{4} \d\d:.*\.cc:\d+\])")
"""Lines of compiled libraries, such as about the GPU that this machine lacks."""


@dataclass(frozen=True)
class Example:
    """What a reader types, the packages whose versions matter, and files to keep as pictures.

    A command that begins with a blank isn't shown.
    """

    commands: tuple[str, ...]
    packages: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()


def program(name: str, *arguments: str, packages: tuple[str, ...] = ()) -> Example:
    return Example((" ".join(("python", f"examples/{name}.py", *arguments)),), packages)


URL = "http://127.0.0.1:8000"
EXAMPLES = {
    "sweep": program("sweep"),
    "optuna_search": program("optuna_search", packages=("optuna",)),
    "cross_validation": program("cross_validation", packages=("scikit-learn",)),
    "batch_inference": program("batch_inference", packages=("scikit-learn",)),
    "data_and_artifacts": Example(
        ("python examples/data_and_artifacts.py results",), pictures=("results/chart.svg",)
    ),
    "checkpointing": program("checkpointing"),
    "detached": program("detached"),
    "web_progress": Example(
        (
            "python examples/web_progress.py > server.log 2>&1 &",
            f" until curl -so server.html {URL}/docs; do sleep 0.1; done",
            f"curl -sN '{URL}/throws?count=30' | grep data",
            f"curl -sN --max-time 3 '{URL}/throws?count=5000' | grep data | tail -n 1",
            " until grep -q cancelled server.log; do sleep 0.1; done",
            "cat server.log",
            " kill -INT %1; wait",
        ),
        ("fastapi",),
    ),
    "keras_training": program("keras_training", packages=("keras", "jax")),
    "jax_training": program("jax_training", packages=("jax",)),
    "multi_host": Example(("JAX_NUM_CPU_DEVICES=8 python examples/multi_host.py",), ("jax",)),
    "pytorch_training": program("pytorch_training", packages=("torch",)),
    "gemma4_finetuning": program("gemma4_finetuning", packages=("keras-hub", "jax")),
    "llm_finetuning": program("llm_finetuning", packages=("transformers", "peft", "torch")),
}
"""By the name of the program; vllm_inference.py needs a GPU, and web_sweep.py a browser."""


def run_in_terminal(command: str, folder: Path, environ: dict[str, str]) -> tuple[int, str]:
    """Run *command* by bash in a terminal; return its exit code and the text that stays there."""
    screen = pyte.Screen(3 * COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)

    def read(terminal: int) -> bytes:
        output = os.read(terminal, 1 << 16)
        stream.feed(output)
        return output

    here, before = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    os.environ.update(environ)
    try:
        status = pty.spawn(["bash", "-c", command], read)
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)
    lines = [line.rstrip() for line in screen.display]
    text = "\n".join(line for line in lines if not NOISE.match(line))
    return os.waitstatus_to_exitcode(status), re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def record(name: str, target: Path) -> None:
    """Run an example, and write its file and its pictures into the folder *target*."""
    example = EXAMPLES[name]
    with tempfile.TemporaryDirectory() as scratch:
        project = Path(scratch, "project")
        shutil.copytree(ROOT / "examples", project / "examples")
        (project / "pyproject.toml").touch()
        environ = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "KINETIC_HOME": str(Path(scratch, "home")),
            "TERM": "xterm-256color",
            "COLUMNS": str(COLUMNS),
        }
        # `echo` shows each command, as if a reader had typed it.
        script = "\n".join(
            command if command.startswith(" ") else f"echo {shlex.quote(f'$ {command}')}\n{command}"
            for command in example.commands
        )
        began = time.monotonic()
        try:
            code, text = run_in_terminal(script, project, environ)
            took = time.monotonic() - began
        finally:
            stop = (sys.executable, "-m", "kinetic", "local", "stop", "-y")
            subprocess.run(stop, env={**os.environ, **environ}, check=True, capture_output=True)
        if code != 0:
            sys.exit(f"{name} failed with {code}:\n{text}")
        for picture in example.pictures:
            shutil.copy(project / picture, target / f"{name}{Path(picture).suffix}")
        left = sorted(path.name for path in (project / "examples").iterdir())
    if left != sorted(path.name for path in (ROOT / "examples").iterdir()):
        sys.exit(f"{name} wrote beside its source: {left}")
    for folder, shown in ((scratch, "/tmp/…"), (sys.prefix, ".venv"), (Path.home(), "~")):
        text = text.replace(str(folder), shown)
    written = f"```text\n{text}\n```\n\n*{machine(took, *example.packages)}*\n"
    (target / f"{name}.txt").write_text(written, encoding="utf-8")


def machine(seconds: float, *packages: str) -> str:
    """Say how long something took, on what, with which versions, and when."""
    load = os.getloadavg()[1]  # of the last 5 minutes
    busy = f", load {load:.0f}" if load > 2 * (os.cpu_count() or 1) else ""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processor = model[1].replace("(R)", "") if model else platform.processor()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = [
        f"Python {platform.python_version()}",
        *(f"{package} {importlib.metadata.version(package)}" for package in packages),
    ]
    return (
        f"Took {seconds:.1f} s on {os.cpu_count()} cores ({processor}, {pages / 1e9:.0f} GB, no "
        f"GPU{busy}), {platform.system()}. {', '.join(versions)}. Recorded on "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}."
    )


def missing(name: str) -> list[str]:
    """Return the packages that an example needs and this environment lacks."""
    installed = {one.metadata["Name"].lower() for one in importlib.metadata.distributions()}
    return [package for package in EXAMPLES[name].packages if package not in installed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*EXAMPLES, []])
    parser.add_argument("--to", type=Path, default=RECORDED, metavar="FOLDER")
    arguments = parser.parse_args()
    for name in arguments.names or EXAMPLES:
        if lacking := missing(name):
            sys.stderr.write(f"{name}: not recorded; it needs {', '.join(lacking)}\n")
        else:
            record(name, arguments.to)


if __name__ == "__main__":
    main()
