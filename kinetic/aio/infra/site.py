"""A site (a cluster and all it needs), the names of its resources, and their labels."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kinetic.configuration import Target
from kinetic.errors import ConfigurationError

CONTINENTS = ("us", "europe", "asia")
CLUSTER_NAME = re.compile(r"[a-z]([a-z0-9-]{0,17}[a-z0-9])?", re.ASCII)
"""The form of a cluster's name: at most 19 characters, because the name of the service account
`kn-CLUSTER-workers` may have only 30."""

NAMESPACE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
"""The form of a namespace, a DNS label. IAM conditions contain it, so it must have no quotes."""

MAX_BUCKET_NAME = 63
ZONE_NAME = re.compile(r"[a-z]+-[a-z]+[0-9]+(-[a-z]|-ai[0-9]+[a-z])?", re.ASCII)
"""The form of a zone, also of one only for accelerators, or of an Autopilot cluster's region."""

PROJECT_ID = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]", re.ASCII)
SOLUTION_LABEL = "goog-packaged-solution"
CLUSTER_LABEL = "kinetic-cluster"
KINETIC_LABEL = "kinetic"
"""The label of nodes and ComputeClasses of kinetic; its value is ``true``."""

UNLABELED_KINDS = ("network", "subnetwork", "router")
"""Kinds of resources that keras-kinetic doesn't label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A cluster on Google Cloud and all it needs; these fields determine the names of resources.

    ``zone`` may be the region of an Autopilot cluster.
    """

    project: str
    zone: str
    cluster: str
    namespace: str = "default"

    @classmethod
    def of(cls, target: Target) -> Self:
        """Return the site of *target*; refuse one that isn't on Google Cloud."""
        project, zone, namespace = target.project or "", target.zone, target.namespace
        return cls(project=project, zone=zone, cluster=target.cluster, namespace=namespace)

    def __post_init__(self) -> None:
        for setting, value, pattern, example in (
            ("project", self.project, PROJECT_ID, "my-project-1"),
            ("zone", self.zone, ZONE_NAME, "us-central1-a"),
            ("cluster", self.cluster, CLUSTER_NAME, "kinetic-cluster"),
            ("namespace", self.namespace, NAMESPACE_NAME, "default"),
        ):
            if not value:
                raise ConfigurationError(
                    f"a cluster on Google Cloud needs a {setting}: pass --{setting}, or set "
                    f"KINETIC_{setting.upper()}; to join any other cluster, run `kinetic init`"
                )
            if not pattern.fullmatch(value):
                raise ConfigurationError(
                    f"{value!r} can't be a {setting}'s name; name one like {example!r}"
                    + (", with at most 19 characters" if setting == "cluster" else "")
                )

        if len(bucket := self.bucket("builds")) > MAX_BUCKET_NAME:
            raise ConfigurationError(
                f"the bucket {bucket} would have {len(bucket)} characters, and Google allows "
                f"{MAX_BUCKET_NAME}; choose a shorter --cluster"
            )

    @property
    def region(self) -> str:
        """Return the region of the zone, such as ``us-central1``."""
        return "-".join(self.zone.split("-")[:2])

    @property
    def registry(self) -> str:
        """Return the image registry's location: a continent if Google offers it, or a region."""
        continent = self.region.partition("-")[0]
        return continent if continent in CONTINENTS else self.region

    @property
    def prefix(self) -> str:
        """Return the prefix of resource names, which is also the name of network and repository."""
        return f"kn-{self.cluster}"

    def bucket(self, purpose: str) -> str:
        """Return the name of the bucket for *purpose*: ``jobs`` or ``builds``."""
        return f"{self.project.replace(':', '-').replace('.', '-')}-{self.prefix}-{purpose}"

    def account(self, purpose: str) -> str:
        """Return the service account's e-mail for *purpose*: ``nodes``, ``workers``, ``builds``.

        The jobs (``workers``) of each namespace have a separate account, so that they can't read
        another namespace's objects.
        """
        if purpose == "workers" and self.namespace != "default":
            # A hash, because Google allows 30 characters for the name of an account.
            purpose = "w" + hashlib.sha256(self.namespace.encode()).hexdigest()[:6]
        domain, _, name = self.project.rpartition(":")
        owner = f"{name}.{domain}" if domain else name
        return f"{self.prefix}-{purpose}@{owner}.iam.gserviceaccount.com"

    def is_workers(self, email: str) -> bool:
        """Return whether *email* is the account of the workers of some namespace."""
        name = re.escape(self.prefix)
        return bool(re.fullmatch(rf"{name}-(workers|w[0-9a-f]{{6}})@.*", email, re.ASCII))

    @property
    def store(self) -> str:
        """Return where the jobs of the namespace keep their objects."""
        return f"gs://{self.bucket('jobs')}/{self.namespace}"

    @property
    def identity_pool(self) -> str:
        """Return the workload identity pool of the project's clusters."""
        return f"{self.project}.svc.id.goog"

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels that mark kinetic's resources."""
        return {KINETIC_LABEL: "true", SOLUTION_LABEL: "kinetic", CLUSTER_LABEL: self.cluster}

    @property
    def description(self) -> str:
        """Return the description that marks kinetic's resources of kinds without labels."""
        return f"kinetic cluster={self.cluster}"

    def owns(self, document: Mapping[str, Any]) -> bool:
        """Return whether *document*, a resource with one of kinetic's names, has kinetic's labels.

        Marks of the package keras-kinetic also count: labels that don't name the cluster, and the
        display names of service accounts. keras-kinetic doesn't mark networks and routers.
        """
        labels: Mapping[str, Any] = document.get("resourceLabels") or document.get("labels") or {}
        if labels:
            return bool(labels.get(CLUSTER_LABEL) == self.cluster) or (
                CLUSTER_LABEL not in labels and labels.get(SOLUTION_LABEL) == "kinetic"
            )
        description = str(document.get("description") or "")
        display_name = str(document.get("displayName") or "")
        return description == self.description or display_name.startswith(
            f"kinetic {self.cluster} "
        )


def is_our_pool(document: Mapping[str, Any]) -> bool:
    """Return whether kinetic or keras-kinetic made a node pool: both label the pool's nodes."""
    config: Mapping[str, Any] = document.get("config") or {}
    labels: Mapping[str, Any] = config.get("labels") or {}
    return bool(labels.get(KINETIC_LABEL) == "true")


def is_gkes_pool(document: Mapping[str, Any]) -> bool:
    """Return whether GKE made a node pool for pods, and removes it when its nodes are idle."""
    scaling: Mapping[str, Any] = document.get("autoscaling") or {}
    return bool(scaling.get("autoprovisioned"))
