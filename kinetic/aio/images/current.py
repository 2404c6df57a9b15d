"""The images of the local platform: the interpreter that is running now, or one made by uv."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kinetic import configuration
from kinetic.aio._release import in_thread
from kinetic.aio.ports import Image, ImageRequest
from kinetic.errors import ConfigurationError

if TYPE_CHECKING:
    from kinetic.aio.images._wheel import Wheel

__all__ = ["CurrentInterpreter"]


class CurrentInterpreter:
    """`kinetic.aio.ports.Images` where nothing runs in a container.

    *home* is where environments are kept, `configuration.home` by default;
    *wheel* makes kinetic's own, by default of what is running.
    """

    def __init__(
        self,
        home: Path | None = None,
        environ: Mapping[str, str] = os.environ,
        *,
        wheel: Callable[[], Wheel] | None = None,
    ) -> None:
        self._home = home
        self._environ = environ
        self._wheel = wheel
        self._said: set[str] = set()

    async def resolve(self, request: ImageRequest) -> Image:
        """This interpreter; for "prebuilt", one that has the project's dependencies and kinetic.

        Nothing else is in that one: what the base image of a cluster would have
        must be among the dependencies, JAX too.

        Raises:
            ConfigurationError: A container image was asked for, or there is no uv.
            PackError: The dependencies cannot be read, or name what only this machine has.
            BuildError: They cannot be installed.
        """
        if request.mode == "prebuilt":
            return Image(uri="", command=(str(await self._installed(request)),))
        if request.mode != "bundled":
            raise ConfigurationError(
                f"the local platform starts processes, not containers: it cannot run "
                f"container_image={request.mode!r}; leave it out, or choose another backend"
            )
        return Image(uri="", command=(sys.executable,))

    async def _installed(self, request: ImageRequest) -> Path:
        from kinetic.aio.images._project import dependencies_of
        from kinetic.aio.images._uv import Environments
        from kinetic.aio.images._wheel import installed_wheel

        found = await in_thread(dependencies_of, request, self._said, own_accelerator=True)
        home = self._home or configuration.home(self._environ)
        folder = home / "cache" / "environments"
        wheel = self._wheel or installed_wheel
        return await Environments(folder, self._environ, wheel=wheel).python(found.text)

    async def aclose(self) -> None:
        """Nothing is held."""
