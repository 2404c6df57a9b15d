"""Plan the changes that turn the observed state of a site into the wanted one. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kinetic.aio.infra.resources import (
    Action,
    Change,
    Document,
    Observed,
    Policy,
    Resource,
    differences,
)
from kinetic.aio.infra.site import CLUSTER_LABEL, SOLUTION_LABEL, Site, is_our_pool

IN_PROGRESS_STATUSES = frozenset({"PROVISIONING", "RECONCILING", "STOPPING"})
BROKEN_STATUSES = frozenset({"ERROR", "DEGRADED", "RUNNING_WITH_ERROR"})
SHARED_KINDS = ("project", "billing", "secret")
"""Kinds of resources that kinetic doesn't mark as its own, because clusters share them."""

UNLABELED_KINDS = ("network", "subnetwork", "router")
"""Kinds of resources that keras-kinetic doesn't label."""

WRITE_ACTIONS = (Action.CREATE, Action.UPDATE, Action.REPLACE, Action.WAIT, Action.REMOVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The changes of `up`, `down`, or `pool`, planned or carried out; in the order of planning."""

    site: Site
    changes: tuple[Change, ...]

    @property
    def steps(self) -> tuple[Change, ...]:
        """Return the changes that create, change, remove, or wait for something."""
        return tuple(change for change in self.changes if change.action in WRITE_ACTIONS)

    @property
    def obstacles(self) -> tuple[Change, ...]:
        """Return the changes that block the plan: resources of others, and unreadable ones."""
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
    """Return one change per resource in *wanted*: the change after which it exists as wanted."""
    adopted = _is_made_by_keras_kinetic(observed, site)
    changes = tuple(
        _addition(site, resource, observed[resource.key], adopted) for resource in wanted
    )
    if any(change.kind == "cluster" and change.action is Action.REPLACE for change in changes):
        # Removing the old cluster also removes its node pools, so all of them are created.
        return tuple(
            replace(change, action=Action.CREATE, reason="")
            if change.kind == "node pool"
            else change
            for change in changes
        )
    return changes


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


def order_marked_last(
    site: Site, present: Sequence[Resource | Policy], observed: Mapping[str, Observed]
) -> tuple[Resource | Policy, ...]:
    """Order *present* so that `down` removes keras-kinetic's repository after its network.

    keras-kinetic labels the repository, but not the network. The repository's label shows that
    keras-kinetic made both. If `down` removed the repository first and was interrupted, the next
    `down` would keep the network.
    """
    if not _is_made_by_keras_kinetic(observed, site):
        return tuple(present)
    last = f"repository {site.prefix}"
    return tuple(
        replace(resource, needs=(*resource.needs, last))
        if resource.kind in UNLABELED_KINDS
        else resource
        for resource in present
    )


def _addition(site: Site, resource: Resource | Policy, observed: Observed, adopted: bool) -> Change:
    """Return the change after which *resource* exists as wanted; see `is_ours` for *adopted*."""

    def new_change(action: Action, reason: str = "", usd: float | None = None) -> Change:
        return Change(
            action=action, kind=resource.kind, name=resource.name, reason=reason, usd_per_hour=usd
        )

    if observed.problem:
        return new_change(Action.UNSEEN, observed.problem)
    document = observed.document
    if isinstance(resource, Policy):
        missing = resource.missing(document or {})
        if not missing:
            return new_change(Action.KEEP)
        return new_change(Action.UPDATE, "add " + ", ".join(map(str, missing)))
    if document is None:
        return new_change(Action.CREATE, resource.description, resource.usd_per_hour)
    if not is_ours(site, resource, document, adopted):
        return new_change(
            Action.FOREIGN,
            f"one of this name exists, and it isn't marked as part of {site.cluster}; remove it"
            + ("" if resource.kind == "node pool" else ", or choose another cluster name"),
        )
    status = str(document.get("status") or "")
    if status in IN_PROGRESS_STATUSES:
        return new_change(Action.WAIT, f"it is {status}")
    if status == "ERROR" and resource.kind in ("cluster", "node pool"):
        consequence = "is unusable, and goes with its pools and jobs"
        consequence = consequence if resource.kind == "cluster" else "has no nodes"
        return new_change(Action.REPLACE, f"it {consequence}: {problem_of(document)}")
    if status in BROKEN_STATUSES:
        return new_change(Action.DIFFERS, f"it is {status}: {problem_of(document)}")
    fixable, unfixable = (
        [*differences(resource.wanted_fields, document)],
        [*differences(resource.reported_fields, document)],
    )
    if not (fixable or unfixable):
        return new_change(Action.KEEP)
    can_update = fixable and resource.update is not None
    return new_change(
        Action.UPDATE if can_update else Action.DIFFERS, "; ".join([*fixable, *unfixable])
    )


def is_ours(site: Site, resource: Resource, document: Document, adopted: bool) -> bool:
    """Return whether kinetic may change the resource in *document*.

    It may if the resource has kinetic's mark, or a kind that needs no mark. *adopted* says that
    keras-kinetic made the site. Then kinetic may also change a network, subnetwork, or router that
    has neither description nor labels.
    """
    if resource.kind == "node pool":
        return is_our_pool(document)
    if resource.kind in SHARED_KINDS or site.owns(document):
        return True
    is_marked = document.get("description") or document.get("labels")
    return adopted and resource.kind in UNLABELED_KINDS and not is_marked


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
    keep: Mapping[str, str],
) -> tuple[Change, ...]:
    """Return a change for each existing resource in *present*: its removal, or why it stays.

    *keep* maps the key of each resource that must stay to the reason.
    """
    adopted = _is_made_by_keras_kinetic(observed, site)
    return tuple(
        change
        for resource in present
        if (change := _removal(site, resource, observed[resource.key], adopted, keep)) is not None
    )


def _removal(
    site: Site,
    resource: Resource | Policy,
    observed: Observed,
    adopted: bool,
    keep: Mapping[str, str],
) -> Change | None:
    """Return the change for *resource* in `removals`; None if there is nothing to remove."""

    def new_change(action: Action, reason: str = "") -> Change:
        usd = resource.usd_per_hour if action is Action.REMOVE else None
        return Change(
            action=action,
            kind=resource.kind,
            name=resource.name,
            reason=reason,
            usd_per_hour=-usd if usd else None,
        )

    if observed.problem:
        return new_change(Action.UNSEEN, observed.problem)
    document = observed.document
    if document is None:
        return None
    if isinstance(resource, Policy):
        members = [binding.member for binding in resource.bindings]
        bindings = resource.without_members(document, members)["bindings"]
        has_bindings = bindings != [*(document.get("bindings") or ())]
        return new_change(Action.REMOVE, "the bindings of our accounts") if has_bindings else None
    if not is_ours(site, resource, document, adopted):
        return new_change(Action.KEEP, "it has kinetic's name but not its labels")
    if reason := keep.get(resource.key):
        return new_change(Action.KEEP, reason)
    return new_change(Action.REMOVE)
