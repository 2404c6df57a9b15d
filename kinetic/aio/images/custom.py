"""An image of the user's own, taken as it is."""

from __future__ import annotations

from kinetic.aio.images._places import checked_uri
from kinetic.aio.images.bundled import COMMAND
from kinetic.aio.ports import Image, ImageRequest

__all__ = ["CustomImages"]


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
        return Image(uri=checked_uri(request.mode), command=COMMAND)

    async def aclose(self) -> None:
        """Nothing is held."""
