"""Cache credentials and renew them before they expire; get access tokens for Google's APIs.

gcloud-aio turns every kind of application-default credentials into a token. This module adds errors
that say what to do. If Google refuses credentials, this module doesn't ask again, but gcloud-aio
would ask five times.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from absl import logging

from kinetic._tasks import await_shared
from kinetic.aio._net.http import HttpClient, HttpError, proxy_refusal_error
from kinetic.errors import AuthError, BackendError, ClientClosed, ConfigurationError, Unavailable

if TYPE_CHECKING:
    from gcloud.aio.auth import Token

T = TypeVar("T")
R = TypeVar("R")

EARLY_FRACTION, LATE_FRACTION = 0.2, 0.05
"""The fractions of the credentials' lifetime that are left at an early and at a late renewal. Early
renewals run in the background; requests wait only for late ones."""

RENEWAL_PAUSE_S = 10.0
"""The pause after a failed renewal before the next early renewal, in seconds."""


class Revoked(AuthError):
    """The issuer refuses to issue credentials; a retry would get the same answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshCredentials(Generic[T]):
    """New credentials, and when to renew them, in seconds since the epoch.

    From ``renew_from`` on, a task renews them in the background; from ``renew_by`` on, requests
    wait for the new ones.
    """

    value: T = field(repr=False)
    renew_from: float = math.inf
    renew_by: float = math.inf


def schedule_renewals(value: T, requested_at: float, expires_at: float) -> FreshCredentials[T]:
    """Return *value*, valid from *requested_at* to *expires_at*, with its renewal times."""
    lifetime_s = expires_at - requested_at
    return FreshCredentials(
        value=value,
        renew_from=expires_at - EARLY_FRACTION * lifetime_s,
        renew_by=expires_at - LATE_FRACTION * lifetime_s,
    )


class TokenSource(Protocol[T]):
    """A source of credentials, which renews them in time."""

    async def get(self) -> T:
        """Return valid credentials.

        Raises:
            AuthError: There are no credentials, or the issuer refuses them.
            Unavailable: The issuer doesn't answer, or a renewal fails after an earlier success.
            ClientClosed: The source is closed.
        """
        ...

    def forget(self, value: T) -> None:
        """Drop *value*, which a server has refused."""
        ...

    async def aclose(self) -> None: ...


def _is_refused(failure: Exception) -> bool:
    return isinstance(failure, HttpError) and failure.status == 401


async def with_token(
    tokens: TokenSource[T],
    request: Callable[[T], Awaitable[R]],
    is_refused: Callable[[Exception], bool] = _is_refused,
) -> R:
    """Make *request* with credentials; if the server refuses, repeat the request with new ones."""
    value = await tokens.get()
    try:
        return await request(value)
    except Exception as exc:
        if not is_refused(exc):
            raise
    tokens.forget(value)
    return await request(await tokens.get())


class TokenCache(Generic[T]):
    """Cache the credentials that *renew* returns.

    Concurrent callers wait for the same renewal. If one caller is cancelled, the renewal continues.
    An early renewal runs in the background. *name* is the issuer's name in messages.
    """

    def __init__(
        self,
        renew: Callable[[], Awaitable[FreshCredentials[T]]],
        name: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._renew = renew
        self._name = name
        self._clock = clock
        self._current: FreshCredentials[T] | None = None
        self._has_renewed = False
        self._renewing: asyncio.Task[T] | None = None
        self._closed = False

    async def open(self) -> None:
        """Get the first credentials; if this call fails or is cancelled, close the cache."""
        try:
            await self.get()
        except BaseException:
            await self.aclose()
            raise

    async def get(self) -> T:
        """Implement `TokenSource.get`."""
        if self._closed:
            raise ClientClosed(f"the client of {self._name} is closed; open another")
        now, cached = self._clock(), self._current
        if cached is not None and now < cached.renew_by:
            if now >= cached.renew_from:  # no request needs to wait yet
                self._start_renewal()
            return cached.value
        return await await_shared(self._start_renewal(), f"the client of {self._name}")

    def forget(self, value: T) -> None:
        """Implement `TokenSource.forget`."""
        if self._current is not None and self._current.value == value:
            self._current = None

    async def aclose(self) -> None:
        """Cancel a renewal in progress."""
        self._closed = True
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})

    def _start_renewal(self) -> asyncio.Task[T]:
        """Return the task that renews the credentials; start it unless it runs already."""
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(
                self._renew_once(), name=f"kinetic token {self._name}"
            )
            self._renewing.add_done_callback(self._handle_renewal_end)
        return self._renewing

    async def _renew_once(self) -> T:
        """Renew, cache, and return the credentials; after a success, only `Revoked` is final."""
        try:
            fresh = self._current = await self._renew()
        except (AuthError, ConfigurationError) as exc:
            if not self._has_renewed or isinstance(exc, Revoked):
                raise
            # Without a network, a plugin for credentials reports that it has none.
            raise Unavailable(f"{exc} (an earlier renewal succeeded)", retryable=True) from exc
        self._has_renewed = True
        return fresh.value

    def _handle_renewal_end(self, task: asyncio.Task[T]) -> None:
        """If a renewal failed while credentials are cached, pause the early renewals."""
        if not task.cancelled() and (failure := task.exception()) is not None and self._current:
            self._current = replace(self._current, renew_from=self._clock() + RENEWAL_PAUSE_S)
            logging.info("can't renew the credentials of %s yet: %s", self._name, failure)


