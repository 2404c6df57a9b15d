"""The cluster of the tests, a client that is configured for it, and its bucket."""

from __future__ import annotations

from tests.cluster.fixtures import (
    IMAGE,
    bucket,
    client,
    configured,
    control_plane,
    gcs_server,
    groups,
    kubelet,
    namespace,
    nodes,
    until,
)

__all__ = [
    "IMAGE",
    "bucket",
    "client",
    "configured",
    "control_plane",
    "gcs_server",
    "groups",
    "kubelet",
    "namespace",
    "nodes",
    "until",
]
