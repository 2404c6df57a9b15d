"""Checkpoint and resume: a retry continues from the last checkpoint of the attempt before it.

Every attempt of an item has the same KINETIC_OUTPUT_PATH, with the files of the earlier attempts.
In this example the first attempt of each item dies on purpose, as on a preempted machine.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import kinetic

STEPS = 1000


def save_checkpoint(path: Path, state: dict[str, float]) -> None:
    """Replace the checkpoint in one step, so that no attempt ever reads half of one."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(state))
    partial.replace(path)


@kinetic.run(backend="local", accelerator="cpu")
def train(rate: float) -> dict[str, float]:
    """Fit a weight to 3.0 by gradient descent; save a checkpoint every 100 steps."""
    path = Path(os.environ["KINETIC_OUTPUT_PATH"], "checkpoint.json")
    state: dict[str, float] = {"step": 0, "weight": 0.0}
    if path.exists():
        state = json.loads(path.read_text())
    first_step = state["step"]
    attempt = int(os.environ["KINETIC_ATTEMPT"])
    print(f"attempt {attempt} starts at step {first_step}")
    while state["step"] < STEPS:
        state["weight"] -= rate * 2 * (state["weight"] - 3.0)
        state["step"] += 1
        if state["step"] % 100 == 0:
            save_checkpoint(path, state)
        if attempt == 1 and state["step"] == 650:
            os.kill(os.getpid(), signal.SIGKILL)  # the machine dies
    return {"rate": rate, "weight": state["weight"], "resumed at": first_step, "attempts": attempt}


def main() -> None:
    with train.run_async_map([0.001, 0.003, 0.01], name="checkpointing", retries=2) as batch:
        for _, _, outcome in batch.outcomes(ordered=True):
            print(outcome.unwrap())


if __name__ == "__main__":
    main()
