"""Run a job in a Kubernetes pod, or in one pod on each host. May import all but `fork`."""
