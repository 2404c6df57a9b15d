"""A job on several hosts as a LeaderWorkerSet. Pure, values in, JSON out.

Its pods belong to StatefulSets, which start again whatever ends, and it has
neither an end nor a time to live. So no host of it ends by itself
(``KINETIC_LWS``), and the first one deletes the set when the function has
ended: it alone has the service account's token. A first host that is started
again finds its own claim, runs nothing and deletes the set.
"""

from __future__ import annotations

from typing import Any

from kinetic.aio.clusters._group_manifest import NODE_POOL, PORT, group_of, variable
from kinetic.aio.clusters._job_manifest import Placement
from kinetic.aio.ports import JobSpec

__all__ = ["WORKER_INDEX", "lws_manifest"]

DOMAIN = "leaderworkerset.sigs.k8s.io"
WORKER_INDEX = f"{DOMAIN}/worker-index"
"""The label with the number of a pod's host: the leader is 0."""

TPU_PORT = {"name": "TPU_PROCESS_PORT", "value": "8471"}
"""Where libtpu listens: on slices of TPUs the controller names `PORT` unless it is told, and there
the first host listens for the others."""

NOT_IN_STATEFUL_SETS = ("activeDeadlineSeconds", "restartPolicy")


def lws_manifest(spec: JobSpec, at: Placement) -> dict[str, Any]:
    """The LeaderWorkerSet that carries *spec*.

    Raises:
        ConfigurationError: As `kinetic.aio.clusters._job_manifest.job_manifest`.
    """
    group = group_of(spec, at)
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{WORKER_INDEX}']"}}
    pod = variable(
        group.pod,
        {"name": "KINETIC_LWS", "value": group.name},
        {"name": "KINETIC_HOST", "valueFrom": index},
        {"name": "KINETIC_COORDINATOR", "value": f"$(LWS_LEADER_ADDRESS):{PORT}"},
        *((TPU_PORT,) if group.slice and TPU_PORT["name"] not in spec.environment else ()),
    )
    own = {name: value for name, value in pod["spec"].items() if name not in NOT_IN_STATEFUL_SETS}
    metadata = dict(group.metadata)
    if group.slice:
        exclusive = {f"{DOMAIN}/exclusive-topology": NODE_POOL}
        metadata["annotations"] = {**metadata["annotations"], **exclusive}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": group.hosts,
                # One host alone is of no use: its death is the death of all.
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": {**pod, "spec": {**own, "automountServiceAccountToken": True}},
                "workerTemplate": {**pod, "spec": own},
            },
        },
    }
