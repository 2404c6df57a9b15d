"""``kinetic build-image`` and ``kinetic image``: build and show the images of jobs."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from kinetic.cli import output
from kinetic.cli.client import (
    FilePath,
    Group,
    TargetOptions,
    json_option,
    run_async,
    with_target_options,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kinetic.configuration import Target
    from kinetic.images import Plan

CATEGORIES = ("cpu", "gpu", "tpu")


@click.command("build-image", short_help='Build the base images for container_image="prebuilt".')
@click.option(
    "--repo",
    metavar="TEXT",
    help="Registry and path to push to. Default: KINETIC_BASE_IMAGE_REPO, then the profile.",
)
@click.option(
    "--category",
    "categories",
    type=click.Choice(CATEGORIES),
    multiple=True,
    help="Build only this category. Repeatable. Default: all.",
)
@click.option(
    "--flavor",
    type=click.Choice(("jax", "plain")),
    help="plain: without JAX and Keras, in the folder plain of the repository. Default: jax.",
)
@click.option(
    "--tag", metavar="TEXT", help="Tag of the images. Default: kinetic's version, which jobs use."
)
@click.option(
    "--dockerfile",
    type=FilePath(exists=True, dir_okay=False),
    help="Dockerfile to build instead of kinetic's; it can copy the same files as kinetic's.",
)
@click.option("--print", "prints", is_flag=True, help="Print the Dockerfiles; build nothing.")
@click.option("--dry-run", is_flag=True, help="Print the names of the images; build nothing.")
@click.option("--force", is_flag=True, help="Also build images that exist already.")
@click.option(
    "--update-credentials",
    is_flag=True,
    help="First store Docker Hub credentials in Secret Manager; builds log in with them.",
)
@json_option
@with_target_options
def build_image(
    options: TargetOptions,
    repo: str | None,
    categories: tuple[str, ...],
    flavor: str | None,
    tag: str | None,
    dockerfile: Path | None,
    prints: bool,
    dry_run: bool,
    force: bool,
    update_credentials: bool,
    as_json: bool,
) -> None:
    """Build the base images for container_image="prebuilt", and push them.

    Cloud Build takes a few minutes. Images that exist already stay unchanged without --force.
    --update-credentials reads DOCKERHUB_USERNAME and DOCKERHUB_TOKEN. On a terminal, kinetic asks
    for a name or token that isn't set.
    """
    from kinetic.images import base_image

    if prints and as_json:
        raise click.UsageError("--print prints Dockerfiles, not JSON: leave out --json")
    target = _target(options)
    repository = repo or target.base_image_repo
    if not repository and not prints:
        raise click.UsageError("pass --repo, such as us-docker.pkg.dev/PROJECT/images")
    try:
        text = dockerfile.read_text(encoding="utf-8") if dockerfile is not None else None
    except UnicodeDecodeError as exc:
        raise click.UsageError(f"{dockerfile} is not a Dockerfile: {exc}") from exc
    plans = [
        base_image(category, repository or "images", flavor=flavor, tag=tag, dockerfile=text)
        for category in dict.fromkeys(categories or CATEGORIES)
    ]
    if prints:
        for plan in plans:
            name = plan.image if repository else plan.image.rpartition("/")[2]
            output.lines([f"# {name}", *plan.dockerfile.splitlines()])
        return
    if update_credentials and not dry_run:
        _update_credentials(target)
    results = [None] * len(plans) if dry_run else run_async(_build_all(plans, target, force))
    rows = [_row(plan, result) for plan, result in zip(plans, results, strict=True)]
    output.table("build-image", ("category", "image", "state"), rows, as_json=as_json)
    failures = {str(error): error for error in results if isinstance(error, BaseException)}
    for message in [*failures][1:]:
        output.note(message)
    if failures:
        raise next(iter(failures.values()))
    if not dry_run:
        used = plans[0].image.rpartition("/")[0]
        output.note(f"to use the images, set KINETIC_BASE_IMAGE_REPO={used}")


def _update_credentials(target: Target) -> None:
    """Store Docker Hub credentials from the environment or a prompt in Secret Manager."""
    from kinetic.aio import infra

    site = infra.Site(project=target.project or "", zone=target.zone, cluster=target.cluster)
    name, token = (os.environ.get(f"DOCKERHUB_{suffix}", "") for suffix in ("USERNAME", "TOKEN"))
    if sys.stdin.isatty():
        name = name or click.prompt("Docker Hub user")
        token = token or click.prompt("Access token of Docker Hub", hide_input=True)
    if not (name and token):
        raise click.UsageError("set DOCKERHUB_USERNAME and DOCKERHUB_TOKEN, or use a terminal")
    run_async(infra.update_credentials(site, username=name, token=token, tell=output.note))
    output.note(f"builds of {site.project} log in to Docker Hub as {name}")


async def _build_all(
    plans: list[Plan], target: Target, force: bool
) -> list[bool | BaseException | None]:
    """Build all plans concurrently; return whether each image was built, or the error."""
    import asyncio

    from kinetic.images import publish

    builds = (publish(plan, target, again=force) for plan in plans)
    return [*await asyncio.gather(*builds, return_exceptions=True)]


def _row(plan: Plan, result: bool | BaseException | None) -> dict[str, Any]:
    states = {None: "planned", True: "built", False: "there"}
    error = str(result) if isinstance(result, BaseException) else None
    return {
        "category": plan.category,
        "image": plan.image,
        "digest": plan.digest,
        "state": "failed" if isinstance(result, BaseException) else states[result],
        "error": error,
    }


@click.group(cls=Group)
def image() -> None:
    """Show the images of functions."""


@image.command("show", short_help="Show the image that a function gets on a cluster.")
@click.argument("function", metavar="FILE.py:FUNCTION", type=click.Path())
@json_option
@with_target_options
def _show(options: TargetOptions, function: str, as_json: bool) -> None:
    """Show the image that a function gets on a cluster, and its content.

    The command sends and builds nothing.
    """
    from kinetic.cli.functions import load_function
    from kinetic.images import image_of

    plan = image_of(load_function(function), _target(options))
    fields: dict[str, Any] = {
        "image": plan.image,
        "category": plan.category,
        "digest": plan.digest,
        "dependencies": None if plan.source is None else str(plan.source),
        "requirements": plan.requirements.rstrip(),
        "files": len(plan.context),
        "bytes": sum(map(len, plan.context.values())),
        "dockerfile": plan.dockerfile.rstrip(),
    }
    output.fields("image", fields, as_json=as_json)


def _target(options: TargetOptions) -> Target:
    """Return the target whose project builds images, whatever backend runs the functions."""
    from kinetic import configuration

    return configuration.resolve(
        backend="local", project=options.project, zone=options.zone, cluster=options.cluster
    )
