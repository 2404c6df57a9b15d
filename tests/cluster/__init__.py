"""A real Kubernetes control plane on this machine, and nodes whose pods are plain processes."""
