"""Train a PyTorch model. A later attempt continues from the last checkpoint.

    python examples/pytorch_training.py [EPOCHS]

With ACCELERATOR = "cpu", the job runs on this machine. Change it to run on a cluster.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import kinetic

ACCELERATOR = "cpu"  # or "gpu-l4", "gpu-a100"


@kinetic.run(accelerator=ACCELERATOR)
def train(rate: float, epochs: int) -> dict[str, float | str]:
    """Fit a network to the product of two numbers; save a checkpoint after each epoch."""
    import torch
    from torch import nn

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    inputs = torch.rand(4096, 2, device=device) * 2 - 1
    targets = inputs.prod(1, keepdim=True)
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    checkpoint, first_epoch = Path(os.environ["KINETIC_OUTPUT_PATH"], "checkpoint.pt"), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epoch"] + 1

    loss = torch.tensor(float("nan"))
    for epoch in range(first_epoch, epochs):
        for rows in torch.randperm(len(inputs), device=device).split(256):
            loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.5f}")
        partial = checkpoint.with_suffix(".partial")
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**states, "epoch": epoch}, partial)
        partial.replace(checkpoint)
    return {"device": device, "loss": round(loss.item(), 5)}


def main(epochs: int = 10) -> None:
    calls = [{"rate": rate, "epochs": epochs} for rate in (0.001, 0.01)]
    with train.run_async_map(calls, name="pytorch", retries=2) as batch:
        for _, call, outcome in batch.outcomes(ordered=True):
            print(call, "->", outcome.unwrap())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
