"""Docker Hub credentials: kept in two secrets that only builds read, and used by builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kinetic.aio.images.docker_hub import has_token, login_step
from kinetic.aio.infra import Infrastructure
from kinetic.errors import NotFound
from tests.images.conftest import Cloud, cloud, project, request_of
from tests.infra.console import SITE, Console
from tests.infra.google import Google
from tests.infra.sites import up

__all__ = ["cloud", "project", "request_of"]

SECRETS = "secretmanager/v1/projects/acme-1/secrets"
BUILDS = "serviceAccount:kn-lab-builds@acme-1.iam.gserviceaccount.com"


async def test_builds_read_only_these_two_secrets(infra: Infrastructure, google: Google) -> None:
    with pytest.raises(NotFound, match="kinetic up"):
        await infra.keep_credentials("ana", "t0ken")
    await up(infra)
    google.enabled.discard("secretmanager.googleapis.com")
    await infra.keep_credentials("ana", "t0ken")
    assert google.secrets == {"dockerhub-username": "ana", "dockerhub-token": "t0ken"}
    for name in google.secrets:
        (binding,) = google.policies[f"{SECRETS}/{name}"]["bindings"]
        assert binding == {"role": "roles/secretmanager.secretAccessor", "members": [BUILDS]}
    project = google.policies["cloudresourcemanager/v3/projects/acme-1"]
    assert "secretmanager" not in str(project)
    await infra.keep_credentials("ana", "next")
    assert google.secrets["dockerhub-token"] == "next"
    assert len(google.policies[f"{SECRETS}/dockerhub-token"]["bindings"]) == 1


async def test_the_command_asks_and_builds_use_them(
    lab: Infrastructure, google: Google, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console.of(google, tmp_path)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "adc.json"))
    assert not await has_token("acme-1", google.environ)
    build = ("build-image", *SITE, "--repo", "ghcr.io/me", "--category", "cpu")
    output = await console.run(*build, "--update-credentials", exit_code=2)
    assert "DOCKERHUB_TOKEN" in output
    console.environ |= {"DOCKERHUB_USERNAME": "ana", "DOCKERHUB_TOKEN": "t0ken"}
    output = await console.run(
        *build, "--update-credentials", exit_code=2
    )  # it can't push to ghcr.io
    assert "log in to Docker Hub as ana" in output and "t0ken" not in output
    assert await has_token("acme-1", google.environ)


async def test_a_build_logs_in_if_the_project_has_credentials(
    cloud: Cloud, request_of, google: Google, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Console.of(google, tmp_path)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "adc.json"))
    google.enabled.add("secretmanager.googleapis.com")
    google.secrets["dockerhub-token"] = "t0ken"
    await cloud.images(**google.environ).resolve(request_of())
    (started,) = cloud.builds.builds.values()
    assert [step.entrypoint for step in started.build.steps] == ["bash", ""]
    assert len(started.build.available_secrets.secret_manager) == 2


def test_a_build_logs_in_without_showing_the_token() -> None:
    step, secrets = login_step("acme-1", "docker")
    assert step["secret_env"] == ["DOCKERHUB_USERNAME", "DOCKERHUB_TOKEN"]
    assert "--password-stdin" in json.dumps(step)
    names = [secret["version_name"] for secret in secrets["secret_manager"]]
    assert names[1] == "projects/acme-1/secrets/dockerhub-token/versions/latest"
