"""Turn an outcome into its value, or into the exception to raise.

In the job, `kinetic._runner.protocol.failures` packs the exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.to_thread

from kinetic._replacing import replacing
from kinetic._runner.protocol import by_value, frames, pickles, wire
from kinetic._tracebacks import REMOTE_TRACEBACK
from kinetic.aio._preparing.scratch import scratch
from kinetic.aio.ports import Object, Store
from kinetic.errors import (
    BackendError,
    JobCancelled,
    JobError,
    JobFailed,
    JobLost,
    Pruned,
    WireError,
)

STACK_GLOBAL = b"\x93"
"""The opcode by which a pickle names a class or a function to import."""

INLINE_BYTES = 64 * 1024
"""Maximum size of a pickle that is loaded in the event loop's own thread."""


def verified_outcome(
    content: Object, key: bytes, scope: str, index: int, attempt: int
) -> tuple[wire.Outcome, bytes]:
    """Return the signed header of an attempt's outcome, and the body after checking its digest."""
    try:
        outcome = wire.Outcome.verified(content.metadata, key, scope, index, attempt)
    except ValueError as exc:
        raise WireError(f"{exc}; nothing of it was used") from exc
    body = wire.body_of(content.body, content.metadata)
    if not is_body_of(outcome, body):
        name = content.name
        raise WireError(f"the content of {name} is not what its job signed; nothing was used")
    return outcome, body


def is_body_of(outcome: wire.Outcome, body: bytes) -> bool:
    """Return whether *body* has the digest that the job signed."""
    return hashlib.sha256(body).hexdigest() == outcome.body


def is_quick(content: bytes | memoryview) -> bool:
    """Return whether *content* is unpickled at once: it is small, and imports no class."""
    return len(content) <= INLINE_BYTES and STACK_GLOBAL not in bytes(content)


async def unpickled(content: bytes | memoryview) -> Any:
    """Unpickle *content*; use a worker thread unless it `is_quick`."""
    if is_quick(content):
        return pickles.load(content)
    return await anyio.to_thread.run_sync(_load_in_thread, pickles.load, content)


def _load_in_thread(load: Callable[[Any], Any], content: Any) -> Any:
    """Return ``load(content)``; replace an exception that would end the caller's program."""
    try:
        return load(content)
    except NOT_RAISED as exc:
        raise RuntimeError(f"its class raises {type(exc).__name__}") from exc


def pruned_of(body: bytes) -> Pruned:
    """Return the `Pruned` that the *body* of a pruned attempt's outcome describes."""
    from kinetic._runner.protocol import metrics  # few jobs are pruned

    return Pruned(*metrics.read_pruned(frames.unpack(body).fields))


def refuse_pruned(outcome: wire.Outcome, body: bytes) -> None:
    """Raise `Pruned` if the attempt ended early, without a value."""
    if outcome.reason == wire.PRUNED:
        raise pruned_of(body)


async def value_of(store: Store, outcome: wire.Outcome, body: bytes, job_id: str) -> Any:
    """Return the value of a successful outcome.

    Raises:
        Pruned: The attempt ended early, without a value.
        WireError: A large value is not what the job signed.
        BackendError: The store does not answer.
        JobFailed: The value cannot be rebuilt in this process.
    """
    refuse_pruned(outcome, body)
    try:
        if outcome.value is not None:
            with scratch() as folder:
                path = folder / "value"
                await store.fetch(outcome.value[0], path)
                return await anyio.to_thread.run_sync(_load_verified, path, *outcome.value)
        return await unpickled(body)
    except (BackendError, WireError):  # the value exists, so the caller can read it later
        raise
    except Exception as exc:
        why = f"{type(exc).__name__}: {exc}"
        remedy = "install the package that defines the returned value"
        if isinstance(exc, pickles.OtherPythonError):
            why, remedy = str(exc), f"read the result with Python {exc.version}"
        raise JobFailed(
            f"{job_id} succeeded, but its value cannot be rebuilt in this process: {why}; "
            f"{remedy}, or return plain data",
            job_id=job_id,
            phase="result deserialization",
        ) from exc


async def save_value(store: Store, outcome: wire.Outcome, body: bytes, path: Path) -> int:
    """Write the pickled value of a successful outcome to *path*; return its size in bytes.

    kinetic doesn't unpickle the value. An older file at *path* stays until the whole value
    replaces it.

    Raises:
        Pruned: The attempt ended early, without a value.
    """
    refuse_pruned(outcome, body)
    with replacing(path) as partial:
        if outcome.value is None:
            await anyio.to_thread.run_sync(partial.write_bytes, body)
        else:
            await store.fetch(outcome.value[0], partial)
            await anyio.to_thread.run_sync(_own_copy, partial)
            await anyio.to_thread.run_sync(_verify, partial, *outcome.value)
        return partial.stat().st_size


def _own_copy(path: Path) -> None:
    """Copy the file at *path* if it is a hard link to a file of a directory store.

    Otherwise the user, who may write to the file, would change the store's object.
    """
    if path.stat().st_nlink > 1:
        with replacing(path) as own:
            shutil.copyfile(path, own)


def _verify(path: Path, name: str, digest: str) -> None:
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise WireError(f"{name} is not what its job signed; nothing of it was used")


def _load_verified(path: Path, name: str, digest: str) -> Any:
    try:
        _verify(path, name, digest)
        return _load_in_thread(pickles.load_file, path)
    finally:
        path.unlink()  # in this worker thread: removing a large file takes long


