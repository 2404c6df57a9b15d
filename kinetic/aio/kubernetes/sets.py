"""The kinds of sets whose pods run a job on several hosts, and their manifests. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kinetic._labels import KIND, ROUND
from kinetic.aio.kubernetes.manifests import (
    HOSTS,
    ITEM,
    JOB,
    NAME,
    RANK,
    Placement,
    item_name,
    job_manifest,
    object_name,
)
from kinetic.aio.ports import JobSpec

NAME_LENGTH = 44
"""The most characters of a set's name: controllers extend it to names of at most 63 characters."""

NODE_POOL = "cloud.google.com/gke-nodepool"
"""The label that all nodes of one TPU slice share: two sets never share a slice."""

LIFE = "kinetic.dev/life"
"""The annotation with a random value that a set and its pods share.

A later set of the same name has another value.
"""

PORT = 8476
"""The port on which the first host listens for the other hosts."""

TPU_PORT = "TPU_PROCESS_PORT"
"""The variable with libtpu's port. LeaderWorkerSet sets it to `PORT` if the pod lacks it."""

LWS = "leaderworkerset.sigs.k8s.io"
WORKER_INDEX = f"{LWS}/worker-index"
"""The label with the number of a pod's host: the leader is 0."""

HOST = "host"
"""The name of a JobSet's one replicated job; the name of the Job contains it."""

