"""Fixtures for the kinds of sets that carry a job's hosts, and a pod's right to delete its set."""

from __future__ import annotations

import pytest

from tests.cluster.fixtures import Namespace
from tests.cluster.rights import permit_runner

COLLECTIONS = {
    "lws": "leaderworkerset.x-k8s.io/v1/leaderworkersets",
    "jobset": "jobset.x-k8s.io/v1alpha2/jobsets",
}


@pytest.fixture(params=COLLECTIONS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Configure and return the kind of set that carries the hosts."""
    monkeypatch.setenv("KINETIC_MULTIHOST", request.param)
    return str(request.param)


@pytest.fixture
def permitted(configured: Namespace) -> Namespace:
    """Let the pods delete their own set."""
    permit_runner(configured)
    return configured
