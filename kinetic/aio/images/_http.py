"""Reading from the image registry and from the bucket of build logs: one session, few requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tenacity

from kinetic.aio._credentials import Credentials
from kinetic.aio._sockets import Sockets
from kinetic.errors import ClientClosed, KineticError, Unavailable

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Answer", "Http"]

CONNECT_S, IDLE_S = 10.0, 30.0
PATIENCE_S = 60.0
"""How long a server that does not answer, or answers that it cannot, is asked again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said, whatever it was."""

    status: int
    body: bytes


class _Passing(Exception):
    """The same request may work later."""


class Http:
    """Requests with the token of *credentials*; None sends none.

    *patience* is in seconds.
    """

    def __init__(self, credentials: Credentials | None, *, patience: float = PATIENCE_S) -> None:
        self._credentials = credentials
        self._patience = patience
        self._session: aiohttp.ClientSession | None = None
        self._sockets = Sockets()
        self._closed = False

    async def ask(
        self, method: str, url: str, headers: Mapping[str, str], *, authorized: bool = True
    ) -> Answer:
        """One request; asked again while the server has trouble of its own.

        Raises:
            AuthError: There are no credentials.
            Unavailable: It does not answer.
            ClientClosed: This was closed.
        """
        policy = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_Passing),
            wait=tenacity.wait_random_exponential(multiplier=0.25, max=8),
            stop=tenacity.stop_after_delay(self._patience),
            reraise=True,
        )
        try:
            return await policy(self._once, method, url, headers, authorized)
        except _Passing as exc:
            host = url.split("/")[2]
            raise Unavailable(
                f"{host} did not answer for {self._patience:g} s ({exc}); check the network, "
                "or try again later",
                retryable=True,
            ) from exc.__cause__

    async def _once(
        self, method: str, url: str, headers: Mapping[str, str], authorized: bool
    ) -> Answer:
        import aiohttp

        sent, token = dict(headers), ""
        if authorized and self._credentials is not None:
            token = await self._credentials.get()
            sent["Authorization"] = f"Bearer {token}"
        try:
            async with self._opened().request(method, url, headers=sent) as response:
                self._sockets.read(response)
                answer = Answer(response.status, await response.read())
        except KineticError:
            raise
        except Exception as exc:
            if self._closed:  # aiohttp has several words for it
                raise ClientClosed("the client of images was closed meanwhile") from exc
            if not isinstance(exc, aiohttp.ClientError | OSError | TimeoutError):
                raise
            raise _Passing(str(exc) or type(exc).__name__) from exc
        if answer.status in (408, 429) or answer.status >= 500:
            raise _Passing(f"it answered {answer.status}")
        if answer.status == 401 and self._credentials is not None and token:
            self._credentials.forget(token)  # the next request asks for another one
        return answer

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._closed:
            raise ClientClosed("the client of images is closed; open another")
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=IDLE_S)
            connector = aiohttp.TCPConnector(socket_factory=self._sockets.make)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, trust_env=True
            )
        return self._session

    async def aclose(self) -> None:
        """Close the connections; what is under way fails."""
        self._closed = True
        self._sockets.hang_up()
        if self._session is not None:
            await self._session.close()
            await self._sockets.closed()
