"""Send requests to one bucket through gcloud-aio-storage.

gcloud-aio-storage builds the requests. This module limits how many run at once, retries them,
renews a token that Google refuses, and turns the server's refusals into kinetic's errors.
"""

from __future__ import annotations

import asyncio
import copy
import datetime
import urllib.parse
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from kinetic._runner.protocol.gcs_names import BucketFolder
from kinetic.aio._net import google
from kinetic.aio._net.http import HttpClient, HttpError, proxy_for
from kinetic.aio._net.retry import NO_RETRIES, Outage, RetryPolicy, is_retryable, retry
from kinetic.aio._net.tokens import Credentials, with_token
from kinetic.aio.gcs import batch
from kinetic.aio.ports import ObjectInfo
from kinetic.errors import BackendError, ConfigurationError, Conflict, NotFound, WireError

if TYPE_CHECKING:
    import aiohttp
    from gcloud.aio.storage import Storage

T = TypeVar("T")

ENDPOINT = "https://storage.googleapis.com"
EMULATOR = "STORAGE_EMULATOR_HOST"

INCOMPLETE, ENDED = 308, 410
"""Statuses which say that an upload session has received only a part of the content, or has ended.
kinetic then continues the upload, or starts it again."""

PRECONDITION_FAILED = 412


Verb = Literal["create", "replace", "get", "list", "delete", "renew"]
"""An operation on an object, by its name in messages."""


class Location(BucketFolder):
    """A bucket, or a folder of one."""

    __slots__ = ()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Parse ``gs://bucket`` or ``gs://bucket/folder``.

        Raises:
            ConfigurationError: *url* names no bucket.
        """
        try:
            return super().from_url(url)
        except ValueError as exc:
            raise ConfigurationError(f"{exc}, as in gs://my-project-jobs") from None

    def object_name(self, name: str) -> str:
        """Return the full name in the bucket of the object *name*, or of a prefix of names.

        Raises:
            BackendError: The name is too long for Cloud Storage.
        """
        try:
            return super().object_name(name)
        except OSError as exc:
            raise BackendError(f"{exc}; use a shorter name") from None


class PlainLocation(Location):
    """A bucket, or a folder of one, whose objects' names aren't encoded."""

    __slots__ = ()

    def object_name(self, name: str) -> str:
        return self.folder + name

    def name(self, object_name: str) -> str | None:
        return object_name.removeprefix(self.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a store: concurrency, timeouts (seconds), and sizes (bytes).

    A connection without data in either direction for ``idle_s`` counts as dead.
    Content of at most ``piece_bytes`` is uploaded in one request. At most ``transfers``
    larger uploads, and downloads to files, run at once.
    """

    connections: int = 64
    transfers: int = 16
    connect_s: float = 10.0
    idle_s: float = 60.0
    piece_bytes: int = 1024 * 1024
    retry: RetryPolicy = field(default_factory=RetryPolicy)


ONE_TRY = Limits(retry=NO_RETRIES, idle_s=20.0)
"""The limits while a person waits; see `NO_RETRIES`."""


