"""Plan the changes that turn the observed state of a setup into the wanted one. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kinetic.aio.infra.resources import (
    Action,
    Change,
    Document,
    Policy,
    Resource,
    Seen,
    differences,
)
from kinetic.aio.infra.site import OF, SOLUTION, Site, is_our_pool

UNDER_WAY = frozenset({"PROVISIONING", "RECONCILING", "STOPPING"})
BROKEN = frozenset({"ERROR", "DEGRADED", "RUNNING_WITH_ERROR"})
UNOWNED = ("project", "billing", "secret")
"""Kinds of resources that kinetic doesn't mark as its own, because clusters share them."""

UNMARKED = ("network", "subnetwork", "router")
"""Kinds of resources that keras-kinetic doesn't label."""

WRITES = (Action.CREATE, Action.UPDATE, Action.REPLACE, Action.WAIT, Action.REMOVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `up`, `down`, and `pool` do, or have done; ``changes`` are in the order of the setup."""

    site: Site
    changes: tuple[Change, ...]

    @property
    def steps(self) -> tuple[Change, ...]:
        """Return the changes that have an effect."""
        return tuple(one for one in self.changes if one.action in WRITES)

    @property
    def obstacles(self) -> tuple[Change, ...]:
        """Return what blocks the plan: names that others use, and what can't be read."""
        return tuple(one for one in self.changes if one.action in (Action.FOREIGN, Action.UNSEEN))

    @property
    def usd_per_hour(self) -> float:
        """Return the change in cost, in US dollars per hour; negative if the steps save money."""
        return sum(one.usd_per_hour or 0.0 for one in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as ``--json`` shows it."""
        return {
            "project": self.site.project,
            "zone": self.site.zone,
            "cluster": self.site.cluster,
            "changes": [one.to_dict() for one in self.changes],
            "usd_per_hour": round(self.usd_per_hour, 4),
        }


def additions(
    site: Site, wanted: Iterable[Resource | Policy], seen: Mapping[str, Seen]
) -> tuple[Change, ...]:
    """Return one change per resource in *wanted*, so that all of them exist."""
    adopted = _made_by_keras_kinetic(seen, site)
    changes = tuple(_addition(site, one, seen[one.key], adopted) for one in wanted)
    if any(one.kind == "cluster" and one.action is Action.REPLACE for one in changes):
        return tuple(
            replace(one, action=Action.CREATE, reason="") if one.kind == "node pool" else one
            for one in changes
        )
    return changes


def _made_by_keras_kinetic(seen: Mapping[str, Seen], site: Site) -> bool:
    witnesses = (
        f"cluster {site.cluster}",
        f"repository {site.prefix}",
        *(f"bucket {site.bucket(what)}" for what in ("jobs", "builds")),
    )
    for key in witnesses:
        document = seen.get(key, Seen()).document or {}
        labels: Document = document.get("resourceLabels") or document.get("labels") or {}
        if labels.get(SOLUTION) == "kinetic" and OF not in labels:
            return True
    return False


def marked_last(
    site: Site, present: Sequence[Resource | Policy], seen: Mapping[str, Seen]
) -> tuple[Resource | Policy, ...]:
    """Order *present* so that `down` removes keras-kinetic's repository after its network.

    keras-kinetic labels the repository, but not the network; the repository's label shows who made
    both. If `down` removed the repository first and was interrupted, the next run would keep the
    network.
    """
    if not _made_by_keras_kinetic(seen, site):
        return tuple(present)
    last = f"repository {site.prefix}"
    return tuple(
        replace(one, needs=(*one.needs, last)) if one.kind in UNMARKED else one for one in present
    )


def _addition(site: Site, one: Resource | Policy, seen: Seen, adopted: bool) -> Change:
    def change(action: Action, reason: str = "", usd: float | None = None) -> Change:
        return Change(action=action, kind=one.kind, name=one.name, reason=reason, usd_per_hour=usd)

    if seen.problem:
        return change(Action.UNSEEN, seen.problem)
    document = seen.document
    if isinstance(one, Policy):
        missing = one.missing(document or {})
        if not missing:
            return change(Action.KEEP)
        return change(Action.UPDATE, "add " + ", ".join(map(str, missing)))
    if document is None:
        return change(Action.CREATE, one.about, one.usd_per_hour)
    if not is_ours(site, one, document, adopted):
        return change(
            Action.FOREIGN,
            f"one of this name exists, and it isn't marked as part of {site.cluster}; remove it"
            + ("" if one.kind == "node pool" else ", or choose another cluster name"),
        )
    status = str(document.get("status") or "")
    if status in UNDER_WAY:
        return change(Action.WAIT, f"it is {status}")
    if status == "ERROR" and one.kind in ("cluster", "node pool"):
        what = "is unusable, and goes with its pools and jobs"
        what = what if one.kind == "cluster" else "has no nodes"
        return change(Action.REPLACE, f"it {what}: {problem_of(document)}")
    if status in BROKEN:
        return change(Action.DIFFERS, f"it is {status}: {problem_of(document)}")
    found, left = [*differences(one.want, document)], [*differences(one.shown, document)]
    if not (found or left):
        return change(Action.KEEP)
    updates = found and one.update is not None
    return change(Action.UPDATE if updates else Action.DIFFERS, "; ".join([*found, *left]))


def is_ours(site: Site, one: Resource, document: Document, adopted: bool) -> bool:
    """Return whether kinetic may change the resource in *document*.

    It may if the resource has kinetic's mark, or a kind that needs no mark. With *adopted*, because
    keras-kinetic made the setup, it may also change a network, subnetwork, or router that has
    neither description nor labels.
    """
    if one.kind == "node pool":
        return is_our_pool(document)
    if one.kind in UNOWNED or site.owns(document):
        return True
    marked = document.get("description") or document.get("labels")
    return adopted and one.kind in UNMARKED and not marked


def problem_of(document: Document) -> str:
    """Return what Google says is wrong with a cluster or a pool."""
    conditions = document.get("conditions") or ()
    messages = [
        str(document.get("statusMessage") or ""),
        *(str(one.get("message")) for one in conditions),
    ]
    return "; ".join(one for one in messages if one) or "Google gives no reason"


def removals(
    site: Site,
    present: Sequence[Resource | Policy],
    seen: Mapping[str, Seen],
    *,
    keep: Mapping[str, str],
) -> tuple[Change, ...]:
    """Return one change per resource in *present*, so that nothing of kinetic's is left.

    *keep* maps the key of each resource that must stay to the reason.
    """
    adopted = _made_by_keras_kinetic(seen, site)
    return tuple(
        change
        for one in present
        if (change := _removal(site, one, seen[one.key], adopted, keep)) is not None
    )


def _removal(
    site: Site, one: Resource | Policy, seen: Seen, adopted: bool, keep: Mapping[str, str]
) -> Change | None:
    def change(action: Action, reason: str = "") -> Change:
        usd = one.usd_per_hour if action is Action.REMOVE else None
        return Change(
            action=action,
            kind=one.kind,
            name=one.name,
            reason=reason,
            usd_per_hour=-usd if usd else None,
        )

    if seen.problem:
        return change(Action.UNSEEN, seen.problem)
    document = seen.document
    if document is None:
        return None
    if isinstance(one, Policy):
        members = [binding.member for binding in one.bindings]
        there = one.without(document, members)["bindings"]
        gone = there != [*(document.get("bindings") or ())]
        return change(Action.REMOVE, "the bindings of our accounts") if gone else None
    if not is_ours(site, one, document, adopted):
        return change(Action.KEEP, "it has kinetic's name but not its labels")
    if reason := keep.get(one.key):
        return change(Action.KEEP, reason)
    return change(Action.REMOVE)
