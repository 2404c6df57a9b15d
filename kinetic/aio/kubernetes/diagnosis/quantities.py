"""Kubernetes' quantities (``500m``, ``2Gi``) as numbers, and what is asked of which resource."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from kinetic.aio.kubernetes.diagnosis.documents import part, parts

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([A-Za-z]*)")
_UNITS = {
    "": 1.0,
    **{unit: 1000.0**-power for power, unit in enumerate("mun", 1)},
    **{unit: 1000.0**power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)},
}
NAMES = {
    "cpu": "CPUs",
    "memory": "of memory",
    "ephemeral-storage": "of ephemeral storage",
    "google.com/tpu": "TPU chips",
    "nvidia.com/gpu": "GPUs",
}
"""Resources as one says them, after an amount."""


def number(quantity: object) -> float:
    """*quantity* in its resource's unit (cores, bytes, pieces); 0 when it is none."""
    found = _QUANTITY.fullmatch(str(quantity).strip())
    return float(found[1]) * _UNITS.get(found[2], 0.0) if found else 0.0


def is_bytes(resource: str) -> bool:
    """Whether amounts of *resource* are bytes."""
    return resource.endswith(("memory", "storage")) or resource.startswith("hugepages-")


def shown(resource: str, amount: float) -> str:
    """*amount* of *resource* as one says it: ``64 CPUs``, ``500Gi of memory``."""
    name = NAMES.get(resource, resource)
    if is_bytes(resource):
        return f"{readable(amount)} {name}"
    one = amount == 1 and resource in NAMES
    return f"{amount:g} {name.removesuffix('s') if one else name}"


def readable(quantity: str | float) -> str:
    """An amount of bytes in the largest unit that fits: ``1534240Ki`` is ``1.46Gi``."""
    size = number(quantity)
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if size >= _UNITS[unit]:
            count = size / _UNITS[unit]
            return f"{count:.0f}{unit}" if count >= 100 else f"{count:.3g}{unit}"
    return f"{size:g}"


def amount(resource: str, quantity: str) -> str:
    """*quantity* of *resource*, such as one of a quota: bytes in the largest unit that fits."""
    return readable(quantity) if is_bytes(resource) and quantity.isdecimal() else quantity


_Amounts = dict[str, float]


def requests(spec: Mapping[str, Any]) -> _Amounts:
    """What a pod of this spec asks of its node, as the scheduler counts it."""
    beside: _Amounts = {}
    peak: _Amounts = {}
    for one in parts(spec, "initContainers"):
        if one.get("restartPolicy") == "Always":  # it stays beside the containers
            beside = _each(sum, beside, _asked(one))
        else:
            peak = _each(max, peak, _each(sum, beside, _asked(one)))
    together = _each(sum, beside, *map(_asked, parts(spec, "containers")))
    whole = _numbers(part(spec, "resources").get("requests"))
    total = {**_each(max, peak, together), **whole}
    return _each(sum, total, _numbers(spec.get("overhead")))


def _asked(container: Mapping[str, Any]) -> _Amounts:
    """Requests; where there is only a limit, that is the request."""
    resources: Mapping[str, Any] = part(container, "resources")
    return {**_numbers(resources.get("limits")), **_numbers(resources.get("requests"))}


def _numbers(quantities: Mapping[str, Any] | None) -> _Amounts:
    return {name: number(quantity) for name, quantity in (quantities or {}).items()}


def _each(how: Callable[[list[float]], float], *several: _Amounts) -> _Amounts:
    """Of each resource, the sum or the most of what *several* say."""
    names = dict.fromkeys(name for amounts in several for name in amounts)
    return {name: how([amounts.get(name, 0.0) for amounts in several]) for name in names}
