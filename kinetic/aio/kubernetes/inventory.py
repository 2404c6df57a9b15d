"""Count a cluster's nodes for accelerators, and choose a layout that its machines have.

A layout of an accelerator is a machine type together with a topology.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping

from absl import logging

from kinetic.accelerators import Accelerator
from kinetic.aio.kubernetes.access import open_access
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.diagnosis.documents import labels_of
from kinetic.aio.kubernetes.diagnosis.nodes import fits
from kinetic.aio.kubernetes.manifests import pod_requirements
from kinetic.aio.kubernetes.reflector import list_all
from kinetic.configuration import Target
from kinetic.errors import AuthError

MACHINE, TOPOLOGY = "node.kubernetes.io/instance-type", "cloud.google.com/gke-tpu-topology"


async def layout_in(
    api: Api, pools: Collection[tuple[str, str]], accelerator: Accelerator
) -> Accelerator:
    """Choose the layout of *accelerator* that the cluster's nodes, or its *pools*, have.

    This sends a request only if *accelerator* has several layouts. If no known node or pool has
    any of them, this returns the usual layout, and the log names the others.
    """
    if len(accelerator.layouts) == 1 or accelerator != accelerator.layouts[0]:
        return accelerator
    available = {
        (layout.machine, layout.topology)
        for layout in accelerator.layouts
        for machine, topology in pools
        if machine == layout.machine and (not layout.multi_host or topology == layout.topology)
    }
    try:
        nodes = (await list_all(api, "/api/v1/nodes", f"{TOPOLOGY}={accelerator.topology}")).items
    except AuthError as exc:
        logging.info("can't list the nodes: %s", exc)
    else:
        available |= {(str(labels_of(node).get(MACHINE)), accelerator.topology) for node in nodes}
    found = accelerator.among(available)
    if found != accelerator:
        logging.info(
            "%s: using the layout %s, for which the cluster has machines", accelerator, found
        )
    elif (found.machine, found.topology) not in available:
        others = " or ".join(repr(str(layout)) for layout in accelerator.layouts[1:])
        message = "%s needs machines of type %s, but the cluster shows none; for others, request %s"
        logging.warning(message, accelerator, accelerator.machine, others)
    return found


async def nodes_for(
    accelerators: Iterable[Accelerator], target: Target, environ: Mapping[str, str] = os.environ
) -> list[int]:
    """For each of *accelerators*, count the nodes that have it, free or in use.

    Nodes that a node pool could add aren't counted.

    Raises:
        ConfigurationError: The context or cluster of *target* doesn't exist.
        AuthError: The credentials, or the right to list nodes, are missing.
        Unavailable: The API server does not answer.
    """
    api = Api(await open_access(target, environ))
    try:
        nodes = (await list_all(api, "/api/v1/nodes", "")).items
    finally:
        await api.aclose()
    specs = [pod_requirements(accelerator) for accelerator in accelerators]
    return [sum(fits(spec, node) for node in nodes) for spec in specs]
