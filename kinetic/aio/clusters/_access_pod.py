"""Access of a pod to its own cluster, by its service account."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread

from kinetic.aio.clusters._access import Access, Pass
from kinetic.aio.clusters._access_renewal import Fresh, Renewal
from kinetic.aio.clusters._access_tls import Certificates, Contexts
from kinetic.errors import ConfigurationError

__all__ = ["IN_CLUSTER", "open_pod"]

IN_CLUSTER = "in-cluster"
"""What KINETIC_KUBE_CONTEXT says to mean this, instead of a context of a kubeconfig."""

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts it; without a container, KINETIC_POD_ACCOUNT_FOLDER says where it is."""

REREAD_S = 60.0
"""The kubelet renews the token's file when a fifth of its life is left: an hour's, mostly."""


async def open_pod(environ: Mapping[str, str]) -> Access:
    """Access by the service account that Kubernetes mounted.

    Raises:
        ConfigurationError: This is no pod, or it has no service account.
    """
    account = Path(environ.get("KINETIC_POD_ACCOUNT_FOLDER") or ACCOUNT)
    server = await anyio.to_thread.run_sync(_server, environ, account)
    contexts = Contexts()

    def read() -> Pass:
        _, token, ca = _loaded(environ, account)
        return Pass(authorization=token, tls=contexts.context(Certificates(ca=ca)))

    async def renew() -> Fresh:
        early = time.time() + REREAD_S
        return Fresh(shown=await anyio.to_thread.run_sync(read), early=early)

    name = "the cluster of this pod"
    passes = Renewal(renew, name)
    await passes.first()
    return Access(
        server=server,
        name=name,
        passes=passes,
        namespace=await anyio.to_thread.run_sync(_namespace, account),
    )


def _server(environ: Mapping[str, str], account: Path) -> str:
    return _loaded(environ, account)[0]


def _loaded(environ: Mapping[str, str], account: Path) -> tuple[str, str, str]:
    """The server, the header and the CA."""
    from kubernetes_asyncio.client import Configuration
    from kubernetes_asyncio.config import ConfigException
    from kubernetes_asyncio.config.incluster_config import InClusterConfigLoader

    configuration: Any = Configuration()
    loader = InClusterConfigLoader(
        token_filename=str(account / "token"),
        cert_filename=str(account / "ca.crt"),
        try_refresh_token=False,
        environ=dict(environ),
    )
    try:
        loader.load_and_set(configuration)
        ca = (account / "ca.crt").read_text()
    except (ConfigException, OSError) as exc:
        raise ConfigurationError(
            f"KINETIC_KUBE_CONTEXT={IN_CLUSTER} means the service account of the pod this runs "
            f"in, and there is none: {exc}; run it in a pod that mounts its token, or name a "
            "context of a kubeconfig"
        ) from exc
    return str(configuration.host), str(configuration.api_key["BearerToken"]).strip(), ca


def _namespace(account: Path) -> str:
    try:
        return (account / "namespace").read_text().strip() or "default"
    except OSError:
        return "default"
