"""A change of a live job takes little time, because thousands can be live at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kinetic.aio.kubernetes.manifests import Placement, job_manifest
from kinetic.aio.kubernetes.reflector import Changed, Listed
from kinetic.aio.kubernetes.tables import Table
from kinetic.aio.kubernetes.trimming import trim
from tests.kubernetes.orders import LABELS, order

JOBS = 500
MOST_CALLS = 900
"""Maximum number of calls, of Python's functions and of builtins, for a change of a Job or pod."""
NOW = "2026-11-23T10:00:00Z"


def changes(number: int) -> Iterator[tuple[str, bool]]:
    """Yield a job's changes until it runs: each as text, and whether it is about a pod."""
    name, job_uid, pod_uid = f"grp-1-{number}-1", f"{number:036d}", f"{number + JOBS:036d}"
    labels = {**LABELS, "kinetic.dev/index": str(number), "kinetic.dev/attempt": "1"}
    job = job_manifest(order(name=name, labels=labels), Placement(namespace="ml", secret="grp-1"))
    common = {"uid": job_uid, "resourceVersion": str(number), "creationTimestamp": NOW}
    job["metadata"] |= common | {"managedFields": [{"fieldsV1": {"f:status": {}}}]}
    yield json.dumps(job), False
    template = job["spec"]["template"]
    controller = {"kind": "Job", "name": name, "uid": job_uid, "controller": True}
    metadata = {"name": f"{name}-0-x", "uid": pod_uid, "ownerReferences": [controller]}
    pod = {**template, "metadata": {**template["metadata"], **common, **metadata}}
    yield json.dumps({**pod, "status": {"phase": "Pending"}}), True
    kinds = ("Initialized", "Ready", "ContainersReady", "PodScheduled")
    status = {
        "phase": "Running",
        "conditions": [
            {"type": kind, "status": "True", "lastProbeTime": None, "lastTransitionTime": NOW}
            for kind in kinds
        ],
        "podIP": f"10.0.{number // 250}.{number % 250}",
        "containerStatuses": [
            {"name": "kinetic", "ready": True, "state": {"running": {"startedAt": NOW}}}
        ],
    }
    pod["spec"] = {**pod["spec"], "nodeName": f"node-{number % 100}"}
    yield json.dumps({**pod, "status": status}), True


@pytest.mark.full
def test_a_change_takes_few_calls() -> None:
    table, calls = Table(), 0
    for pods in (False, True):
        table.feed(Listed(items=[], version="1"), pods=pods)
    documents = [
        (json.loads(text), pods) for number in range(JOBS) for text, pods in changes(number)
    ]

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        for document, pods in documents:
            table.feed(Changed(document=trim(document), deleted=False), pods=pods)
            for _ in table.news():
                pass
    finally:
        sys.setprofile(before)
    assert calls / len(documents) < MOST_CALLS
