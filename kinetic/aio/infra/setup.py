"""Describe the resources that `kinetic up` creates for a site. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kinetic.accelerators import GPUS, TPUS
from kinetic.aio._net.google import GoogleRequest
from kinetic.aio.infra.resources import Binding, Policy, Resource, call, policy, query, resource
from kinetic.aio.infra.site import KINETIC_LABEL, Site
from kinetic.errors import ConfigurationError

SERVICES = tuple(
    f"{name}.googleapis.com"
    for name in (
        "artifactregistry",
        "cloudbuild",
        "cloudresourcemanager",
        "compute",
        "container",
        "iam",
        "iamcredentials",
        "secretmanager",
        "serviceusage",
        "storage",
    )
)
SYSTEM_MACHINES = ("e2-standard-4", "n2-standard-4", "n2d-standard-4", "n1-standard-4")
"""Machine types for the cluster's own pods, the preferred one first; TPU-only zones have no e2."""

SYSTEM_POOL = "system"
SYSTEM_NODES = 10
"""Maximum number of nodes for the cluster's own pods."""

SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
MAX_CPUS, MAX_MEMORY_GB = "1000000", "10000000"
"""Limits of node auto-provisioning. All nodes count, so a low limit would stop large TPU slices."""

MAX_ACCELERATORS = "10000"
OBJECTS_ROLE = "roles/storage.objectUser"
"""The role of pods in the bucket of jobs, for the objects of their namespace."""

KEEP_DAYS = 30
"""How many days buckets keep objects after their custom time, and registries untagged images."""

CLUSTER_USD, NAT_USD = 0.10, 0.044
"""Approximate US dollars per hour: GKE's management fee, and the most that a NAT gateway costs."""

MACHINE_USD = {
    "e2-standard-4": 0.134,
    "n2-standard-4": 0.194,
    "n2d-standard-4": 0.169,
    "n1-standard-4": 0.190,
}
"""Approximate US dollars per hour in us-central1; other regions differ."""

Shape = Literal["standard", "autopilot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The wanted state of a site. ``machine`` is the machine type for the cluster's own pods."""

    site: Site
    shape: Shape = "standard"
    machine: str = SYSTEM_MACHINES[0]
    public_endpoint: bool = False

    def __post_init__(self) -> None:
        if self.shape == "standard" and self.site.zone == self.site.region:
            raise ConfigurationError(
                f"{self.site.zone} is a region, and a Standard cluster has a zone; name one, such "
                f"as --zone {self.site.zone}-a, or use --autopilot"
            )

    @property
    def location(self) -> str:
        """Return the location of the cluster: the region for Autopilot, otherwise the zone."""
        return self.site.region if self.shape == "autopilot" else self.site.zone


def wanted_resources(setup: Setup) -> tuple[Resource | Policy, ...]:
    """Return all wanted resources of Google Cloud, each after the resources that it needs."""
    site = setup.site
    accounts = [service_account(site, purpose) for purpose in ("nodes", "workers", "builds")]
    return (
        _repository_resource(site),
        _bucket_resource(site, "jobs", site.region.upper()),
        _bucket_resource(site, "builds", site.registry.upper()),
        *accounts,
        *_network_resources(site),
        *_policies(site),
        cluster(setup),
        _workload_identity_policy(site),
    )


def existing(setup: Setup, workers: Sequence[Resource]) -> tuple[Resource | Policy, ...]:
    """Return all resources that `down` removes if they exist.

    *workers* are the service accounts of other namespaces. The policy of the jobs' bucket names
    them, and Google refuses a policy that names a removed account. So the policy ``needs`` the
    accounts, which makes `down` change the policy first.
    """
    bucket = f"bucket {setup.site.bucket('jobs')}"
    members = [
        Binding(role=OBJECTS_ROLE, member=f"serviceAccount:{worker.name}") for worker in workers
    ]
    resources = [
        replace(
            wanted,
            bindings=(*wanted.bindings, *members),
            needs=(*wanted.needs, *(worker.key for worker in workers)),
        )
        if isinstance(wanted, Policy) and wanted.name == bucket
        else wanted
        for wanted in wanted_resources(setup)
    ]
    return (*resources, *workers)


def services(site: Site, names: Sequence[str] = SERVICES) -> tuple[GoogleRequest, GoogleRequest]:
    """Return a request to read which of the APIs *names* are enabled, and one to enable them."""
    path = f"projects/{site.project}/services"
    paths = [f"{path}/{name}" for name in names]
    return (
        call(api="serviceusage", method="GET", path=f"{path}:batchGet", query=query(names=paths)),
        call(
            api="serviceusage",
            method="POST",
            path=f"{path}:batchEnable",
            body={"serviceIds": [*names]},
        ),
    )


def _repository_resource(site: Site) -> Resource:
    parent = f"projects/{site.project}/locations/{site.registry}/repositories"
    wanted_fields = {
        "cleanupPolicies": {
            "untagged": {
                "id": "untagged",
                "action": "DELETE",
                "condition": {"tagState": "UNTAGGED", "olderThan": f"{KEEP_DAYS * 86400}s"},
            }
        }
    }
    return resource(
        "repository",
        site.prefix,
        "artifactregistry",
        parent,
        {
            "format": "DOCKER",
            "description": "kinetic container images",
            "labels": site.labels,
            **wanted_fields,
        },
        create_query=query(repositoryId=site.prefix),
        wanted_fields=wanted_fields,
        update=call(
            api="artifactregistry",
            method="PATCH",
            path=f"{parent}/{site.prefix}",
            query=query(updateMask="cleanupPolicies"),
            body=wanted_fields,
        ),
    )


def _bucket_resource(site: Site, purpose: str, location: str) -> Resource:
    name = site.bucket(purpose)
    rules = [
        {"action": {"type": "Delete"}, "condition": {"daysSinceCustomTime": KEEP_DAYS}},
        {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 7}},
    ]
    wanted_fields = {
        "iamConfiguration": {
            "uniformBucketLevelAccess": {"enabled": True},
            "publicAccessPrevention": "enforced",
        },
        "lifecycle": {"rule": rules},
    }
    return resource(
        "bucket",
        name,
        "storage",
        "b",
        {
            "name": name,
            "location": location,
            "labels": site.labels,
            "softDeletePolicy": {"retentionDurationSeconds": "0"},
            **wanted_fields,
        },
        create_query=query(project=site.project),
        wanted_fields=wanted_fields,
        update=call(api="storage", method="PATCH", path=f"b/{name}", body=wanted_fields),
    )


