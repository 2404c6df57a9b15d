"""A job on several hosts as a JobSet: one Job whose pods start together. Pure.

Each host ends by itself. The set has ended when all have, or when one has
failed: nothing is started again, and it is removed some time after.
"""

from __future__ import annotations

from typing import Any

from kinetic.aio.clusters._group_manifest import NODE_POOL, PORT, group_of, variable
from kinetic.aio.clusters._job_manifest import Placement
from kinetic.aio.ports import JobSpec

__all__ = ["HOST", "jobset_manifest"]

HOST = "host"
"""What its one replicated job is called: the name of the Job has it."""

INDEX = "batch.kubernetes.io/job-completion-index"


def jobset_manifest(spec: JobSpec, at: Placement) -> dict[str, Any]:
    """The JobSet that carries *spec*.

    Raises:
        ConfigurationError: As `kinetic.aio.clusters._job_manifest.job_manifest`.
    """
    group = group_of(spec, at)
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    first = f"{group.name}-{HOST}-0-0.{group.name}"
    pod = variable(
        group.pod,
        {"name": "KINETIC_HOST", "valueFrom": index},
        {"name": "KINETIC_COORDINATOR", "value": f"{first}:{PORT}"},
    )
    metadata = dict(group.metadata)
    if group.slice:
        exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": NODE_POOL}
        metadata["annotations"] = {**metadata["annotations"], **exclusive}
    job = {
        "completionMode": "Indexed",
        "completions": group.hosts,
        "parallelism": group.hosts,
        "backoffLimit": 0,
        "template": pod,
    }
    own = {name: group.pod["metadata"][name] for name in ("labels", "annotations")}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "replicatedJobs": [
                {"name": HOST, "replicas": 1, "template": {"metadata": own, "spec": job}}
            ],
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": True,  # they have to meet before any of them is
                "subdomain": group.name,
            },
            "successPolicy": {"operator": "All"},
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": at.ttl_s,
            **({"suspend": True} if at.queue else {}),
        },
    }
