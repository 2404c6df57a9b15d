"""Find a cluster's API server and the credentials: by a kubeconfig, in a pod, or on GKE.

kubernetes-asyncio merges the files and finds the context. kinetic reads keys, certificates, and
tokens itself. The library's `KubeConfigLoader` leaves private keys in files, looks for a user's
files beside the kubeconfig of the cluster, sends a token with its line break, and can't read a
comment that isn't UTF-8. `test_access_context.py` has a test of each.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import ipaddress
import math
import os
import ssl
import tempfile
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from kinetic._messages import one_line, suggest
from kinetic.aio._net.google import GoogleClient, GoogleRequest, refusal_error
from kinetic.aio._net.http import HttpError, proxy_for
from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio._net.tokens import (
    FreshCredentials,
    Revoked,
    TokenCache,
    TokenSource,
    schedule_renewals,
)
from kinetic.aio.kubernetes.diagnosis.documents import get_dict, get_list
from kinetic.aio.kubernetes.exec_plugin import Plugin
from kinetic.configuration import Target
from kinetic.errors import ConfigurationError, KineticError, Unavailable

if TYPE_CHECKING:
    from kubernetes_asyncio.config.kube_config import ConfigNode


@lru_cache(4)
def tls_context(
    ca: bytes | None,
    *,
    verify: bool = True,
    certificate: bytes | None = None,
    key: bytes | None = None,
) -> ssl.SSLContext:
    """Return a TLS context that trusts the certificates *ca* (PEM); if None, those of the system.

    *certificate* and *key* are the client's, as PEM. Comments in PEM may have any encoding. Equal
    arguments give the same context, so that aiohttp can reuse connections. Loading the system's
    certificates takes 30 ms of CPU.

    Raises:
        ValueError: The bytes aren't certificates, or the key belongs to another certificate.
    """
    # Python reads a client's certificate, and comments that aren't ASCII, from files only. These
    # files exist briefly, private to the user.
    with tempfile.TemporaryDirectory(prefix="kinetic-") as folder:
        ca_file, chain_file, key_file = (Path(folder, name) for name in ("ca", "chain", "key"))
        ca_file.write_bytes(ca or b"")
        try:
            context = ssl.create_default_context(cafile=None if ca is None else str(ca_file))
        except ssl.SSLError as exc:
            message = f"certificate-authority is not a certificate in PEM ({exc})"
            raise ValueError(message) from exc
        if certificate is not None:
            chain_file.write_bytes(certificate)
            key_file.write_bytes(key or b"")
            try:
                context.load_cert_chain(chain_file, key_file, password=_no_password)
            except ssl.SSLError as exc:
                message = f"client-certificate and client-key cannot be used ({exc})"
                raise ValueError(message) from exc
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if ca is not None:
        # Python 3.13 and later require extensions that the CAs of many clusters lack.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _no_password() -> str:
    """Keep OpenSSL from asking for a key's password on the terminal."""
    raise ValueError("client-key has a password; use a key without one")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterCredentials:
    """The credentials of one request: a header, and the certificates of its connection.

    Credentials of two renewals are never equal, even with the same content: a
    refusal of the older credentials says nothing about the newer. ``tls`` is None for a
    server without TLS.
    """

    authorization: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How one client reaches one cluster.

    ``server`` is the API server's URL, without a slash at the end; a URL may have a path.
    ``name`` describes the cluster in messages. ``tls_name`` is the name in the server's
    certificate, if it differs from the URL's. Each request carries ``headers``. ``pools`` has the
    machine type and TPU topology of each node pool that Google's API named when the access was
    opened; a machine that is a slice by itself has the topology "". ``group_kill_pools`` names
    those where the kernel kills a whole container that runs out of memory. ``gke`` says whether
    this is GKE, which may have ComputeClasses.
    """

    server: str
    name: str
    credentials: TokenSource[ClusterCredentials]
    tls_name: str | None = None
    proxy: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    pools: tuple[tuple[str, str], ...] = ()
    group_kill_pools: tuple[str, ...] = ()
    gke: bool = False


GKE_PLUGIN = "gke-gcloud-auth-plugin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One context of a kubeconfig, with the sections and the files of its cluster and user."""

    server: str
    cluster: ConfigNode
    user: ConfigNode


