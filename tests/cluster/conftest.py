"""The fixtures of the cluster, for its own tests."""

from tests.cluster.fixtures import (
    bucket,
    control_plane,
    gcs_server,
    groups,
    kubelet,
    namespace,
    nodes,
)

__all__ = [
    "bucket",
    "control_plane",
    "gcs_server",
    "groups",
    "kubelet",
    "namespace",
    "nodes",
]
