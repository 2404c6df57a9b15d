"""A job as the Kubernetes objects that carry it: pure, values in, JSON out.

The Job is an Indexed Job of one, because only such a Job tells its pods how
many failed before them: the runner's attempt number is the order's own plus
the two counts in ``KINETIC_FAILURES`` and ``KINETIC_DISRUPTIONS``.

What the container finds:

* ``KINETIC_ASSIGNMENT``: the runner's order, as JSON;
* ``/var/run/kinetic/key``: the submission's key, from its Secret;
* ``KINETIC_POD_UID``: the executor's name for its claim;
* the captured environment, variable by variable from the Secret, so that it is
  there before the interpreter starts and never in the Job's own text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kinetic import accelerators
from kinetic._runner import wire
from kinetic.aio.clusters._names import item_name, label_value, object_name
from kinetic.aio.clusters._submission_secret import KEY, carried
from kinetic.aio.clusters._volumes import fuse_volumes
from kinetic.aio.ports import JobSpec, Resources
from kinetic.errors import ConfigurationError

__all__ = [
    "ATTEMPT",
    "CONTAINER",
    "HOSTS",
    "ITEM",
    "JOB",
    "LABELS",
    "MANAGED",
    "NAME",
    "RUNNER",
    "START_TIMEOUT",
    "Placement",
    "job_manifest",
    "usual_labels",
]

CONTAINER = "kinetic"
"""The container that runs the function, in every pod."""

RUNNER = "/app/remote_runner.py"
KEY_FOLDER = "/var/run/kinetic"
JOB_ANNOTATION = "batch.kubernetes.io/"
NAME = "kinetic.dev/name"
"""The annotation with the job's own name, where the object's had to be another."""

LABELS = "kinetic.dev/labels"
"""The annotation with the order's own labels as JSON: values of labels are cut and changed."""

START_TIMEOUT = "kinetic.dev/start-timeout"
"""The annotation with how many seconds the job may wait before it runs."""

JOB = "kinetic.dev/job"
"""The label with the Job's name, on the Job and its pods."""

ITEM = "kinetic.dev/item"
"""The label that all attempts of one item have, on Jobs and pods: one selector finds them."""

ATTEMPT = "kinetic.dev/attempt"
"""The order's label with the number of the attempt that the Job was made for."""

HOSTS = "kinetic.dev/hosts"
"""The annotation with the number of hosts, on a set of pods for one job and on all that is in it.

A Job or a pod that has it is not looked at by itself.
"""

MANAGED = "app.kubernetes.io/managed-by"
"""The label, with the value ``kinetic``, of everything that is made here."""

DAY_S = 24 * 3600
PORTION = 2 * 1024**3
"""Bytes of memory a core, asked for (not a limit) where nobody said how much."""

PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
"""For JAX, the first is the default; it fails without it instead of falling back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where jobs go, and what a cluster's owner may want otherwise.

    ``secret`` names the submission's Secret. ``ttl_s`` is how many seconds a
    finished Job is kept. ``start_allowance_s`` is what the pod's deadline adds
    to the job's own timeout for pulling an image and starting, which count for
    Kubernetes; the runner ends the function in time, this ends the pod.
    ``restarts`` is how often Kubernetes itself may start the job again after a
    failure; None takes the order's budget.
    """

    namespace: str = "default"
    secret: str = ""
    service_account: str = "kinetic"
    ttl_s: int = DAY_S
    start_allowance_s: float = 600.0
    restarts: int | None = None
    queue: str = ""
    priority_class: str = ""
    run_as_user: int | None = None
    token: bool = False
    annotations: Mapping[str, str] = field(default_factory=dict[str, str])


def job_manifest(spec: JobSpec, at: Placement) -> dict[str, Any]:
    """The Job that carries *spec*.

    Raises:
        ConfigurationError: The accelerator is unknown, a name or value of the
            environment cannot be an environment variable of a container, or a
            volume would hide what the job needs.
    """
    name = object_name(spec.name)
    own = {JOB: name, ITEM: object_name(item_name(spec.name, spec.labels.get(ATTEMPT)))}
    labels = _labels(spec, at) | own
    annotations = _own_annotations(spec, at)
    job_labels = labels | ({"kueue.x-k8s.io/queue-name": at.queue} if at.queue else {})
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": at.namespace,
            "labels": job_labels,
            "annotations": annotations,
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": 1,
            "parallelism": 1,
            "backoffLimitPerIndex": _restarts(spec, at),
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _failure_rules()},
            "ttlSecondsAfterFinished": at.ttl_s,
            **({"suspend": True} if at.queue else {}),
            "template": {
                "metadata": {"labels": labels, "annotations": _pod_annotations(spec, annotations)},
                "spec": _pod(spec, at),
            },
        },
    }


