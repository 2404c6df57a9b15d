"""Find what a cluster has for an accelerator: nodes, the layout of a slice, and a ComputeClass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kinetic import configuration
from kinetic.accelerators import parse
from kinetic.aio.kubernetes.access import open_access
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.compute_classes import COLLECTION, find_class
from kinetic.aio.kubernetes.inventory import layout_in, nodes_for
from tests.kubernetes.faults import FaultServer, answer, status
from tests.kubernetes.kubeconfigs import Config, opened


def page(*names: str, more: str = "") -> dict[str, Any]:
    room = {"cpu": "4", "memory": "16Gi"}
    nodes = [{"metadata": {"name": name}, "status": {"allocatable": room}} for name in names]
    return {"metadata": {"continue": more, "resourceVersion": "1"}, "items": nodes}


async def test_a_list_that_expires_between_its_pages_is_read_again(tmp_path: Path) -> None:
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


ONE, TWO = "ct6e-standard-8t", "ct6e-standard-4t"
"""Machine types: a slice of eight chips takes one of the first or two of the second."""


@pytest.mark.parametrize(
    ("nodes", "pools", "found", "named"),
    [
        ([ONE], [], "tpu-v6e-8", False),
        ([TWO, TWO], [], "tpu-v6e-8:hosts=2", False),
        ([TWO, ONE], [], "tpu-v6e-8", False),
        ([], [(ONE, "")], "tpu-v6e-8", False),
        ([], [(TWO, "2x4")], "tpu-v6e-8:hosts=2", False),
        (None, [(TWO, "2x4")], "tpu-v6e-8:hosts=2", False),
        ([], [(TWO, "")], "tpu-v6e-8", True),  # each machine of that pool is a slice: 2x2
        ([], [(TWO, "4x4")], "tpu-v6e-8", True),
        ([], [], "tpu-v6e-8", True),
        (None, [], "tpu-v6e-8", True),
    ],
)
async def test_a_slice_gets_the_layout_of_a_node_or_pool_or_a_warning_names_the_other(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    nodes: list[str] | None,
    pools: list[tuple[str, str]],
    found: str,
    named: bool,
) -> None:
    """*nodes* is None for a user who may not list nodes."""
    key = "node.kubernetes.io/instance-type"
    items = [{"metadata": {"name": "n", "labels": {key: machine}}} for machine in nodes or ()]
    listed = {"metadata": {"resourceVersion": "1"}, "items": items}
    async with FaultServer() as server:
        environ = {**Config(tmp_path, server.url).environ, "KINETIC_KUBE_CONTEXT": "c"}
        target = configuration.resolve(backend="gke", environ=environ)
        api = Api(await open_access(target, environ))
        refused = status(403, "Forbidden", 'User "ada" cannot list resource "nodes"')
        server.then(refused if nodes is None else answer(listed))
        assert str(await layout_in(api, pools, parse("v6e-8:spot"))) == f"{found}:spot"
        assert ("'tpu-v6e-8:hosts=2:spot'" in caplog.text) is named
        count = len(server.seen)
        for text in ("tpu-v6e-8:hosts=2", "tpu-v6e-4", "gpu-l4", "cpu"):
            assert await layout_in(api, pools, parse(text)) == parse(text)
        assert len(server.seen) == count, "an accelerator with one layout takes no request"
        await api.aclose()


async def test_a_class_is_found_by_the_name_of_its_accelerator(tmp_path: Path) -> None:
    async with FaultServer() as server, opened(Config(tmp_path, server.url)) as api:
        server.then(answer({"metadata": {"name": "gpu-l4-spot"}}), status(404, "NotFound"))
        assert await find_class(api, parse("gpu-l4:spot")) == "gpu-l4-spot"
        assert await find_class(api, parse("gpu-l4")) == ""
        assert [request.path for request in server.seen] == [
            f"{COLLECTION}/gpu-l4-spot",
            f"{COLLECTION}/gpu-l4",
        ]
        for name in ("cpu", "tpu-v6e-16"):
            assert await find_class(api, parse(name)) == ""
        assert len(server.seen) == 2


async def test_a_user_who_may_not_read_classes_has_none(tmp_path: Path) -> None:
    async with FaultServer() as server, opened(Config(tmp_path, server.url)) as api:
        server.then(status(403, "Forbidden", 'User "ada" cannot get resource "computeclasses"'))
        assert await find_class(api, parse("gpu-l4")) == ""
