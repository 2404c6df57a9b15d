"""Buckets mounted into a pod by GKE's driver, for `Data` that asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kinetic.errors import ConfigurationError

__all__ = ["ARGUMENTS", "DRIVER", "FuseVolumes", "fuse_volumes"]

DRIVER = "gcsfuse.csi.storage.gke.io"
ARGUMENTS = "/_kinetic/fuse-data"
"""Below it, by number, is what an argument rather than a volume refers to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseVolumes:
    """Volumes of a pod, and where its container has them."""

    volumes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    mounts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def fuse_volumes(data: Iterable[Mapping[str, Any]], store: str = "") -> FuseVolumes:
    """The volumes for those of *data* (`wire.DataRef` as dicts) that are to be mounted.

    Of a single object its folder is mounted; of what was uploaded, the files in
    *store*, the store's URL. They are numbered in order, over all of *data*
    that are mounted; the runner counts the same way.

    Raises:
        ConfigurationError: One is not in a bucket.
    """
    found = FuseVolumes()
    for number, ref in enumerate(one for one in data if one.get("fuse")):
        bucket, prefix = _where(ref, store)
        options = "implicit-dirs"
        if prefix:
            escaped = prefix.replace("\\", "\\\\").replace(",", "\\,")
            options += f",only-dir={escaped}"
        name = f"gcs-fuse-{number}"
        attributes = {"bucketName": bucket, "mountOptions": options}
        csi = {"driver": DRIVER, "readOnly": True, "volumeAttributes": attributes}
        found.volumes.append({"name": name, "csi": csi})
        path = ref.get("mount") or f"{ARGUMENTS}/{number}"
        found.mounts.append({"name": name, "mountPath": path, "readOnly": True})
    return found


def _where(ref: Mapping[str, Any], store: str) -> tuple[str, str]:
    """Bucket and folder."""
    uri = str(ref["uri"])
    if "://" in uri:
        return _place(uri, is_dir=bool(ref.get("is_dir", True)))
    uploaded = uri.rpartition("/")[0]  # beside its manifest
    return _place(f"{store.rstrip('/')}/{uploaded}/files", is_dir=True)


def _place(uri: str, *, is_dir: bool) -> tuple[str, str]:
    scheme, _, rest = uri.partition("://")
    bucket, _, path = rest.partition("/")
    if scheme != "gs" or not bucket:
        raise ConfigurationError(
            f"only what is in a bucket can be mounted, and {uri!r} is not; leave out fuse=True, "
            "or upload it and use its gs:// address"
        )
    folder = path if is_dir else path.rpartition("/")[0]
    return bucket, folder.strip("/")
