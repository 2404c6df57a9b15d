"""``kinetic init``: join an existing cluster."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import click

from kinetic.cli import output
from kinetic.cli.client import json_option, run_async
from kinetic.cli.clusters import change_lines, controller_option, save_profile
from kinetic.cli.jobs import yes_option

if TYPE_CHECKING:
    from kinetic.aio.infra import Controller, Joining
    from kinetic.configuration import Target

NO_ACCESS = 4
"""The exit code if an administrator must first create objects for the user."""

SAVED_SETTINGS = ("project", "namespace", "store", "store_claim", "kube_context")
"""The settings of the saved profile; without a context, the profile also has zone and cluster."""


@click.command(short_help="Join an existing cluster, such as one on your machine.")
@click.option(
    "--kube-context",
    metavar="NAME",
    help="Context of the kubeconfig. Default: none; the next three options name a GKE cluster.",
)
@click.option("--project", metavar="TEXT", help="Google Cloud project.")
@click.option("--zone", metavar="TEXT", help="Zone of the GKE cluster. Default: us-central1-a.")
@click.option(
    "--cluster", metavar="TEXT", help="Name of the GKE cluster. Default: kinetic-cluster."
)
@click.option(
    "--namespace", metavar="TEXT", help="Kubernetes namespace of the jobs. Default: default."
)
@click.option(
    "--store",
    metavar="TEXT",
    help="gs://BUCKET, or a directory that all nodes mount at the same path. "
    "Default: the bucket of `kinetic up`.",
)
@click.option(
    "--store-claim",
    metavar="NAME",
    help="PersistentVolumeClaim with the directory. Default: none; pods mount their node's path.",
)
@click.option(
    "--profile-name",
    metavar="NAME",
    help="Name of the saved profile. Default: the name of the context or cluster.",
)
@click.option("--run-job", is_flag=True, help="At the end, run a tiny job and time its steps.")
@click.option("--image", metavar="IMAGE", help="Container image for --run-job.")
@click.option(
    "--print",
    "prints",
    is_flag=True,
    help="Print all objects as YAML for an administrator; create and save nothing.",
)
@controller_option
@yes_option
@json_option
def init(
    kube_context: str | None,
    project: str | None,
    controllers: tuple[str, ...],
    profile_name: str | None,
    run_job: bool,
    image: str | None,
    prints: bool,
    yes: bool,
    as_json: bool,
    **target_options: str | None,
) -> int:
    """Check a cluster, create what jobs need in a namespace, and save a profile for it.

    If you lack permission to create an object, kinetic prints YAML for an administrator, and exits
    with 4. After the administrator has applied the YAML, run the command again.
    """
    from kinetic.aio.infra import Join, read_controller, target_of

    if prints and as_json:
        raise click.UsageError("--print prints YAML, not JSON: leave out --json")
    if image is not None and not run_job:
        raise click.UsageError("--image requires --run-job, whose job it gives a container image")
    if kube_context is not None and (target_options["zone"] or target_options["cluster"]):
        raise click.UsageError("--kube-context conflicts with --zone and --cluster")
    if run_job and not (image or project):
        raise click.UsageError(
            "--run-job needs --image, because kinetic builds no image without --project"
        )
    target = target_of(kube_context=kube_context, project=project, **target_options)
    read_controllers = tuple(map(read_controller, controllers))
    if prints:

        async def read_manifests() -> str:
            async with Join(target, tell=output.note) as join:
                return await join.everything()

        output.lines(run_async(read_manifests()).splitlines())
        return 0
    joining = run_async(_join(target, read_controllers, yes=yes, as_json=as_json))
    if manifest := joining.manifest:
        if not as_json:
            output.lines(manifest.splitlines())
        output.note(
            f"an administrator of the cluster must apply this YAML for {joining.user!r} (kubectl "
            "apply -f -); then run the command again"
        )
        return NO_ACCESS
    settings = {name: getattr(target, name) for name in SAVED_SETTINGS}
    if kube_context is None:
        settings |= {"zone": target.zone, "cluster": target.cluster}
    # The name of a context may have characters that the name of a profile can't have.
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", kube_context or target.cluster).strip("-_")[:64]
    save_profile(profile_name or name or "cluster", settings)
    for name, value in settings.items():
        variable = f"KINETIC_{name.upper()}"
        if (environ_value := os.environ.get(variable)) and environ_value != value:
            output.note(f"{variable} is set and takes precedence over the profile")
    return _run_tiny_job(target, image) if run_job else 0


async def _join(
    target: Target, controllers: tuple[Controller, ...], *, yes: bool, as_json: bool
) -> Joining:
    """Show the plan, ask whether to carry it out, and do so; return the result."""
    from kinetic.aio.infra import Join

    async with Join(target, tell=output.note, controllers=controllers) as join:
        planned = await join.plan()
        for note in planned.notes:
            output.note(note)
        count = len(planned.steps)
        summary = f"{count} to create or update" if count else "nothing to create"
        lines = [*change_lines((*planned.changes, *planned.controllers)), summary]
        output.lines(lines, err=True)  # standard output is for YAML or JSON
        if count:
            await output.ask(output.confirm, f"Create these in {planned.cluster}?", yes=yes)
        applied = await join.apply(planned)
        if as_json:
            output.json_line("init", applied.to_dict(), indent=2)
        return applied


def _run_tiny_job(target: Target, image: str | None) -> int:
    """Run a tiny job on *target*; return the exit code."""
    from kinetic.cli.doctor import show
    from kinetic.doctor.checks import run_checks
    from kinetic.doctor.trial import trial

    # The job's client reads these settings from the environment, which may name another cluster.
    for name in ("kube_context", "store_claim"):
        variable, value = f"KINETIC_{name.upper()}", getattr(target, name)
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value
    report = run_async(run_checks([trial(target, image, after=())]))
    show(report)
    return 0 if report.healthy else 1
