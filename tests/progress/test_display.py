"""Progress lines: their layout, their timing, and drawing them below the output of others."""

from __future__ import annotations

import io
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from kinetic._progress.entry import Entry, choose_mode
from kinetic._progress.line import compose
from kinetic._progress.steps import Step, current_line, step
from kinetic._progress.surfaces import Live, Plain, Screen
from kinetic.progress import Progress

COUNTS = st.integers(0, 10**7)
VALUES = st.builds(
    Progress,
    total=st.none() | COUNTS,
    waiting=COUNTS,
    running=COUNTS,
    succeeded=COUNTS,
    failed=COUNTS,
    cancelled=COUNTS,
    lost=COUNTS,
    retried=COUNTS,
    elapsed=st.floats(0, 1e7),
    rate=st.floats(0, 1e5),
    eta=st.none() | st.floats(0, 1e9),
    first_failure=st.text(max_size=100),
)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=80), VALUES, st.integers(1, 120))
def test_no_line_is_wider_than_the_limit(title, value, width) -> None:
    lines = compose(title, value, width)
    assert all(cell_len(line.plain) <= width for line in lines)
    assert len(lines) == 1 + bool(value.first_failure)


def test_eighty_columns_have_room_for_everything() -> None:
    value = Progress(
        total=1000, waiting=530, running=64, succeeded=400, failed=6, rate=83.0, eta=7.0,
        elapsed=5.0,
    )  # fmt: skip
    (line,) = compose("digits", value, 79)
    for part in ("━", "406/1,000", "6 failed", "64 running", "530 waiting", "83/s", "7 s left"):
        assert part in line.plain


def test_a_narrow_line_drops_the_least_important_parts_first() -> None:
    value = Progress(total=50, waiting=20, running=4, succeeded=20, failed=6, rate=1.0, eta=24.0)
    shown = [compose("digits", value, width)[0].plain for width in (60, 40, 20, 6)]
    assert "waiting" not in shown[0] and "━" in shown[0] and "running" in shown[0]
    assert "24 s left" in shown[1] and "6 failed" in shown[1]
    assert "26/50" in shown[2]
    assert shown[3] == "digits"


def test_at_forty_columns_the_name_is_cut_before_the_counts() -> None:
    value = Progress(total=500, waiting=280, running=4, succeeded=200, failed=10, lost=6)
    (line,) = compose("evaluate the whole grid of them", value, 40)
    assert line.plain.startswith("evaluat…  216/500  10 failed  6 lost")


def test_a_step_has_a_bar_once_its_size_is_known() -> None:
    packing = Step("packing work")
    assert [line.plain for line in compose(packing.title, packing, 79)] == ["packing work"]
    packing.update(30, 60)
    (line,) = compose(packing.title, packing, 79)
    assert line.plain == f"packing work  {'━' * 12}{'─' * 12}  50%"
    packing.update(70, 60)
    assert packing.line() == "packing work: 100% of 60 bytes"


# --- timing and mode ---


def test_plain_lines_become_less_frequent(capsys) -> None:
    plain, entry = Plain(), Entry("demo", Progress(total=9), begun=0.0, delay=0.5)
    seen = []
    for now in range(260):
        plain.draw([entry], float(now))
        if printed := capsys.readouterr().err:
            assert printed == "demo: 0 of 9 ended\n"
            seen.append(now)
    assert seen == [10, 30, 70, 130, 190, 250]


def test_a_last_plain_line_comes_only_after_a_first_and_lines_are_logged(capsys, caplog) -> None:
    plain, entry = Plain(), Entry("demo", Progress(total=9), begun=0.0, delay=0.5)
    plain.draw([entry], 9.0)
    plain.finish(entry, 9.5)
    assert capsys.readouterr().err == ""
    plain.draw([entry], 11.0)
    entry.value = Progress(total=9, succeeded=9, elapsed=12.0)
    plain.finish(entry, 12.0)
    assert capsys.readouterr().err.endswith("demo: 9 of 9 ended: 9 succeeded; took 12 s\n")

    caplog.set_level("INFO", logger="absl")
    plain.draw([entry], 30.0)
    assert capsys.readouterr().err == "" and caplog.messages == [entry.line()]


@pytest.mark.parametrize(
    ("setting", "term", "mode"),
    [
        ("", "xterm", "live"),
        ("AUTO", "xterm", "live"),
        ("auto", "dumb", "plain"),
        ("plain", "xterm", "plain"),
        ("live", "dumb", "live"),
        ("off", "xterm", "off"),
    ],
)
def test_the_mode_depends_on_the_setting_and_the_stream(terminal, setting, term, mode) -> None:
    environ = {"KINETIC_PROGRESS": setting, "TERM": term}
    with terminal().open() as stream:
        assert choose_mode(environ, stream) == mode
    assert choose_mode(environ, stream) == "off", "the stream is closed"
    assert choose_mode(environ, None) == "off"
    assert choose_mode({}, io.StringIO()) == "plain", "the stream isn't a terminal"


# --- on a terminal ---


@pytest.fixture
def screen(terminal):
    window = terminal(columns=30, rows=8)
    with window.open() as stream, window.open() as other:
        display = Screen(stream, [stream, other], max_wait=60)  # the machine may pause
        yield display, window, stream, other
        display.close()