def read_context(name: str, environ: Mapping[str, str]) -> Context:
    """Read the context *name* from the files in KUBECONFIG, else ``~/.kube/config``. Blocks.

    Raises:
        ConfigurationError: No such context exists, or a file isn't a kubeconfig.
    """
    # Importing this library takes 0.3 s, so only functions that read a kubeconfig do.
    from kubernetes_asyncio.config import ConfigException
    from kubernetes_asyncio.config.kube_config import ENV_KUBECONFIG_PATH_SEPARATOR as SEPARATOR
    from kubernetes_asyncio.config.kube_config import ConfigNode, KubeConfigMerger

    usual = Path(environ.get("HOME") or "~", ".kube", "config")
    kubeconfig = environ.get("KUBECONFIG") or str(usual)
    paths = [Path(entry).expanduser().absolute() for entry in kubeconfig.split(SEPARATOR) if entry]
    files = [str(path) for path in paths if path.is_file() and _has_content(path)]
    if not files:
        raise ConfigurationError(
            f"KINETIC_KUBE_CONTEXT names the context {name!r}, and there is no kubeconfig at "
            f"{kubeconfig}; set KUBECONFIG to the kubeconfig, or name a GKE cluster, which needs "
            "no kubeconfig, by KINETIC_PROJECT and KINETIC_CLUSTER"
        )
    try:
        merged: Any = KubeConfigMerger(SEPARATOR.join(files)).config
        names = [str(entry.value["name"]) for entry in merged["contexts"].value]
        if name not in names:
            hint = suggest(name, names, otherwise=f"there are {', '.join(names) or 'none'}")
            raise ConfigException(f"it has no context {name!r}; {hint}")
        context = merged["contexts"].get_with_name(name)["context"]
        cluster = merged["clusters"].get_with_name(context["cluster"])["cluster"]
        user = ConfigNode("no user", {}, cluster.path)
        if context.safe_get("user"):
            entry = merged["users"].get_with_name(context["user"])
            user = ConfigNode(entry.name, {**(entry.safe_get("user") or {})}, entry.path)
        server = str(cluster.safe_get("server") or "").rstrip("/")
        if not server.startswith(("https://", "http://")):
            raise ConfigException(f"the cluster {context['cluster']!r} has no usable server")
    except Exception as exc:  # the library raises many types for malformed sections
        raise ConfigurationError(
            f"the context {name!r} of {kubeconfig} cannot be used ({_describe_failure(exc)}); fix "
            "the kubeconfig, or set KINETIC_KUBE_CONTEXT"
        ) from exc
    return Context(server=server, cluster=cluster, user=user)


def _has_content(path: Path) -> bool:
    """Return whether a kubeconfig has more than comments, which the library can't read."""
    import yaml

    try:
        with path.open("rb") as file:  # of a text, an error would quote a line, which may be secret
            document: Any = yaml.safe_load(file)
        return document is not None and bool(document.keys())
    except Exception as exc:
        raise ConfigurationError(
            f"{path} isn't a valid kubeconfig ({_describe_failure(exc)}); fix it"
        ) from exc


def _describe_failure(exc: Exception) -> str:
    return f"{type(exc).__name__}: {one_line(str(exc))}"


def _read_file(section: ConfigNode, name: str) -> bytes | None:
    """Return the content of the field *name*, base64 or the path of a file; None without both."""
    if encoded := section.safe_get(f"{name}-data"):
        try:
            return base64.b64decode(encoded)
        except ValueError as exc:
            raise ValueError(f"{name}-data is not base64 of PEM ({exc})") from exc
    try:
        path = section.safe_get(name)
        return (Path(str(section.path)).parent / path).read_bytes() if path else None
    except OSError as exc:
        raise ValueError(f"{name} cannot be read: {exc}") from exc


def _read_credentials(context: Context) -> ClusterCredentials:
    """Return the credentials for the server from the cluster's and the user's section. Blocks."""
    cluster, user = context.cluster, context.user
    try:
        file = _read_file(user, "tokenFile")
        token = (file or b"").decode(errors="replace").strip() or user.safe_get("token") or ""
        if not (token := str(token).strip()).isprintable() or not token.isascii():
            name = "tokenFile" if file else "token"
            raise ValueError(f"{name} has a line break, or a character that no token has")
        header = f"Bearer {token}" if token else ""
        if not context.server.startswith("https:"):
            return ClusterCredentials(authorization=header)
        tls = tls_context(
            _read_file(cluster, "certificate-authority"),
            verify=not cluster.safe_get("insecure-skip-tls-verify"),
            certificate=_read_file(user, "client-certificate"),
            key=_read_file(user, "client-key"),
        )
    except (OSError, ValueError, TypeError) as exc:
        files = " or ".join(sorted({str(cluster.path), str(user.path)}))
        raise ConfigurationError(f"cannot log in to {context.server}: {exc}; fix {files}") from exc
    return ClusterCredentials(authorization=header, tls=tls)


