"""Make job specs like the engine's for tests of manifests and clusters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic._runner.protocol.workers import Crew, Terms
from kinetic.aio.kubernetes.manifests import Placement
from kinetic.aio.kubernetes.sets import KINDS
from kinetic.aio.ports import Image, JobSpec, Resources

CREW = Crew(terms=Terms(single=True), outputs="", created=0.0)

LABELS = {
    "app": "kinetic",
    "kinetic.dev/user": "ada",
    "kinetic.dev/function": "train",
    "kinetic.dev/kind": "item",
    "kinetic.dev/submission": "grp-1",
    "kinetic.dev/index": "7",
    "kinetic.dev/attempt": "2",
}


def order(**changes: Any) -> JobSpec:
    """Make the spec of a batch's job; *changes* are fields of `JobSpec` or of its order."""
    stored = wire.Input(name="functions/a.pkl", start=0, stop=10, digest="ab")
    order_fields: dict[str, Any] = {
        "store": "gs://p-kn-c-jobs",
        "scope": "batches/grp-1/",
        "job_id": "grp-1-7",
        "index": 7,
        "attempt": 2,
        "budgets": RetryBudgets(user=2),
        "function": stored,
        "arguments": stored,
        "output_dir": "gs://p-kn-c-jobs/outputs/$(HOME)",
    }
    order_fields |= {name: value for name, value in changes.items() if name in wire.Order.__slots__}
    order_fields["data"] = tuple(wire.DataRef(**ref) for ref in changes.get("data", ()))
    fields: dict[str, Any] = {
        "name": "grp-1-7-2",
        "labels": LABELS,
        "image": Image(uri="europe-docker.pkg.dev/p/kn-c/base:tpu-1", command=("python3",)),
        "environment": {"HF_TOKEN": "geheim", "WANDB.KEY": "größe"},
        "key": b"k" * 32,
        "resources": Resources(),
    }
    fields |= {name: value for name, value in changes.items() if name in JobSpec.__slots__}
    return JobSpec(order=wire.Order(**order_fields), **fields)


def set_manifest(
    kind: str, spec: JobSpec, at: Placement, *, life: str = "a", rank: int | None = None
) -> dict[str, Any]:
    """Make the manifest of a set."""
    return KINDS[kind].manifest(replace(spec, crew=CREW), at, life=life, rank=rank)
