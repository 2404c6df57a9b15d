"""Whether an image is in its registry, by the API that all registries have."""

from __future__ import annotations

import json

from kinetic.aio.images._http import Answer, Http
from kinetic.errors import AuthError, BackendError

__all__ = ["Registry", "manifest_url"]

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
