"""What a submission's project asks for."""

from __future__ import annotations

from absl import logging

from kinetic._pack.dependencies import Dependencies, find_dependencies
from kinetic.aio.ports import ImageRequest

__all__ = ["dependencies_of"]


def dependencies_of(
    request: ImageRequest, said: set[str], *, own_accelerator: bool = False
) -> Dependencies:
    """The dependencies of the project of *request*; reads files.

    Its notices are logged, those that are in *said* not again. *own_accelerator*
    keeps what is else left to the image.

    Raises:
        PackError: The file cannot be read, or names what is on this machine only.
    """
    if request.entry_dir is None:
        return Dependencies()
    found = find_dependencies(request.entry_dir, request.root, own_accelerator=own_accelerator)
    for notice in found.notices:
        if notice not in said:
            said.add(notice)
            logging.warning("%s", notice)
    return found
