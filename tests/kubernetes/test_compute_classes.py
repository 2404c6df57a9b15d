"""Look up the ComputeClass of an accelerator with few requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kinetic.accelerators import parse
from kinetic.aio.kubernetes.compute_classes import COLLECTION, ComputeClasses
from tests.kubernetes.faults import FaultServer, answer, status
from tests.kubernetes.kubeconfigs import Config, opened


async def test_a_class_is_asked_for_once_a_minute(tmp_path: Path) -> None:
    async with FaultServer() as server, opened(Config(tmp_path, server.url)) as api:
        classes = ComputeClasses(api)
        server.then(answer({"metadata": {"name": "gpu-l4-spot"}}), status(404, "NotFound"))
        spot = parse("gpu-l4:spot")
        assert await asyncio.gather(*(classes.find(spot) for _ in range(5))) == ["gpu-l4-spot"] * 5
        assert await classes.find(parse("gpu-l4")) == ""
        assert [request.path for request in server.seen] == [
            f"{COLLECTION}/gpu-l4-spot",
            f"{COLLECTION}/gpu-l4",
        ]
        for name in ("cpu", "tpu-v6e-16"):
            assert await classes.find(parse(name)) == ""
        assert len(server.seen) == 2


async def test_a_user_who_may_not_read_classes_has_none(tmp_path: Path) -> None:
    async with FaultServer() as server, opened(Config(tmp_path, server.url)) as api:
        server.then(status(403, "Forbidden", 'User "ada" cannot get resource "computeclasses"'))
        assert await ComputeClasses(api).find(parse("gpu-l4")) == ""
