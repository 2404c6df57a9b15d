"""The connections to one API server: few for requests, and others, without number, for streams.

Limits for connecting and for silence but none for the whole; failures of the
network become errors of ours here; and a pass that is refused is renewed once.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from kinetic.aio._retry_after import retry_after
from kinetic.aio._sockets import Sockets, cut
from kinetic.aio.clusters._access import Access, Pass
from kinetic.aio.clusters._api_answers import Answer, Ask, Refusal
from kinetic.errors import AuthError, BackendError, ClientClosed, KineticError, Unavailable

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

__all__ = ["Connections"]

KEEPALIVE_S = 60.0

HEARTBEAT_S = 30.0
"""After so much silence a WebSocket is asked whether the other side is there."""

IDLE_S = 75.0
ERROR_BYTES = 64 * 1024
STREAM_BYTES = 256 * 1024


class Connections:
    """Of one client, on the event loop that sends the first request."""

    def __init__(self, access: Access, *, connect_s: float, most: int) -> None:
        self._access = access
        self._connect_s = connect_s
        self._most = most
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requests: aiohttp.ClientSession | None = None
        self._streams: aiohttp.ClientSession | None = None
        self._sockets = Sockets()
        self._timeouts: dict[float | None, aiohttp.ClientTimeout] = {}
        self._closed = False

    async def send(self, ask: Ask, data: bytes | None, content_type: str, idle: float) -> bytes:
        """The body of the answer.

        Raises:
            Refusal: Its status is not one of success.
            Unavailable: There is none.
        """
        session = self._session(streams=False)
        headers = {"Content-Type": content_type} if data is not None else {}
        async with self._answer(session, ask, idle, data, headers) as answer:
            return await answer.read()

    async def stream(self, ask: Ask, idle: float | None) -> AsyncGenerator[bytes]:
        """The body of the answer in pieces, as they come; first an empty one when it begins."""
        session = self._session(streams=True)
        async with self._answer(session, ask, idle, None, {}) as answer:
            yield b""
            async for piece in answer.content.iter_any():
                yield piece

    async def upgrade(self, ask: Ask, protocol: str) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket that speaks *protocol*; whoever asks for it closes it.

        Raises:
            Refusal: There is none.
            Unavailable: Nobody answers.
        """
        import aiohttp

        session = self._session(streams=True)
        for again in (False, True):
            shown = await self._access.passes.get()
            with self._translated(ask):
                try:
                    return await self._upgraded(session, ask, protocol, shown)
                except aiohttp.WSServerHandshakeError as exc:
                    refused = Answer(status=exc.status, text=exc.message)
            if refused.status != 401 or again:
                break
            self._access.passes.forget(shown)
        # Its words are lost there. They are the same for whoever does not ask for a WebSocket.
        try:
            await self.send(ask, None, "", IDLE_S)
        except Refusal as refusal:
            if refusal.answer.status == refused.status:
                raise
        raise Refusal(refused)

    async def _upgraded(
        self, session: aiohttp.ClientSession, ask: Ask, protocol: str, shown: Pass
    ) -> aiohttp.ClientWebSocketResponse:
        sent = [*self._access.headers]
        if shown.authorization:
            sent.append(("Authorization", shown.authorization))
        return await session.ws_connect(
            self._url(ask),
            method=ask.method,
            protocols=(protocol,),
            headers=sent,
            heartbeat=HEARTBEAT_S,
            ssl=shown.tls if shown.tls is not None else True,
            server_hostname=self._access.tls_name,
        )

    async def aclose(self) -> None:
        """Close all connections; what is under way fails."""
        self._closed = True
        self._sockets.hang_up()
        for session in (self._requests, self._streams):
            if session is not None:
                await session.close()
        await self._sockets.closed()

    @asynccontextmanager
    async def _answer(
        self,
        session: aiohttp.ClientSession,
        ask: Ask,
        idle: float | None,
        data: bytes | None,
        headers: dict[str, str],
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        shown = await self._access.passes.get()
        with self._translated(ask):
            answer = await self._request(session, ask, idle, data, headers, shown)
            if answer.status == 401:
                answer.release()
                self._access.passes.forget(shown)
                shown = await self._access.passes.get()
                answer = await self._request(session, ask, idle, data, headers, shown)
            self._sockets.read(answer)
            async with _ended(answer):
                if answer.status >= 300:
                    wish = retry_after(answer.headers.get("Retry-After"))
                    text = await _beginning(answer.content)
                    raise Refusal(Answer(status=answer.status, text=text, wish_s=wish))
                yield answer

    async def _request(
        self,
        session: aiohttp.ClientSession,
        ask: Ask,
        idle: float | None,
        data: bytes | None,
        headers: dict[str, str],
        shown: Pass,
    ) -> aiohttp.ClientResponse:
        sent = [*headers.items(), *self._access.headers]
        if shown.authorization:
            sent.append(("Authorization", shown.authorization))
        return await session.request(
            ask.method,
            self._url(ask),
            data=data,
            headers=sent,
            timeout=self._timeout(idle),
            ssl=shown.tls if shown.tls is not None else True,
            server_hostname=self._access.tls_name,
            allow_redirects=False,
        )

    def _url(self, ask: Ask) -> URL:
        from yarl import URL

        url = URL(self._access.server + ask.path, encoded=True)
        return url.with_query(dict(ask.query)) if ask.query else url

    def _timeout(self, idle: float | None) -> aiohttp.ClientTimeout:
        import aiohttp

        known = self._timeouts.get(idle)
        if known is None:
            known = self._timeouts[idle] = aiohttp.ClientTimeout(
                total=None,
                # With the look-up of the name, which has no limit itself.
                connect=3 * self._connect_s,
                sock_connect=self._connect_s,
                sock_read=idle,
            )
        return known

    def _session(self, *, streams: bool) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._closed:
            raise ClientClosed(f"the client of {self._access.name} is closed; open another")
        if loop is not self._loop:
            raise BackendError(
                f"the client of {self._access.name} belongs to another event loop; open one of "
                "its own"
            )
        if streams:
            self._streams = self._streams or self._open(0, STREAM_BYTES)
            return self._streams
        self._requests = self._requests or self._open(self._most, STREAM_BYTES)
        return self._requests

    def _open(self, most: int, buffered: int) -> aiohttp.ClientSession:
        import aiohttp

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=most, keepalive_timeout=KEEPALIVE_S, socket_factory=self._sockets.make
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "kinetic-aio", "Accept": "application/json, */*"},
            read_bufsize=buffered,
            # Asked for once: aiohttp would read the environment again for each request.
            proxy=self._access.proxy,
        )

    @contextmanager
    def _translated(self, ask: Ask) -> Generator[None]:
        """Failures of the network as errors of ours."""
        import aiohttp

        what, server = f"cannot {ask} of {self._access.name}", self._access.server
        try:
            yield
        except (KineticError, Refusal):
            raise
        except aiohttp.ClientConnectorCertificateError as exc:
            raise AuthError(
                f"{what}: the certificate of {server} is not the cluster's ({exc.certificate_error}"
                "); check that address and CA belong together"
            ) from exc
        except aiohttp.ClientSSLError as exc:
            # Cut during the handshake it is like any other connection.
            cut = isinstance(getattr(exc, "os_error", None), ssl.SSLEOFError)
            kind: Any = Unavailable if cut else BackendError
            raise kind(
                f"{what}: no trusted connection to {server} ({exc}); check the clock, the proxy "
                "and the certificates",
                retryable=cut,
            ) from exc
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            if self._closed:
                raise ClientClosed(f"{what}: the client was closed meanwhile") from exc
            raise Unavailable(
                f"{what}: {server} does not answer as it should "
                f"({_words(exc)}); check that the cluster runs, and the network",
                retryable=True,
            ) from exc
        except Exception as exc:
            if not self._closed:
                raise
            # aiohttp has several words for a session that was closed, some of them assertions.
            raise ClientClosed(f"{what}: the client was closed meanwhile") from exc


@asynccontextmanager
async def _ended(answer: aiohttp.ClientResponse) -> AsyncGenerator[None]:
    """Close *answer*; one that is not read to its end ends its connection without a goodbye.

    Its session knows nothing of that connection any more and would not wait for it.
    """
    try:
        yield
    finally:
        cut(answer)


async def _beginning(content: aiohttp.StreamReader) -> str:
    """As much of an answer as is needed to explain it; its parts come one by one."""
    said = b""
    while len(said) < ERROR_BYTES and (piece := await content.read(ERROR_BYTES - len(said))):
        said += piece
    return said.decode(errors="replace")


def _words(failure: Exception) -> str:
    """aiohttp's own words for a connection that was not made name its objects in memory."""
    cause = getattr(failure, "os_error", None) or failure
    return str(cause) or type(cause).__name__
