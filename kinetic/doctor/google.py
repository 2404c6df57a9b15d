"""Checks of a GCP project: credentials, the project, its APIs, its registry and its quotas."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from kinetic.aio._net.http import HttpClient, HttpError, cut, json_object
from kinetic.aio._net.tokens import Credentials, with_token
from kinetic.configuration import Target
from kinetic.doctor.checks import Check, Finding, State
from kinetic.errors import ConfigurationError

GROUP = "project"
APIS: Mapping[str, str] = {
    "container.googleapis.com": "finding the cluster",
    "storage.googleapis.com": "the bucket of jobs",
    "compute.googleapis.com": "the machines",
    "cloudbuild.googleapis.com": "bundled images",
    "artifactregistry.googleapis.com": "bundled images",
}
"""What each is needed for."""

ACCELERATORS = ("NVIDIA_", "TPU", "PREEMPTIBLE_NVIDIA_", "PREEMPTIBLE_TPU")
ENABLED = "ENABLED"


class Google:
    """Google's APIs, as the application-default credentials may use them.

    For each, ``CLOUDSDK_API_ENDPOINT_OVERRIDES_<NAME>`` may name another address, as for gcloud.
    """

    def __init__(self, target: Target, environ: Mapping[str, str]) -> None:
        self._target = target
        self._environ = environ
        self._credentials = Credentials()
        self._http = HttpClient("the doctor", connect_s=10.0, idle_s=20.0, trust_env=True)

    def checks(self, *, cluster: bool) -> list[Check]:
        """Whether there are credentials; and of a GKE *cluster*, what its project has."""
        found = [Check(name="credentials", group="credentials", look=self._token)]
        if cluster:
            looks = {
                "project": self._project,
                "billing": self._billing,
                "APIs": self._apis,
                "registry": self._registry,
                "quotas": self._quotas,
            }
            found += [
                Check(name=name, group=GROUP, look=look, needs=("credentials",))
                for name, look in looks.items()
            ]
        return found

    async def aclose(self) -> None:
        """Close the connections."""
        await self._credentials.aclose()
        await self._http.aclose()

    async def _token(self) -> Finding:
        await self._credentials.get()
        return Finding(State.OK, f"Google accepts {self._credentials.whose}")

    async def _project(self) -> Finding:
        try:
            found = await self._ask("cloudresourcemanager", f"/v1/projects/{self._name}")
        except HttpError as refusal:
            if refusal.status not in (403, 404):
                raise
            return Finding(
                State.WARNING,
                f"{self._target.project} is not there, or may not be seen ({refusal.said})",
                "check KINETIC_PROJECT, or grant roles/browser; jobs run without that right",
            )
        state = found.get("lifecycleState")
        if state != "ACTIVE":
            return Finding(
                State.FAILED,
                f"{self._target.project} is {state}",
                f"gcloud projects undelete {self._target.project}, or set KINETIC_PROJECT",
            )
        return Finding(State.OK, f"{found.get('name') or self._target.project} is active")

    async def _billing(self) -> Finding:
        try:
            found = await self._ask("cloudbilling", f"/v1/projects/{self._name}/billingInfo")
        except HttpError as refusal:
            return _unseen(refusal)
        if not found.get("billingEnabled"):
            return Finding(
                State.FAILED,
                f"{self._target.project} has no billing account",
                f"gcloud billing projects link {self._target.project} --billing-account=ACCOUNT",
            )
        return Finding(State.OK, "enabled")

    async def _apis(self) -> Finding:
        names = [("names", f"projects/{self._target.project}/services/{one}") for one in APIS]
        path = f"/v1/projects/{self._name}/services:batchGet"
        try:
            found = await self._ask("serviceusage", path, names)
        except HttpError as refusal:
            return _unseen(refusal)
        services: list[dict[str, Any]] = found.get("services") or []
        on = {one["name"].rpartition("/")[2] for one in services if one.get("state") == ENABLED}
        if off := [one for one in APIS if one not in on]:
            return Finding(
                State.FAILED,
                ", ".join(f"{one} is off ({APIS[one]})" for one in off),
                f"gcloud services enable {' '.join(off)} --project {self._target.project}",
            )
        return Finding(State.OK, f"all {len(APIS)} are enabled")

    async def _registry(self) -> Finding:
        from kinetic.aio.images.registry import places

        host, project, repository, _ = places(self._target).image.split("/")
        location = host.removesuffix("-docker.pkg.dev")
        path = f"/v1/projects/{project}/locations/{location}/repositories/{repository}"
        try:
            await self._ask("artifactregistry", path)
        except HttpError as refusal:
            if refusal.status != 404:
                return _unseen(refusal)
            return Finding(
                State.WARNING,
                f"there is no repository {repository!r} in {location}: bundled images need it",
                f"gcloud artifacts repositories create {repository} --repository-format=docker "
                f"--location={location} --project={project}, or name an image: container_image=",
            )
        return Finding(State.OK, f"{host}/{project}/{repository}")

    async def _quotas(self) -> Finding:
        region = self._target.zone.rpartition("-")[0] or self._target.zone
        try:
            found = await self._ask(
                "compute", f"/compute/v1/projects/{self._name}/regions/{region}"
            )
        except HttpError as refusal:
            return _unseen(refusal)
        quotas: list[dict[str, Any]] = found.get("quotas") or []
        some = [
            f"{one['metric']} {one.get('usage', 0):g} of {one['limit']:g}"
            for one in quotas
            if str(one.get("metric", "")).startswith(ACCELERATORS) and one.get("limit", 0) > 0
        ]
        if not some:
            return Finding(
                State.WARNING,
                f"{self._target.project} has no quota for GPUs in {region} that is told here",
                "ask for one: https://console.cloud.google.com/iam-admin/quotas (those of TPUs "
                "and of some GPUs are told there only)",
            )
        return Finding(State.OK, f"{region}: {', '.join(sorted(some))}")

    @property
    def _name(self) -> str:
        if self._target.project is None:
            raise ConfigurationError("no project is configured; set KINETIC_PROJECT")
        return urllib.parse.quote(self._target.project, safe=":")

    async def _ask(
        self, api: str, path: str, query: Sequence[tuple[str, str]] = ()
    ) -> dict[str, Any]:
        """What one of Google's APIs answers to a GET.

        Raises:
            HttpError: It refuses.
            Unavailable: It does not answer.
        """
        from yarl import URL

        variable = f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{api.upper()}"
        server = (self._environ.get(variable) or f"https://{api}.googleapis.com").rstrip("/")
        url = URL(server + path, encoded=True).update_query(query)

        async def once(token: str) -> dict[str, Any]:
            headers = {"Authorization": f"Bearer {token}"}
            request = self._http.session().get(url, headers=headers, allow_redirects=False)
            answer = await self._http.answered(request)
            try:
                return json_object(await answer.text())
            finally:
                cut(answer)

        with self._http.translated(f"cannot ask {api}", server):
            return await with_token(self._credentials, once)


def _unseen(refusal: HttpError) -> Finding:
    return Finding(State.SKIPPED, f"it may not be looked at ({refusal.status}: {refusal.said})")
