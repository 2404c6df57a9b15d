"""What an answer of Cloud Storage means, and what to do about it. Pure."""

from __future__ import annotations

import enum
import json
from typing import Any

from kinetic.errors import (
    AuthError,
    BackendError,
    Conflict,
    NotFound,
    Throttled,
    Unavailable,
    WireError,
)

__all__ = ["Damaged", "Refusal", "Verb", "explained", "is_damage", "is_passing"]


class Verb(enum.Enum):
    """What was to be done, and the permissions it takes."""

    CREATE = ("create", ("storage.objects.create",))
    REPLACE = ("replace", ("storage.objects.create", "storage.objects.delete"))
    GET = ("get", ("storage.objects.get",))
    LIST = ("list", ("storage.objects.list",))
    DELETE = ("delete", ("storage.objects.delete",))
    RENEW = ("renew", ("storage.objects.update",))


class Refusal(Exception):
    """The server answered, with something else than what was asked for.

    It stays within the adapter: `explained` makes of it what users see.
    ``wait_s`` is the server's own wish, from Retry-After.
    """

    def __init__(self, status: int, text: str = "", wait_s: float | None = None) -> None:
        super().__init__(status, text, wait_s)
        self.status = status
        self.text = text
        self.wait_s = wait_s


class Damaged(WireError):
    """Content arrived, here or there, as something else than was sent."""


PASSING = frozenset({408, 429, 500, 502, 503, 504})
RATE_LIMITS = ("rateLimitExceeded", "userRateLimitExceeded")


def is_passing(failure: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(failure, Refusal):
        limited = failure.status == 403 and _reason(failure.text) in RATE_LIMITS
        return limited or failure.status in PASSING
    return isinstance(failure, BackendError) and failure.retryable


def is_damage(failure: BaseException) -> bool:
    """Whether a content was not the same on both sides."""
    if isinstance(failure, Refusal):
        said = failure.text.lower()
        return failure.status == 400 and ("crc32c" in said or "md5" in said)
    return isinstance(failure, Damaged)


def explained(refusal: Refusal, verb: Verb, bucket: str, name: str) -> BackendError | WireError:
    """The error that says what failed, on what, and what to do next."""
    word, permissions = verb.value
    said = _said(refusal.text)
    what = f"cannot {word} {name!r} in gs://{bucket}"
    match refusal.status:
        case 400 if is_damage(refusal):
            return Damaged(f"{what}: what arrived there differs from what was sent ({said})")
        case 401:
            return AuthError(
                f"{what}: Google does not accept the access token ({said}); run "
                "`gcloud auth application-default login` again"
            )
        case 403 if not is_passing(refusal):
            return AuthError(
                f"{what}: the credentials lack {' and '.join(permissions)} on gs://{bucket} "
                f"({said}); grant it: gcloud storage buckets add-iam-policy-binding "
                f"gs://{bucket} --member=user:YOU --role=roles/storage.objectUser"
            )
        case 404 if verb in (Verb.CREATE, Verb.LIST) or "bucket" in said.lower():
            return NotFound(
                f"{what}: there is no bucket gs://{bucket}; create it, or set KINETIC_STORE "
                "to one that exists"
            )
        case 404:
            return NotFound(f"there is no {name!r} in gs://{bucket}")
        case 409 | 412:
            return Conflict(f"{what}: somebody else changed it first")
        case 429 | 403:
            return Throttled(
                f"{what}: too many requests for Cloud Storage ({said}); try again later, with "
                "fewer at a time",
                retryable=True,
                retry_after=refusal.wait_s,
            )
        case status if status in PASSING:
            return Unavailable(
                f"{what}: Cloud Storage answered {status} for too long ({said}); try again later",
                retryable=True,
                retry_after=refusal.wait_s,
            )
        case status:
            return BackendError(f"{what}: Cloud Storage answered {status} ({said})")


def _said(text: str) -> str:
    """The server's own sentence, on one line."""
    message = _error(text).get("message")
    return " ".join(str(message or text).split())[:300]


def _reason(text: str) -> str:
    try:
        return str(_error(text)["errors"][0]["reason"])
    except (KeyError, IndexError, TypeError):
        return ""


def _error(text: str) -> dict[str, Any]:
    """The ``error`` of a JSON answer; a client library may have put words before it."""
    start = text.find("{")
    try:
        error: Any = json.loads(text[start:])["error"] if start >= 0 else {}
    except (KeyError, TypeError, ValueError):
        return {}
    return error if isinstance(error, dict) else {}  # pyright: ignore[reportUnknownVariableType]
