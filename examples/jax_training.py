"""Train with JAX on several processes of this machine, each with its part of the data.

    python examples/jax_training.py [PROCESSES] [STEPS]

Each process is an item of a batch. JAX connects them and averages the gradients over all parts.
The machine needs at least as many CPUs as processes, because all of them run at the same time.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import numpy as np

import kinetic

ROWS = 512  # of each process
WEIGHTS = np.array([2.0, -1.0, 0.5])


def draw_data(rank: int) -> tuple[Any, Any]:
    """Draw the data of one process: inputs, and noisy outputs of a linear function."""
    rng = np.random.default_rng(rank)
    inputs = rng.normal(size=(ROWS, len(WEIGHTS)))
    return inputs, inputs @ WEIGHTS + rng.normal(0, 0.1, ROWS)


@kinetic.run(backend="local", accelerator="cpu")
def train(rank: int, processes: int, coordinator: str, steps: int) -> dict[str, Any]:
    """Fit a linear function to the data of all processes by gradient descent."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    jax.distributed.initialize(coordinator, processes, rank)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharded, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], []))
    inputs, outputs = (
        jax.make_array_from_process_local_data(sharded, local_rows)
        for local_rows in draw_data(rank)
    )

    def loss(weights: Any, inputs: Any, outputs: Any) -> Any:
        return jnp.mean((inputs @ weights - outputs) ** 2)

    @jax.jit
    def step(weights: Any, inputs: Any, outputs: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, inputs, outputs)
        return weights - 0.1 * gradient, value

    weights, value = jax.device_put(np.zeros(len(WEIGHTS)), replicated), 0.0
    for iteration in range(steps):
        weights, value = step(weights, inputs, outputs)
        if iteration % 20 == 0:
            print(f"process {rank}, step {iteration}: loss {value:.4f}")
    jax.distributed.shutdown()
    return {"devices": jax.device_count(), "loss": float(value), "weights": np.asarray(weights)}


def main(processes: int = 2, steps: int = 60) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    calls = [(rank, processes, coordinator, steps) for rank in range(processes)]
    with train.run_async_map(calls, fail_fast=True, cancel_running_on_fail=True) as batch:
        results = batch.results()
    for rank, result in enumerate(results):
        print(f"process {rank}: {result['devices']} devices, weights {result['weights'].round(2)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
