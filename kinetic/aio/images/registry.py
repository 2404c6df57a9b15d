"""Whether an image is in its registry, by the API that all registries have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kinetic import configuration
from kinetic.aio._net.http import HttpClient, HttpError, cut
from kinetic.aio._net.retry import Outage, RetryPolicy, retry
from kinetic.aio._net.tokens import Credentials, with_token
from kinetic.errors import AuthError, BackendError, ConfigurationError, Unavailable

PATIENCE_S = 60.0
"""How long a server that does not answer, or answers that it cannot, is asked again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server gave of what it was asked for: 206 is a part."""

    status: int
    body: bytes


class Http:
    """Requests with the token of *credentials*; None sends none.

    *patience* is in seconds.
    """

    def __init__(self, credentials: Credentials | None, *, patience: float = PATIENCE_S) -> None:
        self._credentials = credentials
        self._policy = RetryPolicy(total_s=patience)
        self._http = HttpClient("the client of images", idle_s=30.0, trust_env=True)
        self.aclose = self._http.aclose

    async def ask(
        self, method: str, url: str, headers: Mapping[str, str], *, authorized: bool = True
    ) -> Answer:
        """One request; asked again while the server has trouble of its own.

        Raises:
            HttpError: It gives something else than what was asked for.
            AuthError: There are no credentials.
            Unavailable: It does not answer, or answers that it cannot.
            ClientClosed: This was closed.
        """
        host = url.split("/")[2]

        async def once(token: str = "") -> Answer:
            sent = {**headers, "Authorization": f"Bearer {token}"} if token else headers
            session = self._http.session()
            with self._http.translated(f"cannot ask for {url}", host):
                answer = await self._http.answered(session.request(method, url, headers=sent))
                try:
                    return Answer(answer.status, await answer.read())
                finally:
                    cut(answer)

        async def request() -> Answer:
            if self._credentials is None or not authorized:
                return await once()
            return await with_token(self._credentials, once)

        try:
            return await retry(request, self._policy, Outage(host))
        except (HttpError, Unavailable) as exc:
            if not exc.retryable:
                raise
            raise Unavailable(
                f"{host} did not answer for {self._policy.total_s:g} s ({exc}); check the "
                "network, or try again later",
                retryable=True,
            ) from exc


CONTINENTS = ("us", "europe", "asia")
EMULATOR = "ARTIFACT_REGISTRY_EMULATOR_HOST"


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
        try:
            await self._http.ask("GET", url, headers, authorized=not plain)
        except HttpError as answer:
            if answer.status == 404:
                return False
            raise _explained(answer, uri) from None
        return True


def manifest_url(uri: str, *, scheme: str = "https") -> str:
    """The address of an image's manifest; *uri* names its registry."""
    host, _, path = uri.partition("/")
    name, at, reference = path.partition("@")
    if at:
        name = name.partition(":")[0]
    else:
        name, _, reference = path.partition(":")
    return f"{scheme}://{host}/v2/{name}/manifests/{reference or 'latest'}"


def _explained(answer: HttpError, uri: str) -> BackendError:
    if answer.status in (401, 403):
        return AuthError(
            f"the registry does not let you look for {uri} ({answer.status}: {answer.said}): you "
            "need artifactregistry.repositories.downloadArtifacts there, which the role "
            "roles/artifactregistry.reader has"
        )
    return BackendError(f"the registry answered {answer.status} for {uri}: {answer.said}")
