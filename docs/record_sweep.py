"""Record examples/sweep.py in a terminal, and write the recording as an animated SVG.

    pip install -e '.[test]'
    python docs/record_sweep.py [FILE]    default: docs/_static/sweep.svg

The program runs in a real pseudo-terminal, and pyte interprets its output. The SVG stacks the
screens as frames, and a CSS animation moves from frame to frame at the speed of the run. It uses
no script and no font from the network. Where nothing moves, readers see the last frame: if they
prefer reduced motion, and in programs that draw no animation.
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
import time
from html import escape
from itertools import groupby
from pathlib import Path

import pyte
from pyte.screens import Char

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python examples/sweep.py"
COLUMNS, ROWS = 46, 18  # so narrow that a phone shows letters of 11 pixels
FRAME_S = 0.1  # minimum time between two frames
HOLD_S = 4.0  # how long the last frame stays
CELL, LINE, MARGIN, BAR = 8.4, 19, 14, 30  # pixels: width and height of a cell, margin, title bar
COLORS = {
    "default": "#d8dee9", "black": "#4c566a", "red": "#e0707b", "green": "#a3d07e",
    "brown": "#ebcb8b", "blue": "#81a1c1", "magenta": "#c895bf", "cyan": "#88c0d0",
    "white": "#eceff4",
}  # fmt: skip

Row = tuple[Char, ...]
Frame = tuple[float, tuple[Row, ...]]


def record() -> list[Frame]:
    """Run the program; return its screens, and the seconds at which each appeared."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ {COMMAND}\r\n".encode())
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.execv(sys.executable, [sys.executable, *COMMAND.split()[1:]])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    frames = [(0.0, rows_of(screen))]
    began = time.monotonic()
    while output := read(terminal):
        stream.feed(output)
        now, rows = time.monotonic() - began, rows_of(screen)
        if now - frames[-1][0] < FRAME_S and len(frames) > 1:
            frames[-1] = (frames[-1][0], rows)
        elif rows != frames[-1][1]:
            frames.append((now, rows))
    _, status = os.waitpid(child, 0)
    if status != 0:
        sys.exit(f"{COMMAND} failed: " + "\n".join(screen.display))
    # Begin with the first result: a film that begins with an empty terminal looks broken.
    results = ((at, n) for n, (at, rows) in enumerate(frames) if rows[1][0].data.isdigit())
    begin, first = next(results)
    return [(at - begin, rows) for at, rows in frames[first:]]


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux reports the end of a terminal as EIO
        return b""


def rows_of(screen: pyte.Screen) -> tuple[Row, ...]:
    return tuple(
        tuple(screen.buffer[row][column] for column in range(COLUMNS)) for row in range(ROWS)
    )


def drawn(row: Row) -> str:
    """Draw one row: a text element for each run of cells with the same look."""
    texts, column = [], 0
    for (color, bold), cells in groupby(row, key=lambda cell: (cell.fg, cell.bold)):
        text = "".join(cell.data for cell in cells)
        start, column = column, column + len(text)
        if not text.strip():
            continue
        indent = len(text) - len(text.lstrip())
        text, start = text.strip(), start + indent
        fill = COLORS.get(color.removeprefix("bright"), f"#{color}")
        weight = ' font-weight="bold"' if bold else ""
        texts.append(
            f'<text x="{start * CELL:.1f}" textLength="{len(text) * CELL:.1f}"'
            f' fill="{fill}"{weight}>{escape(text)}</text>'
        )
    return "".join(texts)


def svg(frames: list[Frame]) -> str:
    """Stack the frames below each other, and animate which one is visible."""
    used = max(row for _, rows in frames for row in range(ROWS) if drawn(rows[row])) + 1
    height, width = used * LINE + 2 * MARGIN, COLUMNS * CELL + 2 * MARGIN
    names: dict[str, str] = {}
    uses = []
    for number, (_, rows) in enumerate(frames):
        for place, row in enumerate(rows[:used]):
            if text := drawn(row):
                name = names.setdefault(text, f"r{len(names)}")
                y = number * height + place * LINE + MARGIN + 14
                uses.append(f'<use href="#{name}" x="{MARGIN}" y="{y}"/>')
    length = frames[-1][0] + HOLD_S
    steps = "".join(
        f"{100 * at / length:.2f}%{{transform:translateY({-number * height}px)}}"
        for number, (at, _) in enumerate(frames)
    )
    last = -(len(frames) - 1) * height
    title = f"Recording of {COMMAND}: a sweep of 12 trials with a live line of progress"
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height + BAR}"
 viewBox="0 0 {width:.0f} {height + BAR}" role="img">
<title>{title}</title>
<style>
text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre}}
.film{{animation:play {length:.2f}s step-end infinite;transform:translateY({last}px)}}
@keyframes play{{{steps}}}
@media (prefers-reduced-motion:reduce){{.film{{animation:none}}}}
</style>
<defs>{"".join(f'<g id="{name}">{text}</g>' for text, name in names.items())}</defs>
<rect width="100%" height="100%" rx="8" fill="#242933"/>
<circle cx="18" cy="16" r="5" fill="#e0707b"/><circle cx="36" cy="16" r="5" fill="#ebcb8b"/>
<circle cx="54" cy="16" r="5" fill="#a3d07e"/>
<svg y="{BAR}" width="{width:.0f}" height="{height}"><g class="film">
{"".join(uses)}
</g></svg>
</svg>
"""


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "_static" / "sweep.svg"
    target.parent.mkdir(exist_ok=True)
    target.write_text(svg(record()), encoding="utf-8")
    sys.stdout.write(f"wrote {target}: {target.stat().st_size:,} bytes\n")