def seen(window) -> list[str]:
    window.all()
    return window.lines


def test_lines_stay_below_the_output(screen) -> None:
    display, window, stream, other = screen
    display.draw(["one", "two"])
    assert seen(window) == ["one", "two"]
    print("hello", file=stream)
    print("world", "!", file=other)
    assert seen(window) == ["hello", "world !", "one", "two"]
    display.draw(["one and a half"])
    assert seen(window) == ["hello", "world !", "one and a half"]
    stream.writelines(["a\n", "b\n"])
    display.keep(["kept"])
    display.draw([])
    assert seen(window) == ["hello", "world !", "a", "b", "kept"]


def test_lines_wait_until_a_line_of_the_output_is_complete(screen) -> None:
    display, window, stream, _ = screen
    display.draw(["ours"])
    print("begun", end="", file=stream, flush=True)
    assert seen(window) == ["begun"]
    display.draw(["ours, later"])
    assert seen(window) == ["begun"]
    print(" and ended", file=stream)
    assert seen(window) == ["begun and ended", "ours, later"]


def test_an_incomplete_line_written_before_stays_whole(screen) -> None:
    display, window, stream, _ = screen
    type(stream).write(stream, "working... ")
    stream.flush()
    display.draw(["ours"])
    assert seen(window) == ["working...", "ours"]
    display.draw([])
    print("done", file=stream)
    assert seen(window) == ["working...", "done"]


def test_output_with_more_lines_than_the_terminal_stays_whole(screen) -> None:
    display, window, stream, _ = screen
    display.draw(["ours", "too"])
    for n in range(30):
        print(n, file=stream)
    assert seen(window) == [*map(str, range(30)), "ours", "too"]


def test_many_threads_write_whole_lines(screen) -> None:
    display, window, stream, other = screen
    display.draw(["ours"])

    def write(name: int) -> None:
        for n in range(50):
            (stream, other)[name % 2].write(f"{name}:{n}\n")

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        display.draw([f"ours {len(window.raw)}"])
        window.read(0.001)
    display.draw(["ours"])
    lines = seen(window)
    assert lines[-1] == "ours"
    assert sorted(lines[:-1]) == sorted(f"{name}:{n}" for name in range(4) for n in range(50))


def test_closing_restores_the_streams(screen) -> None:
    display, window, stream, other = screen
    display.draw(["ours"])
    assert "write" in vars(stream) and "write" in vars(other)
    display.close()
    assert "write" not in vars(stream) and "write" not in vars(other)
    print("after", file=stream, flush=True)
    assert seen(window) == ["after"]


def test_another_library_that_patches_a_stream_keeps_its_patch(screen) -> None:
    unpatched, window, stream, other = screen
    unpatched.close()
    seen_by_library = []

    def patch(patched) -> None:
        original = patched.write

        def write(text: str) -> int:
            seen_by_library.append(text)
            return original(text)

        patched.write = write

    patch(stream)
    display = Screen(stream, [stream, other])
    patch(other)
    display.draw(["ours"])
    display.close()
    stream.write("one\n")
    stream.flush()
    other.write("two")
    other.flush()
    assert seen(window) == ["one", "two"], "nothing is drawn after the end"
    assert seen_by_library == ["one\n", "two"]


def test_a_terminal_without_a_character_gets_a_question_mark(terminal) -> None:
    window = terminal()
    with window.open() as stream:
        stream.reconfigure(encoding="ascii")
        display = Screen(stream, [stream])
        display.keep(["━━── 1 · 2…"])
        assert seen(window) == ["???? 1 ? 2?"]
        display.close()


def test_lines_without_space_are_counted(terminal, monkeypatch) -> None:
    window = terminal(rows=30)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "30")
    with window.open() as stream:
        live = Live(stream)
        entries = [Entry(f"batch {n}", Progress(total=9), begun=0.0, delay=0.5) for n in range(20)]
        live.draw(entries, 0.2)
        assert seen(window) == [], "lines appear only after the delay"
        live.draw(entries, 1.0)
        assert len(seen(window)) == 8 and seen(window)[-1] == "and 13 more lines"
        live.close()
        assert seen(window) == []


# --- steps ---


def test_a_step_is_named_after_a_second() -> None:
    now = 0.0
    with step("packing work", clock=lambda: now) as packing:
        packing.update(1, 4)
        assert current_line(clock=lambda: 0.9) == ""
        assert current_line(clock=lambda: 1.1) == "packing work: 25% of 4 bytes"
    assert current_line(clock=lambda: 9.9) == ""


def test_a_step_is_shown_at_its_first_update_after_a_second() -> None:
    now, events = 0.0, []

    def show(shown: Step):
        events.append(shown.fraction)
        return lambda: events.append("hidden")

    packing = Step("packing work", clock=lambda: now, show=show)
    for now in (0.5, 0.9, 1.1, 1.5):
        packing.update(int(now * 10), 20)
    packing.end()
    assert events == [0.55, "hidden"]
    short = Step("packing work", clock=lambda: now, show=show)
    short.update(1, 1)
    short.end()
    assert events == [0.55, "hidden"]
