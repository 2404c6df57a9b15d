"""ComputeClasses of GKE: each lists, in order, the machines that GKE may use as nodes.

One class covers spot and on-demand machines in all zones of a region that offer these machines. TPU
slices of several hosts use node pools instead, because such a slice fills a whole pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kinetic.accelerators import Accelerator
from kinetic.aio.infra.namespace import Manifest, compare
from kinetic.aio.infra.pools import Pool
from kinetic.aio.infra.resources import Action, Change, Document
from kinetic.aio.infra.site import KINETIC_LABEL, Site
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.compute_classes import COLLECTION, GROUP, KIND, class_name
from kinetic.errors import NotFound
from kinetic.prices import price_of


def can_replace(pool: Pool) -> bool:
    """Return whether a ComputeClass can replace *pool*."""
    return not (pool.min_nodes or pool.reservation or pool.zone or pool.accelerator.multi_host)


def reference(name: str) -> Manifest:
    """Return a manifest with only the name of a class, to read or remove the class."""
    document = {"apiVersion": GROUP, "kind": KIND, "metadata": {"name": name}}
    return Manifest(path=f"{COLLECTION}/{name}", document=document)


def class_manifest(
    site: Site, accelerator: Accelerator, zones: Sequence[str], *, autopilot: bool
) -> Manifest:
    """Return the class for *accelerator*; a spot class lists spot before on-demand machines.

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
    spec = {
        "nodePoolAutoCreation": {"enabled": True},
        **({} if autopilot else {"nodePoolConfig": {"serviceAccount": site.account("nodes")}}),
        "priorities": [
            {**rule, "spot": spot} for spot in ((True, False) if accelerator.spot else (False,))
        ],
        # By default, GKE makes nodes without the accelerator if none with it are available.
        "whenUnsatisfiable": "DoNotScaleUp",
    }
    base = reference(class_name(accelerator))
    metadata = {**base.document["metadata"], "labels": site.labels}
    return replace(base, document={**base.document, "metadata": metadata, "spec": spec})


async def is_served(api: Api) -> bool:
    """Return whether the API server has the kind ComputeClass, and not only its API group."""
    try:
        answer = await api.call("GET", f"/apis/{GROUP}")
    except NotFound:
        return False
    return any(kind.get("kind") == KIND for kind in answer.get("resources") or ())


async def list_classes(api: Api) -> dict[str, Document]:
    """Return the cluster's classes by name."""
    if not await is_served(api):
        return {}
    answer = await api.call("GET", COLLECTION)
    return {str(document["metadata"]["name"]): document for document in answer.get("items") or ()}


async def list_own_classes(api: Api) -> dict[str, Document]:
    """Return kinetic's classes by name."""
    return {
        name: document for name, document in (await list_classes(api)).items() if is_ours(document)
    }


def is_ours(document: Document) -> bool:
    """Return whether kinetic made a class."""
    labels: Document = document["metadata"].get("labels") or {}
    return bool(labels.get(KINETIC_LABEL) == "true")


async def plan_class(api: Api, manifest: Manifest, description: str) -> Change:
    """Return the change that the class *manifest* needs, with *description* if the class is new."""
    change = await compare(api, manifest)
    if change.action is Action.CREATE:
        return replace(change, reason=description)
    existing = await api.call("GET", manifest.path)
    if not is_ours(existing):
        reason = "a class of this name exists, and kinetic didn't create it; remove it"
        return replace(change, action=Action.FOREIGN, reason=reason)
    return change


def describe_new(
    site: Site, accelerator: Accelerator, zones: Sequence[str], environ: Mapping[str, str]
) -> str:
    """Return how a plan describes a new class: its machines, zones, and price per node."""
    order = "spot, then on-demand" if accelerator.spot else "on-demand"
    spot_values = (True, False) if accelerator.spot else (False,)
    prices = [price_of(replace(accelerator, spot=spot), site.zone, environ) for spot in spot_values]
    shown_prices = [f"${price.usd_per_hour:.3f}" for price in prices if price is not None]
    return f"{order} {accelerator.machine} in {', '.join(zones) or site.region}, " + (
        f"{' or '.join(shown_prices)}/h for each node" if shown_prices else "price unknown"
    )


def summarize(document: Document) -> dict[str, Any]:
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
            str(condition.get("message"))
            for condition in conditions
            if condition.get("status") == "False"
        ),
    }