REREAD_S = 60.0
"""After this many seconds, kinetic reads a token's file again, because another program renews the
token. The kubelet renews a service account's token when a fifth of the token's lifetime is left."""


async def open_context(name: str, environ: Mapping[str, str]) -> Access:
    """Return access by the context *name* of the files in KUBECONFIG, else ``~/.kube/config``.

    When the credentials expire or a server refuses them, kinetic reads the files again.

    Raises:
        ConfigurationError: No such context exists, or the context isn't valid.
        AuthError: The context gives no credentials.
    """
    first = await anyio.to_thread.run_sync(read_context, name, environ)
    proxy, user = str(first.cluster.safe_get("proxy-url") or ""), first.user.value
    if proxy and not proxy.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"the proxy-url of the context {name!r} is {proxy}; kinetic can use http and https "
            "proxies only"
        )
    headers = [("Impersonate-User", user.get("as")), ("Impersonate-Uid", user.get("as-uid"))]
    headers += [("Impersonate-Group", group) for group in user.get("as-groups") or ()]
    for key, values in get_dict(user, "as-user-extra").items():
        headers += [(f"Impersonate-Extra-{key}", value) for value in values]

    async def renew() -> FreshCredentials[ClusterCredentials]:
        requested_at = time.time()
        context = await anyio.to_thread.run_sync(read_context, name, environ)
        if context.server != first.server:
            raise Revoked(
                f"the context {name!r} names the server {context.server} now, and this client was "
                f"opened for {first.server}; open another client"
            )
        return await _log_in(context, requested_at)

    token_cache = TokenCache(renew, f"the context {name!r}")
    await token_cache.open()
    command = str(get_dict(user, "exec").get("command") or "")
    return Access(
        server=first.server,
        name=f"the context {name!r}",
        credentials=token_cache,
        tls_name=first.cluster.safe_get("tls-server-name"),
        proxy=proxy or proxy_for(first.server),
        headers=tuple((key, str(value)) for key, value in headers if value),
        gke=Path(command).name == GKE_PLUGIN,
    )


async def _log_in(context: Context, requested_at: float) -> FreshCredentials[ClusterCredentials]:
    """Return the credentials of *context*; run its credential plugin, if it has one."""
    user, expiry = context.user.value, None
    if "auth-provider" in user:
        raise ConfigurationError(
            f"{context.user.path} logs in with an auth-provider, which Kubernetes removed in 1.26; "
            "use a credential plugin (exec) instead. On GKE, `gcloud container clusters "
            "get-credentials` writes a context with gke-gcloud-auth-plugin"
        )
    if section := get_dict(user, "exec"):
        cluster = await anyio.to_thread.run_sync(_cluster_info, context.cluster)
        status = await Plugin(section=section, file=str(context.user.path), cluster=cluster).run()
        expiry = status.get("expirationTimestamp")
        user |= {"token": status.get("token"), "tokenFile": None}
        if certificate := status.get("clientCertificateData"):
            user["client-certificate-data"] = base64.b64encode(certificate.encode())
            user["client-key-data"] = base64.b64encode(status["clientKeyData"].encode())
    credentials = await anyio.to_thread.run_sync(_read_credentials, context)
    if expiry is not None:
        return schedule_renewals(credentials, requested_at, expiry.timestamp())
    renew_from = requested_at + REREAD_S if user.get("tokenFile") else math.inf
    return FreshCredentials(value=credentials, renew_from=renew_from)


def _cluster_info(cluster: ConfigNode) -> dict[str, Any]:
    """Return what a plugin with ``provideClusterInfo`` learns about the cluster."""
    known = ("server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url")
    info: dict[str, Any] = {name: cluster.value[name] for name in known if name in cluster}
    with contextlib.suppress(ValueError):  # `_read_credentials` reports the error
        if ca := _read_file(cluster, "certificate-authority"):
            info["certificate-authority-data"] = base64.b64encode(ca).decode()
    for extension in cluster.value.get("extensions") or ():
        if extension.get("name") == "client.authentication.k8s.io/exec":
            info["config"] = extension.get("extension")
    return info


