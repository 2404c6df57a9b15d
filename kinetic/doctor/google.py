"""Check a Google Cloud project: credentials, billing, APIs, image repository, and quotas."""

from __future__ import annotations

import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kinetic.aio._net.google import GoogleClient, GoogleRequest
from kinetic.aio._net.http import HttpError
from kinetic.aio._net.retry import NO_RETRIES
from kinetic.configuration import Target
from kinetic.doctor.checks import Check, Finding, failed, ok, skipped, warning
from kinetic.errors import ConfigurationError

GROUP = "project"
CONSOLE = "https://console.cloud.google.com"

APIS: Mapping[str, str] = {
    "container.googleapis.com": "finding the cluster",
    "storage.googleapis.com": "the bucket of jobs",
    "compute.googleapis.com": "the machines",
    "cloudbuild.googleapis.com": "bundled images",
    "artifactregistry.googleapis.com": "bundled images",
}
"""The APIs that kinetic uses, and what needs each API."""

ACCELERATOR_PREFIXES = ("NVIDIA_", "TPU", "PREEMPTIBLE_NVIDIA_", "PREEMPTIBLE_TPU")
"""Prefixes of the names of quotas for accelerators."""


class Google:
    """Check the project of *target* with the application-default credentials."""

    def __init__(self, target: Target, environ: Mapping[str, str]) -> None:
        self._target = target
        self._client = GoogleClient(environ, NO_RETRIES, idle_s=20.0)

    def checks(self, *, project: bool) -> list[Check]:
        """Return the check of the credentials and, if *project* is true, those of the project."""
        table = [Check(name="credentials", group="credentials", probe=self._credentials)]
        probes = {
            "project": self._project,
            "billing": self._billing,
            "APIs": self._apis,
            "registry": self._registry,
            "quotas": self._quotas,
        }
        if project:
            table += [_check(name, probe) for name, probe in probes.items()]
        return table

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _credentials(self) -> Finding:
        await self._client.credentials.get()
        return ok(f"Google accepts {self._client.credentials.description}")

    async def _project(self) -> Finding:
        project = self._target.project
        try:
            answer = await self._get("cloudresourcemanager", f"/v1/projects/{self._quoted_project}")
        except HttpError as refusal:
            if refusal.status not in (403, 404):
                raise
            return warning(
                f"{project} doesn't exist, or you have no permission to see it ({refusal.message})",
                "check KINETIC_PROJECT, or ask for roles/browser; jobs run without this role",
            )
        state = answer.get("lifecycleState")
        if state != "ACTIVE":
            advice = f"restore it at {CONSOLE}/cloud-resource-manager, or set KINETIC_PROJECT"
            return failed(f"{project} is {state}", advice)
        return ok(f"{answer.get('name') or project} is active")

    async def _billing(self) -> Finding:
        project = self._target.project
        answer = await self._get("cloudbilling", f"/v1/projects/{self._quoted_project}/billingInfo")
        if not answer.get("billingEnabled"):
            return failed(
                f"{project} has no billing account",
                "link one: kinetic up --billing-account ID, or "
                f"{CONSOLE}/billing/linkedaccount?project={project}",
            )
        return ok("enabled")

    async def _apis(self) -> Finding:
        """Check that the APIs that kinetic uses are enabled."""
        project = self._target.project
        query = [("names", f"projects/{project}/services/{api}") for api in APIS]
        path = f"/v1/projects/{self._quoted_project}/services:batchGet"
        answer = await self._get("serviceusage", path, *query)
        enabled = {
            service["name"].rpartition("/")[2]
            for service in answer.get("services") or ()
            if service.get("state") == "ENABLED"
        }
        if disabled := [api for api in APIS if api not in enabled]:
            return failed(
                ", ".join(f"{api} is disabled ({APIS[api]})" for api in disabled),
                "enable them: kinetic up, or "
                f"{CONSOLE}/flows/enableapi?apiid={','.join(disabled)}&project={project}",
            )
        return ok(f"all {len(APIS)} are enabled")

    async def _registry(self) -> Finding:
        """Check that the repository of bundled images exists."""
        from kinetic.aio.images.registry import build_settings

        image = build_settings(self._target).image
        host, *_, repository, _ = image.split("/")  # the project's ID may contain a domain
        location = host.removesuffix("-docker.pkg.dev")
        path = f"/v1/projects/{self._quoted_project}/locations/{location}/repositories/{repository}"
        try:
            await self._get("artifactregistry", path)
        except HttpError as refusal:
            if refusal.status != 404:
                raise
            return warning(
                f"there is no repository {repository!r} in {location}; bundled images need it",
                "create it: kinetic up; or name an image: container_image=",
            )
        return ok(image.rpartition("/")[0])

    async def _quotas(self) -> Finding:
        """Show the quotas for accelerators in the region."""
        region = self._target.region
        path = f"/compute/v1/projects/{self._quoted_project}/regions/{region}"
        answer = await self._get("compute", path)
        accelerator_quotas = [
            f"{quota['metric']} {quota.get('usage', 0):g} of {quota['limit']:g}"
            for quota in answer.get("quotas") or ()
            if str(quota.get("metric", "")).startswith(ACCELERATOR_PREFIXES)
            and quota.get("limit", 0) > 0
        ]
        if not accelerator_quotas:
            return warning(
                f"Compute Engine lists no quota for GPUs in {region}",
                f"request one: {CONSOLE}/iam-admin/quotas (only that page shows the quotas of "
                "TPUs and of some GPUs)",
            )
        return ok(f"{region}: {', '.join(sorted(accelerator_quotas))}")

    @property
    def _quoted_project(self) -> str:
        if self._target.project is None:
            raise ConfigurationError("no project is configured; set KINETIC_PROJECT")
        return urllib.parse.quote(self._target.project, safe=":")

    async def _get(self, api: str, path: str, *query: tuple[str, str]) -> dict[str, Any]:
        return await self._client.call(GoogleRequest(api, path, query))


def _check(name: str, probe: Callable[[], Awaitable[Finding]]) -> Check:
    """Return a check that is skipped if Google refuses its request permanently."""

    async def probe_if_permitted() -> Finding:
        try:
            return await probe()
        except HttpError as refusal:
            answer = f"({refusal.status}: {refusal.message})"
            if refusal.retryable:
                return warning(f"Google can't answer the request now {answer}", "try again later")
            return skipped(f"Google refused the request {answer}")

    return Check(name=name, group=GROUP, probe=probe_if_permitted, needs=("credentials",))
