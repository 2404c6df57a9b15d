"""Access to a GKE cluster: address and CA from Google's API, by application-default credentials."""

from __future__ import annotations

import base64
import importlib
import ipaddress
import urllib.parse
from collections.abc import Mapping
from typing import Any, cast

import anyio.to_thread

from kinetic._words import one_line
from kinetic.aio._credentials import Credentials
from kinetic.aio.clusters._access import Access, Pass, proxy_for
from kinetic.aio.clusters._access_tls import trusting
from kinetic.aio.clusters._api_answers import Answer, Ask, Refusal
from kinetic.aio.clusters._api_http import Connections
from kinetic.aio.clusters._api_retry import News, Patience, persist
from kinetic.configuration import Target
from kinetic.errors import (
    AuthError,
    BackendError,
    ConfigurationError,
    KineticError,
    Throttled,
    Unavailable,
)

__all__ = ["ENDPOINT_VARIABLE", "open_gke"]

ENDPOINT = "https://container.googleapis.com"
ENDPOINT_VARIABLE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_CONTAINER"
"""As for gcloud: another address of the API, of a private endpoint or of a test."""

CONNECT_S, IDLE_S = 10.0, 60.0


class _Google:
    """Passes of application-default credentials."""

    def __init__(self, credentials: Credentials, tls: Any) -> None:
        self._credentials = credentials
        self._shown = Pass()
        self._tls = tls

    async def get(self) -> Pass:
        header = f"Bearer {await self._credentials.get()}"
        if self._shown.authorization != header:
            self._shown = Pass(authorization=header, tls=self._tls)
        return self._shown

    def forget(self, shown: Pass) -> None:
        self._credentials.forget(shown.authorization.removeprefix("Bearer "))

    async def aclose(self) -> None:
        await self._credentials.aclose()


async def open_gke(
    target: Target, environ: Mapping[str, str], patience: Patience | None = None
) -> Access:
    """Access to the cluster of project, zone and name that *target* has.

    Raises:
        ConfigurationError: There is no such cluster, or no way to it from here.
        AuthError: There are no credentials, or they may not look at it.
        Unavailable: Google's API does not answer, or the cluster is not up yet.
    """
    for module in ("aiohttp", "gcloud.aio.auth"):  # 0.2 s, which the loop is spared
        await anyio.to_thread.run_sync(importlib.import_module, module)
    credentials = Credentials()
    try:
        described = await _described(target, environ, credentials, patience or Patience())
        server, ca = _address(described, target)
        context = await anyio.to_thread.run_sync(trusting, ca)
        return Access(
            server=server,
            name=_name(target),
            passes=_Google(credentials, context),
            proxy=proxy_for(server),
        )
    except BaseException:
        await credentials.aclose()
        raise


def _name(target: Target) -> str:
    return f"the GKE cluster {target.cluster!r} (project {target.project}, {target.zone})"


async def _described(
    target: Target, environ: Mapping[str, str], credentials: Credentials, patience: Patience
) -> dict[str, Any]:
    endpoint = (environ.get(ENDPOINT_VARIABLE) or ENDPOINT).rstrip("/")
    secure = endpoint.startswith("https:")
    tls = await anyio.to_thread.run_sync(trusting, None) if secure else None
    access = Access(
        server=endpoint,
        name="Google's container API",
        passes=_Google(credentials, tls),
        proxy=proxy_for(endpoint),
    )
    http = Connections(access, connect_s=CONNECT_S, most=2)
    parts = ("projects", target.project or "", "locations", target.zone, "clusters", target.cluster)
    one = "/v1/" + "/".join(urllib.parse.quote(part, safe="") for part in parts)
    try:
        return await _asked(http, one, target, patience)
    except _Missing:
        every = f"{one.partition('/locations/')[0]}/locations/-/clusters"
        raise await _no_such(http, every, target, patience) from None
    finally:
        await http.aclose()


class _Missing(BackendError):
    """There is no such cluster; stays here."""


async def _asked(
    http: Connections, path: str, target: Target, patience: Patience
) -> dict[str, Any]:
    ask = Ask(method="GET", path=path, words=f"look up {_name(target)}")

    async def once() -> dict[str, Any]:
        raw = await http.send(ask, None, "", IDLE_S)
        return Answer(status=200, text=raw.decode(errors="replace")).body

    def explain(refusal: Refusal) -> BackendError:
        return _explained(refusal.answer, target)

    return await persist(once, patience, explain, News(patience))


