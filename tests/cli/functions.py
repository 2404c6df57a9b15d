"""The functions that the commands of the tests run."""

from __future__ import annotations

import builtins
import os
import signal
import threading
from pathlib import Path

import click

import kinetic


def double(x: int, name: str = "") -> dict[str, object]:
    print("doubling", x)
    if x == 13:
        raise ValueError("[red]13[/red] \x1b[31mbrings\x07 bad luck")
    return {"twice": 2 * x, "name": name}


class Mark:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (leave, (self.path,))


def leave(path: str) -> str:
    Path(path).write_text("rebuilt")
    return path


def marked(path: str) -> Mark:
    return Mark(path)


def writes(text: str) -> None:
    folder = Path(os.environ["KINETIC_OUTPUT_DIR"], "deep")
    folder.mkdir(parents=True)
    (folder / "file.txt").write_text(text)


not_a_function = 3


def waits(x: int) -> None:
    print("waiting", x, flush=True)
    threading.Event().wait()


@kinetic.run(backend="local", accelerator="cpu", timeout=0.1)
def overruns() -> None:
    threading.Event().wait()


def raises(name: str) -> None:
    raise getattr(builtins, name)("by the job")


def uses_click() -> None:
    raise click.UsageError("by the job")


@kinetic.run(backend="local", accelerator="cpu", debug=True)
def debugged() -> None:
    """Waits for a debugger before it is called."""


@kinetic.run(backend="local")
def plain(x: int) -> int:
    return x


def dies(x: int) -> None:
    print("last words", x, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
