"""Decide what a plan must wait for, and for how long."""

from __future__ import annotations

import asyncio

from kinetic.aio._net.google import GoogleRequest, OperationFailed, is_disabled, reasons
from kinetic.aio._net.http import HttpError
from kinetic.aio._net.retry import growing
from kinetic.aio.infra.plan import UNDER_WAY
from kinetic.aio.infra.resources import Document, Tell

SETTLED_S = 120.0
"""How long Google's services may disagree about something new, or fail to show a resource."""

ENABLED_S = 900.0
"""How long a service may refuse requests after it was enabled."""

BUSY_S = 3600.0
"""How long an operation may keep a cluster or a pool busy; an upgrade takes up to an hour."""

RELEASED_S = 600.0
"""How long GKE may take to remove what it created in a network."""

UNKNOWN_ACCOUNT = ("does not exist", "may not exist", "unknown service account")
"""Phrases in Google's errors about a new service account; the status is 400, 403, or 404."""

STILL_IN_USE = "something in it is still in use"

Wait = tuple[str, float]
"""Why to wait, and for how many seconds at most."""


def waits(request: GoogleRequest, refusal: HttpError) -> Wait | None:
    """Return why Google refuses *request* for now, and how many seconds to wait at most.

    None means that the refusal is final.
    """
    why = reasons(refusal)
    message = refusal.message.lower()
    if is_disabled(refusal):
        return f"{request.api} is still being enabled", ENABLED_S
    busy = "FAILED_PRECONDITION" in why and ("operation" in message or "currently" in message)
    if request.api == "container" and refusal.status == 400 and busy:
        return f"another operation runs on the cluster ({refusal.message})", BUSY_S
    if request.api == "serviceusage" and refusal.status == 400 and "billing" in message:
        return "the project's billing account hasn't propagated yet", SETTLED_S
    if "resourceNotReady" in why:
        return "a resource that it needs isn't ready", SETTLED_S
    if request.method == "DELETE" and "resourceInUseByAnotherResource" in why:
        return STILL_IN_USE, RELEASED_S
    if "IamPolicy" in request.path or request.path.endswith("/iam"):
        new = refusal.status in (400, 403, 404) and any(one in message for one in UNKNOWN_ACCOUNT)
        if new:
            return "a new account hasn't propagated yet", SETTLED_S
    return None


def in_use(request: GoogleRequest, failure: OperationFailed) -> Wait | None:
    """Return what `waits` does, for a removal that Google accepted but that failed later."""
    used = any("RESOURCE_IN_USE" in one for one in failure.codes)
    return (STILL_IN_USE, RELEASED_S) if used and request.method == "DELETE" else None


def unready(document: Document | None) -> Wait | None:
    """Return why a resource can't be used yet; None if it can."""
    if document is None:
        return "Google doesn't show it yet", SETTLED_S
    status = str(document.get("status") or "")
    return (f"it is {status}", BUSY_S) if status in UNDER_WAY else None


def leaving(document: Document | None) -> Wait | None:
    """Return a reason to wait if an earlier `down` is removing a resource; else None."""
    stopping = document is not None and document.get("status") == "STOPPING"
    return ("it is STOPPING", BUSY_S) if stopping else None


def remaining(document: Document | None) -> Wait | None:
    """Return why a removed resource still exists; None if it is gone."""
    if document is None:
        return None
    status = str(document.get("status") or "")
    return (f"it is {status}", BUSY_S) if status else ("Google still shows it", SETTLED_S)


class Patience:
    """The pauses of one wait. Each reason has its own clock, which runs while that reason holds.

    *report* receives each reason once. *first_s* is the first pause; the longest one is ten times
    as long.
    """

    def __init__(self, first_s: float, report: Tell) -> None:
        self._pauses = growing(first_s, 10 * first_s, 1.5)
        self._report = report
        self._clock = asyncio.get_running_loop().time
        self._waited_s: dict[str, float] = {}
        self._latest = ""
        self._since = 0.0

    async def pause(self, why: str, limit_s: float) -> bool:
        """Pause because of *why*; return False if that reason has held for *limit_s* seconds."""
        now = self._clock()
        if self._latest:
            self._waited_s[self._latest] += now - self._since
        self._latest, self._since = why, now
        if why not in self._waited_s:
            self._waited_s[why] = 0.0
            self._report(why)
        if self._waited_s[why] > limit_s:
            return False
        await asyncio.sleep(next(self._pauses))
        return True
