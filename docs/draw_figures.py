"""Draw the figures of README and the site, each for a light and a dark page.

    python docs/draw_figures.py [FOLDER]    default: docs/_static

`how` shows where a job's parts go. `speed` shows the rates that benchmarks/recorded.jsonl records.
A test compares the files with what this program draws. The letters are so large that a phone
shows them.
"""

from __future__ import annotations

import json
import math
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "benchmarks" / "recorded.jsonl"
WIDTH = 440
PALETTES = {
    "light": {
        "ink": "#1c2126", "faint": "#56616b", "line": "#c9d1d8", "panel": "#f4f7f8",
        "accent": "#0f766e", "on-accent": "#ffffff", "other": "#8a97a3",
    },
    "dark": {
        "ink": "#e6eaee", "faint": "#a3afba", "line": "#424c56", "panel": "#1f262c",
        "accent": "#2dd4bf", "on-accent": "#0b1f1d", "other": "#75828e",
    },
}  # fmt: skip
GROUPS = {
    "a process per job; results outlive every process:": {
        "submitit LocalExecutor": "submitit", "kinetic": "kinetic",
    },
    "processes that jobs share; results end with them:": {
        "Dask LocalCluster": "Dask", "Ray": "Ray", "ProcessPoolExecutor": "ProcessPoolExecutor",
    },
}  # fmt: skip
"""Contenders of `throughput` and their names in the chart, by what they give a job."""
SUBMITTERS = {"keras-kinetic==0.0.4": "keras-kinetic 0.0.4", "kinetic": "kinetic"}


def svg(title: str, height: int, shapes: list[str], palette: dict[str, str]) -> str:
    """Put *shapes* into an SVG whose classes have the colors of *palette*."""
    fills = "".join(f".{name}{{fill:{color}}}" for name, color in palette.items())
    strokes = "".join(f".s-{name}{{stroke:{color}}}" for name, color in palette.items())
    font = "font:15px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"',
            f' viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>text{{{font}}}.bold{{font-weight:600}}{fills}{strokes}</style>",
            *shapes,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, look: str = "ink", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{look}" text-anchor="{anchor}">{escape(words)}</text>'


def number(x: float, y: float, value: int) -> str:
    """Draw the number of a phase in a circle."""
    digit = text(x, y + 5, str(value), "on-accent bold", "middle")
    return f'<circle cx="{x:g}" cy="{y:g}" r="11" class="accent"/>{digit}'


def arrow(path: str) -> str:
    return (
        f'<path d="{path}" fill="none" class="s-accent" stroke-width="2.5" marker-end="url(#to)"/>'
    )


def how(palette: dict[str, str]) -> str:
    """Show that a program and the workers meet in the store, with the numbers of the phases."""
    boxes = [
        ("Your program", ["a script,", "a notebook,", "a web app"]),
        ("Store", ["a bucket, or", "a folder of", "this machine"]),
        ("Workers", ["TPU pods,", "GPU pods, or", "processes here"]),
    ]
    width, gap, top, height = 124, 34, 60, 130
    upper, lower = top + 46, top + 106
    tip = '<path d="M0 0L10 5L0 10z" class="accent"/>'
    size = 'viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6"'
    shapes = [f'<defs><marker id="to" {size} orient="auto">{tip}</marker></defs>']
    for column, (name, lines) in enumerate(boxes):
        x = column * (width + gap)
        shapes.append(
            f'<rect x="{x + 1}" y="{top}" width="{width - 2}" height="{height}" rx="10"'
            ' class="panel s-line" stroke-width="1.5"/>'
        )
        shapes.append(text(x + width / 2, top + 36, name, "ink bold", "middle"))
        for row, line in enumerate(lines):
            shapes.append(text(x + width / 2, top + 66 + 22 * row, line, "faint", "middle"))
        if column < 2:
            left, right = x + width + 2, x + width + gap - 2
            shapes += [arrow(f"M{left} {upper}H{right}"), arrow(f"M{right} {lower}H{left}")]
    turn = "q0 -10 10 -10", "q10 0 10 10"
    shapes += [
        arrow(f"M60 {top}v-26{turn[0]}H368{turn[1]}V{top - 3}"),
        number(16, top, 1), number(width + gap / 2, upper - 18, 2), number(WIDTH / 2, top - 36, 3),
        number(WIDTH - 16, top, 4), number(width + gap / 2, lower + 20, 5),
    ]  # fmt: skip
    x = 11.0
    for value, phase in enumerate(("Discover", "Build", "Schedule", "Run", "Collect"), start=1):
        shapes += [number(x, 222, value), text(x + 15, 227, phase, "faint")]
        x += 42 + 7.6 * len(phase)
    title = (
        "Your program puts code and inputs into the store, and orders workers. "
        "The workers read the store, and write outcomes into it. Your program collects them."
    )
    return svg(title, 238, shapes, palette)


