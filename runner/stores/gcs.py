"""The objects of a store in a bucket of Google Cloud Storage, as a job in the cloud uses them.

Every write carries the precondition that there is no such object, and a random
nonce in its hidden metadata: of a write whose reply was lost one finds out
afterwards whose it was. The client's adapter does the same.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import importlib
import json
import os
import random
import re
import secrets
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..protocol.gcs_names import Place
from .directory import Stored

__all__ = [
    "EMULATOR",
    "NONCE",
    "Answer",
    "GcsObjects",
    "Http",
    "Patience",
    "Refused",
    "Trouble",
    "Upload",
    "checksum",
    "download",
    "overwrite",
    "persist",
]


T = TypeVar("T")

ENDPOINT = "https://storage.googleapis.com"
EMULATOR = "STORAGE_EMULATOR_HOST"
OVERRIDE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE"
"""Another address of the service itself, as Google's own tools have it."""

SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
PASSING = frozenset({408, 429, 500, 502, 503, 504})
RATE_LIMITS = ("rateLimitExceeded", "userRateLimitExceeded")
CONNECTIONS = 64
YOUNG_S = 45.0
QUIET_S = 10.0
"""Failing for longer than this is said in the job's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds: how long to go on without progress, the bounds of a random wait, and of silence."""

    total_s: float = 600.0
    first_s: float = 0.2
    longest_s: float = 10.0
    connect_s: float = 10.0
    idle_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; the content is whole."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    def json(self) -> dict[str, Any]:
        """The content decoded."""
        decoded: dict[str, Any] = json.loads(self.content)
        return decoded


class Trouble(OSError):
    """Cloud Storage, or the way to it, does not do what is needed; ``passing`` as it is now."""

    def __init__(self, words: str, *, passing: bool = False) -> None:
        super().__init__(words)
        self.passing = passing


class Refused(Trouble):
    """An answer that is none of those expected; ``wait_s`` is the server's own wish."""

    def __init__(self, what: str, status: int, text: str, wait_s: float | None = None) -> None:
        limited = status == 403 and _reason(text) in RATE_LIMITS
        words = f"cannot {what}: Cloud Storage answered {status} ({_said(text)})"
        super().__init__(words + _advice(status, limited), passing=limited or status in PASSING)
        self.status = status
        self.wait_s = wait_s
        self.about_bucket = status == 404 and "bucket" in _said(text).lower()
        said = text.lower()
        self.damaged = status == 400 and ("crc32c" in said or "md5" in said)


