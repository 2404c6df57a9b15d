"""Kubernetes' quantities (``500m``, ``2Gi``) as numbers, and what is asked of which resource."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kinetic.aio.kubernetes.diagnosis.documents import part, parts

__all__ = ["amount", "is_bytes", "number", "readable", "requests", "shown"]

_QUANTITY = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)")
_UNITS = {
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "": 1.0,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)},
}
_NAMES = {
    "cpu": "CPUs",
    "memory": "of memory",
    "ephemeral-storage": "of ephemeral storage",
    "google.com/tpu": "TPU chips",
    "nvidia.com/gpu": "GPUs",
}


def number(quantity: object) -> float:
    """*quantity* in its resource's unit (cores, bytes, pieces); 0 when it is none."""
    found = _QUANTITY.fullmatch(str(quantity).strip())
    if found is None or found[2] not in _UNITS:
        return 0.0
    try:
        return float(found[1]) * _UNITS[found[2]]
    except ValueError:
        return 0.0


def is_bytes(resource: str) -> bool:
    """Whether amounts of *resource* are bytes."""
    return resource in ("memory", "ephemeral-storage") or resource.startswith("hugepages-")


def shown(resource: str, amount: float) -> str:
    """*amount* of *resource* as one says it: ``64 CPUs``, ``500Gi of memory``."""
    name = _NAMES.get(resource, resource)
    if is_bytes(resource):
        return f"{_binary(amount)} {name}"
    one = amount == 1 and resource in _NAMES
    return f"{amount:g} {name.removesuffix('s') if one else name}"


def _binary(size: float) -> str:
    for power, unit in reversed(list(enumerate(("Ki", "Mi", "Gi", "Ti"), 1))):
        if size >= 1024.0**power:
            amount = size / 1024.0**power
            return f"{amount:.0f}{unit}" if amount >= 100 else f"{amount:.3g}{unit}"
    return f"{size:g}"


def readable(quantity: str) -> str:
    """An amount of bytes in the largest unit that fits: ``1534240Ki`` is ``1.46Gi``."""
    return _binary(number(quantity))


def amount(resource: str, quantity: str) -> str:
    """*quantity* of *resource*, such as one of a quota: bytes in the largest unit that fits."""
    bytes_of = ("memory", "storage")
    return readable(quantity) if resource.endswith(bytes_of) and quantity.isdecimal() else quantity


def requests(spec: Mapping[str, Any]) -> dict[str, float]:
    """What a pod of this spec asks of its node, as the scheduler counts it."""
    together = [_asked(one) for one in parts(spec, "containers")]
    sidecars: dict[str, float] = {}
    peak: dict[str, float] = {}
    for one in parts(spec, "initContainers"):
        if one.get("restartPolicy") == "Always":  # it stays beside the containers
            sidecars = _sum((sidecars, _asked(one)))
        else:
            peak = _most(peak, _sum((sidecars, _asked(one))))
    total = _most(peak, _sum((*together, sidecars)))
    whole = _numbers(part(spec, "resources").get("requests"))
    return _sum(({**total, **whole}, _numbers(spec.get("overhead"))))


def _asked(container: Mapping[str, Any]) -> dict[str, float]:
    """Requests; where there is only a limit, that is the request."""
    resources: Mapping[str, Any] = part(container, "resources")
    return {**_numbers(resources.get("limits")), **_numbers(resources.get("requests"))}


def _numbers(quantities: Mapping[str, Any] | None) -> dict[str, float]:
    return {name: number(quantity) for name, quantity in (quantities or {}).items()}


def _sum(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for amounts in several:
        for name, amount in amounts.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _most(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}}
