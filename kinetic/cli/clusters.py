"""``kinetic up``, ``down``, ``status``, and ``pool``: manage the cluster that jobs run on."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import click

from kinetic.cli import output
from kinetic.cli.client import Command, Group, json_option, run_async, with_options
from kinetic.cli.jobs import yes_option

if TYPE_CHECKING:
    from kinetic.aio.infra import Change, Infrastructure, Plan, Planned, Pool, Site

MARKS = {"create": "+", "update": "~", "replace": "~", "remove": "-", "wait": "…"}
"""The first character of a step's line; a change that isn't a step has an exclamation mark."""

SITE_OPTIONS = ("project", "zone", "cluster", "namespace")
"""The options that name a cluster."""

LIST_COLUMNS = (
    *("name", "kind", "machine", "accelerator", "topology", "min_nodes", "max_nodes", "spot"),
    *("reservation", "status", "problem"),
)
POOL_COLUMNS = (
    *("name", "kind", "machine", "accelerator", "nodes", "used", "min_nodes", "max_nodes", "spot"),
    *("reservation", "status", "usd_per_hour", "problem"),
)


def with_site(command: Command) -> Command:
    """Give *command* the options that name a cluster, as its argument ``site``.

    GOOGLE_CLOUD_PROJECT alone selects no project: these commands change resources that cost money.
    For the same reason, a profile that selects a context of the kubeconfig selects no project.
    """

    @functools.wraps(command)
    def wrapper(**kwargs: Any) -> Any:
        from kinetic import configuration
        from kinetic.aio.infra import Site

        environ = dict(os.environ)
        for name in ("GOOGLE_CLOUD_PROJECT", "KINETIC_KUBE_CONTEXT"):
            environ.pop(name, None)
        settings = {name: kwargs.pop(name) for name in SITE_OPTIONS}
        # `Site` says which setting is missing. `resolve` would also suggest KINETIC_KUBE_CONTEXT,
        # which these commands ignore, if it resolved a backend that needs a project.
        target = configuration.resolve(backend="local", environ=environ, **settings)
        named = settings["project"] or settings["cluster"] or environ.get("KINETIC_PROJECT")
        if target.kube_context and target.project and not named:
            raise click.UsageError(
                f"the current profile names the context {target.kube_context!r} of the "
                "kubeconfig; name a GKE cluster with --project, --zone, and --cluster"
            )
        site = Site.of(target)
        return command(site=site, **kwargs)

    return cast("Command", with_options(*SITE_OPTIONS)(wrapper))


node_zone_option = click.option(
    "--node-zone",
    metavar="TEXT",
    default="",
    help="Zone of a node pool, in the cluster's region. Default: the cluster's zone.",
)
controller_option = click.option(
    "--controller",
    "controllers",
    multiple=True,
    metavar="FILE[@sha256:DIGEST]",
    help="Install a controller from a downloaded file of manifests. Repeat for several.",
)


def plan_options(command: Command) -> Command:
    """Give *command* the options ``preview``, ``yes``, and ``as_json`` of `_confirm_and_apply`."""
    help_text = "Show the plan, with costs, and change nothing."
    preview_option = click.option("--preview", is_flag=True, help=help_text)
    return preview_option(yes_option(json_option(command)))


@click.command(short_help="Create a cluster on Google Cloud, or its missing parts.")
@with_site
@click.option(
    "--accelerator",
    "accelerators",
    multiple=True,
    metavar="NAME",
    help="Add a node pool for this accelerator, such as tpu-v6e-8. Repeat for several.",
)
@click.option(
    "--min-nodes",
    type=click.IntRange(min=0),
    default=0,
    help="Number of nodes that each of these pools always has. Default: 0.",
)
@node_zone_option
@click.option("--autopilot", is_flag=True, help="Make an Autopilot cluster instead of Standard.")
@click.option(
    "--public-endpoint",
    is_flag=True,
    help="Also open the control plane's IP address. Default: only its DNS name.",
)
@click.option("--create-project", is_flag=True, help="Create the project, if it doesn't exist.")
@click.option(
    "--parent",
    metavar="TEXT",
    default="",
    help="Organization or folder of the project to create, such as folders/456. Default: none.",
)
@click.option(
    "--billing-account",
    metavar="ID",
    default="",
    help="Link this billing account to the project. Default: no change.",
)
@controller_option
@click.option(
    "--profile-name", metavar="NAME", help="Name of the saved profile. Default: the cluster's name."
)
@plan_options
def up(
    site: Site,
    accelerators: tuple[str, ...],
    min_nodes: int,
    node_zone: str,
    autopilot: bool,
    public_endpoint: bool,
    create_project: bool,
    parent: str,
    billing_account: str,
    controllers: tuple[str, ...],
    profile_name: str | None,
    **flags: bool,
) -> None:
    """Create everything that jobs need on Google Cloud: a cluster, buckets, and accounts.

    After a failure or Ctrl-C, run the command again to continue. At the end, kinetic saves a
    profile and makes it the current one.
    """
    from dataclasses import asdict

    from kinetic.accelerators import parse
    from kinetic.aio.infra import Pool, check_parent, read_controller

    if (min_nodes or node_zone) and not accelerators:
        raise click.UsageError("--min-nodes and --node-zone require --accelerator")
    check_parent(parent, creates=create_project)
    read_controllers = tuple(map(read_controller, controllers))

    async def make_plan(infra: Infrastructure, retry_zone: str) -> Planned:
        pools = tuple(
            Pool(accelerator=parse(name), min_nodes=min_nodes, zone=retry_zone or node_zone)
            for name in accelerators
        )
        creates, account = create_project, billing_account
        if output.will_ask(yes=flags["yes"]) and not flags["preview"]:
            creates, account = await _ask_for_project(infra, creates=creates, account=account)
        return await infra.plan_up(
            shape="autopilot" if autopilot else "standard",
            pools=pools,
            public_endpoint=public_endpoint,
            create_project=creates,
            parent=parent,
            billing_account=account,
            controllers=read_controllers,
        )

    question = f"Change the project {site.project} as planned?"
    applied_site = run_async(_confirm_and_apply(site, make_plan, question, **flags))
    if applied_site:
        settings = {**asdict(applied_site), "store": applied_site.store}
        if autopilot:
            settings["zone"] = applied_site.region
        save_profile(profile_name or site.cluster, settings)


async def _ask_for_project(
    infra: Infrastructure, *, creates: bool, account: str
) -> tuple[bool, str]:
    """Ask whether to create a missing project, and for a missing billing account.

    Return whether to create the project, and the ID of the account.
    """
    name = infra.site.project
    if not await infra.has_project():
        question = f"{name} doesn't exist. Create the project?"
        await output.ask(output.confirm, question, yes=creates)
        creates = True
    elif await infra.is_billed():
        return creates, account
    if account or not (accounts := await infra.billing_accounts()):
        return creates, account
    choices = "".join(f"{found.id}  {found.name}\n" for found in accounts)
    ids = [found.id for found in accounts]
    choice = ""
    while choice not in ids:
        question = f"{choices}Billing account of {name} [{ids[0]}]"
        choice = await output.ask(output.read_answer, question) or ids[0]
    return creates, choice


@click.command(short_help="Remove the cluster and everything that `kinetic up` made.")
@with_site
@click.option(
    "--delete-results/--keep-results",
    "--force-destroy/--no-force-destroy",
    "delete_results",
    default=False,
    envvar="KINETIC_FORCE_DESTROY",
    help="Also remove the buckets, with all results. Default: --keep-results.",
)
@plan_options
def down(site: Site, delete_results: bool, **flags: bool) -> None:
    """Remove the cluster and its resources, but not the buckets with results.

    kinetic removes a resource only if its name belongs to this cluster and it has kinetic's labels.
    It asks you to type the cluster's name as confirmation. The plan shows which resources kinetic
    keeps, and why. If other locations have a cluster of this name, pass --zone; what both use
    stays.
    """

    zone_option = click.get_current_context().params["zone"]

    async def make_plan(infra: Infrastructure, _: str) -> Planned:
        planned = await infra.plan_down(force_destroy=delete_results)
        if planned.namesakes and zone_option is None:
            places = ", ".join((planned.plan.site.zone, *planned.namesakes))
            raise click.UsageError(
                f"there are clusters {site.cluster} in {places}; pass --zone to choose one"
            )
        return planned

    loss = " with all results" if delete_results else ""
    question = f"Type {site.cluster} to remove it{loss}"
    run_async(_confirm_and_apply(site, make_plan, question, site.cluster, **flags))


@click.command(short_help="Show the cluster, its pools, and what they cost now.")
@click.option(
    "--kube-context",
    metavar="NAME",
    help="Context of the kubeconfig instead of a GKE cluster. Default: KINETIC_KUBE_CONTEXT, then "
    "the profile, unless you pass --project, --zone, or --cluster.",
)
@with_options(*SITE_OPTIONS)
@json_option
def status(kube_context: str | None, as_json: bool, **options: Any) -> None:
    """Show the cluster that jobs use: what exists and runs, and on GKE what it costs per hour."""
    from dataclasses import replace

    from kinetic import configuration
    from kinetic.aio import infra

    named = any(options[name] for name in ("project", "zone", "cluster"))
    if kube_context is not None and named:
        raise click.UsageError("--kube-context conflicts with --project, --zone, and --cluster")
    environ = dict(os.environ)
    environ.pop("GOOGLE_CLOUD_PROJECT", None)
    if kube_context is not None:
        environ["KINETIC_KUBE_CONTEXT"] = kube_context
    target = configuration.resolve(backend="local", environ=environ, **options)
    if named:
        target = replace(target, kube_context=None)
    report = run_async(infra.status(target))
    content = report.to_dict()
    if as_json:
        output.json_line("status", content, indent=2)
        return
    first = ("context", "namespace") if report.context else ("project", "zone")
    fields = {key: content[key] for key in (*first, "cluster", "state", "version")}
    fields["usd_per_hour"] = output.dollars(report.usd_per_hour)
    missing = [f"{part.kind} {part.name}" for part in report.parts if part.exists is False]
    fields["missing"] = ", ".join(missing)
    fields["controllers"] = ", ".join(report.controllers)
    output.fields("status", fields, as_json=False)
    for columns, items in (
        (POOL_COLUMNS, content["pools"]),
        (("kind", "name", "pending", "admitted"), content["queues"]),
        (("id", "namespace", "user", "running", "waiting"), content["work"]),
    ):
        if items:
            click.echo()
            output.table("status", columns, items, as_json=False)
    if report.namesakes:
        places = ", ".join(report.namesakes)
        output.note(f"other clusters {report.cluster} are in {places}; --zone shows one of them")
    if report.left:
        output.note(f"the removed cluster left resources that cost money: {', '.join(report.left)}")
    for problem in report.unseen:
        output.note(f"can't see {problem}")


@click.group(cls=Group, short_help="List, add, and remove node pools.")
def pool() -> None:
    """List, add, and remove the cluster's node pools."""