class BucketClient:
    """Sends requests to one bucket, on the event loop that makes the first request.

    The constructor imports libraries, which takes half a second. Call it in a worker thread, so
    that it doesn't block the event loop.
    """

    def __init__(
        self,
        location: Location,
        endpoint: str | None,
        limits: Limits,
        *,
        authorized: bool,
        billing_project: str | None,
    ) -> None:
        import gcloud.aio.storage

        self.location = location
        self.limits = limits
        self._authorized = authorized
        self._endpoint = (endpoint or ENDPOINT).rstrip("/")
        self._http = HttpClient(
            f"the store {location.url}",
            connect_s=limits.connect_s,
            idle_s=limits.idle_s,
            proxy=proxy_for(self._endpoint) if authorized else None,
            headers={"X-Goog-User-Project": billing_project} if billing_project else {},
        )
        self.timeout: Any = self._http.timeout(limits.idle_s)  # the library declares an int
        self._new_storage = gcloud.aio.storage.Storage
        self._credentials = Credentials()
        self._storage: Storage | None = None
        self._outage = Outage("Cloud Storage")
        self._requests = asyncio.Semaphore(limits.connections)
        self._transfers = asyncio.Semaphore(limits.transfers)

    @property
    def storage(self) -> Storage:
        """The library's client, on this object's connections. It modifies the dicts that it gets.

        `Credentials` replaces the library's token cache, which retries refused credentials five
        times, and which cancels all waiting callers when one of them is cancelled. `HttpError`
        replaces aiohttp's error, so that the library itself doesn't retry uploads.
        """
        if self._storage is None:
            session: Any = self._http.session(self.limits.connections, raise_for_status=True)
            token: Any = self._credentials  # the library calls only get()
            self._storage = self._new_storage(
                token=token,
                session=session,
                api_root=self._endpoint,
                api_is_dev=not self._authorized,
            )
        return self._storage

    async def perform(
        self,
        verb: Verb,
        name: str,
        work: Callable[[], Awaitable[T]],
        *,
        expected: Collection[int] = (),
        progress: Callable[[], object] | None = None,
    ) -> T:
        """Await ``work()``, the operation *verb* on object *name*, and retry temporary failures.

        A large transfer has a *progress*, which says how far it is. It waits while
        ``limits.transfers`` others run. The time limit of retries starts again with each progress.

        Raises:
            HttpError: The server answered with a status in *expected*, and not for another reason
                that kinetic knows, such as a policy.
            NotFound: The object, or the bucket, doesn't exist.
            AuthError: Credentials or a permission are missing.
            Refused: A policy, a key, or the bucket's settings forbid the request.
            Unavailable: The service didn't answer in time.
        """
        self._http.check_usable()
        problem = f"cannot {verb} {name!r} in {self.location.url}"

        async def send_once(_token: object = None) -> T:  # `work` asks `Credentials` for the token
            async with self._transfers if progress else nullcontext(), self._requests:
                with self._http.translate_errors(problem, self._endpoint):
                    return await work()

        async def send_with_token() -> T:
            return await with_token(self._credentials, send_once)

        try:
            return await retry(
                send_with_token if self._authorized else send_once,
                self.limits.retry,
                self._outage,
                should_retry=_should_retry,
                progress=progress,
            )
        except HttpError as refusal:
            # The same status also refuses a request that a policy or a key forbids.
            is_other = refusal.status in (400, 412) and google.refusal_advice(refusal)
            if refusal.status in expected and not is_other:
                raise
            raise refusal_error(refusal, verb, self.location.bucket, name) from None

    async def send(
        self, method: str, url: str, headers: Mapping[str, str], **content: Any
    ) -> aiohttp.ClientResponse:
        """Send a request that the library can't. Call it only within `perform`, which retries.

        *url* may be a path of the service.
        """
        if self._authorized:
            headers = {**headers, "Authorization": f"Bearer {await self._credentials.get()}"}
        return await self._http.session(self.limits.connections, raise_for_status=True).request(
            method,
            self._endpoint + url if url.startswith("/") else url,
            headers=headers,
            timeout=self.timeout,
            allow_redirects=False,  # 308 is `INCOMPLETE`
            **content,
        )

    async def send_batch(self, verb: Verb, requests: Sequence[batch.Request]) -> list[batch.Answer]:
        """Send up to `batch.MAX_REQUESTS` requests as one; return the answer to each.

        The list is empty if the service, or an emulator, refuses requests of this kind. The caller
        then sends each request by itself, which shows the cause.
        """
        content_type = {"Content-Type": batch.CONTENT_TYPE}

        async def send() -> list[batch.Answer]:
            data = batch.encode(requests)
            answer = await self.send("POST", batch.PATH, content_type, data=data)
            content = await answer.read()
            with suppress(ValueError):  # an emulator answers something else
                return batch.decode(answer.headers.get("Content-Type", ""), content)
            return []

        name = f"{len(requests)} objects"
        try:
            answers = await self.perform(verb, name, send, expected=range(400, 500))
        except HttpError:
            return []
        return answers if len(answers) == len(requests) else []

    def object_path(self, name: str, query: Mapping[str, str]) -> str:
        """Return the path of the object *name* for a request in a batch."""
        bucket, object_name = (urllib.parse.quote(part, safe="") for part in self.place(name))
        path = f"/storage/v1/b/{bucket}/o/{object_name}"
        return f"{path}?{urllib.parse.urlencode(query)}" if query else path

    def plain(self) -> BucketClient:
        """Return a client with the connections of this one, which doesn't encode names."""
        plain = copy.copy(self)
        plain._storage = self.storage  # which opens the connections, if it's the first use
        plain.location = PlainLocation(self.location.bucket, self.location.folder)
        return plain

    def place(self, name: str) -> tuple[str, str]:
        """Return the bucket of the object *name*, and its full name there."""
        return self.location.bucket, self.location.object_name(name)

    async def read_metadata_once(self, name: str) -> ObjectMetadata:
        """Read an object's metadata. Call it only within `perform`, which retries."""
        resource = await self.storage.download_metadata(*self.place(name), timeout=self.timeout)
        return ObjectMetadata.from_resource(name, resource)

    async def read_metadata(self, name: str) -> ObjectMetadata:
        """Read an object's metadata, with retries.

        Raises:
            NotFound: The object doesn't exist.
        """
        return await self.perform("get", name, lambda: self.read_metadata_once(name))

    async def aclose(self) -> None:
        """Close all connections; requests in progress fail."""
        await self._http.aclose()
        await self._credentials.aclose()


