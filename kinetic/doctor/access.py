"""Whether a cluster can be reached with the credentials of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kinetic.aio.kubernetes.access import open_access
from kinetic.aio.kubernetes.api import Api
from kinetic.configuration import Target
from kinetic.doctor.cluster import LIMITS, ONCE


async def check_access(target: Target, environ: Mapping[str, str] = os.environ) -> None:
    """Ask the cluster of *target* for its namespaced API, as whoever has these credentials.

    Raises:
        ConfigurationError: There is no such cluster, or no way to it from here.
        AuthError: There are no credentials, or they are refused.
        Unavailable: Whoever has to be asked does not answer.
    """
    api = Api(await open_access(target, environ, ONCE), LIMITS)
    try:
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        jobs = {"namespace": target.namespace, "verb": "list", "group": "batch", "resource": "jobs"}
        path = f"/apis/{body['apiVersion']}/selfsubjectaccessreviews"
        await api.call("POST", path, body={**body, "spec": {"resourceAttributes": jobs}})
    finally:
        await api.aclose()