@pool.command("list")
@with_site
@json_option
def _list(site: Site, as_json: bool) -> None:
    """List the cluster's node pools and ComputeClasses."""
    from kinetic.aio import infra

    pools = run_async(infra.list_pools(site, tell=output.note))
    empty = "no node pools; add one: kinetic pool add --accelerator NAME"
    output.table("pool.list", LIST_COLUMNS, pools, as_json=as_json, empty=empty)


@pool.command("add")
@with_site
@click.option(
    "--accelerator", required=True, metavar="NAME", help="Accelerator, such as tpu-v6e-8."
)
@click.option(
    "--min-nodes",
    type=click.IntRange(min=0),
    default=0,
    help="Number of nodes that the pool always has. Default: 0.",
)
@click.option(
    "--spot",
    is_flag=True,
    help="Use spot machines; a ComputeClass uses on-demand machines if there are no spot machines.",
)
@click.option(
    "--fixed", is_flag=True, help="Add a node pool even if the cluster has ComputeClasses."
)
@click.option(
    "--slices",
    type=click.IntRange(min=1),
    default=1,
    help="Number of pools, each with one slice of several hosts. Default: 1.",
)
@click.option(
    "--reservation",
    metavar="NAME",
    default="",
    envvar="KINETIC_RESERVATION",
    help="Use this reservation. Default: KINETIC_RESERVATION, or none.",
)
@node_zone_option
@plan_options
def _add(
    site: Site,
    accelerator: str,
    min_nodes: int,
    spot: bool,
    fixed: bool,
    slices: int,
    reservation: str,
    node_zone: str,
    **flags: bool,
) -> None:
    """Add a ComputeClass or a node pool for an accelerator.

    kinetic adds a ComputeClass if the cluster supports ComputeClasses. It adds a node pool for
    --fixed, --min-nodes, --reservation, --node-zone, or slices of several hosts. If the class or
    pool exists, kinetic changes at most the zones of the class, or the minimum of the pool.
    """
    from dataclasses import replace

    from kinetic.accelerators import parse
    from kinetic.aio.infra import Pool

    wanted: Pool = Pool(
        accelerator=parse(accelerator, spot=spot),
        min_nodes=min_nodes,
        reservation=reservation,
        zone=node_zone,
    )

    async def make_plan(infra: Infrastructure, retry_zone: str) -> Planned:
        pool = replace(wanted, zone=retry_zone or node_zone)
        return await infra.plan_pool(pool, slices=slices, fixed=fixed)

    question = (
        f"Add the pool {wanted.name}?"
        if slices == 1
        else f"Add the missing ones of {slices} pools?"
    )
    run_async(_confirm_and_apply(site, make_plan, question, **flags))


