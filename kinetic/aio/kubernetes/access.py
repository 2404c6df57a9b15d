"""Find a cluster's API server and the credentials: by a kubeconfig, in a pod, or on GKE."""

from __future__ import annotations

import base64
import contextlib
import importlib
import ipaddress
import math
import os
import ssl
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio.to_thread

from kinetic._messages import one_line, suggest
from kinetic.aio._net.google import GoogleClient, GoogleRequest, refusal_error
from kinetic.aio._net.http import HttpError, proxy_for
from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio._net.tokens import FreshCredentials, Revoked, TokenCache, schedule_renewals
from kinetic.aio.kubernetes.credentials import Access, ClusterCredentials, tls_context
from kinetic.aio.kubernetes.diagnosis.documents import get_dict, get_list
from kinetic.aio.kubernetes.exec_plugin import Plugin, Reply
from kinetic.configuration import Target
from kinetic.errors import ConfigurationError, KineticError, Unavailable

if TYPE_CHECKING:
    from kubernetes_asyncio.config.kube_config import ConfigNode

GKE_PLUGIN = "gke-gcloud-auth-plugin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A kubeconfig's section about one cluster or user; its paths are relative to ``folder``."""

    values: Mapping[str, Any] = field(repr=False)
    folder: Path

    def text(self, name: str) -> str:
        """Return the text under *name*, or ""."""
        return str(self.values.get(name) or "")

    def pem(self, name: str) -> str | None:
        """Return the PEM of certificates or of a key; None if the section has none.

        The section contains the PEM inline, in base64, or names a file that contains it.

        Raises:
            ValueError: The base64 is broken, or the file can't be read.
        """
        if encoded := self.text(f"{name}-data"):
            try:
                return base64.b64decode(encoded).decode()
            except ValueError as exc:
                raise ValueError(f"its {name}-data is not base64 of PEM") from exc
        if not (path := self.text(name)):
            return None
        try:
            return (self.folder / path).read_text()
        except OSError as exc:
            raise ValueError(f"its {name} cannot be read: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One context of a kubeconfig; ``server`` is a URL without a slash at its end."""

    name: str
    namespace: str
    server: str
    cluster: Section
    user: Section


def read_context(name: str, environ: Mapping[str, str]) -> Context:
    """Read the context *name* from the files in KUBECONFIG, else ``~/.kube/config``. Blocks.

    Raises:
        ConfigurationError: No such context exists, or a file isn't a kubeconfig.
    """
    # This library merges the files. Importing it takes 0.3 s, so only this function does.
    from kubernetes_asyncio.config.kube_config import ENV_KUBECONFIG_PATH_SEPARATOR as SEPARATOR
    from kubernetes_asyncio.config.kube_config import KubeConfigMerger

    kubeconfig = environ.get("KUBECONFIG") or str(
        Path(environ.get("HOME") or "~") / ".kube" / "config"
    )
    paths = [Path(entry).expanduser() for entry in kubeconfig.split(SEPARATOR) if entry]
    existing = [str(path) for path in paths if path.is_file() and path.stat().st_size]
    if not existing:
        raise ConfigurationError(
            f"KINETIC_KUBE_CONTEXT names the context {name!r}, and there is no kubeconfig at "
            f"{kubeconfig}; set KUBECONFIG to the kubeconfig, or name a GKE cluster, which needs "
            "no kubeconfig, by KINETIC_PROJECT and KINETIC_CLUSTER"
        )
    try:
        merged = cast("ConfigNode", KubeConfigMerger(SEPARATOR.join(existing)).config)
        return _parse_context(merged, name)
    except ConfigurationError:
        raise
    except Exception as exc:  # YAML and the library raise many types for malformed files
        problem = f"{type(exc).__name__}: {one_line(str(exc))}"
        raise ConfigurationError(
            f"{kubeconfig} isn't a valid kubeconfig ({problem}); fix it"
        ) from exc


def _parse_context(merged: ConfigNode, name: str) -> Context:
    """Return the context *name* from *merged*, the merged content of all kubeconfig files."""

    def entry(kind: str, wanted: object, referrer: str) -> ConfigNode:
        known: dict[object, ConfigNode] = {node.value["name"]: node for node in merged.value[kind]}
        if wanted not in known:
            names = sorted(str(key) for key in known)
            hint = suggest(str(wanted), names, otherwise=f"there are {', '.join(names) or 'none'}")
            raise ConfigurationError(
                f"{referrer} names {wanted!r}, which is none of the {kind} in the kubeconfig; "
                f"{hint}"
            )
        return known[wanted]

    def section(kind: str, key: str) -> Section:
        node = entry(kind, context[key], f"the context {name!r}")
        folder = Path(node.path or ".").absolute().parent
        return Section(values=node.value[key] or {}, folder=folder)

    context: Mapping[str, Any] = entry("contexts", name, "KINETIC_KUBE_CONTEXT").value["context"]
    cluster = section("clusters", "cluster")
    no_user = Section(values={}, folder=cluster.folder)
    server = cluster.text("server").rstrip("/")
    if not server.startswith(("https://", "http://")):
        raise ConfigurationError(
            f"the cluster of the context {name!r} has no usable server: {server!r}; set its URL"
        )
    return Context(
        name=name,
        namespace=context.get("namespace") or "default",
        server=server,
        cluster=cluster,
        user=section("users", "user") if context.get("user") else no_user,
    )


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

    async def renew() -> FreshCredentials[ClusterCredentials]:
        return await _renew_credentials(first, environ)

    proxy, headers = _proxy(first), _impersonation_headers(first.user)
    plugin = get_dict(first.user.values, "exec")
    token_cache = TokenCache(renew, f"the context {name!r}")
    await token_cache.open()
    return Access(
        server=first.server,
        name=f"the context {name!r}",
        credentials=token_cache,
        namespace=first.namespace,
        tls_name=first.cluster.text("tls-server-name") or None,
        proxy=proxy,
        headers=headers,
        gke=Path(str(plugin.get("command") or "")).name == GKE_PLUGIN,
    )


async def _renew_credentials(
    first: Context, environ: Mapping[str, str]
) -> FreshCredentials[ClusterCredentials]:
    """Read the credentials of the context *first* again; its server must be the same as before."""
    requested_at = time.time()
    context = await anyio.to_thread.run_sync(read_context, first.name, environ)
    user = context.user
    if context.server != first.server:
        raise Revoked(
            f"the context {context.name!r} names the server {context.server} now, and this "
            f"client was opened for {first.server}; open another client"
        )
    if "auth-provider" in user.values:
        raise ConfigurationError(
            f"the context {context.name!r} logs in with an auth-provider, which Kubernetes "
            "removed in 1.26; use a credential plugin (exec) instead. On GKE, `gcloud container "
            "clusters get-credentials` writes a context with gke-gcloud-auth-plugin"
        )
    reply: Reply | None = None
    if section := user.values.get("exec"):
        cluster = await anyio.to_thread.run_sync(_cluster_info, context)
        plugin = Plugin(section=section, folder=user.folder, cluster=cluster, environ=environ)
        reply = await plugin.run()
    credentials = await anyio.to_thread.run_sync(_read_credentials, context, reply)
    if reply is not None and reply.until is not None:
        return schedule_renewals(credentials, requested_at, reply.until)
    renew_from = requested_at + REREAD_S if user.text("tokenFile") else math.inf
    return FreshCredentials(value=credentials, renew_from=renew_from)


def _read_credentials(context: Context, reply: Reply | None) -> ClusterCredentials:
    """Return the credentials for the server, from the user's section or its plugin's *reply*."""
    cluster, user = context.cluster, context.user
    try:
        header = _authorization(user, reply)
        if not context.server.startswith("https:"):
            return ClusterCredentials(authorization=header)
        certificate, key = user.pem("client-certificate"), user.pem("client-key")
        if reply is not None and reply.certificate:
            certificate, key = reply.certificate, reply.key
        ca = cluster.pem("certificate-authority")
        verify = not cluster.values.get("insecure-skip-tls-verify")
        tls = tls_context(ca, verify=verify, certificate=certificate, key=key)
    except (OSError, ValueError) as exc:
        raise ConfigurationError(
            f"the context {context.name!r} cannot be used: {exc}; fix the kubeconfig"
        ) from exc
    return ClusterCredentials(authorization=header, tls=tls)


def _authorization(user: Section, reply: Reply | None) -> str:
    """Return the Authorization header; "" if the user has no token."""
    token = reply.token if reply else user.text("token")
    if (token_file := user.text("tokenFile")) and reply is None:
        token = (user.folder / token_file).read_text().strip() or token
    return f"Bearer {token}" if token else ""


def _cluster_info(context: Context) -> dict[str, Any]:
    """Return what a plugin with ``provideClusterInfo`` learns about the cluster."""
    values = context.cluster.values
    known = ("server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url")
    info: dict[str, Any] = {name: values[name] for name in known if name in values}
    with contextlib.suppress(ValueError):  # `_read_credentials` reports the error
        if ca := context.cluster.pem("certificate-authority"):
            info["certificate-authority-data"] = base64.b64encode(ca.encode()).decode()
    for extension in values.get("extensions") or ():
        if extension.get("name") == "client.authentication.k8s.io/exec":
            info["config"] = extension.get("extension")
    return info


def _proxy(context: Context) -> str | None:
    proxy = context.cluster.text("proxy-url")
    if proxy and not proxy.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"the context {context.name!r} names the proxy {proxy}; kinetic can use http and "
            "https proxies only"
        )
    return proxy or proxy_for(context.server)


