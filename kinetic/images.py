"""What goes into container images: ``python -m kinetic.images runner``, or ``... base tpu FOLDER``.

``runner`` prints the one file that an image of your own needs, at
``/app/remote_runner.py``. ``base`` writes the folder that a base image is built
from, for ``container_image="prebuilt"``.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kinetic.configuration import Target

__all__ = ["Plan", "base_image", "image_of", "main", "publish", "runner", "write_base"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An image before it is built.

    ``image`` is its name, without a registry where no project is configured.
    ``context`` is everything that it is built from, by path, ``Dockerfile`` among
    it; empty for an image of the user's own. ``requirements`` is what the
    project wants, as the image has it or, of a base image, as the job installs
    it, and ``source`` the file that says so.
    """

    image: str
    category: str
    context: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    requirements: str = ""
    source: Path | None = None

    @property
    def dockerfile(self) -> str:
        """Its Dockerfile; empty for an image of the user's own."""
        return self.context.get("Dockerfile", b"").decode()

    @property
    def digest(self) -> str:
        """SHA-256 over all that it is built from; the tag of a bundled image begins it."""
        from kinetic.aio.images import recipe

        return recipe.digest(self.context) if self.context else ""


def base_image(
    category: str,
    repo: str,
    *,
    tag: str | None = None,
    dockerfile: str | None = None,
    python: str | None = None,
    python_image: str | None = None,
) -> Plan:
    """The image ``{repo}/base-{category}:{tag}``, for ``container_image="prebuilt"``.

    Args:
        category: ``cpu``, ``gpu`` or ``tpu``.
        repo: The registry and path that base images are pushed to.
        tag: Jobs look for the version of kinetic, which is the default.
        dockerfile: Its text, instead of kinetic's own; it finds the same files beside it.
        python: A version such as ``3.12`` (default: this one's).
        python_image: What it begins with, which has Debian and Python (default:
            ``KINETIC_PYTHON_IMAGE``, or ``python:{python}-slim``).

    Raises:
        ConfigurationError: There is no such category, or *repo* and *tag* make no name.
    """
    from kinetic.aio.images import container, recipe
    from kinetic.errors import ConfigurationError

    if category not in recipe.CATEGORIES:
        known = ", ".join(recipe.CATEGORIES)
        raise ConfigurationError(f"there is no category {category!r} of images; there are {known}")
    context = recipe.base_context(
        category,
        python or platform.python_version(),
        recipe.installed_wheel(),
        recipe.runner_files(),
        python_image=python_image or container.started_from(os.environ),
    )
    if dockerfile is not None:
        context["Dockerfile"] = dockerfile.encode()
    return Plan(image=container.base_uri(repo, category, tag), category=category, context=context)


def image_of(function: Callable[..., Any], target: Target) -> Plan:
    """The image that *function* gets on the cluster of *target*; nothing is sent or built.

    Raises:
        PackError: The dependencies cannot be read, or are on this machine only.
        ConfigurationError: The image has no proper name, or ``prebuilt`` no place.
    """
    from kinetic._packing.discover import find_project
    from kinetic.aio.images import container, recipe, registry
    from kinetic.aio.ports import ImageRequest
    from kinetic.options import settings_of

    plain, options = settings_of(function)
    mode = options.container_image or "bundled"
    category = options.parsed_accelerator.kind
    if mode not in ("bundled", "prebuilt"):
        return Plan(image=mode, category=category)
    project = find_project(plain, environ=os.environ, cwd=Path.cwd())
    repo = options.base_image_repo or target.base_image_repo
    request = ImageRequest(
        mode=mode,
        category=category,
        base_image_repo=repo,
        python=platform.python_version(),
        entry_dir=project.entry_dir,
        root=project.root,
    )
    found = recipe.dependencies_of(request, set())
    if mode == "prebuilt":
        base = base_image(category, container.named_repo(repo))
        return replace(base, requirements=found.text, source=found.source)
    context = recipe.bundled_context(
        category,
        request.python,
        recipe.installed_wheel(),
        recipe.runner_files(),
        found.text,
        python_image=container.started_from(os.environ),
    )
    place = f"{registry.places(target).image}:" if target.project else ""
    return Plan(
        image=f"{place}{recipe.tag(category, context)}",
        category=category,
        context=context,
        requirements=found.text,
        source=found.source,
    )


async def publish(plan: Plan, target: Target, *, again: bool = False) -> bool:
    """Have Cloud Build build *plan* in the project of *target*, and push it.

    It takes some minutes. What is there already is left as it is, unless it is to be built
    *again*; returned is whether it was built.

    Raises:
        ConfigurationError: No project is configured, or its registry is none of Google's.
        BuildError: It cannot be built; the message has the last lines of the build's log.
        BackendError: Somebody refused, or did not answer.

    Cancelled: the build is cancelled, too.
    """
    from contextlib import aclosing

    from kinetic.aio.backends.gke import builds_url, storage
    from kinetic.aio.images.registry import places

    places(target)  # raises where no project is configured
    store, images = storage(target, builds_url(target), os.environ)
    async with aclosing(store), aclosing(images):
        return await images.publish(plan.image, plan.context, again=again)


def runner() -> str:
    """The runner of this kinetic, as the text of one file.

    It needs Python, of the minor version that submits, and what
    ``pip install cloudpickle google-cloud-storage absl-py`` gives.
    """
    from kinetic._version import __version__
    from kinetic.aio.images.recipe import runner_files, single_file

    return single_file(runner_files(), __version__)


def write_base(
    category: str,
    folder: str | Path,
    *,
    python: str | None = None,
    python_image: str | None = None,
) -> None:
    """Write what `base_image` is built from into *folder*, to be built by other means.

    Raises:
        ConfigurationError: There is no such category.
        OSError: The folder cannot be written.
    """
    plan = base_image(category, "base", python=python, python_image=python_image)
    for name, body in plan.context.items():
        file = Path(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(body)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kinetic.images", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("runner", help="print the runner, for an image of your own")
    base = commands.add_parser("base", help="write what a base image is built from")
    base.add_argument("category", choices=("cpu", "gpu", "tpu"))
    base.add_argument("folder")
    base.add_argument("--python", help="the Python of the image (default: this one's)")
    base.add_argument("--from", dest="start", help="what to begin with (python:{python}-slim)")
    parsed = parser.parse_args(arguments)
    if parsed.command == "runner":
        sys.stdout.write(runner())
    else:
        write_base(parsed.category, parsed.folder, python=parsed.python, python_image=parsed.start)


if __name__ == "__main__":
    main()
