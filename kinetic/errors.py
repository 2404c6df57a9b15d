"""Every exception kinetic raises, as one tree.

KineticError
├── ConfigurationError(ValueError)     fixable before anything is sent
│   └── ProfileError                   the profiles file, or the profile named
├── SubmissionError                    nothing ran
│   ├── PackError                      .culprit: what could not be shipped
│   ├── DataError(ValueError)          .path: a Data that cannot be shipped
│   ├── BuildError                     .build_id  .log_url
│   └── LaunchError                    .reason  .passing: what the platform refused
├── JobError(RuntimeError)             .job_id: it was accepted and gave no value
│   ├── JobFailed                      it raised, and the exception cannot be rebuilt here
│   ├── JobLost                        it died without a word: .reason  .exit_code
│   ├── JobCancelled                   it was cancelled
│   ├── SubmitterLost                  its batch's submitter has ended
│   └── ResultTimeout(TimeoutError)    it goes on; only the waiting ended
├── InputsUnfinished                   a batch whose inputs ended with their process: .stored
├── BackendError                       store or platform answered badly: .retryable  .retry_after
│   ├── ClientClosed                   its client was closed: open another
│   ├── AuthError                      not allowed
│   ├── StoreFull                      no room for what has to be stored
│   ├── NotFound(FileNotFoundError)    no such job, batch or object
│   │   └── NoLog(RuntimeError)        a job that has no log yet, or none any more
│   ├── Conflict                       another process was faster
│   │   └── AlreadyThere               what was to be created exists
│   ├── Refused                        the platform will not take it: .answer
│   ├── Expired                        what was asked for is too old to be told
│   ├── Throttled                      too many requests
│   └── Unavailable                    try again later
├── WireError                          runner and client disagree: version, digest or signature
└── PortalError(RuntimeError)          sync where it would wait for itself; async outside asyncio

BatchError(Exception)                  from a batch: .failures  .partial_results
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "AlreadyThere",
    "AuthError",
    "BackendError",
    "BatchError",
    "BuildError",
    "ClientClosed",
    "ConfigurationError",
    "Conflict",
    "DataError",
    "Expired",
    "InputsUnfinished",
    "JobCancelled",
    "JobError",
    "JobFailed",
    "JobLost",
    "KineticError",
    "LaunchError",
    "NoLog",
    "NotFound",
    "PackError",
    "PortalError",
    "ProfileError",
    "Refused",
    "ResultTimeout",
    "StoreFull",
    "SubmissionError",
    "SubmitterLost",
    "Throttled",
    "Unavailable",
    "WireError",
]


class KineticError(Exception):
    """Base of everything kinetic raises by itself.

    ``passing`` says that somebody can lift the refusal without a change to what was
    refused: by granting a right, logging in again, changing a policy, or making room.
    """

    passing: bool = False


class ConfigurationError(KineticError, ValueError):
    """A setting is wrong; nothing was sent."""


class ProfileError(ConfigurationError):
    """The profiles file cannot be read, or has no such profile."""


class SubmissionError(KineticError):
    """The job could not be submitted; nothing ran."""


class PackError(SubmissionError, ValueError):
    """The function, an argument or the project cannot be shipped."""

    def __init__(self, message: str, *, culprit: str = "") -> None:
        super().__init__(message)
        self.culprit = culprit


class DataError(SubmissionError, ValueError):
    """A `Data` cannot be shipped."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class BuildError(SubmissionError):
    """The container image could not be built."""

    def __init__(self, message: str, *, build_id: str = "", log_url: str = "") -> None:
        super().__init__(message)
        self.build_id = build_id
        self.log_url = log_url