def service_account(site: Site, purpose: str, email: str = "") -> Resource:
    """Return the service account for *purpose*, or with *email* that of another namespace."""
    email = email or site.account(purpose)
    parent = f"projects/{site.project}/serviceAccounts"
    return resource(
        "service account",
        email,
        "iam",
        parent,
        {
            "accountId": email.partition("@")[0],
            "serviceAccount": {
                "displayName": f"kinetic {site.cluster} {purpose}",
                "description": site.description,
            },
        },
    )


def _network_resources(site: Site) -> tuple[Resource, ...]:
    path = f"projects/{site.project}"
    network = f"{path}/global/networks/{site.prefix}"
    regional = f"{path}/regions/{site.region}"
    router = f"{site.prefix}-router"
    common = {"network": network, "description": site.description}
    return (
        resource(
            "network",
            site.prefix,
            "compute",
            f"{path}/global/networks",
            {
                "name": site.prefix,
                "autoCreateSubnetworks": False,
                "routingConfig": {"routingMode": "REGIONAL"},
                "description": site.description,
            },
        ),
        resource(
            "subnetwork",
            site.prefix,
            "compute",
            f"{regional}/subnetworks",
            {
                "name": site.prefix,
                "ipCidrRange": "10.0.0.0/20",
                "privateIpGoogleAccess": True,
                **common,
            },
            needs=(f"network {site.prefix}",),
        ),
        resource(
            "router",
            router,
            "compute",
            f"{regional}/routers",
            {
                "name": router,
                "nats": [
                    {
                        "name": f"{site.prefix}-nat",
                        "natIpAllocateOption": "AUTO_ONLY",
                        "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES",
                        "enableDynamicPortAllocation": True,
                        "minPortsPerVm": 64,
                    }
                ],
                **common,
            },
            needs=(f"network {site.prefix}",),
            usd_per_hour=NAT_USD,
        ),
    )


