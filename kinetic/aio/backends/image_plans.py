"""Plan the image that a function needs, and have Cloud Build build it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kinetic.configuration import Target


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
