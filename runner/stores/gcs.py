"""Read and write a store's objects in a Cloud Storage bucket, from a job in the cloud.

google-cloud-storage transfers, retries, and checks contents. This module adds names,
preconditions, and errors that say what to do. A request that creates an object requires that the
object doesn't exist, and puts a random nonce into its metadata. If the reply is lost, the nonce
tells which writer created the object. The client writes objects in the same way
(`kinetic.aio.gcs`).
"""

from __future__ import annotations

import http.client
import importlib
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..job_log import say
from ..pauses import pauses
from ..protocol import google_refusals, wire
from ..protocol.gcs_names import BucketFolder
from .directory import Listing, Stored

T = TypeVar("T")

EMULATOR = "STORAGE_EMULATOR_HOST"
OVERRIDE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE"
"""The variable that sets another address of Cloud Storage; Google's own tools also read it."""

NONCE = "kinetic-nonce"
CONTENT_TYPE = "application/octet-stream"
FIELDS = "nextPageToken,items(name,size,generation,metadata,crc32c,contentEncoding)"
CONNECTIONS = 64

BUCKET_MISSING = "bucket does not exist"
"""The service's answer has this text if the bucket itself is missing."""

UPLOAD_BYTES = 16 * 1024 * 1024
"""How many bytes one request of a resumable upload sends; the library holds them in memory."""

PART_BYTES = 32 * 1024 * 1024
CONCURRENT_PARTS = 8
"""The size of a part of a large object, and how many parts to download at once."""

TRIES = 3
"""How often to try a transfer whose content arrives damaged or whose session is lost."""

NEW_POD_S = 45.0
"""How long, in seconds, a node's metadata server may take to know a new pod."""

LOG_AFTER_S = 10.0
"""How long, in seconds, a request may fail before the job's log says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Time limits of one operation, in seconds.

    ``total_s`` limits all retries together. The pause before the first retry is ``first_s``, and
    later pauses grow up to ``longest_s``. ``connect_s`` limits the connecting, and ``idle_s`` the
    wait for the next bytes of the server.
    """

    total_s: float = 600.0
    first_s: float = 0.2
    longest_s: float = 10.0
    connect_s: float = 10.0
    idle_s: float = 60.0


class StorageError(OSError):
    """Cloud Storage, or the network, failed permanently or for longer than the retries last."""


class StorageTimeout(StorageError, TimeoutError):
    """Cloud Storage, or the network, failed for longer than the retries last; this may pass."""


class StorageDenied(StorageTimeout):
    """Cloud Storage denied a right. An administrator may have removed it by mistake for a while."""


