"""Every exception kinetic raises, as one tree.

KineticError
├── ConfigurationError(ValueError)     a setting is wrong; nothing was sent
│   └── ProfileError                   the profiles file is damaged, or lacks the profile
├── SubmissionError                    nothing ran
│   ├── PackError(ValueError)          .culprit: the value that can't be shipped
│   ├── DataError(ValueError)          .path: a Data that can't be shipped
│   ├── BuildError                     .build_id  .log_url
│   └── LaunchError                    .reason  .passing: the platform refused the job
├── JobError(RuntimeError)             .job_id: a submitted job has no value
│   ├── JobFailed                      the job's exception can't be rebuilt here
│   ├── JobLost                        the job died without an outcome: .reason  .exit_code
│   ├── JobCancelled                   the job was cancelled
│   ├── SubmitterLost                  the submitter of the job's batch has ended
│   └── ResultTimeout(TimeoutError)    the job keeps running; only the wait ended
├── Pruned                             the job was asked to stop early: .step  .value
├── SweepError                         a trial of a sweep, or a whole sweep, has no value
├── InputsUnfinished                   the submitter ended early: .stored counts the stored inputs
├── BackendError                       store or platform failed: .retryable  .retry_after
│   ├── ClientClosed                   the client was closed: open another
│   ├── AuthError                      credentials are missing, or lack a permission
│   ├── StoreFull                      no room in the store
│   ├── NotFound(FileNotFoundError)    no such job, batch or object
│   │   └── NoLog(RuntimeError)        the job has no log yet, or it was removed
│   ├── Conflict                       another process changed the object first
│   │   └── AlreadyThere               the object to create exists
│   ├── Refused                        the platform refuses the request: .answer
│   ├── Expired                        the cluster lacks the version where a watch should begin
│   ├── Throttled                      too many requests
│   └── Unavailable                    try again later
├── WireError                          version, digest, or signature doesn't match
└── PortalError(RuntimeError)          a sync call would deadlock, or the wrong loop runs

BatchError(Exception)                  items of a batch failed: .failures  .partial_results

Each error has a ``code``, such as ``KN204``, that stays the same in later versions:
``kinetic explain KN204`` prints the cause and the fix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn

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
    "Pruned",
    "Refused",
    "ResultTimeout",
    "StoreFull",
    "SubmissionError",
    "SubmitterLost",
    "SweepError",
    "Throttled",
    "Unavailable",
    "WireError",
]

_CODES_OF_REASONS = {
    "setup": "KN311",
    "out of memory": "KN312",
    "deadline": "KN313",
    **dict.fromkeys(("preempted", "node lost", "evicted"), "KN314"),
    "image pull": "KN315",
    "unschedulable": "KN316",
    "quota": "KN317",
    "out of disk": "KN318",
    "store full": "KN410",
    "lost": "KN303",
    "cancelled": "KN304",
}
"""The code of an error, by its reason: a value of `kinetic.job_status.Reason`."""


class KineticError(Exception):
    """Base of all errors of kinetic.

    ``passing`` says that the same request can succeed later: after someone grants a permission,
    logs in again, changes a policy, or makes room. ``code`` names the error's entry in
    ``kinetic explain``; the code depends on the class, and for some classes on the reason.
    """

    passing: bool = False
    code: str = "KN100"


class ConfigurationError(KineticError, ValueError):
    """A setting is wrong; nothing was sent."""

    code = "KN101"


class ProfileError(ConfigurationError):
    """The profiles file can't be read, or has no such profile."""

    code = "KN102"


class SubmissionError(KineticError):
    """The job could not be submitted; nothing ran."""

    code = "KN201"


class PackError(SubmissionError, ValueError):
    """The function, an argument, or the project can't be shipped."""

    code = "KN202"

    def __init__(self, message: str, *, culprit: str = "") -> None:
        super().__init__(message)
        self.culprit = culprit


class DataError(SubmissionError, ValueError):
    """A `Data` can't be shipped."""

    code = "KN203"

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class BuildError(SubmissionError):
    """The container image could not be built."""

    code = "KN204"

    def __init__(self, message: str, *, build_id: str = "", log_url: str = "") -> None:
        super().__init__(message)
        self.build_id = build_id
        self.log_url = log_url


