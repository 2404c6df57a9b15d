"""The live view of a batch: its layout, keys, and ends."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kinetic.cli.watch import View, screen
from kinetic.progress import Progress
from tests.cli.conftest import FILE, Kinetic, submitted
from tests.terminals import Terminal

Terminals = Callable[..., Terminal]

BUSY = View(
    title="a sweep with a very long name, longer than any terminal has columns for it",
    progress=Progress(
        total=10_000,
        waiting=9_000,
        running=64,
        succeeded=900,
        failed=36,
        rate=3.5,
        retried=50,
        retried_after=(("preempted", 48), ("user error", 2)),
    ),
    max_concurrent=64,
    slowest=[(index, 4000.0 - index, 90.0 if index else None) for index in range(5)],
    failures=[(index, "[red]ValueError[/red]: " + "long " * 40) for index in range(5)],
)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 24), (40, 6), (20, 3)])
def test_the_screen_fits_the_terminal(width: int, height: int) -> None:
    lines = screen(BUSY, width, height)
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)
    assert lines[-1].plain.startswith("q leaves")


def test_the_screen_has_counts_failures_and_causes_and_markup_is_text() -> None:
    shown = "\n".join(line.plain for line in screen(BUSY, 80, 24))
    for part in (
        "936/10,000",
        "9,000 waiting",
        "max_concurrent: 64",
        "item 0        1 h 06 min\n",
        "item 1        1 h 06 min (waited 1 min 30 s)\n",
        "[red]ValueError",
        "retried after: 48 preempted, 2 user error",
    ):
        assert part in shown
    ended = replace(BUSY, progress=Progress(total=2, succeeded=2))
    shown = "\n".join(line.plain for line in screen(ended, 80, 24))
    assert "q leaves" not in shown and "max_concurrent" not in shown


def test_the_screen_shows_how_a_sweep_stands() -> None:
    progress = replace(BUSY.progress, pruned=64, best=(17, 0.03125), rungs=((1, 60), (3, 4)))
    shown = "\n".join(line.plain for line in screen(replace(BUSY, progress=progress), 80, 24))
    assert "best so far: 0.03125 (item 17)" in shown
    assert "pruned 6% of the ended trials; by rung: 60 at 1, 4 at 3" in shown


def test_a_narrow_terminal_has_the_title_and_all_counts() -> None:
    named = replace(BUSY, title="a sweep of thirty-nine characters, with")
    first, bar, *rest = [line.plain for line in screen(named, 40, 24)]
    assert first == named.title and bar.startswith("─") and "936/10,000" in bar
    assert " ".join(rest).startswith(named.progress.counts())


@pytest.mark.full
def test_leaving_the_view_does_not_stop_the_batch(
    kinetic: Kinetic, home: Path, small_project: object, terminal: Terminals
) -> None:
    with submitted(home) as (group, _):
        for key, code in ((b"q", 0), (b"\x03", 130)):
            screen = terminal()
            watching = screen.start("-m", "kinetic", "batches", "watch", group)
            screen.shows(b"q leaves")
            screen.type(key)
            screen.rest()
            assert watching.wait(60) == code and b"Traceback" not in screen.raw
            status = kinetic("batches", "status", group, "--json").json
            assert status["status"] in ("RUNNING", "PENDING")
        cancelled = kinetic("batches", "cancel", group, "-y")
        assert cancelled.code == 0 and f"{group} is cancelled: 2 cancelled" in cancelled.err


SILENT = """
import asyncio, logging
from kinetic.cli.watch import follow
from kinetic.progress import Progress

class Silent:
    name, group_id, max_concurrent = "sweep", "grp-1", 2

    def running_times(self, count):
        return []

    async def progress(self):
        yield Progress(total=2, running=2)
        logging.getLogger().warning("the server does not answer")
        await asyncio.Event().wait()

asyncio.run(follow(Silent(), as_json=False))
"""


def test_a_warning_is_shown_although_nothing_changes(terminal: Terminals) -> None:
    screen = terminal()
    watching = screen.start("-c", SILENT)
    screen.shows(b"does not answer")
    screen.type(b"q")
    assert watching.wait(60) == 0


def test_a_closed_terminal_ends_the_view() -> None:
    controller, terminal = pty.openpty()
    watching = subprocess.Popen(
        [sys.executable, "-c", SILENT], stdin=terminal, stdout=terminal, stderr=subprocess.PIPE
    )
    os.close(terminal)
    seen = b""
    while b"q leaves" not in seen:
        seen += os.read(controller, 4096)
    os.close(controller)  # no signal follows, because it isn't the controlling terminal
    watching.communicate(timeout=60)


def test_a_batch_whose_submitter_died_is_watched_to_its_end(
    kinetic: Kinetic, home: Path, small_project: object
) -> None:
    with submitted(home, "--max-concurrent", "1") as (group, submitter):
        submitter.kill()
    assert kinetic("batches", "cancel", group).code == 0
    completed = kinetic("batches", "watch", group)
    assert completed.code == 0 and "2 cancelled" in completed.out


def interrupt_once_it_shows(screen: Terminal, text: bytes, *command: str) -> bytes:
    """Press Ctrl-C once the command shows *text*; return everything that it prints."""
    started = screen.start("-m", "kinetic", *command)
    screen.shows(text)
    before = len(screen.raw)
    screen.type(b"\x03")
    screen.until(lambda: b"interrupted\r\n" in screen.raw[before:])
    assert started.wait(60) == 130
    return screen.raw


@pytest.mark.full
def test_a_command_that_waits_for_a_batch_shows_its_progress(
    kinetic: Kinetic, home: Path, small_project: object, terminal: Terminals
) -> None:
    inputs = home / "in.jsonl"
    inputs.write_text('{"x": 1}\n{"x": 2}\n')
    command = ("run", f"{FILE}:waits", "--map", str(inputs))
    seen = interrupt_once_it_shows(terminal(), b"0/2", *command)
    assert b"kinetic batches retry grp-local-" in seen
    (batch,) = kinetic("batches", "list", "--json").json["items"]
    for name in ("retry", "resume", "results"):
        command = ("batches", name, batch["group_id"])
        assert b"running" in interrupt_once_it_shows(terminal(), b"0/2", *command)
    assert kinetic("batches", "cancel", batch["group_id"]).code == 0
