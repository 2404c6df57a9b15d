"""From an outcome to the value, or to the exception that is raised for it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import anyio.to_thread

from kinetic._runner import frames, pickles, wire
from kinetic.aio._scratch import Scratch
from kinetic.aio.ports import Object, Store
from kinetic.errors import BackendError, JobCancelled, JobError, JobFailed, JobLost, WireError

__all__ = ["failure_of", "value_of", "verified"]

STACK_GLOBAL = b"\x93"
INLINE_BYTES = 64 * 1024


def verified(content: Object, key: bytes, scope: str, index: int, attempt: int) -> wire.Outcome:
    """The signed header of an attempt's outcome, whose body is what it says.

    Raises:
        WireError: It was not written by the job's own runner, or is damaged.
    """
    try:
        outcome = wire.Outcome.verified(content.metadata, key, scope, index, attempt)
    except ValueError as exc:
        raise WireError(f"{exc}; nothing of it was used") from exc
    if hashlib.sha256(content.body).hexdigest() != outcome.body:
        name = content.name
        raise WireError(f"the content of {name} is not what its job signed; nothing was used")
    return outcome


async def value_of(store: Store, outcome: wire.Outcome, body: bytes, job_id: str) -> Any:
    """The value of a successful outcome.

    Raises:
        WireError: A large value is not what the job signed.
        BackendError: The store does not answer.
        JobFailed: The value cannot be rebuilt in this process.
    """
    try:
        if outcome.value is not None:
            return await _large_value(store, *outcome.value)
        if len(body) <= INLINE_BYTES and STACK_GLOBAL not in body:
            return pickles.load(body)  # names no class, so it imports nothing
        return await anyio.to_thread.run_sync(pickles.load, body)
    except (BackendError, WireError):  # the value is there, and may be asked for again
        raise
    except pickles.OtherPythonError as exc:
        raise JobFailed(
            f"{job_id} succeeded, but its value cannot be rebuilt in this process: {exc}; "
            f"ask for it from Python {exc.version}, or return plain data",
            job_id=job_id,
            phase="result deserialization",
        ) from exc
    except Exception as exc:
        raise JobFailed(
            f"{job_id} succeeded, but its value cannot be rebuilt in this process: "
            f"{type(exc).__name__}: {exc}; install what the job returned, or return plain data",
            job_id=job_id,
            phase="result deserialization",
        ) from exc


async def _large_value(store: Store, name: str, digest: str) -> Any:
    with Scratch() as scratch:
        path = scratch.folder / "value"
        await store.fetch(name, path)
        return await anyio.to_thread.run_sync(_load_verified, path, name, digest)


def _load_verified(path: Path, name: str, digest: str) -> Any:
    try:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise WireError(f"{name} is not what its job signed; nothing of it was used")
        return pickles.load_file(path)
    finally:
        path.unlink()  # here: removing a large file takes its time


def failure_of(outcome: wire.Outcome, body: bytes, job_id: str) -> BaseException:
    """The exception that tells why there is no value.

    The user's own where it can be rebuilt, with the remote traceback as a
    note; else `JobFailed` with everything in words. It may import the module
    of the exception's class: call it in a worker thread.
    """
    if outcome.kind is wire.Kind.CANCELLED:
        return JobCancelled(f"{job_id} was cancelled ({outcome.phase})", job_id=job_id)
    content = frames.unpack(body)
    text = content.fields.get("error", {})
    message, trace = text.get("message", ""), text.get("traceback", "")
    if outcome.kind is wire.Kind.LOST:
        return _lost(outcome, message, job_id)
    if content.frames and (error := _rebuilt(content.frames[0])) is not None:
        error.add_note(f"Remote traceback of {job_id}:\n{trace.rstrip()}")
        return error
    return _failed(outcome, text, job_id)


def _rebuilt(pickled: memoryview) -> BaseException | None:
    try:
        error = pickles.load(pickled)
    except Exception:
        return None
    return error if isinstance(error, Exception) else None


def _lost(outcome: wire.Outcome, message: str, job_id: str) -> JobError:
    return JobLost(
        f"{job_id} ended without an outcome ({outcome.reason}): {message}",
        job_id=job_id,
        reason=outcome.reason,
        exit_code=outcome.exit_code,
    )


def _failed(outcome: wire.Outcome, text: dict[str, str], job_id: str) -> JobError:
    remote = text.get("qualname", "")
    message = text.get("message", "")
    told = f"{remote}: {message}" if outcome.phase == "execute" and remote else message
    if shown := text.get("result_repr"):
        told += f"\nThe result was: {shown}"
    error = JobFailed(
        f"{job_id} failed ({outcome.reason}): {told}",
        job_id=job_id,
        phase=outcome.phase,
        remote_type=remote,
        remote_traceback=text.get("traceback", ""),
    )
    if error.remote_traceback:
        error.add_note(f"Remote traceback of {job_id}:\n{error.remote_traceback.rstrip()}")
    return error
