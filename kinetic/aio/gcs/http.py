"""The connections of one store, and what every request over them has in common.

A bounded number at a time, limits for connecting and for silence but none for
the whole, one place where failures of the network become errors of ours, and
one more try with a fresh token when a token is refused.
"""

from __future__ import annotations

import asyncio
import datetime
import enum
import itertools
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kinetic._runner.protocol.gcs_names import Place
from kinetic.aio._net.http import HttpClient, HttpError, cut, proxy_for
from kinetic.aio._net.retry import Outage, RetryPolicy, is_retryable, retry
from kinetic.aio._net.tokens import Credentials, with_token
from kinetic.aio.ports import ObjectInfo
from kinetic.errors import (
    AuthError,
    BackendError,
    ConfigurationError,
    Conflict,
    NotFound,
    Throttled,
    Unavailable,
    WireError,
)

if TYPE_CHECKING:
    import aiohttp
    from gcloud.aio.storage import Storage


class Verb(enum.Enum):
    """What was to be done, and the permissions it takes."""

    CREATE = ("create", ("storage.objects.create",))
    REPLACE = ("replace", ("storage.objects.create", "storage.objects.delete"))
    GET = ("get", ("storage.objects.get",))
    LIST = ("list", ("storage.objects.list",))
    DELETE = ("delete", ("storage.objects.delete",))
    RENEW = ("renew", ("storage.objects.update",))


class Damaged(WireError):
    """Content arrived, here or there, as something else than was sent."""


RATE_LIMITS = ("rateLimitExceeded", "userRateLimitExceeded")


