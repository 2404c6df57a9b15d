"""The images of a Kubernetes cluster: bundled, prebuilt, or one of the user's own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Mapping

from kinetic._runner.protocol.wire import Input
from kinetic._tasks import in_thread
from kinetic.aio import _shared_objects
from kinetic.aio._net.tokens import Credentials
from kinetic.aio.images.bundled import COMMAND, BundledImages, Pace
from kinetic.aio.images.cloud_build import Builder, BuildLog
from kinetic.aio.images.recipe import PYTHON_IMAGE, USER, Wheel, dependencies_of, installed_wheel
from kinetic.aio.images.registry import EMULATOR, Http, Registry, places, registry_of
from kinetic.aio.ports import Image, ImageRequest, Images, Store
from kinetic.configuration import Target
from kinetic.errors import AuthError, ConfigurationError
from kinetic.options import checked_image

GOOGLE_REGISTRIES = ".pkg.dev"
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
        uri = base_uri(named_repo(request.base_image_repo), request.category)
        found = await in_thread(dependencies_of, request, self._said)
        await self._check(uri)
        requirements = None
        if found.wanted:
            body = found.text.encode()
            digest = hashlib.sha256(body).hexdigest()
            name = f"requirements/{digest}.txt"
            await self._keep(name, body)
            requirements = Input(name=name, start=0, stop=len(body), digest=digest)
        return Image(uri=uri, command=COMMAND, requirements=requirements, user=USER)

    async def _keep(self, name: str, body: bytes) -> None:
        if time.monotonic() - self._kept.get(name, -BELIEVED_S) >= BELIEVED_S:
            await _shared_objects.ensure(self._jobs, name, body)
            self._kept[name] = time.monotonic()

    async def _check(self, uri: str) -> None:
        if uri in self._seen or not _is_google(uri, self._asked):
            return
        try:
            there = await self._registry.has(uri)
        except AuthError:  # the cluster's nodes may be allowed to
            there = True
        if not there:
            raise ConfigurationError(
                f"the base image {uri} was not published: do that with kinetic build-image --repo "
                f"{uri.rpartition('/')[0]}, or leave container_image out to have one built"
            )
        self._seen.add(uri)

    async def aclose(self) -> None:
        """Nothing is held."""


def named_repo(repo: str | None) -> str:
    """The place of base images.

    Raises:
        ConfigurationError: Nobody names it.
    """
    if not repo:
        raise ConfigurationError(
            "nobody says where your base images are: pass base_image_repo=, or set "
            "KINETIC_BASE_IMAGE_REPO, to the registry and path you push them to (kinetic "
            "build-image --repo publishes them), or leave container_image out to have an image "
            "built"
        )
    return repo


def _is_google(uri: str, asked: str) -> bool:
    """Whether *uri* is in a registry of Google's, or in the one that is *asked* in its place."""
    host = registry_of(uri)
    return host.endswith(GOOGLE_REGISTRIES) or bool(host and host == asked)


def base_uri(repo: str, category: str, tag: str | None = None) -> str:
    """The name of a base image: ``{repo}/base-{category}:{tag}``, by default kinetic's version.

    Raises:
        ConfigurationError: *repo* cannot be a place of images, or *tag* the tag of one.
    """
    from kinetic._version import __version__

    # A local version has a "+", which no tag can have.
    tag = tag or __version__.replace("+", "-")
    try:
        return checked_image(f"{repo.rstrip('/')}/base-{category}:{tag}")
    except ConfigurationError as exc:
        raise ConfigurationError(
            f"base_image_repo={repo!r} and the tag {tag!r} make no name of an image; write the "
            "first as registry/path, without a scheme, and the tag in letters, digits and _.-"
        ) from exc


class CustomImages:
    """`kinetic.aio.ports.Images` for ``container_image="registry/name:tag"``.

    Whether there is such an image is for the cluster to say: it may be allowed
    to pull what this machine cannot see. Which Python it has is for the runner
    to say, before it opens anything.
    """

    async def resolve(self, request: ImageRequest) -> Image:
        """The image.

        Raises:
            ConfigurationError: It is no name of an image.
        """
        return Image(uri=request.mode, command=COMMAND)

    async def aclose(self) -> None:
        """Nothing is held."""


STARTED_FROM = "KINETIC_PYTHON_IMAGE"
BUILDS = "CLOUD_BUILD_EMULATOR_HOST"
OBJECTS = "STORAGE_EMULATOR_HOST"
GOOGLE_STORAGE = "https://storage.googleapis.com"