class Http:
    """Requests about one bucket, from any number of threads."""

    def __init__(
        self,
        place: Place,
        environ: Mapping[str, str] = os.environ,
        patience: Patience | None = None,
    ) -> None:
        self.place = place
        self.patience = patience or Patience()
        emulator = environ.get(EMULATOR, "")
        if emulator and "://" not in emulator:
            emulator = f"http://{emulator}"
        other = environ.get(OVERRIDE, "").rstrip("/").removesuffix("/storage/v1")
        self.endpoint = (emulator or other or ENDPOINT).rstrip("/")
        self._requests: Any = _library("requests")
        self._tokens = None if emulator else _Tokens()
        self._session = self._opened()

    def url(self, object_name: str | None = None) -> str:
        """Where the JSON API has the bucket's objects, or one of them."""
        objects = f"{self.endpoint}/storage/v1/b/{self.place.bucket}/o"
        if object_name is None:
            return objects
        return f"{objects}/{urllib.parse.quote(object_name, safe='')}"

    @property
    def upload_url(self) -> str:
        """Where new objects are sent."""
        return f"{self.endpoint}/upload/storage/v1/b/{self.place.bucket}/o"

    def ask(self, what: str, method: str, url: str, **how: Any) -> Answer:
        """One request, and its answer, tried again while that may help; see `once`."""
        return persist(lambda: self.once(what, method, url, **how), self.patience)

    def once(
        self, what: str, method: str, url: str, *, accepted: tuple[int, ...] = (), **how: Any
    ) -> Answer:
        """One request, and its whole answer.

        *what* says what it is for; the rest goes to requests.

        Raises:
            Refused: The status is 300 or more, and not among *accepted*.
            Trouble: No answer came.
        """
        with self.streamed(what, method, url, accepted=accepted, **how) as answer:
            content: bytes = answer.raw.read(decode_content=True)
            told = answer.headers.get("Content-Length")
            if told is not None and "Content-Encoding" not in answer.headers:
                self.check_length(what, len(content), int(told), method)
            return Answer(answer.status_code, answer.headers, content)

    @contextmanager
    def streamed(
        self, what: str, method: str, url: str, *, accepted: tuple[int, ...] = (), **how: Any
    ) -> Generator[Any]:
        """One request, and its answer with the content yet to come; failures become `Trouble`."""
        headers: dict[str, str] = {"Accept-Encoding": "identity", **how.pop("headers", {})}
        try:
            if self._tokens is not None:
                self._tokens.add_to(headers, method, url)
            with self._session.request(
                method,
                url,
                headers=headers,
                stream=True,
                allow_redirects=False,
                timeout=(self.patience.connect_s, self.patience.idle_s),
                **how,
            ) as answer:
                if answer.status_code >= 300 and answer.status_code not in accepted:
                    raise self._refused(what, answer)
                yield answer
        except (Trouble, KeyError):
            raise
        except Exception as exc:
            if not self._is_of_the_network(exc):
                raise
            passing = not isinstance(exc, self._requests.exceptions.SSLError)
            words = f"cannot {what}: {self.endpoint} does not answer as it should ({exc})"
            raise Trouble(words, passing=passing) from exc

    def check_length(self, what: str, found: int, told: int, method: str = "GET") -> None:
        """Whether the content is whole: not every version of the libraries looks.

        Raises:
            Trouble: It is not.
        """
        if found != told and method != "HEAD":
            words = f"cannot {what}: of {told} bytes came {found} before the connection ended"
            raise Trouble(words, passing=True)

    def _refused(self, what: str, answer: Any) -> Refused:
        text = answer.raw.read(4096, decode_content=True).decode(errors="replace")
        if answer.status_code == 401 and self._tokens is not None and self._tokens.forget():
            return _Expired(what, 401, text)
        return Refused(
            what, answer.status_code, text, _retry_after(answer.headers.get("Retry-After"))
        )

    def _is_of_the_network(self, exc: Exception) -> bool:
        """By name: the libraries below requests have errors of their own that it lets through."""
        if isinstance(exc, (OSError, self._requests.exceptions.RequestException)):
            return True
        return type(exc).__module__.partition(".")[0] in ("urllib3", "http")

    def _opened(self) -> Any:
        session = self._requests.Session()
        session.trust_env = False  # it would look for proxies and passwords at each request
        if self._tokens is not None:
            session.proxies = self._requests.utils.get_environ_proxies(self.endpoint)
            session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
        adapter = self._requests.adapters.HTTPAdapter(
            pool_connections=2, pool_maxsize=CONNECTIONS, max_retries=0
        )
        for scheme in ("http://", "https://"):
            session.mount(scheme, adapter)
        session.headers["User-Agent"] = "kinetic-runner"
        return session


class _Expired(Refused):
    """The token was refused; there will be another."""

    def __init__(self, what: str, status: int, text: str) -> None:
        super().__init__(what, status, text, 0.0)
        self.passing = True


