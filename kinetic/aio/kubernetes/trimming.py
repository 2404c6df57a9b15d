"""Reduce a Job or a pod to what kinetic reads, because thousands are in memory at once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any, cast

from kinetic._runner.protocol import wire
from kinetic.aio.kubernetes.diagnosis.documents import Document, get_dict, get_list
from kinetic.aio.kubernetes.diagnosis.facts import OUTCOME

RECEIPT = "receipt"
"""The field that `trim` adds to the end of a container: the receipt of the job's outcome."""

_DROPPED = ("managedFields", "template", "volumes", "env", "volumeMounts")
"""The large fields that kinetic doesn't read, in metadata, specs, and containers."""


def trim(document: Document) -> Document:
    """Return what `kinetic.aio.kubernetes.diagnosis` reads of a Job or a pod."""
    if len(_memo) >= MAX_MEMO:
        _memo.clear()
    spec = _reduce(get_dict(document, "spec"))
    volumes = get_list(get_dict(document, "spec"), "volumes")
    if claims := [volume for volume in volumes if "persistentVolumeClaim" in volume]:
        spec["volumes"] = claims
    for field in ("initContainers", "containers"):
        if field in spec:
            spec[field] = [_reduce(container) for container in get_list(spec, field)]
    return {
        "metadata": _deduplicate(_reduce(get_dict(document, "metadata"))),
        "spec": _deduplicate(spec),
        "status": _deduplicate(_with_receipts(get_dict(document, "status"))),
    }


def _reduce(document: Document) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in _DROPPED}


MAX_MEMO = 2048
"""The most values in `_memo` before a document; the jobs of a batch share a few hundred values."""

_memo: dict[Any, Any] = {}


def _deduplicate(value: Any) -> Any:
    """Return *value*; if a recent document has an equal part, the result shares this part.

    Documents of a batch differ little, so sharing saves most of their memory. Equal parts are the
    same object while `_memo` has it. So the ids of its parts are the key of a dict or a list.
    """
    key: Any
    if isinstance(value, str):
        return _memo.setdefault(value, value)
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        value = {sys.intern(name): _deduplicate(child) for name, child in pairs}
        key = (dict, *value, *map(id, value.values()))
    elif isinstance(value, list):
        value = [*map(_deduplicate, cast("Iterable[Any]", value))]
        key = (list, *map(id, value))
    elif isinstance(value, (int, float)):
        key = (type(value), value)
    else:
        return value
    return _memo.setdefault(key, value)


def _with_receipts(status: Document) -> Document:
    """Move receipts from termination messages to `RECEIPT`; they aren't output of the program."""
    if not (statuses := get_list(status, "containerStatuses")):
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
    for container in get_list(get_dict(pod, "status"), "containerStatuses"):
        ended = get_dict(get_dict(container, "state"), "terminated")
        if RECEIPT in ended:
            receipt: wire.Receipt = ended[RECEIPT]
            return receipt
    return None
