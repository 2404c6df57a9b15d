"""Build the manifest of a round of workers, and read how far one is. No I/O.

A round is an Indexed Job: index k is the worker of rank k. The container gets what that of a single
job gets (see `manifests`), and ``KINETIC_ROUND``, the number of the round.

If a worker exits with 0, the Job is complete, and Kubernetes ends the others. It replaces a worker
after any other end, but not after 44, with which a worker leaves, and 42, if its image can't run
it.
"""

from __future__ import annotations

import datetime
import math
import time
from typing import Any

from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, get_dict
from kinetic.aio.kubernetes.manifests import Placement, failure_rules, job_manifest
from kinetic.aio.ports import JobSpec

UNLIMITED = 2**31 - 1
"""A limit that is never reached; Kubernetes takes no larger one."""

BACKSTOP_S = 60.0
"""How long after ``batch_timeout`` Kubernetes ends a round that hasn't ended, in seconds."""

QUEUE_ANNOTATIONS = {
    "kueue.x-k8s.io/job-min-parallelism": "1",
    "kueue.x-k8s.io/job-completions-equal-parallelism": "true",
}
"""They let a queue admit a round that gets fewer workers than it asks for."""

ENDS = ("Complete", "SuccessCriteriaMet", "Failed", "FailureTarget")
"""The conditions of a Job that starts no more pods."""


def round_manifest(
    spec: JobSpec, *, number: int, workers: int, placement: Placement
) -> dict[str, Any]:
    """Return the manifest of the Job whose pods are the *workers* of round *number*.

    Raises:
        ConfigurationError: See `job_manifest`.
    """
    assert spec.crew is not None
    manifest = job_manifest(spec, placement)
    job = manifest["spec"]
    job |= {
        "completions": workers,
        "parallelism": workers,
        "backoffLimitPerIndex": UNLIMITED,
        "backoffLimit": UNLIMITED,
        "podFailurePolicy": {"rules": failure_rules()},
        "successPolicy": {"rules": [{"succeededCount": 1}]},
    }
    if (lifetime_s := spec.crew.terms.lifetime_s) is not None:
        job["activeDeadlineSeconds"] = _backstop(lifetime_s)
    if placement.queue and workers > 1:  # Kueue refuses a least number that isn't below the number
        manifest["metadata"]["annotations"] |= QUEUE_ANNOTATIONS
    (container,) = job["template"]["spec"]["containers"]
    container["env"].append({"name": "KINETIC_ROUND", "value": str(number)})
    return manifest


def size_of(job: Document) -> int:
    """Return how many workers the round of *job* has or will have; 0 if it is over."""
    if get_dict(job, "metadata").get("deletionTimestamp") or any(
        condition(job, kind) is not None for kind in ENDS
    ):
        return 0
    return int(get_dict(job, "spec").get("completions") or 0)


def extension(job: Document, seconds: float) -> dict[str, Any]:
    """Return the change to *job* after which its deadline lets it run for *seconds* from now."""
    limit = get_dict(job, "spec").get("activeDeadlineSeconds")
    started = get_dict(job, "status").get("startTime")
    if not limit or not started:  # without a start, the time hasn't begun
        return {}
    age = time.time() - datetime.datetime.fromisoformat(started).timestamp()
    return {"spec": {"activeDeadlineSeconds": max(limit, _backstop(age + seconds))}}


def _backstop(seconds: float) -> int:
    """Return a deadline by which workers that live for *seconds* have ended themselves."""
    return min(math.ceil(seconds + BACKSTOP_S), UNLIMITED)


def growth(job: Document, workers: int) -> dict[str, Any]:
    """Return the change to *job* that gives its round more workers."""
    # With the version, Kubernetes refuses the change if another client has asked for more
    # meanwhile: it would end workers.
    version = get_dict(job, "metadata")["resourceVersion"]
    return {
        "metadata": {"resourceVersion": version},
        "spec": {"completions": workers, "parallelism": workers},
    }
