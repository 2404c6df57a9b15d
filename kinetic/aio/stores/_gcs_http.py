"""The connections of one store, and what every request over them has in common.

A bounded number at a time, limits for connecting and for silence but none for
the whole, one place where failures of the network become errors of ours, and
one more try with a fresh token when a token is refused.
"""

from __future__ import annotations

import asyncio
import ssl
import urllib.parse
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from kinetic.aio._credentials import Credentials
from kinetic.aio._retry_after import retry_after
from kinetic.aio._sockets import Sockets
from kinetic.aio.stores._gcs_errors import Refusal, Verb, explained
from kinetic.aio.stores._gcs_names import Location
from kinetic.aio.stores._gcs_retry import Patience, persist
from kinetic.errors import BackendError, ClientClosed, KineticError, Unavailable

if TYPE_CHECKING:
    import aiohttp
    from gcloud.aio.storage import Storage

__all__ = ["EMULATOR", "Http", "Limits"]

T = TypeVar("T")

ENDPOINT = "https://storage.googleapis.com"
EMULATOR = "STORAGE_EMULATOR_HOST"
KEEPALIVE_S = 60.0
ERROR_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a store does at a time and how long it waits; seconds and bytes.

    ``idle_s`` is the silence after which a connection counts as dead: no answer,
    or none of the next ``piece_bytes`` taken. A content of up to one piece goes
    in one request; a download of more than one part comes in ``parts`` streams.
    """

    connections: int = 64
    transfers: int = 16
    parts: int = 4
    connect_s: float = 10.0
    idle_s: float = 60.0
    piece_bytes: int = 1024 * 1024
    part_bytes: int = 32 * 1024 * 1024
    page: int = 1000
    patience: Patience = field(default_factory=Patience)


class Http:
    """Requests about one bucket, on the event loop that made the first of them.

    Made in a worker thread it spares the loop the imports, which take 0.2 s.
    """

    def __init__(
        self, place: Location, endpoint: str | None, limits: Limits, *, authorized: bool
    ) -> None:
        import aiohttp
        import gcloud.aio.storage

        self.place = place
        self.limits = limits
        self._authorized = authorized
        self.endpoint = (endpoint or ENDPOINT).rstrip("/")
        self.timeout: Any = aiohttp.ClientTimeout(
            total=None,
            connect=3 * limits.connect_s,  # with the look-up of the name, which has no limit itself
            sock_connect=limits.connect_s,
            sock_read=limits.idle_s,
        )
        self._new_storage = gcloud.aio.storage.Storage
        self._credentials = Credentials()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._storage: Storage | None = None
        self._sockets = Sockets()
        self._slots = asyncio.Semaphore(limits.connections)
        self._transfers = asyncio.Semaphore(limits.transfers)
        self._closed = False

    @property
    def storage(self) -> Storage:
        """The client library on our connections; pass it ``timeout`` and fresh dicts each time."""
        if self._storage is None:
            session: Any = self._open()  # the library's types say that it wants another one
            self._storage = self._new_storage(
                token=self._credentials,  # type: ignore[arg-type] # all it calls is get()
                session=session,
                api_root=self.endpoint,
                api_is_dev=not self._authorized,
            )
        return self._storage

    async def do(
        self,
        verb: Verb,
        name: str,
        work: Callable[[], Awaitable[T]],
        *,
        progress: Callable[[], int] | None = None,
        transfer: bool = False,
    ) -> T:
        """Do *work*, again where that may help; its `Refusal`s are the caller's to explain.

        A *transfer* also waits until few enough others are under way.
        """

        self._check()

        async def once() -> T:
            async with self._transfers if transfer else nullcontext(), self._slots:
                with self._translated(verb, name):
                    return await work()

        async def with_a_token() -> T:
            token = self._credentials.last
            try:
                return await once()
            except Refusal as refusal:
                if refusal.status != 401 or not self._authorized:
                    raise
            self._credentials.forget(token or self._credentials.last)
            return await once()

        what = f"{verb.value[0]} {name}"
        return await persist(with_a_token, self.limits.patience, what=what, progress=progress)

    def explained(self, refusal: Refusal, verb: Verb, name: str) -> Exception:
        """What users see of *refusal*."""
        return explained(refusal, verb, self.place.bucket, name)

    def object_url(self, object_name: str) -> str:
        """Where the JSON API has an object."""
        quoted = urllib.parse.quote(object_name, safe="")
        return f"{self.endpoint}/storage/v1/b/{self.place.bucket}/o/{quoted}"

    @asynccontextmanager
    async def response(
        self,
        method: str,
        url: str,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        data: bytes | AsyncIterable[bytes] | None = None,
        accepted: tuple[int, ...] = (),
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The answer to one request, for what the client library has no method.

        Raises:
            Refusal: Its status is 300 or more, and not among *accepted*.
        """
        from yarl import URL

        sent = {"Accept-Encoding": "identity", **(headers or {})}
        session = self.storage.session
        if self._authorized:
            sent["Authorization"] = f"Bearer {await self._credentials.get()}"
        # aiohttp repeats what failed on an old connection. A stream cannot be repeated.
        extra = {"middlewares": (_not_again,)} if isinstance(data, AsyncIterable) else {}
        answer = await session.request(
            method,
            URL(url, encoded=True),  # type: ignore[arg-type] # aiohttp's own, left as it is
            sent,
            auto_raise_for_status=False,
            params=params,
            data=data,
            timeout=self.timeout,
            allow_redirects=False,
            **extra,
        )
        self._sockets.read(answer)
        async with answer:
            if answer.status >= 300 and answer.status not in accepted:
                said = (await answer.content.read(ERROR_BYTES)).decode(errors="replace")
                raise Refusal(answer.status, said, retry_after(answer.headers.get("Retry-After")))
            yield answer

    async def aclose(self) -> None:
        """Close all connections; what is under way fails."""
        self._closed = True
        self._sockets.hang_up()
        if self._session is not None:
            await self._session.close()
        await self._sockets.closed()
        await self._credentials.aclose()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._closed:
            raise ClientClosed(f"the store {self.place.url} is closed; open another")
        if loop is not self._loop:
            raise BackendError(
                f"the store {self.place.url} belongs to another event loop; open one of its own"
            )

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self.limits.connections,
                    keepalive_timeout=KEEPALIVE_S,
                    socket_factory=self._sockets.make,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self.timeout,
                headers={"User-Agent": "kinetic-aio"},
                # Asked for once: aiohttp would read the environment again for each request.
                proxy=_proxy(self.endpoint) if self._authorized else None,
            )
        return self._session

    @contextmanager
    def _translated(self, verb: Verb, name: str) -> Generator[None]:
        """Failures of the library and of the network as `Refusal`, or as errors of ours."""
        import aiohttp

        what = f"cannot {verb.value[0]} {name!r} in {self.place.url}"
        try:
            yield
        except aiohttp.ClientResponseError as exc:
            wish = retry_after(exc.headers.get("Retry-After") if exc.headers else None)
            raise Refusal(exc.status, exc.message, wish) from exc
        except aiohttp.ClientSSLError as exc:
            raise BackendError(
                f"{what}: no trusted connection to {self.endpoint} ({exc}); check the clock, the "
                "proxy and the certificates of this machine",
                # Cut during the handshake it is like any other connection.
                retryable=isinstance(getattr(exc, "os_error", None), ssl.SSLEOFError),
            ) from exc
        except (aiohttp.ClientError, TimeoutError, OSError, LookupError, ValueError) as exc:
            if isinstance(exc, KineticError):
                raise
            if self._closed:
                raise ClientClosed(f"{what}: the store was closed meanwhile") from exc
            words = str(exc) or type(exc).__name__
            raise Unavailable(
                f"{what}: {self.endpoint} does not answer as it should ({words}); check the "
                "network",
                retryable=True,
            ) from exc
        except Exception as exc:
            if not self._closed or isinstance(exc, KineticError | Refusal):
                raise
            # aiohttp has several words for a session that was closed, some of them assertions.
            raise ClientClosed(f"{what}: the store was closed meanwhile") from exc


async def _not_again(
    request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    import aiohttp

    try:
        return await send(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as exc:
        raise aiohttp.ClientConnectionError(str(exc) or type(exc).__name__) from exc


def _proxy(endpoint: str) -> str | None:
    parts = urllib.parse.urlsplit(endpoint)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    return urllib.request.getproxies().get(parts.scheme)
