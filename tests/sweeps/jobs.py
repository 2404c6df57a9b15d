"""The functions and spaces of the tests of sweeps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import kinetic
from kinetic.sweeps import Choice, Float, Int

SPACE = {"rate": Float(1e-5, 1e-1, log=True), "layers": Int(1, 4)}
GRID = {"rate": Choice([0.1, 0.01]), "layers": Int(1, 3)}


@kinetic.run(backend="local", accelerator="cpu")
def train(rate: float, layers: int) -> float:
    return (rate - 0.01) ** 2 + layers


@kinetic.run(backend="local", accelerator="cpu")
def returns(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("raise"):
        raise ValueError(value)
    texts: dict[Any, Any] = {"nan": float("nan"), "none": None, "array": [1.0]}
    return texts.get(value, value) if isinstance(value, str) else value


@kinetic.run(backend="local", accelerator="cpu")
def waits(folder: str, number: int) -> float:
    """Leave a mark, and wait for the file ``go``."""
    Path(folder, f"ran.{number}.{time.time_ns()}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return float(number)


@kinetic.run(backend="local", accelerator="cpu")
def fails_once(folder: str, number: int) -> float:
    mark = Path(folder, f"failed.{number}")
    if not mark.exists():
        mark.touch()
        raise ValueError(f"trial with {number}")
    return float(number)


@kinetic.run(backend="local", accelerator="cpu")
def learns(rate: float) -> float:
    """Report 50 values, the lower the nearer *rate* is to 0.3."""
    for step in range(1, 51):
        time.sleep(0.02)
        kinetic.report(step, abs(rate - 0.3) + 1 / step)
    return abs(rate - 0.3)


@kinetic.run(backend="local", accelerator="cpu")
def goes_back(value: float) -> float:
    for step in (5, 3, 6):
        kinetic.report(step, {"loss": value, "step": step})
    return value
