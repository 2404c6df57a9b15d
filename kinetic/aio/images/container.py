"""The images of a Kubernetes cluster: bundled, prebuilt, or one of the user's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping

from kinetic.aio._credentials import Credentials
from kinetic.aio.images._build_log import BuildLog
from kinetic.aio.images._cloud_build import Builder
from kinetic.aio.images._http import Http
from kinetic.aio.images._places import EMULATOR, checked_uri, places
from kinetic.aio.images._recipe import PYTHON_IMAGE
from kinetic.aio.images._registry import Registry
from kinetic.aio.images._turn import Pace
from kinetic.aio.images._wheel import Wheel, installed_wheel
from kinetic.aio.images.bundled import BundledImages
from kinetic.aio.images.custom import CustomImages
from kinetic.aio.images.prebuilt import PrebuiltImages
from kinetic.aio.ports import Image, ImageRequest, Images, Store
from kinetic.configuration import Target
from kinetic.errors import ConfigurationError

__all__ = ["ContainerImages"]

STARTED_FROM = "KINETIC_PYTHON_IMAGE"
BUILDS = "CLOUD_BUILD_EMULATOR_HOST"
OBJECTS = "STORAGE_EMULATOR_HOST"
GOOGLE = "https://storage.googleapis.com"


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
        self._jobs, self._builds = jobs, builds
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
            lambda bucket, name: BuildLog(self._log_http, objects or GOOGLE, bucket, name),
            emulator=builder,
            look=look,
            patience=patience,
        )
        self._pace = pace
        self._wheel = wheel
        self._python_image = _started_from(environ)
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

    def _of(self, mode: str) -> Images:
        if mode == "prebuilt":
            return self._prebuilt
        if mode != "bundled":
            return self._custom
        if self._bundled is None:
            self._bundled = BundledImages(
                places(self._target, self._registry_host),
                self._builds,
                self._registry,
                self._builder,
                pace=self._pace,
                wheel=self._wheel,
                python_image=self._python_image,
            )
        return self._bundled

    async def aclose(self) -> None:
        """End what is being built, and close everything but the store of jobs."""
        parts = (self._builds, self._credentials, self._log_http, self._http, self._builder)
        async with contextlib.AsyncExitStack() as closing:  # the last comes first
            for part in (*parts, self._bundled):
                if part is not None:
                    closing.push_async_callback(part.aclose)


def _started_from(environ: Mapping[str, str]) -> str:
    """What images begin with; a mirror of the public one, for instance."""
    named = environ.get(STARTED_FROM, "") or PYTHON_IMAGE
    try:
        checked_uri(named.replace("{python}", "3.12"))
    except ConfigurationError as exc:
        raise ConfigurationError(
            f"{STARTED_FROM}={named!r} is no name of an image with Python, such as {PYTHON_IMAGE!r}"
        ) from exc
    return named
