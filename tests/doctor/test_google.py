"""A GCP project as the doctor sees it, whole and broken in one place at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kinetic import configuration
from kinetic.aio.gcs.store import GcsStore
from kinetic.doctor import bucket
from kinetic.doctor import google as subject
from kinetic.doctor.checks import Report, State, run_checks
from kinetic.doctor.examination import examine
from tests.doctor.conftest import Google
from tests.gcs.server import GcsServer
from tests.kubernetes.faults import Handler, answer

FORBIDDEN = answer({"error": {"message": "no right"}}, 403)


async def looked(google: Google) -> Report:
    target = configuration.resolve(environ=google.environ)
    asked = subject.Google(target, google.environ)
    try:
        return await run_checks(asked.checks(project=True))
    finally:
        await asked.aclose()


async def test_a_project_with_all_it_needs(google: Google) -> None:
    report = await looked(google)
    assert {one.state for one in report.results} == {State.OK}, report.to_dict()
    assert report["credentials"].evidence == "Google accepts the login of a user"
    assert report["registry"].evidence == "europe-docker.pkg.dev/acme/kn-lab"
    assert report["quotas"].evidence == "europe-west4: NVIDIA_L4_GPUS 1 of 8"
    shown = {one.headers["Authorization"] for one in google.server.seen if "/v1/" in one.path}
    assert shown == {"Bearer token"}


@pytest.mark.parametrize(
    ("path", "given", "name", "state", "evidence", "advice"),
    [
        ("", FORBIDDEN, "project", State.WARNING, "no permission to see it", "roles/browser"),
        (
            "", answer({"lifecycleState": "DELETE_REQUESTED"}), "project", State.FAILED,
            "acme is DELETE_REQUESTED", "/cloud-resource-manager",
        ),
        (
            "/billingInfo", answer({}), "billing", State.FAILED,
            "no billing", "kinetic up --billing-account ID, or https://console",
        ),
        ("/billingInfo", FORBIDDEN, "billing", State.SKIPPED, "403: no right", ""),
        (
            "/services:batchGet", answer({"services": []}), "APIs", State.FAILED,
            "container.googleapis.com is disabled (finding the", "kinetic up, or https://console",
        ),
        (
            "/locations/europe/repositories/kn-lab", answer({"error": {}}, 404), "registry",
            State.WARNING, "no repository 'kn-lab' in europe", "kinetic up; or name an image",
        ),
    ],
)  # fmt: skip
async def test_what_is_amiss_is_told_with_what_to_do(
    google: Google, path: str, given: Handler, name: str, state: State, evidence: str, advice: str
) -> None:
    google.answers[f"/v1/projects/acme{path}"] = given
    result = (await looked(google))[name]
    assert result.state is state
    assert evidence in result.evidence
    assert advice in result.advice
    assert "gcloud" not in result.advice, "kinetic needs none"


async def test_no_quota_for_gpus_is_a_warning(google: Google) -> None:
    google.answers["/compute/v1/projects/acme/regions/europe-west4"] = answer({"quotas": []})
    assert (await looked(google))["quotas"].state is State.WARNING


async def test_a_server_that_is_not_there_fails(google: Google) -> None:
    google.environ["CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBILLING"] = "http://127.0.0.1:1"
    result = (await looked(google))["billing"]
    assert result.state is State.FAILED
    assert "can't call cloudbilling: http://127.0.0.1:1 does not answer" in result.evidence
    assert result.advice == "check the network"


EXPIRED = {"error": "invalid_grant", "error_description": "Token has been expired or revoked."}


async def test_credentials_that_ended_fail_and_all_else_is_skipped(google: Google) -> None:
    google.answers["/token"] = answer(EXPIRED, 400)
    report = await examine(environ=google.environ)
    assert report["credentials"].state is State.FAILED
    assert report["credentials"].advice.startswith("run `gcloud auth application-default login`")
    others = {one.because for one in report.results if one.group in ("project", "cluster", "store")}
    assert others == {"credentials"}


async def test_credentials_that_are_not_there_fail(
    google: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    result = (await looked(google))["credentials"]
    assert result.state is State.FAILED
    assert (
        result.evidence == "GOOGLE_APPLICATION_CREDENTIALS names /nowhere/key.json, which "
        "does not exist"
    )
    assert "gcloud auth application-default login" in result.advice


@pytest.fixture
async def store() -> AsyncIterator[GcsServer]:
    async with GcsServer() as server:
        yield server


async def test_a_cluster_that_is_not_there_fails_and_the_buckets_are_looked_at_all_the_same(
    google: Google, store: GcsServer
) -> None:
    path = "/v1/projects/acme/locations/-/clusters"
    google.answers[path] = answer({"clusters": [{"name": "lap", "location": "europe-west4-b"}]})
    store.buckets |= {"acme-kn-lab-jobs"}
    report = await examine(environ={**google.environ, "STORAGE_EMULATOR_HOST": store.url})
    way = report["access"]
    assert way.state is State.FAILED
    assert "it has lap in europe-west4-b" in way.evidence
    assert way.advice == "set KINETIC_CLUSTER and KINETIC_ZONE"
    assert report["permissions"].because == "access"
    assert report["bucket"].state is report["bucket: use"].state is State.OK
    assert report["bucket of builds"].state is State.FAILED
    assert report["bucket of builds: use"].because == "bucket of builds"
    assert not store.objects


async def test_who_cannot_remove_what_was_written_is_told_so() -> None:
    async with GcsServer() as server:
        store = GcsStore(
            "gs://kn-test", {"STORAGE_EMULATOR_HOST": server.url}, limits=bucket.LIMITS
        )
        removing = server.fail("delete", times=1, stall=True)
        checks = [replace(one, limit_s=2.0) for one in bucket.checks("bucket", store, after=())]
        try:
            report = await run_checks(checks)
        finally:
            await store.aclose()
        assert removing.seen
        assert report["bucket: use"].state is State.FAILED
        assert "no answer" in report["bucket: use"].evidence
        assert not server.objects
