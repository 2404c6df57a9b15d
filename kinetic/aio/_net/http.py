"""HTTP for all adapters: sessions, the failures of the network in our words, and their closing."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import math
import socket
import ssl
import time
import urllib.parse
import urllib.request
import weakref
from collections.abc import Awaitable, Collection, Generator, Mapping
from typing import TYPE_CHECKING, Any, cast

from kinetic._messages import one_line
from kinetic.errors import AuthError, BackendError, ClientClosed, KineticError, Unavailable

if TYPE_CHECKING:
    import aiohttp

PASSING = frozenset({408, 429, 500, 502, 503, 504})


NO_PAGE = "404 page not found"
"""What servers written in Go say of a path that they do not know: no word about the cause."""


class HttpError(Exception):
    """The server answered, with something else than what was asked for.

    It stays within the adapter, which makes of it what users see.
    ``retry_after`` is the server's own wish, in seconds.
    """

    def __init__(self, status: int, text: str = "", retry_after: float | None = None) -> None:
        super().__init__(f"it answered {status}")
        self.status = status
        self.text = text
        self.retry_after = retry_after

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self.status in PASSING

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that was answered, or nothing."""
        return json_object(self.text)

    @property
    def said(self) -> str:
        """The server's own words, on one line; each API has its own place for them."""
        body: Any = self.body
        try:
            found = (
                body.get("message")  # Kubernetes
                or (body["error"]["message"] if "error" in body else "")  # Google's APIs
                or "; ".join(str(one.get("message") or one["code"]) for one in body["errors"])
            )
        except (AttributeError, KeyError, TypeError):
            found = ""
        text = "" if self.text.strip() == NO_PAGE else self.text
        return one_line(str(found or text or "no reason given"), 600)


def json_object(text: str) -> dict[str, Any]:
    """The object in *text*, which may have words before it; nothing if there is none."""
    try:
        found: Any = json.loads(text[text.index("{") :])
    except ValueError:
        return {}
    return cast("dict[str, Any]", found)


def proxy_for(server: str) -> str | None:
    """The proxy that the environment names for the URL *server*."""
    parts = urllib.parse.urlsplit(server)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    return urllib.request.getproxies().get(parts.scheme)


def retry_after(value: str | None, now: float | None = None) -> float | None:
    """Seconds to wait by a Retry-After header, which holds them or a date; None if it says none."""
    if not value:
        return None
    try:
        wish = float(value)
    except ValueError:
        try:
            until = email.utils.parsedate_to_datetime(value).timestamp()
        except ValueError:
            return None
        wish = until - (time.time() if now is None else now)
    return max(0.0, wish) if math.isfinite(wish) else None


PROBE_S = 15
"""Seconds of silence after which the system asks the other side; half a minute is the end."""

GOODBYE_S = 1.0
"""How long a closing client waits for peers that do not answer its goodbye."""

GLANCES = 500


