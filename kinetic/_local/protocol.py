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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["VERSION", "Order", "OrderError", "Shared", "edition"]

VERSION = (1, 0)
"""Major and minor; another major lives at another path and never meets this one."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class OrderError(ValueError):
    """A job that cannot be accepted as it was asked for."""


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
        if not isinstance(order.labels, dict) or {int} != {type(count) for count in counts}:
            raise OrderError("labels or resources are garbled")
        for what in ("timeout", "start_timeout", "grace"):
            seconds = getattr(order, what)
            if seconds is not None and not (seconds >= 0 and math.isfinite(seconds)):
                raise OrderError(f"{what}={seconds!r} is no time in seconds")
        return order


def edition(runner: Path) -> str:
    """Tells one state of the runner's code from another, so that no old one stays warm."""
    latest = max((file.stat().st_mtime_ns for file in runner.glob("*.py")), default=0)
    return f"{latest:x}"
