"""A worker on this machine, which its supervisor starts."""

from __future__ import annotations

from ..job import workspace
from ..protocol import wire
from ..protocol.workers import Crew, WorkerId
from ..stores.objects import open_store
from .main import Worker
from .supervisor import Supervisor


def main(
    name: str,
    key: bytes,
    executor: str,
    submission: bytes,
    place: workspace.JobPlace,
    memory_bytes: int | None,
) -> int:
    """Run a worker in this process; return its exit code.

    Args:
        name: The text of its `WorkerId`.
        key: The key of the submission.
        executor: The supervisor's name of this process.
        submission: Two lines: an order without its item, and the crew.
        place: The directories of this worker.
        memory_bytes: The limit of an item's memory.
    """
    me = WorkerId.parse(name)
    if me is None:
        raise ValueError(f"{name!r} names no worker")
    order_line, crew_line = submission.decode().split("\n")
    order, crew = wire.Order.decode(order_line), Crew.decode(crew_line)
    worker = Worker(
        me,
        executor,
        open_store(order.store),
        order,
        key,
        crew,
        place,
        channel=Supervisor(executor, single=crew.terms.single),
        memory_bytes=memory_bytes,
    )
    return worker.run()
