"""Describe the resources that `kinetic up` creates for a site. No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kinetic.accelerators import GPUS, TPUS
from kinetic.aio.images.docker_hub import TOKEN, USERNAME
from kinetic.aio.infra.resources import Binding, Policy, Resource, call, policy, query, resource
from kinetic.aio.infra.site import KINETIC_LABEL, UNLABELED_KINDS, Site
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
HYPERDISK_FAMILIES = ("n4-", "c4-", "c4d-")
"""The beginnings of machine types that can't boot from a Persistent Disk."""

SYSTEM_POOL = "system"
MAX_SYSTEM_NODES = 10
"""Maximum number of nodes for the cluster's own pods."""

SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
SHIELDED = {"enableIntegrityMonitoring": True, "enableSecureBoot": True}
MAX_CPUS, MAX_MEMORY_GB = "1000000", "10000000"
"""Limits of node auto-provisioning. All nodes count, so low limits would stop large TPU slices."""

MAX_ACCELERATORS = "10000"
OBJECTS_ROLE = "roles/storage.objectUser"
"""The role of pods in the bucket of jobs, for the objects of their namespace."""

SECRETS = "secretmanager"
KEEP_DAYS = 30
"""Days that a bucket keeps an object after its custom time, and a registry untagged images."""

CLUSTER_USD, NAT_USD = 0.10, 0.044
"""Approximate US dollars per hour: GKE's management fee, and the most that a NAT gateway costs."""

MACHINE_USD = {
    "e2-standard-4": 0.134,
    "n2-standard-4": 0.194,
    "n2d-standard-4": 0.169,
    "n1-standard-4": 0.190,
    "t2d-standard-4": 0.169,
    "c3-standard-4": 0.201,
    "c3d-standard-4": 0.182,
    "c2-standard-4": 0.209,
    "c2d-standard-4": 0.182,
    "n4-standard-4": 0.189,
    "c4-standard-4": 0.198,
    "c4d-standard-4": 0.193,
}
"""Approximate US dollars per hour in us-central1; other regions differ."""

SYSTEM_MACHINES = (*MACHINE_USD,)
"""Machine types for the cluster's own pods, the preferred one first; some zones lack e2 or n2."""