SCOPE = "https://www.googleapis.com/auth/cloud-platform"
CREDENTIALS_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
QUOTA_VARIABLE = "GOOGLE_CLOUD_QUOTA_PROJECT"
LOGIN = (
    "run `gcloud auth application-default login`, or set "
    f"{CREDENTIALS_VARIABLE} to the key file of a service account"
)

REFRESH_TIMEOUT_S = 10
"""Timeout of one request for a token, in seconds."""


NEW_POD_S = 45.0
"""How long a node's metadata server may take to know a new pod, in seconds."""


class Credentials(TokenCache[str]):
    """Access tokens for Google's APIs from application-default credentials, on one loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(self._request_token, "Google's APIs", clock)
        self._token: Token | None = None
        self._first_requested_at: float | None = None
        self._http = HttpClient("the client of Google's APIs", connect_s=5.0, trust_env=True)

    @property
    def description(self) -> str:
        """A description of the credentials; "unknown" before `get` has returned some."""
        token = self._token
        if token is None:
            return "unknown"
        service_data = token.service_data
        url = str(service_data.get("service_account_impersonation_url", ""))
        account = url.rpartition("/")[2].partition(":")[0]
        match token.token_type.value:
            case "authorized_user":
                return f"the login of {service_data.get('account') or 'a user'}"
            case "service_account":
                return f"the key of the service account {service_data.get('client_email', '?')}"
            case "impersonated_service_account":
                return f"the service account {account}, impersonated"
            case "external_account":
                return "workload identity federation"
            case _:
                return "the metadata server of this machine"

    @property
    def quota_project(self) -> str | None:
        """The project to which Google charges a user's requests; None if kinetic doesn't know it.

        Before the first `get`, only the environment can name the project. For requests without
        it, Google uses gcloud's own project, which hasn't enabled most APIs.
        https://cloud.google.com/docs/quotas/set-quota-project
        """
        service_data = self._token.service_data if self._token is not None else {}
        return os.environ.get(QUOTA_VARIABLE) or service_data.get("quota_project_id")

    async def aclose(self) -> None:
        """Cancel a renewal in progress, and close all connections to the issuer."""
        await super().aclose()
        await self._http.aclose()

    async def _request_token(self) -> FreshCredentials[str]:
        token = self._token
        if token is None:
            token = self._token = self._open_token()
        requested_at = self._clock()
        self._first_requested_at = self._first_requested_at or requested_at
        try:
            answer = await token.refresh(timeout=REFRESH_TIMEOUT_S)
        except Exception as exc:
            error = _as_backend_error(exc, token)
            if isinstance(error, AuthError):
                self._token = None  # read them again: the user may log in meanwhile
                in_pod = not token.service_data and "KUBERNETES_SERVICE_HOST" in os.environ
                if in_pod and requested_at < self._first_requested_at + NEW_POD_S:
                    raise Unavailable(str(error), retryable=True) from exc
            raise error from exc
        return schedule_renewals(answer.value, requested_at, requested_at + answer.expires_in)

    def _open_token(self) -> Token:
        from gcloud.aio.auth import Token

        key_file = os.environ.get(CREDENTIALS_VARIABLE, "")
        session: Any = self._http.session()  # the library declares another type
        try:
            token = Token(session=session, scopes=[SCOPE])
        except FileNotFoundError as exc:
            raise AuthError(
                f"{CREDENTIALS_VARIABLE} names {key_file}, which does not exist; {LOGIN}"
            ) from exc
        except (KeyError, TypeError, ValueError) as exc:
            source = key_file or "the application-default credentials"
            raise AuthError(f"{source} cannot be used: {exc}; {LOGIN}") from exc
        if key_file and not token.service_data:
            raise AuthError(
                f"{CREDENTIALS_VARIABLE} names {key_file}, which holds no credentials; {LOGIN}"
            )
        return token


def _as_backend_error(failure: Exception, token: Token) -> BackendError:
    """Return kinetic's error for a *failure* of the library to renew *token*."""
    import aiohttp

    if isinstance(failure, aiohttp.ClientHttpProxyError):
        return proxy_refusal_error("cannot get an access token", failure)
    if isinstance(failure, aiohttp.ClientResponseError):
        if failure.status == 429 or failure.status >= 500:
            return Unavailable(
                f"the access token server answered {failure.status}; try again later",
                retryable=True,
            )
        message = " ".join(failure.message.split())[:300]
        return Revoked(f"Google refused the credentials ({failure.status}: {message}); {LOGIN}")
    if isinstance(failure, aiohttp.ClientError | TimeoutError | OSError):
        if not token.service_data:
            return AuthError(
                "there are no application-default credentials, and no metadata server of "
                f"Google Cloud answers here ({failure or type(failure).__name__}); {LOGIN}"
            )
        return Unavailable(
            f"cannot get an access token: {failure or type(failure).__name__}; check the network",
            retryable=True,
        )
    return AuthError(f"the credentials cannot be used ({failure!r}); {LOGIN}")
