"""Name the repository of a project's images, and check whether a registry has an image.

A GET request for an image's manifest works in every registry. Cloud Build's list of builds doesn't
suffice: the list still names deleted images, and Cloud Build's client imports gRPC.
"""

from __future__ import annotations

from dataclasses import dataclass

from kinetic import configuration
from kinetic.aio._net.google import refusal_error
from kinetic.aio._net.http import HttpClient, HttpError, close_answer
from kinetic.aio._net.retry import Outage, RetryPolicy, retry
from kinetic.aio._net.tokens import Credentials, with_token
from kinetic.errors import ConfigurationError

CONTINENTS = ("us", "europe", "asia")
_MANIFEST_TYPES = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """Where images are built and pushed. ``image`` is a bundled image's name without its tag."""

    project: str
    image: str
    service_account: str


def build_settings(target: configuration.Target, registry: str = "") -> BuildSettings:
    """Return where to build and push images for *target*; *registry* replaces Google's host.

    Raises:
        ConfigurationError: No project is configured.
    """
    project = target.project
    if project is None:
        raise ConfigurationError(
            "bundled images are built by Cloud Build in a GCP project, and none is configured: "
            "pass project= or set KINETIC_PROJECT, or name an image, such as "
            'container_image="python:3.12-slim" with the minor version of your Python: each job '
            "then installs kinetic's runner itself"
        )
    continent = target.region.partition("-")[0]
    host = registry or f"{continent if continent in CONTINENTS else target.region}-docker.pkg.dev"
    # In images and e-mail addresses, Google writes the project example.com:name differently.
    domain, _, name = project.rpartition(":")
    account = f"kn-{target.cluster}-builds@{f'{name}.{domain}' if domain else name}"
    return BuildSettings(
        project=project,
        image=f"{host}/{project.replace(':', '/')}/kn-{target.cluster}/base",
        service_account=f"projects/{project}/serviceAccounts/{account}.iam.gserviceaccount.com",
    )


def registry_of(uri: str) -> str:
    """Return the host of an image's registry; empty for Docker Hub."""
    host, slash, _ = uri.partition("/")
    return host if slash and ("." in host or ":" in host or host == "localhost") else ""


class Registry:
    """Asks registries whether they have an image, with an access token of Google.

    Requests to the host *insecure_host* use no token and no TLS. *retry_s* is how long to retry a
    request, in seconds.
    """

    def __init__(
        self, credentials: Credentials, *, insecure_host: str = "", retry_s: float = 60.0
    ) -> None:
        self._credentials = credentials
        self._insecure_host = insecure_host
        self._policy = RetryPolicy(total_s=retry_s)
        self._http = HttpClient("the client of image registries", idle_s=30.0, trust_env=True)
        self.aclose = self._http.aclose

    async def has(self, uri: str) -> bool:
        """Return whether the registry has the image *uri*, by one request.

        Returns False only if the registry says that it lacks the image. Any other answer raises an
        error, because False would start a needless build.

        Raises:
            AuthError: The registry refuses access to its images.
            Refused: A policy forbids the request.
            Unavailable: The registry doesn't answer.
            BackendError: The registry answers with another error status.
        """
        host, _, path = uri.partition("/")
        name, _, tag = path.partition(":")
        is_insecure = host == self._insecure_host
        url = f"{'http' if is_insecure else 'https'}://{host}/v2/{name}/manifests/{tag}"

        async def send(token: str = "") -> None:
            headers = {"Accept": _MANIFEST_TYPES}
            if token:
                headers["Authorization"] = f"Bearer {token}"
            with self._http.translate_errors(f"cannot look up {url}", host):
                # Not HEAD, because its answer has no message that explains a refusal.
                sending = self._http.session().request("GET", url, headers=headers)
                close_answer(await self._http.receive(sending))

        async def request() -> None:
            await (send() if is_insecure else with_token(self._credentials, send))

        try:
            await retry(request, self._policy, Outage(host))
        except HttpError as refusal:
            if refusal.status == 404:
                return False
            raise refusal_error(
                refusal,
                f"cannot look up {uri}",
                host,
                api="artifactregistry",
                how_to_grant="grant roles/artifactregistry.reader on the image's repository",
            ) from None
        return True
