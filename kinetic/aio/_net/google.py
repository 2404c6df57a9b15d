"""Call any of Google's control APIs over REST, and wait for the operations that they start.

Requests are plain dicts, in the form that the APIs' discovery documents describe. Google's client
libraries don't suffice: google-cloud-compute has no async client and takes 69 MiB of disk; IAM's
client has no REST transport; no async client creates or deletes buckets.
"""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from kinetic._runner.protocol import google_refusals
from kinetic.aio._net.http import HttpClient, HttpError, close_answer, json_object
from kinetic.aio._net.retry import Outage, RetryPolicy, growing_pauses, is_retryable, retry
from kinetic.aio._net.tokens import Credentials, with_token
from kinetic.errors import AuthError, BackendError, Refused, Throttled, Unavailable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0
"""The first and the longest pause between two status requests for an operation, in seconds."""


@dataclass(frozen=True, slots=True)
class GoogleRequest:
    """A request to one API. ``api`` is the first part of the API's host name, such as ``compute``.

    ``query`` has pairs of names and values; a name may repeat.
    """

    api: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    method: str = "GET"
    body: Mapping[str, Any] | None = field(default=None, hash=False)

    def __str__(self) -> str:
        return f"{self.method} {self.api} {self.path}"


class OperationFailed(Exception):
    """A long-running operation ended with an error; each adapter translates it for users.

    ``error`` is the error document in Google's answer. ``codes`` has the machine-readable reasons,
    such as ``GCE_STOCKOUT``. The compute API puts these reasons into ``errors``, the container API
    into ``details`` and conditions.
    """

    def __init__(self, operation: Mapping[str, Any]) -> None:
        error: Mapping[str, Any] = operation["error"]
        errors = cast("list[dict[str, Any]]", error.get("errors") or [])
        first = errors[0] if errors else error
        super().__init__(str(first.get("message") or error.get("message") or error))
        self.error = error
        sources: list[dict[str, Any]] = [*errors, *(error.get("details") or ())]
        for conditions in ("clusterConditions", "nodepoolConditions"):
            sources += operation.get(conditions) or ()
        self.codes = frozenset(
            str(source[key]) for source in sources for key in ("code", "reason") if source.get(key)
        )


RATE_LIMIT_REASONS = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})


def reasons(refusal: HttpError) -> frozenset[str]:
    """Return Google's machine-readable reasons for a refusal, such as ``SERVICE_DISABLED``."""
    return google_refusals.reasons(refusal.body.get("error"))


def is_rate_limited(refusal: HttpError) -> bool:
    """Return whether a refusal is about the rate of requests."""
    is_403 = refusal.status == 403
    return refusal.status == 429 or (is_403 and bool(reasons(refusal) & RATE_LIMIT_REASONS))


def refusal_advice(refusal: HttpError) -> str:
    """Return what to do about a refusal, by Google's reason for it; "" if kinetic can't tell."""
    return google_refusals.advice(" ".join((*sorted(reasons(refusal)), refusal.message)))


def refusal_error(
    refusal: HttpError, problem: str, service: str, *, api: str, how_to_grant: str
) -> BackendError:
    """Return the error for a refusal of one of Google's APIs; the message begins with *problem*.

    The advice follows the reason in the answer, because a status has many causes. *service* names
    the API for users. *how_to_grant* says how to grant the permission that the answer names; *api*
    is the first part of the names of the API's permissions.
    """
    status, message = refusal.status, refusal.message
    failure = f"{problem}: {service} answered {status} ({message})"
    if status == 401:
        return AuthError(
            f"{problem}: Google does not accept the access token ({message}); run "
            "`gcloud auth application-default login` again"
        )
    if is_rate_limited(refusal):
        return Throttled(
            f"{problem}: too many requests for {service} ({message}); try again "
            "later, with fewer requests at a time",
            retryable=True,
            retry_after=refusal.retry_after,
        )
    if refusal.retryable:
        later = f"{failure}; try again later"
        return Unavailable(later, retryable=True, retry_after=refusal.retry_after)
    if status == 403 and (right := google_refusals.missing_permission(api, refusal.text)):
        return AuthError(f"{problem}: the credentials lack {right} ({message}); {how_to_grant}")
    if advice := refusal_advice(refusal):
        return Refused(f"{failure}; {advice}", answer=refusal.body, passing=True)
    if status == 403:
        return AuthError(f"{failure}; ask the owner of the project what it requires")
    return BackendError(failure)


def is_disabled(refusal: HttpError) -> bool:
    """Return whether Google refused because the API is disabled, or was enabled a moment ago."""
    return bool(reasons(refusal) & {"SERVICE_DISABLED", "accessNotConfigured"})


