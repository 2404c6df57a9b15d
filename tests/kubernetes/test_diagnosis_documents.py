# ruff: noqa: E501 - what the platform says is one line each
"""What Google's and Kubernetes' documents tell of GKE, which no cluster at hand can show.

Each case names the page that it was built from.
"""

from __future__ import annotations

import pytest

from kinetic.aio.kubernetes.diagnosis.judge import judge
from kinetic.aio.kubernetes.diagnosis.verdict import Seen
from kinetic.job_status import Reason
from tests.kubernetes.situations import (
    BLOCKED,
    CREATING,
    FAILED,
    FINAL,
    OPEN,
    RUNNING,
    RUNS,
    Json,
    Situation,
    a_container,
    a_job,
    a_node,
    a_pod,
    check_any_order,
    ended,
    event,
    failed_job,
    failed_pod,
    not_placed,
    told_of,
    told_of_pods,
    waiting,
)

TPU = {"cloud.google.com/gke-tpu-topology": "2x4"}
NO_NODE = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."


def refused(said: str) -> Seen:
    told = f'Error creating: pods "tune-1-x" is forbidden: {said}'
    return Seen(job=a_job({}), events=[event("FailedCreate", told, kind="Job")])


WARDEN = (
    'admission webhook "warden-validating.common-webhooks.networking.gke.io" denied the request:'
)


def not_mounted(name: str, why: str, *words: str) -> Situation:
    """A bucket that is not mounted, in the driver's words."""
    said = f'MountVolume.SetUp failed for volume "data" : rpc error: code = {why}'
    return told_of_pods(
        f"Cloud Storage FUSE CSI driver, 'Troubleshooting': {name}",
        a_pod(CREATING),
        *words,
        events=[event("FailedMount", said)],
        reason=Reason.SETUP,
        outlook=BLOCKED,
    )


def not_added(name: str, *told: Json, words: tuple[str, ...], reason: Reason) -> Situation:
    """A node that is not added, in the autoscaler's words."""
    seen = Seen(
        job=a_job(),
        pods=[not_placed(NO_NODE, asks={"google.com/tpu": "8"}, nodeSelector=TPU)],
        nodes=[a_node("n1", cpu="8")],
        events=[*told],
    )
    return told_of(name, seen, *words, reason=reason, outlook=OPEN)


def later(told: Json, second: int) -> Json:
    return {**told, "lastTimestamp": f"2026-01-01T00:0{second}:00Z"}


