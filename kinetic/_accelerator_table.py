"""Which accelerators there are, and on which machines: data, nothing else.

Sources, by the titles of Google's documents: "Plan TPUs in GKE" (labels,
topologies, machine types), "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x
(Ironwood)" (chips of each machine, shapes of slices), "GPU machine types" and
"Accelerator-optimized machine family" of Compute Engine (GPUs of each machine,
names of GPUs). To add hardware, add it here, with a source, and write the page
of the reference anew (`tests/unit/test_accelerators.py` says how).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["BARE_GPUS", "BARE_TPUS", "GPUS", "TPUS", "Gpu", "Slice", "Tpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A model of GPU; ``machines`` maps how many are in one machine to its type."""

    name: str
    label: str
    machines: Mapping[int, str]
    aliases: tuple[str, ...] = ()
    arch: str = "amd64"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One shape of TPU slice on one type of machine; ``4x8`` is 32 chips."""

    topology: str
    machine: str
    label: str

    @property
    def chips(self) -> int:
        """How many chips the slice has."""
        return math.prod(int(side) for side in self.topology.split("x"))

    @property
    def chips_per_host(self) -> int:
        """How many chips one machine has: its type ends with it, as in ``-4t``."""
        return int(self.machine.rpartition("-")[2].removesuffix("t"))

    @property
    def hosts(self) -> int:
        """How many machines the slice is spread over."""
        return self.chips // self.chips_per_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Tpu:
    """A generation of TPU.

    Of several slices with as many chips, the first is meant by a number alone.
    ``largest`` is how many chips a cuboid that is not listed may have: GKE takes
    any A≤B≤C of multiples of four above 64 chips, where the generation has a
    third dimension. ``cores`` maps a number that counts TensorCores, and is no
    number of chips here, to chips.
    """

    name: str
    default: int
    slices: tuple[Slice, ...]
    aliases: tuple[str, ...] = ()
    largest: int = 0
    cores: Mapping[int, int]

    def sized(self, chips: int) -> Slice | None:
        """The slice that a number alone means."""
        return next((one for one in self.slices if one.chips == chips), None)

    def shaped(self, topology: str) -> list[Slice]:
        """Every layout of a topology, the preferred one first."""
        listed = [one for one in self.slices if one.topology == topology]
        if not listed and self._is_custom(topology):
            full = self.slices[-1]
            listed = [Slice(topology=topology, machine=full.machine, label=full.label)]
        return listed

    def _is_custom(self, topology: str) -> bool:
        sides = [int(side) for side in topology.split("x")]
        return (
            len(sides) == 3
            and sides == sorted(sides)
            and all(side and side % 4 == 0 for side in sides)
            and 64 < math.prod(sides) <= self.largest
            and topology == "x".join(map(str, sides))  # no leading zeros
        )


def _gpu(
    name: str, label: str, machines: Mapping[int, str], *aliases: str, arch: str = "amd64"
) -> Gpu:
    return Gpu(name=name, label=label, machines=machines, aliases=aliases, arch=arch)


def _slices(label: str, machine: str, topologies: str) -> tuple[Slice, ...]:
    return tuple(
        Slice(topology=topology, machine=machine, label=label) for topology in topologies.split()
    )


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu(
            "l4",
            "nvidia-l4",
            {1: "g2-standard-4", 2: "g2-standard-24", 4: "g2-standard-48", 8: "g2-standard-96"},
        ),
        _gpu(
            "t4",
            "nvidia-tesla-t4",
            {1: "n1-standard-4", 2: "n1-standard-8", 4: "n1-standard-16"},
        ),
        _gpu(
            "a100",
            "nvidia-tesla-a100",
            {
                1: "a2-highgpu-1g",
                2: "a2-highgpu-2g",
                4: "a2-highgpu-4g",
                8: "a2-highgpu-8g",
                16: "a2-megagpu-16g",
            },
            "a100-40gb",
        ),
        # No type with 16: only the 40 GB model has one.
        _gpu(
            "a100-80gb",
            "nvidia-a100-80gb",
            {1: "a2-ultragpu-1g", 2: "a2-ultragpu-2g", 4: "a2-ultragpu-4g", 8: "a2-ultragpu-8g"},
        ),
        _gpu(
            "h100",
            "nvidia-h100-80gb",
            {1: "a3-highgpu-1g", 2: "a3-highgpu-2g", 4: "a3-highgpu-4g", 8: "a3-highgpu-8g"},
            "h100-80gb",
        ),
        _gpu(
            "h100-mega",
            "nvidia-h100-mega-80gb",
            {8: "a3-megagpu-8g"},
            "h100-mega-80gb",
        ),
        _gpu("h200", "nvidia-h200-141gb", {8: "a3-ultragpu-8g"}, "h200-141gb"),
        _gpu("b200", "nvidia-b200", {8: "a4-highgpu-8g"}),
        # Grace hosts: Arm machines, which GKE taints as such.
        _gpu("gb200", "nvidia-gb200", {4: "a4x-highgpu-4g"}, arch="arm64"),
        _gpu("gb300", "nvidia-gb300", {4: "a4x-maxgpu-4g-metal"}, arch="arm64"),
        _gpu(
            "rtx-pro-6000",
            "nvidia-rtx-pro-6000",
            {1: "g4-standard-48", 2: "g4-standard-96", 4: "g4-standard-192", 8: "g4-standard-384"},
        ),
        _gpu(
            "v100",
            "nvidia-tesla-v100",
            {1: "n1-standard-8", 2: "n1-standard-16", 4: "n1-standard-32", 8: "n1-standard-64"},
        ),
        _gpu(
            "p100",
            "nvidia-tesla-p100",
            {1: "n1-standard-4", 2: "n1-standard-8", 4: "n1-standard-16"},
        ),
        _gpu(
            "p4",
            "nvidia-tesla-p4",
            {1: "n1-standard-4", 2: "n1-standard-8", 4: "n1-standard-16"},
        ),
    )
}

TPUS: Mapping[str, Tpu] = {
    tpu.name: tpu
    for tpu in (
        Tpu(
            name="tpu7x",
            default=4,
            slices=_slices("tpu7x", "tpu7x-standard-1t", "1x1x1")
            + _slices(
                "tpu7x",
                "tpu7x-standard-4t",
                "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16",
            ),
            aliases=("7x", "v7x", "ironwood"),
            largest=9216,
            cores={},
        ),
        Tpu(
            name="v6e",
            default=8,
            # Eight chips come on one machine or on two: see kinetic.accelerators.
            slices=_slices("tpu-v6e-slice", "ct6e-standard-1t", "1x1")
            + _slices("tpu-v6e-slice", "ct6e-standard-8t", "2x4")
            + _slices("tpu-v6e-slice", "ct6e-standard-4t", "2x2 2x4 4x4 4x8 8x8 8x16 16x16"),
            aliases=("v6e-slice", "trillium"),
            cores={},
        ),
        Tpu(
            name="v5p",
            default=8,
            slices=_slices(
                "tpu-v5p-slice",
                "ct5p-hightpu-4t",
                "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16 16x16x24",
            ),
            aliases=("v5p-slice",),
            largest=6144,
            cores={},
        ),
        Tpu(
            name="v5litepod",
            default=4,
            slices=_slices("tpu-v5-lite-podslice", "ct5lp-hightpu-1t", "1x1")
            + _slices("tpu-v5-lite-podslice", "ct5lp-hightpu-8t", "2x4")
            + _slices("tpu-v5-lite-podslice", "ct5lp-hightpu-4t", "2x2 2x4 4x4 4x8 8x8 8x16 16x16"),
            aliases=("v5e", "v5-lite-podslice"),
            cores={},
        ),
        Tpu(
            name="v4",
            default=4,
            slices=_slices(
                "tpu-v4-podslice",
                "ct4p-hightpu-4t",
                "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16",
            ),
            aliases=("v4-podslice",),
            largest=4096,
            cores={},
        ),
        Tpu(
            name="v3",
            default=4,
            # A single host is a device and has another label than a slice of a pod.
            slices=_slices("tpu-v3-device", "ct3-hightpu-4t", "2x2")
            + _slices(
                "tpu-v3-slice",
                "ct3p-hightpu-4t",
                "4x4 4x8 8x8 8x16 16x16 16x32 32x32 32x64",
            ),
            aliases=("v3-device", "v3-slice", "v3-podslice"),
            cores={8: 4},
        ),
    )
}

BARE_GPUS: Mapping[int, str] = {1: "h100", 2: "h100", 4: "h100", 8: "h100", 16: "a100"}
"""What a number of GPUs without a model means; newer hardware never changes it."""

BARE_TPUS: Mapping[int, str] = {
    1: "v5litepod",
    4: "v5litepod",
    8: "v6e",
    16: "v6e",
    32: "v5p",
    64: "v5litepod",
    128: "v5litepod",
    256: "v5litepod",
    512: "v4",
    1024: "v4",
    2048: "v4",
    4096: "v4",
}
"""What a number of TPU chips without a generation means; newer hardware never changes it."""