class Sockets:
    """Makes the sockets of a client's sessions, and knows which of them are still open.

    A session forgets a connection whose request was cancelled while it was
    being made, but TLS takes leave of the peer before it closes the socket.
    A loop that ends before that leaves the socket behind, with a warning.
    And a session that is closed leaves those waiting who read an answer.
    """

    def __init__(self) -> None:
        self._made: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._answers: weakref.WeakSet[aiohttp.ClientResponse] = weakref.WeakSet()

    def make(self, address: tuple[Any, ...]) -> socket.socket:
        """A socket whose system asks the other side whether it is still there.

        So a stream that may be silent notices a peer that is gone, half a minute later.
        """
        made = socket.socket(family=address[0], type=address[1], proto=address[2])
        self._made.add(made)
        for level, option, value in (
            (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
            (socket.IPPROTO_TCP, "TCP_KEEPIDLE", PROBE_S),
            (socket.IPPROTO_TCP, "TCP_KEEPALIVE", PROBE_S),  # macOS has this name for it
            (socket.IPPROTO_TCP, "TCP_KEEPINTVL", PROBE_S // 3),
            (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
            (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 2000 * PROBE_S),
        ):
            if hasattr(socket, option):
                with contextlib.suppress(OSError):  # a system may know a name and not take it
                    made.setsockopt(level, getattr(socket, option), value)
        return made

    def read(self, answer: aiohttp.ClientResponse) -> None:
        """Somebody reads *answer*, and is told when the client hangs up."""
        self._answers.add(answer)

    def hang_up(self) -> None:
        """End what is being read; before the sessions are closed."""
        for answer in tuple(self._answers):
            cut(answer)

    async def closed(self) -> None:
        """Wait until all are closed, after their sessions were: at most `GOODBYE_S`."""
        await asyncio.sleep(0)
        for _ in range(GLANCES):
            if all(one.fileno() < 0 for one in self._made):
                return
            await asyncio.sleep(GOODBYE_S / GLANCES)


def cut(answer: aiohttp.ClientResponse) -> None:
    """Close *answer*; one that is not read to its end ends its connection without a goodbye."""
    connection = answer.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    answer.close()


KEEPALIVE_S = 60.0
ERROR_BYTES = 64 * 1024
READ_BYTES = 256 * 1024


class HttpClient:
    """The sessions of one client, on the event loop that asks for the first.

    Limits for connecting and for silence, but none for the whole. *owner* is
    what messages call it: "the store gs://x". Without *trust_env* the only
    proxy is *proxy*: aiohttp would read the environment again for each request.
    """

    def __init__(
        self,
        owner: str,
        *,
        connect_s: float = 10.0,
        idle_s: float = 60.0,
        proxy: str | None = None,
        trust_env: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._owner = owner
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._proxy = proxy
        self._trust_env = trust_env
        self._headers = {"User-Agent": "kinetic-aio", **(headers or {})}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions: dict[int, aiohttp.ClientSession] = {}
        self._timeouts: dict[float | None, aiohttp.ClientTimeout] = {}
        self._sockets = Sockets()
        self._closed = False

    def check(self) -> None:
        """Nothing, if this can be used here.

        Raises:
            ClientClosed: It is closed.
            BackendError: It belongs to another event loop.
        """
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._closed:
            raise ClientClosed(f"{self._owner} is closed; open another")
        if loop is not self._loop:
            raise BackendError(f"{self._owner} belongs to another event loop; open one of its own")

    def session(self, limit: int = 0, *, refusals: bool = False) -> aiohttp.ClientSession:
        """Return the session of at most *limit* connections; 0 means no limit.

        With *refusals* its requests raise `HttpError` by themselves, for a library that makes them.
        """
        import aiohttp

        self.check()
        if limit not in self._sessions:
            self._sessions[limit] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=limit,
                    keepalive_timeout=KEEPALIVE_S,
                    socket_factory=self._sockets.make,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=self.timeout(self._idle_s),
                read_bufsize=READ_BYTES,
                proxy=self._proxy,
                trust_env=self._trust_env,
                raise_for_status=self._examined if refusals else False,
            )
        return self._sessions[limit]

    def timeout(self, idle_s: float | None) -> aiohttp.ClientTimeout:
        """For a request whose answer may be silent for *idle_s*; None is for ever."""
        import aiohttp

        known = self._timeouts.get(idle_s)
        if known is None:
            known = self._timeouts[idle_s] = aiohttp.ClientTimeout(
                total=None,
                connect=3 * self._connect_s,  # with the look-up of the name, which has no limit
                sock_connect=self._connect_s,
                sock_read=idle_s,
            )
        return known

    async def answered(
        self, request: Awaitable[aiohttp.ClientResponse], accepted: Collection[int] = ()
    ) -> aiohttp.ClientResponse:
        """Return the answer to *request*, whose content is still to be read; `cut` it afterwards.

        Raises:
            HttpError: Its status is 300 or more, and not in *accepted*.
        """
        answer = await request
        await self._examined(answer, accepted)
        return answer

    async def _examined(
        self, answer: aiohttp.ClientResponse, accepted: Collection[int] = ()
    ) -> None:
        self._sockets.read(answer)
        if answer.status < 300 or answer.status in accepted:
            return
        try:
            said = b""  # as much as an explanation needs; it arrives in parts
            while len(said) < ERROR_BYTES and (
                piece := await answer.content.read(ERROR_BYTES - len(said))
            ):
                said += piece
            wish = retry_after(answer.headers.get("Retry-After"))
            raise HttpError(answer.status, said.decode(errors="replace"), wish)
        finally:
            cut(answer)

    @contextlib.contextmanager
    def translated(
        self,
        what: str,
        server: str,
        *,
        whose: str = "the server's",
        advice: str = "check the network",
    ) -> Generator[None]:
        """Failures of the network as errors of ours, which begin with *what* could not be done.

        *whose* is the certificate that is expected, *advice* for a server that does not answer.
        """
        import aiohttp

        try:
            yield
        except (KineticError, HttpError):
            raise
        except aiohttp.ClientResponseError as exc:
            wish = retry_after(exc.headers.get("Retry-After") if exc.headers else None)
            raise HttpError(exc.status, exc.message, wish) from exc
        except aiohttp.ClientConnectorCertificateError as exc:
            raise AuthError(
                f"{what}: the certificate of {server} is not {whose} ({exc.certificate_error}); "
                "check that address and CA belong together, the clock and the proxy"
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
        except (aiohttp.ClientError, TimeoutError, OSError, LookupError, ValueError) as exc:
            self._check_open(what, exc)
            raise Unavailable(
                f"{what}: {server} does not answer as it should ({_words(exc)}); {advice}",
                retryable=True,
            ) from exc
        except Exception as exc:
            # aiohttp has several words for a session that was closed, some of them assertions.
            self._check_open(what, exc)
            raise

    def _check_open(self, what: str, failure: Exception) -> None:
        if self._closed:
            raise ClientClosed(f"{what}: {self._owner} was closed meanwhile") from failure

    async def aclose(self) -> None:
        """Close all connections; what is under way fails."""
        self._closed = True
        self._sockets.hang_up()
        for session in self._sessions.values():
            await session.close()
        await self._sockets.closed()


def _words(failure: Exception) -> str:
    """aiohttp's own words for a connection that was not made name its objects in memory."""
    cause = getattr(failure, "os_error", None) or failure
    return str(cause) or type(cause).__name__
