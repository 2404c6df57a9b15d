"""A control plane with the controllers of sets, and a namespace for what is common."""

from tests.cluster.fixtures import control_plane, gcs_server, groups, kubelet, namespace, nodes

__all__ = ["control_plane", "gcs_server", "groups", "kubelet", "namespace", "nodes"]
