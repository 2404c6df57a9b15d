"""Plan the image that a function needs, and have Cloud Build build it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kinetic.aio.images.recipe import Plan as Plan

if TYPE_CHECKING:
    from kinetic.configuration import Target


def base_image(
    category: str,
    repo: str,
    *,
    flavor: str | None = None,
    tag: str | None = None,
    dockerfile: str | None = None,
    python: str | None = None,
    python_image: str | None = None,
) -> Plan:
    """Plan the image ``{repo}/base-{category}:{tag}``, for ``container_image="prebuilt"``.

    Args:
        category: ``cpu``, ``gpu``, or ``tpu``.
        repo: The registry and path that base images are pushed to.
        flavor: ``jax``, or ``plain`` for images without JAX and Keras. These are in the folder
            ``plain`` of *repo*, so ``base_image_repo=`` selects them. Default: ``plain`` if *repo*
            is such a folder, else ``jax``.
        tag: Default: the version of kinetic, which jobs look for.
        dockerfile: The text of a Dockerfile to build instead of kinetic's, from the same files.
        python: A version such as ``3.12``. Default: this Python's.
        python_image: The image to start from, with Debian and Python. Default:
            ``KINETIC_PYTHON_IMAGE``, or ``python:{python}-slim``.

    Returns:
        The plan, for `publish`.

    Raises:
        ConfigurationError: The category or flavor doesn't exist, *repo* has the other flavor, or
            *repo* and *tag* don't form a valid name.

    Example::

        plan = kinetic.images.base_image("tpu", "us-docker.pkg.dev/me/images")
        print(plan.dockerfile)
    """
    from kinetic.aio.images import container, recipe
    from kinetic.errors import ConfigurationError

    if category not in recipe.CATEGORIES:
        known = ", ".join(recipe.CATEGORIES)
        raise ConfigurationError(f"images have no category {category!r}; there are {known}")
    present = recipe.flavor_of(repo)
    flavor = flavor or present
    if flavor not in (recipe.JAX_FLAVOR, recipe.PLAIN):
        raise ConfigurationError(f"images have no flavor {flavor!r}; there are jax, plain")
    if present == recipe.PLAIN and flavor != present:
        raise ConfigurationError(
            f"{repo} is for images of the flavor plain; choose another repository for {flavor}"
        )
    if present != flavor:
        repo = f"{repo.rstrip('/')}/{flavor}"
    context = recipe.image_context(
        category,
        python or platform.python_version(),
        python_image=python_image or container.python_image_from(os.environ),
        flavor=flavor,
    )
    if dockerfile is not None:
        context["Dockerfile"] = dockerfile.encode()
    return Plan(image=container.base_uri(repo, category, tag), category=category, context=context)


def image_of(function: Callable[..., Any], target: Target) -> Plan:
    """Plan the image that *function* gets on the cluster of *target*; send and build nothing.

    Args:
        function: A plain or decorated function; its ``container_image`` and accelerator decide.
        target: What `kinetic.configuration.resolve` returned.

    Returns:
        The plan. It has no build context if ``container_image`` names your own image.

    Raises:
        PackError: The dependencies can't be read, or exist on this machine only.
        ConfigurationError: The image has no valid name, or no base images are configured.

    Example::

        print(kinetic.images.image_of(train, kinetic.configuration.resolve()).image)
    """
    from kinetic._packing.discover import current_directory, find_project
    from kinetic.aio._preparing.calls import image_request
    from kinetic.aio.images import container, dependencies, recipe, registry
    from kinetic.options import settings_of

    plain, options = settings_of(function)
    mode = options.container_image or "bundled"
    category = options.parsed_accelerator.kind
    if mode not in ("bundled", "prebuilt"):
        return Plan(image=mode, category=category)
    project = find_project(plain, environ=os.environ, cwd=current_directory())
    request = image_request(options, target, project, plain)
    is_plain = recipe.flavor_of(request.base_image_repo or "") == recipe.PLAIN
    requirements = dependencies.dependencies_of(
        request, set(), keep_accelerator=mode == "prebuilt" and is_plain
    )
    if mode == "prebuilt":
        base = base_image(category, container.require_repository(request.base_image_repo))
        return replace(base, requirements=requirements.text, source=requirements.source)
    repository = registry.build_settings(target).image if target.project else ""
    python_image = container.python_image_from(os.environ)
    return recipe.bundled_plan(request, requirements, repository, python_image=python_image)


async def publish(plan: Plan, target: Target, *, again: bool = False) -> bool:
    """Build *plan* with Cloud Build in the project of *target*, and push it.

    A build takes some minutes.

    Args:
        plan: What `image_of` or `base_image` returned.
        target: What `kinetic.configuration.resolve` returned.
        again: Build the image even if the registry has it. Default: False.

    Returns:
        Whether the image was built; False if the registry had it already.

    Raises:
        ConfigurationError: No project is configured, or its registry isn't Google's.
        BuildError: The build failed; the message has the last lines of its log.
        BackendError: A service refused, or didn't answer.

    Cancelled: the build is cancelled.

    Example::

        built = await kinetic.images.publish(plan, kinetic.configuration.resolve())
    """
    from contextlib import aclosing

    from kinetic.aio.backends.gke import builds_url, storage
    from kinetic.aio.images.registry import build_settings

    build_settings(target)  # raises without a project
    store, images = storage(target, builds_url(target), os.environ)
    async with aclosing(store), aclosing(images):
        return await images.publish(plan.image, plan.context, rebuild=again)
