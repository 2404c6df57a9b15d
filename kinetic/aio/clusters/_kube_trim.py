"""Objects without what nobody asks about: most of their size, for as long as they are known."""

from __future__ import annotations

import contextlib
from typing import Any

from kinetic._runner import receipts, wire
from kinetic.aio.clusters._reasons.documents import Document, part, parts

__all__ = ["OUTCOME", "same", "trimmed"]

OUTCOME = "kinetic"
"""Where the end of a container has the reason of the outcome that its runner committed."""

_POD = frozenset(
    {
        "activeDeadlineSeconds",
        "affinity",
        "nodeName",
        "nodeSelector",
        "overhead",
        "resourceClaims",
        "resources",
        "restartPolicy",
        "schedulerName",
        "schedulingGates",
        "tolerations",
    }
)
_CLAIMS = frozenset({"persistentVolumeClaim", "ephemeral"})
_CONTAINER = ("name", "image", "command", "resources", "restartPolicy")
_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "finalizers",
    "labels",
    "annotations",
    "ownerReferences",
)

_IDENTITY = ("uid", "deletionTimestamp", "annotations")
_JOB_STATUS = ("conditions", "failed", "failedIndexes", "completedIndexes")


def trimmed(document: Document) -> Document:
    """What `kinetic.aio.clusters._reasons` reads of a Job or a pod, and who it is."""
    metadata = part(document, "metadata")
    spec = part(document, "spec")
    if "containers" in spec:
        kept: dict[str, Any] = {key: spec[key] for key in _POD & spec.keys()}
        if claims := [one for one in parts(spec, "volumes") if _CLAIMS & one.keys()]:
            kept["volumes"] = claims
        for field in ("initContainers", "containers"):
            if field in spec:
                kept[field] = [
                    {key: one[key] for key in _CONTAINER if key in one} for one in spec[field]
                ]
    else:
        kept = {key: value for key, value in spec.items() if key != "template"}
    return {
        "metadata": {key: metadata[key] for key in _METADATA if key in metadata},
        "spec": kept,
        "status": _without_receipts(part(document, "status")),
    }


def same(before: Document, now: Document) -> bool:
    """Whether *now*, trimmed like *before*, says nothing new: half of all changes do not."""
    if any(
        part(before, "metadata").get(key) != part(now, "metadata").get(key) for key in _IDENTITY
    ):
        return False
    if before["spec"] != now["spec"]:
        return False
    if "containers" in now["spec"] or now["spec"].get("completions") != 1:
        return bool(before["status"] == now["status"])
    return all(before["status"].get(key) == now["status"].get(key) for key in _JOB_STATUS)


def _without_receipts(status: Document) -> Document:
    """The copy of an outcome in a termination message is not what the program said."""
    statuses = parts(status, "containerStatuses")
    if not any(part(part(one, "state"), "terminated").get("message") for one in statuses):
        return status
    return {**status, "containerStatuses": [_without_receipt(one) for one in statuses]}


def _without_receipt(container: Document) -> Document:
    ended = part(part(container, "state"), "terminated")
    receipt = receipts.parse(str(ended.get("message") or ""))
    if receipt is None:
        return container
    said = {key: value for key, value in ended.items() if key != "message"}
    with contextlib.suppress(ValueError):  # of another version
        said[OUTCOME] = wire.Outcome.parse(receipt.metadata["header"]).reason
    return {**container, "state": {"terminated": said}}