PARENT_NAME = re.compile("(organizations|folders)/[0-9]+", re.ASCII)
Shape = Literal["standard", "autopilot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The wanted state of a site. ``machine`` is the machine type for the cluster's own pods.

    ``machine_is_final`` is false if the zone may lack that type: kinetic can't list its types yet.
    """

    site: Site
    shape: Shape = "standard"
    machine: str = SYSTEM_MACHINES[0]
    machine_is_final: bool = True
    public_endpoint: bool = False

    def __post_init__(self) -> None:
        if self.shape == "standard" and self.site.zone == self.site.region:
            raise ConfigurationError(
                f"{self.site.zone} is a region, and a Standard cluster needs a zone; use a zone "
                f"such as --zone {self.site.zone}-a, or use --autopilot"
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


def existing(
    setup: Setup, workers: Sequence[Resource], placements: Sequence[Resource]
) -> tuple[Resource | Policy, ...]:
    """Return all resources that `down` removes if they exist.

    *workers* are the service accounts of other namespaces; the policy of the jobs' bucket names
    them. *placements* are the policies of the cluster's pools; nodes use them, so the cluster
    ``needs`` them. Only the repository's label shows that keras-kinetic made the network. So the
    network ``needs`` the repository, and `down` removes the repository after the network.
    """
    site = setup.site
    resources: list[Resource | Policy] = []
    for wanted in wanted_resources(setup):
        if isinstance(wanted, Policy) and wanted.name == f"bucket {site.bucket('jobs')}":
            members = [f"serviceAccount:{worker.name}" for worker in workers]
            bindings = [Binding(role=OBJECTS_ROLE, member=member) for member in members]
            wanted = replace(wanted, bindings=(*wanted.bindings, *bindings))
        elif isinstance(wanted, Resource) and wanted.kind in UNLABELED_KINDS:
            wanted = replace(wanted, needs=(*wanted.needs, f"repository {site.prefix}"))
        elif isinstance(wanted, Resource) and wanted.kind == "cluster":
            placement_keys = [placement.key for placement in placements]
            wanted = replace(wanted, needs=(*wanted.needs, *placement_keys))
        resources.append(wanted)
    return (*resources, *workers, *placements)


def _repository_resource(site: Site) -> Resource:
    condition = {"tagState": "UNTAGGED", "olderThan": f"{KEEP_DAYS * 86400}s"}
    untagged = {"id": "untagged", "action": "DELETE", "condition": condition}
    description = "kinetic container images"
    return resource(
        "repository",
        site.prefix,
        "artifactregistry",
        f"projects/{site.project}/locations/{site.registry}/repositories",
        {"format": "DOCKER", "description": description, "labels": site.labels},
        create_query=query(repositoryId=site.prefix),
        patched={"cleanupPolicies": {"untagged": untagged}},
        patch_query=query(updateMask="cleanupPolicies"),
    )


def _bucket_resource(site: Site, purpose: str, location: str) -> Resource:
    name = site.bucket(purpose)
    rules = [
        {"action": {"type": "Delete"}, "condition": {"daysSinceCustomTime": KEEP_DAYS}},
        {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 7}},
    ]
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
        },
        create_query=query(project=site.project),
        patched={
            "iamConfiguration": {
                "uniformBucketLevelAccess": {"enabled": True},
                "publicAccessPrevention": "enforced",
            },
            "lifecycle": {"rule": rules},
        },
        # `down` keeps buckets, so a bucket may be that of an earlier cluster in another region.
        reported_fields={"location": location},
    )


def service_account(site: Site, purpose: str, email: str = "") -> Resource:
    """Return the service account for *purpose*; *email* is that of another namespace's account."""
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
    regional = f"{path}/regions/{site.region}"
    network = f"{path}/global/networks/{site.prefix}"
    needs = (f"network {site.prefix}",)
    nat = {
        "name": f"{site.prefix}-nat",
        "natIpAllocateOption": "AUTO_ONLY",
        "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES",
        "enableDynamicPortAllocation": True,
        "minPortsPerVm": 64,
    }

    def part(kind: str, name: str, parent: str, fields: dict[str, Any], **more: Any) -> Resource:
        body = {"name": name, "description": site.description, **fields}
        return resource(kind, name, "compute", parent, body, **more)

    return (
        part(
            "network",
            site.prefix,
            f"{path}/global/networks",
            {"autoCreateSubnetworks": False, "routingConfig": {"routingMode": "REGIONAL"}},
        ),
        part(
            "subnetwork",
            site.prefix,
            f"{regional}/subnetworks",
            {"network": network, "ipCidrRange": "10.0.0.0/20", "privateIpGoogleAccess": True},
            needs=needs,
        ),
        part(
            "router",
            f"{site.prefix}-router",
            f"{regional}/routers",
            {"network": network, "nats": [nat]},
            needs=needs,
            usd_per_hour=NAT_USD,
        ),
    )


def cluster(setup: Setup) -> Resource:
    """Return the GKE cluster."""
    site = setup.site
    parent = f"projects/{site.project}/locations/{setup.location}/clusters"
    description = f"in {setup.location}, private nodes, channel REGULAR"
    fields: dict[str, Any] = {
        "usd_per_hour": CLUSTER_USD,
        "description": f"Autopilot {description}",
    }
    if setup.shape == "standard":
        machine = setup.machine if setup.machine_is_final else f"{setup.machine} (or similar)"
        fields = {
            "reported_fields": {
                "workloadIdentityConfig": {"workloadPool": site.identity_pool},
                "releaseChannel": {"channel": "REGULAR"},
            },
            "usd_per_hour": CLUSTER_USD + MACHINE_USD[setup.machine],
            "description": f"Standard {description}, 1 to {MAX_SYSTEM_NODES} {machine} for "
            "its own pods",
        }
    if setup.public_endpoint:
        endpoint = {"ipEndpointsConfig": {"enabled": True}}
        body = {"update": {"desiredControlPlaneEndpointsConfig": endpoint}}
        fields["wanted_fields"] = {"controlPlaneEndpointsConfig": endpoint}
        fields["update"] = call("container", "PUT", f"{parent}/{site.cluster}", body=body)
    return resource(
        "cluster",
        site.cluster,
        "container",
        parent,
        {"cluster": _cluster_body(setup)},
        needs=(
            f"subnetwork {site.prefix}",
            f"router {site.prefix}-router",
            f"service account {site.account('nodes')}",
            f"access project {site.project}",
        ),
        **fields,
    )


def _cluster_body(setup: Setup) -> dict[str, Any]:
    site = setup.site
    path = f"projects/{site.project}"
    return {
        "name": site.cluster,
        "network": f"{path}/global/networks/{site.prefix}",
        "subnetwork": f"{path}/regions/{site.region}/subnetworks/{site.prefix}",
        "ipAllocationPolicy": {"useIpAliases": True},
        "releaseChannel": {"channel": "REGULAR"},
        "controlPlaneEndpointsConfig": {
            "dnsEndpointConfig": {"allowExternalTraffic": True},
            "ipEndpointsConfig": {"enabled": setup.public_endpoint},
        },
        "resourceLabels": site.labels,
        **(_autopilot_fields(site) if setup.shape == "autopilot" else _standard_fields(setup)),
    }


def _autopilot_fields(site: Site) -> dict[str, Any]:
    node_defaults = {"serviceAccount": site.account("nodes"), "oauthScopes": SCOPES}
    return {
        "autopilot": {"enabled": True},
        "networkConfig": {"defaultEnablePrivateNodes": True},
        "autoscaling": {"autoprovisioningNodePoolDefaults": node_defaults},
    }


def _standard_fields(setup: Setup) -> dict[str, Any]:
    site = setup.site
    labels = sorted(
        {gpu.label for gpu in GPUS.values()}
        | {tpu_slice.label for tpu in TPUS.values() for tpu_slice in tpu.slices}
    )
    needs_hyperdisk = setup.machine.startswith(HYPERDISK_FAMILIES)
    disk_type = "hyperdisk-balanced" if needs_hyperdisk else "pd-balanced"
    return {
        "locations": [site.zone],
        "nodePools": [
            pool_body(
                site,
                SYSTEM_POOL,
                node_body(site, setup.machine, diskSizeGb=50, diskType=disk_type),
                min_nodes=1,
                max_nodes=MAX_SYSTEM_NODES,
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
                "shieldedInstanceConfig": SHIELDED,
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
        "shieldedInstanceConfig": SHIELDED,
        # Otherwise the kernel kills a worker together with the item that ran out of memory.
        "kubeletConfig": {"singleProcessOomKill": True},
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
    """Return IAM policies that grant the least rights; docs/security.md lists these rights."""
    nodes, workers, builds = (
        f"serviceAccount:{site.account(purpose)}" for purpose in ("nodes", "workers", "builds")
    )
    path = f"projects/{site.project}"
    folder = f"{site.namespace}/"
    objects = f"projects/_/buckets/{site.bucket('jobs')}/objects/{folder}"
    namespace_objects = (
        f'resource.name.startsWith("{objects}") || '
        f'api.getAttribute("storage.googleapis.com/objectListPrefix", "").startsWith("{folder}")'
    )
    version = {"options": {"requestedPolicyVersion": 3}}
    manager = "cloudresourcemanager"
    return (
        Policy(
            name=f"project {site.project}",
            read=call(manager, "POST", f"{path}:getIamPolicy", body=version),
            write=call(manager, "POST", f"{path}:setIamPolicy"),
            bindings=(
                Binding(role="roles/container.defaultNodeServiceAccount", member=nodes),
                Binding(role="roles/logging.logWriter", member=builds),
            ),
        ),
        policy(
            f"repository {site.prefix}",
            "artifactregistry",
            f"{path}/locations/{site.registry}/repositories/{site.prefix}",
            Binding(role="roles/artifactregistry.reader", member=nodes),
            Binding(role="roles/artifactregistry.writer", member=builds),
            requires=(f"repository {site.prefix}",),
        ),
        _bucket_policy(
            site,
            "jobs",
            Binding(
                role=OBJECTS_ROLE,
                member=workers,
                title=f"kinetic namespace {site.namespace}",
                expression=namespace_objects,
            ),
        ),
        # Cloud Build reads a build's sources and writes its log as the builds' account.
        _bucket_policy(site, "builds", Binding(role="roles/storage.objectAdmin", member=builds)),
    )


def _bucket_policy(site: Site, purpose: str, binding: Binding) -> Policy:
    name = site.bucket(purpose)
    path = f"b/{name}/iam"
    return Policy(
        name=f"bucket {name}",
        read=call("storage", "GET", path, query=query(optionsRequestedPolicyVersion="3")),
        write=call("storage", "PUT", path),
        bindings=(binding,),
        wrapped=False,
        requires=(f"bucket {name}",),
    )


def _workload_identity_policy(site: Site) -> Policy:
    """Return the policy that lets pods act as the workers' service account."""
    email = site.account("workers")
    return policy(
        f"service account {email}",
        "iam",
        f"projects/{site.project}/serviceAccounts/{email}",
        Binding(
            role="roles/iam.workloadIdentityUser",
            member=f"serviceAccount:{site.identity_pool}[{site.namespace}/kinetic]",
        ),
        # The identity pool exists only once the project has had a cluster.
        requires=(f"service account {email}", f"cluster {site.cluster}"),
        read="POST",
    )


def secret_resources(site: Site) -> tuple[Resource | Policy, ...]:
    """Return both secrets of Docker Hub, each with the policy that lets *site*'s builds read it."""
    parent = f"projects/{site.project}/secrets"
    body: dict[str, Any] = {"replication": {"automatic": {}}, "labels": {"kinetic": "true"}}
    builds = f"serviceAccount:{site.account('builds')}"
    reading = Binding(role="roles/secretmanager.secretAccessor", member=builds)
    resources: list[Resource | Policy] = []
    for name in (USERNAME, TOKEN):
        key, creation = f"secret {name}", query(secretId=name)
        resources += [
            resource("secret", name, SECRETS, parent, body, create_query=creation),
            policy(key, SECRETS, f"{parent}/{name}", reading, requires=(key,)),
        ]
    return tuple(resources)


def check_parent(parent: str, *, creates: bool) -> None:
    """Check *parent*, the folder or organization of the project that `up` creates if *creates*.

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
    """Return the project, in the organization or folder *parent* unless that is empty."""
    path = f"projects/{site.project}"
    api = "cloudresourcemanager"
    parent_field = {"parent": parent} if parent else {}
    names = {"projectId": site.project, "displayName": site.project}
    body = {**names, "labels": {"kinetic": "true"}, **parent_field}
    return Resource(
        kind="project",
        name=site.project,
        read=call(api, "GET", path),
        create=call(api, "POST", "projects", body=body),
        reported_fields=parent_field,
        description=f"in {parent}" if parent else "",
    )


def billing_link(site: Site, account_id: str) -> Resource:
    """Return the link of the project to the billing account *account_id*."""
    path = f"projects/{site.project}/billingInfo"
    body = {"billingAccountName": f"billingAccounts/{account_id.removeprefix('billingAccounts/')}"}
    set_account = call("cloudbilling", "PUT", path, body=body)
    return Resource(
        kind="billing",
        name=site.project,
        read=call("cloudbilling", "GET", path),
        create=set_account,
        update=set_account,
        wanted_fields=body,
        needs=(f"project {site.project}",),
    )
