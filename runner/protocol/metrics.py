"""Metrics of a running job: the functions that user code calls, and the format in the store.

The functions also exist outside a job, where they only check their arguments. `kinetic.report` is
`report` of the package ``kinetic_runner`` in a job, and of ``kinetic._runner`` elsewhere.
"""

from __future__ import annotations

import importlib
import json
import math
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from . import frames, signing
from .frames import MALFORMED
from .notes import Note, note_of_result
from .wire import PRUNED

Value = float | dict[str, float]

METRICS = "metrics"
"""The field of an outcome's body with the last batch of metrics."""

MAX_NAMES, MAX_NAME_LENGTH = 64, 100
"""Maximum number of names in one report, and maximum characters of a name."""

_JOB_VARIABLE = "KINETIC_JOB_ID"
_INFINITY = math.inf


class Sink(Protocol):
    """What a job does with its reports."""

    def add(self, step: int, value: Value, /) -> None:
        """Take a checked report; raise ``kinetic.Pruned`` if the job should stop."""
        ...

    def should_stop(self) -> bool:
        """Return whether the job was pruned; a True counts as told."""
        ...


sink: Sink | None = None
"""The sink of this process; None outside a job."""

_warned = False


def report(step: int, value: float | Mapping[str, float]) -> None:
    """Report a metric of the running job; outside a job, only check the arguments.

    The call takes a few microseconds, never waits, and never fails because of the store. A
    background thread sends the reports, on a cluster once a second, and later less often. If more
    than 4096 reports wait, the oldest are dropped. A report of an earlier step than the last one is
    dropped, and the first such report prints a warning. A child that the job forks may report, too.

    Args:
        step: The number of the step or epoch: an int of at least 0.
        value: A finite number, a scalar of NumPy, JAX, or PyTorch, or a dict of at most 64 such
            numbers by name.

    Raises:
        TypeError: The step isn't an int, or the value isn't a number.
        ValueError: The step is negative, or the value isn't finite.
        kinetic.errors.Pruned: `kinetic.BatchHandle.prune` asked this attempt to stop. Let the
            exception end the function. The first later report may raise it, too.

    Example::

        for epoch in range(100):
            kinetic.report(epoch, train_one_epoch())
    """
    if type(step) is not int or step < 0:
        step = _checked_step(step)
    if type(value) is not float or not -_INFINITY < value < _INFINITY:
        value = _checked_value(step, value)
    if sink is not None:
        sink.add(step, value)
    elif not _warned and _JOB_VARIABLE in os.environ:
        _warn_once()


def should_stop() -> bool:
    """Return whether `kinetic.BatchHandle.prune` asked this job to stop; False outside a job.

    Use it in code that catches every exception, such as a callback of a training library. After
    the function has read True, it counts as pruned, however it ends.

    Example::

        if kinetic.should_stop():
            model.stop_training = True
    """
    return sink is not None and sink.should_stop()


def _checked_step(step: Any) -> int:
    try:
        number = None if isinstance(step, bool) else operator.index(step)  # also NumPy's ints
    except TypeError:
        number = None
    if number is None or number < 0:
        problem = f"the step must be an int of at least 0, not {_shown(step)}"
        raise (TypeError if number is None else ValueError)(f"kinetic.report: {problem}")
    return number


def _checked_value(step: int, value: Any) -> Value:
    subject = f"the value of step {step}"
    if type(value) is not dict and not isinstance(value, Mapping):
        return _checked_number(subject, value)
    entries: Any = cast("Any", value)
    if not 0 < len(entries) <= MAX_NAMES:
        problem = f"has {len(entries)} entries; pass 1 to {MAX_NAMES}"
        raise ValueError(f"kinetic.report: {subject} {problem}")
    checked: dict[str, float] = {}
    for name, number in entries.items():
        if type(name) is not str or len(name) > MAX_NAME_LENGTH:
            problem = f"has the name {_shown(name)}; a name is text of at most {MAX_NAME_LENGTH}"
            raise TypeError(f"kinetic.report: {subject} {problem} characters")
        if type(number) is not float or not -_INFINITY < number < _INFINITY:
            number = _checked_number(f"{name!r} of step {step}", number)
        checked[name] = number
    return checked


def _checked_number(subject: str, value: Any) -> float:
    number = value
    if getattr(number, "shape", None) == () and hasattr(number, "item"):
        number = number.item()  # a scalar of NumPy, JAX, or PyTorch
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"kinetic.report: {subject} must be a number, not {_shown(value)}")
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"kinetic.report: {subject} must be finite, not {_shown(value)}")
    return number


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # the class is the user's
        text = "…"
    return f"{text if len(text) <= 60 else f'{text[:60]}…'} ({type(value).__name__})"


