"""Find a site's project, and the resources whose names or locations kinetic can't compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kinetic.aio._net.google import GoogleClient, is_disabled
from kinetic.aio._net.http import HttpError
from kinetic.aio.infra.apply import list_items, refusal_error
from kinetic.aio.infra.pools import placement_policy
from kinetic.aio.infra.resources import Document, Resource, call
from kinetic.aio.infra.setup import Setup, billing_link, project_resource, service_account
from kinetic.aio.infra.site import Site
from kinetic.errors import NotFound, Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class BillingAccount:
    """An open billing account that the user can see; ``id`` is like ``012345-6789AB-CDEF01``."""

    id: str
    name: str


async def find_cluster(google: GoogleClient, site: Site) -> dict[str, Any] | None:
    """Return Google's document of the cluster in the site's zone or region; None if absent."""
    request = call("container", "GET", f"projects/{site.project}/locations/-/clusters")
    try:
        answer = await google.call(request)
    except HttpError as refusal:
        if refusal.status == 404 or is_disabled(refusal):
            return None
        raise refusal_error("list the clusters of the project", refusal) from refusal
    found: dict[str, dict[str, Any]] = {
        str(document["location"]): document
        for document in answer.get("clusters") or ()
        if document.get("name") == site.cluster
    }
    missing = {*(answer.get("missingZones") or ())}
    if unlisted := {site.zone, site.region} & missing - set(found):
        raise Unavailable(
            f"Google can't list the clusters of {', '.join(sorted(unlisted))} now; run the "
            "command again later",
            retryable=True,
        )
    return found.get(site.zone) or found.get(site.region)


async def setup_of(google: GoogleClient, site: Site) -> Setup:
    """Return the setup of *site*: the shape is Autopilot if its cluster is regional."""
    cluster = await find_cluster(google, site) or {}
    regional = site.region in (site.zone, cluster.get("location"))
    return Setup(site=site, shape="autopilot" if regional else "standard")


async def read_cluster(google: GoogleClient, site: Site) -> dict[str, Any]:
    """Return Google's document of the site's cluster."""
    if (cluster := await find_cluster(google, site)) is None:
        raise NotFound(
            f"there is no cluster {site.cluster} in {site.zone} of {site.project}; make one with "
            "`kinetic up`"
        )
    return cluster


async def list_outliving(google: GoogleClient, site: Site) -> list[str]:
    """Return the disks and load balancers that outlive the cluster.

    GKE makes disks for volumes, and forwarding rules (load balancers) for Services. Such a resource
    belongs to the cluster if its labels have the cluster's name and no other location. All
    forwarding rules in the network that `up` made also belong to the cluster.
    """
    found: list[str] = []
    try:
        for kind, items_field in (("disk", "disks"), ("forwarding rule", "forwardingRules")):
            path = f"projects/{site.project}/aggregated/{items_field}"
            listing = call("compute", "GET", path)
            async for zone_or_region, document in google.list_aggregated(listing, items_field):
                labels: Document = document.get("labels") or {}
                belongs = labels.get("goog-k8s-cluster-name") == site.cluster and (
                    labels.get("goog-k8s-cluster-location") in (None, site.zone, site.region)
                )
                if kind == "disk":
                    belongs = belongs and "goog-gke-volume" in labels
                elif str(document.get("network")).endswith(f"/networks/{site.prefix}"):
                    belongs = True
                if belongs:
                    found.append(f"{kind} {document['name']} ({zone_or_region})")
    except HttpError as refusal:
        if not is_disabled(refusal):
            raise refusal_error("list disks and load balancers", refusal) from refusal
    return found


async def list_worker_accounts(google: GoogleClient, site: Site) -> list[Resource]:
    """Return the service accounts of jobs in namespaces other than the site's."""
    listing = call("iam", "GET", f"projects/{site.project}/serviceAccounts")
    found: list[Resource] = []
    async for account_document in list_items(google, listing, "accounts"):
        email = str(account_document["email"])
        if (
            email != site.account("workers")
            and site.is_workers(email)
            and site.owns(account_document)
        ):
            found.append(service_account(site, "workers", email))
    return found


async def list_placement_policies(google: GoogleClient, site: Site) -> list[Resource]:
    """Return the placement policies that kinetic made for pools of this site."""
    parent = f"projects/{site.project}/regions/{site.region}/resourcePolicies"
    listing = call("compute", "GET", parent)
    return [
        placement_policy(site, str(document["name"]))
        async for document in list_items(google, listing, "items")
        if str(document["name"]).startswith(f"{site.prefix}-") and site.owns(document)
    ]


async def _read(google: GoogleClient, resource: Resource) -> Document | None:
    """Return the document of *resource*; None if it is absent, or the user can't see it."""
    try:
        return await google.call(resource.read)
    except HttpError as refusal:
        if refusal.status in (403, 404) or is_disabled(refusal):
            return None
        raise refusal_error(f"read the {resource.key}", refusal) from refusal


async def project_exists(google: GoogleClient, site: Site) -> bool:
    """Return whether the project exists; False also if the user can't see it."""
    return await _read(google, project_resource(site)) is not None


async def is_billed(google: GoogleClient, site: Site) -> bool:
    """Return whether the project has a billing account; False also if the user can't see it."""
    answer = await _read(google, billing_link(site, ""))
    return bool((answer or {}).get("billingEnabled"))


async def list_billing_accounts(google: GoogleClient) -> list[BillingAccount]:
    """Return the open billing accounts that the user can see."""
    listing = call("cloudbilling", "GET", "billingAccounts")
    try:
        return [
            BillingAccount(
                id=str(account["name"]).rpartition("/")[2],
                name=str(account.get("displayName") or ""),
            )
            async for account in google.list_items(listing, "billingAccounts")
            if account.get("open")
        ]
    except HttpError as refusal:
        raise refusal_error("list the billing accounts", refusal) from refusal
