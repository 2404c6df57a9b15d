"""Access tokens of Google's APIs from application-default credentials: asked for once, for all.

gcloud-aio knows the kinds of credentials and how each is turned into a token.
Here is what it leaves open: one refresh at a time that no waiter can cancel,
failures that say what to do, and no five attempts at a password that is wrong.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

from absl import logging

from kinetic._tasks import shared
from kinetic.aio._net.http import Sockets
from kinetic.errors import AuthError, BackendError, ClientClosed, Unavailable

if TYPE_CHECKING:
    import aiohttp
    from gcloud.aio.auth import Token

__all__ = ["SCOPE", "Credentials"]

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
LOGIN = (
    "run `gcloud auth application-default login`, or set "
    f"{VARIABLE} to the key file of a service account"
)

REFRESH_S = 10
EARLY = 0.5
LATE = 0.05
"""Parts of a token's life that are left when it is renewed beside, and instead of, the request."""

PAUSE_S = 10.0
"""After a renewal beside a request has failed, the next is tried this much later."""


class Credentials:
    """The tokens of one process on one loop; for as many requests at once as there are.

    Cancelling one that waits for a token leaves the others waiting for it.
    """

    def __init__(self) -> None:
        self._token: Token | None = None
        self._session: aiohttp.ClientSession | None = None
        self._sockets = Sockets()
        self._value = ""
        self._early = self._late = 0.0
        self._refreshing: asyncio.Task[str] | None = None
        self._closed = False

    async def get(self) -> str:
        """A token that is valid now.

        Raises:
            AuthError: There are no credentials, or they are refused.
            Unavailable: Whoever gives tokens does not answer.
            ClientClosed: This was closed.
        """
        if self._closed:
            raise ClientClosed("the client is closed; open another")
        now = time.time()
        if self._value and now < self._late:
            if now >= self._early:
                self._refresh()
            return self._value
        return await shared(self._refresh(), "the client")

    def forget(self, value: str) -> None:
        """A server has refused *value*: do not hand it out again."""
        if value == self._value:
            self._value = ""

    @property
    def last(self) -> str:
        """The token that was given last, or nothing."""
        return self._value

    async def aclose(self) -> None:
        """End a refresh under way and close its connections."""
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait({self._refreshing})
        if self._session is not None:
            await self._session.close()
            await self._sockets.closed()

    def _refresh(self) -> asyncio.Task[str]:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._renew(), name="kinetic token")
            self._refreshing.add_done_callback(self._refreshed)
        return self._refreshing

    def _refreshed(self, task: asyncio.Task[str]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None and self._value:
            self._early = time.time() + PAUSE_S
            logging.info("the access token was not renewed yet: %s", failure)

    async def _renew(self) -> str:
        token = self._token
        if token is None:
            token = self._token = self._open()
        asked = time.time()
        try:
            answer = await token.refresh(timeout=REFRESH_S)
        except Exception as exc:
            raise _explained(exc, token) from exc
        self._value = answer.value
        self._early = asked + answer.expires_in * (1 - EARLY)
        self._late = asked + answer.expires_in * (1 - LATE)
        return self._value

    def _open(self) -> Token:
        import aiohttp
        from gcloud.aio.auth import Token

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=REFRESH_S, sock_connect=5)
            connector = aiohttp.TCPConnector(socket_factory=self._sockets.make)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, trust_env=True
            )
        named = os.environ.get(VARIABLE, "")
        session: Any = self._session  # the library's types say that it wants another one
        try:
            token = Token(session=session, scopes=[SCOPE])
        except FileNotFoundError as exc:
            raise AuthError(f"{VARIABLE} names {named}, which does not exist; {LOGIN}") from exc
        except (KeyError, TypeError, ValueError) as exc:
            where = named or "the application-default credentials"
            raise AuthError(f"{where} cannot be used: {exc}; {LOGIN}") from exc
        if named and not token.service_data:
            raise AuthError(f"{VARIABLE} names {named}, which holds no credentials; {LOGIN}")
        return token


def _explained(failure: Exception, token: Token) -> BackendError:
    import aiohttp

    if isinstance(failure, aiohttp.ClientResponseError):
        passing = failure.status == 429 or failure.status >= 500
        if passing:
            return Unavailable(
                f"the server of access tokens answered {failure.status}; try again later",
                retryable=True,
            )
        said = " ".join(failure.message.split())[:300]
        return AuthError(f"Google refused the credentials ({failure.status}: {said}); {LOGIN}")
    if isinstance(failure, aiohttp.ClientError | TimeoutError | OSError):
        if not token.service_data:
            return AuthError(
                "there are no application-default credentials, and no metadata server of "
                f"Google Cloud answers here ({failure or type(failure).__name__}); {LOGIN}"
            )
        return Unavailable(
            f"no access token: {failure or type(failure).__name__}; check the network",
            retryable=True,
        )
    return AuthError(f"the credentials cannot be used ({failure!r}); {LOGIN}")
