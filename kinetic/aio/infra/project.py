"""Create the project and link its billing account, if you ask `up` for it. `down` keeps both."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kinetic.aio._net.google import GoogleClient, is_disabled
from kinetic.aio._net.http import HttpError
from kinetic.aio.infra.apply import refusal_error
from kinetic.aio.infra.resources import Document, Resource, call
from kinetic.aio.infra.site import Site
from kinetic.errors import ConfigurationError

PARENT_NAME = re.compile("(organizations|folders)/[0-9]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class BillingAccount:
    """An open billing account that you can see; ``id`` is like ``012345-6789AB-CDEF01``."""

    id: str
    name: str


def check_parent(parent: str, *, creates: bool) -> None:
    """Check *parent*, a new project's folder or organization; *creates* says if `up` creates one.

    Raises:
        ConfigurationError: *parent* is malformed, or is set although `up` creates no project.
    """
    if parent and not creates:
        raise ConfigurationError(
            f"the parent {parent} is for a new project; pass --create-project as well"
        )
    if parent and not PARENT_NAME.fullmatch(parent):
        raise ConfigurationError(
            f"{parent!r} can't be a project's parent; name one like 'organizations/123' or "
            "'folders/456'"
        )


def project_resource(site: Site, parent: str = "") -> Resource:
    """Return the project, in the organization or folder *parent* if one is named."""
    path = f"projects/{site.project}"
    api = "cloudresourcemanager"
    parent_field = {"parent": parent} if parent else {}
    names = {"projectId": site.project, "displayName": site.project}
    body = {**names, "labels": {"kinetic": "true"}, **parent_field}
    return Resource(
        kind="project",
        name=site.project,
        read=call(api=api, method="GET", path=path),
        create=call(api=api, method="POST", path="projects", body=body),
        reported_fields=parent_field,
        description=f"in {parent}" if parent else "",
    )


def billing_link(site: Site, account_id: str) -> Resource:
    """Return the link of the project to the billing account *account_id*."""
    path = f"projects/{site.project}/billingInfo"
    body = {"billingAccountName": f"billingAccounts/{account_id.removeprefix('billingAccounts/')}"}
    set_account = call(api="cloudbilling", method="PUT", path=path, body=body)
    return Resource(
        kind="billing",
        name=site.project,
        read=call(api="cloudbilling", method="GET", path=path),
        create=set_account,
        update=set_account,
        wanted_fields=body,
        needs=(f"project {site.project}",),
    )


async def _read(google: GoogleClient, resource: Resource) -> Document | None:
    """Return the document of *resource*; None if it doesn't exist, or you may not see it."""
    try:
        return await google.call(resource.read)
    except HttpError as refusal:
        if refusal.status in (403, 404) or is_disabled(refusal):
            return None
        raise refusal_error(f"read the {resource.key}", refusal) from refusal


async def exists(google: GoogleClient, site: Site) -> bool:
    """Return whether the project exists; False also if you may not see it."""
    return await _read(google, project_resource(site)) is not None


async def is_billed(google: GoogleClient, site: Site) -> bool:
    """Return whether the project has a billing account; False also if you may not see it."""
    answer = await _read(google, billing_link(site, ""))
    return bool((answer or {}).get("billingEnabled"))


async def accounts(google: GoogleClient) -> list[BillingAccount]:
    """Return the open billing accounts that you can see."""
    listing = call(api="cloudbilling", method="GET", path="billingAccounts")
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