class _Tokens:
    """Access tokens from whatever credentials the pod has; one thread at a time gets them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._auth: Any = _library("google.auth")
        self._transport: Any = _library("google.auth.transport.requests")
        self._credentials: Any = None
        self._refused = 0.0
        # A node's metadata server takes some seconds to know a new pod, whichever process asks.
        young = YOUNG_S if "KUBERNETES_SERVICE_HOST" in os.environ else 0.0
        self._until = float(os.environ.get("KINETIC_POD_BEGAN") or time.monotonic()) + young

    def add_to(self, headers: dict[str, str], method: str, url: str) -> None:
        """Put a token that is valid now into *headers*.

        Raises:
            Trouble: There are no credentials, or none that work.
        """
        errors = self._auth.exceptions
        with self._lock:
            try:
                if self._credentials is None:
                    self._credentials = self._auth.default(scopes=[SCOPE])[0]
                self._credentials.before_request(self._transport.Request(), method, url, headers)
            except errors.DefaultCredentialsError as exc:
                raise Trouble(
                    f"there are no credentials for Cloud Storage here ({exc}); let the pods' "
                    "service account act as one of Google's (workload identity)",
                    passing=time.monotonic() < self._until,
                ) from exc
            except errors.GoogleAuthError as exc:
                # A metadata server may not know a new pod yet; it says so in many ways.
                passing = bool(getattr(exc, "retryable", False)) or "metadata" in str(exc).lower()
                passing = passing or isinstance(exc, errors.TransportError)
                words = f"no access token for Cloud Storage can be had: {exc}"
                raise Trouble(words, passing=passing) from exc

    def forget(self) -> bool:
        """The token was refused: have another. False if that has just been tried."""
        with self._lock:
            again = time.monotonic() - self._refused > 5.0
            self._refused = time.monotonic()
            if again and self._credentials is not None:
                self._credentials.token = None
            return again


def persist(
    work: Callable[[], T], patience: Patience, *, progress: Callable[[], int] | None = None
) -> T:
    """Do *work* until it succeeds, fails for good, or patience ends; then its last failure.

    *progress* counts what is done already; as long as it grows, patience does not end.
    """
    since: float | None = None
    failures, told = 0, False
    reached = progress() if progress else 0
    while True:
        try:
            return work()
        except Trouble as trouble:
            if not trouble.passing:
                raise
            now = time.monotonic()
            if progress and (far := progress()) > reached:
                reached, failures, since = far, 0, None
            since = now if since is None else since
            ceiling = min(patience.longest_s, patience.first_s * 2 ** min(failures, 30))
            pause = random.uniform(0, ceiling)
            if (wish := getattr(trouble, "wait_s", None)) is not None:
                pause = wish + random.uniform(0, patience.first_s)
            failures += 1
            if now + pause - since > patience.total_s:
                raise
            if now - since > QUIET_S and not told:
                told = True
                print(f"kinetic: {trouble}; trying on", file=sys.stderr)
        time.sleep(pause)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise Trouble(
            f"the job's image lacks {exc.name!r}, which a job in the cloud needs; install "
            "google-cloud-storage into it"
        ) from exc


def _retry_after(value: str | None) -> float | None:
    """Seconds to wait by a Retry-After header, which holds them or a date."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _advice(status: int, limited: bool) -> str:
    if status == 403 and not limited:
        return (
            "; the pods' service account lacks a permission: grant it roles/storage.objectUser "
            "on the bucket"
        )
    return "; there is no such bucket, or it may not be seen" if status == 404 else ""


def _said(text: str) -> str:
    """The server's own sentence, on one line."""
    return " ".join(str(_error(text).get("message") or text).split())[:300]


def _reason(text: str) -> str:
    try:
        return str(_error(text)["errors"][0]["reason"])
    except (KeyError, IndexError, TypeError):
        return ""


def _error(text: str) -> dict[str, Any]:
    try:
        error: Any = json.loads(text)["error"]
    except (KeyError, TypeError, ValueError):
        return {}
    return error if isinstance(error, dict) else {}  # pyright: ignore[reportUnknownVariableType]


PIECE_BYTES = 16 * 1024 * 1024
"""One request of an upload; a multiple of 256 KiB, as the service asks for."""

FIRST_BYTES = 1024 * 1024
"""So much of an object is read before anything is known of it."""

PART_BYTES = 32 * 1024 * 1024
PARTS = 8
READ_BYTES = 1024 * 1024
DONE = re.compile(r"bytes=0-(\d+)")
RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")
DAMAGED_TRIES = 3
ABSENT: Mapping[str, str] = {"ifGenerationMatch": "0"}
"""The condition of a write that there is no such object."""


