"""By what people who look after a platform tell jobs apart."""

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
    """What a job of a function of this name carries."""
    told: list[Mapping[str, str]] = []

    async def work(run: Run) -> int | None:
        told.append(run.spec.labels)
        return await carry_out(run)

    def function() -> int:
        return 1

    function.__name__ = name
    async with aio.Client(platform=memory_platform(work)) as client:
        run: Any = kinetic.run(accelerator="cpu")
        assert await client.run(run(function)) == 1
    return told[0]


@pytest.mark.parametrize(
    ("name", "begins"),
    [("Größe", "Gro-e-"), ("名前" * 200, "k-"), ("train", "train"), ("<x>", "x-")],
)
async def test_functions_are_told_apart_whatever_they_are_called(name: str, begins: str) -> None:
    found, other = await labels_of(name), await labels_of(name + "2")
    made = [
        job_manifest(order(labels=dict(one)), Placement(secret="s"))["metadata"]["labels"]
        for one in (found, other)
    ]
    mine, theirs = (one["kinetic.dev/function"] for one in made)
    assert mine.startswith(begins) and len(mine) <= 63
    assert mine != theirs or len(name) > 200


async def test_who_has_no_name_submits_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run under a number that nobody has entered anywhere."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert (await labels_of("train"))["kinetic.dev/user"].startswith("uid-")
