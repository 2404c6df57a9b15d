"""How a target's cluster is reached: a context, the pod's own cluster, or GKE."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kinetic.aio.clusters._access import Access
from kinetic.aio.clusters._access_context import open_context
from kinetic.aio.clusters._access_gke import open_gke
from kinetic.aio.clusters._access_pod import IN_CLUSTER, open_pod
from kinetic.configuration import Target

__all__ = ["open_access"]


async def open_access(target: Target, environ: Mapping[str, str] = os.environ) -> Access:
    """Access to the cluster of *target*, bound to it: what others change later does not move it.

    KINETIC_KUBE_CONTEXT names a context of the kubeconfig, or is ``in-cluster``
    for the service account of the pod this runs in. Without it, it is the GKE
    cluster of project, zone and name. Neither gcloud nor kubectl is needed, and
    nothing is written.

    Close it with the `Api` that is made of it, or by ``access.passes.aclose()``.

    Raises:
        ConfigurationError: There is no such context or cluster.
        AuthError: The credentials cannot be had, or are refused.
        Unavailable: Whoever has to be asked does not answer.
    """
    if target.kube_context == IN_CLUSTER:
        return await open_pod(environ)
    if target.kube_context:
        return await open_context(target.kube_context, environ)
    return await open_gke(target, environ)
