"""How many nodes take an accelerator: of a cluster whose list of nodes comes in pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kinetic import configuration
from kinetic.accelerators import parse
from kinetic.aio.kubernetes.inventory import nodes_for
from tests.kubernetes.faults import FaultServer, answer, status
from tests.kubernetes.kubeconfigs import Config


def page(*names: str, more: str = "") -> dict[str, Any]:
    room = {"cpu": "4", "memory": "16Gi"}
    nodes = [{"metadata": {"name": one}, "status": {"allocatable": room}} for one in names]
    return {"metadata": {"continue": more, "resourceVersion": "1"}, "items": nodes}


async def test_a_list_that_the_server_forgot_half_way_is_read_anew(tmp_path: Path) -> None:
    async with FaultServer() as server:
        environ = {**Config(tmp_path, server.url).environ, "KINETIC_KUBE_CONTEXT": "c"}
        target = configuration.resolve(backend="gke", environ=environ)
        server.then(
            answer(page("a", more="next")),
            status(410, "Expired"),
            answer(page("a", more="next")),
            answer(page("b", "c")),
        )
        assert await nodes_for([parse("cpu"), parse("gpu-l4")], target, environ) == [3, 0]