@pool.command("remove")
@click.argument("name")
@with_site
@plan_options
def _remove(site: Site, name: str, **flags: bool) -> None:
    """Remove a node pool or a ComputeClass that kinetic made.

    Jobs that run on a node pool are lost, or retried elsewhere. GKE removes the nodes of a
    ComputeClass when they are idle.
    """

    async def make_plan(infra: Infrastructure, _: str) -> Planned:
        return await infra.plan_pool_removal(name)

    question = f"Remove the pool {name} and its nodes?"
    run_async(_confirm_and_apply(site, make_plan, question, **flags))


async def _confirm_and_apply(
    site: Site,
    make_plan: Callable[[Infrastructure, str], Awaitable[Planned]],
    question: str,
    required_answer: str = "",
    /,
    *,
    preview: bool,
    yes: bool,
    as_json: bool,
) -> Site | None:
    """Show a plan, ask *question*, and carry out the plan. Return the site; None for *preview*.

    *make_plan* receives a zone for node pools: "" at first. If Google has no machines for a pool in
    a zone, kinetic offers another zone, and calls *make_plan* with that zone. If *required_answer*
    isn't empty, the user must type it instead of yes. The question names the cluster's location,
    because the plan may have gone to a file.
    """
    from dataclasses import replace

    from kinetic.aio.infra import Infrastructure

    retry_zone = ""
    tried_zones = {site.zone}
    while True:
        async with Infrastructure(site, tell=output.note) as infra:
            planned = await make_plan(infra, retry_zone)
            plan = planned.plan
            for note in planned.notes:
                output.note(note)
            if as_json:
                output.json_line("plan", plan.to_dict(), indent=2)
            else:
                output.lines(_plan_lines(plan))
            if preview:
                return None
            if plan.steps and not plan.obstacles:
                asked = f"The cluster is {_place(plan.site)}. {question}"
                await output.ask(output.require, asked, yes=yes, answer=required_answer)
            option, zone = await _apply(infra, planned, tried_zones, yes=yes)
        if not zone:
            return site
        await output.ask(output.confirm, f"Try the zone {zone}?", yes=yes)
        tried_zones.add(zone)
        retry_zone, site = ("", replace(site, zone=zone)) if option == "--zone" else (zone, site)


