"""Jobs on a Kubernetes cluster, by kinetic and by others: what `benchmarks.kubernetes` compares."""
