"""The secrets with Docker Hub credentials, one pair for all clusters of a project."""

from __future__ import annotations

import base64
from typing import Any

from kinetic.aio._net.google import GoogleRequest
from kinetic.aio.images.docker_hub import TOKEN, USERNAME
from kinetic.aio.infra.resources import (
    Binding,
    Policy,
    Resource,
    call,
    policy,
    query,
    resource,
)
from kinetic.aio.infra.site import Site

API = "secretmanager"
SERVICE = f"{API}.googleapis.com"
READER_ROLE = "roles/secretmanager.secretAccessor"
"""The role that lets the service account of builds read these two secrets."""


def secret_resources(site: Site) -> tuple[Resource | Policy, ...]:
    """Return both secrets, each with the policy that lets the builds of *site* read it."""
    pairs = ((_secret(site, name), _policy(site, name)) for name in (USERNAME, TOKEN))
    return tuple(element for pair in pairs for element in pair)


def versions(site: Site, username: str, token: str) -> tuple[GoogleRequest, ...]:
    """Return the requests that add a version to each secret, the token's last."""
    return tuple(
        call(
            api=API,
            method="POST",
            path=f"projects/{site.project}/secrets/{name}:addVersion",
            body={"payload": {"data": base64.b64encode(value.encode()).decode()}},
        )
        for name, value in ((USERNAME, username), (TOKEN, token))
    )


def _secret(site: Site, name: str) -> Resource:
    body: dict[str, Any] = {"replication": {"automatic": {}}, "labels": {"kinetic": "true"}}
    return resource(
        "secret",
        name,
        API,
        f"projects/{site.project}/secrets",
        body,
        create_query=query(secretId=name),
    )


def _policy(site: Site, name: str) -> Policy:
    return policy(
        f"secret {name}",
        API,
        f"projects/{site.project}/secrets/{name}",
        Binding(role=READER_ROLE, member=f"serviceAccount:{site.account('builds')}"),
        needs=(f"secret {name}",),
    )
