"""What went wrong with a build, and what to do: pure."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kinetic.errors import AuthError, BackendError, BuildError, Throttled, Unavailable

if TYPE_CHECKING:
    from google.cloud.devtools import cloudbuild_v1

__all__ = ["explained_build", "explained_call", "passing", "refuses_token"]

_ENDED = MappingProxyType(
    {
        "TIMEOUT": "took too long",
        "CANCELLED": "was cancelled",
        "EXPIRED": "waited too long for its turn; the project's quota of builds may be used up",
        "INTERNAL_ERROR": "failed inside Cloud Build; try again",
    }
)
_ADVICE = MappingProxyType(
    {
        "PUSH_FAILED": "the image was built but could not be pushed",
        "PUSH_IMAGE_NOT_FOUND": "the image was built but could not be found to be pushed",
        "PUSH_NOT_AUTHORIZED": (
            "the builds' service account may not push: give it roles/artifactregistry.writer on "
            "the repository"
        ),
        "LOGGING_FAILURE": (
            "the builds' service account may not write logs: give it roles/logging.logWriter"
        ),
        "FETCH_SOURCE_FAILED": (
            "the builds' service account may not read the build's context: give it "
            "roles/storage.objectAdmin on the bucket of builds"
        ),
    }
)
_PASSING = frozenset(
    {"UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "ABORTED", "RESOURCE_EXHAUSTED", "UNKNOWN"}
)


def explained_build(
    build: cloudbuild_v1.Build, uri: str, lines: Sequence[str]
) -> BuildError | None:
    """The error of a build that is over; None if it gave the image *uri*.

    *lines* are the last ones of the step that failed. Its notes are the names of
    the build's status and, if Cloud Build tells it, the kind of failure.
    """
    status = build.status.name
    if status == "SUCCESS":
        return None
    kind = build.failure_info.type_.name
    detail = build.failure_info.detail or build.status_detail
    parts = [f"the image {uri} was not built: build {build.id} {_ENDED.get(status, 'failed')}"]
    if detail:
        parts.append(f" ({detail.strip()})")
    if kind in _ADVICE:
        parts.append(f"; {_ADVICE[kind]}")
    if lines:
        parts.append("; the last lines of the failing step:\n")
        parts.append("\n".join(f"  {line}" for line in lines))
        parts.append("\n")
    else:
        parts.append("; ")
    parts.append(f"the whole log: {build.log_url or 'in the console, by the id of the build'}")
    failure = BuildError("".join(parts), build_id=build.id, log_url=build.log_url)
    failure.add_note(status)
    if kind != "FAILURE_TYPE_UNSPECIFIED":
        failure.add_note(kind)
    return failure


def _status(failure: BaseException) -> str:
    """The name of a gRPC status; empty for anything else."""
    code: Any = getattr(failure, "grpc_status_code", None)
    return str(getattr(code, "name", ""))


def passing(failure: BaseException) -> bool:
    """Whether the same call may work a moment later."""
    return _status(failure) in _PASSING


def refuses_token(failure: BaseException) -> bool:
    """Whether the access token is too old, or was never one."""
    return _status(failure) == "UNAUTHENTICATED"


def explained_call(failure: Exception, project: str) -> BackendError | BuildError:
    """A call that Cloud Build refused, or did not answer, as our own error."""
    status, said = _status(failure), str(getattr(failure, "message", "") or failure)
    match status:
        case "PERMISSION_DENIED":
            return AuthError(
                f"Cloud Build of project {project} refused ({said}): you need "
                "roles/cloudbuild.builds.editor there, and roles/iam.serviceAccountUser on the "
                "builds' service account; and the API cloudbuild.googleapis.com must be enabled"
            )
        case "UNAUTHENTICATED":
            return AuthError(
                f"Cloud Build did not accept the credentials ({said}); run "
                "`gcloud auth application-default login`"
            )
        case "RESOURCE_EXHAUSTED":
            return Throttled(
                f"Cloud Build of project {project} takes no more ({said}); try again later, or "
                "ask for more quota",
                retryable=True,
            )
        case "NOT_FOUND" | "FAILED_PRECONDITION" | "INVALID_ARGUMENT" | "OUT_OF_RANGE":
            return BuildError(
                f"Cloud Build of project {project} refused the build ({said}); the cluster's "
                "set-up makes the bucket, the repository and the service account it names"
            )
        case _ if status in _PASSING:
            return Unavailable(
                f"Cloud Build did not answer ({status}: {said}); check the network, or try again "
                "later",
                retryable=True,
            )
        case _:
            return BackendError(f"Cloud Build answered {status or type(failure).__name__}: {said}")