async def _no_such(
    http: Connections, path: str, target: Target, patience: Patience
) -> ConfigurationError:
    """Say which clusters there are: mostly it is the zone, or a name nearly right."""
    try:
        answer = await _asked(http, path, target, patience)
        found: list[dict[str, Any]] = answer.get("clusters") or []
        there = ", ".join(sorted(f"{one['name']} in {one['location']}" for one in found)[:10])
        hint = f"it has {there}" if there else "it has none"
    except (KineticError, KeyError, TypeError):
        hint = "`gcloud container clusters list` shows which there are"
    return ConfigurationError(
        f"there is no GKE cluster {target.cluster!r} in {target.zone} of the project "
        f"{target.project}: {hint}; set KINETIC_CLUSTER and KINETIC_ZONE"
    )


def _explained(answer: Answer, target: Target) -> BackendError:
    error = cast("dict[str, Any]", answer.body.get("error") or {})
    said = one_line(str(error.get("message") or answer.text or "no reason given"), 400)
    what = f"cannot look up {_name(target)}"
    match answer.status:
        case 404:
            return _Missing(said)
        case 401:
            return AuthError(
                f"{what}: Google does not accept the access token ({said}); run "
                "`gcloud auth application-default login` again"
            )
        case 403:
            return AuthError(
                f"{what}: {said}; the credentials need container.clusters.get there: grant it "
                f"with `gcloud projects add-iam-policy-binding {target.project} "
                "--member=user:YOU --role=roles/container.developer`, and see that the API is "
                "enabled: `gcloud services enable container.googleapis.com --project "
                f"{target.project}`"
            )
        case 429:
            return Throttled(
                f"{what}: too many requests ({said}); try again later",
                retryable=True,
                retry_after=answer.wait_s,
            )
        case status if status >= 500:
            return Unavailable(
                f"{what}: Google's container API answered {status} ({said}); try again later",
                retryable=True,
                retry_after=answer.wait_s,
            )
        case status:
            return BackendError(f"{what}: Google's container API answered {status} ({said})")


def _address(described: Mapping[str, Any], target: Target) -> tuple[str, str | None]:
    """The server and its CA; None where its certificate is one of the public's.

    By its address where that can be reached from anywhere, else by its name in
    the DNS where the cluster has one, else by its private address.
    """
    status = described.get("status")
    if status in ("PROVISIONING", "STOPPING", "ERROR"):
        why = one_line(str(described.get("statusMessage") or ""), 300)
        raise Unavailable(
            f"{_name(target)} is {status}: {why or 'no reason given'}; wait until it is RUNNING",
            retryable=status == "PROVISIONING",
        )
    control: Mapping[str, Any] = described.get("controlPlaneEndpointsConfig") or {}
    dns: Mapping[str, Any] = control.get("dnsEndpointConfig") or {}
    by_ip: Mapping[str, Any] = control.get("ipEndpointsConfig") or {}
    endpoint = str(described.get("endpoint") or "") if by_ip.get("enabled", True) else ""
    named = str(dns.get("endpoint") or "") if dns.get("allowExternalTraffic") else ""
    address = _address_of(endpoint)
    private = address is not None and address.is_private
    if named and (not endpoint or endpoint == named or private):
        return f"https://{named}", None
    if not endpoint:
        raise ConfigurationError(
            f"{_name(target)} has no endpoint that can be reached from outside; enable its DNS "
            "endpoint, or use a kubeconfig: KINETIC_KUBE_CONTEXT"
        )
    encoded = cast("dict[str, Any]", described.get("masterAuth") or {}).get("clusterCaCertificate")
    if not encoded:
        raise ConfigurationError(
            f"{_name(target)} tells no CA: the credentials may not see it; grant "
            "roles/container.developer"
        )
    host = f"[{endpoint}]" if address is not None and address.version == 6 else endpoint
    return f"https://{host}", base64.b64decode(encoded).decode()


def _address_of(endpoint: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that *endpoint* is, or None for a name."""
    try:
        return ipaddress.ip_address(endpoint)
    except ValueError:
        return None