NOT_RAISED = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
"""Exceptions that would end the caller's program, generator, or task, so they aren't raised."""


def failure_of(outcome: wire.Outcome, body: bytes, job_id: str, cause: str = "") -> BaseException:
    """Return the exception of a failed outcome; add *cause* as a note if its text lacks it.

    The result is the user's exception with the remote traceback as a note. If that exception can't
    be rebuilt here, or is of `NOT_RAISED`, the result is a `JobFailed` with its text. Call this in
    a worker thread: it may import a module.
    """
    error = _rebuild(outcome, body, job_id)
    text = ""
    with contextlib.suppress(Exception):  # the class is the user's
        text = str(error)
    if cause and cause not in text:
        _add_note(error, cause)
    return error


def item_failure_of(outcome: wire.Outcome, body: bytes, job_id: str, cause: str = "") -> Exception:
    """Return what `failure_of` does, or a `JobFailed` that it caused if it's no `Exception`.

    The outcomes of a batch promise an `Exception`.
    """
    error = failure_of(outcome, body, job_id, cause)
    if isinstance(error, Exception):
        return error
    failed = _failed_error(outcome, frames.unpack(body).fields.get("error", {}), job_id)
    failed.__cause__ = error
    return failed


def _add_note(error: BaseException, note: str) -> None:
    """Add a note, even to an exception whose class is frozen."""
    vars(error)["__notes__"] = [*vars(error).get("__notes__", ()), note]


def _rebuild(outcome: wire.Outcome, body: bytes, job_id: str) -> BaseException:
    """Return the user's exception, or a `JobError` in its place."""
    if outcome.kind is wire.Kind.CANCELLED:
        return JobCancelled(f"{job_id} was cancelled ({outcome.phase})", job_id=job_id)
    content = frames.unpack(body)
    error_fields = content.fields.get("error", {})
    message, traceback_text = error_fields.get("message", ""), error_fields.get("traceback", "")
    if outcome.kind is wire.Kind.LOST:
        return JobLost(
            f"{job_id} ended without an outcome ({outcome.reason}): {message}",
            job_id=job_id,
            reason=outcome.reason,
            exit_code=outcome.exit_code,
        )
    if content.frames:
        try:
            error: BaseException = pickles.load(content.frames[0], unpickler=_ExceptionUnpickler)
        except (Exception, *NOT_RAISED) as exc:
            error_fields = {**error_fields, "withheld": f"{type(exc).__name__}: {exc}"}
        else:
            if not isinstance(error, NOT_RAISED):
                _add_note(error, f"{REMOTE_TRACEBACK}{job_id}:\n{traceback_text.rstrip()}")
                return error
    return _failed_error(outcome, error_fields, job_id)


def reason_text(outcome: wire.Outcome, body: bytes) -> str:
    """Return what happened in a failure as text, without unpickling anything."""
    if outcome.kind is wire.Kind.CANCELLED:
        return "cancelled"
    error_fields = frames.unpack(body).fields.get("error", {})
    if outcome.kind is wire.Kind.LOST:
        return str(error_fields.get("message", ""))
    return _failure_text(outcome, error_fields)


class _ExceptionUnpickler(pickles.Unpickler):
    """Unpickles exceptions as the classes of this process, so that ``except`` matches them.

    cloudpickle sends the classes of scripts and projects by value. If this process sent such a
    class, unpickling returns that same object. If another process sent it, unpickling returns the
    exception class of the same name in the loaded module of the same name.
    """

    def find_class(self, module: str, name: str, /) -> Any:
        found = super().find_class(module, name)
        return _make_class if found is by_value.make_class else found


def _make_class(make: Any, *args: Any) -> Any:
    """Return this process's exception class of the same ID or name; without one, make it."""
    sent = by_value.known_class(*args)
    made: Any = sent or by_value.make_class(make, *args)
    # A cell of a notebook that ran again has replaced the class by one of the same name.
    if not issubclass(made, BaseException) or (sent and made.__module__ != "__main__"):
        return made
    known: Any = sys.modules.get(made.__module__)
    for name in made.__qualname__.split("."):
        known = getattr(known, name, None)  # None also for a class inside of a function
    # `except` in the caller's program names the class that its module has.
    return known if BaseException in getattr(known, "__mro__", ()) else made


def _failure_text(outcome: wire.Outcome, error_fields: dict[str, str]) -> str:
    description, remote_type = error_fields.get("message", ""), error_fields.get("qualname", "")
    if outcome.phase == "execute" and remote_type:
        description = f"{remote_type}: {description}" if description else remote_type
    if result_text := error_fields.get("result_repr"):
        description += f"\nThe result was: {result_text}"
    return description


def _failed_error(outcome: wire.Outcome, error_fields: dict[str, str], job_id: str) -> JobError:
    """Return the `JobFailed` for a failure without an exception that can be rebuilt."""
    description = _failure_text(outcome, error_fields)
    if why := error_fields.get("withheld"):
        description += f"\nThe exception is shown as text because it can't be rebuilt here: {why}"
    error = JobFailed(
        f"{job_id} failed ({outcome.reason}): {description}",
        job_id=job_id,
        phase=outcome.phase,
        reason=outcome.reason,
        remote_type=error_fields.get("qualname", ""),
        remote_traceback=error_fields.get("traceback", ""),
    )
    if error.remote_traceback:
        error.add_note(f"{REMOTE_TRACEBACK}{job_id}:\n{error.remote_traceback.rstrip()}")
    return error