def tables() -> dict[str, dict[str, list[str]]]:
    """Return the rows of the last recorded tables, by question and caption or first heading."""
    found: dict[str, dict[str, list[str]]] = {}
    question = key = ""
    for line in map(json.loads, RECORDED.read_text(encoding="utf-8").splitlines()):
        match line:
            case {"question": {"name": question}}:
                found = {key: rows for key, rows in found.items() if not key.startswith(question)}
            case {"caption": caption}:
                key = f"{question}: {caption}"
            case {"head": [name, *_]}:
                key = f"{question}: {name}" if name else key
            case {"row": [name, *cells]}:
                found.setdefault(key, {})[name.strip()] = cells
    return found


def rate(cells: list[str]) -> str:
    """Format a rate as README's tables do: two digits below 10, else a whole number."""
    value = float(cells[0])
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def speed(palette: dict[str, str]) -> str:
    """Draw jobs per second of each library, and submissions per second on Kubernetes."""
    recorded = tables()
    (here,) = [rows for key, rows in recorded.items() if key.startswith("throughput: 1 slots")]
    submitted = recorded["kubernetes: submitting 200"]
    shapes: list[str] = []
    y = 16

    def heading(title: str, *lines: str) -> None:
        nonlocal y
        shapes.append(text(0, y, title, "ink bold"))
        for line in lines:
            y += 20
            shapes.append(text(0, y, line, "faint"))
        y += 14

    def row(name: str, shown: str, share: float) -> None:
        nonlocal y
        y += 24
        kinetic = name == "kinetic"
        look, color = ("ink bold", "accent") if kinetic else ("ink", "other")
        length = max(2, share * 210)
        shapes.append(text(0, y, name, look))
        shapes.append(
            f'<rect x="170" y="{y - 12}" width="{length:.1f}" height="14" rx="3" class="{color}"/>'
        )
        shapes.append(text(178 + length, y, shown, look))

    heading("Jobs per second", "a function that does nothing, one slot;", "logarithmic scale")
    for title, names in GROUPS.items():
        y += 26
        shapes.append(text(0, y, title, "faint"))
        for contender, name in names.items():
            cells = here[contender]
            row(name, rate(cells), (math.log10(float(cells[0])) + 0.5) / 4.7)
        y += 6
    y += 44
    heading("Submissions per second", "200 jobs, to a Kubernetes control plane")
    most = max(float(submitted[name][0]) for name in SUBMITTERS)
    for contender, name in SUBMITTERS.items():
        row(name, rate(submitted[contender]), float(submitted[contender][0]) / most)
    title = "Jobs per second of kinetic and four other libraries; submissions of keras-kinetic"
    return svg(title, y + 12, shapes, palette)


FIGURES = {"how": how, "speed": speed}


def draw(folder: Path) -> None:
    for name, figure in FIGURES.items():
        for theme, palette in PALETTES.items():
            (folder / f"{name}-{theme}.svg").write_text(figure(palette), encoding="utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "_static")
