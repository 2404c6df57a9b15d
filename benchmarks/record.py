"""``python -m benchmarks.record``: write the tables of recorded.jsonl into README.md.

``python -m benchmarks --record benchmarks/recorded.jsonl`` appends a run. The last run of each
question is the one that is shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("README.md")
RUN = Path(__file__).with_name("recorded.jsonl")
BEGIN, END = "<!-- the recorded run: generated -->\n", "<!-- the end of the recorded run -->\n"


def main() -> None:
    """Write the page anew."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        replace_tables(page, RUN.read_text(encoding="utf-8").splitlines()), encoding="utf-8"
    )


def replace_tables(page: str, lines: Iterable[str]) -> str:
    """Return *page* with the tables of *lines* in the place of its own."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{render_tables(lines)}{END}{rest.partition(END)[2]}"


def render_tables(lines: Iterable[str]) -> str:
    """Return the recorded lines as Markdown: a heading for each question, and its tables."""
    answers: dict[str, list[dict[str, Any]]] = {}
    answer: list[dict[str, Any]] = []
    for entry in map(json.loads, lines):
        if "question" in entry:
            answers[entry["question"]["name"]] = answer = []
        answer.append(entry)
    return "".join(_answer(answer) for answer in answers.values())


def _answer(answer: list[dict[str, Any]]) -> str:
    text, columns = "", 0
    for line in answer:
        match line:
            case {"question": {"name": name, "machine": machine, "version": version}}:
                text += f"### `{name}`\n\nVersion {version}, {machine}.\n"
            case {"caption": caption}:
                text += f"\n{caption}:\n"
            case {"head": cells}:
                columns = len(cells)
                text += f"\n{_row(cells)}{'|---' * columns}|\n"
            case {"row": [name, *cells]}:
                name = f"**{name}**" if name.startswith("kinetic") else name
                text += _row([name, *cells, *[""] * (columns - len(cells) - 1)])
    return f"{text}\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.strip() for cell in cells)} |\n"


if __name__ == "__main__":
    main()
