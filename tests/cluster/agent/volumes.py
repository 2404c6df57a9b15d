"""A pod's volumes as folders: Secrets, projections, folders of the node, empty ones."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Secrets and ConfigMaps by name, and a token of the pod's account, if one is wanted."""

    secrets: Json
    configs: Json
    token: str = ""


def wants_token(pod: Json) -> bool:
    """Whether a volume of the pod's has a token of its service account."""
    return any("serviceAccountToken" in source for _, source in projections(pod))


def projections(pod: Json) -> list[tuple[str, Json]]:
    """The sources of projected volumes, each with its volume's name."""
    return [
        (volume["name"], source)
        for volume in pod["spec"].get("volumes") or ()
        for source in (volume.get("projected") or {}).get("sources") or ()
    ]


class CannotMount(Exception):
    """A volume is not there, for now; the message of the event about it."""


def materialise(pod: Json, folder: Path, have: Contents) -> dict[str, Path]:
    """Make every volume in *folder*; the folders by the volumes' names.

    Raises:
        CannotMount: A Secret, a ConfigMap, a folder or a driver is missing.
    """
    made: dict[str, Path] = {}
    for volume in pod["spec"].get("volumes") or ():
        name = volume["name"]
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        made[name] = target
        if "secret" in volume:
            source = volume["secret"]
            data = _found("secret", source["secretName"], have.secrets, name)
            decoded = {key: base64.b64decode(value) for key, value in data.items()}
            _write(target, decoded, source)
        elif "hostPath" in volume:
            path = Path(volume["hostPath"]["path"])
            if not path.is_dir():
                raise CannotMount(
                    f'MountVolume.SetUp failed for volume "{name}" : hostPath type check failed: '
                    f"{path} is not a directory"
                )
            made[name] = path
        elif "csi" in volume:
            driver = volume["csi"]["driver"]
            raise CannotMount(
                f'MountVolume.SetUp failed for volume "{name}" : kubernetes.io/csi: '
                f"mounter.SetUpAt failed to get CSI client: driver name {driver} not found in the "
                "list of registered CSI drivers"
            )
    for name, source in projections(pod):
        if token := source.get("serviceAccountToken"):
            (made[name] / token["path"]).write_text(have.token)
        elif part := source.get("configMap"):
            data = _found("configmap", part["name"], have.configs, name)
            _write(made[name], {key: value.encode() for key, value in data.items()}, part)
        elif part := source.get("downwardAPI"):
            for item in part["items"]:
                if item["fieldRef"]["fieldPath"] == "metadata.namespace":
                    (made[name] / item["path"]).write_text(pod["metadata"]["namespace"])
    return made


def _found(kind: str, wanted: str, objects: Json, volume: str) -> dict[str, Any]:
    if wanted in objects:
        return objects[wanted].get("data") or {}
    raise CannotMount(
        f'MountVolume.SetUp failed for volume "{volume}" : {kind} "{wanted}" not found'
    )


def _write(target: Path, data: Mapping[str, bytes], source: Json) -> None:
    items = source.get("items")
    for item in items if items is not None else [{"key": key, "path": key} for key in data]:
        path = target / item["path"]
        path.write_bytes(data[item["key"]])
        path.chmod(item.get("mode", source.get("defaultMode", 0o644)))


def located(path: str, container: Json, volumes: Mapping[str, Path]) -> Path | None:
    """Where a path of the container's is on this machine; None when it is in no volume."""
    for mount in container.get("volumeMounts") or ():
        inside = Path(path)
        if inside.is_relative_to(mount["mountPath"]) and mount["name"] in volumes:
            below = inside.relative_to(mount["mountPath"])
            return volumes[mount["name"]] / mount.get("subPath", "") / below
    return None
