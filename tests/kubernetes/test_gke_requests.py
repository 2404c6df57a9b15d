"""The order and number of the platform's requests to the API server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from kinetic._runner.protocol.workers import Crew, Terms
from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.kubernetes.api import Api, Limits
from kinetic.aio.kubernetes.gke import GkeCluster
from kinetic.aio.kubernetes.pathways import PathwaysCluster
from kinetic.aio.kubernetes.rounds import round_manifest
from kinetic.aio.kubernetes.secrets import MAX_CONCURRENT_REQUESTS
from tests.kubernetes.faults import FaultServer, anonymous, answer
from tests.kubernetes.orders import order
from tests.kubernetes.world import AT

LIMITS = Limits(retry=RetryPolicy(total_s=30.0, first_pause_s=0.2, longest_pause_s=0.2))


@pytest.fixture
async def cluster(server: FaultServer) -> AsyncIterator[GkeCluster]:
    access = anonymous(server)
    cluster = GkeCluster(Api(access, LIMITS), AT)
    yield cluster
    await cluster.aclose()


async def test_a_secret_that_is_still_being_created_is_removed(
    server: FaultServer, cluster: GkeCluster
) -> None:
    """The removal waits for the creation, which outlives the launch that asked for it."""
    server.then(answer({"code": 503}, status=503, Retry_After="0.3"))
    launching = asyncio.create_task(cluster.launch(order(labels={}, group_id="grp-1")))
    async with asyncio.timeout(30):
        while not server.seen:
            await asyncio.sleep(0.01)
        launching.cancel()
        await cluster.drop_secret(["grp-1"])
    assert launching.cancelled()
    created = [path for path in server.paths if path.startswith("POST")]
    assert len(created) == 2
    assert server.paths[-1] == "DELETE /api/v1/namespaces/ns/secrets/grp-1"


async def test_the_answer_to_a_new_job_leaves_out_spec_and_status(
    server: FaultServer, cluster: GkeCluster
) -> None:
    """The Job's own kind is the owner of its Secret, and not the kind of the answer."""
    created = {"kind": "PartialObjectMetadata", "metadata": {"name": "one", "uid": "u"}}
    server.then(answer(created, 201))
    await cluster.launch(order(name="one", labels={}))
    job, secret = server.seen
    assert "as=PartialObjectMetadata" in job.headers["Accept"]
    (owner,) = json.loads(secret.body)["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": "one", "uid": "u"}


@pytest.mark.parametrize("deleted_before", ["PATCH", "the second GET"])
async def test_a_round_whose_job_is_deleted_while_it_grows_is_over(
    server: FaultServer, cluster: GkeCluster, deleted_before: str
) -> None:
    crew = Crew(terms=Terms(workers=3), outputs="gs://b/outputs", created=1.0)
    job = order(name="grp-1-r0", labels={}, group_id="grp-1", crew=crew)
    stored = round_manifest(job, number=0, workers=1, placement=AT)
    stored["metadata"]["resourceVersion"] = "1"
    server.then(answer({}))  # the Secret
    server.then(answer({"code": 409, "reason": "AlreadyExists"}, 409))
    server.then(answer(stored))
    if deleted_before == "the second GET":
        server.then(answer({"code": 409, "reason": "Conflict"}, 409))
    server.then(answer({"code": 404, "reason": "NotFound"}, 404))
    assert await cluster.scale(job, number=0, ranks=range(3)) == 0


class Crowd:
    """Count the deletions that run at the same time; each takes a moment.

    Each waits until `MANY` run at once, or for `PATIENCE_S` if the client doesn't send that many.
    """

    MANY = 8
    PATIENCE_S = 10.0

    def __init__(self) -> None:
        self.now = self.most = 0
        self.paths: list[str] = []
        self._many = asyncio.Event()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":  # the client checks for sets of the other kind
            return web.json_response({"items": []})
        self.now += 1
        self.most = max(self.most, self.now)
        self.paths.append(request.path_qs)
        if self.now >= self.MANY:
            self._many.set()
        try:
            async with asyncio.timeout(self.PATIENCE_S):
                await self._many.wait()
        except TimeoutError:
            self._many.set()  # gives up waiting; the test sees it in `most`
        await asyncio.sleep(0.02)
        self.now -= 1
        return web.json_response({"code": 404}, status=404)


async def test_all_attempts_of_a_job_are_deleted_together(
    server: FaultServer, cluster: GkeCluster
) -> None:
    """An attempt may be a pod in the Job of the first."""
    server.always = answer({})
    await cluster.delete(names=["kinetic-job-a", *(f"kinetic-job-a-{n}" for n in range(2, 50))])
    (request,) = server.seen
    assert (request.method, request.path) == ("DELETE", "/apis/batch/v1/namespaces/ns/jobs")
    assert "(kinetic-job-a,kinetic-job-a-10," in request.query["labelSelector"]


async def test_many_sets_are_deleted_with_a_limit_on_parallel_requests(server: FaultServer) -> None:
    crowd = Crowd()
    server.always = crowd.handle
    access = anonymous(server)
    cluster = PathwaysCluster(Api(access, LIMITS), AT, kind="lws")
    await cluster.delete(names=[f"grp-{number}-1" for number in range(60)])
    assert sum("leaderworkersets/" in path for path in crowd.paths) == 60
    assert sum("jobsets/" in path for path in crowd.paths) == 60, "each may be of either kind"
    assert crowd.MANY <= crowd.most <= MAX_CONCURRENT_REQUESTS
    await cluster.aclose()
