"""Where a cluster's images are, and who builds them; pure.

The names are those that the cluster's own set-up gives them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kinetic import configuration
from kinetic.errors import ConfigurationError

__all__ = ["Places", "checked_uri", "places", "registry_of"]

CONTINENTS = ("us", "europe", "asia")
EMULATOR = "ARTIFACT_REGISTRY_EMULATOR_HOST"

_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]+)?|\[[0-9a-f:]+\](?::[0-9]+)?)"
_PATH = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_URI = re.compile(
    rf"(?:{_HOST}/)?{_PATH}(?:/{_PATH})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
    r"(?:@[a-z0-9]+:[0-9a-f]{32,})?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """``image`` is the name of bundled images without their tag."""

    project: str
    image: str
    service_account: str


def places(target: configuration.Target, registry: str = "") -> Places:
    """The places of *target*'s cluster; *registry* stands for the project's own host.

    Raises:
        ConfigurationError: It has no project.
    """
    project = target.project
    if project is None:
        raise ConfigurationError(
            "bundled images are built by Cloud Build in a GCP project, and none is configured: "
            'pass project= or set KINETIC_PROJECT, or name an image with container_image="..."'
        )
    region = target.zone.rpartition("-")[0] or target.zone
    continent = region.partition("-")[0]
    location = continent if continent in CONTINENTS else region
    host = registry or f"{location}-docker.pkg.dev"
    return Places(
        project=project,
        # A project of a domain (example.com:name) is a path of its own there.
        image=f"{host}/{project.replace(':', '/')}/kn-{target.cluster}/base",
        service_account=_account(project, target.cluster),
    )


def _account(project: str, cluster: str) -> str:
    domain, _, name = project.rpartition(":")
    address = f"{name}.{domain}" if domain else name
    account = f"kn-{cluster}-builds@{address}.iam.gserviceaccount.com"
    return f"projects/{project}/serviceAccounts/{account}"


def registry_of(uri: str) -> str:
    """The host of an image's registry; empty for Docker Hub."""
    first, slash, _ = uri.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else ""


def checked_uri(uri: str) -> str:
    """*uri*, if it can be the name of an image.

    Raises:
        ConfigurationError: It cannot.
    """
    if _URI.fullmatch(uri) is None:
        hint = "leave the scheme out" if "://" in uri else "write it as registry/name:tag"
        raise ConfigurationError(
            f"container_image={uri!r} is no name of a container image: {hint}, or use "
            '"bundled" or "prebuilt"'
        )
    return uri
