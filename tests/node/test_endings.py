"""A sample of what can be done to a job, in real containers: its end is told all the same."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.fixtures import Namespace
from tests.cluster.rights import permit_runner
from tests.gke import endings
from tests.gke.endings import KINDS, Deed, Objects, sampled, wrongs
from tests.node.conftest import fresh_namespace
from tests.node.images import JOBS
from tests.node.node import Node

CELLS = int(os.environ.get("KINETIC_TEST_ENDINGS", "6"))
"""Of the hundred of each kind."""
SEED = 1
AT_ONCE = 3
"""Of cells with two pods each, which share two processors."""
NOWHERE = "127.0.0.1:1/held:1"

pytestmark = pytest.mark.usefixtures("controllers")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sample_of_deeds_on_a_real_node(
    kind: str,
    configured: Namespace,
    node: Node,
    bucket: str,
    gcs_server: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(Path(endings.__file__).parent))
    if kind in ("lws", "jobset"):
        monkeypatch.setenv("KINETIC_BACKEND", "pathways")
        monkeypatch.setenv("KINETIC_MULTIHOST", kind)
    options = {"cpu": 0.3, "capture_env_vars": ["STORAGE_EMULATOR_HOST"]}
    with ExitStack() as stack:
        deeds: list[Deed] = []
        for cell in sampled(kind, CELLS, SEED):
            yours = stack.enter_context(fresh_namespace(configured.control_plane, node))
            permit_runner(yours)
            signals = Objects(gcs_server, bucket, f"{yours.name}-")
            deeds.append(Deed(cell, yours, signals, JOBS, NOWHERE, options))
        wrong = await wrongs(deeds, AT_ONCE)
    assert not wrong, wrong