class LaunchError(SubmissionError):
    """The platform refused the job."""

    def __init__(self, message: str, *, reason: str = "", passing: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.passing = passing


class JobError(KineticError, RuntimeError):
    """A job that was accepted has no value to give."""

    def __init__(self, message: str, *, job_id: str = "") -> None:
        super().__init__(message)
        self.job_id = job_id


class JobFailed(JobError):
    """The job failed, and what it raised cannot be rebuilt in this process.

    ``phase`` says where (``execute`` is the user's own code), ``remote_type``
    is the exception's qualified name, ``remote_traceback`` its text.
    """

    def __init__(
        self,
        message: str,
        *,
        job_id: str = "",
        phase: str = "execute",
        remote_type: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message, job_id=job_id)
        self.phase = phase
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback


class JobLost(JobError):
    """The job's process ended and left no outcome."""

    def __init__(
        self, message: str, *, job_id: str = "", reason: str = "", exit_code: int | None = None
    ) -> None:
        super().__init__(message, job_id=job_id)
        self.reason = reason
        self.exit_code = exit_code


class JobCancelled(JobError):
    """The job was cancelled before it had a value."""


class SubmitterLost(JobError):
    """The process that submitted the batch has ended, and items are left."""


class InputsUnfinished(KineticError):
    """The inputs of a batch were not all stored, and the process that had the rest is gone.

    ``stored`` is how many there are: those have run. Give the others to
    ``resume(inputs=...)``, or say by ``resume(seal=True)`` that there are none.
    """

    def __init__(self, message: str, *, stored: int = 0) -> None:
        super().__init__(message)
        self.stored = stored


class ResultTimeout(JobError, TimeoutError):
    """Waiting ended; the job goes on and its handle stays valid."""


class BackendError(KineticError):
    """The store or the platform answered badly.

    ``retryable`` is decided by the adapter that saw the answer;
    ``retry_after`` is the server's own wish, in seconds.
    """

    def __init__(
        self, message: str, *, retryable: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after = retry_after


class ClientClosed(BackendError):
    """The client through which this was asked is closed, or was closed meanwhile."""


class AuthError(BackendError):
    """The caller is not allowed to do this."""

    passing = True


class NotFound(BackendError, FileNotFoundError):
    """There is no such job, batch or object."""


class NoLog(NotFound, RuntimeError):
    """The job has no log: it has not started yet, or was removed with its log."""


class Conflict(BackendError):
    """Somebody else changed it first."""


class AlreadyThere(Conflict):
    """An object of this name exists: another process made it, or a lost reply was about it."""


class Refused(BackendError):
    """The platform understood, and will not take this as it is.

    ``answer`` is what it said, decoded; of Kubernetes, a ``Status``.
    """

    def __init__(self, message: str, *, answer: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.answer = dict(answer or {})


class Expired(BackendError):
    """The point to go on from is too old: list again."""


class StoreFull(BackendError):
    """There is no room for what has to be stored."""

    passing = True


class Throttled(BackendError):
    """Too many requests; the server asks to slow down."""


class Unavailable(BackendError):
    """The store or the platform cannot answer now."""


class WireError(KineticError):
    """A reply does not match the protocol: its version, digest, or signature differs."""


class PortalError(KineticError, RuntimeError):
    """The sync API was called where it would wait for itself, or the async one outside asyncio."""


class BatchError(Exception):
    """Some items of a batch have no value.

    ``failures`` are the handles of failed jobs, ``partial_results`` has the
    values in input order and None where there is none, ``submission_failures``
    maps the index of an input that was never submitted to its exception. The
    message has *first_failure*, one line about the first of them, and how many of
    them were *cancelled*, for which *cause*.
    """

    def __init__(
        self,
        group_id: str,
        failures: Sequence[Any],
        partial_results: list[Any],
        submission_failures: Mapping[int, Exception] | None = None,
        *,
        first_failure: str = "",
        cancelled: int = 0,
        cause: str = "",
    ) -> None:
        self.group_id = group_id
        self.failures = list(failures)
        self.partial_results = partial_results
        self.submission_failures = dict(submission_failures or {})
        failed = len(self.failures) + len(self.submission_failures) - cancelled
        message = f"Batch {group_id}: {failed} of {len(partial_results)} jobs failed"
        if cancelled:
            message += f", {cancelled} were cancelled" + (f" ({cause})" if cause else "")
        if first_failure:
            message += (
                f"; first of all {first_failure.rstrip('.')}. outcomes() tells of each, "
                "retry_failed() runs them again"
            )
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.group_id, self.failures, self.partial_results, self.submission_failures)
        return type(self), state, {"args": self.args}