def _should_retry(failure: Exception) -> bool:
    """Return whether *failure* is temporary, or the content was lost or damaged on the way."""
    if isinstance(failure, HttpError):
        must_resend = failure.status in (INCOMPLETE, ENDED) or _is_damaged(failure)
        return must_resend or failure.retryable or google.is_rate_limited(failure)
    return is_retryable(failure) or isinstance(failure, WireError)


def _is_damaged(refusal: HttpError) -> bool:
    text = refusal.text.lower()
    return refusal.status == 400 and ("crc32c" in text or "md5" in text)


def refusal_error(
    refusal: HttpError, verb: Verb, bucket: str, name: str
) -> BackendError | WireError:
    """Return kinetic's error for *refusal*; it says what failed and what to do next."""
    message = refusal.message
    problem = f"cannot {verb} {name!r} in gs://{bucket}"
    match refusal.status:
        case 400 if _is_damaged(refusal):
            return WireError(
                f"{problem}: checksum mismatch on upload ({message}); check the network"
            )
        case 404 if verb in ("create", "list") or "bucket does not exist" in message:
            return NotFound(
                f"{problem}: there is no bucket gs://{bucket}; create it, or set KINETIC_STORE "
                "to one that exists"
            )
        case 404:
            return NotFound(f"there is no {name!r} in gs://{bucket}")
        case 409 | 412 if not google.refusal_advice(refusal):
            return Conflict(f"{problem}: another process changed it first ({message})")
        case _:
            return google.refusal_error(
                refusal,
                problem,
                "Cloud Storage",
                api="storage",
                how_to_grant="grant the role: gcloud storage buckets add-iam-policy-binding "
                f"gs://{bucket} --member=user:YOU --role=roles/storage.objectUser",
            )


NONCE = "kinetic-nonce"
"""The metadata key of a random value that is new for each write; users never see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectMetadata:
    """The metadata that the bucket returns for one object."""

    info: ObjectInfo
    crc32c: str
    nonce: str

    @classmethod
    def from_resource(cls, name: str, resource: Mapping[str, Any]) -> ObjectMetadata:
        """Parse *resource*, an object resource of the JSON API."""
        metadata = dict(resource.get("metadata") or {})
        nonce = metadata.pop(NONCE, "")
        info = ObjectInfo(
            name=name,
            size=int(resource.get("size", 0)),
            metadata=metadata,
            generation=int(resource["generation"]),
            used=_timestamp(resource.get("customTime")) or _timestamp(resource.get("timeCreated")),
            metageneration=int(resource.get("metageneration", 1)),
        )
        return cls(info=info, crc32c=resource.get("crc32c", ""), nonce=nonce)


def _timestamp(text: str | None) -> float | None:
    """Return a time of an object in seconds since the epoch; None if it isn't set."""
    if not text:
        return None
    time = datetime.datetime.fromisoformat(text)
    # Some servers send a time in year 1 if none is set.
    return time.timestamp() if time.year > 1 else None
