"""A site on the stand-in of Google's APIs, and what tests do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from kinetic.aio._net.google import GoogleClient
from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.infra import Infrastructure, Planned, Site
from kinetic.aio.kubernetes.credentials import Access, ClusterCredentials
from tests.infra.google import Google

QUICK = RetryPolicy(total_s=2.0, first_pause_s=0.001, longest_pause_s=0.01)


class Tokens:
    """Credentials that never end."""

    quota_project: str | None = None

    async def get(self) -> str:
        return "token"

    def forget(self, value: str) -> None:
        pass

    async def aclose(self) -> None:
        pass


class Passes:
    """Credentials for the cluster that never end."""

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
    """Return the infrastructure of *site* as *google* and its stand-in of a cluster have it.

    *connect* leads to another cluster than the stand-in.
    """

    async def stand_in() -> Access:
        return Access(
            server=f"{google.url}/kubernetes/{site.cluster}",
            name="the cluster",
            credentials=Passes(),
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

    def kill(at: int, moment: str, what: str) -> None:
        if (at - start, moment) == (number, when):
            task.cancel()

    google.on_write = kill
    with pytest.raises(asyncio.CancelledError):
        await task
    google.on_write = lambda number, when, what: None


def public_package(google: Google) -> None:
    """Make what the public package's `up` makes, with its marks."""
    labels = {"goog-packaged-solution": "kinetic"}
    google.enabled |= {
        f"{one}.googleapis.com"
        for one in ("compute", "container", "storage", "artifactregistry", "iam")
    }
    project = "projects/acme-1"
    at = {
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
    for what in ("nodes", "builds"):
        email = f"kn-lab-{what}@acme-1.iam.gserviceaccount.com"
        at[f"iam/v1/{project}/serviceAccounts/{email}"] = {
            "displayName": f"kinetic lab {what.removesuffix('s')} SA"
        }
    google.documents |= at


def made(google: Google) -> dict[str, object]:
    """Return all that exists, without what each change makes new."""
    policies = {
        key: sorted(str(one) for one in policy["bindings"])
        for key, policy in google.policies.items()
    }
    return {
        "documents": dict(google.documents),
        "policies": policies,
        "objects": dict(google.objects),
        "enabled": set(google.enabled),
    }
