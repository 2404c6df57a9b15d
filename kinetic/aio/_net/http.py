"""The HTTP client of all adapters, which translates network failures into kinetic's errors."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import math
import socket
import ssl
import urllib.parse
import urllib.request
import weakref
from collections.abc import Awaitable, Generator, Mapping
from typing import TYPE_CHECKING, Any, cast

from kinetic._messages import one_line
from kinetic.errors import AuthError, BackendError, ClientClosed, KineticError, Unavailable

if TYPE_CHECKING:
    import aiohttp

RETRYABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses that are worth a retry."""

GO_NOT_FOUND = "404 page not found"
"""The text with which a server written in Go refuses an unknown path.

kinetic's messages leave this text out, because it doesn't name the cause.
"""


class HttpError(Exception):
    """The server answered with an error status; each adapter translates it for users."""

    def __init__(
        self, status: int, text: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(f"the server answered {status}")
        self.status = status
        self.text = text
        self.headers = headers or {}

    @property
    def retry_after(self) -> float | None:
        """The pause that the server asks for, in seconds; None if it asks for none."""
        return parse_retry_after(self.headers.get("Retry-After"))

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in RETRYABLE_STATUSES

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object in the answer; empty if the answer has none."""
        return json_object(self.text)

    @property
    def message(self) -> str:
        """The server's message on one line; each API has its own field for it."""
        body: Any = self.body
        try:
            message = (
                body.get("message")  # Kubernetes
                or (body["error"]["message"] if "error" in body else "")  # Google's APIs
                or "; ".join(str(error.get("message") or error["code"]) for error in body["errors"])
            )
        except (AttributeError, KeyError, TypeError):
            message = ""
        text = "" if self.text.strip() == GO_NOT_FOUND else self.text
        return one_line(str(message or text or "no reason given"), 600)


def proxy_refusal_error(problem: str, refusal: aiohttp.ClientHttpProxyError) -> BackendError:
    """Return the error for a proxy that doesn't connect to the server; it begins with *problem*."""
    # The server itself didn't answer, so the status says nothing about permissions or objects.
    message = (
        f"{problem}: the proxy doesn't connect ({refusal.status} {one_line(refusal.message)}); "
        "check HTTPS_PROXY and NO_PROXY, or the kubeconfig's proxy-url"
    )
    if refusal.status in RETRYABLE_STATUSES:
        return Unavailable(message, retryable=True)
    return BackendError(message)


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object from the first brace of *text* to its end; empty if there is none."""
    try:
        value: Any = json.loads(text[text.index("{") :])
    except ValueError:
        return {}
    return cast("dict[str, Any]", value)


def proxy_for(server: str) -> str | None:
    """Return the proxy that the environment names for the URL *server*; None for no proxy.

    As for kubectl, an entry of NO_PROXY may be a network, and servers of this machine need none.
    """
    parts, proxies = urllib.parse.urlsplit(server), urllib.request.getproxies()
    host = parts.hostname or ""
    if urllib.request.proxy_bypass(host) or _has_direct_address(host, proxies.get("no", "")):
        return None
    return proxies.get(parts.scheme)


def _has_direct_address(host: str, no_proxy: str) -> bool:
    """Return whether *host* is this machine, or an address in a network that *no_proxy* lists."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    for entry in no_proxy.split(","):
        with contextlib.suppress(ValueError):  # most entries are names
            if address in ipaddress.ip_network(entry.strip(), strict=False):
                return True
    return address.is_loopback


def parse_retry_after(value: str | None) -> float | None:
    """Return the seconds in a Retry-After header; None if there is no header, or it has a date."""
    try:
        wait_s = float(value or "")
    except ValueError:
        return None
    return max(0.0, wait_s) if math.isfinite(wait_s) else None


PROBE_S = 15
"""After this many seconds without data, the kernel probes the peer. If no answer comes within the
same time again, the kernel closes the connection."""

CLOSE_TIMEOUT_S = 1.0
"""How long, in seconds, a closing client waits for its sockets to close."""

CLOSE_POLL_S = 0.002
"""How often, in seconds, a closing client checks whether its sockets are closed."""


def new_socket(info: tuple[Any, ...]) -> socket.socket:
    """Make a socket for *info*, an entry of `getaddrinfo`; reads fail if the peer is dead."""
    new = socket.socket(family=info[0], type=info[1], proto=info[2])
    for level, option, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", PROBE_S),
        (socket.IPPROTO_TCP, "TCP_KEEPALIVE", PROBE_S),  # the name of TCP_KEEPIDLE on macOS
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", PROBE_S // 3),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 2000 * PROBE_S),
    ):
        if hasattr(socket, option):
            with contextlib.suppress(OSError):  # some systems define an option that they refuse
                new.setsockopt(level, getattr(socket, option), value)
    return new


def close_answer(answer: aiohttp.ClientResponse) -> None:
    """Close *answer*; if it wasn't read to its end, abort its connection."""
    connection = answer.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    answer.close()


KEEPALIVE_S = 60.0
"""How long an idle connection stays open, in seconds."""

ERROR_BYTES = 64 * 1024
"""Maximum bytes to read of an answer with an error status."""

READ_BYTES = 256 * 1024
"""Maximum bytes of an answer that aiohttp buffers for its reader."""


