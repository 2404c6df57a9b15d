"""Read the log of a job, attempt after attempt, each line once.

`Cluster.logs` reads the log of one attempt, and reconnects if the connection breaks. `lines` adds
the logs of later attempts. `JobHandle.logs` raises an error that explains why a log is missing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext

from kinetic._runner.protocol import wire
from kinetic._tasks import until_set
from kinetic.aio._engine.session import JobRef
from kinetic.aio._net.retry import growing_pauses
from kinetic.aio._submissions.ids import worker_name
from kinetic.aio.ports import ItemOutput
from kinetic.errors import NoLog, NotFound

LAST_BYTES = 1 << 20
"""Maximum bytes that `last` returns, because a job can write a line of any length."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0
"""First and longest pause between checks for the log of a starting attempt, in seconds."""

CHECK_S = 30.0
"""Seconds between checks whether the attempt has ended, in case its end isn't reported."""

QUIET_S = 15.0
"""Seconds to wait for a line of an attempt that has ended but whose log stays open.

The wait takes less than twice as long.
"""


async def lines(
    ref: JobRef, *, follow: bool = False, attempt: int | None = None, tail: int | None = None
) -> AsyncGenerator[str]:
    """Yield the lines of one attempt: *attempt*, or the current one.

    With *follow*, wait for more lines until the attempt has ended. With *follow* but no *attempt*,
    then continue with the next attempts until the item has ended; skip attempts without a log. If
    the platform has no log of an attempt, yield the lines that the runner kept in the store.

    Raises:
        NotFound: There is no log: the attempt has not started, or its log was removed.
        NoLog: The item has no attempt of this number yet.
    """
    submission, cluster = ref.submission, ref.session.platform.cluster
    item = submission.item(ref.index)
    if attempt is not None or (follow and item is None):
        item = await submission.read_item(ref.index)
    if attempt is not None and item is not None and attempt > item.attempt:
        job_id = submission.identity.job_id(ref.index)
        raise NoLog(f"{job_id} has no attempt {attempt}: its current attempt is {item.attempt}")
    number = attempt or (1 if item is None else last_attempt(item))
    found_log, attempt_ended, yielded = False, False, 0
    pauses = growing_pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    with ref.session.awaiting(submission) if follow else nullcontext():
        while True:
            name = submission.identity.attempt_name(ref.index, number)
            missing: NotFound | None = None
            is_live = follow and (item is None or not item.state.final)
            sources = [cluster.logs(name, follow=follow, tail=tail)]
            if submission.identity.leased:
                sources.append(_worker_log(ref, number, follow=follow, tail=tail))
            for source in sources:
                known = yielded  # another source, or the same one before, may have ended early
                try:
                    async with aclosing(_until_silent(ref, number, source, follow=follow)) as log:
                        async for line in log:
                            if known:
                                known -= 1
                            else:
                                yielded += 1
                                yield line
                except NotFound as exc:
                    missing = missing or exc  # the first error names the attempt's own log
                    if yielded and tail is not None:  # it isn't known how many came before
                        missing = None
                else:
                    missing = None
                if missing is None:
                    break
            if missing is not None or not (yielded or is_live):
                stored = await submission.kept_log(ref.index, number)
                missing = None if stored else missing
                for line in stored[yielded if tail is None else max(0, len(stored) - tail) :]:
                    yielded += 1
                    yield line
            found_log = found_log or yielded > 0 or missing is None
            if attempt is not None or not follow:
                # An empty log can be that of an attempt that the platform doesn't know.
                if missing is None and attempt is not None and not yielded:
                    missing = None if await cluster.find(names=[name]) else NotFound(name)
                if missing is not None:
                    raise missing
                return
            if missing is not None:
                item = await submission.read_item(ref.index)
                # A worker's item has no job before it begins.
                may_begin = submission.identity.leased and not item.state.final
                if item.attempt == number and not (found_log or may_begin):
                    raise missing
                if not attempt_ended and not _is_hopeless(ref):
                    # The log may be about to appear: look again after the attempt's end.
                    attempt_ended = _is_past(item, number)
                    if not attempt_ended:
                        await _wait_for_change(ref, next(pauses))
                    continue
            if not await _wait_until_past(ref, number, LONGEST_PAUSE_S):
                return
            item = submission.item(ref.index)
            number, attempt_ended, yielded = number + 1, False, 0
            pauses = growing_pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S)


def last_attempt(item: wire.Item) -> int:
    """Return the last attempt that may have a log: a cancelled item never begins its next one."""
    return max(1, item.attempt - (item.state is wire.ItemState.CANCELLED))


