"""Orders for stand-ins of the runner, and the facts that tell a stand-in what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from kinetic._runner.protocol import wire

RUNNER = Path(__file__).parents[1] / "runner"
NOTHING = wire.Input(name="", start=0, stop=0, digest="")


def order_of(facts: dict[str, Any], **fields: Any) -> wire.Order:
    """Return an order that tells a stand-in these *facts*; see `facts_of`."""
    defaults: dict[str, Any] = {"job_id": "job-a", "index": 0, "attempt": 1}
    return wire.Order(
        store="gs://kn-nowhere",
        scope="jobs/job-a/",
        function=NOTHING,
        arguments=NOTHING,
        client={"facts": json.dumps(facts)},
        **defaults | fields,
    )


def runner_with(attempt: str, folder: Path) -> Path:
    """Return the runner's folder with another `kinetic._runner.job.attempt`."""
    runner = folder / "runner"
    shutil.copytree(RUNNER, runner, ignore=shutil.ignore_patterns("__pycache__"))
    (runner / "job" / "attempt.py").write_text(attempt)
    return runner


def facts_of(order: wire.Order) -> Any:
    """Return the facts of `order_of`; a stand-in in another process decodes them likewise."""
    return json.loads(order.client["facts"])