class Upload:
    """A file of any size, piece by piece; after a failure the service says how far it came."""

    def __init__(
        self,
        http: Http,
        name: str,
        resource: Mapping[str, Any],
        path: Path,
        condition: Mapping[str, str] = ABSENT,
    ) -> None:
        self.tries = 0
        self._condition = condition
        self._http = http
        self._what = f"write {name}"
        self._path = path
        self._size = path.stat().st_size
        self.crc32c = checksum(_of_file(path))
        self._resource = {**resource, "crc32c": self.crc32c}
        self._session = ""
        self._offset = 0
        self._doubtful = False

    def run(self) -> Answer:
        """Send it."""
        return persist(self._once, self._http.patience, progress=lambda: self._offset)

    def _once(self) -> Answer:
        self.tries += 1
        try:
            if not self._session:
                self._begin()
            answer = self._put(f"bytes */{self._size}", b"") if self._doubtful else None
            with self._path.open("rb") as file:
                while answer is None:
                    self._doubtful = True
                    answer = self._send(file)
                    self._doubtful = False
            self._session = ""
            return answer
        except Refused as refused:
            lost = refused.status in (404, 410) and self._session != ""
            if lost or refused.status in (400, 412):
                self._session = ""  # it has ended, in one way or another
            if lost:
                raise Trouble(f"{refused}; the upload starts again", passing=True) from refused
            raise

    def _begin(self) -> None:
        self._doubtful, self._offset = False, 0
        answer = self._http.once(
            self._what,
            "POST",
            self._http.upload_url,
            params={
                "uploadType": "resumable",
                **self._condition,
                "fields": "generation,crc32c",
            },
            headers={
                "Content-Type": "application/json; charset=UTF-8",
                "X-Upload-Content-Type": str(self._resource["contentType"]),
                "X-Upload-Content-Length": str(self._size),
            },
            data=json.dumps(self._resource).encode(),
        )
        self._session = answer.headers["Location"]

    def _send(self, file: Any) -> Answer | None:
        start = self._offset
        file.seek(start)
        piece = file.read(PIECE_BYTES)
        if len(piece) != min(PIECE_BYTES, self._size - start):
            raise Trouble(f"cannot {self._what}: {self._path} was changed while it was read")
        last = start + len(piece) - 1
        answer = self._put(f"bytes {start}-{last}/{self._size}", piece)
        if answer is None and self._offset <= start:
            raise Trouble(f"cannot {self._what}: Cloud Storage takes nothing of it", passing=True)
        return answer

    def _put(self, content_range: str, data: bytes) -> Answer | None:
        """The object if it is complete, else None: `_offset` says how far it is."""
        headers = {"Content-Range": content_range, "Content-Length": str(len(data))}
        answer = self._http.once(
            self._what, "PUT", self._session, headers=headers, data=data, accepted=(308,)
        )
        if answer.status != 308:
            return answer
        done = DONE.fullmatch(answer.headers.get("Range", ""))
        self._offset = int(done[1]) + 1 if done else 0
        return None


def download(http: Http, name: str, about: Mapping[str, Any], path: Path) -> None:
    """The object that *about* describes, in a new file at *path*; nothing is left of a failure.

    Raises:
        KeyError: It has been deleted or replaced meanwhile.
        FileExistsError: There is something at *path*.
        Trouble: It cannot be had.
    """
    for tries in range(1, DAMAGED_TRIES + 1):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _fill(http, name, about, file)
            told = about.get("crc32c", "")
            if about.get("contentEncoding") or told in ("", checksum(_of_file(path))):
                return
            if tries == DAMAGED_TRIES:
                raise Trouble(f"{name} arrives as something else than is kept; check the network")
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(file)
        os.unlink(path)


