"""Run a job in a Kubernetes pod, or in one pod on each host.

The package may import all of the runner but `fork`.
"""
