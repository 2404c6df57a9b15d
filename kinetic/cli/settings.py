"""``kinetic config`` and ``kinetic profile``: show settings, and manage named sets of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from kinetic.cli import output
from kinetic.cli.client import Group, TargetOptions, json_option, with_target_options
from kinetic.cli.jobs import yes_option

if TYPE_CHECKING:
    from kinetic.profiles import Profiles


class _ShownByDefault(Group):
    """A group that runs its command ``show`` if the command line names none."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``show`` in front of *args* that begin with one of its options, or are empty."""
        is_named = args and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if is_named else ["show", *args])


@click.group(cls=_ShownByDefault)
def config() -> None:
    """Show the settings in effect."""


@config.command("show")
@json_option
@with_target_options
def _show_config(options: TargetOptions, as_json: bool) -> None:
    """Show each setting's value and where the value comes from."""
    from kinetic import configuration

    given = options.given()
    settings = configuration.sources({name: given.get(name) for name in configuration.SHOWN})
    if settings["kube_context"][0] and not settings["project"][0]:
        # These two name a cluster of GKE, and the context names another one.
        unused = (None, "not used: kube_context names the cluster")
        settings |= {"zone": unused, "cluster": unused}
    rows = [
        {"setting": name, "value": value, "source": source}
        for name, (value, source) in settings.items()
    ]
    file = configuration.profiles_file()
    active = os.environ.get("KINETIC_PROFILE") or _load().current
    rows.append({"setting": "profile", "value": active, "source": str(file)})
    source = "KINETIC_HOME" if os.environ.get("KINETIC_HOME") else "default"
    rows.append({"setting": "home", "value": str(configuration.home()), "source": source})
    columns = ("setting", "value", "source")
    output.table("config", columns, rows, as_json=as_json)


def _load() -> Profiles:
    from kinetic import configuration, profiles

    return profiles.load(configuration.profiles_file())


def _update(change: Callable[[Profiles], Profiles]) -> None:
    from kinetic import configuration, profiles

    profiles.update(configuration.profiles_file(), change)


@click.group(cls=Group)
def profile() -> None:
    """Manage profiles: named sets of settings."""


@profile.command("create")
@click.argument("name")
@click.option(
    "--base-image-repo", metavar="TEXT", help="Registry and path of prebuilt base images."
)
@click.option(
    "--output-dir", metavar="TEXT", help="Folder or gs:// URL for the jobs' output directories."
)
@click.option(
    "--store-claim",
    metavar="NAME",
    help="PersistentVolumeClaim that holds the directory of --store. Default: none.",
)
@click.option("--run-as-user", metavar="NUMBER", help="User ID of the pods. Default: the image's.")
@click.option(
    "--pod-annotations",
    metavar="NAME=VALUE,…",
    help="Annotations of the pods, such as sidecar.istio.io/inject=false. Default: none.",
)
@click.option(
    "--ship",
    type=click.Choice(["all", "git"]),
    help="What ships of a project. git: not what git ignores. Default: all.",
)
@click.option("--force", is_flag=True, help="Replace the profile if it exists.")
@json_option
@with_target_options
def _create(
    options: TargetOptions,
    name: str,
    base_image_repo: str | None,
    output_dir: str | None,
    store_claim: str | None,
    run_as_user: str | None,
    pod_annotations: str | None,
    ship: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Create a profile with the options given. The first profile becomes the current one."""
    from kinetic.configuration import BACKENDS, checked_annotations, checked_zone
    from kinetic.profiles import Profile

    if options.backend is not None and options.backend.strip().lower() not in BACKENDS:
        raise click.BadParameter(f"choose {', '.join(BACKENDS)}", param_hint="--backend")
    checked_zone(options.zone, "--zone")
    checked_annotations(pod_annotations, "--pod-annotations")
    profile_settings = {
        "base_image_repo": base_image_repo,
        "output_dir": output_dir,
        "store_claim": store_claim,
        "run_as_user": run_as_user,
        "pod_annotations": pod_annotations,
        "ship": ship,
    }
    created = Profile.checked(name, {**options.given(), **profile_settings})

    def add(saved: Profiles) -> Profiles:
        if name in saved.profiles and not force:
            raise click.UsageError(f"the profile {name!r} exists: --force replaces it")
        updated = saved.create(created, replacing=force)
        return updated if saved.profiles else updated.use(name)

    _update(add)
    fields = {"action": "create", "name": name}
    output.done("profile.change", fields, f"created the profile {name!r}", as_json=as_json)


@profile.command("ls")
@json_option
def _list(as_json: bool) -> None:
    """List the profiles."""
    saved = _load()
    yes, no = (True, False) if as_json else ("*", "")
    rows = [
        {
            "current": yes if entry.name == saved.current else no,
            "name": entry.name,
            **entry.settings,
        }
        for entry in saved.profiles.values()
    ]
    columns = ("current", "name", "backend", "project", "zone", "cluster", "namespace", "store")
    empty = "no profiles; create one: kinetic profile create NAME --project PROJECT"
    output.table("profile.list", columns, rows, as_json=as_json, empty=empty)


@profile.command("show")
@click.argument("name", required=False)
@json_option
def _show(name: str | None, as_json: bool) -> None:
    """Show a profile. Default: the current one."""
    saved = _load()
    selected = saved[name] if name else saved.active(os.environ)
    if selected is None:
        raise click.UsageError("no profile is current: name one from `kinetic profile ls`")
    fields = {"name": selected.name, "current": selected.name == saved.current, **selected.settings}
    output.fields("profile", {**fields, **selected.extra}, as_json=as_json)


@profile.command("use")
@click.argument("name")
@json_option
def _use(name: str, as_json: bool) -> None:
    """Make a profile the current one."""
    _update(lambda saved: saved.use(name))
    fields = {"action": "use", "name": name}
    output.done("profile.change", fields, f"the current profile is {name!r}", as_json=as_json)


@profile.command("unset")
@json_option
def _unset(as_json: bool) -> None:
    """Make no profile the current one."""
    _update(lambda saved: saved.unset())
    fields = {"action": "unset", "name": None}
    output.done("profile.change", fields, "no profile is current", as_json=as_json)


@profile.command("rm")
@click.argument("name")
@yes_option
@json_option
def _remove(name: str, yes: bool, as_json: bool) -> None:
    """Remove a profile."""
    _load()[name]  # raises for an unknown name, before the question
    output.confirm(f"Remove the profile {name!r}?", yes=yes)
    _update(lambda saved: saved.remove(name))
    fields = {"action": "rm", "name": name}
    output.done("profile.change", fields, f"removed the profile {name!r}", as_json=as_json)