def _warn_once() -> None:
    """Say that this process, which a job has started, can't report."""
    global _warned
    _warned = True
    print(
        "kinetic: report() does nothing in this process, which the job started as a new program; "
        "report from the job's own process, or from one that it forks",
        file=sys.stderr,
    )


# --- pruned ------------------------------------------------------------------------------


class Pruned(Exception):
    """What ``kinetic.Pruned`` is in a job whose image lacks kinetic; see `kinetic.errors`."""

    __module__ = "kinetic.errors"  # a pickle of it refers to the client's class

    def __init__(self, step: int, value: Any) -> None:
        super().__init__(step, value)
        self.step = step
        self.value = value

    def __str__(self) -> str:
        return f"pruned at step {self.step}"


def pruned_class() -> type[Any]:
    """Return the class ``kinetic.Pruned`` of this process; a job's image may lack kinetic."""
    try:
        found: Any = importlib.import_module("kinetic.errors")
        return cast("type[Any]", found.Pruned)
    except (ImportError, AttributeError):  # an older kinetic
        return Pruned


def pruned_body(step: int, value: Value | None) -> bytes:
    """Return the body of a pruned outcome: the last reported step and value."""
    return frames.pack([], {PRUNED: {"step": step, "value": value}})


def plain(step: Any, value: Any) -> tuple[int, Value | None]:
    """Return the step and the value of a ``kinetic.Pruned`` that user code has made, for JSON."""
    try:
        step = _checked_step(step)
        return step, None if value is None else _checked_value(step, value)
    except (TypeError, ValueError):
        return (step if type(step) is int else 0), None


def pruned_note(step: int, value: Value | None) -> Note | None:
    """Return the note of a pruned outcome: ``step``, and ``value`` or a ``value.NAME`` of each."""
    return note_of_result({"step": step, "value": value})


def read_pruned(fields: Mapping[str, Any]) -> tuple[int, Value | None]:
    """Return step and value from the *fields* of a body that `pruned_body` made."""
    entry = fields[PRUNED]
    return entry["step"], entry["value"]


# --- the objects -------------------------------------------------------------------------


class Reports(NamedTuple):
    """Reports of one process, in their order: pairs of step and value.

    ``writer`` names the process. ``first`` counts the process's earlier reports, so that a reader
    recognizes reports that it has read before.
    """

    writer: str
    first: int
    entries: Sequence[tuple[int, Value]]

    def to_fields(self) -> dict[str, Any]:
        """Return the reports as values for JSON."""
        return {**self._asdict(), "entries": [*self.entries]}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Reports:
        """Read what `to_fields` returned.

        Raises:
            ValueError: *fields* are damaged.
        """
        try:
            entries = [(int(step), value) for step, value in fields["entries"]]
            return cls(str(fields["writer"]), int(fields["first"]), entries)
        except MALFORMED as exc:
            raise ValueError(f"reports are damaged: {exc}") from exc

    def signed(self, key: bytes, scope: str, name: str) -> tuple[bytes, dict[str, str]]:
        """Return content and metadata of the object *name*."""
        content = json.dumps(self.to_fields(), separators=(",", ":")).encode()
        return content, {"mac": signing.sign(key, scope, name, content)}

    @classmethod
    def verified(
        cls, content: bytes, metadata: Mapping[str, str], key: bytes, scope: str, name: str
    ) -> Reports:
        """Read the object *name*.

        Raises:
            ValueError: The signature is missing or wrong, or the content is damaged.
        """
        if not signing.is_signed(metadata, key, scope, name, content):
            raise ValueError(f"{name} is forged or damaged")
        return cls.of(json.loads(content))


def metrics_prefix(scope: str) -> str:
    """Return the prefix of the names of all reports, and of requests to prune."""
    return f"{scope}metrics/"


def metrics_key(scope: str, index: int, attempt: int, slot: int) -> str:
    """Return the name of slot *slot* of an attempt's reports."""
    return f"{metrics_prefix(scope)}{index:08d}.{attempt:04d}.{slot:08d}"


def prune_key(scope: str, index: int, attempt: int) -> str:
    """Return the name of the empty object that asks an attempt to stop; it is signed."""
    return f"{metrics_prefix(scope)}{index:08d}.{attempt:04d}.prune"


def is_quick(store: str) -> bool:
    """Return whether looking for an object of *store* takes microseconds and costs nothing."""
    return store.startswith("file://")
