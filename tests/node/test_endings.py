"""Interfere with jobs in real containers, and check that their ends are reported."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.fixtures import Namespace
from tests.cluster.rights import permit_runner
from tests.gke import endings
from tests.gke.endings import KINDS, Objects, Trial, run_all, sampled
from tests.node.conftest import fresh_namespace
from tests.node.images import JOBS
from tests.node.node import Node

CELLS = int(os.environ.get("KINETIC_TEST_ENDINGS", "6"))
"""How many of each kind's hundred cells run."""
SEED = 1
AT_ONCE = 3
"""How many cells run at once: each has two pods, and all share two processors."""
NOWHERE = "127.0.0.1:1/held:1"

pytestmark = pytest.mark.usefixtures("controllers")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sample_of_actions_on_a_real_node(
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
        trials: list[Trial] = []
        for cell in sampled(kind, CELLS, SEED):
            namespace = stack.enter_context(fresh_namespace(configured.control_plane, node))
            permit_runner(namespace)
            signals = Objects(gcs_server, bucket, f"{namespace.name}-")
            trials.append(Trial(cell, namespace, signals, JOBS, NOWHERE, options))
        failures = await run_all(trials, AT_ONCE)
    assert not failures, failures
