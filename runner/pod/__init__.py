"""A job in a pod of Kubernetes: on one host, or on several. May import all but `fork`."""