def cluster(setup: Setup) -> Resource:
    """Return the GKE cluster."""
    site = setup.site
    body = _autopilot_body(setup) if setup.shape == "autopilot" else _standard_body(setup)
    machine_usd = 0.0 if setup.shape == "autopilot" else MACHINE_USD.get(setup.machine, 0.0)
    parent = f"projects/{site.project}/locations/{setup.location}/clusters"
    reported_fields = {
        "workloadIdentityConfig": {"workloadPool": site.identity_pool},
        "releaseChannel": {"channel": "REGULAR"},
    }
    endpoint = {"ipEndpointsConfig": {"enabled": True}}
    open_endpoint = call(
        api="container",
        method="PUT",
        path=f"{parent}/{site.cluster}",
        body={"update": {"desiredControlPlaneEndpointsConfig": endpoint}},
    )
    return resource(
        "cluster",
        site.cluster,
        "container",
        parent,
        {"cluster": body},
        wanted_fields={"controlPlaneEndpointsConfig": endpoint} if setup.public_endpoint else {},
        update=open_endpoint if setup.public_endpoint else None,
        reported_fields={} if setup.shape == "autopilot" else reported_fields,
        needs=(
            f"subnetwork {site.prefix}",
            f"router {site.prefix}-router",
            f"service account {site.account('nodes')}",
            f"access project {site.project}",
        ),
        usd_per_hour=CLUSTER_USD + machine_usd,
        description=_describe_cluster(setup),
    )


def _describe_cluster(setup: Setup) -> str:
    if setup.shape == "autopilot":
        return f"Autopilot in {setup.location}, private nodes, channel REGULAR"
    return (
        f"Standard in {setup.location}, private nodes, channel REGULAR, 1 to {SYSTEM_NODES} "
        f"{setup.machine} for its own pods"
    )


def _endpoint_fields(setup: Setup) -> dict[str, Any]:
    return {
        "dnsEndpointConfig": {"allowExternalTraffic": True},
        "ipEndpointsConfig": {"enabled": setup.public_endpoint},
    }


def _common_fields(setup: Setup) -> dict[str, Any]:
    site = setup.site
    return {
        "name": site.cluster,
        "network": f"projects/{site.project}/global/networks/{site.prefix}",
        "subnetwork": f"projects/{site.project}/regions/{site.region}/subnetworks/{site.prefix}",
        "ipAllocationPolicy": {"useIpAliases": True},
        "releaseChannel": {"channel": "REGULAR"},
        "controlPlaneEndpointsConfig": _endpoint_fields(setup),
        "resourceLabels": site.labels,
    }


def _autopilot_body(setup: Setup) -> dict[str, Any]:
    return {
        **_common_fields(setup),
        "autopilot": {"enabled": True},
        "networkConfig": {"defaultEnablePrivateNodes": True},
        "autoscaling": {
            "autoprovisioningNodePoolDefaults": {
                "serviceAccount": setup.site.account("nodes"),
                "oauthScopes": SCOPES,
            }
        },
    }


def _standard_body(setup: Setup) -> dict[str, Any]:
    site = setup.site
    shielded = {"enableIntegrityMonitoring": True, "enableSecureBoot": True}
    labels = sorted(
        {gpu.label for gpu in GPUS.values()}
        | {tpu_slice.label for tpu in TPUS.values() for tpu_slice in tpu.slices}
    )
    return {
        **_common_fields(setup),
        "locations": [site.zone],
        "nodePools": [
            pool_body(
                site,
                SYSTEM_POOL,
                node_body(site, setup.machine, diskSizeGb=50, diskType="pd-balanced"),
                min_nodes=1,
                max_nodes=SYSTEM_NODES,
            )
        ],
        "workloadIdentityConfig": {"workloadPool": site.identity_pool},
        "networkConfig": {
            "defaultEnablePrivateNodes": True,
            "datapathProvider": "ADVANCED_DATAPATH",
        },
        "addonsConfig": {
            "gcsFuseCsiDriverConfig": {"enabled": True},
            "gcePersistentDiskCsiDriverConfig": {"enabled": True},
        },
        "autoscaling": {
            "enableNodeAutoprovisioning": True,
            "autoscalingProfile": "OPTIMIZE_UTILIZATION",
            "autoprovisioningLocations": [site.zone],
            "resourceLimits": [
                {"resourceType": "cpu", "maximum": MAX_CPUS},
                {"resourceType": "memory", "maximum": MAX_MEMORY_GB},
                *({"resourceType": label, "maximum": MAX_ACCELERATORS} for label in labels),
            ],
            "autoprovisioningNodePoolDefaults": {
                "serviceAccount": site.account("nodes"),
                "oauthScopes": SCOPES,
                "management": {"autoRepair": True, "autoUpgrade": True},
                "shieldedInstanceConfig": shielded,
            },
        },
        "loggingConfig": {
            "componentConfig": {"enableComponents": ["SYSTEM_COMPONENTS", "WORKLOADS"]}
        },
        "monitoringConfig": {
            "componentConfig": {"enableComponents": ["SYSTEM_COMPONENTS"]},
            "managedPrometheusConfig": {"enabled": False},
        },
        "costManagementConfig": {"enabled": True},
        "shieldedNodes": {"enabled": True},
    }


