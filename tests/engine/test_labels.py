"""Labels let operators of a platform tell jobs apart."""

from __future__ import annotations

import pwd
from collections.abc import Mapping
from typing import Any

import pytest

import kinetic
from kinetic import aio
from kinetic.aio.kubernetes.manifests import Placement, job_manifest
from kinetic.testing import Run, carry_out, memory_platform
from tests.kubernetes.orders import order


async def labels_of(name: str) -> Mapping[str, str]:
    """Return the labels of a job whose function has this *name*."""
    seen: list[Mapping[str, str]] = []

    async def work(run: Run) -> int | None:
        seen.append(run.spec.labels)
        return await carry_out(run)

    def function() -> int:
        return 1

    function.__name__ = name
    async with aio.Client(platform=memory_platform(work)) as client:
        run: Any = kinetic.run(accelerator="cpu")
        assert await client.run(run(function)) == 1
    return seen[0]


@pytest.mark.parametrize(
    ("name", "begins"),
    [("Größe", "Gro-e-"), ("名前" * 200, "k-"), ("train", "train"), ("<x>", "x-")],
)
async def test_functions_are_told_apart_whatever_they_are_called(name: str, begins: str) -> None:
    found, other = await labels_of(name), await labels_of(name + "2")
    rendered = [
        job_manifest(order(labels=dict(labels)), Placement(secret="s"))["metadata"]["labels"]
        for labels in (found, other)
    ]
    first, second = (labels["kinetic.dev/function"] for labels in rendered)
    assert first.startswith(begins) and len(first) <= 63
    assert first != second or len(name) > 200


async def test_a_user_without_a_name_can_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run under a user ID without a name."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert (await labels_of("train"))["kinetic.dev/user"].startswith("uid-")