_SINGLE_HOST_VARIABLES = (
    *("KINETIC_FAILURES", "KINETIC_DISRUPTIONS", "KINETIC_JOB_UID", "KINETIC_POD_NAME"),
)
_NOT_IN_STATEFUL_SETS = ("activeDeadlineSeconds", "restartPolicy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of set: where the API server keeps such sets, and how to make or stop one.

    ``label`` is a label that only this kind's controller puts on pods. ``exclusive`` is the
    annotation that keeps other sets off a set's nodes. ``host`` is the field of a pod with the
    number of its host. ``coordinator`` returns the address of the first host from the set's name,
    and ``body`` the set's spec from the template of its pods. ``stop`` is the change to the spec
    that ends the pods and keeps the set. ``makers`` returns kind and name of the objects that
    create a set's pods. ``home`` is the kind's website.
    """

    name: str
    api: str
    collection: str
    home: str
    label: str
    exclusive: str
    host: str
    coordinator: Callable[[str], str]
    body: Callable[[str, int, dict[str, Any], Placement], dict[str, Any]]
    stop: Mapping[str, Any]
    makers: Callable[[str], Sequence[tuple[str, str]]]

    @property
    def group(self) -> str:
        """The API group of such sets."""
        return self.api.partition("/")[0]

    def manifest(
        self, spec: JobSpec, placement: Placement, *, life: str, rank: int | None = None
    ) -> dict[str, Any]:
        """Return the manifest of a set that is a worker; its pods are like those of a Job.

        *life* is the value of `LIFE`. Without a *rank*, the set runs the attempt *spec*. Otherwise
        it is the worker of this rank in the round *spec*.

        Raises:
            ConfigurationError: See `kinetic.aio.kubernetes.manifests.job_manifest`.
        """
        accelerator, item = spec.resources.accelerator, object_name(spec.name)
        hosts, number, failures = str(accelerator.hosts), "0", 0
        name = set_name(spec.name, rank)
        annotations = {**placement.annotations, LIFE: life, HOSTS: hosts}
        if rank is None:
            item = object_name(item_name(spec.name, str(spec.order.attempt)))
            failures = spec.order.attempt - 1
        else:
            number = spec.labels[ROUND]
            # A table keeps one entry for the set, and none for each rank of a Job.
            labels = {key: value for key, value in spec.labels.items() if key != KIND}
            spec = replace(spec, labels=labels)
        job = job_manifest(spec, replace(placement, annotations=annotations))
        pod: dict[str, Any] = job["spec"]["template"]
        metadata: dict[str, Any] = {**job["metadata"], "name": name}
        for section in (metadata, pod["metadata"]):
            section["labels"] = {**section["labels"], JOB: name, ITEM: item}
            if rank is not None:
                worker = f"{spec.name}.{life}.{rank}.0"
                section["annotations"] = {**section["annotations"], NAME: worker}
        pod["spec"]["automountServiceAccountToken"] = False  # only the leader removes a set
        (container,) = pod["spec"]["containers"]
        variables = {
            "KINETIC_ROUND": number,
            "KINETIC_JOB_UID": life,
            "KINETIC_RANK": str(rank or 0),
            "KINETIC_FAILURES": str(failures),
            "KINETIC_HOSTS": hosts,
            "KINETIC_COORDINATOR": f"{self.coordinator(name)}:{PORT}",
        }
        container["env"] = [
            *(it for it in container["env"] if it["name"] not in _SINGLE_HOST_VARIABLES),
            *({"name": key, "value": value} for key, value in variables.items()),
            {"name": "KINETIC_HOST", "valueFrom": {"fieldRef": {"fieldPath": self.host}}},
        ]
        if self.label.startswith(LWS):
            container["env"].append({"name": "KINETIC_LWS", "value": name})
        if accelerator.kind == "tpu" and accelerator.multi_host:  # the hosts form one TPU slice
            metadata["annotations"] = {**metadata["annotations"], self.exclusive: NODE_POOL}
            # Without it, LeaderWorkerSet takes the port on which the first host listens.
            if self.label.startswith(LWS) and TPU_PORT not in spec.environment:
                container["env"].append({"name": TPU_PORT, "value": "8471"})
        return {
            "apiVersion": self.api,
            "kind": self.name,
            "metadata": metadata,
            "spec": self.body(name, accelerator.hosts, pod, placement),
        }


def set_name(name: str, rank: int | None = None) -> str:
    """Return the name of the set that runs the attempt *name*, or is a worker of round *name*."""
    return object_name(name if rank is None else f"{name}-{rank}", longest=NAME_LENGTH)


def name_of_set(observed: str) -> str:
    """Return the name of the set that an observation calls *observed*."""
    name, *worker = observed.split(".")
    return set_name(name, int(worker[1]) if worker else None)


def _job_set_spec(
    name: str, hosts: int, pod: dict[str, Any], placement: Placement
) -> dict[str, Any]:
    job = {
        "completionMode": "Indexed",
        "completions": hosts,
        "parallelism": hosts,
        "backoffLimit": 0,
        "template": pod,
    }
    metadata = {key: pod["metadata"][key] for key in ("labels", "annotations")}
    return {
        "replicatedJobs": [
            {"name": HOST, "replicas": 1, "template": {"metadata": metadata, "spec": job}}
        ],
        "network": {
            "enableDNSHostnames": True,
            "publishNotReadyAddresses": True,  # hosts look each other up before they are ready
            "subdomain": name,
        },
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": 0},
        "ttlSecondsAfterFinished": placement.ttl_s,
        **({"suspend": True} if placement.queue else {}),
    }


def _leader_worker_set_spec(
    name: str, hosts: int, pod: dict[str, Any], placement: Placement
) -> dict[str, Any]:
    spec = {key: value for key, value in pod["spec"].items() if key not in _NOT_IN_STATEFUL_SETS}
    return {
        "replicas": 1,
        "startupPolicy": "LeaderCreated",
        "leaderWorkerTemplate": {
            "size": hosts,
            # If one host dies, the other hosts can't continue.
            "restartPolicy": "RecreateGroupOnPodRestart",
            # The leader, host 0, deletes the set at the end, for which it needs a token.
            "leaderTemplate": {**pod, "spec": {**spec, "automountServiceAccountToken": True}},
            "workerTemplate": {**pod, "spec": spec},
        },
    }


KINDS: Mapping[str, Kind] = {
    "lws": Kind(
        name="LeaderWorkerSet",
        api="leaderworkerset.x-k8s.io/v1",
        collection="leaderworkersets",
        home="https://lws.sigs.k8s.io",
        label=f"{LWS}/name",
        exclusive=f"{LWS}/exclusive-topology",
        host=f"metadata.labels['{WORKER_INDEX}']",
        coordinator=lambda name: "$(LWS_LEADER_ADDRESS)",
        body=_leader_worker_set_spec,
        stop={"replicas": 0},
        makers=lambda name: (
            ("LeaderWorkerSet", name),
            ("StatefulSet", name),
            ("StatefulSet", f"{name}-0"),
        ),
    ),
    "jobset": Kind(
        name="JobSet",
        api="jobset.x-k8s.io/v1alpha2",
        collection="jobsets",
        home="https://jobset.sigs.k8s.io",
        label="jobset.sigs.k8s.io/jobset-name",
        exclusive="alpha.jobset.sigs.k8s.io/exclusive-topology",
        host=f"metadata.annotations['{RANK}']",
        coordinator=lambda name: f"{name}-{HOST}-0-0.{name}",
        body=_job_set_spec,
        stop={"suspend": True},
        makers=lambda name: (("JobSet", name), ("Job", f"{name}-{HOST}-0")),
    ),
}
"""The kinds, by their names in ``KINETIC_MULTIHOST``."""
