"""Progress in the output of a notebook's cell, updated in its place."""

from __future__ import annotations

import html
import importlib
import itertools
from typing import Any

from kinetic._display.entry import Entry

__all__ = ["Notebook"]

EVERY_S = 0.5
_NUMBERS = itertools.count(1)


class Notebook:
    """One output an entry: a bar and the line; a finished batch's stays, a step's goes."""

    def __init__(self) -> None:
        # by name: whoever has a notebook has it, and type checkers need not
        ipython: Any = importlib.import_module("IPython.display")
        self._display = ipython.display
        self._update = ipython.update_display
        self._names: dict[Entry, tuple[str, float]] = {}

    def draw(self, entries: list[Entry], now: float) -> None:
        """Show what is due, twice a second."""
        for entry in entries:
            name, last = self._names.get(entry, ("", 0.0))
            if entry.value is None or now < entry.due or now - last < EVERY_S:
                continue
            if name:
                self._tell(self._update, entry, _bundle(entry), name)
            else:
                name = f"kinetic-progress-{next(_NUMBERS)}"
                self._tell(self._display, entry, _bundle(entry), name)
            entry.drawn = True
            self._names[entry] = (name, now)

    def finish(self, entry: Entry, now: float) -> None:
        """Show its last state, or take it away."""
        name, _ = self._names.pop(entry, ("", 0.0))
        if name:
            last = _bundle(entry) if entry.finished else {"text/plain": "", "text/html": ""}
            self._tell(self._update, entry, last, name)

    def _tell(self, how: Any, entry: Entry, bundle: dict[str, str], name: str) -> None:
        entry.context.run(how, bundle, raw=True, display_id=name)

    def close(self, *, quietly: bool = False) -> None:
        """Nothing is held."""


def _bundle(entry: Entry) -> dict[str, str]:
    line = entry.line()
    fraction = entry.value.fraction if entry.value is not None else None
    value = "" if fraction is None else f' value="{fraction:.4f}"'
    bar = f'<progress max="1"{value} style="width: 20em"></progress>'
    return {"text/plain": line, "text/html": f"<div>{bar} {html.escape(line)}</div>"}
