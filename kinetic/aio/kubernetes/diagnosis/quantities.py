"""Kubernetes' quantities (``500m``, ``2Gi``) as numbers, and the requests of a pod."""

from __future__ import annotations

import re
from collections import defaultdict

from kinetic.aio.kubernetes.diagnosis.documents import Document, get_dict, get_list

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
"""The words that follow an amount of a resource."""


def parse_quantity(quantity: object) -> float:
    """Return *quantity* in its resource's unit (cores, bytes, pieces); 0 if it isn't a quantity."""
    match = _QUANTITY.fullmatch(str(quantity).strip())
    return float(match[1]) * _UNITS.get(match[2], 0.0) if match else 0.0


def format_amount(resource: str, amount: float) -> str:
    """Format *amount* of *resource*: ``64 CPUs``, ``500Gi of memory``."""
    name = NAMES.get(resource, resource)
    if resource.endswith(("memory", "storage")) or resource.startswith("hugepages-"):
        return f"{_format_bytes(amount)} {name}"
    is_single = amount == 1 and resource in NAMES
    return f"{amount:g} {name.removesuffix('s') if is_single else name}"


def _format_bytes(size: float) -> str:
    """Format bytes in the largest unit that fits, such as ``1.46Gi``."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if (count := size / _UNITS[unit]) >= 1:
            return f"{count:.0f}{unit}" if count >= 100 else f"{count:.3g}{unit}"
    return f"{size:g}"


def requests(spec: Document) -> dict[str, float]:
    """Return the resources that a pod of this *spec* requests.

    A limit counts as the request of a resource for which there is no request.
    """
    sidecars = (
        container
        for container in get_list(spec, "initContainers")
        if container.get("restartPolicy") == "Always"
    )
    total: defaultdict[str, float] = defaultdict(float)
    overhead = {"resources": {"requests": get_dict(spec, "overhead")}}
    for container in (*get_list(spec, "containers"), *sidecars, overhead):
        resources: Document = get_dict(container, "resources")
        requested = {**get_dict(resources, "limits"), **get_dict(resources, "requests")}
        for name, quantity in requested.items():
            total[name] += parse_quantity(quantity)
    return dict(total)
