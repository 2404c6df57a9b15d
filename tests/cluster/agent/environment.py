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


class CannotCreate(Exception):
    """The container cannot be created, for now: reason and message of its waiting state."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where values come from: the pod, its address, Secrets and ConfigMaps by name."""

    pod: Json
    pod_ip: str
    secrets: Mapping[str, Json] = field(default_factory=dict)
    configs: Mapping[str, Json] = field(default_factory=dict)


def expand(text: str, known: Mapping[str, str]) -> str:
    """Put variables in place of ``$(NAME)``; ``$$`` is a dollar, an unknown name stays."""

    def replaced(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return known.get(match[1], match[0])

    return REFERENCE.sub(replaced, text)


def variables(container: Json, sources: Sources) -> dict[str, str]:
    """The container's own variables, in order, each seeing those before it.

    Raises:
        CannotCreate: A Secret or ConfigMap, or a key in one, is missing.
    """
    found: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        prefix = source.get("prefix") or ""
        for kind in ("secretRef", "configMapRef"):
            if kind in source:
                values = _values(kind.removesuffix("Ref"), source[kind], sources)
                found |= {prefix + key: value for key, value in values.items()}
    for one in container.get("env") or ():
        if "valueFrom" in one:
            value = _referred(one["valueFrom"], container, sources)
            if value is not None:
                found[one["name"]] = value
        else:
            found[one["name"]] = expand(one.get("value") or "", found)
    return found


def _values(kind: str, reference: Json, sources: Sources) -> dict[str, str]:
    objects = sources.secrets if kind == "secret" else sources.configs
    name = reference.get("name") or ""
    found = objects.get(name)
    if found is None:
        if reference.get("optional"):
            return {}
        shown = "secret" if kind == "secret" else "configmap"
        raise CannotCreate("CreateContainerConfigError", f'{shown} "{name}" not found')
    data: Json = found.get("data") or {}
    if kind == "secret":
        return {
            key: base64.b64decode(value).decode(errors="surrogateescape")
            for key, value in data.items()
        }
    return dict(data)


def _referred(source: Json, container: Json, sources: Sources) -> str | None:
    if field_ref := source.get("fieldRef"):
        return field_of(str(field_ref["fieldPath"]), sources)
    if resource := source.get("resourceFieldRef"):
        kind, _, name = str(resource["resource"]).partition(".")
        resources: Json = container.get("resources") or {}
        return str((resources.get(kind) or {}).get(name, ""))
    key_kind = "secretKeyRef" if "secretKeyRef" in source else "configMapKeyRef"
    reference: Json = source[key_kind]
    kind = "secret" if key_kind == "secretKeyRef" else "configMap"
    values = _values(kind, reference, sources)
    if reference["key"] not in values:
        if reference.get("optional"):
            return None
        where = f"{sources.pod['metadata']['namespace']}/{reference['name']}"
        shown = "Secret" if kind == "secret" else "ConfigMap"
        raise CannotCreate(
            "CreateContainerConfigError", f"couldn't find key {reference['key']} in {shown} {where}"
        )
    return values[reference["key"]]


def field_of(path: str, sources: Sources) -> str:
    """A field of the pod, by the downward API's name for it."""
    metadata, spec = sources.pod["metadata"], sources.pod["spec"]
    if match := SUBSCRIPT.fullmatch(path):
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    known = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.podIP": sources.pod_ip,
        "status.podIPs": sources.pod_ip,
        "status.hostIP": "127.0.0.1",
        "status.hostIPs": "127.0.0.1",
    }
    return str(known[path])


def command(container: Json, known: Mapping[str, str]) -> list[str]:
    """What to run. An image's own entry is not known here: a container must say.

    Raises:
        CannotCreate: It does not.
    """
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    if not words:
        raise CannotCreate("CreateContainerError", "no command specified")
    return [expand(word, known) for word in words]


def references(pod: Json) -> tuple[set[str], set[str]]:
    """The Secrets and ConfigMaps that the pod's containers and volumes name."""
    secrets: set[str] = set()
    configs: set[str] = set()
    spec = pod["spec"]
    for container in [*(spec.get("initContainers") or ()), *spec["containers"]]:
        for one in container.get("env") or ():
            source = one.get("valueFrom") or {}
            secrets |= {ref["name"] for ref in [source.get("secretKeyRef")] if ref}
            configs |= {ref["name"] for ref in [source.get("configMapKeyRef")] if ref}
        for source in container.get("envFrom") or ():
            secrets |= {ref["name"] for ref in [source.get("secretRef")] if ref}
            configs |= {ref["name"] for ref in [source.get("configMapRef")] if ref}
    for volume in spec.get("volumes") or ():
        if "secret" in volume:
            secrets.add(volume["secret"]["secretName"])
        for source in [volume, *(volume.get("projected") or {}).get("sources", ())]:
            if "configMap" in source:
                configs.add(source["configMap"]["name"])
    return secrets, configs