CASES = [
    told_of(
        "GKE, 'Troubleshoot cluster autoscaler': no TPU in stock, and the autoscaler in back-off",
        Seen(
            job=a_job(),
            pods=[not_placed(NO_NODE, asks={"google.com/tpu": "8"}, nodeSelector=TPU)],
            nodes=[a_node("n1", cpu="8")],
            events=[
                later(
                    event(
                        "FailedScaleUp",
                        "Node scale up in zones us-west4-a associated with this pod failed: GCE out of resources. Pod is at risk of not being scheduled.",
                    ),
                    1,
                ),
                later(
                    event(
                        "NotTriggerScaleUp",
                        "pod didn't trigger scale-up: 1 in backoff after failed scale-up",
                    ),
                    2,
                ),
            ],
        ),
        "out of resources",
        "us-west4-a",
        "pauses before it tries again",
        "another zone",
        reason=Reason.UNSCHEDULABLE,
        outlook=OPEN,
    ),
    told_of_pods(
        "GKE, 'Spot VMs': the notice is a taint on the node while the program runs",
        a_pod(RUNS, phase="Running"),
        "takes its spot machine back",
        nodes=[
            a_node(
                "n1",
                {"cloud.google.com/gke-spot": "true"},
                "cloud.google.com/impending-node-termination=:NoSchedule",
                cpu="8",
            )
        ],
        status=RUNNING,
        reason=Reason.PREEMPTED,
        outlook=OPEN,
    ),
    told_of_pods(
        "GKE, 'Spot VMs': the program answers the notice with 143",
        failed_pod(143),
        "the spot machine was taken back",
        "run it again",
        job=failed_job(),
        nodes=[
            a_node(
                "n1",
                {"cloud.google.com/gke-spot": "true"},
                "cloud.google.com/impending-node-termination=:NoSchedule",
                cpu="8",
            )
        ],
        status=FAILED,
        reason=Reason.PREEMPTED,
        outlook=FINAL,
    ),
    told_of(
        "GKE, 'Autopilot security capabilities': Warden names the constraint and what violates it",
        refused(
            'admission webhook "warden-validating.common-webhooks.networking.gke.io" denied the request: GKE Warden rejected the request because it violates one or more constraints. Violations details: {"[denied by autogke-disallow-hostnamespaces]":["enabling hostPID is not allowed in Autopilot."]}'
        ),
        "enabling hostPID is not allowed in Autopilot",
        "Standard cluster",
        never=("common-webhooks",),
        reason=Reason.REFUSED,
        outlook=FINAL,
    ),
    told_of(
        "GKE, 'Autopilot': Warden names what is too much without a constraint",
        refused(
            f"{WARDEN} GKE Warden rejected the request because it violates one or more constraints.\nViolations: Total ephemeral-storage requested by containers for workload is higher than the Autopilot maximum of '10Gi'."
        ),
        "higher than the Autopilot maximum of '10Gi'",
        "Standard cluster",
        reason=Reason.REFUSED,
        outlook=FINAL,
    ),
    told_of(
        "GKE, 'Troubleshoot privileged workloads in Autopilot': what the allowlist does not have",
        refused(
            f"{WARDEN}\n=======\nWorkload Mismatches Found for Allowlist (example-1):\n=======\nHostPID Mismatch: Workload=true, Allowlist=false"
        ),
        "HostPID Mismatch: Workload=true, Allowlist=false",
        "change the job as the policy says",
        reason=Reason.REFUSED,
        outlook=BLOCKED,
    ),
    told_of(
        "Binary Authorization, 'View audit logs': the webhook names the image and the attestor",
        refused(
            'admission webhook "imagepolicywebhook.image-policy.k8s.io" denied the request: Image gcr.io/p/app:1.0 denied by Binary Authorization default admission rule. Image gcr.io/p/app:1.0 denied by attestor projects/p/attestors/qa: Expected digest with sha256 scheme, but got tag or malformed digest'
        ),
        "Image gcr.io/p/app:1.0 denied by Binary Authorization",
        "digest",
        reason=Reason.REFUSED,
        outlook=FINAL,
    ),
    told_of(
        "Binary Authorization: an image that nobody has attested",
        refused(
            "image policy webhook backend denied one or more images: Denied by default admission rule. Overridden by evaluation mode Denied by Attestor"
        ),
        "Binary Authorization refuses the image",
        "attested",
        reason=Reason.REFUSED,
        outlook=FINAL,
    ),
    told_of(
        "GKE, 'Quotas and limits': 5,000 Jobs, of which most have finished",
        refused(
            "exceeded quota: gke-resource-quotas, requested: count/jobs.batch=1, used: count/jobs.batch=5k, limited: count/jobs.batch=5k"
        ),
        "'gke-resource-quotas' is used up",
        "delete finished jobs",
        reason=Reason.QUOTA,
        outlook=OPEN,
    ),
    told_of_pods(
        "Cloud Storage, 'Troubleshooting': a pod without workload identity",
        failed_pod(
            1,
            message="403 POST https://storage.googleapis.com/upload/storage/v1/b/x/o: train@p.iam.gserviceaccount.com does not have storage.objects.create access to the Google Cloud Storage object.",
        ),
        "may not use Cloud Storage (403)",
        "give train@p.iam.gserviceaccount.com roles/storage.objectUser",
        job=failed_job(),
        status=FAILED,
        reason=Reason.SETUP,
        outlook=FINAL,
    ),
    told_of_pods(
        "GKE, 'Troubleshoot GPUs': a node has no GPU to give before its driver is there",
        not_placed(
            "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
            asks={"nvidia.com/gpu": "1"},
        ),
        "nvidia-l4",
        "its driver is not ready",
        "wait",
        never=("can never start",),
        nodes=[a_node("n1", {"cloud.google.com/gke-accelerator": "nvidia-l4"}, cpu="8")],
        reason=Reason.UNSCHEDULABLE,
        outlook=OPEN,
    ),
    told_of_pods(
        "Cloud Storage FUSE CSI driver, 'Troubleshooting': the pod has no sidecar",
        a_pod(CREATING),
        "no gcsfuse sidecar",
        "gke-gcsfuse/volumes",
        events=[
            event(
                "FailedMount",
                'MountVolume.SetUp failed for volume "data" : rpc error: code = FailedPrecondition desc = failed to find the sidecar container in Pod spec',
            )
        ],
        reason=Reason.SETUP,
        outlook=BLOCKED,
    ),
    not_mounted(
        "the webhook put no sidecar there",
        "Internal desc = the webhook failed to inject the sidecar container into the Pod spec",
        "no gcsfuse sidecar",
        "gke-gcsfuse/volumes",
    ),
    not_mounted(
        "the sidecar is killed while it mounts",
        "ResourceExhausted desc = the sidecar container failed with error: signal: killed",
        "sidecar was killed",
        "gke-gcsfuse/memory-limit",
    ),
    not_mounted(
        "a mount option that there is not",
        "InvalidArgument desc = the sidecar container failed with error: Incorrect Usage. flag provided but not defined: -xxx",
        "flag provided but not defined: -xxx",
        "correct what it names",
    ),
    not_mounted(
        "credentials that have not come yet",
        "Unauthenticated desc = failed to prepare storage service: storage service manager failed to setup service: timed out waiting for the condition",
        "may not be read",
        "roles/storage.objectUser",
    ),
    not_mounted(
        "the bucket is not there",
        'NotFound desc = failed to get GCS bucket "x": storage: bucket doesn\'t exist',
        "does not exist",
        "create it or correct the name",
    ),
    not_added(
        "Cluster autoscaler, its events: two reasons in one sentence",
        event(
            "FailedScaleUp",
            'Node scale up in zones us-central1-c, us-central1-a associated with this pod failed: GCE out of resources, Some nodes in node group ["ng1"] failed to appear in time. Pod is at risk of not being scheduled.',
        ),
        words=("us-central1-c, us-central1-a", "out of resources", "another zone"),
        reason=Reason.UNSCHEDULABLE,
    ),
    not_added(
        "Cluster autoscaler, its events: the subnet is full, and then it pauses",
        later(
            event(
                "FailedScaleUp",
                "Node scale up in zones us-central1-c associated with this pod failed: IP space exhausted. Pod is at risk of not being scheduled.",
            ),
            1,
        ),
        later(
            event(
                "NotTriggerScaleUp",
                "pod didn't trigger scale-up: 1 in backoff after failed scale-up, 6 node(s) had taint {workload: always-on}, that the pod didn't tolerate",
            ),
            2,
        ),
        words=("no address left", "pauses before it tries again", "subnet"),
        reason=Reason.UNSCHEDULABLE,
    ),
    not_added(
        "Cluster autoscaler, its events: the node pool is as large as it may be",
        event("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 max node group size reached"),
        words=("max node group size reached", "let the node pool grow"),
        reason=Reason.UNSCHEDULABLE,
    ),
    told_of_pods(
        "Artifact Registry, as its nodes tell it: the repository is not there",
        a_pod(
            waiting(
                "ErrImagePull",
                'failed to pull and unpack image "us-docker.pkg.dev/p/none/x:v1": failed to resolve reference "us-docker.pkg.dev/p/none/x:v1": failed to authorize: failed to fetch oauth token: unexpected status from GET request to https://us-docker.pkg.dev/v2/token?scope=repository%3Ap%2Fnone%2Fx%3Apull&service=us-docker.pkg.dev: 404 Not Found',
            )
        ),
        "its repository is not in",
        "make the repository",
        reason=Reason.IMAGE_PULL,
        outlook=FINAL,
    ),
    told_of_pods(
        "GKE, 'Manage disruption in GPU nodes': the same notice before maintenance, without spot",
        a_pod(RUNS, phase="Running"),
        "for maintenance",
        never=("spot",),
        nodes=[
            a_node("n1", {}, "cloud.google.com/impending-node-termination=:NoSchedule", cpu="8")
        ],
        status=RUNNING,
        reason=Reason.PREEMPTED,
        outlook=OPEN,
    ),
    told_of_pods(
        "Cloud Storage FUSE CSI driver, 'Troubleshooting': the sidecar passes its memory limit",
        a_pod(
            RUNS,
            phase="Running",
            init=[
                (
                    a_container(
                        "gke-gcsfuse-sidecar",
                        restartPolicy="Always",
                        resources={"limits": {"memory": "256Mi"}},
                    ),
                    ended(137, "OOMKilled"),
                )
            ],
        ),
        "sidecar 'gke-gcsfuse-sidecar'",
        "256Mi",
        "gke-gcsfuse/memory-limit",
        status=RUNNING,
        reason=None,
        outlook=OPEN,
    ),
    told_of_pods(
        "Kubernetes, 'Node-pressure eviction': amounts of disk in units that people read",
        failed_pod(
            137,
            status={
                "reason": "Evicted",
                "message": "The node was low on resource: ephemeral-storage. Threshold quantity: 26421208473, available: 25700Ki. Container main was using 15342400Ki, request is 0, has larger consumption of ephemeral-storage. ",
            },
        ),
        "used 14.6Gi",
        never=("15342400Ki",),
        job=failed_job(),
        status=FAILED,
        reason=Reason.EVICTED,
        outlook=FINAL,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_documents_tell_is_told_so(case: Situation) -> None:
    case.check(judge(case.seen))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_order_of_what_is_told_does_not_matter(case: Situation) -> None:
    check_any_order(case.seen)