def _impersonation_headers(user: Section) -> tuple[tuple[str, str], ...]:
    """Return the headers for the impersonation that the kubeconfig's *user* asks for."""
    headers = [("Impersonate-User", user.text("as")), ("Impersonate-Uid", user.text("as-uid"))]
    headers += [("Impersonate-Group", str(group)) for group in user.values.get("as-groups") or ()]
    extra: Mapping[str, list[str]] = user.values.get("as-user-extra") or {}
    for key, values in extra.items():
        headers += [(f"Impersonate-Extra-{key}", value) for value in values]
    return tuple((key, value) for key, value in headers if value)


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
        _, _, credentials = await anyio.to_thread.run_sync(_read_account, folder, environ)
        return FreshCredentials(value=credentials, renew_from=reread_at)

    server, namespace, _ = await anyio.to_thread.run_sync(_read_account, folder, environ)
    token_cache = TokenCache(renew, "the cluster of this pod")
    await token_cache.open()
    return Access(
        server=server, name="the cluster of this pod", credentials=token_cache, namespace=namespace
    )


def _read_account(folder: Path, environ: Mapping[str, str]) -> tuple[str, str, ClusterCredentials]:
    """Read the server, the namespace, and the credentials of the service account. Blocks."""
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
        ca = (folder / "ca.crt").read_text()
    except (ConfigException, OSError) as exc:
        raise ConfigurationError(
            f"KINETIC_KUBE_CONTEXT={IN_CLUSTER} means the service account of the pod in which this "
            f"process runs, but kinetic can't read it: {exc}; run the process in a pod that "
            "mounts the token, or name a context of a kubeconfig"
        ) from exc
    try:
        namespace = (folder / "namespace").read_text().strip()
    except OSError:
        namespace = ""
    header = str(configuration.api_key["BearerToken"]).strip()
    credentials = ClusterCredentials(authorization=header, tls=tls_context(ca))
    return str(configuration.host), namespace or "default", credentials


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