def is_passing(failure: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    return _is_limited(failure) or is_retryable(failure)


def _is_limited(failure: Exception) -> bool:
    """Whether it is a limit of requests that forbids."""
    if not isinstance(failure, HttpError) or failure.status != 403:
        return False
    try:
        return failure.body["error"]["errors"][0]["reason"] in RATE_LIMITS
    except (KeyError, IndexError, TypeError):
        return False


def is_damage(failure: Exception) -> bool:
    """Whether a content was not the same on both sides."""
    if isinstance(failure, HttpError):
        said = failure.text.lower()
        return failure.status == 400 and ("crc32c" in said or "md5" in said)
    return isinstance(failure, Damaged)


def explained(refusal: HttpError, verb: Verb, bucket: str, name: str) -> BackendError | WireError:
    """The error that says what failed, on what, and what to do next."""
    word, permissions = verb.value
    said = refusal.said
    what = f"cannot {word} {name!r} in gs://{bucket}"
    match refusal.status:
        case 400 if is_damage(refusal):
            return Damaged(f"{what}: what arrived there differs from what was sent ({said})")
        case 401:
            return AuthError(
                f"{what}: Google does not accept the access token ({said}); run "
                "`gcloud auth application-default login` again"
            )
        case 403 if not _is_limited(refusal):
            return AuthError(
                f"{what}: the credentials lack {' and '.join(permissions)} on gs://{bucket} "
                f"({said}); grant it: gcloud storage buckets add-iam-policy-binding "
                f"gs://{bucket} --member=user:YOU --role=roles/storage.objectUser"
            )
        case 404 if verb in (Verb.CREATE, Verb.LIST) or "bucket" in said.lower():
            return NotFound(
                f"{what}: there is no bucket gs://{bucket}; create it, or set KINETIC_STORE "
                "to one that exists"
            )
        case 404:
            return NotFound(f"there is no {name!r} in gs://{bucket}")
        case 409 | 412:
            return Conflict(f"{what}: somebody else changed it first")
        case 429 | 403:
            return Throttled(
                f"{what}: too many requests for Cloud Storage ({said}); try again later, with "
                "fewer at a time",
                retryable=True,
                retry_after=refusal.retry_after,
            )
        case status if refusal.retryable:
            return Unavailable(
                f"{what}: Cloud Storage answered {status} for too long ({said}); try again later",
                retryable=True,
                retry_after=refusal.retry_after,
            )
        case status:
            return BackendError(f"{what}: Cloud Storage answered {status} ({said})")


class Location(Place):
    """A bucket, or a folder of one."""

    __slots__ = ()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The place of ``gs://bucket`` or ``gs://bucket/folder``.

        Raises:
            ConfigurationError: It is no such URL.
        """
        try:
            return super().from_url(url)
        except ValueError as exc:
            raise ConfigurationError(f"{exc}, as in gs://my-project-jobs") from None

    def object_name(self, name: str) -> str:
        """What the object of *name*, or a prefix of names, is called in the bucket.

        Raises:
            BackendError: Cloud Storage allows no name of this length.
        """
        try:
            return super().object_name(name)
        except OSError as exc:
            raise BackendError(f"{exc}; use a shorter one") from None


T = TypeVar("T")

DAMAGED_TRIES = 3


def forgiving() -> Callable[[Exception], bool]:
    """For one piece of work: what may pass, and content that was damaged on its way, twice."""
    damaged = itertools.count(1)

    def may_pass(failure: Exception) -> bool:
        return next(damaged) < DAMAGED_TRIES if is_damage(failure) else is_passing(failure)

    return may_pass


ENDPOINT = "https://storage.googleapis.com"
EMULATOR = "STORAGE_EMULATOR_HOST"


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
    retry: RetryPolicy = field(default_factory=RetryPolicy)


class Http:
    """Requests about one bucket, on the event loop that made the first of them.

    Made in a worker thread it spares the loop the imports, which take 0.2 s.
    """

    def __init__(
        self, place: Location, endpoint: str | None, limits: Limits, *, authorized: bool
    ) -> None:
        import gcloud.aio.storage

        self.place = place
        self.limits = limits
        self._authorized = authorized
        self.endpoint = (endpoint or ENDPOINT).rstrip("/")
        self._http = HttpClient(
            f"the store {place.url}",
            connect_s=limits.connect_s,
            idle_s=limits.idle_s,
            proxy=proxy_for(self.endpoint) if authorized else None,
        )
        self.timeout: Any = self._http.timeout(limits.idle_s)
        self._new_storage = gcloud.aio.storage.Storage
        self._credentials = Credentials()
        self._storage: Storage | None = None
        self._outage = Outage("Cloud Storage")
        self._slots = asyncio.Semaphore(limits.connections)
        self._transfers = asyncio.Semaphore(limits.transfers)

    @property
    def storage(self) -> Storage:
        """The client library on our connections; pass it ``timeout`` and fresh dicts each time."""
        if self._storage is None:
            session: Any = self._session()  # the library's types say that it wants another one
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
        """Do *work*, again where that may help; its `HttpError`s are the caller's to explain.

        A *transfer* also waits until few enough others are under way.
        """
        self._http.check()
        what = f"cannot {verb.value[0]} {name!r} in {self.place.url}"

        async def once(_token: object = None) -> T:
            async with self._transfers if transfer else nullcontext(), self._slots:
                with self._http.translated(what, self.endpoint):
                    return await work()

        async def authorized() -> T:  # the token is for the library, which asks for it itself
            return await with_token(self._credentials, once)

        return await retry(
            authorized if self._authorized else once,
            self.limits.retry,
            self._outage,
            is_passing=forgiving(),
            progress=progress,
        )

    def explained(self, refusal: HttpError, verb: Verb, name: str) -> Exception:
        """What users see of *refusal*."""
        return explained(refusal, verb, self.place.bucket, name)

    def object_url(self, object_name: str) -> str:
        """Where the JSON API has an object."""
        return f"{self.endpoint}{self.object_path(object_name)}"

    def object_path(self, object_name: str) -> str:
        """The same without the server."""
        quoted = urllib.parse.quote(object_name, safe="")
        return f"/storage/v1/b/{self.place.bucket}/o/{quoted}"

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
            HttpError: Its status is 300 or more, and not among *accepted*.
        """
        from yarl import URL

        sent = {"Accept-Encoding": "identity", **(headers or {})}
        if self._authorized:
            sent["Authorization"] = f"Bearer {await self._credentials.get()}"
        # aiohttp repeats what failed on an old connection. A stream cannot be repeated.
        unrepeated = (_not_again,) if isinstance(data, AsyncIterable) else None
        request = self._session().request(
            method,
            URL(url, encoded=True),
            headers=sent,
            params=params,
            data=data,
            allow_redirects=False,
            middlewares=unrepeated,
        )
        answer = await self._http.answered(request, accepted)
        try:
            yield answer
        finally:
            cut(answer)

    def _session(self) -> aiohttp.ClientSession:
        return self._http.session(self.limits.connections)

    async def aclose(self) -> None:
        """Close all connections; what is under way fails."""
        await self._http.aclose()
        await self._credentials.aclose()


async def _not_again(
    request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    import aiohttp

    try:
        return await send(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as exc:
        raise aiohttp.ClientConnectionError(str(exc) or type(exc).__name__) from exc


NONCE = "kinetic-nonce"
"""The key of the metadata that says whose write an object is; users never see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What the bucket says of one object; ``size`` in bytes, ``used`` in seconds since 1970."""

    size: int
    generation: int
    crc32c: str
    metadata: Mapping[str, str]
    nonce: str
    used: float | None
    metageneration: int

    @classmethod
    def from_resource(cls, resource: Mapping[str, Any]) -> Described:
        """Read an object resource of the JSON API."""
        metadata = dict(resource.get("metadata") or {})
        nonce = metadata.pop(NONCE, "")
        return cls(
            size=int(resource.get("size", 0)),
            generation=int(resource["generation"]),
            crc32c=resource.get("crc32c", ""),
            metadata=metadata,
            nonce=nonce,
            used=_seconds(resource.get("customTime")),
            metageneration=int(resource.get("metageneration", 1)),
        )

    def info(self, name: str) -> ObjectInfo:
        """The same in the port's words."""
        return ObjectInfo(
            name=name,
            size=self.size,
            metadata=self.metadata,
            generation=self.generation,
            used=self.used,
            metageneration=self.metageneration,
        )


def _seconds(text: str | None) -> float | None:
    if not text:
        return None
    moment = datetime.datetime.fromisoformat(text)
    return moment.timestamp() if moment.year > 1 else None  # some servers have a time of nothing


async def described(http: Http, name: str) -> Described:
    """What there is under *name*.

    Raises:
        HttpError: There is nothing, or it may not be read.
    """
    object_name = http.place.object_name(name)

    async def work() -> Described:
        resource = await http.storage.download_metadata(
            http.place.bucket, object_name, timeout=http.timeout
        )
        return Described.from_resource(resource)

    return await http.do(Verb.GET, name, work)
