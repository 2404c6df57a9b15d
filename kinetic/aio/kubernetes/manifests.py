"""Build the manifests and selectors of a job's Kubernetes objects. No I/O.

The Job is an Indexed Job with one index, because only such a Job tells each pod how many
earlier pods failed, and how many were disrupted.

The container gets:

* ``KINETIC_ORDER``: what the runner has to do, as JSON (`wire.Order`);
* ``/var/run/kinetic/key``: the submission's key, from its Secret;
* ``KINETIC_POD_UID``: the pod's uid, with which the runner claims the attempt in the store;
* ``KINETIC_CREW``: how a worker runs its items, as JSON (`Crew`);
* ``KINETIC_JOB_UID``, ``KINETIC_FAILURES``, and ``KINETIC_DISRUPTIONS``: with
  ``JOB_COMPLETION_INDEX``, which Kubernetes adds, they make the worker's name (`WorkerId`);
* the captured environment variables. Kubernetes sets them from the Secret before the interpreter
  starts. The Job's manifest doesn't contain their values.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import posixpath
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kinetic._labels import ATTEMPT, SUBMISSION
from kinetic._runner.protocol import directory_urls, wire
from kinetic._runner.protocol.workers import EXIT_SURPLUS
from kinetic.accelerators import Accelerator
from kinetic.aio.ports import JobSpec, Resources
from kinetic.errors import ConfigurationError

JOB_NAME_LENGTH = 52
"""The most characters of a Job's name. The pod's name, which has at most 63, adds an index and five
random characters."""

LABEL_LENGTH = 63
"""The most characters of a label's value, and of most names."""

_DIGEST_LENGTH = 10
"""Characters of the digest that makes a shortened name unique."""


def object_name(text: str, *, longest: int = JOB_NAME_LENGTH) -> str:
    """Return *text* as the name of an object: a DNS label of at most *longest* characters.

    A legal name isn't changed. Any other text keeps its legal characters and gets a digest of
    the whole text, so that different texts have different names.
    """
    if len(text) <= longest and re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", text, re.ASCII):
        return text
    slug = re.sub(r"[^a-z0-9]+", "-", _without_accents(text).lower()).strip("-")
    if not slug[:1].isalpha():
        slug = f"k-{slug}".rstrip("-")
    return _shorten(slug, text, longest, "-")


def item_name(name: str, attempt: str | None) -> str:
    """Return the *name* of a job without the number of its *attempt*."""
    return name.removesuffix(f"-{attempt}") if attempt else name


def items_of(name: str) -> list[str]:
    """Return the names of the items that an attempt called *name* may belong to.

    For a worker, the item is its round.
    """
    return [*dict.fromkeys((name.partition(".")[0], re.sub(r"-[0-9]+$", "", name)))]


@functools.lru_cache(4096)
def label_value(text: str) -> str:
    """Return *text* as a label's value, at most 63 characters of ``[A-Za-z0-9_.-]``.

    A legal value isn't changed.
    """
    if len(text) <= LABEL_LENGTH and re.fullmatch(
        r"([A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)?", text, re.ASCII
    ):
        return text
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", _without_accents(text)).strip("-_.")
    return _shorten(slug, text, LABEL_LENGTH, "-_.")


def _without_accents(text: str) -> str:
    """Return *text* with accents removed from its letters."""
    plain = unicodedata.normalize("NFKD", text)
    return "".join(char for char in plain if not unicodedata.combining(char))


def _shorten(slug: str, text: str, longest: int, separators: str) -> str:
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_LENGTH]
    head = slug[: longest - _DIGEST_LENGTH - 1].rstrip(separators)
    return f"{head}-{digest}" if head else f"k-{digest}"


DRIVER = "gcsfuse.csi.storage.gke.io"
"""The storage driver that mounts buckets on GKE."""

ARGUMENTS = "/_kinetic/fuse-data"
"""The folder with a numbered mount for each mounted argument that names no path."""


