"""A site on the stand-in of Google's APIs, and what tests do with it."""

from __future__ import annotations

from typing import Any

from kinetic.aio._net.google import GoogleClient
from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.infra import Infrastructure, Planned, Site
from kinetic.aio.kubernetes.credentials import Access, ClusterCredentials
from tests.infra.google import Google

QUICK = RetryPolicy(total_s=2.0, first_s=0.001, longest_s=0.01)


class Tokens:
    """Credentials that never end."""

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
    return GoogleClient(google.environ, QUICK, look_s=0.001, credentials=credentials)


def opened(google: Google, site: Site) -> Infrastructure:
    """Return the infrastructure of *site* as *google* and its stand-in of a cluster have it."""

    async def connect() -> Access:
        return Access(
            server=f"{google.url}/kubernetes/{site.cluster}", name="the cluster", passes=Passes()
        )

    return Infrastructure(site, environ=google.environ, google=client(google), connect=connect)


async def up(infra: Infrastructure) -> Planned:
    planned = await infra.plan_up()
    await infra.apply(planned)
    return planned


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
