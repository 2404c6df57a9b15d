"""Run kinetic on a Kubernetes cluster: a real control plane, pods as processes, a GCS server."""