async def _worker_log(
    ref: JobRef, number: int, *, follow: bool, tail: int | None
) -> AsyncGenerator[str]:
    """Yield what an attempt has written, from the output of its worker.

    Raises:
        NotFound: The attempt didn't run in a worker, or the log was removed.
    """
    from kinetic._runner.protocol.marks import mark  # most logs need no worker
    from kinetic._runner.protocol.workers import WorkerId

    submission, index = ref.submission, ref.index
    identity = submission.identity
    attempts = await submission.list_attempts(index)
    attempt = attempts.get(number, wire.Attempt())
    outcome = attempt.outcome
    name = attempt.worker if outcome is None else outcome.writer
    part: tuple[int, int | None] | None = None if outcome is None else outcome.log
    if part is None and name != attempt.worker and attempt.output is not None:
        name, part = attempt.worker, (attempt.output, None)  # it was the last item of its worker
    if (worker := WorkerId.parse(name)) is None:
        raise NotFound(f"attempt {number} of {identity.job_id(index)} has no output")
    if outcome is not None and part is None:
        raise NotFound(f"the end of the output of {identity.job_id(index)} is in the store")
    marked = identity.key, identity.scope, identity.job_id(index), number
    place = ItemOutput(
        worker_name(identity.id, worker),
        part,
        (mark(*marked, "begins"), mark(*marked, "has ended")),
        since=attempt.claimed or identity.created,
    )
    async with aclosing(submission.cluster.item_log(place, follow=follow, tail=tail)) as lines:
        async for line in lines:
            yield line


async def last(ref: JobRef, count: int) -> list[str]:
    """Return the last *count* lines of the current attempt, at most `LAST_BYTES` bytes."""
    kept, size = deque[bytes](), 0
    async with aclosing(lines(ref, tail=count)) as log_lines:
        async for line in log_lines:
            kept.append(line.encode(errors="replace")[-LAST_BYTES:])
            size += len(kept[-1]) + 1
            while size > LAST_BYTES + 1:
                size -= len(kept.popleft()) + 1
    return [line.decode(errors="ignore") for line in kept]


async def _until_silent(
    ref: JobRef, number: int, source: AsyncGenerator[str], *, follow: bool
) -> AsyncGenerator[str]:
    """Yield the lines of an attempt's log; end also if the attempt has ended and no line comes.

    Otherwise, reading might never end. For example, the platform doesn't report the end of a log if
    the node was deleted, or while the pod waits for other pods.
    """
    waiting: asyncio.Timeout | None = None

    async def limit_silence() -> None:
        """Wait for the attempt's end; then end the first wait for a line that takes `QUIET_S`."""
        await _wait_until_past(ref, number, CHECK_S)
        seen: asyncio.Timeout | None = None
        # A timer for each line would take a third of the CPU time.
        while seen is None or seen is not waiting:
            seen = waiting
            await asyncio.sleep(QUIET_S)
        seen.reschedule(0)

    watch = ref.session.spawn(limit_silence(), name="end of a log") if follow else None
    try:
        while True:
            async with asyncio.timeout(None) as waiting:
                line = await anext(source, None)
            waiting = None
            if line is None:
                return
            yield line
    except TimeoutError:
        return
    finally:
        if watch is not None:
            watch.cancel()
        await source.aclose()


async def _wait_until_past(ref: JobRef, number: int, interval: float) -> bool:
    """Wait for the end of attempt *number*; return whether a later one exists.

    Checks every *interval* seconds. Returns False if this process can learn no more about the item.
    """
    item = ref.submission.item(ref.index)
    while not _is_past(item, number):
        if _is_hopeless(ref):
            return False
        changed = await _wait_for_change(ref, interval)
        submission = ref.submission
        item = submission.item(ref.index) if changed else await submission.read_item(ref.index)
    return item is not None and item.attempt > number


def _is_past(item: wire.Item | None, number: int) -> bool:
    return item is not None and (item.attempt > number or item.state.final)


def _is_hopeless(ref: JobRef) -> bool:
    """Return whether this process can find out nothing more about the item."""
    return bool(ref.submission.error(ref.index) or ref.submission.abandoned)


async def _wait_for_change(ref: JobRef, timeout: float) -> bool:
    """Wait up to *timeout* seconds for a change of the item; return whether it changed."""
    changed = asyncio.Event()

    def on_change(index: int, item: wire.Item | None) -> None:
        if index == ref.index or item is None:
            changed.set()

    stop_listening = ref.submission.listen(on_change)
    try:
        return await until_set(changed, timeout)
    finally:
        stop_listening()