async def _apply(
    infra: Infrastructure, planned: Planned, tried_zones: set[str], *, yes: bool
) -> tuple[str, str]:
    """Carry out a plan.

    If Google lacks machines, return the zone to try next, and the option that names it. Otherwise,
    both are empty.
    """
    from kinetic.errors import Refused

    try:
        await infra.apply(planned)
    except Refused as exc:
        zones = [
            zone
            for zone in exc.answer.get("zonesAvailable") or ()
            if zone.startswith(f"{infra.site.region}-") and zone not in tried_zones
        ]
        if not zones:
            raise
        option = "--zone" if exc.answer.get("kind") == "cluster" else "--node-zone"
        if not output.will_ask(yes=yes):
            command = shlex.join(["kinetic", *sys.argv[1:], option, zones[0]])
            output.note(f"to try the zone {zones[0]}, run: {command}")
            raise
        output.note(str(exc))
        return option, zones[0]
    return "", ""


def _place(site: Site) -> str:
    return f"{site.cluster} in {site.zone} of the project {site.project}"


def _plan_lines(plan: Plan) -> list[str]:
    """Return the cluster's place, the lines of each change, and a summary."""
    lines = [f"plan for {_place(plan.site)}", *change_lines(plan.changes)]
    kept_count = sum(_is_as_wanted(change) for change in plan.changes)
    if not plan.steps:
        return [*lines, f"nothing to change: {kept_count} parts are as planned"]
    cost_change = plan.usd_per_hour
    verb = "adds" if cost_change >= 0 else "saves"
    summary = f"{len(plan.steps)} to change, {kept_count} as planned"
    return [*lines, f"{summary}; {verb} about ${abs(cost_change):.2f} an hour before any job runs"]


def change_lines(changes: Sequence[Change]) -> list[str]:
    """Return the lines of a plan for *changes*, without parts that are as wanted."""
    lines: list[str] = []
    for change in changes:
        if _is_as_wanted(change):
            continue
        action = change.action.value
        cost = f"  ${abs(change.usd_per_hour):.3f}/h" if change.usd_per_hour else ""
        lines.append(f"{MARKS.get(action, '!')} {action:<8} {change.kind} {change.name}{cost}")
        if change.reason:
            lines.append(f"             {change.reason}")
    return lines


def _is_as_wanted(change: Change) -> bool:
    return change.action.value == "keep" and not change.reason


def save_profile(name: str, settings: Mapping[str, str | None]) -> None:
    """Save a profile and make it the current one."""
    from kinetic import configuration, profiles

    profile = profiles.Profile.checked(name, settings)
    path = configuration.profiles_file()
    profiles.update(path, lambda saved: saved.create(profile, replacing=True).use(name))
    output.note(f"saved the profile {name!r} and made it the current one")
