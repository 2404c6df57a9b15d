"""A worker on this machine: its supervisor starts it, and tells it what happens.

The worker and the supervisor share a connection. The supervisor tells when the store may have
changed, and its end is the worker's, too. The worker tells which item it has taken, and its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any

from ..job import workspace
from ..job.processes import LINUX, MARK
from ..protocol import wire
from ..protocol.workers import Terms, WorkerId
from ..stores.objects import open_store
from .main import Submission, Worker


def main(name: str, key: bytes, executor: str, submission: bytes, place: workspace.JobPlace) -> int:
    """Run a worker in this process; return its exit code.

    Args:
        name: The text of its `WorkerId`.
        key: The key of the submission.
        executor: The supervisor's name of this process.
        submission: Three lines: an order without its item, the terms, and the base of the items'
            output directories.
        place: The directories of this worker.
    """
    me = WorkerId.parse(name)
    if me is None:
        raise ValueError(f"{name!r} names no worker")
    order_line, terms_line, base = submission.decode().split("\n")
    order, terms = wire.Order.decode(order_line), Terms.decode(terms_line)
    group = order.group_id
    channel = _connect(executor)

    def report(event: Mapping[str, Any]) -> None:
        _send(channel, event)

    worker = Worker(
        me,
        executor,
        open_store(order.store),
        Submission(
            order=order,
            key=key,
            terms=terms,
            job_id=(lambda index: f"{group}-{index}") if group else (lambda index: order.job_id),
            output_dir=(lambda index: f"{base}/{index}") if group else (lambda index: base),
        ),
        place,
        news=channel.fileno(),
        report=report,
    )
    return worker.run()


def _connect(executor: str) -> socket.socket:
    directory = os.environ.get(MARK, "").rpartition(":")[0]
    folder = os.open(directory, os.O_RDONLY)
    try:
        # A socket's path may have about 100 bytes, and a home directory's path may be longer.
        path = f"/proc/self/fd/{folder}" if LINUX else directory
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(f"{path}/socket")
    finally:
        os.close(folder)
    _send(channel, {"op": "worker", "executor": executor})
    return channel


def _send(channel: socket.socket, header: Mapping[str, Any]) -> None:
    """Send a message, framed as the supervisor's protocol says."""
    text = json.dumps(header).encode()
    with contextlib.suppress(OSError):  # the end of the supervisor also ends the next wait
        channel.sendall(struct.pack("<II", len(text), 0) + text)
