"""Examine a Google Cloud project: a healthy one, and ones with a single fault."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kinetic import configuration
from kinetic.aio.gcs.http import ONE_TRY
from kinetic.aio.gcs.store import GcsStore
from kinetic.doctor import bucket
from kinetic.doctor import google as subject
from kinetic.doctor.checks import Report, State, run_checks
from kinetic.doctor.examination import examine
from tests.doctor.conftest import Google
from tests.gcs.server import GcsServer
from tests.kubernetes.faults import Handler, answer

FORBIDDEN = answer({"error": {"message": "no right"}}, 403)


async def check_project(google: Google) -> Report:
    target = configuration.resolve(environ=google.environ)
    apis = subject.Google(target, google.environ)
    try:
        return await run_checks(apis.checks(project=True))
    finally:
        await apis.aclose()


async def test_a_healthy_project(google: Google) -> None:
    report = await check_project(google)
    assert {result.state for result in report.results} == {State.OK}, report.to_dict()
    assert report["credentials"].evidence == "Google accepts the login of a user"
    assert report["registry"].evidence == "europe-docker.pkg.dev/acme/kn-lab"
    assert report["quotas"].evidence == "europe-west4: NVIDIA_L4_GPUS 1 of 8"
    shown = {
        request.headers["Authorization"] for request in google.server.seen if "/v1/" in request.path
    }
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
            "/billingInfo", answer("oh", 503), "billing", State.WARNING,
            "can't answer the request now (503: oh)", "try again later",
        ),
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
async def test_a_fault_is_shown_with_its_fix(
    google: Google, path: str, given: Handler, name: str, state: State, evidence: str, advice: str
) -> None:
    google.answers[f"/v1/projects/acme{path}"] = given
    result = (await check_project(google))[name]
    assert result.state is state
    assert evidence in result.evidence
    assert advice in result.advice
    assert "gcloud" not in result.advice, "kinetic doesn't need gcloud"


@pytest.mark.parametrize("zone", ["europe-west4-b", "europe-west4"])
async def test_a_domains_project_and_a_regional_cluster_are_healthy(
    google: Google, zone: str
) -> None:
    google.environ |= {"KINETIC_PROJECT": "example.com:acme", "KINETIC_ZONE": zone}
    for path in [*google.answers]:
        google.answers[path.replace("acme", "example.com:acme")] = google.answers.pop(path)
    report = await check_project(google)
    assert {result.state for result in report.results} == {State.OK}, report.to_dict()
    assert report["registry"].evidence == "europe-docker.pkg.dev/example.com/acme/kn-lab"


async def test_no_quota_for_gpus_is_a_warning(google: Google) -> None:
    google.answers["/compute/v1/projects/acme/regions/europe-west4"] = answer({"quotas": []})
    assert (await check_project(google))["quotas"].state is State.WARNING


async def test_an_unreachable_server_fails(google: Google) -> None:
    google.environ["CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBILLING"] = "http://127.0.0.1:1"
    result = (await check_project(google))["billing"]
    assert result.state is State.FAILED
    assert "can't call cloudbilling: http://127.0.0.1:1 does not answer" in result.evidence
    assert result.advice == "check the network"


EXPIRED = {"error": "invalid_grant", "error_description": "Token has been expired or revoked."}


async def test_expired_credentials_fail_and_skip_all_other_checks(google: Google) -> None:
    google.answers["/token"] = answer(EXPIRED, 400)
    report = await examine(environ=google.environ)
    assert report["credentials"].state is State.FAILED
    assert report["credentials"].advice.startswith("run `gcloud auth application-default login`")
    others = {
        result.because
        for result in report.results
        if result.group in ("project", "cluster", "store")
    }
    assert others == {"credentials"}


async def test_missing_credentials_fail(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    result = (await check_project(google))["credentials"]
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


async def test_a_missing_cluster_fails_and_the_buckets_are_still_checked(
    google: Google, store: GcsServer
) -> None:
    path = "/v1/projects/acme/locations/-/clusters"
    google.answers[path] = answer({"clusters": [{"name": "lap", "location": "europe-west4-b"}]})
    store.buckets |= {"acme-kn-lab-jobs"}
    report = await examine(environ={**google.environ, "STORAGE_EMULATOR_HOST": store.url})
    access = report["access"]
    assert access.state is State.FAILED
    assert "the project has lap in europe-west4-b" in access.evidence
    assert access.advice == "set KINETIC_CLUSTER and KINETIC_ZONE"
    assert report["permissions"].because == "access"
    assert report["bucket"].state is report["bucket: use"].state is State.OK
    assert report["bucket of builds"].state is State.FAILED
    assert report["bucket of builds: use"].because == "bucket of builds"
    assert not store.objects


@pytest.mark.parametrize(
    ("settings", "said", "advice"),
    [
        ({"retentionPolicy": {"retentionPeriod": "60"}}, "for 60 s", "--clear-retention-period"),
        (
            {"retentionPolicy": {"retentionPeriod": "60", "isLocked": True}},
            "locked retention policy",
            "KINETIC_STORE",
        ),
        ({"defaultEventBasedHold": True}, "hold", "--no-default-event-based-hold"),
    ],
)
async def test_the_doctor_writes_nothing_to_a_bucket_that_keeps_objects(
    store: GcsServer, settings: dict[str, Any], said: str, advice: str
) -> None:
    store.settings = settings
    target = GcsStore("gs://kn-test", {"STORAGE_EMULATOR_HOST": store.url}, limits=ONE_TRY)
    try:
        report = await run_checks(bucket.checks("bucket", target, after=()))
        assert not store.requests["create"]
        store.fail("bucket", times=1, status=403, text="no storage.buckets.get access")
        unreadable = await run_checks(bucket.checks("bucket", target, after=()))
    finally:
        await target.aclose()
    found = report["bucket: retention"]
    assert found.state is State.FAILED and said in found.evidence and advice in found.advice
    assert ("clear" in found.advice) is (said == "for 60 s")
    assert report["bucket: use"].because == "bucket: retention"
    assert unreadable["bucket: retention"].state is State.SKIPPED
    assert unreadable["bucket: use"].state is State.OK


async def test_an_object_that_cannot_be_removed_fails_the_check() -> None:
    async with GcsServer() as server:
        store = GcsStore("gs://kn-test", {"STORAGE_EMULATOR_HOST": server.url}, limits=ONE_TRY)
        removing = server.fail("delete", times=1, stall=True)
        table = bucket.checks("bucket", store, after=())
        checks = [replace(check, limit_s=2.0) for check in table]
        try:
            report = await run_checks(checks)
        finally:
            await store.aclose()
        assert removing.seen
        assert report["bucket: use"].state is State.FAILED
        assert "no answer" in report["bucket: use"].evidence
        assert not server.objects
