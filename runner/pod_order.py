"""What a pod is told by its environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from . import wire
from .hosts import Hosts
from .pod_attempt import Restarts

__all__ = ["OWN", "Order", "read_order"]

KEY_FILE = "/var/run/kinetic/key"
TERMINATION_LOG = "/dev/termination-log"
OWN = ("KINETIC_ASSIGNMENT", "KINETIC_FAILURES", "KINETIC_DISRUPTIONS", "KINETIC_KEY_FILE")
"""Variables that are for the runner alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The assignment with the attempt's true number, the key and the executor's name.

    ``first`` is the number of the attempt that the first pod of the job had;
    ``group`` names the LeaderWorkerSet that the pod is in, if it is in one.
    """

    assignment: wire.Assignment
    key: bytes
    executor: str
    first: int
    restarts: Restarts
    hosts: Hosts | None = None
    group: str = ""


def read_order(environ: Mapping[str, str]) -> Order:
    """What the environment says.

    Raises:
        ValueError: It is incomplete, or of a format that this runner cannot read.
        OSError: The key cannot be read.
    """
    try:
        assignment = wire.Assignment.from_json(json.loads(environ["KINETIC_ASSIGNMENT"]))
    except (KeyError, TypeError) as exc:
        raise ValueError(f"KINETIC_ASSIGNMENT is incomplete: {exc!r}") from exc
    executor = environ.get("KINETIC_POD_UID", "")
    if not executor:
        raise ValueError("KINETIC_POD_UID is not set, and without it nothing can be claimed")
    receipt = environ.get("KINETIC_TERMINATION_LOG", TERMINATION_LOG)
    restarts = Restarts(
        failures=int(environ.get("KINETIC_FAILURES") or 0),
        disruptions=int(environ.get("KINETIC_DISRUPTIONS") or 0),
        receipt=receipt if os.path.exists(receipt) else "",
    )
    return Order(
        assignment=replace(assignment, attempt=assignment.attempt + restarts.total),
        key=Path(environ.get("KINETIC_KEY_FILE", KEY_FILE)).read_bytes(),
        executor=executor,
        first=assignment.attempt,
        restarts=restarts,
        hosts=Hosts.of(environ),
        group=environ.get("KINETIC_LWS", ""),
    )
