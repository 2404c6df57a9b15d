"""Train one model on all hosts of a TPU slice, with the Pathways backend.

    python examples/multi_host.py [ROUNDS]

kinetic calls the function once on each host, at the same time, and connects the hosts for JAX. So
the function sees the chips of all hosts. You get the value of the first host. With ACCELERATOR =
"cpu", it is one process here; JAX_NUM_CPU_DEVICES=8 gives that process eight devices.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import kinetic

ACCELERATOR = "cpu"  # or "tpu-v6e-16": 16 chips on 4 hosts, which selects the backend "pathways"
WIDTH = 256


@kinetic.run(accelerator=ACCELERATOR, capture_env_vars=["JAX_NUM_CPU_DEVICES"])
def train(rounds: int) -> dict[str, Any]:
    """Fit two layers. Rows are split over "data", the columns of weights over "model"."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = jax.device_count()
    models = 2 if devices % 2 == 0 else 1
    device_grid = np.reshape(jax.devices(), (devices // models, models))
    mesh = Mesh(device_grid, ("data", "model"))

    def shard(values: Any, *axes: str | None) -> Any:
        """Give each device its part of an array that every host has computed."""
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(64 * devices, 16)).astype("float32")
    rows = shard(inputs, "data", None)
    targets = shard(np.sin(inputs.sum(1, keepdims=True)), "data", None)
    layers = [
        shard(rng.normal(0, 0.3, (16, WIDTH)).astype("float32"), None, "model"),
        shard(rng.normal(0, 0.03, (WIDTH, 1)).astype("float32"), "model", None),
    ]

    @jax.jit
    def loss(layers: Any, rows: Any, targets: Any) -> Any:
        return jnp.mean((jnp.tanh(rows @ layers[0]) @ layers[1] - targets) ** 2)

    @jax.jit
    def take_steps(layers: Any, rows: Any, targets: Any) -> Any:
        """Take 20 steps in one call, which keeps the devices busy."""

        def step(_: Any, layers: Any) -> Any:
            gradients = jax.grad(loss)(layers, rows, targets)
            return jax.tree.map(
                lambda weights, gradient: weights - 0.05 * gradient, layers, gradients
            )

        return jax.lax.fori_loop(0, 20, step, layers)

    for number in range(rounds):
        layers = take_steps(layers, rows, targets)
        print(f"host {jax.process_index()}, round {number}: loss {loss(layers, rows, targets):.3f}")
    value = float(loss(layers, rows, targets))
    return {"hosts": jax.process_count(), "mesh": dict(mesh.shape), "loss": value}


if __name__ == "__main__":
    print(train(int([*sys.argv, "5"][1])))
