"""The output of real batches on a real terminal and on a pipe."""

from __future__ import annotations

import re

import pytest

from tests.terminals import DEADLINE_S

RESULTS = """
batch = work.run_async_map(range(12), max_concurrent=4, name="demo")
print("got", len(batch.results(return_exceptions=True)))
batch.wait()  # shows nothing again
"""


def live(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("demo")]


def release_once_shown(started) -> int:
    """Let a script continue once its line is on the terminal, and wait for its end."""
    started.terminal.until(lambda: len(live(started.terminal.lines)) == 1)
    started.release("some", "all")
    return started.end()


def test_a_line_is_updated_during_a_wait_and_its_last_state_stays(terminal, script) -> None:
    screen = terminal()
    started = script(RESULTS, screen, held=True)
    screen.until(lambda: live(screen.lines))
    started.release("some")
    moving = re.compile(r"demo .* \d+/12 .* running .* waiting .*/(s|min)  \d+ s left")
    screen.until(lambda: any(moving.search(line) for line in screen.lines))
    started.release("all")
    assert started.end() == 0
    assert re.fullmatch(r"demo  ━+  12/12  1 failed  \d+ s", screen.lines[0])
    assert screen.lines[1] == "  first failure: item 3 (3): ValueError: 3 is no good at all"
    assert screen.lines[2:] == ["got 12"]
    assert all(len(live(lines)) <= 1 for lines in screen.history), (
        "the line is redrawn, not repeated"
    )
    assert b"\x1b[?25l" not in screen.raw, "the cursor was never hidden"


@pytest.mark.full
def test_the_output_of_the_user_is_above_the_line_and_complete(terminal, script) -> None:
    screen = terminal(rows=60)
    body = """
    from absl import logging
    with work.run_async_map(range(12), max_concurrent=4, name="demo") as batch:
        for n, job in enumerate(batch.as_completed()):
            print("half a line of", n, end="")
            sys.stdout.flush()
            time.sleep(0.05)
            print(" and the rest")
            print("to stderr", n, file=sys.stderr)
            logging.warning("logged %d", n)
            thread = threading.Thread(target=print, args=("from a thread", n))
            thread.start()
            thread.join()
    """
    assert release_once_shown(script(body, screen, held=True)) == 0
    for n in range(12):
        assert f"half a line of {n} and the rest" in screen.lines
        assert f"to stderr {n}" in screen.lines
        assert any(line.endswith(f"logged {n}") for line in screen.lines)
        assert f"from a thread {n}" in screen.lines
    assert len(live(screen.lines)) == 1, "earlier lines are erased"
    assert len(screen.lines) == 50, "there is no other output"


def test_ctrl_c_leaves_a_clean_terminal(terminal, script) -> None:
    screen = terminal()
    body = """
    def hang(n):
        threading.Event().wait()
    with kinetic.run(backend="local", accelerator="cpu")(hang).run_async_map(
        range(4), max_concurrent=2, name="demo"
    ) as batch:
        try:
            batch.results()
        except KeyboardInterrupt:
            print("interrupted")
    """
    started = script(body, screen)
    screen.until(lambda: "running" in screen.raw.decode(errors="replace"))
    screen.type(b"\x03")
    assert started.end() == 0
    assert [line.replace("^C", "") for line in screen.lines][-1] == "interrupted"
    (last,) = live(screen.lines)
    assert "0/4" in last, "the last counts stay visible"
    assert not screen.screen.cursor.hidden
    assert screen.screen.cursor.attrs.fg == "default"


@pytest.mark.full
def test_several_short_waits_leave_one_line(terminal, script) -> None:
    screen = terminal()
    body = """
    from kinetic.errors import ResultTimeout

    batch = work.run_async_map(range(12), max_concurrent=4, name="demo")
    for _ in range(3):
        try:
            batch.wait(timeout=1)
        except ResultTimeout:
            pass
    open("some", "w").close()
    open("all", "w").close()
    batch.wait()
    """
    assert script(body, screen, held=True).end() == 0
    assert any(live(lines) for lines in screen.history)
    assert len(live(screen.lines)) <= 1


@pytest.mark.full
def test_a_narrow_terminal_without_colors_has_no_wrapped_or_colored_lines(terminal, script) -> None:
    screen = terminal(20)
    assert release_once_shown(script(RESULTS, screen, held=True, NO_COLOR="1")) == 0
    assert [len(live(lines)) for lines in screen.history if lines and live(lines)]
    assert len(screen.lines) == 3, screen.lines
    assert screen.lines[2] == "got 12"
    assert not re.search(rb"\x1b\[(\d+;)*3[0-7]m", screen.raw)


