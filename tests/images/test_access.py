"""Requests have tokens, a refused token is replaced, and errors of builds say what to do."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest
from google.cloud.devtools import cloudbuild_v1

from kinetic.aio._net.tokens import Credentials
from kinetic.aio.images.cloud_build import Builder, build_error
from kinetic.aio.images.registry import BuildSettings, Registry
from kinetic.errors import AuthError, BackendError
from tests import programs
from tests.images.conftest import Cloud
from tests.kubernetes import faults

Build = cloudbuild_v1.Build


@pytest.fixture
def login(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(cloud.bucket.login(tmp_path)))


SETTINGS = BuildSettings(project="p", image="r/i", service_account="a")


def builder_of(cloud: Cloud, credentials: Credentials | None) -> Builder:
    """Return a builder that uses the test's server and sends it the token."""
    return Builder(
        SETTINGS, cloud.jobs, credentials, emulator=cloud.builds.host, poll_s=(0.01, 0.02)
    )


@pytest.mark.usefixtures("login")
async def test_calls_carry_the_token_and_a_refused_one_is_replaced(cloud: Cloud) -> None:
    assert cloud.bucket.tokens is not None
    cloud.builds.faults["create"] = [grpc.StatusCode.UNAUTHENTICATED]
    async with aclosing(Credentials()) as credentials:
        async with aclosing(builder_of(cloud, credentials)) as builder:
            await builder.build("r/i:t", {}, print)
    assert cloud.builds.authorizations == {f"Bearer {token}" for token in cloud.bucket.tokens}
    assert len(cloud.bucket.tokens) == 2


@pytest.mark.usefixtures("login")
async def test_a_refused_login_is_an_error_with_the_fix(cloud: Cloud) -> None:
    cloud.builds.faults["create"] = [grpc.StatusCode.UNAUTHENTICATED] * 9
    async with aclosing(Credentials()) as credentials:
        async with aclosing(builder_of(cloud, credentials)) as builder:
            with pytest.raises(AuthError, match="gcloud auth application-default login"):
                await builder.build("r/i:t", {}, print)
    assert cloud.builds.calls["create"] == 2


@pytest.mark.parametrize(
    "trouble", [faults.silence(), faults.status(503)], ids=["before the answer", "between tries"]
)
async def test_a_registry_request_fails_when_the_client_is_closed(trouble: faults.Handler) -> None:
    async with faults.FaultServer() as server, aclosing(Credentials()) as credentials:
        server.always = trouble
        host = server.url.partition("://")[2]
        registry = Registry(credentials, insecure_host=host)
        asking = asyncio.create_task(registry.has(f"{host}/i:t"))
        async with asyncio.timeout(60):
            while not server.seen:
                await asyncio.sleep(0)
            await registry.aclose()
            with pytest.raises(BackendError, match="closed"):
                await asking
            with pytest.raises(BackendError, match="is closed; open another"):
                await registry.has(f"{host}/i:t")


def test_choosing_images_loads_nothing_of_google() -> None:
    code = (
        "import sys, kinetic.aio.images.container, kinetic.aio.images.cloud_build;"
        "heavy = ('google', 'grpc', 'aiohttp');"
        "print([name for name in sys.modules if name.split('.')[0] in heavy])"
    )
    assert programs.python("-c", code).strip() == "[]"


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        ("FAILURE", "PUSH_NOT_AUTHORIZED", "roles/artifactregistry.writer"),
        ("FAILURE", "PUSH_FAILED", "could not be pushed"),
        ("FAILURE", "FETCH_SOURCE_FAILED", "roles/storage.objectAdmin"),
        ("FAILURE", "LOGGING_FAILURE", "roles/storage.objectAdmin"),
        ("FAILURE", "USER_BUILD_STEP", "failed"),
        ("TIMEOUT", "", "took too long"),
        ("EXPIRED", "", "quota"),
        ("INTERNAL_ERROR", "", "try again"),
        ("CANCELLED", "", "was cancelled"),
    ],
)
def test_the_end_of_a_build_says_what_to_do(status: str, kind: str, message: str) -> None:
    build = Build(id="b", status=Build.Status[status], log_url="https://l.test", status_detail="D")
    if kind:
        build.failure_info.type_ = Build.FailureInfo.FailureType[kind]
    error = build_error(build, "r/i:t", ["one", "two"])
    assert error is not None and message in str(error)
    assert "r/i:t" in str(error) and "(D)" in str(error)
    assert "  one\n  two\n" in str(error) and "https://l.test" in str(error)
    assert (error.build_id, error.log_url) == ("b", "https://l.test")


def test_a_build_that_succeeded_is_no_error() -> None:
    assert build_error(Build(status=Build.Status.SUCCESS), "r/i:t", []) is None