IN_CLUSTER = "in-cluster"
"""The value of KINETIC_KUBE_CONTEXT for the cluster in which this pod runs."""

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts the service account; KINETIC_POD_ACCOUNT_FOLDER names another folder."""


async def open_pod(environ: Mapping[str, str]) -> Access:
    """Return access to the cluster of this pod, by the service account that Kubernetes mounted.

    Raises:
        ConfigurationError: This process runs in no pod, or the pod has no service account.
    """
    folder = Path(environ.get("KINETIC_POD_ACCOUNT_FOLDER") or ACCOUNT)

    async def renew() -> FreshCredentials[ClusterCredentials]:
        reread_at = time.time() + REREAD_S
        _, credentials = await anyio.to_thread.run_sync(_read_account, folder, environ)
        return FreshCredentials(value=credentials, renew_from=reread_at)

    server, _ = await anyio.to_thread.run_sync(_read_account, folder, environ)
    token_cache = TokenCache(renew, "the cluster of this pod")
    await token_cache.open()
    return Access(server=server, name="the cluster of this pod", credentials=token_cache)


def _read_account(folder: Path, environ: Mapping[str, str]) -> tuple[str, ClusterCredentials]:
    """Read the server and the credentials of the service account. Blocks."""
    from kubernetes_asyncio.client import Configuration
    from kubernetes_asyncio.config import ConfigException
    from kubernetes_asyncio.config.incluster_config import InClusterConfigLoader

    configuration: Any = Configuration()
    loader = InClusterConfigLoader(
        token_filename=str(folder / "token"),
        cert_filename=str(folder / "ca.crt"),
        try_refresh_token=False,
        environ=dict(environ),
    )
    try:
        loader.load_and_set(configuration)
        tls = tls_context((folder / "ca.crt").read_bytes())
    except (ConfigException, OSError, ValueError) as exc:
        raise ConfigurationError(
            f"KINETIC_KUBE_CONTEXT={IN_CLUSTER} means the service account of the pod in which this "
            f"process runs, but kinetic can't read it in {folder}: {exc}; run the process in a pod "
            "that mounts the token, or name a context of a kubeconfig"
        ) from exc
    header = str(configuration.api_key["BearerToken"]).strip()
    return str(configuration.host), ClusterCredentials(authorization=header, tls=tls)


class _GoogleCredentials:
    """Credentials for a GKE cluster: the access tokens of the client *google*."""

    def __init__(self, google: GoogleClient, tls: ssl.SSLContext) -> None:
        self._google = google
        self._latest = ClusterCredentials()
        self._tls = tls
        self.aclose = google.aclose

    async def get(self) -> ClusterCredentials:
        header = f"Bearer {await self._google.credentials.get()}"
        if self._latest.authorization != header:
            self._latest = ClusterCredentials(authorization=header, tls=self._tls)
        return self._latest

    def forget(self, value: ClusterCredentials) -> None:
        self._google.credentials.forget(value.authorization.removeprefix("Bearer "))


async def open_gke(
    target: Target, environ: Mapping[str, str], policy: RetryPolicy | None = None
) -> Access:
    """Return access to the GKE cluster that *target* names by project, zone, and name.

    Raises:
        ConfigurationError: No such cluster exists, or this machine can't reach it.
        AuthError: There are no credentials, or they can't read the cluster.
        Unavailable: Google's API doesn't answer, or the cluster isn't up yet.
    """
    for module in ("aiohttp", "gcloud.aio.auth"):  # takes 0.2 s, so use a thread
        await anyio.to_thread.run_sync(importlib.import_module, module)
    google = GoogleClient(environ, policy or RetryPolicy())
    try:
        description = await _fetch_cluster(google, target)
        server, ca = _server_of(description, target)
        tls = await anyio.to_thread.run_sync(tls_context, ca)
    except BaseException:
        await google.aclose()
        raise
    return Access(
        server=server,
        name=_describe(target),
        credentials=_GoogleCredentials(google, tls),
        proxy=proxy_for(server),
        pools=_pools(description),
        group_kill_pools=_group_kill_pools(description),
        gke=True,
    )


def _pools(description: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return machine type and TPU topology of each node pool, also of pools without a node."""
    return tuple(
        (
            get_dict(entry, "config").get("machineType") or "",
            get_dict(entry, "placementPolicy").get("tpuTopology") or "",
        )
        for entry in get_list(description, "nodePools")
    )


