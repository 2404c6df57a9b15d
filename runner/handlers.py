"""What the standard library does in every fork and at every end, kept back until a job needs it.

``threading`` and ``logging`` make their locks anew in a fork: another thread
may have held them. A warm parent has one thread, which holds none while it
forks. In its forks there is nothing to repair, and it would cost each of them
a tenth of the pages that it touches. At the end ``logging`` flushes and closes
its handlers; as long as the job has made none, there are none.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

__all__ = ["finish", "held_back", "release"]

_NEEDLESS = ("threading", "logging")

_held: dict[str, list[Callable[[], object]]] = {
    "before": [],
    "after_in_parent": [],
    "after_in_child": [],
}
_ends: list[Callable[[], object]] = []
_handlers: list[object] = []
_handlers_before = 0
_note_thread: Callable[[], object] | None = None
_register: Any = getattr(os, "register_at_fork", None)


@contextmanager
def held_back() -> Generator[None]:
    """What these modules register while they are imported in here is held back."""
    if _register is None or any(name in sys.modules for name in _NEEDLESS):
        yield  # it is too late, or there are no forks
        return
    os.register_at_fork = _take  # type: ignore[assignment]
    try:
        yield
    finally:
        os.register_at_fork = _register
    _hold_ends()


def _take(**handlers: Callable[[], object]) -> None:
    if all(getattr(one, "__module__", "") in _NEEDLESS for one in handlers.values()):
        for when, one in handlers.items():
            _held[when].append(one)
    else:
        _register(**handlers)


def _hold_ends() -> None:
    global _handlers, _handlers_before, _note_thread
    logging, threading = (sys.modules.get(name) for name in ("logging", "threading"))
    if threading is not None:
        _note_thread = getattr(threading.main_thread(), "_set_native_id", None)
    known: list[object] | None = getattr(logging, "_handlerList", None)
    if logging is not None and known is not None:
        _handlers, _handlers_before = known, len(known)
        atexit.unregister(logging.shutdown)
        _ends.append(logging.shutdown)


def _before() -> None:
    for one in reversed(_held["before"]):
        one()


def _after_in_parent() -> None:
    for one in _held["after_in_parent"]:
        one()


def _after_in_child() -> None:
    for one in _held["after_in_child"]:
        one()


def release() -> None:
    """In a fork of the warm parent: from now on there may be threads, and forks of its own."""
    if _note_thread is not None:
        _register(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
        _note_thread()  # it is the one thing that a fork changes


def finish() -> None:
    """At the end of such a fork, after all else that is registered for it."""
    if len(_handlers) != _handlers_before:
        for one in _ends:
            one()