class HttpClient:
    """The aiohttp sessions of one client, on the event loop that makes the first request.

    *connect_s* limits the time to connect, and *idle_s* the time without data from the server, both
    in seconds. A request has no total limit. *owner* names the client in messages, such as "the
    store gs://x". With *trust_env*, each request reads the proxies from the environment. Requests
    through *proxy* are faster.
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
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._answers: weakref.WeakSet[aiohttp.ClientResponse] = weakref.WeakSet()
        self._closed = False

    def check_usable(self) -> None:
        """Check that this client is open and belongs to the running event loop.

        Raises:
            ClientClosed: The client is closed.
            BackendError: The client belongs to another event loop.
        """
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._closed:
            raise ClientClosed(f"{self._owner} is closed; open another")
        if loop is not self._loop:
            raise BackendError(
                f"{self._owner} belongs to another event loop; open one for each loop"
            )

    def session(self, limit: int = 0, *, raise_for_status: bool = False) -> aiohttp.ClientSession:
        """Return the session that opens at most *limit* connections; 0 means no limit.

        With *raise_for_status*, the session raises `HttpError` for error statuses. Use
        it for a library that sends its requests through the session.
        """
        import aiohttp

        self.check_usable()
        if limit not in self._sessions:
            self._sessions[limit] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=limit, keepalive_timeout=KEEPALIVE_S, socket_factory=self._new_socket
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=self.timeout(self._idle_s),
                read_bufsize=READ_BYTES,
                proxy=self._proxy,
                trust_env=self._trust_env,
                raise_for_status=self._raise_for_status if raise_for_status else False,
            )
        return self._sessions[limit]

    def _new_socket(self, info: tuple[Any, ...]) -> socket.socket:
        new = new_socket(info)
        self._sockets.add(new)
        return new

    def timeout(self, idle_s: float | None) -> aiohttp.ClientTimeout:
        """Return a timeout that allows *idle_s* seconds without data; None means no limit."""
        import aiohttp

        return aiohttp.ClientTimeout(
            total=None,
            connect=3 * self._connect_s,  # includes DNS, which has no other limit
            sock_connect=self._connect_s,
            sock_read=idle_s,
        )

    async def receive(self, request: Awaitable[aiohttp.ClientResponse]) -> aiohttp.ClientResponse:
        """Return the answer to *request*; the caller reads its content, then calls `close_answer`.

        Raises:
            HttpError: The answer's status is 300 or more.
        """
        answer = await request
        await self._raise_for_status(answer)
        return answer

    async def _raise_for_status(self, answer: aiohttp.ClientResponse) -> None:
        """If the status of *answer* is 300 or more, close it and raise `HttpError`."""
        self._answers.add(answer)
        if answer.status < 300:
            return
        try:
            body = b""
            while len(body) < ERROR_BYTES and (
                piece := await answer.content.read(ERROR_BYTES - len(body))
            ):
                body += piece
            raise HttpError(answer.status, body.decode(errors="replace"), answer.headers)
        finally:
            close_answer(answer)

    @contextlib.contextmanager
    def translate_errors(
        self,
        problem: str,
        server: str,
        *,
        certificate_owner: str = "the server's",
        advice: str = "check the network",
    ) -> Generator[None]:
        """Translate network failures into kinetic's errors, whose messages begin with *problem*.

        *certificate_owner* names the expected owner of the certificate. *advice* says what to do if
        the server doesn't answer.
        """
        import aiohttp

        try:
            yield
        except (KineticError, HttpError):
            raise
        except aiohttp.ClientHttpProxyError as exc:
            raise proxy_refusal_error(problem, exc) from exc
        except aiohttp.ClientResponseError as exc:
            raise HttpError(exc.status, exc.message, exc.headers) from exc
        except aiohttp.ClientConnectorCertificateError as exc:
            raise AuthError(
                f"{problem}: the certificate of {server} is not {certificate_owner} "
                f"({exc.certificate_error}); check the clock, the proxy, and that the "
                "address and the CA belong together"
            ) from exc
        except aiohttp.ClientSSLError as exc:
            # A connection cut during the handshake is worth a retry.
            is_cut_off = isinstance(getattr(exc, "os_error", None), ssl.SSLEOFError)
            kind: Any = Unavailable if is_cut_off else BackendError
            raise kind(
                f"{problem}: no trusted connection to {server} ({exc}); check the clock, the proxy "
                "and the certificates",
                retryable=is_cut_off,
            ) from exc
        except (aiohttp.ClientError, TimeoutError, OSError, LookupError, ValueError) as exc:
            self._check_open(problem, exc)
            # aiohttp's own message contains memory addresses.
            cause = getattr(exc, "os_error", None) or exc
            raise Unavailable(
                f"{problem}: {server} does not answer as it should "
                f"({str(cause) or type(cause).__name__}); {advice}",
                retryable=True,
            ) from exc
        except Exception as exc:
            # aiohttp raises various errors for a closed session, even AssertionError.
            self._check_open(problem, exc)
            raise

    def _check_open(self, problem: str, failure: Exception) -> None:
        if self._closed:
            raise ClientClosed(
                f"{problem}: {self._owner} was closed meanwhile; open another"
            ) from failure

    async def aclose(self) -> None:
        """Close all connections; requests in progress fail."""
        self._closed = True
        for answer in tuple(self._answers):  # closing a session doesn't wake readers of answers
            close_answer(answer)
        for session in self._sessions.values():
            await session.close()
        # If a request was cancelled during the TLS handshake, aiohttp forgets the connection, whose
        # socket closes later. Python warns of a socket that the event loop leaves open.
        await asyncio.sleep(0)
        for _ in range(round(CLOSE_TIMEOUT_S / CLOSE_POLL_S)):
            if all(one.fileno() < 0 for one in self._sockets):
                break
            await asyncio.sleep(CLOSE_POLL_S)
