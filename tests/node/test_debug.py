"""Reach a debugger in a real container through the API server, the kubelet, and containerd."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio
from kinetic.debug import cleanup_port_forward
from tests.cluster.fixtures import Namespace
from tests.face.editor import attached, stopped_at
from tests.node.images import JOBS

DEADLINE_S = 180.0
PROGRAM = f"""
import kinetic

@kinetic.run(
    accelerator="cpu", container_image="{JOBS}", cpu=0.4,
    capture_env_vars=["STORAGE_EMULATOR_HOST"], debug=True,
)
def doubled(x):
    y = x * 2
    return y
"""


async def test_the_function_stops_where_the_editor_says(
    client: aio.Client, configured: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The project contains debugpy, because the image has neither it nor a package index."""
    spec = importlib.util.find_spec("debugpy")
    assert spec is not None and spec.origin is not None
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.c", "*.pyx")
    shutil.copytree(Path(spec.origin).parent, tmp_path / "debugpy", ignore=ignored)
    (tmp_path / "experiment.py").write_text(PROGRAM)
    monkeypatch.delenv("KINETIC_PACKAGE_ROOT", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment: Any = importlib.import_module("experiment")

    try:
        async with asyncio.timeout(DEADLINE_S):
            job = await client.submit(experiment.doubled, 21)
            forwarder, port = await attached(job)
            file = tmp_path / "experiment.py"
            frame, variables = await asyncio.to_thread(stopped_at, port, file, 10)
            assert (frame["name"], variables) == ("doubled", {"x": "21", "y": "42"})
            assert await job.result() == 42
            assert await asyncio.to_thread(forwarder.wait, 60) == 0
            await job.cleanup()
        cleanup_port_forward(forwarder)
    finally:
        del sys.modules["experiment"]
