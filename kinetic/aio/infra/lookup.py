"""Find what belongs to a site without knowing all of its name: its cluster, and policies."""

from __future__ import annotations

from typing import Any

from kinetic.aio._net.google import GoogleClient, is_disabled
from kinetic.aio._net.http import HttpError
from kinetic.aio.infra.apply import explained
from kinetic.aio.infra.pools import placement_policy
from kinetic.aio.infra.resources import Resource, call
from kinetic.aio.infra.setup import account
from kinetic.aio.infra.site import Site
from kinetic.errors import ConfigurationError, NotFound


async def location(google: GoogleClient, site: Site) -> str | None:
    """Return the zone or region of the site's cluster, or None if it has none."""
    path = f"projects/{site.project}/locations/-/clusters"
    try:
        answer = await google.call(call(api="container", method="GET", path=path))
    except HttpError as refusal:
        if refusal.status == 404 or is_disabled(refusal):
            return None
        raise explained("list the clusters of the project", refusal) from refusal
    there = {
        str(one["location"])
        for one in answer.get("clusters") or ()
        if one.get("name") == site.cluster
    }
    return next((one for one in (site.zone, site.region) if one in there), None)


async def cluster(google: GoogleClient, site: Site) -> dict[str, Any]:
    """Return Google's document of the site's cluster.

    Raises:
        NotFound: The cluster doesn't exist.
        ConfigurationError: It is an Autopilot cluster, which has no node pools.
    """
    found = await location(google, site) or site.zone
    if found != site.zone:
        raise ConfigurationError(
            f"{site.cluster} is an Autopilot cluster, which has no node pools: it makes "
            "nodes for jobs by itself"
        )
    path = f"projects/{site.project}/locations/{found}/clusters/{site.cluster}"
    try:
        return await google.call(call(api="container", method="GET", path=path))
    except HttpError as refusal:
        if refusal.status == 404 or is_disabled(refusal):
            raise NotFound(
                f"there is no cluster {site.cluster} in {site.zone} of "
                f"{site.project}; make one with `kinetic up`"
            ) from refusal
        raise explained(f"read the cluster {site.cluster}", refusal) from refusal


async def worker_accounts(google: GoogleClient, site: Site) -> list[Resource]:
    """Return the service accounts that the workers of other namespaces act as."""
    listing = call(api="iam", method="GET", path=f"projects/{site.project}/serviceAccounts")
    found: list[Resource] = []
    try:
        async for one in google.pages(listing, "accounts"):
            email = str(one["email"])
            if email != site.account("workers") and site.is_workers(email) and site.owns(one):
                found.append(account(site, "workers", email))
    except HttpError as refusal:
        if refusal.status != 404 and not is_disabled(refusal):
            raise explained("list the service accounts", refusal) from refusal
    return found


async def placement_policies(google: GoogleClient, site: Site) -> list[Resource]:
    """Return the placement policies that pools of this site needed."""
    parent = f"projects/{site.project}/regions/{site.region}/resourcePolicies"
    listing = call(api="compute", method="GET", path=parent)
    found: list[Resource] = []
    try:
        async for one in google.pages(listing, "items"):
            name = str(one["name"])
            if name.startswith(f"{site.prefix}-") and site.owns(one):
                found.append(placement_policy(site, name))
    except HttpError as refusal:
        if refusal.status != 404 and not is_disabled(refusal):
            raise explained("list the placement policies", refusal) from refusal
    return found
