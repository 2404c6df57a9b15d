# ruff: noqa: E501 - what the node says is one line each
"""Pods that have a node and do not run yet, or not all of them: images, volumes, commands, probes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kinetic.aio.kubernetes.diagnosis.judge import judge
from kinetic.job_status import Reason
from tests.kubernetes.situations import (
    BLOCKED,
    CREATING,
    FINAL,
    OPEN,
    Situation,
    a_pod,
    check_any_order,
    ended,
    event,
    told_of_pods,
    waiting,
)

IMAGE = "reg.example/team/train:1"


told = partial(told_of_pods, reason=Reason.SETUP, outlook=BLOCKED)

NO_SETTINGS = 'MountVolume.SetUp failed for volume "cfg" : configmap "settings" not found'
VAGUE = "Unable to attach or mount volumes: unmounted volumes=[cfg], unattached volumes=[], failed to process volumes=[]: timed out waiting for the condition"


def mount(name: str, *said: str, words: tuple[str, ...], **more: Any) -> Situation:
    events = [event("FailedMount", one) for one in said]
    return told(name, a_pod(CREATING), *words, events=events, **more)


VOLUMES = [
    mount(
        "the cause is told first, that it lasts afterwards",
        NO_SETTINGS,
        VAGUE,
        words=("ConfigMap 'settings' does not exist",),
        never=("timed out",),
    ),
    mount(
        "only that it lasts is told",
        VAGUE,
        words=("volumes 'cfg' are not mounted after a long time",),
    ),
    mount(
        "two things are missing",
        NO_SETTINGS,
        'MountVolume.SetUp failed for volume "key" : secret "api-key" not found',
        words=("ConfigMap 'settings'", "Secret 'api-key'"),
    ),
    mount(
        "told again and again, collected",
        "(combined from similar events): " + NO_SETTINGS,
        words=("ConfigMap 'settings' does not exist",),
    ),
    mount(
        "a key of a ConfigMap is missing",
        'MountVolume.SetUp failed for volume "cfg" : configmap references non-existent config key: train.yaml',
        words=("has no key 'train.yaml'", "'cfg'"),
    ),
    mount(
        "a key of a Secret is missing",
        'MountVolume.SetUp failed for volume "key" : references non-existent secret key: token',
        words=("Secret of a volume has no key 'token'",),
    ),
    mount(
        "the node has not read it yet",
        'MountVolume.SetUp failed for volume "cfg" : failed to sync configmap cache: timed out waiting for the condition',
        words=("has not read the ConfigMaps",),
        reason=None,
        outlook=OPEN,
    ),
    mount(
        "a bucket may not be read",
        'MountVolume.SetUp failed for volume "data" : rpc error: code = PermissionDenied desc = failed to get GCS bucket "b": googleapi: Error 403: x@y.iam does not have storage.objects.list access',
        words=("may not be read", "'data'", "storage.objects.list", "roles/storage.objectUser"),
    ),
    mount(
        "a bucket does not exist",
        'MountVolume.SetUp failed for volume "data" : rpc error: code = NotFound desc = failed to get GCS bucket "b": storage: bucket doesn\'t exist',
        words=("bucket of a volume does not exist", "'data'"),
    ),
    mount(
        "a path of the node that is not there",
        'MountVolume.SetUp failed for volume "host" : hostPath type check failed: /data is not a directory',
        words=(
            "volume 'host' cannot be mounted: hostPath type check failed: /data is not a directory",
        ),
    ),
    told(
        "a disk that another node has",
        a_pod(CREATING),
        "volume 'pvc-7' is in use by pod other-0 on another node",
        events=[
            event(
                "FailedAttachVolume",
                'Multi-Attach error for volume "pvc-7" Volume is already used by pod(s) other-0',
            ),
            event("FailedMount", VAGUE),
        ],
        outlook=OPEN,
    ),
    told(
        "a disk that another instance has, in the cloud's words",
        a_pod(CREATING),
        "in use by instance gke-1",
        events=[
            event(
                "FailedAttachVolume",
                'AttachVolume.Attach failed for volume "pvc-7" : rpc error: code = Internal desc = Failed to Attach: googleapi: Error 400: The disk resource is already being used by instance gke-1, resourceInUseByAnotherResource',
            )
        ],
        outlook=OPEN,
    ),
    told(
        "a disk that another node had: it is attached by now",
        a_pod(CREATING),
        "its container is being made",
        events=[
            event(
                "FailedAttachVolume",
                'Multi-Attach error for volume "pvc-7" Volume is already exclusively attached to one node and can\'t be attached to another',
            ),
            event("SuccessfulAttachVolume", 'AttachVolume.Attach succeeded for volume "pvc-7"'),
        ],
        reason=None,
        outlook=OPEN,
    ),
    told(
        "a volume that was missing and is there: the image is pulled",
        a_pod(CREATING),
        f"pulling the image {IMAGE}",
        events=[event("FailedMount", NO_SETTINGS), event("Pulling", f'Pulling image "{IMAGE}"')],
        reason=None,
        outlook=OPEN,
    ),
    told(
        "a sandbox that failed once: the image is pulled",
        a_pod(CREATING),
        "pulling the image",
        events=[
            event(
                "FailedCreatePodSandBox",
                'Failed to create pod sandbox: rpc error: plugin type="calico" failed (add): timeout',
            ),
            event("Pulling", f'Pulling image "{IMAGE}"'),
        ],
        reason=None,
        outlook=OPEN,
    ),
    told(
        "the node's network is not ready",
        a_pod(CREATING),
        "network is not ready",
        events=[
            event(
                "NetworkNotReady",
                "network is not ready: container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady",
            )
        ],
        reason=None,
        outlook=OPEN,
    ),
    told(
        "no address is left for the pod",
        a_pod(CREATING),
        "no IP addresses available in range set",
        events=[
            event(
                "FailedCreatePodSandBox",
                'Failed to create pod sandbox: rpc error: code = Unknown desc = failed to setup network for sandbox "1f": plugin type="host-local" failed (add): failed to allocate for range 0: no IP addresses available in range set: 10.4.0.2-10.4.0.126',
            )
        ],
        outlook=OPEN,
    ),
]

RUNC = "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: error during container init: "


def start(name: str, said: str, *words: str, **more: Any) -> Situation:
    """A container that cannot be made, in these words of runc."""
    return told(name, a_pod(waiting("CreateContainerError", said)), *words, **more)


STARTS = [
    start(
        "no space is left on the node",
        "failed to create containerd container: create snapshot: mkdir /var/lib/containerd/x: no space left on device",
        "no space left",
        never=("working directory",),
    ),
    start(
        "the driver of the GPU is not loaded",
        "failed to create containerd task: OCI runtime create failed: nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown",
        "the node's GPU driver is not ready",
    ),
    start(
        "containerd is slow",
        'failed to reserve container name "main_x": name "main_x" is reserved for "1f"',
        "has not made container 'main' yet",
        reason=None,
        outlook=OPEN,
    ),
    told(
        "the node has not read a Secret yet",
        a_pod(
            waiting(
                "CreateContainerConfigError",
                "failed to sync secret cache: timed out waiting for the condition",
            )
        ),
        "has not made container 'main' yet",
        reason=None,
        outlook=OPEN,
    ),
    told(
        "root is named as the user, and forbidden",
        a_pod(
            waiting(
                "CreateContainerConfigError",
                "container's runAsUser breaks non-root policy (pod: x, container: main)",
            )
        ),
        "its runAsUser is root",
        outlook=FINAL,
    ),
    start(
        "the working directory is not there",
        RUNC + 'chdir to cwd ("/srv/app") set in config.json failed: no such file or directory',
        "working directory '/srv/app' is not there",
        never=("command",),
    ),
    start(
        "the working directory may not be entered",
        RUNC + 'chdir to cwd ("/root/app") set in config.json failed: permission denied',
        "'/root/app' may not be entered",
    ),
    start(
        "the user is not in the image",
        RUNC + "unable to find user trainer: no matching entries in passwd file",
        "user 'trainer' is not in the image",
    ),
    start(
        "no command at all",
        'failed to generate container "1f" spec: failed to generate spec: no command specified',
        "neither the image nor the job says which command",
    ),
    start(
        "a mount that fails is no missing command",
        RUNC
        + 'error mounting "/var/lib/kubelet/pods/x" to rootfs at "/data": no such file or directory',
        "cannot be mounted at '/data'",
        never=("command 'python3' is not",),
    ),
    start(
        "too little memory to begin with",
        RUNC + "container init was OOM-killed (memory limit too low?): unknown",
        "out of memory before the program began",
        reason=Reason.OUT_OF_MEMORY,
    ),
    start(
        "containerd 2 names the file",
        RUNC + 'exec: "/app/train": stat /app/train: no such file or directory',
        "command '/app/train' is not in the image",
    ),
    told(
        "it is started again and again and never begins: nothing runs",
        a_pod(
            waiting(
                "CrashLoopBackOff",
                "back-off 40s restarting failed container=main",
                lastState=ended(
                    128, "StartError", RUNC + 'exec: "train.py": executable file not found in $PATH'
                ),
                restartCount=3,
            ),
            phase="Running",
            restartPolicy="OnFailure",
        ),
        "command 'train.py' is not in the image",
        never=("the program fails",),
    ),
    told(
        "its command is not in the image, restarts allowed",
        a_pod(
            waiting(
                "RunContainerError", RUNC + 'exec: "train.py": executable file not found in $PATH'
            ),
            restartPolicy="OnFailure",
        ),
        "command 'train.py' is not in the image",
    ),
    told(
        "a Secret without the key",
        a_pod(
            waiting("CreateContainerConfigError", "couldn't find key token in Secret ml/api-key")
        ),
        "Secret 'api-key' has no key 'token'",
    ),
    told(
        "a ConfigMap without the key",
        a_pod(
            waiting("CreateContainerConfigError", "couldn't find key rate in ConfigMap ml/settings")
        ),
        "ConfigMap 'settings' has no key 'rate'",
    ),
    told(
        "a user by name cannot be checked",
        a_pod(
            waiting(
                "CreateContainerConfigError",
                "container has runAsNonRoot and image has non-numeric user (trainer), cannot verify user is non-root",
            )
        ),
        "must not run as root",
        outlook=FINAL,
    ),
]


@pytest.mark.parametrize("case", [*VOLUMES, *STARTS], ids=lambda case: case.name)
def test_a_pod_that_does_not_run_is_told_as_it_should_be(case: Situation) -> None:
    case.check(judge(case.seen))
    check_any_order(case.seen)