class ContainerImages:
    """`kinetic.aio.ports.Images` of *target*: each request names its mode.

    *jobs* is the store of jobs, *builds* the one of builds, which is closed with
    this. ``CLOUD_BUILD_EMULATOR_HOST`` and ``ARTIFACT_REGISTRY_EMULATOR_HOST``
    (``host:port``) and ``STORAGE_EMULATOR_HOST`` name servers to use instead of
    Google's, without credentials.
    """

    def __init__(
        self,
        target: Target,
        *,
        jobs: Store,
        builds: Store,
        environ: Mapping[str, str] = os.environ,
        pace: Pace | None = None,
        look: tuple[float, float] = (0.5, 5.0),
        patience: float = 60.0,
        wheel: Callable[[], Wheel] = installed_wheel,
    ) -> None:
        self._target = target
        self._jobs, self.builds = jobs, builds
        self._credentials = Credentials()
        self._registry_host = environ.get(EMULATOR, "")
        objects = environ.get(OBJECTS, "")
        if objects and "://" not in objects:
            objects = f"http://{objects}"
        builder = environ.get(BUILDS, "")
        self._http = Http(self._credentials, patience=patience)
        # A log that cannot be read holds nothing up.
        self._log_http = Http(None if objects else self._credentials, patience=min(2.0, patience))
        self._registry = Registry(self._http, self._registry_host)
        self._builder = Builder(
            None if builder else self._credentials,
            lambda bucket, name: BuildLog(self._log_http, objects or GOOGLE_STORAGE, bucket, name),
            emulator=builder,
            look=look,
            patience=patience,
        )
        self._pace = pace
        self._wheel = wheel
        self._python_image = started_from(environ)
        self._bundled: BundledImages | None = None
        self._prebuilt = PrebuiltImages(jobs, self._registry, asked=self._registry_host)
        self._custom = CustomImages()

    async def resolve(self, request: ImageRequest) -> Image:
        """See the port; what can go wrong is with each mode.

        Raises:
            ConfigurationError: The mode is no name of an image, or needs a project
                and none is configured.
            SubmissionError: It cannot be had.
            BackendError: Somebody refused, or did not answer.
        """
        return await self._of(request.mode).resolve(request)

    async def publish(self, uri: str, context: Mapping[str, bytes], *, again: bool = False) -> bool:
        """Have Cloud Build build *context* and push it as *uri*; whether that was needed.

        What is there already is left as it is, unless it is to be built *again*.

        Raises:
            ConfigurationError: It cannot push there, or no project is configured.
            BuildError: It cannot be built.
            BackendError: Somebody refused, or did not answer.

        Cancelled: so is the build.
        """
        if not _is_google(uri, self._registry_host):
            raise ConfigurationError(
                "Cloud Build can push to Artifact Registry (REGION-docker.pkg.dev/…), not to "
                f"{uri}; python -m kinetic.images base CATEGORY FOLDER writes what it is built "
                "from: build and push that with docker"
            )
        if not again and await self._registry.has(uri):
            return False
        await self._builders().publish(uri, context, again=again)
        return True

    def _of(self, mode: str) -> Images:
        if mode == "prebuilt":
            return self._prebuilt
        return self._builders() if mode == "bundled" else self._custom

    def _builders(self) -> BundledImages:
        if self._bundled is None:
            self._bundled = BundledImages(
                places(self._target, self._registry_host),
                self.builds,
                self._registry,
                self._builder,
                pace=self._pace,
                wheel=self._wheel,
                python_image=self._python_image,
            )
        return self._bundled

    async def aclose(self) -> None:
        """End what is being built, and close everything but the store of jobs."""
        parts = (self.builds, self._credentials, self._log_http, self._http, self._builder)
        async with contextlib.AsyncExitStack() as closing:  # the last comes first
            for part in (*parts, self._bundled):
                if part is not None:
                    closing.push_async_callback(part.aclose)


def started_from(environ: Mapping[str, str]) -> str:
    """What images begin with; a mirror of the public one, for instance.

    Raises:
        ConfigurationError: It is no name of an image.
    """
    named = environ.get(STARTED_FROM, "") or PYTHON_IMAGE
    try:
        checked_image(named.replace("{python}", "3.12"))
    except ConfigurationError as exc:
        raise ConfigurationError(
            f"{STARTED_FROM}={named!r} is no name of an image with Python, such as {PYTHON_IMAGE!r}"
        ) from exc
    return named