class LaunchError(SubmissionError):
    """The platform refused the job."""

    code = "KN205"

    def __init__(self, message: str, *, reason: str = "", passing: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.passing = passing
        self.code = _CODES_OF_REASONS.get(reason, type(self).code)


class JobError(KineticError, RuntimeError):
    """A submitted job has no value.

    ``reason`` is a value of `kinetic.job_status.Reason`, or empty.
    """

    code = "KN301"

    def __init__(self, message: str, *, job_id: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.job_id = job_id
        self.reason = reason
        self.code = _CODES_OF_REASONS.get(reason, type(self).code)


class JobFailed(JobError):
    """The job failed, and its exception can't be rebuilt in this process.

    ``phase`` says where it failed; ``execute`` is your own code. ``remote_type`` is the exception's
    qualified name, and ``remote_traceback`` its traceback.
    """

    code = "KN302"

    def __init__(
        self,
        message: str,
        *,
        job_id: str = "",
        phase: str = "execute",
        reason: str = "",
        remote_type: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message, job_id=job_id, reason=reason)
        self.phase = phase
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback


class JobLost(JobError):
    """The job's process ended without an outcome."""

    code = "KN303"

    def __init__(
        self, message: str, *, job_id: str = "", reason: str = "", exit_code: int | None = None
    ) -> None:
        super().__init__(message, job_id=job_id, reason=reason)
        self.exit_code = exit_code


class JobCancelled(JobError):
    """The job was cancelled before it had a value."""

    code = "KN304"


class SubmitterLost(JobError):
    """The process that submitted the batch has ended before it submitted all items.

    Except on several hosts, workers run all items whose inputs are stored, so it means that inputs
    are missing.
    """

    code = "KN305"


class InputsUnfinished(KineticError):
    """The process with the rest of a batch's inputs has ended.

    The ``stored`` inputs have run. Pass the rest to ``resume(inputs=...)``, or end the batch with
    ``resume(seal=True)``.
    """

    code = "KN306"

    def __init__(self, message: str, *, stored: int = 0) -> None:
        super().__init__(message)
        self.stored = stored


class ResultTimeout(JobError, TimeoutError):
    """The wait ended; the job keeps running and its handle stays valid."""

    code = "KN307"


class Pruned(KineticError):
    """The job ended early, because `BatchHandle.prune` asked for it, or because it raised this.

    In a job, `kinetic.report` raises it; let it end the function. Outside, it is the outcome of a
    pruned item, with ``ok``, ``error``, and ``unwrap()`` as other outcomes. Such an item has
    succeeded, and isn't retried. ``step`` and ``value`` are those of the last report; the value is
    None without one.
    """

    code = "KN309"
    ok: Literal[False] = False
    __match_args__ = ("step", "value")

    def __init__(self, step: int, value: float | Mapping[str, float] | None = None) -> None:
        super().__init__(step, value)
        self.step = step
        self.value = value

    def __str__(self) -> str:
        shown = "" if self.value is None else f", where its value was {self.value}"
        return f"pruned at step {self.step}{shown}"

    @property
    def error(self) -> Exception:  # so that the errors of all outcomes have one type
        """This error."""
        return self

    def unwrap(self) -> NoReturn:
        """Raise this error."""
        raise self


class SweepError(KineticError):
    """A trial of a sweep has no value, or none of its trials has one."""

    code = "KN310"


class BackendError(KineticError):
    """The store or the platform failed to do what was asked.

    ``retryable`` says whether a retry can help; ``retry_after`` is the pause that the server asks
    for, in seconds.
    """

    code = "KN401"

    def __init__(
        self, message: str, *, retryable: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after = retry_after


class ClientClosed(BackendError):
    """The client is closed, or was closed during the call."""

    code = "KN402"


class AuthError(BackendError):
    """Credentials are missing, lack a permission, or have no access."""

    code = "KN403"
    passing = True


class NotFound(BackendError, FileNotFoundError):
    """There is no such job, batch, or object."""

    code = "KN404"


class NoLog(NotFound, RuntimeError):
    """The job has no log: it has not started yet, or was removed with its log."""

    code = "KN405"


class Conflict(BackendError):
    """Another process changed the object first."""

    code = "KN406"


class AlreadyThere(Conflict):
    """The object exists: another process made it, or this process did and the reply was lost."""

    code = "KN407"


class Refused(BackendError):
    """The platform refuses this request.

    ``answer`` is its decoded answer; for Kubernetes, a ``Status``. ``passing`` is true if a policy
    forbids the request, because someone can change the policy.
    """

    code = "KN408"

    def __init__(
        self, message: str, *, answer: Mapping[str, Any] | None = None, passing: bool = False
    ) -> None:
        super().__init__(message)
        self.answer = dict(answer or {})
        self.passing = passing


class Expired(BackendError):
    """The cluster no longer has the version from which a watch should continue; list again."""

    code = "KN409"


class StoreFull(BackendError):
    """There is no room in the store."""

    code = "KN410"
    passing = True


class Throttled(BackendError):
    """Too many requests; the server asks to slow down."""

    code = "KN411"


class Unavailable(BackendError):
    """The store or the platform can't answer now."""

    code = "KN412"


class WireError(KineticError):
    """A reply does not match the protocol: its version, digest, or signature differs."""

    code = "KN501"


class PortalError(KineticError, RuntimeError):
    """A sync call would wait for itself, or the async API was used on the wrong event loop.

    A client, its handles, and their iterators belong to one loop of asyncio.
    """

    code = "KN502"


class BatchError(Exception):
    """Some items of a batch have no value.

    ``failures`` are the handles of failed jobs. ``partial_results`` has the values in input order,
    and None for items without one. ``submission_failures`` maps the index of an input that was
    never submitted to its exception.
    """

    code: str = "KN308"

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
        counts = f"of {len(partial_results)} jobs"
        if failed or not cancelled:
            counts = f"{failed} of {len(partial_results)} jobs failed"
        message = f"Batch {group_id}: {counts}"
        if cancelled:
            message += f", {cancelled} were cancelled" + (f" ({cause})" if cause else "")
        if first_failure:
            next_step = "retry_failed() runs them again"
            if not self.failures:
                next_step = "run corrected inputs in another batch"
            elif self.submission_failures:
                next_step += (
                    "; but it can't help where the input couldn't be sent, such as item "
                    f"{min(self.submission_failures)}: run corrected inputs in another batch"
                )
            message += (
                f"; the first is {first_failure.rstrip('.')}. outcomes() yields each, {next_step}"
            )
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.group_id, self.failures, self.partial_results, self.submission_failures)
        return type(self), state, {"args": self.args}