def test_a_pipe_gets_no_live_line_and_no_lines_of_a_short_batch(script) -> None:
    started = script(RESULTS)
    out, err = started.process.communicate(timeout=DEADLINE_S)
    assert (out, err) == (b"got 12\n", b"")


def test_an_invalid_setting_is_an_error_that_lists_the_values(script) -> None:
    out, err = script(RESULTS, KINETIC_PROGRESS="liev").process.communicate(timeout=DEADLINE_S)
    assert out == b"" and b"clean-up" not in err and b"in results" not in err, err
    assert b"batch = work.run_async_map(" in err  # before anything is sent
    assert b"KINETIC_PROGRESS=liev is none of auto, live, plain, off" in err


@pytest.mark.full
def test_asyncio_shows_progress_on_request_without_blocking_its_loop(terminal, script) -> None:
    screen = terminal()
    body = """
    import asyncio
    from kinetic.aio import Client

    async def main():
        beats = 0
        async def beat():
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1
                if beats == 50:
                    open("some", "w").close()  # without it no batch ends
        async with Client(backend="local") as client:
            beating = asyncio.create_task(beat())
            for name, items, asked in (("silent", 5, None), ("demo", 12, True)):
                beats = -1_000_000  # beats before the wait don't count
                batch = await client.run_async_map(
                    work, range(items), max_concurrent=2, name=name, progress=asked)
                beats = 0
                await batch.results(return_exceptions=True)
                os.remove("some")
            beating.cancel()
        print("beats")

    asyncio.run(main())
    """
    started = script(body, screen, held=True)
    screen.until(lambda: live(screen.lines))
    started.release("all")
    assert started.end() == 0
    assert len(live(screen.lines)) == 1 and screen.lines[-1] == "beats"
    assert b"silent" not in screen.raw


@pytest.mark.slow
def test_a_stopped_terminal_stops_neither_work_nor_loop(terminal, script, tmp_path) -> None:
    screen = terminal()
    body = f"""
    import asyncio
    from kinetic.aio import Client

    async def main():
        gaps, last = [], time.monotonic()
        async def beat():
            nonlocal last
            while True:
                await asyncio.sleep(0.01)
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
        async with Client(backend="local") as client:
            batch = await client.run_async_map(
                work, range(12), max_concurrent=2, name="demo", progress=True)
            beating = asyncio.create_task(beat())
            await batch.results(return_exceptions=True)
            beating.cancel()
        with open({str(tmp_path / "part")!r}, "w") as file:
            file.write(str(max(gaps)))
        import os
        os.rename({str(tmp_path / "part")!r}, {str(tmp_path / "gap")!r})

    asyncio.run(main())
    """
    started = script(body, screen)
    screen.until(lambda: b"demo" in screen.raw)
    screen.type(b"\x13")  # Ctrl-S
    screen.until((tmp_path / "gap").exists)
    assert float((tmp_path / "gap").read_text()) < 0.5
    screen.type(b"\x11")  # Ctrl-Q
    assert started.end() == 0


@pytest.mark.slow
def test_a_closed_error_stream_does_not_matter(script) -> None:
    out, _ = script("sys.stderr.close()\n" + RESULTS, KINETIC_PROGRESS="live").process.communicate()
    assert out == b"got 12\n"


def test_a_long_step_is_shown_until_its_end(terminal, script, tmp_path) -> None:
    screen = terminal()
    body = """
    import os
    from kinetic._sync.portal import PORTAL
    from kinetic._progress.steps import step

    def work_hard(packing):
        n = 0
        while not os.path.exists("seen"):
            n = min(n + 1, 99)
            packing.update(n * 1_000_000, 100_000_000)
            time.sleep(0.015)
        print("nearly there")

    async def pack():
        import anyio.to_thread
        with step("packing work") as packing:
            await anyio.to_thread.run_sync(work_hard, packing)

    PORTAL.call(pack)
    print("packed")
    """
    started = script(body, screen)
    shown = re.compile(r"packing work  ━*─*  \d+%")
    screen.until(lambda: any(shown.fullmatch(line) for line in screen.lines))
    (tmp_path / "seen").touch()
    assert started.end() == 0
    assert screen.lines == ["nearly there", "packed"]
