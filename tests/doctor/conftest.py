"""Objects for the doctor to examine: a cluster, a bucket, and a stand-in for Google's APIs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.cluster.fixtures import Namespace, settings
from tests.kubernetes.faults import FaultServer, Handler, answer

APIS = ("container", "cloudresourcemanager", "cloudbilling", "serviceusage", "artifactregistry")


@pytest.fixture
def clustered(namespace: Namespace, bucket: str, gcs_server: str) -> dict[str, str]:
    """Return the environment of a user with all rights in a namespace, and with a bucket."""
    return settings(namespace, bucket, gcs_server)


class Google:
    """Google's APIs: ``answers`` maps a path to the handler that answers it."""

    def __init__(self, server: FaultServer) -> None:
        self.server = server
        self.environ = {
            "KINETIC_PROJECT": "acme",
            "KINETIC_ZONE": "europe-west4-b",
            "KINETIC_CLUSTER": "lab",
            **{f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{api.upper()}": server.url for api in APIS},
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": server.url,
        }
        services = [
            {"name": f"projects/1/services/{api}.googleapis.com", "state": "ENABLED"}
            for api in ("container", "storage", "compute", "cloudbuild", "artifactregistry")
        ]
        quotas = [{"metric": "NVIDIA_L4_GPUS", "usage": 1.0, "limit": 8.0}]
        self.answers: dict[str, Handler] = {
            "/token": answer({"access_token": "token", "expires_in": 3600}),
            "/v1/projects/acme/billingInfo": answer({"billingEnabled": True}),
            "/v1/projects/acme/services:batchGet": answer({"services": services}),
            "/v1/projects/acme/locations/europe/repositories/kn-lab": answer({"name": "kn-lab"}),
            "/compute/v1/projects/acme/regions/europe-west4": answer({"quotas": quotas}),
            "/v1/projects/acme": answer({"lifecycleState": "ACTIVE", "name": "Acme"}),
        }
        server.always = self._answer

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = self.answers.get(request.path)
        not_found: dict[str, Any] = {"error": {"message": "Not found"}}
        return await (handler or answer(not_found, 404))(request)


@pytest.fixture
async def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Google]:
    async with FaultServer() as server:
        user = {"type": "authorized_user", "client_id": "c", "client_secret": "s"}
        user |= {"refresh_token": "r", "token_uri": f"{server.url}/token"}
        (tmp_path / "adc.json").write_text(json.dumps(user))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "adc.json"))
        yield Google(server)
