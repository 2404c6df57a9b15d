"""Serve clients: answer their requests, and send them the changes of jobs that they watch."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from kinetic._labels import ATTEMPT, INDEX, SUBMISSION, of_attempt
from kinetic._runner.protocol.messages import ChannelError, Message
from kinetic._supervisor.jobs import Action, Job, State, Stop, Table, item_name
from kinetic._supervisor.protocol import VERSION, Channel, JobHeader, OrderError, check
from kinetic.job_status import Reason

MAX_UNREAD_BYTES = 1 << 18
"""With this many unread bytes, a client gets no more changes, so it may miss some states."""

MAX_ENDS = 4000
"""How many ends of items one message to a client has."""

PAUSE_S = 0.02
"""Minimum pause between two messages to a client that watches; one message has many changes."""


class ShuttingDown(Exception):
    """This supervisor is shutting down; the client has to ask the next supervisor."""


class Connection:
    """A connected client, which may also watch jobs.

    Jobs that are ``owned`` end with the connection, and so with the client's process. ``labels``
    select the jobs that the client watches; None if it watches none. ``changes`` are the jobs whose
    states the client must still get. ``ends`` are the items of whose ends the client must still
    hear: by worker, pairs of index and attempt. A ``watch`` request sets ``synced`` to False.
    ``synced`` becomes True when the client has got all jobs that it watches. ``worker`` is set if
    the client is itself a worker's process.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.channel = Channel(sock)
        self.labels: Mapping[str, str] | None = None
        self.changes: dict[Job, None] = {}
        self.owned: set[Job] = set()
        self.ends: dict[Job, list[tuple[int, int]]] = {}
        self.worker: Job | None = None
        self.synced = True
        self.next_send_at = 0.0
        """When to send the next changes at the earliest, while any job is queued or running."""

    @property
    def has_news(self) -> bool:
        """Whether the client still needs news of a job."""
        return bool(self.changes or self.ends)

    def pump(self, now: float, *, immediately: bool) -> None:
        """Send what the socket takes; if *immediately*, don't pause before changes of jobs."""
        self.channel.flush()
        if self.has_news and self.synced and not immediately and now < self.next_send_at:
            return
        if self.has_news:
            self.next_send_at = now + PAUSE_S
        while self.has_news and self.channel.unsent < MAX_UNREAD_BYTES:
            self._queue_news()
            self.channel.flush()
        # If news remain, unsent bytes remain too, so the selector reports room in the socket.
        if not self.has_news and not self.synced:
            self.synced = True
            self.channel.send({"jobs": [], "synced": True})
            self.channel.flush()

    def _queue_news(self) -> None:
        """Queue messages for one `flush`: each takes a system call, and wakes the client."""
        while self.ends and self.channel.unsent < MAX_UNREAD_BYTES:
            worker, ends = next(iter(self.ends.items()))
            view = {"labels": worker.labels, "executor": worker.executor, "ends": ends[:MAX_ENDS]}
            if not (left := ends[MAX_ENDS:]):
                del self.ends[worker]
            else:
                self.ends[worker] = left
            self.channel.send({"jobs": [], "items": view})
        if self.changes and self.channel.unsent < MAX_UNREAD_BYTES:
            self.channel.send({"jobs": _views(self.changes)})
            self.changes.clear()


