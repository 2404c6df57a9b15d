"""Run a job in a Kubernetes pod, or in one pod on each host. It may import all but `fork`."""
