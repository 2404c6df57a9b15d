"""Open a site on the stand-in of Google's APIs, and set it up, remove, or interrupt it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from kinetic.aio._net.google import GoogleClient
from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.infra import Infrastructure, Planned, Site
from kinetic.aio.kubernetes.access import Access, ClusterCredentials
from tests.infra.google import Google

QUICK = RetryPolicy(total_s=2.0, first_pause_s=0.001, longest_pause_s=0.01)


class Tokens:
    """Credentials of Google that never expire."""

    quota_project: str | None = None

    async def get(self) -> str:
        return "token"

    def forget(self, value: str) -> None:
        pass

    async def aclose(self) -> None:
        pass


class ClusterPasses:
    """Credentials for the cluster that never expire."""

    async def get(self) -> ClusterCredentials:
        return ClusterCredentials()

    def forget(self, value: ClusterCredentials) -> None:
        pass

    async def aclose(self) -> None:
        pass


def client(google: Google) -> GoogleClient:
    """Return a client of *google* that hardly pauses."""
    credentials: Any = Tokens()
    return GoogleClient(google.environ, QUICK, first_pause_s=0.001, credentials=credentials)


def opened(
    google: Google,
    site: Site,
    look_s: float = 30.0,
    connect: Callable[[], Awaitable[Access]] | None = None,
) -> Infrastructure:
    """Return the infrastructure of *site* on *google* and its stand-in of a cluster.

    With *connect*, use another cluster instead of the stand-in.
    """

    async def stand_in() -> Access:
        return Access(
            server=f"{google.url}/kubernetes/{site.cluster}",
            name="the cluster",
            credentials=ClusterPasses(),
        )

    return Infrastructure(
        site,
        environ=google.environ,
        google=client(google),
        connect=connect or stand_in,
        look_s=look_s,
    )


async def up(infra: Infrastructure) -> Planned:
    planned = await infra.plan_up()
    await infra.apply(planned)
    return planned


async def down(infra: Infrastructure, *, force_destroy: bool = True) -> Planned:
    planned = await infra.plan_down(force_destroy=force_destroy)
    await infra.apply(planned)
    return planned


async def cut_off(
    google: Google, work: Coroutine[Any, Any, object], number: int, when: str = "after"
) -> None:
    """Cancel *work* just "before" or "after" its write *number*."""
    start, task = google.writes, asyncio.ensure_future(work)

    def cancel(at: int, moment: str, request: str) -> None:
        if (at - start, moment) == (number, when):
            task.cancel()

    google.on_write = cancel
    with pytest.raises(asyncio.CancelledError):
        await task
    google.on_write = lambda number, when, request: None


def public_package(google: Google) -> None:
    """Create the resources that the public package's `up` creates, with its labels."""
    labels = {"goog-packaged-solution": "kinetic"}
    google.enabled |= {
        f"{api}.googleapis.com"
        for api in ("compute", "container", "storage", "artifactregistry", "iam")
    }
    project = "projects/acme-1"
    resources = {
        f"artifactregistry/v1/{project}/locations/us/repositories/kn-lab": {
            "name": "kn-lab",
            "labels": labels,
        },
        "storage/storage/v1/b/acme-1-kn-lab-jobs": {"labels": labels},
        "storage/storage/v1/b/acme-1-kn-lab-builds": {"labels": labels},
        f"compute/compute/v1/{project}/global/networks/kn-lab": {
            "name": "kn-lab",
            "autoCreateSubnetworks": True,
        },
        f"compute/compute/v1/{project}/regions/us-central1/routers/kn-lab-router": {
            "name": "kn-lab-router",
            "network": f"{project}/global/networks/kn-lab",
        },
        f"container/v1/{project}/locations/us-central1-a/clusters/lab": {
            "name": "lab",
            "location": "us-central1-a",
            "status": "RUNNING",
            "resourceLabels": {"kinetic": "true", **labels},
            "releaseChannel": {"channel": "STABLE"},
            "workloadIdentityConfig": {"workloadPool": "acme-1.svc.id.goog"},
        },
    }
    for role in ("nodes", "builds"):
        email = f"kn-lab-{role}@acme-1.iam.gserviceaccount.com"
        resources[f"iam/v1/{project}/serviceAccounts/{email}"] = {
            "displayName": f"kinetic lab {role.removesuffix('s')} SA"
        }
    google.documents |= resources


def state_of(google: Google) -> dict[str, object]:
    """Return all resources and policies, without the etags that every change renews."""
    policies = {
        key: sorted(str(binding) for binding in policy["bindings"])
        for key, policy in google.policies.items()
    }
    return {
        "documents": dict(google.documents),
        "policies": policies,
        "objects": dict(google.objects),
        "enabled": set(google.enabled),
    }
