"""ComputeClasses of GKE: each lists the machines, in order, from which GKE may make nodes.

One class covers spot and on-demand machines in all zones of a region that have them. TPU slices of
several hosts use node pools instead, because such a slice fills a whole pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kinetic.accelerators import Accelerator
from kinetic.aio.infra.namespace import Manifest, compare
from kinetic.aio.infra.pools import Pool
from kinetic.aio.infra.resources import Action, Change, Document
from kinetic.aio.infra.site import MARK, Site
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.compute_classes import COLLECTION, GROUP, KIND, class_name
from kinetic.errors import NotFound
from kinetic.prices import price_of


def carries(pool: Pool) -> bool:
    """Return whether a ComputeClass can replace *pool*."""
    return not (pool.min_nodes or pool.reservation or pool.zone or pool.accelerator.multi_host)


def named(name: str) -> Manifest:
    """Return the manifest by which to read or remove the class *name*; it has no content."""
    document = {"apiVersion": GROUP, "kind": KIND, "metadata": {"name": name}}
    return Manifest(path=f"{COLLECTION}/{name}", document=document)


def wanted(
    site: Site, accelerator: Accelerator, zones: Sequence[str], *, autopilot: bool
) -> Manifest:
    """Return the class for *accelerator*; for a spot one, spot before on-demand machines.

    Without *zones*, GKE chooses them. On an *autopilot* cluster the class names no service account
    for nodes, because such a cluster has its own.
    """
    rule: dict[str, Any] = {"location": {"zones": [*zones]}} if zones else {}
    count = accelerator.chips_per_host
    if accelerator.kind == "gpu":
        gpu = {"type": accelerator.label, "count": count, "driverVersion": "latest"}
        rule |= {"machineType": accelerator.machine, "gpu": gpu}
    else:
        tpu = {"type": accelerator.label, "count": count, "topology": accelerator.topology}
        rule["tpu"] = tpu
    known = named(class_name(accelerator))
    spec = {
        "nodePoolAutoCreation": {"enabled": True},
        **({} if autopilot else {"nodePoolConfig": {"serviceAccount": site.account("nodes")}}),
        "priorities": [
            {**rule, "spot": one} for one in ((True, False) if accelerator.spot else (False,))
        ],
        # Otherwise GKE makes machines without the accelerator if it lacks capacity.
        "whenUnsatisfiable": "DoNotScaleUp",
    }
    metadata = {**known.document["metadata"], "labels": site.labels}
    return replace(known, document={**known.document, "metadata": metadata, "spec": spec})


async def served(api: Api) -> bool:
    """Return whether the cluster has ComputeClasses; other kinds have the same API group."""
    try:
        found = await api.call("GET", f"/apis/{GROUP}")
    except NotFound:
        return False
    return any(one.get("kind") == KIND for one in found.get("resources") or ())


async def every(api: Api) -> dict[str, Document]:
    """Return the cluster's classes by name."""
    if not await served(api):
        return {}
    listed = await api.call("GET", COLLECTION)
    return {str(one["metadata"]["name"]): one for one in listed.get("items") or ()}


async def found(api: Api) -> dict[str, Document]:
    """Return kinetic's classes by name."""
    return {name: one for name, one in (await every(api)).items() if is_ours(one)}


def is_ours(document: Document) -> bool:
    """Return whether kinetic made a class."""
    labels: Document = document["metadata"].get("labels") or {}
    return bool(labels.get(MARK) == "true")


async def planned(api: Api, one: Manifest, about: str) -> Change:
    """Return the change that the class *one* needs; *about* describes it if it is new."""
    change = await compare(api, one)
    if change.action is Action.CREATE:
        return replace(change, reason=about)
    there = await api.call("GET", one.path)
    if not is_ours(there):
        reason = "one of this name exists, and kinetic didn't create it; rename or remove it"
        return replace(change, action=Action.FOREIGN, reason=reason)
    return change


def about(
    site: Site, accelerator: Accelerator, zones: Sequence[str], environ: Mapping[str, str]
) -> str:
    """Return how a plan describes a new class."""
    order = "spot, then on-demand" if accelerator.spot else "on-demand"
    kinds = (True, False) if accelerator.spot else (False,)
    prices = [price_of(replace(accelerator, spot=one), site.zone, environ) for one in kinds]
    shown = [f"${one.usd_per_hour:.3f}" for one in prices if one is not None]
    return f"{order} {accelerator.machine} in {', '.join(zones) or site.region}, " + (
        f"{' or '.join(shown)}/h for each node" if shown else "price unknown"
    )


def described(document: Document) -> dict[str, Any]:
    """Return what a class offers, in the fields that `kinetic pool list` shows."""
    rules: Sequence[Document] = document["spec"].get("priorities") or ()
    first: Document = rules[0] if rules else {}
    tpu: Document = first.get("tpu") or {}
    hardware: Document = first.get("gpu") or tpu
    status: Document = document.get("status") or {}
    conditions: Sequence[Document] = status.get("conditions") or ()
    return {
        "name": str(document["metadata"]["name"]),
        "kind": KIND,
        "machine": str(first.get("machineType") or ""),
        "accelerator": f"{hardware.get('type')} x{hardware.get('count')}" if hardware else "",
        "topology": str(tpu.get("topology") or ""),
        "min_nodes": 0,
        "max_nodes": None,
        "spot": bool(first.get("spot")),
        "reservation": "",
        "status": "",
        "problem": "; ".join(
            str(one.get("message")) for one in conditions if one.get("status") == "False"
        ),
    }
