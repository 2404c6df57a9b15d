"""What carries the hosts of a job: each kind of set, and the right to delete one's own."""

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
    """What carries the hosts."""
    monkeypatch.setenv("KINETIC_MULTIHOST", request.param)
    return str(request.param)


@pytest.fixture
def permitted(configured: Namespace) -> Namespace:
    """The pods may delete their own set."""
    permit_runner(configured)
    return configured