def _server_of(description: Mapping[str, Any], target: Target) -> tuple[str, str | None]:
    """Return the server and its CA, which is None for a publicly trusted certificate.

    The server is the public address, else the DNS endpoint, else the private address.
    """
    status = description.get("status")
    if status in ("PROVISIONING", "STOPPING", "ERROR"):
        reason = one_line(str(description.get("statusMessage") or ""), 300)
        starts = status == "PROVISIONING"
        advice = (
            "wait until it is RUNNING"
            if starts
            else "create it again with `kinetic up`, or set KINETIC_CLUSTER to another cluster"
        )
        raise Unavailable(
            f"{_describe(target)} is {status}: {reason or 'no reason given'}; {advice}",
            retryable=starts,
        )
    control = get_dict(description, "controlPlaneEndpointsConfig")
    dns, ip = get_dict(control, "dnsEndpointConfig"), get_dict(control, "ipEndpointsConfig")
    endpoint = str(description.get("endpoint") or "") if ip.get("enabled", True) else ""
    dns_name = str(dns.get("endpoint") or "") if dns.get("allowExternalTraffic") else ""
    address = _parse_address(endpoint)
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
    return f"https://{host}", base64.b64decode(encoded).decode()


def _parse_address(endpoint: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return *endpoint* as an IP address; None if it is a host name."""
    try:
        return ipaddress.ip_address(endpoint)
    except ValueError:
        return None


async def open_access(
    target: Target,
    environ: Mapping[str, str] = os.environ,
    policy: RetryPolicy | None = None,
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