def fuse_volumes(
    data: Iterable[wire.DataRef], store: str = "", billing_project: str = ""
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a volume and a mount for each of *data* that the job mounts (``fuse``).

    For a single object, the volume is the object's folder. For an upload, the volume is the
    folder of its files in *store*, the store's URL. The runner numbers mounts in the same order.
    *billing_project* pays for requests to a bucket whose requester pays.

    Raises:
        ConfigurationError: The data isn't in a bucket, so it can't be mounted.
    """
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    for number, ref in enumerate(ref for ref in data if ref.fuse):
        bucket, prefix = _bucket_folder(ref, store)
        options = "implicit-dirs"
        if prefix:
            escaped = prefix.replace("\\", "\\\\").replace(",", "\\,")
            options += f",only-dir={escaped}"
        if billing_project:
            options += f",billing-project={billing_project}"
        name = f"gcs-fuse-{number}"
        attributes = {"bucketName": bucket, "mountOptions": options}
        csi = {"driver": DRIVER, "readOnly": True, "volumeAttributes": attributes}
        volumes.append({"name": name, "csi": csi})
        path = ref.mount or f"{ARGUMENTS}/{number}"
        mounts.append({"name": name, "mountPath": path, "readOnly": True})
    return volumes, mounts


def _bucket_folder(ref: wire.DataRef, store: str) -> tuple[str, str]:
    """Return the bucket and folder of *ref*."""
    uri, folder = ref.uri, ref.uri if ref.is_dir else ref.uri.rpartition("/")[0]
    if "://" not in uri:  # the files are beside the upload's manifest
        uri = folder = f"{store.rstrip('/')}/{uri.rpartition('/')[0]}/files"
    bucket, _, path = folder.removeprefix("gs://").partition("/")
    if not (uri.startswith("gs://") and bucket):
        raise ConfigurationError(
            f"only data in a bucket can be mounted, and {uri!r} is in none; leave out fuse=True, "
            "or upload the data and pass its gs:// address"
        )
    return bucket, path.strip("/")


KEY = "key"
"""The entry of a submission's Secret that contains the submission's key."""

MAX_SECRET_BYTES = 1024 * 1024
"""The most bytes of a Secret's content."""

_VARIABLE = re.compile(r"[ -<>-~]+")


def secret_entries(spec: JobSpec) -> dict[str, str]:
    """Return the entry of the Secret for each environment variable of *spec*.

    The variables were captured from the user's environment and may be secrets.

    Raises:
        ConfigurationError: A container can't have a variable of this name.
    """
    names = sorted(spec.environment)
    for name in names:
        if not _VARIABLE.fullmatch(name):
            raise ConfigurationError(
                f"the environment variable {name!r} cannot be set in a container: Kubernetes "
                "accepts printable ASCII without '='; leave it out of capture_env_vars"
            )
    # A variable's name isn't always legal as the key of an entry.
    return {name: f"env.{number}" for number, name in enumerate(names)}


def secret_manifest(
    spec: JobSpec, name: str, namespace: str, owner: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the Secret *name* for the submission of *spec*; all its jobs share the Secret.

    *owner* is the object that runs a single job, as the API returned it. Kubernetes deletes the
    Secret together with its owner.

    Raises:
        ConfigurationError: The environment is too large for a Secret.
    """
    content = {
        key: spec.environment[name].encode(errors="surrogateescape")
        for name, key in secret_entries(spec).items()
    }
    submission = spec.labels.get(SUBMISSION, spec.name)
    manifest = opaque_secret(name, namespace, {**content, KEY: spec.key}, submission)
    if owner is not None:
        reference = {key: owner["metadata"][key] for key in ("name", "uid")}
        reference |= {key: owner[key] for key in ("apiVersion", "kind")}
        manifest["metadata"]["ownerReferences"] = [reference]
    return manifest | {"immutable": True}  # no other submission can replace its content


def opaque_secret(
    name: str, namespace: str, content: Mapping[str, bytes], submission: str
) -> dict[str, Any]:
    """Return a Secret of *submission* with *content*.

    Raises:
        ConfigurationError: *content* is too large.
    """
    size = sum(len(value) for value in content.values())
    if size > MAX_SECRET_BYTES:
        raise ConfigurationError(
            f"the captured environment has {size} bytes, but a Secret holds {MAX_SECRET_BYTES}; "
            "capture fewer variables, or ship the content as Data"
        )
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": usual_labels(submission) | {SUBMISSION: label_value(submission)},
            "annotations": {NAME: submission},
        },
        "data": {key: base64.b64encode(value).decode() for key, value in content.items()},
    }


CONTAINER = "kinetic"
"""The container that runs the function, in every pod."""

RUNNER = "/app/remote_runner.py"
"""The runner's path in an image."""

KEY_FOLDER = "/var/run/kinetic"
"""The folder in the container with the submission's key."""

FAILURE_COUNTS = (
    "batch.kubernetes.io/job-index-failure-count",
    "batch.kubernetes.io/job-index-ignored-failure-count",
)
"""The annotations of a pod with the number of earlier pods that failed, or were disrupted."""

REFUSED_PODS = 3
"""How many pods of a Job a kubelet may refuse before the Job fails: the budget for disruptions."""

NAME = "kinetic.dev/name"
"""The annotation with the job's name, which isn't always legal as an object's name."""

LABELS = "kinetic.dev/labels"
"""The annotation with the job's labels as JSON; in Kubernetes' labels, values are shortened."""

START_TIMEOUT = "kinetic.dev/start-timeout"
"""The annotation with the job's ``start_timeout``, in seconds."""

JOB = "kinetic.dev/job"
"""The label with the Job's name, on the Job and its pods."""

ITEM = "kinetic.dev/item"
"""The label with an attempt's item, on Jobs and pods: a selector finds all attempts of an item."""

RANK = "batch.kubernetes.io/job-completion-index"
"""The label and annotation with a pod's index in its Job: a worker's rank, or a host's number."""

QUEUE = "kueue.x-k8s.io/queue-name"
"""The label with the name of a queue of Kueue."""

POD_SECURITY = "pod-security.kubernetes.io/enforce"
"""The label of a namespace with the Pod Security Standard that its pods must satisfy."""

HOSTS = "kinetic.dev/hosts"
"""The annotation with the number of hosts, on a set for one job and on its Jobs and pods.

`GroupTable` reads objects that have this annotation; `Table`, which is about Jobs, ignores them.
"""

MANAGED = "app.kubernetes.io/managed-by"
"""The label, with the value ``kinetic``, of every object that kinetic creates."""

DAY_S = 24 * 3600
MEMORY_PER_CORE = 2 * 1024**3
"""Bytes of memory per core that a job without ``memory=`` requests; this isn't a limit."""

PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
"""JAX's platforms for each kind of accelerator. JAX uses the first, and fails if it is missing."""

PULL_S = 600.0
"""Seconds that the deadline of a pod adds to the job's timeout, for pulling an image.

The runner ends a function at its timeout; the deadline ends a pod whose runner fails to do so.
"""

SPOT = "cloud.google.com/gke-spot"
COMPUTE_CLASS = "cloud.google.com/compute-class"
"""The label of a ComputeClass's nodes. GKE taints these nodes, so only pods that select the label
run there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where jobs run, and how the cluster's owner wants them to run.

    ``secret`` names the submission's Secret. ``ttl_s`` is how many seconds the cluster keeps a
    finished Job. ``run_as_user`` is the user ID of pods; None means the image's user, and
    0 means root. ``claim`` names the PersistentVolumeClaim with the directory of the store. If it
    is empty, each node has that directory at the same path. ``compute_class`` names the
    ComputeClass whose nodes run the pods. If it is empty, any node that fits may run them.
    ``annotations`` are for the object and its pods, ``pod_annotations`` for pods only.
    """

    namespace: str = "default"
    secret: str = ""
    service_account: str = "kinetic"
    ttl_s: int = DAY_S
    queue: str = ""
    priority_class: str = ""
    run_as_user: int | None = None
    claim: str = ""
    compute_class: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict[str, str])
    pod_annotations: Mapping[str, str] = field(default_factory=dict[str, str])


def job_manifest(spec: JobSpec, placement: Placement) -> dict[str, Any]:
    """Return the manifest of the Kubernetes Job that runs *spec*.

    Raises:
        ConfigurationError: A container can't have a variable of the environment, or a
            volume would hide a path that the job needs.
    """
    name = object_name(spec.name)
    identity = {JOB: name, ITEM: object_name(item_name(spec.name, spec.labels.get(ATTEMPT)))}
    own_labels = {key: label_value(value) for key, value in spec.labels.items()}
    labels = usual_labels(placement.secret) | own_labels | identity
    shown_labels = json.dumps(dict(spec.labels), separators=(",", ":"))
    annotations = {**placement.annotations, NAME: spec.name, LABELS: shown_labels}
    if spec.start_timeout is not None:
        annotations[START_TIMEOUT] = f"{spec.start_timeout:g}"
    pod_annotations = {**placement.pod_annotations, **annotations}
    if any(ref.fuse for ref in spec.order.data):
        pod_annotations["gke-gcsfuse/volumes"] = "true"  # GKE adds the sidecar that mounts buckets
    # The autoscaler must not remove a node to save cost while a job runs on it.
    pod_annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] = "false"
    queue = {QUEUE: placement.queue} if placement.queue else {}
    # Any exit code ends the Job. What is left has no exit code: a kubelet refused the pod.
    # Kubernetes then creates another pod, `REFUSED_PODS` times at most.
    codes = {"containerName": CONTAINER, "operator": "NotIn", "values": [0]}
    rules = [*failure_rules(), {"action": "FailIndex", "onExitCodes": codes}]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": placement.namespace,
            "labels": labels | queue,
            "annotations": annotations,
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": 1,
            "parallelism": 1,
            "backoffLimitPerIndex": REFUSED_PODS,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": rules},
            "ttlSecondsAfterFinished": placement.ttl_s,
            **({"suspend": True} if placement.queue else {}),
            "template": {
                "metadata": {"labels": labels, "annotations": pod_annotations},
                "spec": _pod_spec(spec, placement),
            },
        },
    }


