"""What a cluster has: how many of its nodes could carry a job of each accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from kinetic.accelerators import Accelerator
from kinetic.aio.kubernetes.access import open_access
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.diagnosis.nodes import matches, refusing, short
from kinetic.aio.kubernetes.diagnosis.quantities import requests
from kinetic.aio.kubernetes.manifests import needs
from kinetic.aio.kubernetes.tables import listing
from kinetic.configuration import Target

__all__ = ["nodes_for"]


async def nodes_for(
    accelerators: Iterable[Accelerator], target: Target, environ: Mapping[str, str] = os.environ
) -> list[int]:
    """For each of *accelerators*, how many nodes there are now that take it, in use or not.

    What a node pool could add is not known to a cluster.

    Raises:
        ConfigurationError: There is no such context or cluster.
        AuthError: The credentials, or the right to list nodes, are missing.
        Unavailable: The API server does not answer.
    """
    api = Api(await open_access(target, environ))
    try:
        nodes = (await listing(api, "/api/v1/nodes", "")).items
    finally:
        await api.aclose()
    return [_taking(needs(one), nodes) for one in accelerators]


def _taking(spec: Mapping[str, Any], nodes: Iterable[Any]) -> int:
    asked = requests(spec)
    return sum(
        matches(spec, node) and not short(asked, node) and not refusing(spec, node)
        for node in nodes
    )