class GoogleClient:
    """Sends requests to Google's APIs on one event loop; close it with `aclose`.

    ``CLOUDSDK_API_ENDPOINT_OVERRIDES_<API>`` in *environ* replaces the address of an API, as for
    gcloud. *policy* says how long to retry temporary failures: 429, 5xx, and failed connections.
    A retry may repeat a write that has succeeded but whose answer was lost, so every write must be
    repeatable. *idle_s* limits the time without data from the server, in seconds. *credentials*
    replace the application-default credentials.
    *first_pause_s* is the first pause, in seconds, between two status requests for an operation.

    Every method raises `HttpError` for a refusal, `AuthError` for unusable credentials, and
    `Unavailable` if no server answers. The last two are in `kinetic.errors`.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        policy: RetryPolicy,
        *,
        idle_s: float = 60.0,
        first_pause_s: float = FIRST_PAUSE_S,
        credentials: Credentials | None = None,
    ) -> None:
        self.credentials = credentials or Credentials()
        self.first_pause_s = first_pause_s
        self._environ = environ
        self._policy = policy
        self._http = HttpClient("the client of Google's APIs", idle_s=idle_s, trust_env=True)

    async def aclose(self) -> None:
        """Close the connections; requests in progress fail."""
        await self.credentials.aclose()
        await self._http.aclose()

    async def call(self, request: GoogleRequest) -> dict[str, Any]:
        """Send *request* and return the JSON object of the answer.

        If this call is cancelled, the request may have reached the server.
        """
        from yarl import URL

        variable = f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{request.api.upper()}"
        server = self._environ.get(variable) or f"https://{request.api}.googleapis.com"
        url = URL(server.rstrip("/") + request.path, encoded=True).update_query(request.query)
        body = None if request.body is None else json.dumps(request.body).encode()

        async def send(token: str) -> dict[str, Any]:
            headers = {"Authorization": f"Bearer {token}"}
            if project := self.credentials.quota_project:
                headers["X-Goog-User-Project"] = project
            if body is not None:
                headers["Content-Type"] = "application/json"
            sending = self._http.session().request(
                request.method, url, data=body, headers=headers, allow_redirects=False
            )
            answer = await self._http.receive(sending)
            try:
                return json_object(await answer.text())
            finally:
                close_answer(answer)

        async def send_once() -> dict[str, Any]:
            with self._http.translate_errors(f"can't call {request.api}", server):
                return await with_token(self.credentials, send)

        outage = Outage(f"calling {request.api}")
        return await retry(send_once, self._policy, outage, should_retry=is_retryable)

    async def list_items(
        self, request: GoogleRequest, items_field: str
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the items of a list, page after page; each page has them in *items_field*."""
        async for page in self._pages(request):
            for item in page.get(items_field) or ():
                yield item

    async def list_aggregated(
        self, request: GoogleRequest, items_field: str
    ) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        """Yield every item of an aggregated list, which spans all zones and regions.

        Each item comes with its zone or region. *items_field* is the field that has the items.
        """
        async for page in self._pages(request):
            scopes: dict[str, dict[str, Any]] = page.get("items") or {}
            for scope, listing in scopes.items():
                for item in listing.get(items_field) or ():
                    yield scope.rpartition("/")[2], item

    async def _pages(self, request: GoogleRequest) -> AsyncGenerator[dict[str, Any]]:
        """Yield the answer to *request*, then each further page that Google announces."""
        query = request.query
        while True:
            page = await self.call(replace(request, query=query))
            yield page
            if not (token := page.get("nextPageToken")):
                return
            query = (*request.query, ("pageToken", str(token)))

    async def wait_for(self, api: str, operation: Mapping[str, Any]) -> Mapping[str, Any]:
        """Wait until a long-running operation of any Google API has ended, and return it.

        Cancelled: Google continues the operation.

        Raises:
            OperationFailed: The operation ended with an error.
        """
        pauses = growing_pauses(self.first_pause_s, max(self.first_pause_s, LONGEST_PAUSE_S), 1.5)
        version = "v3" if api == "cloudresourcemanager" else "v1"
        # At the end, the container and compute APIs set the status to DONE; others set ``done``.
        while not (operation.get("done") or operation.get("status") == "DONE"):
            await asyncio.sleep(next(pauses))
            # The container and compute APIs give a URL in ``selfLink``, other APIs only a name.
            link = operation.get("selfLink") or f"/{version}/{operation['name']}"
            operation = await self.call(GoogleRequest(api, urllib.parse.urlsplit(link).path))
        if operation.get("error"):
            raise OperationFailed(operation)
        return operation