def failure_rules() -> list[dict[str, Any]]:
    """Return the rules for failed pods; the first rule that matches decides.

    If a worker leaves, or its image can't run it, its index ends, even if the pod's node is being
    drained. Otherwise, Kubernetes replaces a pod that it disrupted.
    """
    final = [wire.EXIT_FINAL, EXIT_SURPLUS]
    codes = {"containerName": CONTAINER, "operator": "In", "values": final}
    return [
        {"action": "FailIndex", "onExitCodes": codes},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def usual_labels(instance: str) -> dict[str, str]:
    """Return the labels that Kubernetes tools know, for objects of submission *instance*."""
    return {
        "app.kubernetes.io/name": "kinetic",
        MANAGED: "kinetic",
        "app.kubernetes.io/component": "runner",
        "app.kubernetes.io/instance": label_value(instance),
    }


def _pod_spec(spec: JobSpec, placement: Placement) -> dict[str, Any]:
    accelerator, data = spec.resources.accelerator, spec.order.data
    billing_project = spec.environment.get(wire.BILLING_PROJECT, "")
    fuse_storage, fuse_mounts = fuse_volumes(data, spec.order.store, billing_project)
    user = spec.image.user if placement.run_as_user is None else placement.run_as_user
    folders = _folders(data, fuse_mounts) if user else []  # root can create any folder
    store_volumes, store_mounts = _store_volume(spec.order.store, placement.claim)
    mounts = [*store_mounts, *fuse_mounts, *folders]
    for mount in mounts:
        _refuse_hiding(str(mount["mountPath"]))
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": placement.service_account,
        # Without the token, the runner could not remove a pod that other containers keep running.
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": max(1, math.ceil(spec.order.grace)),
        "securityContext": _pod_security(user, claim=placement.claim),
        "nodeSelector": _selector(accelerator, placement.compute_class),
        "affinity": _affinity(accelerator),
        "tolerations": _tolerations(accelerator),
        "containers": [_container(spec, placement, mounts)],
        "volumes": [
            *_volumes(spec, placement),
            *store_volumes,
            *fuse_storage,
            *({"name": folder["name"], "emptyDir": {}} for folder in folders),
        ],
    }
    if spec.timeout is not None:
        run_s = spec.timeout + wire.start_allowance(spec.order.debug_s)
        limit = math.ceil(run_s + spec.order.grace + PULL_S)
        pod["activeDeadlineSeconds"] = min(max(1, limit), 2**31 - 1)
    if placement.priority_class:
        pod["priorityClassName"] = placement.priority_class
    return {key: value for key, value in pod.items() if value not in ({}, [])}


