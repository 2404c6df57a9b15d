"""Images for a Kubernetes cluster: built for the project (bundled), prebuilt, or the user's own."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from absl import logging

from kinetic._messages import one_line
from kinetic._progress.steps import step
from kinetic._runner.protocol.wire import Input
from kinetic._tasks import in_thread
from kinetic.aio import _shared_objects
from kinetic.aio._net.tokens import Credentials
from kinetic.aio.images import bootstrap, recipe
from kinetic.aio.images.cloud_build import Builder
from kinetic.aio.images.dependencies import dependencies_of
from kinetic.aio.images.docker_hub import has_token
from kinetic.aio.images.recipe import Plan, Wheel, installed_wheel
from kinetic.aio.images.registry import Registry, build_settings, registry_of
from kinetic.aio.ports import Image, ImageRequest, Store
from kinetic.configuration import Target
from kinetic.errors import AuthError, ConfigurationError, Refused
from kinetic.options import checked_image

COMMAND = ("python3",)
"""The command that starts Python in every image that a job runs in."""

PYTHON_IMAGE_VARIABLE = "KINETIC_PYTHON_IMAGE"
SECRET_MANAGER_VARIABLE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER"
CLOUD_BUILD_VARIABLE = "CLOUD_BUILD_EMULATOR_HOST"
REGISTRY_VARIABLE = "ARTIFACT_REGISTRY_EMULATOR_HOST"


class ContainerImages:
    """`kinetic.aio.ports.Images` for *target*; each request names the mode of its image.

    *jobs* is the store of jobs. *builds*, a bucket or a folder of one, holds the contexts of builds
    and their logs; `aclose` closes *builds*. ``CLOUD_BUILD_EMULATOR_HOST`` and
    ``ARTIFACT_REGISTRY_EMULATOR_HOST`` (``host:port``) name servers to use instead of Google's,
    without credentials. An emulated Cloud Build gets no Docker Hub credentials, unless
    `SECRET_MANAGER_VARIABLE` also replaces Secret Manager. *poll_s* and *retry_s* are passed to
    `Builder`. *wheel* returns the wheel of kinetic to install; default: that of the running
    kinetic.
    """

    def __init__(
        self,
        target: Target,
        *,
        jobs: Store,
        builds: Store,
        environ: Mapping[str, str] = os.environ,
        poll_s: tuple[float, float] = (0.5, 5.0),
        retry_s: float = 60.0,
        wheel: Callable[[], Wheel] = installed_wheel,
    ) -> None:
        self.builds = builds
        self._target = target
        self._jobs = jobs
        self._poll_s, self._retry_s = poll_s, retry_s
        self._wheel = wheel
        self._python_image = python_image_from(environ)
        self._registry_host = environ.get(REGISTRY_VARIABLE, "")
        self._builds_host = environ.get(CLOUD_BUILD_VARIABLE, "")
        self._has_docker_hub: Callable[[], Awaitable[bool]] | None = None
        if target.project and (SECRET_MANAGER_VARIABLE in environ or not self._builds_host):
            self._has_docker_hub = partial(has_token, target.project, environ)
        self._credentials = Credentials()
        self._registry = Registry(
            self._credentials, insecure_host=self._registry_host, retry_s=retry_s
        )
        self._builder: Builder | None = None
        self._logged_notices: set[str] = set()
        self._confirmed_images = _shared_objects.Confirmations()

    async def resolve(self, request: ImageRequest) -> Image:
        """Return the image of *request*; build a bundled image if its registry lacks it.

        Raises:
            PackError: The dependencies can't be read, or exist on this machine only.
            ConfigurationError: The image's name is invalid, a base image isn't published, a bundled
                image is requested and no project is configured, or the image has another Python.
            BuildError: The build failed.
            AuthError: A permission is missing.
            Unavailable: The registry, the store, or Cloud Build doesn't answer.

        Cancelled: the build is cancelled, unless another call of this object waits for the same
        build. The requirements file for a prebuilt image, or the runner for an image of the user,
        may stay in the store, where jobs share it.
        """
        match request.mode:
            case "bundled":
                return await self._resolve_bundled(request)
            case "prebuilt":
                return await self._resolve_prebuilt(request)
            case _:
                return await self._resolve_own(request)

    async def publish(
        self, uri: str, context: Mapping[str, bytes], *, rebuild: bool = False
    ) -> bool:
        """Build *context* and push it as *uri*; return whether a build ran.

        If the registry has the image, no build runs, unless *rebuild* is true.

        Raises:
            ConfigurationError: Cloud Build can't push to that registry, or no project is set.
            BuildError: The build failed.
            BackendError: A service refused, or doesn't answer.

        Cancelled: the build is cancelled.
        """
        if not self._can_query(uri):
            raise ConfigurationError(
                "Cloud Build can push to Artifact Registry (REGION-docker.pkg.dev/…), not to "
                f"{uri}; write the build context with python -m kinetic.images base CATEGORY "
                "FOLDER, then build and push the image with docker"
            )
        if not rebuild and await self._registry.has(uri):
            return False
        await self._build(uri, context)
        return True

    async def _resolve_bundled(self, request: ImageRequest) -> Image:
        repository = build_settings(self._target, self._registry_host).image
        plan = await in_thread(self._plan, request, repository)
        await self._confirmed_images.once(
            plan.image, lambda: self._build_if_missing(plan), grace=60.0
        )
        return Image(uri=plan.image, command=COMMAND, user=recipe.USER)

    def _plan(self, request: ImageRequest, repository: str) -> Plan:
        """Read the project's dependencies, and plan the bundled image. Reads files."""
        dependencies = dependencies_of(request, self._logged_notices)
        return recipe.bundled_plan(
            request, dependencies, repository, wheel=self._wheel(), python_image=self._python_image
        )

    async def _build_if_missing(self, plan: Plan) -> bool:
        if await self._registry.has(plan.image):
            return False
        await self._build(plan.image, plan.context)
        return True

    async def _build(self, uri: str, context: Mapping[str, bytes]) -> None:
        """Build and push the image *uri*, and show the progress."""
        if self._builder is None:
            self._builder = Builder(
                build_settings(self._target, self._registry_host),
                self.builds,
                None if self._builds_host else self._credentials,
                emulator=self._builds_host,
                has_docker_hub=self._has_docker_hub,
                poll_s=self._poll_s,
                retry_s=self._retry_s,
            )
        with step(f"building {uri.rpartition('/')[2]}") as building:

            def report(line: str) -> None:
                if shown := one_line(line):
                    logging.info("[build] %s", shown)
                    building.set_title(f"building: {shown}")

            logging.info("Building %s; this takes 2 to 5 minutes", uri)
            await self._builder.build(uri, context, report)
        logging.info("Built %s", uri)

    async def _resolve_prebuilt(self, request: ImageRequest) -> Image:
        repository = require_repository(request.base_image_repo)
        uri = base_uri(repository, request.category)
        dependencies = await in_thread(
            dependencies_of,
            request,
            self._logged_notices,
            keep_accelerator=recipe.flavor_of(repository) == recipe.PLAIN,
        )
        await self._confirmed_images.once(uri, lambda: self._check_published(uri))
        requirements = None
        if dependencies.has_packages:
            body = dependencies.text.encode()
            digest = hashlib.sha256(body).hexdigest()
            name = f"requirements/{digest}.txt"
            await _shared_objects.ensure(self._jobs, name, body)
            requirements = Input(name=name, start=0, stop=len(body), digest=digest)
        return Image(uri=uri, command=COMMAND, requirements=requirements, user=recipe.USER)

    async def _resolve_own(self, request: ImageRequest) -> Image:
        """Return the image that the user names, with the runner in the store if it lacks it."""
        # Nothing asks the registry: the cluster may pull an image that this machine can't see.
        uri = request.mode
        bootstrap.check_python(uri, request.python)
        name, content = await in_thread(bootstrap.runner_archive)
        await _shared_objects.ensure(self._jobs, name, content)
        if uri not in self._logged_notices:
            self._logged_notices.add(uri)
            is_certain = bootstrap.OFFICIAL.fullmatch(uri) is not None
            level, has = (logging.WARNING, "lacks") if is_certain else (logging.INFO, "may lack")
            logging.log(level, bootstrap.NOTICE, uri, has)
        return Image(
            uri=uri,
            command=bootstrap.COMMAND,
            environment=bootstrap.variables(self._jobs.url, name, request.python),
            runner=name,
        )

    async def _check_published(self, uri: str) -> bool:
        """Return whether a base image is known to exist, which only Google's registry can say."""
        # Another registry may hide an image from this machine, although the cluster can pull it.
        if not self._can_query(uri):
            return False
        try:
            exists = await self._registry.has(uri)
        except (AuthError, Refused):  # the cluster's nodes may have access
            return False
        if not exists:
            raise ConfigurationError(
                f"the base image {uri} was not published. Publish it with kinetic build-image "
                f"--repo {uri.rpartition('/')[0]}, or leave container_image out to build one"
            )
        return True

    def _can_query(self, uri: str) -> bool:
        """Return whether the image *uri* belongs to Artifact Registry, or to its emulator."""
        host = registry_of(uri)
        return host.endswith(".pkg.dev") or bool(host and host == self._registry_host)

    async def aclose(self) -> None:
        """Close everything but the store of jobs, after all calls of this object have ended."""
        async with contextlib.AsyncExitStack() as closers:
            for resource in (self.builds, self._credentials, self._registry, self._builder):
                if resource is not None:
                    closers.push_async_callback(resource.aclose)


