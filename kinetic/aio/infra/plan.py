"""Plan the changes that turn the observed state of a site into the wanted one. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kinetic.aio._net.google import GoogleRequest
from kinetic.aio.infra.resources import (
    Action,
    Change,
    Document,
    Observed,
    Policy,
    Resource,
    differences,
)
from kinetic.aio.infra.site import CLUSTER_LABEL, SOLUTION_LABEL, UNLABELED_KINDS, Site, is_our_pool

IN_PROGRESS_STATUSES = frozenset({"PROVISIONING", "RECONCILING", "STOPPING"})
BROKEN_STATUSES = frozenset({"ERROR", "DEGRADED", "RUNNING_WITH_ERROR"})
ENDING_STATUSES = frozenset({"ERROR", "STOPPING"})
"""The states of a cluster in whose place `up` creates a new one."""

SHARED_KINDS = ("project", "billing", "secret")
"""Kinds of resources that kinetic doesn't mark as its own, because clusters share them."""

WRITE_ACTIONS = (Action.CREATE, Action.UPDATE, Action.REPLACE, Action.WAIT, Action.REMOVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The changes that `up`, `down`, or `pool` makes, in the order of planning.

    The ``zone`` of ``site`` is where the cluster is: a zone or, if the cluster is regional, a
    region.
    """

    site: Site
    changes: tuple[Change, ...]

    @property
    def steps(self) -> tuple[Change, ...]:
        """Return the changes that create, change, remove, or wait for something."""
        return tuple(change for change in self.changes if change.action in WRITE_ACTIONS)

    @property
    def obstacles(self) -> tuple[Change, ...]:
        """Return the changes that block the plan: those of unreadable and foreign resources."""
        return tuple(
            change for change in self.changes if change.action in (Action.FOREIGN, Action.UNSEEN)
        )

    @property
    def usd_per_hour(self) -> float:
        """Return the change in cost, in US dollars per hour; negative if the steps save money."""
        return sum(change.usd_per_hour or 0.0 for change in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as ``--json`` shows it."""
        return {
            "project": self.site.project,
            "zone": self.site.zone,
            "cluster": self.site.cluster,
            "changes": [change.to_dict() for change in self.changes],
            "usd_per_hour": round(self.usd_per_hour, 4),
        }


def additions(
    site: Site, wanted: Iterable[Resource | Policy], observed: Mapping[str, Observed]
) -> tuple[Change, ...]:
    """Return one change per resource in *wanted*: the change that makes it exist as wanted."""
    by_keras_kinetic = _is_made_by_keras_kinetic(observed, site)
    states = {resource: observed[resource.key] for resource in wanted}
    if any(
        resource.kind == "cluster" and (state.document or {}).get("status") in ENDING_STATUSES
        for resource, state in states.items()
    ):
        # The node pools end with the old cluster, so the plan creates them all.
        pools = [resource for resource in states if resource.kind == "node pool"]
        states |= dict.fromkeys(pools, Observed())
    return tuple(
        _addition(site, resource, state, by_keras_kinetic) for resource, state in states.items()
    )


def _is_made_by_keras_kinetic(observed: Mapping[str, Observed], site: Site) -> bool:
    """Return whether the cluster, repository, or a bucket has the labels of keras-kinetic."""
    labeled_keys = (
        f"cluster {site.cluster}",
        f"repository {site.prefix}",
        *(f"bucket {site.bucket(purpose)}" for purpose in ("jobs", "builds")),
    )
    for key in labeled_keys:
        document = observed.get(key, Observed()).document or {}
        labels: Document = document.get("resourceLabels") or document.get("labels") or {}
        if labels.get(SOLUTION_LABEL) == "kinetic" and CLUSTER_LABEL not in labels:
            return True
    return False


def _change(
    resource: Resource | Policy, action: Action, reason: str = "", usd: float | None = None
) -> Change:
    return Change(
        action=action, kind=resource.kind, name=resource.name, reason=reason, usd_per_hour=usd
    )


def _addition(
    site: Site, resource: Resource | Policy, observed: Observed, by_keras_kinetic: bool
) -> Change:
    """Return the change that makes *resource* exist as wanted."""
    if observed.problem:
        return _change(resource, Action.UNSEEN, observed.problem)
    document = observed.document
    if isinstance(resource, Policy):
        if missing := resource.missing(document or {}):
            return _change(resource, Action.UPDATE, f"add {', '.join(map(str, missing))}")
        return _change(resource, Action.KEEP)
    if document is None:
        return _change(resource, Action.CREATE, resource.description, resource.usd_per_hour)
    if not is_ours(site, resource, document, by_keras_kinetic):
        reason = (
            f"a {resource.kind} of this name exists without the labels of {site.cluster}; remove it"
        )
        alternative = "" if resource.kind == "node pool" else ", or choose another cluster name"
        return _change(resource, Action.FOREIGN, reason + alternative)
    status = str(document.get("status") or "")
    if status in IN_PROGRESS_STATUSES:
        usd = resource.usd_per_hour if status == "STOPPING" else None
        return _change(resource, Action.WAIT, f"it is {status}", usd)
    if status == "ERROR" and resource.kind in ("cluster", "node pool"):
        consequence, usd = "has no nodes", resource.usd_per_hour
        if resource.kind == "cluster":
            consequence, usd = "is unusable, so kinetic removes it with its pools and jobs", None
        return _change(resource, Action.REPLACE, f"it {consequence}: {problem_of(document)}", usd)
    if status in BROKEN_STATUSES:
        return _change(resource, Action.DIFFERS, f"it is {status}: {problem_of(document)}")
    fixable_differences = [*differences(resource.wanted_fields, document)]
    all_differences = [*fixable_differences, *differences(resource.reported_fields, document)]
    if not all_differences:
        return _change(resource, Action.KEEP)
    reason = "; ".join(all_differences)
    if not fixable_differences or resource.update is None:
        return _change(resource, Action.DIFFERS, reason)
    usd = resource.usd_per_hour
    if usd is not None and observed.usd_per_hour is not None:
        return _change(resource, Action.UPDATE, reason, usd - observed.usd_per_hour)
    return _change(resource, Action.UPDATE, reason)


def is_ours(site: Site, resource: Resource, document: Document, by_keras_kinetic: bool) -> bool:
    """Return whether kinetic may change the resource in *document*.

    kinetic may change a resource that has kinetic's mark, or a kind that needs no mark. If
    keras-kinetic made the site (*by_keras_kinetic*), kinetic may also change a network, subnetwork,
    or router that has neither description nor labels.
    """
    if resource.kind == "node pool":
        return is_our_pool(document)
    if resource.kind in SHARED_KINDS or site.owns(document):
        return True
    is_marked = document.get("description") or document.get("labels")
    return by_keras_kinetic and resource.kind in UNLABELED_KINDS and not is_marked


def problem_of(document: Document) -> str:
    """Return what Google says is wrong with a cluster or a pool."""
    conditions = document.get("conditions") or ()
    messages = [
        str(document.get("statusMessage") or ""),
        *(str(condition.get("message")) for condition in conditions),
    ]
    return "; ".join(message for message in messages if message) or "Google gives no reason"


def removals(
    site: Site,
    present: Sequence[Resource | Policy],
    observed: Mapping[str, Observed],
    *,
    keeps_buckets: bool = False,
    users: Mapping[GoogleRequest, str] = MappingProxyType({}),
) -> tuple[Change, ...]:
    """Return a change for each existing resource in *present*: its removal, or why it stays.

    *users* has the requests that read the resources of other clusters, each with the location of
    its cluster. A resource that such a request reads stays.
    """
    by_keras_kinetic = _is_made_by_keras_kinetic(observed, site)
    changes: list[Change] = []
    for resource in present:
        document, problem = observed[resource.key].document, observed[resource.key].problem
        location = users.get(resource.read)
        if location and resource.kind != "cluster":
            if isinstance(resource, Resource) and (document is not None or problem):
                reason = f"the cluster {site.cluster} in {location} uses it"
                changes.append(_change(resource, Action.KEEP, reason))
        elif problem:
            changes.append(_change(resource, Action.UNSEEN, problem))
        elif document is None:
            continue
        elif isinstance(resource, Policy):
            if resource.without_members(document)["bindings"] != document.get("bindings", []):
                reason = "the bindings of kinetic's accounts"
                changes.append(_change(resource, Action.REMOVE, reason))
        elif not is_ours(site, resource, document, by_keras_kinetic):
            reason = "it has kinetic's name, but not kinetic's labels"
            changes.append(_change(resource, Action.KEEP, reason))
        elif keeps_buckets and resource.kind == "bucket":
            reason = "it may hold results; --delete-results removes it"
            changes.append(_change(resource, Action.KEEP, reason))
        else:
            usd = observed[resource.key].usd_per_hour
            usd = resource.usd_per_hour if usd is None else usd
            changes.append(_change(resource, Action.REMOVE, usd=-usd if usd else None))
    return tuple(changes)