def _failure_rules() -> list[dict[str, Any]]:
    """The first that matches decides. A final exit ends it even while its node is drained."""
    codes = {"containerName": CONTAINER, "operator": "In", "values": [wire.EXIT_FINAL]}
    return [
        {"action": "FailIndex", "onExitCodes": codes},
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
    ]


def _restarts(spec: JobSpec, at: Placement) -> int:
    """At most the budget: the runner, which sees the attempts so far, ends it with exit code 42."""
    if at.restarts is not None:
        return at.restarts
    budgets: Mapping[str, int] = spec.assignment.get("budgets") or {}
    return max(0, int(budgets.get("user", 0)))


def _labels(spec: JobSpec, at: Placement) -> dict[str, str]:
    """Those of the order, as far as Kubernetes takes them, and the usual ones."""
    labels = {key: label_value(value) for key, value in spec.labels.items()}
    return usual_labels(at.secret) | labels


def usual_labels(instance: str) -> dict[str, str]:
    """Those that tools for Kubernetes know, for anything of submission *instance*."""
    return {
        "app.kubernetes.io/name": "kinetic",
        MANAGED: "kinetic",
        "app.kubernetes.io/component": "runner",
        "app.kubernetes.io/instance": label_value(instance),
    }


def _own_annotations(spec: JobSpec, at: Placement) -> dict[str, str]:
    """What a reader needs to know the job again."""
    labels = json.dumps(dict(spec.labels), separators=(",", ":"))
    own = {**at.annotations, NAME: spec.name, LABELS: labels}
    if spec.start_timeout is not None:
        own[START_TIMEOUT] = f"{spec.start_timeout:g}"
    return own


def _pod_annotations(spec: JobSpec, own: Mapping[str, str]) -> dict[str, str]:
    annotations = dict(own)
    if any(ref.get("fuse") for ref in spec.assignment.get("data") or ()):
        annotations["gke-gcsfuse/volumes"] = "true"  # who asks for the sidecar that mounts
    # A node that is emptied for thrift must not take a job's work with it.
    return annotations | {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}


def _pod(spec: JobSpec, at: Placement) -> dict[str, Any]:
    accelerator = accelerators.parse(spec.resources.accelerator, spot=spec.resources.spot)
    assignment = spec.assignment
    fuse = fuse_volumes(assignment.get("data") or (), str(assignment.get("store", "")))
    for one in fuse.mounts:
        _refuse_hiding(str(one["mountPath"]))
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": at.service_account,
        "automountServiceAccountToken": at.token,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": max(1, math.ceil(spec.grace)),
        "securityContext": _pod_security(at),
        "nodeSelector": _selector(accelerator),
        "tolerations": _tolerations(accelerator),
        "containers": [_container(spec, at, accelerator, fuse.mounts)],
        "volumes": [*_volumes(spec, at), *fuse.volumes],
    }
    if spec.timeout is not None:
        limit = math.ceil(spec.timeout + spec.grace + at.start_allowance_s)
        pod["activeDeadlineSeconds"] = min(max(1, limit), 2**31 - 1)
    if at.priority_class:
        pod["priorityClassName"] = at.priority_class
    return {key: value for key, value in pod.items() if value not in ({}, [])}


def _refuse_hiding(path: str) -> None:
    """What is mounted at *path* is all that a container sees there."""
    hides = any(f"{needed}/".startswith(f"{path}/") for needed in (RUNNER, KEY_FOLDER))
    if hides or path.startswith(f"{KEY_FOLDER}/"):
        raise ConfigurationError(
            f"a bucket cannot be mounted at {path!r}: it would hide what a job needs there; "
            "choose another path for this volume, such as '/data'"
        )


def _selector(accelerator: accelerators.Accelerator) -> dict[str, str]:
    """GKE keeps nodes with Arm processors for pods that ask for them."""
    selector = dict(accelerator.node_selector)
    if accelerator.arch != "amd64":
        selector["kubernetes.io/arch"] = accelerator.arch
    return selector


