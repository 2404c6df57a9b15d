"""Reduce a Job or a pod to what kinetic reads, because thousands are in memory at once."""

from __future__ import annotations

import contextlib
from typing import Any

from kinetic._runner.protocol import wire
from kinetic.aio.kubernetes.diagnosis.documents import Document, get_dict, get_list
from kinetic.aio.kubernetes.diagnosis.facts import OUTCOME

RECEIPT = "receipt"
"""The field that `trim` adds to the end of a container: the receipt of the job's outcome."""

_DROPPED = ("managedFields", "template", "volumes", "env", "volumeMounts")
"""The large fields that kinetic doesn't read, in metadata, specs, and containers."""


def trim(document: Document) -> Document:
    """Return what `kinetic.aio.kubernetes.diagnosis` reads of a Job or a pod."""
    spec = _reduce(get_dict(document, "spec"))
    volumes = get_list(get_dict(document, "spec"), "volumes")
    if claims := [volume for volume in volumes if "persistentVolumeClaim" in volume]:
        spec["volumes"] = claims
    for field in ("initContainers", "containers"):
        if field in spec:
            spec[field] = [_reduce(container) for container in get_list(spec, field)]
    status = get_dict(document, "status")
    if statuses := get_list(status, "containerStatuses"):
        status = {**status, "containerStatuses": [*map(_with_receipt, statuses)]}
    return {"metadata": _reduce(get_dict(document, "metadata")), "spec": spec, "status": status}


def _reduce(document: Document) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in _DROPPED}


def _with_receipt(container: Document) -> Document:
    """Move a receipt from a termination message to `RECEIPT`; it isn't output of the program."""
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
