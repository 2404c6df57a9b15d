"""Check whether this machine's credentials reach a cluster, without changing the machine."""

from __future__ import annotations

__all__ = ["ensure_credentials"]


def ensure_credentials(project: str, zone: str | None = None, cluster: str | None = None) -> None:
    """Check that the credentials of this machine give access to *cluster*.

    kinetic uses the same credentials as for a job: Google's application-default credentials, or
    those of the context in KINETIC_KUBE_CONTEXT. It runs no program, asks for no login, and writes
    no kubeconfig.

    Args:
        project: The GCP project.
        zone: The zone of the cluster. None: the configured zone.
        cluster: The GKE cluster. None: the configured cluster.

    Raises:
        ConfigurationError: There is no such cluster, or it can't be reached from here.
        AuthError: There are no credentials, or they are refused.
        Unavailable: The credentials server does not answer.
    """
    from kinetic import configuration
    from kinetic._sync.portal import PORTAL
    from kinetic.doctor.cluster import check_access

    target = configuration.resolve(backend="gke", project=project, zone=zone, cluster=cluster)
    PORTAL.call(check_access, target)