def _fill(http: Http, name: str, about: Mapping[str, Any], file: int) -> None:
    size = int(about.get("size", 0))
    if about.get("contentEncoding"):  # it is decoded on its way, and has no ranges then
        _Stream(http, name, about, file, 0, None).run()
        return
    if size <= PART_BYTES:
        if size:
            _Stream(http, name, about, file, 0, size).run()
        return
    os.ftruncate(file, size)
    parts = iter(range(0, size, PART_BYTES))
    turn = threading.Lock()

    def stream() -> None:
        while (start := _next(parts, turn)) is not None:
            _Stream(http, name, about, file, start, min(size, start + PART_BYTES)).run()

    with ThreadPoolExecutor(min(PARTS, -(-size // PART_BYTES)), "kinetic-fetch") as pool:
        running = [pool.submit(stream) for _ in range(min(PARTS, -(-size // PART_BYTES)))]
        for one in running:
            one.result()


def _next(parts: Iterator[int], turn: threading.Lock) -> int | None:
    with turn:
        return next(parts, None)


class _Stream:
    """Bytes *start* to *stop* of an object into their place in a file; cut, it goes on."""

    def __init__(
        self,
        http: Http,
        name: str,
        about: Mapping[str, Any],
        file: int,
        start: int,
        stop: int | None,
    ) -> None:
        self._http = http
        self._name = name
        self._url = http.url(str(about["name"]))
        self._generation = str(about["generation"])
        self._file = file
        self._offset = start
        self._stop = stop

    def run(self) -> None:
        """Read it to its end."""
        persist(self._once, self._http.patience, progress=lambda: self._offset)

    def _once(self) -> None:
        headers: dict[str, str] = {}
        if self._stop is None:
            self._offset = 0  # of what is decoded on its way no range can be asked for
        elif self._offset >= self._stop:
            return
        else:
            headers["Range"] = f"bytes={self._offset}-{self._stop - 1}"
        what = f"read {self._name}"
        params = {"alt": "media", "generation": self._generation}
        with self._http.streamed(
            what, "GET", self._url, params=params, headers=headers, accepted=(404,)
        ) as answer:
            if answer.status_code == 404:
                raise KeyError(self._name)
            begins = RANGE.match(answer.headers.get("Content-Range", "bytes 0-0/*"))
            if begins is None or int(begins[1]) != self._offset:
                raise Trouble(f"cannot {what}: another range came than asked for", passing=True)
            while chunk := answer.raw.read(READ_BYTES, decode_content=self._stop is None):
                self._take(chunk)
        if self._stop is not None and self._offset < self._stop:
            raise Trouble(f"cannot {what}: it ended early", passing=True)

    def _take(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view.nbytes:
            try:
                written = os.pwrite(self._file, view, self._offset)
            except OSError as exc:  # or it would pass for a failure of the network
                raise Trouble(f"cannot write {self._name} to the disk: {exc}") from exc
            view = view[written:]
            self._offset += written


def _of_file(path: Path) -> int:
    crc32c: Any = importlib.import_module("google_crc32c")
    value = 0
    with path.open("rb", buffering=0) as file, contextlib.closing(file):
        while chunk := file.read(READ_BYTES):
            value = crc32c.extend(value, chunk)
    return value


def checksum(value: int) -> str:
    """A CRC32C as Cloud Storage writes it."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


NONCE = "kinetic-nonce"
TYPE = "application/octet-stream"
WHOLE_BYTES = 8 * 1024 * 1024
"""Up to so much is sent in one request, from memory."""

PAGE = 1000
FIELDS = "nextPageToken,items(name,size,generation,metadata)"
Listing = list[Stored]


class GcsObjects:
    """Objects in ``gs://bucket`` or ``gs://bucket/folder``. Safe for any number of threads.

    A missing object is a ``KeyError`` with its name; everything else that goes
    wrong is an ``OSError``, after ten minutes where it may pass.
    """

    def __init__(
        self, url: str, environ: Mapping[str, str] = os.environ, patience: Patience | None = None
    ) -> None:
        self._http = Http(Place.from_url(url), environ, patience)
        self._crc32c: Any = importlib.import_module("google_crc32c")

    @property
    def url(self) -> str:
        """Where another process finds the same objects."""
        return self._http.place.url

    def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        consume: bool = False,
    ) -> bool:
        """Create *name* if it is absent; False when it exists.

        A large file takes several requests, and goes on where it was cut. With
        *consume* nothing is different here.
        """
        nonce = secrets.token_hex(8)
        resource: dict[str, Any] = {
            "name": self._http.place.object_name(name),
            "contentType": TYPE,
            "metadata": {**(metadata or {}), NONCE: nonce},
        }
        if isinstance(body, Path) and body.stat().st_size > WHOLE_BYTES:
            upload: _Upload = Upload(self._http, name, resource, body)
        else:
            content = body.read_bytes() if isinstance(body, Path) else body
            upload = _Whole(self._http, name, resource, content)
        for tries in range(1, DAMAGED_TRIES + 1):
            try:
                return self._created(name, upload, nonce)
            except _Damaged:
                if tries == DAMAGED_TRIES:
                    raise
        raise AssertionError

    def _created(self, name: str, upload: _Upload, nonce: str) -> bool:
        try:
            answer = upload.run().json()
        except Refused as refused:
            if refused.damaged:
                raise _Damaged(str(refused)) from refused
            if refused.status != 412:
                raise
            # Of several tries one may have been heard, and its reply lost.
            return upload.tries > 1 and self._is_own(name, nonce)
        if answer.get("crc32c", upload.crc32c) == upload.crc32c:
            return True
        self._remove(name, generation=answer["generation"])
        words = f"{name} arrived in {self.url} as something else than was sent; check the network"
        raise _Damaged(words)

    def _is_own(self, name: str, nonce: str) -> bool:
        try:
            metadata: dict[str, str] = self._about(name).get("metadata") or {}
            return metadata.get(NONCE) == nonce
        except KeyError:
            return False

    def get(
        self, name: str, start: int | None = None, stop: int | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        """Content, or its bytes from *start* to *stop*. Of metadata it gives none: see `stat`."""
        if stop is not None and stop <= (start or 0):
            self._about(name)
            return b"", {}
        headers: dict[str, str] = {}
        if start or stop is not None:
            last = "" if stop is None else str(stop - 1)
            headers["Range"] = f"bytes={start or 0}-{last}"
        url, what = self._http.url(self._http.place.object_name(name)), f"read {name}"

        def work() -> bytes:
            answer = self._http.once(
                what, "GET", url, params={"alt": "media"}, headers=headers, accepted=(404, 416)
            )
            if answer.status == 416:  # it ends before *start*, or is empty
                return b""
            self._found(what, name, answer)
            if answer.status == 200:
                self._check(what, answer)
                return answer.content[start:stop]
            return answer.content

        return persist(work, self._http.patience), {}

    def _check(self, what: str, answer: Answer) -> None:
        """By the checksum that comes along; the service knows it for most objects."""
        for part in answer.headers.get("X-Goog-Hash", "").split(","):
            kind, _, told = part.strip().partition("=")
            if kind == "crc32c" and told and told != checksum(self._crc32c.value(answer.content)):
                raise Trouble(f"cannot {what}: it arrived as something else", passing=True)

    def fetch(self, name: str, path: Path) -> None:
        """Write the content to a new file: in several ranges at once, in flat memory.

        Of most objects the first range is all there is, and the only request.
        """
        if not self._fetched_at_once(name, path):
            download(self._http, name, self._about(name), path)

    def _fetched_at_once(self, name: str, path: Path) -> bool:
        url, what = self._http.url(self._http.place.object_name(name)), f"read {name}"
        headers = {"Range": f"bytes=0-{FIRST_BYTES - 1}"}
        answer = self._http.ask(
            what, "GET", url, params={"alt": "media"}, headers=headers, accepted=(404, 416)
        )
        self._found(what, name, answer)
        size = answer.headers.get("Content-Range", "").rpartition("/")[2]
        told = re.search(r"crc32c=([A-Za-z0-9+/=]+)", answer.headers.get("X-Goog-Hash", ""))
        whole = answer.status == 206 and size == str(len(answer.content))
        if not whole or told is None or "Content-Encoding" in answer.headers:
            return False
        crc32c: Any = importlib.import_module("google_crc32c")
        if checksum(crc32c.value(answer.content)) != told[1]:
            return False  # asked for again, as often as is worth it
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(answer.content)
        return True

    def path(self, name: str) -> Path | None:
        """No object is a file here."""
        return None

    def stat(self, name: str) -> Stored:
        """What a listing tells, of one object."""
        return _stored(name, self._about(name))

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""
        try:
            self._about(name)
        except KeyError:
            return False
        return True

    def holds(self, folder: str) -> bool:
        """Whether there is an object below *folder*."""
        return bool(self._page(f"{folder}/", "", 1)[0])

    def list(self, prefix: str) -> Listing:
        """All objects whose name starts with *prefix*, sorted by name."""
        found: Listing = []
        token: str | None = ""
        while token is not None:
            page, token = self._page(prefix, token, PAGE)
            found += page
        return sorted(found, key=lambda one: one.name)

    def look_up(self, names: Iterable[str]) -> Listing:
        """Those of *names* that exist: by one listing of what their names have in common."""
        wanted = set(names)
        if not wanted:
            return []
        first, last = min(wanted), max(wanted)  # what these begin with, all do
        same = (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
        return [one for one in self.list(first[: next(same, len(first))]) if one.name in wanted]

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are not there count as deleted."""
        for name in names:
            self._remove(name)

    def _remove(self, name: str, generation: str = "") -> None:
        url = self._http.url(self._http.place.object_name(name))
        params = {"ifGenerationMatch": generation} if generation else {}
        self._http.ask(f"delete {name}", "DELETE", url, params=params, accepted=(404, 412))

    def _about(self, name: str) -> dict[str, Any]:
        what = f"look at {name}"
        url = self._http.url(self._http.place.object_name(name))
        answer = self._http.ask(what, "GET", url, accepted=(404,))
        self._found(what, name, answer)
        return answer.json()

    def _found(self, what: str, name: str, answer: Answer) -> None:
        if answer.status != 404:
            return
        refused = Refused(what, 404, answer.content.decode(errors="replace"))
        if refused.about_bucket:
            raise refused
        raise KeyError(name)

    def _page(self, prefix: str, token: str, size: int) -> tuple[Listing, str | None]:
        params = {
            "prefix": self._http.place.object_name(prefix),
            "maxResults": str(size),
            "fields": FIELDS,
            **({"pageToken": token} if token else {}),
        }
        answer = self._http.ask(f"list {prefix}", "GET", self._http.url(), params=params).json()
        found: Listing = []
        for resource in answer.get("items") or ():
            name = self._http.place.name(resource["name"])
            if name is not None:
                found.append(_stored(name, resource))
        return found, answer.get("nextPageToken") or None


class _Damaged(Trouble):
    """A content was not the same on both sides."""


class _Whole:
    """A content of one piece: metadata, content and checksum in one request."""

    def __init__(
        self,
        http: Http,
        name: str,
        resource: Mapping[str, Any],
        content: bytes,
        condition: Mapping[str, str] = ABSENT,
    ) -> None:
        self._condition = condition
        crc32c: Any = importlib.import_module("google_crc32c")
        self.tries = 0
        self.crc32c = checksum(crc32c.value(content))
        self._http = http
        self._name = name
        boundary = secrets.token_hex(16)
        about = json.dumps({**resource, "crc32c": self.crc32c}).encode()
        self._type = f"multipart/related; boundary={boundary}"
        self._body = b"".join(
            (
                b"--%s\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
                % boundary.encode(),
                about,
                b"\r\n--%s\r\nContent-Type: %s\r\n\r\n" % (boundary.encode(), TYPE.encode()),
                content,
                b"\r\n--%s--\r\n" % boundary.encode(),
            )
        )

    def run(self) -> Answer:
        """Send it."""
        return persist(self._once, self._http.patience)

    def _once(self) -> Answer:
        self.tries += 1
        return self._http.once(
            f"write {self._name}",
            "POST",
            self._http.upload_url,
            params={
                "uploadType": "multipart",
                **self._condition,
                "fields": "generation,crc32c",
            },
            headers={"Content-Type": self._type},
            data=self._body,
        )


_Upload = _Whole | Upload


def overwrite(http: Http, object_name: str, path: Path) -> None:
    """Put the file at *path* into the bucket, in place of the object of that name, if there is one.

    Raises:
        Trouble: It cannot be written, or the file was changed meanwhile.
    """
    resource = {"name": object_name, "contentType": TYPE}
    if path.stat().st_size > WHOLE_BYTES:
        upload: _Upload = Upload(http, object_name, resource, path, {})
    else:
        upload = _Whole(http, object_name, resource, path.read_bytes(), {})
    answer = upload.run().json()
    if answer.get("crc32c", upload.crc32c) != upload.crc32c:
        raise _Damaged(f"{object_name} arrived as something else than was sent; check the network")


def _stored(name: str, resource: Mapping[str, Any]) -> Stored:
    metadata = dict(resource.get("metadata") or {})
    metadata.pop(NONCE, None)
    return Stored(name, int(resource.get("size", 0)), metadata, int(resource["generation"]))
