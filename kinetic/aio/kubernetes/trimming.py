"""Reduce a Job or a pod to what kinetic reads, because thousands are in memory at once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any, cast

from kinetic._runner.protocol import wire
from kinetic.aio.kubernetes.diagnosis.documents import Document, get_dict, get_list
from kinetic.aio.kubernetes.diagnosis.facts import OUTCOME, Pod

RECEIPT = "receipt"
"""The field that `trim` adds to the end of a container: the receipt of the job's outcome."""

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
_POD_SPEC = (
    "activeDeadlineSeconds",
    "affinity",
    "nodeName",
    "nodeSelector",
    "overhead",
    "resources",
    "restartPolicy",
    "schedulerName",
    "schedulingGates",
    "tolerations",
)
_CONTAINER = ("name", "image", "command", "resources", "restartPolicy")
_IDENTITY = ("uid", "deletionTimestamp", "annotations")
_JOB_STATUS = ("conditions", "failed", "failedIndexes", "completedIndexes")


def trim(document: Document) -> Document:
    """Return what `kinetic.aio.kubernetes.diagnosis` reads of a Job or a pod."""
    spec = get_dict(document, "spec")
    if "containers" in spec:
        kept = _select(_POD_SPEC, spec)
        for field in ("initContainers", "containers"):
            if field in spec:
                kept[field] = [_select(_CONTAINER, container) for container in spec[field]]
    else:
        kept = {key: value for key, value in spec.items() if key != "template"}
    return {
        "metadata": _deduplicate(_select(_METADATA, get_dict(document, "metadata"))),
        "spec": _deduplicate(kept),
        "status": _deduplicate(_with_receipts(get_dict(document, "status"))),
    }


def _select(names: Iterable[str], document: Document) -> dict[str, Any]:
    return {name: document[name] for name in names if name in document}


MAX_MEMO = 2048
"""The most values in `_memo`; the jobs of a batch share a few hundred values."""

_memo: dict[Any, Any] = {}


def _deduplicate(value: Any) -> Any:
    """Return *value*, with parts of recent documents in place of parts that equal them.

    Documents of a batch differ little, so this saves most of their memory.
    """
    key: Any
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        value = {sys.intern(name): _deduplicate(child) for name, child in pairs}
        key = (dict, *value, *map(_memo_key, value.values()))
    elif isinstance(value, list):
        value = [*map(_deduplicate, cast("Iterable[Any]", value))]
        key = (list, *map(_memo_key, value))
    else:
        key = _memo_key(value)
    if len(_memo) >= MAX_MEMO:
        _memo.clear()
    return _memo.setdefault(key, value)


def _memo_key(value: Any) -> Any:
    """Return a key for a shared part; an id is safe, because `_memo` keeps its object alive."""
    return (type(value), value) if isinstance(value, (str, int, float)) else id(value)


def is_unchanged(before: Document, now: Document) -> bool:
    """Return whether the trimmed document *now* tells kinetic nothing that *before* didn't."""
    if _select(_IDENTITY, get_dict(before, "metadata")) != _select(
        _IDENTITY, get_dict(now, "metadata")
    ):
        return False
    if before["spec"] != now["spec"]:
        return False
    if "containers" in now["spec"] or now["spec"].get("completions") != 1:
        return bool(before["status"] == now["status"])
    return _select(_JOB_STATUS, before["status"]) == _select(_JOB_STATUS, now["status"])


def _with_receipts(status: Document) -> Document:
    """Move receipts from termination messages to `RECEIPT`: they aren't output of the program."""
    statuses = get_list(status, "containerStatuses")
    if not any(
        get_dict(get_dict(container, "state"), "terminated").get("message")
        for container in statuses
    ):
        return status
    return {**status, "containerStatuses": [_with_receipt(container) for container in statuses]}


def _with_receipt(container: Document) -> Document:
    ended = get_dict(get_dict(container, "state"), "terminated")
    receipt = wire.parse_receipt(str(ended.get("message") or ""))
    if receipt is None:
        return container
    kept = {key: value for key, value in ended.items() if key != "message"} | {RECEIPT: receipt}
    with contextlib.suppress(ValueError):  # another version wrote the receipt
        kept[OUTCOME] = wire.Outcome.parse(receipt.metadata["header"]).reason
    return {**container, "state": {"terminated": kept}}


def receipt_of(pod: Document | None) -> wire.Receipt | None:
    """Return the receipt in a trimmed pod; None if it has none."""
    ends = (program.state("terminated") or {} for program in Pod(pod or {}).programs)
    return next((end[RECEIPT] for end in ends if end.get(RECEIPT)), None)