def node_body(site: Site, machine: str, **extra: Any) -> dict[str, Any]:
    """Return the `NodeConfig`, in GKE's API, of nodes of the type *machine*."""
    return {
        "machineType": machine,
        "serviceAccount": site.account("nodes"),
        "oauthScopes": SCOPES,
        "labels": {KINETIC_LABEL: "true"},
        "resourceLabels": site.labels,
        "workloadMetadataConfig": {"mode": "GKE_METADATA"},
        "shieldedInstanceConfig": {"enableIntegrityMonitoring": True, "enableSecureBoot": True},
        **extra,
    }


def pool_body(
    site: Site, name: str, config: dict[str, Any], *, min_nodes: int, max_nodes: int, **extra: Any
) -> dict[str, Any]:
    """Return the `NodePool`, in GKE's API, of *min_nodes* to *max_nodes* nodes."""
    return {
        "name": name,
        "config": config,
        "initialNodeCount": min_nodes,
        "autoscaling": {
            "enabled": True,
            "totalMinNodeCount": min_nodes,
            "totalMaxNodeCount": max_nodes,
            "locationPolicy": "ANY",
        },
        "management": {"autoRepair": True, "autoUpgrade": True},
        "locations": [site.zone],
        **extra,
    }


def _policies(site: Site) -> tuple[Policy, ...]:
    """Return the IAM policies, with the least rights; docs/security.md lists all of them."""
    nodes, workers, builds = (
        f"serviceAccount:{site.account(purpose)}" for purpose in ("nodes", "workers", "builds")
    )
    jobs = site.bucket("jobs")
    folder = f"{site.namespace}/"
    namespace_objects = (
        f'resource.name.startsWith("projects/_/buckets/{jobs}/objects/{folder}") || '
        f'api.getAttribute("storage.googleapis.com/objectListPrefix", "").startsWith("{folder}")'
    )
    accounts = {
        purpose: f"service account {site.account(purpose)}"
        for purpose in ("nodes", "workers", "builds")
    }
    project = Policy(
        name=f"project {site.project}",
        read=call(
            api="cloudresourcemanager",
            method="POST",
            path=f"projects/{site.project}:getIamPolicy",
            body={"options": {"requestedPolicyVersion": 3}},
        ),
        write=call(
            api="cloudresourcemanager", method="POST", path=f"projects/{site.project}:setIamPolicy"
        ),
        bindings=(
            Binding(role="roles/container.defaultNodeServiceAccount", member=nodes),
            Binding(role="roles/logging.logWriter", member=builds),
        ),
        needs=(accounts["nodes"], accounts["builds"]),
    )
    repository = policy(
        f"repository {site.prefix}",
        "artifactregistry",
        f"projects/{site.project}/locations/{site.registry}/repositories/{site.prefix}",
        Binding(role="roles/artifactregistry.reader", member=nodes),
        Binding(role="roles/artifactregistry.writer", member=builds),
        needs=(f"repository {site.prefix}", accounts["nodes"], accounts["builds"]),
    )
    return (
        project,
        repository,
        _bucket_policy(
            site,
            "jobs",
            Binding(
                role=OBJECTS_ROLE,
                member=workers,
                title=f"kinetic namespace {site.namespace}",
                expression=namespace_objects,
            ),
            needs=accounts["workers"],
        ),
        _bucket_policy(
            site,
            "builds",
            Binding(role="roles/storage.objectViewer", member=builds),
            needs=accounts["builds"],
        ),
    )


def _bucket_policy(site: Site, purpose: str, *bindings: Binding, needs: str) -> Policy:
    name = site.bucket(purpose)
    return Policy(
        name=f"bucket {name}",
        read=call(
            api="storage",
            method="GET",
            path=f"b/{name}/iam",
            query=query(optionsRequestedPolicyVersion="3"),
        ),
        write=call(api="storage", method="PUT", path=f"b/{name}/iam"),
        bindings=bindings,
        wrapped=False,
        needs=(f"bucket {name}", needs),
    )


def _workload_identity_policy(site: Site) -> Policy:
    """Return the policy that lets pods act as the workers' service account.

    The policy needs the cluster: the identity pool exists only once the project has had a cluster.
    """
    email = site.account("workers")
    return policy(
        f"service account {email}",
        "iam",
        f"projects/{site.project}/serviceAccounts/{email}",
        Binding(
            role="roles/iam.workloadIdentityUser",
            member=f"serviceAccount:{site.identity_pool}[{site.namespace}/kinetic]",
        ),
        needs=(f"service account {email}", f"cluster {site.cluster}"),
        read="POST",
    )