def require_repository(repo: str | None) -> str:
    """Return *repo*, the repository of base images, if it is configured.

    Raises:
        ConfigurationError: No repository is configured.
    """
    if not repo:
        raise ConfigurationError(
            "no repository of base images is configured. Set base_image_repo= or "
            "KINETIC_BASE_IMAGE_REPO to the repository (registry/path) to which kinetic build-"
            "image --repo published the base images; or leave container_image out to build one"
        )
    return repo


def base_uri(repo: str, category: str, tag: str | None = None) -> str:
    """Return the name of a base image, ``{repo}/base-{category}:{tag}``.

    *tag* is kinetic's version by default.

    Raises:
        ConfigurationError: *repo* and *tag* don't form a valid name.
    """
    from kinetic._version import __version__

    tag = tag or __version__.replace("+", "-")  # a tag can't have the "+" of a local version
    try:
        return checked_image(f"{repo.rstrip('/')}/base-{category}:{tag}")
    except ConfigurationError as exc:
        raise ConfigurationError(
            f"base_image_repo={repo!r} and the tag {tag!r} don't form a valid image name; write "
            "the repository as registry/path, without a scheme, and the tag in letters, digits, "
            "and _.-"
        ) from exc


def python_image_from(environ: Mapping[str, str]) -> str:
    """Return the Python image from which kinetic builds images: the public one, or a mirror.

    Raises:
        ConfigurationError: ``KINETIC_PYTHON_IMAGE`` isn't a valid name of an image.
    """
    image = environ.get(PYTHON_IMAGE_VARIABLE, "") or recipe.PYTHON_IMAGE
    try:
        checked_image(image.replace("{python}", "3.12"))
    except ConfigurationError as exc:
        raise ConfigurationError(
            f"{PYTHON_IMAGE_VARIABLE}={image!r} is not a valid name of an image with Python, such "
            f"as {recipe.PYTHON_IMAGE!r}"
        ) from exc
    return image
