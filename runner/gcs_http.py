"""Requests to Cloud Storage: tried again where that may help, with a token where one is needed.

It stands on what google-cloud-storage itself stands on (google-auth, requests,
google-crc32c), so that an image with that library has all it takes. The library's
own calls can neither find out whose write an object is when a reply was lost,
nor go on with an upload after a failure.
"""

from __future__ import annotations

import email.utils
import importlib
import json
import os
import random
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from .gcs_names import Place

__all__ = ["EMULATOR", "Answer", "Http", "Patience", "Refused", "Trouble", "persist"]

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
        # A node's metadata server takes some seconds to know a new pod.
        young = "KUBERNETES_SERVICE_HOST" in os.environ
        self._until = time.monotonic() + (YOUNG_S if young else 0.0)

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
