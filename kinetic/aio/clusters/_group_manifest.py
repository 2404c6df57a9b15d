"""What is the same for all sets of pods that carry one job on several hosts. Pure.

Each host's pod is the one that a Job of its own would have, with this besides:

* ``KINETIC_HOSTS`` and ``KINETIC_HOST``: how many there are, and which this is;
* ``KINETIC_COORDINATOR``: where the first one listens for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kinetic import accelerators
from kinetic.aio.clusters._job_manifest import HOSTS, JOB, Placement, job_manifest
from kinetic.aio.clusters._names import object_name
from kinetic.aio.ports import JobSpec

__all__ = ["LIFE", "NODE_POOL", "PORT", "Group", "group_name", "group_of", "variable"]

NAME_LENGTH = 44
"""Controllers add to a set's name what tells its pods and their revisions apart, within 63."""

NODE_POOL = "cloud.google.com/gke-nodepool"
"""The label of nodes that are one slice of TPUs: two sets never share one."""

LIFE = "kinetic.dev/life"
"""The annotation that a set has in common with its pods, and with those of no other of its name."""

PORT = 8476
"""Where the first host listens for the others."""

_COUNTS = ("KINETIC_FAILURES", "KINETIC_DISRUPTIONS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parts of a manifest: ``metadata`` of the set, and the ``pod``'s template of each host.

    ``slice`` says that the hosts are one slice of TPUs.
    """

    hosts: int
    slice: bool
    metadata: dict[str, Any]
    pod: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the set."""
        return str(self.metadata["name"])


def group_name(name: str) -> str:
    """What the set is called that carries the attempt *name*."""
    return object_name(name, longest=NAME_LENGTH)


def group_of(spec: JobSpec, at: Placement) -> Group:
    """What all hosts of *spec* have in common.

    Raises:
        ConfigurationError: As `kinetic.aio.clusters._job_manifest.job_manifest`.
    """
    accelerator = accelerators.parse(spec.resources.accelerator)
    several = {**at.annotations, HOSTS: str(accelerator.hosts)}
    job = job_manifest(spec, replace(at, annotations=several))
    name = group_name(spec.name)
    pod: dict[str, Any] = job["spec"]["template"]
    for metadata in (job["metadata"], pod["metadata"]):
        metadata["labels"] = {**metadata["labels"], JOB: name}
    (container,) = pod["spec"]["containers"]
    container["env"] = [one for one in container["env"] if one["name"] not in _COUNTS]
    container["env"].append({"name": "KINETIC_HOSTS", "value": str(accelerator.hosts)})
    return Group(
        hosts=accelerator.hosts,
        slice=accelerator.kind == "tpu" and accelerator.multi_host,
        metadata={**job["metadata"], "name": name},
        pod=pod,
    )


def variable(pod: Mapping[str, Any], *added: dict[str, Any]) -> dict[str, Any]:
    """The template *pod* with more variables for its container."""
    (container,) = pod["spec"]["containers"]
    container = {**container, "env": [*container["env"], *added]}
    return {**pod, "spec": {**pod["spec"], "containers": [container]}}
