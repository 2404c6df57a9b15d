"""The fixtures of the cluster, for its own tests."""

from tests.cluster.fixtures import (
    bucket,
    control_plane,
    gcs_server,
    groups,
    kubelet,
    namespace,
    nodes,
    pytest_collection_finish,
)

__all__ = [
    "bucket",
    "control_plane",
    "gcs_server",
    "groups",
    "kubelet",
    "namespace",
    "nodes",
    "pytest_collection_finish",
]