class Server:
    """Answer requests of clients and workers, and have the functions carry them out."""

    def __init__(
        self,
        table: Table,
        launch: Callable[[JobHeader, bytes], Job],
        delete: Callable[[Job, bool], None],
        remove_logs: Callable[[Collection[str], str], None],
        scale: Callable[[JobHeader, bytes, int, int], int],
        grow: Callable[[str, int], int],
        end_rounds: Callable[[Collection[str], Mapping[str, str] | None, bool], None],
        perform: Callable[[Iterable[Action]], None],
    ) -> None:
        self.connections: set[Connection] = set()
        self._table = table
        self._launch = launch
        self._delete = delete
        self._remove_logs = remove_logs
        self._scale = scale
        self._grow = grow
        self._end_rounds = end_rounds
        self._perform = perform
        self._end_waiters: dict[str, list[tuple[Connection, int]]] = {}
        self._held_launches: dict[str, list[tuple[Connection, dict[str, Any], bytes]]] = {}

    def handle(self, connection: Connection, message: Message) -> None:
        """Handle one message of a client; raise `ChannelError` if the message is invalid."""
        header, body = message
        handler = getattr(self, f"_on_{header.get('op')}", None)  # such as `_on_launch`
        if handler is None:
            raise ChannelError(f"an unknown request: {header.get('op')!r}")
        check(header)
        handler(connection, header, body)

    def notify(self, job: Job) -> None:
        """Notify the clients that watch *job* that it has changed."""
        for connection in self.connections:
            if connection.labels is not None and job.has_labels(connection.labels):
                connection.changes[job] = None  # the message has the state at the time it is sent
        if job.state in (State.ENDED, State.GONE):
            end = {} if job.worker is None else {"end": None}  # the worker has died
            for connection, request_id in self._end_waiters.pop(job.name, ()):
                self._reply(connection, {"id": request_id, **end})
        if job.state is State.GONE:
            for connection, header, body in self._held_launches.pop(job.name, ()):
                self._on_launch(connection, header, body)

    def _notify_ends(self, worker: Job, ends: Sequence[tuple[int, int]], *, urgent: bool) -> None:
        """Notify the clients that watch items of *worker* that these have ended.

        If it is *urgent*, don't pause before the message.
        """
        for connection in self.connections:
            if (labels := connection.labels) is None:
                continue
            selected = ends if worker.has_labels(labels) else ()
            if not selected and (INDEX in labels or ATTEMPT in labels):
                selected = [
                    (index, attempt)
                    for index, attempt in ends
                    if labels.items() <= of_attempt(worker.labels, index, attempt).items()
                ]
            if selected:
                connection.ends.setdefault(worker, []).extend(selected)
                if urgent:
                    connection.next_send_at = 0.0

    def close(self, connection: Connection) -> None:
        """Forget a client that has disconnected."""
        connection.channel.close()
        self.connections.discard(connection)

    def _on_hello(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        reply: dict[str, Any] = {"id": header["id"], "protocol": VERSION, "pid": os.getpid()}
        if tuple(header["protocol"]) != VERSION:
            reply |= {"error": f"the supervisor speaks protocol {VERSION}", "kind": "protocol"}
        self._reply(connection, reply)

    def _on_launch(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        """Launch a job, unless a job of its name exists; while that job is being deleted, wait."""
        reply: dict[str, Any] = {"id": header["id"]}
        try:
            job = JobHeader.from_json(header)
            existing = self._table.jobs.get(job.name)
            if existing is not None and existing.stopping is Stop.DELETED:
                # Start the new job when the old one has ended; its grace period bounds the wait.
                self._held_launches.setdefault(job.name, []).append((connection, header, body))
                return
            if existing is None:
                launched = self._launch(job, body)
                if job.owned:
                    connection.owned.add(launched)
        except (OrderError, ShuttingDown) as exc:
            reply |= _refusal(exc)
        self._reply(connection, reply)

    def _on_delete(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        names = [str(name) for name in header.get("names") or ()]
        keep_logs = bool(header.get("keep_logs"))
        for name in names:
            for waiting_connection, held_header, _ in self._held_launches.pop(name, ()):
                # Answer the held launch as accepted; its job is deleted before it starts.
                self._reply(waiting_connection, {"id": held_header["id"]})
        self._end_rounds(names, header.get("labels"), keep_logs)
        for job in self._select_jobs(names, header.get("labels")):
            self._delete(job, keep_logs)
        # An item of a worker may not be known yet. Its worker finds the request to stop it.
        unknown = {name.rsplit("-", 2)[0] for name in names if name not in self._table.jobs}
        for other in self.connections:
            if other.worker is not None and other.worker.labels.get(SUBMISSION) in unknown:
                other.channel.send({"news": True})
        if not keep_logs:
            labels: Mapping[str, str] = header.get("labels") or {}
            self._remove_logs(names, labels.get(SUBMISSION, ""))
        self._reply(connection, {"id": header["id"]})

    def _on_find(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        names, labels = header.get("names"), header.get("labels")
        if names or labels:
            views = _views(self._select_jobs(names or (), labels))
        else:
            views = [job.view() for job in self._table.jobs.values()]
        self._reply(connection, {"id": header["id"], "jobs": views})

    def _on_ended(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        """Answer when the job has ended, or at once if there is no such job.

        For an item, the answer has the ``end`` of its output, None for the end of the file.
        """
        job = self._table.jobs.get(header["name"])
        if job is None or job.state is State.ENDED:
            self._reply(connection, {"id": header["id"]})
        else:
            self._end_waiters.setdefault(job.name, []).append((connection, header["id"]))

    def _on_called(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        """Note that the sender, a job's process, calls its function now; send no answer."""
        self._perform(self._table.mark_called(header["executor"]))

    def _on_leaving(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        """Note that the sender, a job's process, has stored its outcome; send no answer."""
        if (job := self._table.running(header["executor"])) is not None:
            job.leaving = True
            self.notify(job)

    def _on_scale(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        """Begin a round of workers, or add workers to it."""
        reply: dict[str, Any] = {"id": header["id"], "workers": 0}
        try:
            job, number = JobHeader.from_json(header), header["round"]
            reply["workers"] = self._scale(job, body, number, header["workers"])
        except (OrderError, ShuttingDown) as exc:
            reply |= _refusal(exc)
        self._reply(connection, reply)

    def _on_grow(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        """Add workers to a round that was begun."""
        reply: dict[str, Any] = {"id": header["id"], "workers": 0}
        try:
            reply["workers"] = self._grow(header["name"], header["workers"])
        except ShuttingDown as exc:
            reply |= _refusal(exc)
        self._reply(connection, reply)

    def _on_worker(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        """Note that the connection is that of a worker's process; send no answer."""
        connection.worker = worker = self._table.running(header["executor"])
        if worker is not None and worker.asked_back:  # it was asked before it could hear it
            connection.channel.send({"slots": False})

    def _on_idle(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        """Take the slots of a worker that was asked for them; send no answer."""
        if connection.worker is not None:
            self._table.pause(connection.worker)

    def _on_waits(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        """Note why the worker, the sender, can't go on; empty if it does. Send no answer."""
        if (worker := connection.worker) is not None and worker.state is State.RUNNING:
            worker.message = header["message"]
            worker.reason = Reason.STORE_FULL if worker.message else ""
            self.notify(worker)

    def tell_worker(self, job: Job, message: Mapping[str, Any]) -> None:
        """Send a message to the process of a worker, if it is connected."""
        for connection in self.connections:
            if connection.worker is job:
                connection.channel.send(message)

    def _on_items(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        """Note which items the sender, a worker, has ended, and which it runs; send no answer."""
        worker = connection.worker
        if worker is None or worker.state is not State.RUNNING:
            return  # it has just ended
        ends: list[tuple[int, int]] = []
        for index, attempt, end in header["ended"]:
            ends.append((index, attempt))
            item, name = worker.item, ""
            if item is not None or self._end_waiters:
                name = item_name(worker, index, attempt)
            if item is not None and item.name == name:
                self._table.end_item(item)
                for other in self.connections:
                    other.changes.pop(item, None)
            for waiting_connection, request_id in self._end_waiters.pop(name, ()):
                self._reply(waiting_connection, {"id": request_id, "end": end})
        self._notify_ends(worker, ends, urgent=header.get("urgent", False))
        if running := header.get("running"):
            self.notify(self._table.begin_item(worker, *running))

    def _on_news(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        """Tell the workers of a submission that the store has changed."""
        for other in self.connections:
            if other.worker is not None and other.worker.has_labels(header["labels"]):
                other.channel.send({"news": True})
                with contextlib.suppress(OSError):  # the worker has ended
                    other.channel.flush()
        # After the reply, the client may let items end. Their workers then find the news first.
        self._reply(connection, {"id": header["id"]})

    def _on_watch(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        labels: Mapping[str, str] = header["labels"]
        connection.labels, connection.synced = labels, False
        connection.changes = dict.fromkeys(self._select_jobs((), labels))

    def _select_jobs(self, names: Any, labels: Mapping[str, str] | None) -> list[Job]:
        jobs = self._table.jobs
        found = {name: jobs[name] for name in names if name in jobs}
        if labels is not None:
            found |= {job.name: job for job in jobs.values() if job.has_labels(labels)}
        return [*found.values()]

    def _reply(self, connection: Connection, reply: Mapping[str, Any]) -> None:
        if connection in self.connections:
            connection.channel.send(reply)


def _views(jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """Describe jobs to a client that looks for them, which closes those that died."""
    views: list[dict[str, Any]] = []
    for job in jobs:
        job.heard = job.heard or job.state is State.ENDED
        views.append(job.view())
    return views


def _refusal(error: Exception) -> dict[str, str]:
    """Return the fields of a reply that refuses a job or a worker."""
    if isinstance(error, ShuttingDown):
        return {"error": "the supervisor was asked to stop", "kind": "ending"}
    return {"error": str(error), "kind": "order"}
