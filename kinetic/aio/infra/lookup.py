"""Find a site's project, and the resources whose names or locations kinetic can't compute."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kinetic.aio._net.google import GoogleClient, is_disabled
from kinetic.aio._net.http import HttpError
from kinetic.aio.infra.apply import list_items, refusal_error
from kinetic.aio.infra.pools import placement_policy
from kinetic.aio.infra.resources import Document, Resource, call, query
from kinetic.aio.infra.setup import Setup, service_account
from kinetic.aio.infra.site import Site
from kinetic.errors import ConfigurationError, NotFound, Unavailable

SUBMISSION = re.compile(r"(?:^|/)(?:jobs|batches)/((?:job|grp)-[^/]+)/")
"""The part of an object's name that has the ID of a job or batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BillingAccount:
    """An open billing account that the user can see; ``id`` is like ``012345-6789AB-CDEF01``."""

    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Namesakes:
    """The clusters of a project that have the site's cluster name, by location.

    ``unlisted`` are the zones whose clusters Google couldn't list: they may have more. ``disabled``
    is Google's message if the project that pays for the request has disabled the API of GKE.
    """

    site: Site
    clusters: Mapping[str, Document]
    unlisted: tuple[str, ...] = ()
    disabled: str = ""

    @property
    def location(self) -> str:
        """Return where the site's cluster is: its zone, or its region if the cluster is regional.

        If there is no such cluster, return the site's zone.
        """
        site = self.site
        is_regional = site.region in self.clusters and site.zone not in self.clusters
        return site.region if is_regional else site.zone

    @property
    def cluster(self) -> Document | None:
        """Return Google's document of the site's cluster; None if absent."""
        return self.clusters.get(self.location)

    @property
    def others(self) -> tuple[str, ...]:
        """Return the other locations that have a cluster of this name."""
        return tuple(sorted({*self.clusters} - {self.location}))

    @property
    def there(self) -> Site:
        """Return the site with the location of its cluster as the zone."""
        return replace(self.site, zone=self.location)

    def check_complete(self) -> None:
        """Refuse to act on a listing that may lack a cluster.

        Raises:
            Unavailable: Google couldn't list the clusters of all zones.
        """
        if self.unlisted:
            raise Unavailable(
                f"Google can't list the clusters of {', '.join(self.unlisted)} now, so a cluster "
                f"{self.site.cluster} may be there; run the command again later",
                retryable=True,
            )

    def check_location(self) -> None:
        """Refuse the site's zone if only other locations have a cluster of this name.

        Raises:
            ConfigurationError: The cluster is elsewhere.
        """
        if self.cluster is None and self.others:
            places = [f"{where} ({self.clusters[where].get('status')})" for where in self.others]
            raise ConfigurationError(
                f"the cluster {self.site.cluster} of {self.site.project} isn't in "
                f"{self.site.zone}, but in {', '.join(places)}; pass --zone {self.others[0]}, or "
                "another --cluster"
            )


def setup_at(there: Site) -> Setup:
    """Return the setup of a cluster: Autopilot in a region, Standard in a zone."""
    return Setup(site=there, shape="autopilot" if there.zone == there.region else "standard")


async def find_namesakes(google: GoogleClient, site: Site) -> Namesakes:
    """Find the clusters of the site's name in all locations of the project."""
    request = call("container", "GET", f"projects/{site.project}/locations/-/clusters")
    try:
        answer = await google.call(request)
    except HttpError as refusal:
        if refusal.status == 404 or is_disabled(refusal):
            disabled = refusal.message if is_disabled(refusal) else ""
            return Namesakes(site=site, clusters={}, disabled=disabled)
        raise refusal_error("list the clusters of the project", refusal) from refusal
    clusters = {
        str(document["location"]): document
        for document in answer.get("clusters") or ()
        if document.get("name") == site.cluster
    }
    missing = sorted({*(answer.get("missingZones") or ())} - {*clusters})
    return Namesakes(site=site, clusters=clusters, unlisted=tuple(missing))


async def find_cluster(google: GoogleClient, site: Site) -> Namesakes:
    """Find the site's cluster, and its namesakes.

    Raises:
        ConfigurationError: The cluster is only in other locations.
        NotFound: The project has no cluster of this name.
        Unavailable: Google couldn't list all clusters, and lists none in the site's zone.
    """
    found = await find_namesakes(google, site)
    if found.cluster is None:
        found.check_complete()
        found.check_location()
        raise NotFound(
            f"there is no cluster {site.cluster} in {site.zone} of {site.project}; make one with "
            "`kinetic up`"
        )
    return found


async def describe_contents(google: GoogleClient, bucket: str, limit_s: float) -> str:
    """Return how many objects, jobs, and batches a bucket has, as text.

    Stop counting after *limit_s* seconds, and say so.
    """
    fields = query(fields="nextPageToken,items(name)")
    listing = call("storage", "GET", f"b/{bucket}/o", query=fields)
    object_count, ids, rest = 0, set[str](), ""
    try:
        async with asyncio.timeout(limit_s):
            async for item in google.list_items(listing, "items"):
                object_count += 1
                if match := SUBMISSION.search(str(item["name"])):
                    ids.add(match[1])
    except TimeoutError:
        rest = f", and those that kinetic couldn't count in {limit_s:g} s"
    except HttpError as refusal:
        raise refusal_error(f"list the objects of {bucket}", refusal) from refusal
    batch_count = sum(submission.startswith("grp-") for submission in ids)
    job_count = len(ids) - batch_count
    return f"objects: {object_count:,}, jobs: {job_count:,}, batches: {batch_count:,}{rest}"


async def list_outliving(google: GoogleClient, site: Site, *, shares_network: bool) -> list[str]:
    """Return the disks and load balancers that outlive the cluster.

    GKE makes disks for volumes, and forwarding rules (load balancers) for Services. Such a resource
    belongs to the cluster if its labels have the cluster's name and no other location. Unless
    another cluster *shares_network*, all forwarding rules in the network also belong to it.
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
                    belongs = belongs or not shares_network
                if belongs:
                    found.append(f"{kind} {document['name']} ({zone_or_region})")
    except HttpError as refusal:
        if not is_disabled(refusal):
            raise refusal_error("list disks and load balancers", refusal) from refusal
    return found


async def list_worker_accounts(google: GoogleClient, site: Site) -> list[Resource]:
    """Return the service accounts of jobs in namespaces other than the site's."""
    listing = call("iam", "GET", f"projects/{site.project}/serviceAccounts")
    return [
        service_account(site, "workers", email)
        async for document in list_items(google, listing, "accounts")
        if (email := str(document["email"])) != site.account("workers")
        and site.is_workers(email)
        and site.owns(document)
    ]


async def list_placement_policies(google: GoogleClient, site: Site) -> list[Resource]:
    """Return the placement policies that kinetic made for pools of this site."""
    parent = f"projects/{site.project}/regions/{site.region}/resourcePolicies"
    listing = call("compute", "GET", parent)
    return [
        placement_policy(site, str(document["name"]))
        async for document in list_items(google, listing, "items")
        if str(document["name"]).startswith(f"{site.prefix}-") and site.owns(document)
    ]


async def read(google: GoogleClient, resource: Resource) -> Document | None:
    """Return the document of *resource*; None if it is absent, or the user can't see it."""
    try:
        return await google.call(resource.read)
    except HttpError as refusal:
        if refusal.status in (403, 404) or is_disabled(refusal):
            return None
        raise refusal_error(f"read the {resource.key}", refusal) from refusal


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
