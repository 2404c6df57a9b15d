"""Access to a GKE cluster through Google's API: requests, addresses, and errors."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kinetic import configuration
from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.kubernetes.access import open_access, open_gke
from kinetic.aio.kubernetes.api import Api, Limits
from kinetic.errors import (
    AuthError,
    BackendError,
    ConfigurationError,
    Refused,
    Throttled,
    Unavailable,
)
from tests.cluster import certificates
from tests.kubernetes.faults import FaultServer, Handler, answer, reset, status
from tests.kubernetes.kubeconfigs import PODS, authorizations

CLUSTER = "/v1/projects/acme/locations/europe-west4-b/clusters/lab"
ALL_CLUSTERS = "/v1/projects/acme/locations/-/clusters"
LONG = RetryPolicy(total_s=60.0, first_pause_s=0.005, longest_pause_s=0.02)
QUICK = replace(LONG, total_s=0.3)
"""For tests in which retrying ends."""


class Google:
    """A fake of Google's API for tokens and clusters."""

    def __init__(self, server: FaultServer) -> None:
        self.server = server
        self.tokens = 0
        self.environ = {
            "KINETIC_PROJECT": "acme",
            "KINETIC_ZONE": "europe-west4-b",
            "KINETIC_CLUSTER": "lab",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_CONTAINER": server.url,
        }
        self.described: Handler = answer({"endpoint": "203.0.113.7", "masterAuth": {}})
        self.listed: Handler = answer({})
        server.always = self.handle

    @property
    def target(self) -> configuration.Target:
        return configuration.resolve(environ=self.environ)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/token":
            self.tokens += 1
            token = {"access_token": f"token-{self.tokens}", "expires_in": 3600}
            return await answer(token)(request)
        if request.path == ALL_CLUSTERS:
            return await self.listed(request)
        return await self.described(request)

    @property
    def requests(self) -> list[str]:
        return [path for path in self.server.paths if "token" not in path]


@pytest.fixture
async def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Google]:
    async with FaultServer() as server:
        user = {"type": "authorized_user", "client_id": "c", "client_secret": "s"}
        user |= {"refresh_token": "r", "token_uri": f"{server.url}/token"}
        (tmp_path / "adc.json").write_text(json.dumps(user))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "adc.json"))
        yield Google(server)


def described(endpoint: str, ca: bytes = b"", **more: Any) -> Handler:
    encoded = {"clusterCaCertificate": base64.b64encode(ca).decode()} if ca else {}
    return answer({"status": "RUNNING", "endpoint": endpoint, "masterAuth": encoded, **more})


@pytest.fixture
def ca(tmp_path: Path) -> bytes:
    (tmp_path / "certificates").mkdir()
    return certificates.make(tmp_path / "certificates").ca.read_bytes()


async def test_access_includes_the_clusters_node_pools(google: Google, ca: bytes) -> None:
    """Pools without nodes are included."""
    pools = [
        {"config": {"machineType": "ct6e-standard-4t"}, "placementPolicy": {"tpuTopology": "2x4"}},
        {"name": "old", "config": {"machineType": "e2-standard-4"}},
        {},
    ]
    pools[0]["config"] |= {"kubeletConfig": {"singleProcessOomKill": True}}
    pools[2]["name"] = "bare"
    google.described = described("34.90.1.2", ca, nodePools=pools)
    access = await open_access(google.target, google.environ)
    await access.credentials.aclose()
    assert access.group_kill_pools == ("old", "bare")
    assert access.pools == (("ct6e-standard-4t", "2x4"), ("e2-standard-4", ""), ("", ""))


