# ruff: noqa: E501 - what is told is one line each
"""Images that cannot be pulled, in the words of registries, containerd and kubelet."""

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
    a_container,
    a_pod,
    event,
    told_of_pods,
    waiting,
)

IMAGE = "reg.example/team/train:1"


told = partial(told_of_pods, reason=Reason.SETUP, outlook=BLOCKED)


def pull(name: str, said: str, *words: str, image: str = IMAGE, **more: Any) -> Situation:
    """An image that cannot be pulled, in these words of containerd."""
    text = f'Back-off pulling image "{image}": ErrImagePull: failed to pull and unpack image "{image}": {said}'
    pod = a_pod(waiting("ImagePullBackOff", text), containers=[a_container(image=image)])
    return told(name, pod, *words, reason=Reason.IMAGE_PULL, **more)


RESOLVE = f'failed to resolve reference "{IMAGE}": '
PULLS = [
    pull(
        "the registry's name is unknown",
        RESOLVE
        + 'failed to do request: Head "https://reg.example/v2/team/train/manifests/1": dial tcp: lookup reg.example on 10.0.0.10:53: no such host',
        "reg.example cannot be reached",
        "no such host",
    ),
    pull(
        "the registry does not answer",
        RESOLVE
        + 'failed to do request: Head "https://reg.example/v2/": dial tcp 10.1.2.3:443: i/o timeout',
        "i/o timeout",
    ),
    pull(
        "the handshake with the registry takes too long",
        RESOLVE
        + 'failed to do request: Head "https://reg.example/v2/": net/http: TLS handshake timeout',
        "TLS handshake timeout",
    ),
    pull(
        "nobody trusts the registry's certificate",
        RESOLVE
        + 'failed to do request: Head "https://reg.example/v2/": tls: failed to verify certificate: x509: certificate signed by unknown authority',
        "do not trust its certificate",
        never=("reachable",),
    ),
    pull(
        "the registry speaks plain HTTP",
        RESOLVE
        + 'failed to do request: Head "https://reg.example/v2/": http: server gave HTTP response to HTTPS client',
        "speaks plain HTTP",
    ),
    pull(
        "the registry has an error of its own",
        RESOLVE
        + "unexpected status from HEAD request to https://reg.example/v2/team/train/manifests/1: 503 Service Unavailable",
        "error of its own",
        "503 Service Unavailable",
        outlook=OPEN,
    ),
    pull(
        "Docker Hub limits pulls",
        "failed to copy: httpReadSeeker: failed open: unexpected status code https://registry-1.docker.io/v2/team/train/manifests/sha256:1f: 429 Too Many Requests - Server message: toomanyrequests: You have reached your unauthenticated pull rate limit.",
        "docker.io limits how often",
        image="team/train:1",
        outlook=OPEN,
    ),
    pull(
        "the node itself limits pulls",
        "pull QPS exceeded",
        "the node pulls as many images",
        outlook=OPEN,
    ),
    pull(
        "private or absent, Docker Hub does not say",
        'failed to resolve reference "docker.io/team/train:1": pull access denied, repository does not exist or may require authorization: server message: insufficient_scope: authorization failed',
        "does not exist, or the nodes may not read it",
        image="team/train:1",
    ),
    pull(
        "private or absent, Artifact Registry does not say",
        'failed to authorize: failed to fetch oauth token: denied: Permission "artifactregistry.repositories.downloadArtifacts" denied on resource "projects/p/locations/us/repositories/r" (or it may not exist)',
        "does not exist, or the nodes may not read it",
    ),
    pull(
        "the repository is unknown",
        RESOLVE
        + "unexpected status: 404 Not Found: NAME_UNKNOWN: repository name not known to registry",
        "does not exist in its registry (reg.example)",
        outlook=FINAL,
    ),
    pull(
        "the digest is unknown",
        "content digest sha256:1f2e: not found",
        "does not exist in its registry",
        outlook=FINAL,
    ),
    pull(
        "the node's disk is full",
        "failed to extract layer sha256:1f: write /var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/7/fs/lib.so: no space left on device",
        "no space left",
        "boot disk",
    ),
    pull(
        "an image for another processor only",
        "no match for platform in manifest: not found",
        "no variant for linux/amd64",
        outlook=FINAL,
    ),
    pull(
        "a layer that breaks off",
        "failed to copy: httpReadSeeker: failed open: unexpected EOF",
        "breaks off the download",
        "tried again",
        outlook=OPEN,
    ),
    told(
        "the pull failed, and the container's state does not say so yet",
        a_pod(CREATING),
        "does not exist in its registry",
        events=[
            event("Pulling", f'Pulling image "{IMAGE}"'),
            event(
                "Failed",
                f'Failed to pull image "{IMAGE}": rpc error: code = NotFound desc = {RESOLVE}{IMAGE}: not found',
            ),
        ],
        reason=Reason.IMAGE_PULL,
        outlook=FINAL,
    ),
    told(
        "an older kubelet tells the cause in an event only",
        a_pod(waiting("ImagePullBackOff", f'Back-off pulling image "{IMAGE}"')),
        "may not read the image",
        events=[
            event(
                "Failed",
                f'Failed to pull image "{IMAGE}": rpc error: code = Unknown desc = {RESOLVE}unexpected status from HEAD request to https://reg.example/v2/team/train/manifests/1: 403 Forbidden',
            ),
            event("Failed", "Error: ErrImagePull"),
        ],
        reason=Reason.IMAGE_PULL,
    ),
    told(
        "the image of an init container",
        a_pod(
            waiting("PodInitializing"),
            init=[
                (
                    a_container("fetch", image="reg.example/fetch:9"),
                    waiting(
                        "ErrImagePull",
                        'failed to resolve reference "reg.example/fetch:9": reg.example/fetch:9: not found',
                    ),
                )
            ],
        ),
        "reg.example/fetch:9 does not exist",
        reason=Reason.IMAGE_PULL,
        outlook=FINAL,
    ),
]


@pytest.mark.parametrize("case", [*PULLS], ids=lambda case: case.name)
def test_a_failed_pull_is_told_as_it_should_be(case: Situation) -> None:
    case.check(judge(case.seen))