def _folders(
    data: Sequence[wire.DataRef], fuse_mounts: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return mounts of empty volumes at the folders that the runner fills with *data*.

    Without a mount, only root could create a folder such as ``/data``.
    """
    filled = {_folder(ref) for ref in data if ref.mount and not ref.fuse}
    points: list[str] = []
    for point in sorted(filled - {str(mount["mountPath"]) for mount in fuse_mounts} - {"/"}):
        # The user can make a folder inside another such folder.
        if not any(point.startswith(f"{parent}/") for parent in points):
            points.append(point)
    return [{"name": f"data-{number}", "mountPath": point} for number, point in enumerate(points)]


def _folder(ref: wire.DataRef) -> str:
    """Return the folder that the data of *ref* fills: for a path of a file, the file's parent."""
    point = posixpath.normpath(ref.mount or "/")
    parent, _, last = point.rpartition("/")
    name = ref.name or ref.uri.rpartition("/")[2]
    return point if ref.is_dir or last != name else parent or "/"


def _refuse_hiding(path: str) -> None:
    """Refuse a mount at *path* that would hide the runner or the key."""
    hides = any(f"{needed}/".startswith(f"{path}/") for needed in (RUNNER, KEY_FOLDER))
    if hides or path.startswith(f"{KEY_FOLDER}/"):
        raise ConfigurationError(
            f"no volume can be mounted at {path!r}: it would hide files that a job needs; "
            "choose another path, such as '/data'"
        )


def pod_requirements(accelerator: Accelerator) -> dict[str, Any]:
    """Return the part of a pod's spec that says what *accelerator* requires of a node."""
    return {
        "nodeSelector": _selector(accelerator),
        "affinity": _affinity(accelerator),
        "tolerations": _tolerations(accelerator),
        "containers": [{"resources": _resources(Resources(accelerator=accelerator))}],
    }


def _selector(accelerator: Accelerator, compute_class: str = "") -> dict[str, str]:
    """Return the node selector."""
    selector = dict(accelerator.node_selector)
    if compute_class:
        # The class of a spot accelerator also has on-demand nodes, for a lack of spot nodes.
        selector.pop(SPOT, None)
        selector[COMPUTE_CLASS] = compute_class
    if accelerator.arch != "amd64":  # GKE keeps Arm nodes for pods that select them
        selector["kubernetes.io/arch"] = accelerator.arch
    return selector


def _affinity(accelerator: Accelerator) -> dict[str, Any]:
    if not (labels := accelerator.node_affinity):
        return {}
    expressions = [
        {"key": key, "operator": "In", "values": [*values]} for key, values in labels.items()
    ]
    terms = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _tolerations(accelerator: Accelerator) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    if accelerator.resource:
        found.append({"key": accelerator.resource, "operator": "Exists", "effect": "NoSchedule"})
    equal = {"operator": "Equal", "effect": "NoSchedule"}
    if accelerator.spot:
        found.append({"key": SPOT, "value": "true", **equal})
    if accelerator.arch != "amd64":
        found.append({"key": "kubernetes.io/arch", "value": accelerator.arch, **equal})
    return found


def _pod_security(user: int | None, *, claim: str) -> dict[str, Any]:
    """Return a pod's security context.

    The context meets the Pod Security Standard ``restricted`` if *user* is known and not root.
    """
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if user is not None:  # otherwise the image's own user applies, without which it may not work
        security["runAsUser"] = user
    if user:
        # With a group, the node would change the permissions of all files in the claim.
        security |= {"runAsNonRoot": True, **({} if claim else {"fsGroup": user})}
    return security


def _container(spec: JobSpec, placement: Placement, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    command = [*(spec.image.command or ("python3",)), "-u", RUNNER]
    return {
        "name": CONTAINER,
        "image": spec.image.uri,
        "command": [_escape(word) for word in command],
        "env": _environment(spec, placement),
        "resources": _resources(spec.resources),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        # The message is the receipt of an outcome, or the log's last lines if there is no receipt.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "key", "mountPath": KEY_FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            *mounts,
        ],
    }


_FIELDS = {
    "KINETIC_POD_UID": "metadata.uid",
    "KINETIC_POD_NAME": "metadata.name",
    "KINETIC_FAILURES": f"metadata.annotations['{FAILURE_COUNTS[0]}']",
    "KINETIC_DISRUPTIONS": f"metadata.annotations['{FAILURE_COUNTS[1]}']",
}
"""The variables whose values are fields of the pod."""

JOB_UID = "metadata.labels['batch.kubernetes.io/controller-uid']"
"""The field of a pod that has the uid of its Job."""


def _environment(spec: JobSpec, placement: Placement) -> list[dict[str, Any]]:
    scheme, _, rest = spec.order.store.partition("://")
    defaults = {
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": PLATFORMS[spec.resources.accelerator.kind],
        "JOB_ID": spec.order.job_id or spec.order.group_id or "",
        "GCS_BUCKET": rest.partition("/")[0] if scheme == "gs" else "",
    }
    plain = {name: value for name, value in defaults.items() if name not in spec.environment}
    plain |= {"KINETIC_ORDER": spec.order.encode()}
    sources = {
        name: {"secretKeyRef": {"name": placement.secret, "key": key}}
        for name, key in secret_entries(spec).items()
    }
    fields = dict(_FIELDS)
    if spec.crew is not None:
        plain |= {"KINETIC_CREW": spec.crew.encode()}
        fields |= {"KINETIC_JOB_UID": JOB_UID}
    sources |= {name: {"fieldRef": {"fieldPath": path}} for name, path in fields.items()}
    return [
        *({"name": name, "value": _escape(value)} for name, value in plain.items()),
        *({"name": name, "valueFrom": source} for name, source in sources.items()),
    ]


def _escape(text: str) -> str:
    """Return *text* so that Kubernetes, which expands $(NAME) and turns $$ into $, restores it."""
    return text.replace("$", "$$")


def _resources(resources: Resources) -> dict[str, Any]:
    """Return the requests and limits of a container."""
    accelerator, cpu = resources.accelerator, f"{max(1, math.ceil(resources.cpu * 1000))}m"
    memory = resources.memory_bytes or int(MEMORY_PER_CORE * max(resources.cpu, 0.25))
    requests: dict[str, str] = {"cpu": cpu, "memory": str(memory)}
    limits: dict[str, str] = {}
    if resources.memory_bytes is not None:
        limits["memory"] = str(memory)
    if name := accelerator.resource:  # such a job may use all cores of its machine
        requests[name] = limits[name] = str(accelerator.chips_per_host)
    else:
        limits["cpu"] = cpu
    return {"requests": requests, "limits": limits}


def _volumes(spec: JobSpec, placement: Placement) -> list[dict[str, Any]]:
    """Return the volumes with the key, and with shared memory for data loaders."""
    # Without this volume, a container has only 64 MiB of shared memory.
    shm: dict[str, Any] = {"medium": "Memory"}
    if spec.resources.memory_bytes is not None:  # files in shared memory count as memory
        shm["sizeLimit"] = str(max(64 * 1024**2, spec.resources.memory_bytes // 2))
    key = {
        "secretName": placement.secret,
        "items": [{"key": KEY, "path": "key"}],
        # Root owns the file, and an image may run as any user. So the mode lets any user read it.
        "defaultMode": 0o444,
    }
    return [{"name": "key", "secret": key}, {"name": "shm", "emptyDir": shm}]


def _store_volume(url: str, claim: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volume with a shared store, and its mount at the same path; none for a bucket."""
    if (path := directory_urls.directory_of(url)) is None:
        return [], []
    if claim:
        source: dict[str, Any] = {"persistentVolumeClaim": {"claimName": claim}}
    else:  # without the type, a pod on a node that lacks the directory would use an empty one
        source = {"hostPath": {"path": path, "type": "Directory"}}
    return [{"name": "store", **source}], [{"name": "store", "mountPath": path}]


class Paths:
    """The paths of one namespace's collections."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.secrets = f"/api/v1/namespaces/{namespace}/secrets"
        self.events = f"/api/v1/namespaces/{namespace}/events"
        self.claims = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
        self.nodes = "/api/v1/nodes"


def by_labels(labels: Mapping[str, str]) -> str:
    """Return a selector of kinetic's Jobs and pods that carry all of *labels*."""
    wanted = {MANAGED: "kinetic"} | {key: label_value(value) for key, value in labels.items()}
    return ",".join(f"{key}={value}" for key, value in wanted.items())


def by_job(name: str) -> str:
    """Return a selector of the Job that was created for the attempt or round *name*."""
    return f"{MANAGED}=kinetic,{JOB}={object_name(name)}"


def by_worker(name: str) -> str:
    """Return a selector of the pods of the worker's rank, in the round that *name* begins with."""
    round_name, _, rank, _ = name.rsplit(".", 3)
    return f"{by_job(round_name)},{RANK}={rank}"


def by_items(names: Collection[str]) -> str:
    """Return a selector of the Jobs and pods of the items of these attempts."""
    items = sorted({object_name(item) for name in names for item in items_of(name)})
    return f"{MANAGED}=kinetic,{ITEM} in ({','.join(items)})"
