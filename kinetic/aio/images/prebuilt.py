"""A published base image; the project's dependencies are installed when the job starts."""

from __future__ import annotations

import hashlib
import time

from kinetic._runner.wire import Input
from kinetic.aio import _sharing
from kinetic.aio._release import in_thread
from kinetic.aio.images._places import checked_uri, registry_of
from kinetic.aio.images._project import dependencies_of
from kinetic.aio.images._registry import Registry
from kinetic.aio.images.bundled import COMMAND
from kinetic.aio.ports import Image, ImageRequest, Store
from kinetic.errors import AuthError, ConfigurationError

__all__ = ["PrebuiltImages", "base_uri"]

GOOGLE = ".pkg.dev"
BELIEVED_S = 600.0
"""How long dependencies that were stored are believed to be there."""


class PrebuiltImages:
    """`kinetic.aio.ports.Images` for ``container_image="prebuilt"``.

    *jobs* is where jobs find their objects. A registry of Google's is asked
    whether the image is there; of others the cluster will tell. *asked* names
    one more registry that is asked.
    """

    def __init__(self, jobs: Store, registry: Registry, *, asked: str = "") -> None:
        self._jobs = jobs
        self._registry = registry
        self._asked = asked
        self._said: set[str] = set()
        self._seen: set[str] = set()
        self._kept: dict[str, float] = {}

    async def resolve(self, request: ImageRequest) -> Image:
        """The base image of the category, with what the job has to install.

        Raises:
            PackError: The dependencies cannot be read, or are on this machine only.
            ConfigurationError: No place of base images is named, or this one was
                not published there.
            Unavailable: Its registry, or the store, does not answer.

        Cancelled: the dependencies may be left in the store; they are shared.
        """
        if not request.base_image_repo:
            raise ConfigurationError(
                'container_image="prebuilt" needs to know where your base images are, and nobody '
                "says: pass base_image_repo=, or set KINETIC_BASE_IMAGE_REPO, to the registry and "
                "path you push them to (the guide on images says how to build one), or leave "
                "container_image out to have an image built"
            )
        uri = base_uri(request.base_image_repo, request.category)
        found = await in_thread(dependencies_of, request, self._said)
        await self._check(uri)
        requirements = None
        if found.wanted:
            body = found.text.encode()
            digest = hashlib.sha256(body).hexdigest()
            name = f"requirements/{digest}.txt"
            await self._keep(name, body)
            requirements = Input(name=name, start=0, stop=len(body), digest=digest)
        return Image(uri=uri, command=COMMAND, requirements=requirements)

    async def _keep(self, name: str, body: bytes) -> None:
        if time.monotonic() - self._kept.get(name, -BELIEVED_S) >= BELIEVED_S:
            await _sharing.ensure(self._jobs, name, body)
            self._kept[name] = time.monotonic()

    async def _check(self, uri: str) -> None:
        host = registry_of(uri)
        if uri in self._seen or not (host.endswith(GOOGLE) or (host and host == self._asked)):
            return
        try:
            there = await self._registry.has(uri)
        except AuthError:  # the cluster's nodes may be allowed to
            there = True
        if not there:
            raise ConfigurationError(
                f"the base image {uri} was not published; build and push it from what kinetic "
                "gives for it (see the guide on images), or leave container_image out to have "
                "one built"
            )
        self._seen.add(uri)

    async def aclose(self) -> None:
        """Nothing is held."""


def base_uri(repo: str, category: str) -> str:
    """The name of a base image: ``{repo}/base-{category}:{version of kinetic}``.

    Raises:
        ConfigurationError: *repo* cannot be a place of images.
    """
    from kinetic._version import __version__

    # A local version has a "+", which no tag can have.
    tag = __version__.replace("+", "-")
    try:
        return checked_uri(f"{repo.rstrip('/')}/base-{category}:{tag}")
    except ConfigurationError as exc:
        raise ConfigurationError(
            f"base_image_repo={repo!r} is no place of images; write it as registry/path, "
            "without a scheme"
        ) from exc
