"""In-memory adapters for tests; they pass the same contract suite as the real adapters.

They import the ports, the value classes, and the runner, but not the engine or an adapter.
"""

from __future__ import annotations

from kinetic.testing.attempts import carry_out
from kinetic.testing.cluster import MemoryCluster, Run
from kinetic.testing.memory import MemoryStore
from kinetic.testing.platform import memory_platform

__all__ = ["MemoryCluster", "MemoryStore", "Run", "carry_out", "memory_platform"]
