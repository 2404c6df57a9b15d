"""Run an attempt like the runner, but without a process: claim, check, run, commit."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kinetic import _init_values
from kinetic._runner.protocol import metrics, outcomes, pickles, wire
from kinetic._runner.protocol.notes import note_of_result
from kinetic._tracebacks import without_own_frames
from kinetic.errors import NotFound, Pruned
from kinetic.job_status import Reason
from kinetic.testing.cluster import Run


async def carry_out(run: Run) -> int:
    """Carry out a job as the runner does; the default work of `memory_platform`.

    A coroutine function runs in the loop, any other function in a thread, which can't be
    stopped. The project isn't extracted, the environment isn't applied, and a call with `Data`
    fails. `kinetic.report` only checks its arguments. Each call gets its own values of ``init``.

    Args:
        run: The job.

    Returns:
        The exit code.

    If the task is cancelled, the job's outcome says why: cancelled, preempted, or out of time.
    """
    order = run.spec.order
    claim = wire.attempt_key(order.scope, order.index, order.attempt, "claim")
    if not await run.store.create(claim, b"", wire.claim_metadata(run.executor)):
        info = await run.store.look(claim)
        if info is None or info.metadata.get("executor") != run.executor:
            return wire.EXIT_FINAL  # another process has claimed this attempt
    item = await _read_item(run, order)
    try:
        chunk = (await run.store.get(order.arguments.name)).body
    except NotFound:
        await run.store.delete([claim])  # a cleanup has removed the inputs
        return wire.EXIT_FINAL
    if (item.state, item.attempt) != (wire.ItemState.OPEN, order.attempt):
        outcome = wire.Outcome(kind=wire.Kind.CANCELLED, reason="cancelled", phase="not started")
        return await commit(run, order, outcome, b"")
    started = time.time()
    try:
        outcome, body = await _run(run, order, chunk)
    except asyncio.CancelledError:
        item = await _read_item(run, order)
        outcome, body = _stopped_outcome(run, item.state is wire.ItemState.CANCELLING)
    return await commit(run, order, outcome._replace(started=started), body)


async def commit(run: Run, order: wire.Order, outcome: wire.Outcome, body: bytes) -> int:
    """Create the signed outcome of the attempt, and return the job's exit code."""
    attempt_id = (order.scope, order.index, order.attempt)
    outcome = outcome._replace(executor=run.executor, ended=time.time(), body=outcomes.digest(body))
    outcome = outcome._replace(writer=run.worker)
    name = wire.attempt_key(*attempt_id, "outcome")
    if not await run.store.create(name, *outcome.stored(run.spec.key, *attempt_id, body)):
        run.print("kinetic: another process has ended this attempt")
    return wire.EXIT_VALUE if outcome.kind is wire.Kind.VALUE else wire.EXIT_FINAL


async def _read_item(run: Run, order: wire.Order) -> wire.Item:
    """Return the state of the item that its objects show."""
    listed = await run.store.list(wire.item_prefix(order.scope, order.index))
    key, scope = run.spec.key, order.scope
    requests = [
        wire.Request.verified(
            (await run.store.get(info.name)).body, info.metadata, key, scope, info.name
        )
        for info in await run.store.list(f"{scope}control/")
    ]
    entries = [(info.name, info.metadata) for info in listed]
    attempts = wire.attempts_of(entries, key, scope)
    standing = wire.standing(order.index, requests)
    return wire.item_state(standing, attempts.get(order.index, {}), order.budgets)


async def _run(run: Run, order: wire.Order, chunk: bytes) -> tuple[wire.Outcome, bytes]:
    """Load and call the function; return the outcome, which may be an error, and its body."""
    phase = "artifact download"
    try:
        code = (await run.store.get(order.function.name)).body
        phase = "data resolve"
        if order.data:
            raise RuntimeError("Data cannot be used on the in-memory platform; pass a path")
        phase = "artifact verification"
        parts = [_verified_part(code, order.function), _verified_part(chunk, order.arguments)]
        phase = "payload unpickle"
        function = pickles.load(parts[0])
        args, kwargs = pickles.load(parts[1])
        init: Mapping[str, Callable[[], Any]] = {}
        if run.spec.crew is not None and run.spec.crew.init is not None:
            init = pickles.load((await run.store.get(run.spec.crew.init.name)).body)
        phase = "execute"
        value = await _call(function, init, args, kwargs)
        phase = "result serialization"
        body = outcomes.encode_value(value, Path(), limit=sys.maxsize).content
        assert isinstance(body, bytes)
    except Pruned as pruned:
        last = metrics.plain(pruned.step, pruned.value)
        note = metrics.pruned_note(*last)
        outcome = wire.Outcome(kind=wire.Kind.VALUE, reason=wire.PRUNED, phase=phase, note=note)
        return outcome, metrics.pruned_body(*last)
    except Exception as error:
        is_user_error = phase in ("execute", "result serialization")
        trace = without_own_frames(error.__traceback__)
        BaseException.__setattr__(error, "__traceback__", trace)  # its class may refuse it
        text = outcomes.error_text(error, phase=phase)
        if phase != "execute":
            message = f"kinetic {phase} failed: {text.qualname}: {text.message}"
            text = replace(text, message=message)
        run.print(text.traceback.rstrip())
        reason = Reason.USER_ERROR if is_user_error else Reason.SETUP
        return _error_outcome(text, reason, error if phase == "execute" else None)
    return wire.Outcome(kind=wire.Kind.VALUE, phase=phase, note=note_of_result(value)), body


def _verified_part(content: bytes, part: wire.Input) -> bytes:
    content = content[part.start : part.stop]
    if hashlib.sha256(content).hexdigest() != part.digest:
        raise ValueError(f"{part.name} is not what was submitted: its SHA-256 differs")
    return content


async def _call(
    function: Callable[..., Any],
    init: Mapping[str, Callable[[], Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if inspect.iscoroutinefunction(function):
        return await _init_values.call_async(function, init, args, kwargs)
    value = await asyncio.to_thread(_init_values.call, function, init, args, kwargs)
    return await value if inspect.isawaitable(value) else value


def _stopped_outcome(run: Run, is_cancelling: bool) -> tuple[wire.Outcome, bytes]:
    """Return the outcome of a job that was asked to end while its function ran."""
    if is_cancelling:
        outcome = wire.Outcome(kind=wire.Kind.CANCELLED, reason="cancelled", phase="cancelled")
        return outcome, b""
    is_timeout = run.cause is Reason.DEADLINE
    limit = run.spec.timeout or 0.0
    message = f"ran longer than its timeout of {limit:g} s" if is_timeout else "was asked to stop"
    text = outcomes.ErrorText(
        qualname="", message=f"the job {message}", traceback="", phase="execute"
    )
    return _error_outcome(text, Reason.DEADLINE if is_timeout else Reason.PREEMPTED, None)


def _error_outcome(
    text: outcomes.ErrorText, reason: Reason, error: Exception | None
) -> tuple[wire.Outcome, bytes]:
    outcome = wire.Outcome(kind=wire.Kind.ERROR, reason=reason, phase=text.phase, note=text.note)
    stored = outcomes.encode_error(text, error)
    assert isinstance(stored.content, bytes)
    return outcome, stored.content