def _tolerations(accelerator: accelerators.Accelerator) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    if accelerator.resource:
        found.append({"key": accelerator.resource, "operator": "Exists", "effect": "NoSchedule"})
    equal = {"operator": "Equal", "effect": "NoSchedule"}
    if accelerator.spot:
        found.append({"key": "cloud.google.com/gke-spot", "value": "true", **equal})
    if accelerator.arch != "amd64":
        found.append({"key": "kubernetes.io/arch", "value": accelerator.arch, **equal})
    return found


def _pod_security(at: Placement) -> dict[str, Any]:
    """As far as an image of anybody's bears: its user stays what the image says."""
    user = {} if at.run_as_user is None else {"runAsUser": at.run_as_user, "runAsNonRoot": True}
    group = {} if at.run_as_user is None else {"fsGroup": at.run_as_user}
    return {"seccompProfile": {"type": "RuntimeDefault"}, **user, **group}


def _container(
    spec: JobSpec,
    at: Placement,
    accelerator: accelerators.Accelerator,
    mounts: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": spec.image.uri,
        "command": [*(spec.image.command or ("python3",)), "-u", RUNNER],
        "env": _environment(spec, at, accelerator),
        "resources": _resources(spec.resources, accelerator),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        # The receipt of an outcome, or the last lines of a log when there is none.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "key", "mountPath": KEY_FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            *mounts,
        ],
    }


def _environment(
    spec: JobSpec, at: Placement, accelerator: accelerators.Accelerator
) -> list[dict[str, Any]]:
    usual = {
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": PLATFORMS[accelerator.kind],
        "JOB_ID": str(spec.assignment.get("job_id", "")),
        "GCS_BUCKET": _bucket(str(spec.assignment.get("store", ""))),
    }
    plain = {name: value for name, value in usual.items() if name not in spec.environment}
    secret = carried(spec)
    plain |= {name: value for name, value in spec.environment.items() if name not in secret}
    plain["KINETIC_ASSIGNMENT"] = json.dumps(
        spec.assignment, separators=(",", ":"), ensure_ascii=True
    )
    failures = {
        "KINETIC_FAILURES": f"{JOB_ANNOTATION}job-index-failure-count",
        "KINETIC_DISRUPTIONS": f"{JOB_ANNOTATION}job-index-ignored-failure-count",
    }
    return [
        *({"name": name, "value": _literal(value)} for name, value in plain.items()),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": at.secret, "key": key}}}
            for name, key in secret.items()
        ),
        _field("KINETIC_POD_UID", "metadata.uid"),
        _field("KINETIC_NODE", "spec.nodeName"),
        *(_field(name, f"metadata.annotations['{key}']") for name, key in failures.items()),
    ]


def _bucket(store: str) -> str:
    scheme, _, rest = store.partition("://")
    return rest.partition("/")[0] if scheme == "gs" else ""


def _literal(value: str) -> str:
    """Kubernetes puts a variable in place of ``$(NAME)``, and one dollar in place of two."""
    return value.replace("$", "$$")


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _resources(asked: Resources, accelerator: accelerators.Accelerator) -> dict[str, Any]:
    """Requests and limits.

    An accelerator is in both, as Kubernetes wants. A job that has a machine's
    accelerators to itself may use its cores, so its ``cpu`` is only a request;
    others are held to theirs. Memory that was asked for is also the limit.
    """
    cpu = _cores(asked.cpu)
    memory = asked.memory_bytes or int(PORTION * max(asked.cpu, 0.25))
    requests: dict[str, str] = {"cpu": cpu, "memory": str(memory)}
    limits: dict[str, str] = {}
    if asked.memory_bytes is not None:
        limits["memory"] = str(memory)
    if accelerator.resource:
        requests[accelerator.resource] = limits[accelerator.resource] = str(
            accelerator.chips_per_host
        )
    else:
        limits["cpu"] = cpu
    return {"requests": requests, "limits": limits}


def _cores(cpu: float) -> str:
    return f"{max(1, math.ceil(cpu * 1000))}m"


def _volumes(spec: JobSpec, at: Placement) -> list[dict[str, Any]]:
    """The key, and shared memory for data loaders: 64 MiB otherwise."""
    shm: dict[str, Any] = {"medium": "Memory"}
    if spec.resources.memory_bytes is not None:  # what is written there counts as memory
        shm["sizeLimit"] = str(max(64 * 1024**2, spec.resources.memory_bytes // 2))
    key = {
        "secretName": at.secret,
        "items": [{"key": KEY, "path": "key"}],
        # Its owner is root, and an image of anybody's may run as any user. Nobody else is there.
        "defaultMode": 0o444,
    }
    return [{"name": "key", "secret": key}, {"name": "shm", "emptyDir": shm}]