def _group_kill_pools(description: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the node pools where the kernel kills whole containers; see `Access`."""
    if get_dict(description, "autopilot").get("enabled"):
        return ()
    return tuple(
        str(entry.get("name"))
        for entry in get_list(description, "nodePools")
        if not get_dict(get_dict(entry, "config"), "kubeletConfig").get("singleProcessOomKill")
    )


def _describe(target: Target) -> str:
    return f"the GKE cluster {target.cluster!r} (project {target.project}, {target.zone})"


async def _fetch_cluster(google: GoogleClient, target: Target) -> dict[str, Any]:
    """Return what Google's API says about the cluster."""
    names = (target.project, target.zone, target.cluster)
    project, zone, cluster = (urllib.parse.quote(name or "", safe="") for name in names)
    root = f"/v1/projects/{project}/locations"
    try:
        return await google.call(GoogleRequest("container", f"{root}/{zone}/clusters/{cluster}"))
    except HttpError as refusal:
        if refusal.status != 404:
            raise refusal_error(
                refusal,
                f"cannot look up {_describe(target)}",
                "Google's container API",
                api="container",
                how_to_grant="grant a role with it by `gcloud projects add-iam-policy-binding "
                f"{target.project} --member=user:YOU --role=roles/container.developer`",
            ) from None
    # Name the clusters that exist: most often the zone or a letter of the name is wrong.
    try:
        answer = await google.call(GoogleRequest("container", f"{root}/-/clusters"))
        clusters = [f"{found['name']} in {found['location']}" for found in answer["clusters"]]
        hint = f"the project has {', '.join(sorted(clusters)[:10]) or 'none'}"
    except (HttpError, KineticError, KeyError, TypeError):
        hint = "`gcloud container clusters list` lists the clusters that exist"
    raise ConfigurationError(
        f"there is no GKE cluster {target.cluster!r} in {target.zone} of the project "
        f"{target.project}: {hint}; set KINETIC_CLUSTER and KINETIC_ZONE"
    )


def _server_of(description: Mapping[str, Any], target: Target) -> tuple[str, bytes | None]:
    """Return the server and its CA, which is None for a publicly trusted certificate.

    The server is the public address, else the DNS endpoint, else the private address.
    """
    status = description.get("status")
    if status in ("PROVISIONING", "STOPPING", "ERROR"):
        reason = one_line(str(description.get("statusMessage") or ""), 300)
        starts = status == "PROVISIONING"
        advice = "create it again with `kinetic up`, or set KINETIC_CLUSTER to another cluster"
        advice = "wait until it is RUNNING" if starts else advice
        raise Unavailable(
            f"{_describe(target)} is {status}: {reason or 'no reason given'}; {advice}",
            retryable=starts,
        )
    control = get_dict(description, "controlPlaneEndpointsConfig")
    dns, ip = get_dict(control, "dnsEndpointConfig"), get_dict(control, "ipEndpointsConfig")
    endpoint = str(description.get("endpoint") or "") if ip.get("enabled", True) else ""
    dns_name = str(dns.get("endpoint") or "") if dns.get("allowExternalTraffic") else ""
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None = None
    with contextlib.suppress(ValueError):  # it may be a host name
        address = ipaddress.ip_address(endpoint)
    # A machine outside the cluster's network reaches the DNS endpoint, but no private address.
    private = address is not None and address.is_private
    if dns_name and (not endpoint or endpoint == dns_name or private):
        return f"https://{dns_name}", None
    if not endpoint:
        raise ConfigurationError(
            f"{_describe(target)} has no endpoint that can be reached from outside; enable its DNS "
            "endpoint, or use a kubeconfig: KINETIC_KUBE_CONTEXT"
        )
    encoded = get_dict(description, "masterAuth").get("clusterCaCertificate")
    if not encoded:
        raise ConfigurationError(
            f"Google's API does not show the CA of {_describe(target)}: grant the credentials "
            "roles/container.developer"
        )
    host = f"[{endpoint}]" if address is not None and address.version == 6 else endpoint
    return f"https://{host}", base64.b64decode(encoded)


async def open_access(
    target: Target, environ: Mapping[str, str] = os.environ, policy: RetryPolicy | None = None
) -> Access:
    """Return access to the cluster of *target*; later changes of the kubeconfig don't redirect it.

    KINETIC_KUBE_CONTEXT names a context of the kubeconfig, or is ``in-cluster`` for
    the service account of this pod. Without this setting, *target* names a GKE cluster by
    project, zone, and name; *policy* says how to retry Google's API. Access to GKE needs
    neither gcloud nor kubectl, and writes no files.

    Close the `Api` that uses the access, or call ``access.credentials.aclose()``.

    Raises:
        ConfigurationError: No such context or cluster exists.
        AuthError: There are no credentials, or the server refuses them.
        Unavailable: Google's API doesn't answer, or the GKE cluster isn't up yet.
    """
    if target.kube_context == IN_CLUSTER:
        return await open_pod(environ)
    if target.kube_context:
        return await open_context(target.kube_context, environ)
    return await open_gke(target, environ, policy)
