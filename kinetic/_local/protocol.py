"""What client and supervisor say to each other, beyond the framing of `kinetic._runner.channel`.

A client opens with ``hello``. Requests carry an ``id`` and are answered in any
order by ``{"id", ...}`` or ``{"id", "error", "kind"}``; the kind ``ending`` means that
this supervisor was told to end, and that the next one may be asked:

``share``   a ``place`` and what orders have in common, its body too (assignment, environment,
            key); not answered; later orders of this connection refer to the place
``launch``  an order: its ``place``, name and labels; its body the job's own part of the same;
            one that is ``owned`` is deleted, with its objects, when the client's process ends
``delete``  ``names`` and/or ``labels``
``find``    ``names`` or ``labels``, or neither for all; answered by ``jobs``
``ended``   ``name``; answered when that job has ended or is gone
``watch``   ``labels``; answered by ``{"jobs", "synced"}`` messages for ever
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinetic._runner.channel import ChannelError

__all__ = ["SUBMISSION", "VERSION", "Order", "OrderError", "Shared", "check", "edition"]

VERSION = (1, 0)
"""Major and minor; another major lives at another path and never meets this one."""

SUBMISSION = "kinetic.dev/submission"
"""The label with whose value the names of a submission's jobs begin."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class OrderError(ValueError):
    """A job that cannot be accepted as it was asked for."""


def _kinds(value: Iterable[Any]) -> set[type]:
    return {type(one) for one in value}


def _is_names(value: Any) -> bool:
    return _kinds([value]) == {list} and _kinds(value) <= {str}


def _is_labels(value: Any) -> bool:
    return _kinds([value]) == {dict} and _kinds(value.values()) <= {str}


def _is_version(value: Any) -> bool:
    return _kinds([value]) == {list} and _kinds(value[:1]) == {int}


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "id": lambda value: isinstance(value, int),
    "place": lambda value: isinstance(value, int),
    "name": lambda value: isinstance(value, str),
    "names": lambda value: value is None or _is_names(value),
    "labels": lambda value: value is None or _is_labels(value),
    "protocol": _is_version,
}


def check(header: Mapping[str, Any]) -> None:
    """Refuse a request that says something else than it can mean, before any of it acts.

    Raises:
        ChannelError: A field is not of its kind.
    """
    for name, is_right in _FIELDS.items():
        if name in header and not is_right(header[name]):
            raise ChannelError(f"a request whose {name} is {header[name]!r:.100}")


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What the orders of a batch have in common: of the header, and of the body."""

    header: Mapping[str, Any]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The part of a job that the supervisor reads.

    ``command`` starts the job's interpreter; ``runner`` is the folder of the
    runner's code, and ``edition`` tells one content of that folder from
    another. ``timeout``, ``start_timeout`` and ``grace`` are seconds. A job that is
    ``owned`` ends with the process that ordered it.
    """

    name: str
    labels: Mapping[str, str]
    shared: Shared
    command: tuple[str, ...]
    runner: str
    edition: str
    fresh: bool = False
    cpus: int = 1
    gpus: int = 0
    memory_bytes: int | None = None
    timeout: float | None = None
    start_timeout: float | None = None
    grace: float = 30.0
    owned: bool = False

    @classmethod
    def from_json(cls, own: Mapping[str, Any], shared: Shared) -> Order:
        """Read a ``launch`` message; unknown fields are ignored.

        Raises:
            OrderError: It cannot be accepted.
        """
        try:
            labels = {**shared.header["labels"], **own["labels"]}
            header = {**shared.header, **own, "labels": labels}
            known: dict[str, Any] = {name: header[name] for name in cls.__slots__ if name in header}
            if not _is_labels(labels) or not _is_names(known["command"]):
                raise TypeError("its labels or its command")
            known["command"] = tuple(known["command"])
            order = cls(**known, shared=shared)
        except (KeyError, TypeError) as exc:
            raise OrderError(f"the order is garbled: {exc}") from exc
        if not _NAME.fullmatch(order.name):
            raise OrderError(
                f"{order.name!r} is no name for a job: at most 200 letters, digits, "
                "dots, dashes and underscores, the first a letter or digit"
            )
        if not order.command:
            raise OrderError("no interpreter was named")
        counts: tuple[Any, ...] = (order.cpus, order.gpus, order.memory_bytes or 0)
        if {int} != {type(count) for count in counts} or min(counts) < 0:
            raise OrderError("its resources are garbled")
        if [type(one) for one in (order.runner, order.edition, order.fresh)] != [str, str, bool]:
            raise OrderError("its runner is garbled")
        for what in ("timeout", "start_timeout", "grace"):
            seconds = getattr(order, what)
            if seconds is None and what != "grace":
                continue
            if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
                raise OrderError(f"{what}={seconds!r} is no time in seconds")
        return order


def edition(runner: Path) -> str:
    """Tells one state of the runner's code from another, so that no old one stays warm."""
    latest = max((file.stat().st_mtime_ns for file in runner.glob("*.py")), default=0)
    return f"{latest:x}"
