"""Whether an image is in its registry, by the API that all registries have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinetic import configuration
from kinetic.aio._net.http import Sockets
from kinetic.aio._net.retry import Outage, RetryPolicy, retry
from kinetic.aio._net.tokens import Credentials
from kinetic.errors import (
    AuthError,
    BackendError,
    ClientClosed,
    ConfigurationError,
    KineticError,
    Unavailable,
)

if TYPE_CHECKING:
    import aiohttp

__all__ = [
    "Answer",
    "Http",
    "Places",
    "Registry",
    "checked_uri",
    "manifest_url",
    "places",
    "registry_of",
]


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
        host = url.split("/")[2]
        try:
            return await retry(
                lambda: self._once(method, url, headers, authorized),
                RetryPolicy(total_s=self._patience),
                Outage(host),
                is_passing=lambda failure: isinstance(failure, _Passing),
            )
        except _Passing as exc:
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


CONTINENTS = ("us", "europe", "asia")
EMULATOR = "ARTIFACT_REGISTRY_EMULATOR_HOST"

_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]+)?|\[[0-9a-f:]+\](?::[0-9]+)?)"
_PATH = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_URI = re.compile(
    rf"(?:{_HOST}/)?{_PATH}(?:/{_PATH})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
    r"(?:@[a-z0-9]+:[0-9a-f]{32,})?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """``image`` is the name of bundled images without their tag."""

    project: str
    image: str
    service_account: str


def places(target: configuration.Target, registry: str = "") -> Places:
    """The places of *target*'s cluster; *registry* stands for the project's own host.

    Raises:
        ConfigurationError: It has no project.
    """
    project = target.project
    if project is None:
        raise ConfigurationError(
            "bundled images are built by Cloud Build in a GCP project, and none is configured: "
            'pass project= or set KINETIC_PROJECT, or name an image with container_image="..."'
        )
    region = target.zone.rpartition("-")[0] or target.zone
    continent = region.partition("-")[0]
    location = continent if continent in CONTINENTS else region
    host = registry or f"{location}-docker.pkg.dev"
    return Places(
        project=project,
        # A project of a domain (example.com:name) is a path of its own there.
        image=f"{host}/{project.replace(':', '/')}/kn-{target.cluster}/base",
        service_account=_account(project, target.cluster),
    )


def _account(project: str, cluster: str) -> str:
    domain, _, name = project.rpartition(":")
    address = f"{name}.{domain}" if domain else name
    account = f"kn-{cluster}-builds@{address}.iam.gserviceaccount.com"
    return f"projects/{project}/serviceAccounts/{account}"


def registry_of(uri: str) -> str:
    """The host of an image's registry; empty for Docker Hub."""
    first, slash, _ = uri.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else ""


def checked_uri(uri: str) -> str:
    """*uri*, if it can be the name of an image.

    Raises:
        ConfigurationError: It cannot.
    """
    if _URI.fullmatch(uri) is None:
        hint = "leave the scheme out" if "://" in uri else "write it as registry/name:tag"
        raise ConfigurationError(
            f"container_image={uri!r} is no name of a container image: {hint}, or use "
            '"bundled" or "prebuilt"'
        )
    return uri


_KINDS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)


class Registry:
    """Registries by the names of their images; *plain* is a host without TLS and credentials."""

    def __init__(self, http: Http, plain: str = "") -> None:
        self._http = http
        self._plain = plain

    async def has(self, uri: str) -> bool:
        """Whether there is an image *uri*, one request.

        False is certain: no answer, and one that is not understood, are errors,
        because taking them for "no" would cost a needless build.

        Raises:
            AuthError: The registry does not let us look.
            Unavailable: It does not answer.
            BackendError: It answers something else.
        """
        plain = bool(self._plain) and uri.startswith(f"{self._plain}/")
        url = manifest_url(uri, scheme="http" if plain else "https")
        # GET, because the answer to HEAD has no body to tell an error by.
        headers = {"Accept": ", ".join(_KINDS)}
        answer = await self._http.ask("GET", url, headers, authorized=not plain)
        if answer.status == 401:  # an old token: once more, with a new one
            answer = await self._http.ask("GET", url, headers, authorized=not plain)
        if answer.status == 200:
            return True
        if answer.status == 404:
            return False
        raise _explained(answer, uri)


def manifest_url(uri: str, *, scheme: str = "https") -> str:
    """The address of an image's manifest; *uri* names its registry."""
    host, _, path = uri.partition("/")
    name, at, reference = path.partition("@")
    if at:
        name = name.partition(":")[0]
    else:
        name, _, reference = path.partition(":")
    return f"{scheme}://{host}/v2/{name}/manifests/{reference or 'latest'}"


def _explained(answer: Answer, uri: str) -> BackendError:
    said = _message(answer.body)
    if answer.status in (401, 403):
        return AuthError(
            f"the registry does not let you look for {uri} ({answer.status}{said}): you need "
            "artifactregistry.repositories.downloadArtifacts there, which the role "
            "roles/artifactregistry.reader has"
        )
    return BackendError(f"the registry answered {answer.status} for {uri}{said}")


def _message(body: bytes) -> str:
    try:
        errors = json.loads(body)["errors"]
        words = "; ".join(str(one.get("message", one.get("code", ""))) for one in errors)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
    return f": {words[:300]}" if words else ""