class Bucket:
    """A bucket; any number of threads may use it.

    Methods raise `StorageError` after a failure, and `KeyError` for a missing object.

    Raises:
        StorageError: A library is missing, or there are no credentials.
    """

    def __init__(
        self,
        location: BucketFolder,
        environ: Mapping[str, str] = os.environ,
        limits: Limits | None = None,
    ) -> None:
        self.location = location
        self._limits = limits or Limits()
        self._timeout = (self._limits.connect_s, self._limits.idle_s)
        self._storage = _import_library("google.cloud.storage")
        self._errors = _import_library("google.api_core.exceptions")
        self._auth = _import_library("google.auth.exceptions")
        self._requests = _import_library("requests")
        network_errors = _import_library("urllib3.exceptions")
        # google-cloud-storage 3.0 and later raises a subclass of this error.
        self._corrupt: type[Exception] = _import_library("google.resumable_media").DataCorruption
        self._failures: tuple[type[Exception], ...] = (
            self._errors.GoogleAPIError,
            self._auth.GoogleAuthError,
            self._corrupt,
            self._requests.exceptions.RequestException,
            network_errors.HTTPError,
            http.client.HTTPException,
            ConnectionError,
        )
        client = self._client = self._open_client(environ)
        self._connect()
        weakref.finalize(self, lambda: client._http.close())
        billing_project = environ.get(wire.BILLING_PROJECT) or None
        self._bucket = self._client.bucket(location.bucket, user_project=billing_project)

    def _open_client(self, environ: Mapping[str, str]) -> Any:
        """Open the library's client; *environ* may name an emulator or another address."""
        emulator = environ.get(EMULATOR, "")
        if emulator and "://" not in emulator:
            emulator = f"http://{emulator}"
        override = environ.get(OVERRIDE, "").rstrip("/").removesuffix("/storage/v1")
        endpoint = (emulator or override).rstrip("/")
        options: dict[str, Any] = {"client_options": {"api_endpoint": endpoint}} if endpoint else {}
        if emulator:
            anonymous = _import_library("google.auth.credentials").AnonymousCredentials()
            client = self._storage.Client("kinetic", anonymous, **options)
        else:
            client = self._retry_until_known(lambda: self._storage.Client("kinetic", **options))
        # Without this, the library sends one more request per process, for its traces.
        client._bucket_metadata_cache = None
        return client

    def _connect(self) -> None:
        """Begin with new connections: a fork must not use those of its parent."""
        self._pid = os.getpid()
        self._client._http_internal = None  # the library makes another session
        adapter = self._requests.adapters.HTTPAdapter(pool_maxsize=CONNECTIONS)
        for scheme in ("http://", "https://"):
            self._client._http.mount(scheme, adapter)

    def _retry_until_known(self, make: Callable[[], T]) -> T:
        """Call *make*; in a new pod, retry until the node's metadata server knows the pod."""
        limit_s = NEW_POD_S if "KUBERNETES_SERVICE_HOST" in os.environ else 0.0
        deadline = float(os.environ.get("KINETIC_POD_BEGAN") or time.monotonic()) + limit_s
        for pause in pauses(0.2, 2.0):
            try:
                return make()
            except self._auth.DefaultCredentialsError as exc:
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"there are no credentials for Cloud Storage here ({exc}); give the pods' "
                        "service account access to the bucket (Workload Identity)"
                    ) from exc
            time.sleep(pause)
        raise AssertionError("pauses() has no end")

    # --- operations ---

    def blob(self, object_name: str) -> Any:
        """Return an object by its name in the bucket, without a request."""
        return self._bucket.blob(object_name)

    def find(self, object_name: str) -> Any:
        """Return an object with its metadata; None if it doesn't exist."""
        return self._call(
            f"look at {self._url(object_name)}",
            lambda options: self._bucket.get_blob(object_name, **options),
        )

    def list(self, prefix: str) -> Iterator[Any]:
        """Yield the objects whose names start with *prefix*."""

        def first_page(options: Mapping[str, Any]) -> Any:
            return self._bucket.list_blobs(prefix=prefix, fields=FIELDS, **options)

        operation = f"list {self._url(prefix)}"
        with self._translate_errors(operation):
            yield from self._call(operation, first_page)

    def write(
        self,
        object_name: str,
        body: bytes | Path,
        *,
        metadata: Mapping[str, str],
        only_if_absent: bool,
    ) -> bool:
        """Write an object; with *only_if_absent*, don't overwrite, and return False if it exists.

        An object above 8 MiB takes several requests.
        """
        condition = {"if_generation_match": 0} if only_if_absent else {}
        nonce = secrets.token_hex(8)
        blob = self._bucket.blob(object_name, chunk_size=UPLOAD_BYTES)

        def upload(options: Mapping[str, Any]) -> bool:
            if only_if_absent:
                blob.metadata = {**metadata, NONCE: nonce}
            options = {**options, **condition, "content_type": CONTENT_TYPE, "checksum": "crc32c"}
            try:
                if isinstance(body, Path):
                    blob.upload_from_filename(str(body), **options)
                else:
                    blob.upload_from_string(body, **options)
            except self._errors.PreconditionFailed:
                # An earlier try, whose reply was lost, may have created the object. If the object
                # is absent, the service refuses for another reason, such as a policy.
                if (existing := self.find(object_name)) is None:
                    raise
                return bool(existing.metadata) and existing.metadata.get(NONCE) == nonce
            return True

        return self._call(f"write {self._url(object_name)}", upload)

    def read(self, object_name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the content, or its bytes from *start* to *stop*."""
        blob = self.blob(object_name)
        end = None if stop is None else stop - 1

        def download(options: Mapping[str, Any]) -> bytes:
            try:
                checksum = "crc32c" if start is None and stop is None else None
                content: bytes = blob.download_as_bytes(
                    start=start, end=end, checksum=checksum, **options
                )
            except self._errors.RequestRangeNotSatisfiable:  # the object ends before *start*
                return b""
            return content

        return self._call(f"read {self._url(object_name)}", download)

    def fetch(self, blob: Any, path: Path) -> None:
        """Write the content to a new file at *path*; remove the file after a failure.

        If the object is known to be large, download several parts of it concurrently.

        Raises:
            FileExistsError: *path* already exists.
        """
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        is_large = (blob.size or 0) > PART_BYTES and not blob.content_encoding

        def download(options: Mapping[str, Any]) -> None:
            if is_large:
                transfers = _import_library("google.cloud.storage.transfer_manager")
                transfers.download_chunks_concurrently(
                    blob,
                    str(path),
                    chunk_size=PART_BYTES,
                    max_workers=CONCURRENT_PARTS,
                    worker_type="thread",
                    download_kwargs=dict(options),
                )
            else:
                with path.open("wb") as file:
                    blob.download_to_file(file, checksum="crc32c", **options)

        try:
            self._call(f"read {self._url(blob.name)}", download)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def delete(self, object_name: str) -> None:
        """Delete an object, if it exists."""
        blob = self.blob(object_name)
        with suppress(KeyError):
            self._call(f"delete {self._url(object_name)}", lambda options: blob.delete(**options))

    # --- retries and errors ---

    def _call(self, operation: str, request: Callable[[Mapping[str, Any]], T]) -> T:
        """Make a *request*; repeat it if content arrives damaged, or an upload session is lost."""
        if os.getpid() != self._pid:  # a fork can't use the connections of its parent
            self._connect()
        with self._translate_errors(operation):
            for _ in range(TRIES - 1):
                try:
                    return request(self._call_options(operation))
                except self._corrupt:
                    continue
                except self._errors.GoogleAPICallError as exc:
                    damaged = exc.code == 400 and "crc32c" in str(exc).lower()
                    # An object that is written needs not exist, so what is missing is the session.
                    lost = exc.code == 410 or (exc.code == 404 and operation.startswith("write "))
                    if not damaged and (not lost or BUCKET_MISSING in str(exc)):
                        raise
            return request(self._call_options(operation))

    def _call_options(self, operation: str) -> dict[str, Any]:
        """Return the timeout and the retry policy for one call of the library."""
        limits, began = self._limits, time.monotonic()
        warned = False

        def should_retry(exc: Exception) -> bool:
            nonlocal warned
            is_temporary = self._is_temporary(exc)
            if is_temporary and not warned and time.monotonic() - began > LOG_AFTER_S:
                warned = True
                say(f"cannot {operation}: {exc}; retrying")
            return is_temporary

        retry = _import_library("google.api_core.retry").Retry(
            should_retry, initial=limits.first_s, maximum=limits.longest_s, timeout=limits.total_s
        )
        return {"retry": retry, "timeout": self._timeout}

    def _is_temporary(self, exc: Exception) -> bool:
        """Return whether another try may succeed after *exc*."""
        response: Any = getattr(exc, "response", None)
        with suppress(Exception):
            response.content  # noqa: B018 - reading it gives the connection back
        if isinstance(exc, self._auth.GoogleAuthError):
            # A metadata server that doesn't know the pod yet fails in many ways.
            return (
                isinstance(exc, self._auth.TransportError)
                or bool(getattr(exc, "retryable", False))
                or "metadata" in str(exc).lower()
            )
        if isinstance(exc, self._requests.exceptions.SSLError):
            return "EOF occurred" in str(exc)  # the handshake was cut off
        is_temporary: bool = self._storage.retry.DEFAULT_RETRY._predicate(exc)
        return is_temporary

    @contextmanager
    def _translate_errors(self, operation: str) -> Generator[None]:
        """Raise KeyError for a missing object, and `StorageError` for all errors of the library."""
        try:
            yield
        except self._errors.NotFound as exc:
            if BUCKET_MISSING in str(exc) or operation.startswith("write "):  # else the object
                raise self._as_storage_error(operation, exc) from exc
            raise KeyError(operation.partition(" ")[2]) from exc
        except self._failures as exc:
            cause = getattr(exc, "cause", None)  # a RetryError has the last failure
            kind = StorageTimeout if isinstance(exc, self._errors.RetryError) else StorageError
            kind = StorageDenied if isinstance(exc, self._errors.Forbidden) else kind
            raise self._as_storage_error(operation, cause or exc, kind) from exc

    def _as_storage_error(
        self, operation: str, exc: Any, kind: type[StorageError] = StorageError
    ) -> StorageError:
        """Return *exc* as an error of *kind* whose message says what to do."""
        advice, message, reasons = "", str(exc), frozenset[str]()
        if isinstance(exc, self._errors.GoogleAPICallError) and exc.response is not None:
            with suppress(KeyError, TypeError, ValueError):
                error = exc.response.json()["error"]
                reasons, message = google_refusals.reasons(error), str(error["message"])
            text = " ".join((*sorted(reasons), message))
            right = google_refusals.missing_permission("storage", text)
            if exc.code == 403 and right:
                advice = (
                    f"; the pods' service account lacks {right}: grant it roles/storage.objectUser "
                    "on the bucket"
                )
            elif exc.code == 404:
                advice = (
                    f"; check that gs://{self.location.bucket} exists, and that the job may read it"
                )
            elif known := google_refusals.advice(text):
                advice = f"; {known}"
            elif exc.code == 403:
                advice = "; check what the bucket requires of the pods' service account"
            message = f"Cloud Storage answered {exc.code} ({message})"
        elif isinstance(exc, self._corrupt):
            advice = "; checksum mismatch: check the network"
        return kind(f"cannot {operation}: {' '.join(message.split())[:500]}{advice}")

    def _url(self, object_name: str) -> str:
        return f"gs://{self.location.bucket}/{object_name}"


class GcsObjects:
    """Objects in ``gs://bucket`` or ``gs://bucket/folder``. Safe for any number of threads.

    A missing object raises ``KeyError`` with its name. Every other failure raises ``OSError``. If
    the failure may be temporary, the class retries for ten minutes first.
    """

    def __init__(
        self, url: str, environ: Mapping[str, str] = os.environ, limits: Limits | None = None
    ) -> None:
        self._location = BucketFolder.from_url(url)
        self._bucket = Bucket(self._location, environ, limits)

    @property
    def url(self) -> str:
        """The URL of this store for other processes."""
        return self._location.url

    def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        consume: bool = False,
    ) -> bool:
        """Create *name* if it is absent; return False if it exists. *consume* has no effect."""
        object_name = self._location.object_name(name)
        return self._bucket.write(object_name, body, metadata=metadata or {}, only_if_absent=True)

    def get(
        self, name: str, start: int | None = None, stop: int | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        """Return the content, or its bytes from *start* to *stop*, without metadata; see `stat`."""
        if stop is not None and stop <= (start or 0):  # HTTP has no empty range
            self.stat(name)
            return b"", {}
        return self._bucket.read(self._location.object_name(name), start, stop), {}

    def fetch(self, name: str, path: Path, size: int = 0) -> None:
        """Write the content, of *size* bytes if that is known, to a new file in constant memory."""
        object_name = self._location.object_name(name)
        # Each part of a large object is a request with its own time limit.
        found = size > PART_BYTES and self._bucket.find(object_name)
        self._bucket.fetch(found or self._bucket.blob(object_name), path)

    def path(self, name: str) -> Path | None:
        """Return None: no object of a bucket is a local file."""
        return None

    def stat(self, name: str) -> Stored:
        """Return the entry of one object."""
        blob = self._bucket.find(self._location.object_name(name))
        if blob is None:
            raise KeyError(name)
        return _entry(name, blob)

    def exists(self, name: str) -> bool:
        """Return whether the object exists."""
        return self._bucket.find(self._location.object_name(name)) is not None

    def list(self, prefix: str) -> Listing:
        """Return all objects whose names start with *prefix*, sorted by name."""
        found = [
            _entry(name, blob)
            for blob in self._bucket.list(self._location.object_name(prefix))
            if (name := self._location.name(blob.name)) is not None
        ]
        return sorted(found, key=lambda entry: entry.name)

    def look_up(self, names: Iterable[str]) -> Listing:
        """Return the objects among *names* that exist, by one listing of their common prefix."""
        wanted = set(names)
        if not wanted:
            return []
        common = os.path.commonprefix([*wanted])  # noqa: RUF071 - names share characters, not folders
        return [entry for entry in self.list(common) if entry.name in wanted]

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects. A missing object counts as deleted."""
        for name in names:
            self._bucket.delete(self._location.object_name(name))


def _entry(name: str, blob: Any) -> Stored:
    metadata = dict(blob.metadata or {})
    metadata.pop(NONCE, None)
    return Stored(name, blob.size or 0, metadata, int(blob.generation))


def _import_library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise StorageError(
            f"{sys.executable} lacks {exc.name!r}, which Cloud Storage needs; install "
            "google-cloud-storage for this Python, on a cluster in the job's image"
        ) from exc
