"""A container's command and variables as kubelet makes them of its spec; pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]

REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")
SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['(.*)'\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where values come from: the pod, and Secrets by name."""

    pod: Json
    secrets: Mapping[str, Json] = field(default_factory=dict)


def expand(text: str, known: Mapping[str, str]) -> str:
    """Put variables in place of ``$(NAME)``; ``$$`` is a dollar, an unknown name stays."""

    def replaced(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return known.get(match[1], match[0])

    return REFERENCE.sub(replaced, text)


def variables(container: Json, sources: Sources) -> dict[str, str]:
    """The container's own variables, in order, each seeing those before it."""
    found: dict[str, str] = {}
    for one in container.get("env") or ():
        if "valueFrom" in one:
            found[one["name"]] = _referred(one["valueFrom"], sources)
        else:
            found[one["name"]] = expand(one.get("value") or "", found)
    return found


def _referred(source: Json, sources: Sources) -> str:
    if reference := source.get("secretKeyRef"):
        value = sources.secrets[reference["name"]]["data"][reference["key"]]
        return base64.b64decode(value).decode(errors="surrogateescape")
    path = str(source["fieldRef"]["fieldPath"])
    metadata = sources.pod["metadata"]
    if match := SUBSCRIPT.fullmatch(path):
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    known = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": sources.pod["spec"].get("nodeName", ""),
    }
    return str(known[path])


def command(container: Json, known: Mapping[str, str]) -> list[str]:
    """Return the container's command line. It needs ``command``: no image is read here."""
    words = [*container["command"], *(container.get("args") or ())]
    return [expand(word, known) for word in words]


def references(pod: Json) -> tuple[set[str], set[str]]:
    """The Secrets and ConfigMaps that the pod's containers and volumes name."""
    secrets: set[str] = set()
    configs: set[str] = set()
    for container in pod["spec"]["containers"]:
        for one in container.get("env") or ():
            source = one.get("valueFrom") or {}
            secrets |= {ref["name"] for ref in [source.get("secretKeyRef")] if ref}
    for volume in pod["spec"].get("volumes") or ():
        if "secret" in volume:
            secrets.add(volume["secret"]["secretName"])
        for source in (volume.get("projected") or {}).get("sources", ()):
            if "configMap" in source:
                configs.add(source["configMap"]["name"])
    return secrets, configs
