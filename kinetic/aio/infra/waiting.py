"""Decide why, and for how long, `apply` must wait before it goes on."""

from __future__ import annotations

import asyncio

from kinetic.aio._net.google import GoogleRequest, OperationFailed, is_disabled, reasons
from kinetic.aio._net.http import HttpError
from kinetic.aio._net.retry import growing_pauses
from kinetic.aio.infra.plan import IN_PROGRESS_STATUSES
from kinetic.aio.infra.resources import Document, Tell

SETTLED_S = 120.0
"""How long Google's services may take until all of them know a change or show a resource."""

ENABLED_S = 900.0
"""How long a service may refuse requests after it was enabled."""

BUSY_S = 3600.0
"""How long an operation may keep a cluster or a pool busy; an upgrade takes up to an hour."""

RELEASED_S = 600.0
"""How long GKE may take to remove what it created in a network."""

UNKNOWN_ACCOUNT_PHRASES = ("does not exist", "may not exist", "unknown service account")
"""Phrases in Google's errors about a new service account; the status is 400, 403, or 404."""

STILL_IN_USE = "something in it is still in use"

Wait = tuple[str, float]
"""Why to wait, and for how many seconds at most."""


def wait_if_temporary(request: GoogleRequest, refusal: HttpError) -> Wait | None:
    """Return why Google refuses *request* for now, and how many seconds to wait at most.

    None means that the refusal is final.
    """
    codes = reasons(refusal)
    message = refusal.message.lower()
    if is_disabled(refusal):
        return f"{request.api} is still being enabled", ENABLED_S
    is_busy = "FAILED_PRECONDITION" in codes and ("operation" in message or "currently" in message)
    if request.api == "container" and refusal.status == 400 and is_busy:
        return f"another operation runs on the cluster ({refusal.message})", BUSY_S
    if request.api == "serviceusage" and refusal.status == 400 and "billing" in message:
        return "the project's billing account hasn't propagated yet", SETTLED_S
    if "resourceNotReady" in codes:
        return "a resource that it needs isn't ready", SETTLED_S
    if request.method == "DELETE" and "resourceInUseByAnotherResource" in codes:
        return STILL_IN_USE, RELEASED_S
    if "IamPolicy" in request.path or request.path.endswith("/iam"):
        is_unknown_account = refusal.status in (400, 403, 404) and any(
            phrase in message for phrase in UNKNOWN_ACCOUNT_PHRASES
        )
        if is_unknown_account:
            return "a new account hasn't propagated yet", SETTLED_S
    return None


def wait_if_in_use(request: GoogleRequest, failure: OperationFailed) -> Wait | None:
    """Return why and how long to wait if *request* removes what is in use; otherwise None."""
    is_in_use = any("RESOURCE_IN_USE" in code for code in failure.codes)
    return (STILL_IN_USE, RELEASED_S) if is_in_use and request.method == "DELETE" else None


def wait_if_unready(document: Document | None) -> Wait | None:
    """Return why a resource can't be used yet; None if it can."""
    if document is None:
        return "Google doesn't show it yet", SETTLED_S
    status = str(document.get("status") or "")
    return (f"it is {status}", BUSY_S) if status in IN_PROGRESS_STATUSES else None


def wait_if_stopping(document: Document | None) -> Wait | None:
    """Return a reason to wait if an earlier `down` is removing a resource; else None."""
    is_stopping = document is not None and document.get("status") == "STOPPING"
    return ("it is STOPPING", BUSY_S) if is_stopping else None


def wait_if_present(document: Document | None) -> Wait | None:
    """Return why a removed resource still exists; None if it no longer exists."""
    if document is None:
        return None
    status = str(document.get("status") or "")
    return (f"it is {status}", BUSY_S) if status else ("Google still shows it", SETTLED_S)


class Backoff:
    """The pauses of one wait, with a separate time limit for each reason to wait.

    *report* receives each reason once. *first_pause_s* is the first pause; the longest one is ten
    times as long.
    """

    def __init__(self, first_pause_s: float, report: Tell) -> None:
        self._pauses = growing_pauses(first_pause_s, 10 * first_pause_s, 1.5)
        self._report = report
        self._clock = asyncio.get_running_loop().time
        self._waited_s: dict[str, float] = {}
        self._latest_reason = ""
        self._latest_pause_at = 0.0

    async def pause(self, reason: str, limit_s: float) -> bool:
        """Pause because of *reason*; return False if that reason has held for *limit_s* seconds."""
        now = self._clock()
        if self._latest_reason:
            self._waited_s[self._latest_reason] += now - self._latest_pause_at
        self._latest_reason, self._latest_pause_at = reason, now
        if reason not in self._waited_s:
            self._waited_s[reason] = 0.0
            self._report(reason)
        if self._waited_s[reason] > limit_s:
            return False
        await asyncio.sleep(next(self._pauses))
        return True
