"""Containers that a webhook of the cluster adds to pods, as a service mesh does."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kinetic import aio
from kinetic.errors import JobError
from tests.cluster.fixtures import Namespace, on_cluster, until
from tests.cluster.rights import permit_runner

DEADLINE_S = 110.0
PROXY = {"name": "proxy", "image": "mesh.test/proxy:1", "command": ["sleep", "1000"]}


class Hook(BaseHTTPRequestHandler):
    """Add `PROXY` to each pod, as its first container."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
        patch = [{"op": "add", "path": "/spec/containers/0", "value": PROXY}]
        response = {"uid": request["uid"], "allowed": True, "patchType": "JSONPatch"}
        response["patch"] = base64.b64encode(json.dumps(patch).encode()).decode()
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
        body = json.dumps(review | {"response": response}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def meshed(configured: Namespace) -> Iterator[Namespace]:
    """A namespace whose pods get a container that never ends."""
    keys = configured.control_plane.certificates
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(keys.certificate, keys.key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"https://127.0.0.1:{server.server_address[1]}/"
    ca = base64.b64encode(keys.ca.read_bytes()).decode()
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"]}
    hook = {
        "name": "mesh.example.com",
        "clientConfig": {"url": url, "caBundle": ca},
        "rules": [rule | {"resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": configured.name}},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
    }
    path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
    metadata = {"name": configured.name}
    configured.admin.call("POST", path, {"metadata": metadata, "webhooks": [hook]})
    trial = {"metadata": {"name": "trial"}, "spec": {"containers": [PROXY | {"name": "main"}]}}
    try:
        while len(_made(configured, trial)["spec"]["containers"]) < 2:
            pass  # the API server hears of the webhook a little later
        yield configured
    finally:
        configured.admin.call("DELETE", f"{path}/{configured.name}")
        server.shutdown()
        thread.join()
        server.server_close()


def _made(namespace: Namespace, pod: dict[str, Any]) -> dict[str, Any]:
    return namespace.call("POST", "pods", pod, dryRun="All")


def has_no_pod(namespace: Namespace) -> bool:
    return not namespace.call("GET", "pods")["items"]


@on_cluster
def double(number: int) -> int:
    if number < 0:
        raise ValueError(number)
    return 2 * number


@pytest.mark.full
@pytest.mark.parametrize("permitted", [True, False])
async def test_only_kinetics_container_counts(
    permitted: bool, meshed: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Jobs end with kinetic's container. Then no pod stays: it removes itself, or a client does."""
    if permitted:
        permit_runner(meshed)
    async with asyncio.timeout(DEADLINE_S):
        with caplog.at_level(logging.WARNING):
            async with aio.Client() as client:
                batch = await client.run_async_map(double, range(3), max_concurrent=1)
                assert await batch.results(cleanup=False) == [0, 2, 4]
                job = await client.submit(double, -1)
                with pytest.raises(ValueError, match="-1"):
                    await job.result()
        await until(lambda: has_no_pod(meshed))
    assert ("name: kinetic-runner" in caplog.text) is not permitted


@pytest.mark.full
async def test_a_job_waits_although_another_container_runs(
    meshed: Namespace, client: aio.Client
) -> None:
    meshed.kubelet.fail_pull("missing.test")
    run = double.options(container_image="missing.test/image:1", start_timeout=3)
    job = await client.submit(run, 1)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(JobError, match=r"start_timeout of 3 s: the image missing\.test"):
            await job.result()
        await until(lambda: has_no_pod(meshed))


@pytest.mark.full
async def test_a_container_without_an_image_is_named(meshed: Namespace, client: aio.Client) -> None:
    """The job runs and ends although the image of a container beside it can't be pulled."""
    meshed.kubelet.fail_pull("mesh.test")
    job = await client.submit(double, 4)
    async with asyncio.timeout(DEADLINE_S):
        assert await job.result(cleanup=False) == 8
        await until(lambda: has_no_pod(meshed))