async def test_one_request_opens_a_cluster_and_its_token_is_used_for_the_cluster(
    google: Google, ca: bytes, tmp_path: Path
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    folder = tmp_path / "certificates"
    tls.load_cert_chain(folder / "server.crt", folder / "server.key")
    async with FaultServer(tls) as cluster:
        google.described = described(cluster.url.removeprefix("https://"), ca)
        api = Api(await open_access(google.target, google.environ), Limits(retry=LONG))
        assert google.requests == [f"GET {CLUSTER}"]
        assert api.server == cluster.url
        await api.call("GET", PODS)
        cluster.then(status(401, "Unauthorized"))
        await api.call("GET", PODS)
        await api.aclose()
    assert authorizations(cluster) == ["Bearer token-1", "Bearer token-1", "Bearer token-2"]
    assert google.tokens == 2
    assert google.server.seen[1].headers["Authorization"] == "Bearer token-1"
    assert not [path for path in google.requests if path != f"GET {CLUSTER}"]


DNS = {"endpoint": "gke-1.europe-west4-b.gke.goog", "allowExternalTraffic": True}
BY_NAME = "https://gke-1.europe-west4-b.gke.goog"


@pytest.mark.parametrize(
    ("endpoint", "control", "server"),
    [
        ("203.0.113.7", {}, "https://203.0.113.7"),
        ("203.0.113.7", {"dnsEndpointConfig": DNS}, "https://203.0.113.7"),
        ("10.0.0.2", {}, "https://10.0.0.2"),
        ("10.0.0.2", {"dnsEndpointConfig": DNS}, BY_NAME),
        ("10.0.0.2", {"dnsEndpointConfig": {"endpoint": "x.gke.goog"}}, "https://10.0.0.2"),
        ("", {"dnsEndpointConfig": DNS}, BY_NAME),
        (
            "203.0.113.7",
            {"dnsEndpointConfig": DNS, "ipEndpointsConfig": {"enabled": False}},
            BY_NAME,
        ),
        (DNS["endpoint"], {"dnsEndpointConfig": DNS}, BY_NAME),
        ("2001:db8::7", {}, "https://[2001:db8::7]"),
    ],
)
async def test_a_reachable_address_is_chosen(
    google: Google, ca: bytes, endpoint: str, control: dict[str, Any], server: str
) -> None:
    if endpoint == "203.0.113.7":
        endpoint = "34.90.1.2"  # Python counts the documentation range as private
        server = server.replace("203.0.113.7", endpoint)
    google.described = described(endpoint, ca, controlPlaneEndpointsConfig=control)
    access = await open_gke(google.target, google.environ, LONG)
    assert access.server == server
    assert "lab" in access.name and "acme" in access.name
    credentials = await access.credentials.get()
    assert credentials.tls is not None
    assert credentials.tls.verify_mode is ssl.CERT_REQUIRED
    trusted = credentials.tls.get_ca_certs()
    assert (len(trusted) == 1) == (server != BY_NAME)
    await access.credentials.aclose()


async def test_the_error_for_a_missing_cluster_lists_those_that_exist(google: Google) -> None:
    google.described = answer({"error": {"code": 404, "message": "Not found"}}, 404)
    clusters = [{"name": "lab", "location": "us-central1-a"}, {"name": "b", "location": "x"}]
    google.listed = answer({"clusters": clusters})
    with pytest.raises(ConfigurationError) as caught:
        await open_gke(google.target, google.environ, QUICK)
    assert "there is no GKE cluster 'lab' in europe-west4-b" in str(caught.value)
    assert "the project has b in x, lab in us-central1-a; set KINETIC_CLUSTER" in str(caught.value)
    google.listed = answer({"error": {"code": 403, "message": "no"}}, 403)
    with pytest.raises(ConfigurationError, match="gcloud container clusters list"):
        await open_gke(google.target, google.environ, QUICK)


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (
            answer({"error": {"message": 'Required "container.clusters.get" permission(s)'}}, 403),
            AuthError, r"lack container\.clusters\.get .*add-iam-policy",
        ),
        (answer({"error": {"message": "no"}}, 403), AuthError, r"answered 403 .no.; ask the owner"),
        (
            answer({"error": {"message": "off", "details": [{"reason": "SERVICE_DISABLED"}]}}, 403),
            Refused, r"answered 403 .off.; enable the API",
        ),
        (answer({"error": {"message": "bad"}}, 401), AuthError, "application-default login"),
        (answer({"error": {"message": "slow"}}, 429), Throttled, "too many requests"),
        (answer("oh", 503), Unavailable, "answered 503"),
        (reset(), Unavailable, "does not answer"),
        (answer({"error": {"message": "what"}}, 418), BackendError, "answered 418"),
        (described("", b"x"), ConfigurationError, "no endpoint that can be reached"),
        (described("34.90.1.2"), ConfigurationError, "does not show the CA"),
        (answer({"status": "PROVISIONING"}), Unavailable, "is PROVISIONING: .*wait until"),
        (answer({"status": "STOPPING"}), Unavailable, "is STOPPING: .*again with `kinetic up`"),
        (
            answer({"status": "ERROR", "statusMessage": "no IPs"}), Unavailable,
            "is ERROR: no IPs; create it again with `kinetic up`",
        ),
    ],
)  # fmt: skip
async def test_the_error_says_why_a_cluster_cannot_be_opened(
    google: Google, fault: Handler, kind: type[Exception], message: str
) -> None:
    google.described = fault
    with pytest.raises(kind, match=message) as caught:
        await open_gke(google.target, google.environ, QUICK)
    assert type(caught.value) is kind


async def test_a_temporary_fault_is_retried(google: Google, ca: bytes) -> None:
    google.described = described("34.90.1.2", ca)
    google.server.then(google.handle, answer("oh", 503), reset())
    access = await open_gke(google.target, google.environ, LONG)
    assert google.requests == [f"GET {CLUSTER}"] * 3
    await access.credentials.aclose()


async def test_the_error_names_a_missing_credentials_file(
    google: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/adc.json")
    with pytest.raises(AuthError, match=r"/nowhere/adc\.json, which does not exist; run `gcloud"):
        await open_gke(google.target, google.environ, QUICK)
    assert not google.server.seen
