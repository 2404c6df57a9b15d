"""Parse the names of accelerators, and derive what each requests from a cluster. No I/O.

The grammar::

    name      = [kind] what {":" option}
    kind      = "gpu-" | "gpu:" | "tpu-" | "tpu:"
    what      = "cpu" [":" cores]                cpu, cpu:4
              | gpu ["x" count]                  l4, gpu-a100x4, nvidia-h100-80gbx8
              | tpu ["-" chips | "-" AxB[xC]]    tpu-v6e-8, v5litepod-2x4, v5p-4x4x12
              | "gpu" | "tpu" | count            gpu, tpu:8, 4
    option    = "spot" | "hosts=" number

Upper and lower case are the same, and the kind is optional. The labels that GKE gives
its nodes (``nvidia-l4``, ``tpu-v6e-slice``) are names, too.

Ambiguous names mean:

* A number counts GPUs, or TPU *chips*. Cloud TPU's own API counts TensorCores
  for v3, v4 and v5p, so its ``v4-8`` is ``v4-4`` here. ``v3-8`` is the exception: it
  means four chips, as in Cloud TPU, because no v3 slice has eight.
* A model without a number is one GPU, or the smallest machine that has it
  (``b200`` is eight). A TPU generation without a number is its default slice:
  eight chips for ``v6e`` and ``v5p``, four for the others.
* ``gpu`` is one L4, ``tpu`` is ``v5litepod-4``. A number alone means that many H100s
  (16 means A100s). If no GPU machine has that many, the number means TPU chips.
* ``a100`` is the model with 40 GB; ``v5e`` is ``v5litepod``; ``h100-mega`` is
  a different machine from ``h100``, with a faster network.
* If several shapes have equally many chips, a number means the default shape
  (``v5p-512`` is 8x8x8); to get another, name the shape.
* ``cpu:4`` asks for four cores; ``cpu`` leaves it to ``cpu=`` and the platform.
  ``cpu:hosts=3`` is three machines without accelerators, which start together.

Eight chips of v6e or v5e are one machine (``ct6e-standard-8t``) or two that share a
slice (``ct6e-standard-4t``); their nodes have the same labels. The name alone means the
layout that the cluster has. If the cluster has both layouts or neither, the name means the
single machine, on which a function runs once and sees all chips. ``tpu-v6e-8:hosts=2`` asks
for two machines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeAlias

from kinetic._messages import join_with_or, suggest
from kinetic._tracebacks import own_frames_left_out
from kinetic.errors import ConfigurationError

__all__ = ["Accelerator", "Kind", "catalogue", "markdown", "parse"]


Kind: TypeAlias = Literal["cpu", "gpu", "tpu"]
"""The category of an accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """The hardware of a job; `parse` makes it, and ``str()`` gives a name that parses back.

    ``count`` is the number of GPUs or TPU chips on all ``hosts`` together; for ``cpu`` the number
    of cores of each host, 0 if unspecified. ``machine`` is the type of each host. ``label`` is
    GKE's name for the hardware, ``topology`` the shape of a TPU slice in chips (``2x4``), ``arch``
    the processor (``amd64`` or ``arm64``).
    """

    kind: Kind
    name: str
    count: int
    hosts: int = 1
    topology: str = ""
    machine: str = ""
    label: str = ""
    arch: str = "amd64"
    spot: bool = False

    def __str__(self) -> str:
        match self.kind:
            case "cpu":
                text = f"cpu:{self.count}" if self.count else "cpu"
                text += f":hosts={self.hosts}" if self.hosts > 1 else ""
            case "gpu":
                text = f"gpu-{self.name}" + (f"x{self.count}" if self.count > 1 else "")
            case "tpu":
                text = self._slice_name()
        return f"{text}:spot" if self.spot else text

    def _slice_name(self) -> str:
        family = TPUS[self.name]
        default = family.sized(self.count)
        stem = self.name if self.name.startswith("tpu") else f"tpu-{self.name}"
        size = str(self.count) if default and default.topology == self.topology else self.topology
        hosts_option = "" if self.hosts == self.layouts[0].hosts else f":hosts={self.hosts}"
        return f"{stem}-{size}{hosts_option}"

    @property
    def chips_per_host(self) -> int:
        """How many GPUs or chips each host has, and each pod requests; 0 for ``cpu``."""
        return self.count // self.hosts if self.kind != "cpu" else 0

    @property
    def multi_host(self) -> bool:
        """Whether the accelerator has several hosts, which must start together."""
        return self.hosts > 1

    @property
    def resource(self) -> str:
        """The Kubernetes resource to request, such as ``google.com/tpu``; empty for a CPU."""
        return {"cpu": "", "gpu": "nvidia.com/gpu", "tpu": "google.com/tpu"}[self.kind]

    @property
    def node_selector(self) -> dict[str, str]:
        """The labels that a node must have for a pod of this job.

        For a layout on more hosts than the usual one, the labels include the machine type. Nodes of
        both layouts share all other labels, so without the type a pod could take half of a larger
        machine. `node_affinity` has the label that may have several values.
        """
        selector: dict[str, str] = {}
        if self.kind == "gpu":
            selector["cloud.google.com/gke-accelerator"] = self.label
        elif self.kind == "tpu":
            if not self.node_affinity:
                selector["cloud.google.com/gke-tpu-accelerator"] = self.label
            selector["cloud.google.com/gke-tpu-topology"] = self.topology
            if self.machine != self.layouts[0].machine:
                selector["node.kubernetes.io/instance-type"] = self.machine
        if self.spot:
            selector["cloud.google.com/gke-spot"] = "true"
        return selector

    @property
    def node_affinity(self) -> dict[str, tuple[str, ...]]:
        """The labels for which a node must have one of several values."""
        others = TPUS[self.name].labels if self.kind == "tpu" else ()
        return {"cloud.google.com/gke-tpu-accelerator": (self.label, *others)} if others else {}

    @property
    def layouts(self) -> tuple[Accelerator, ...]:
        """The same chips on each machine type that has them, the usual one first."""
        if self.kind != "tpu":
            return (self,)
        layouts = TPUS[self.name].shaped(self.topology)
        return tuple(replace(layout, spot=self.spot) for layout in layouts)

    def among(self, pools: Collection[tuple[str, str]]) -> Accelerator:
        """Return the first layout that has a pool, or this layout if none has a pool yet.

        Each of *pools* is a machine type and a topology. Also returns this layout if it isn't the
        usual one, because the user has named it then.
        """
        if self != self.layouts[0]:
            return self
        existing = (layout for layout in self.layouts if (layout.machine, layout.topology) in pools)
        return next(existing, self)


CPU = Accelerator(kind="cpu", name="cpu", count=0)
"""A host without accelerators, with an unspecified number of cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A model of GPU; ``sizes`` has the machine for each possible number of GPUs."""

    name: str
    label: str
    sizes: Mapping[int, Accelerator]
    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tpu:
    """A generation of TPU.

    A number alone means the first of ``slices`` with that many chips. GKE takes other shapes, too:
    AxBxC with A≤B≤C, multiples of four, more than 64 chips, and at most ``largest``. ``largest`` is
    0 for two-dimensional generations. ``cores`` maps numbers of TensorCores, such as the 8 of
    ``v3-8``, to chips. ``labels`` are other GKE labels that keras-kinetic uses for the generation.
    """

    name: str
    default: int
    slices: tuple[Accelerator, ...]
    aliases: tuple[str, ...]
    largest: int = 0
    cores: Mapping[int, int] = field(default_factory=dict[int, int])
    labels: tuple[str, ...] = ()

    @property
    def by_size(self) -> list[Accelerator]:
        """The slices, the smallest first; of equal ones, the one on fewer hosts first."""
        return sorted(self.slices, key=lambda listed: (listed.count, listed.hosts))

    def sized(self, chips: int) -> Accelerator | None:
        """Return the slice that a number alone means; None if there is none."""
        return next((listed for listed in self.slices if listed.count == chips), None)

    def shaped(self, topology: str) -> list[Accelerator]:
        """Return a slice for each machine type with this topology, if any; the usual one first."""
        found = [listed for listed in self.slices if listed.topology == topology]
        if not found and self._is_custom(topology):
            largest = self.slices[-1]
            found = [_make_slice(self.name, largest.label, largest.machine, topology)]
        return found

    def _is_custom(self, topology: str) -> bool:
        """Return whether GKE takes this shape although ``slices`` doesn't list it."""
        sides = [int(side) for side in topology.split("x")]
        return (
            len(sides) == 3
            and sides == sorted(sides)
            and all(side and side % 4 == 0 for side in sides)
            and 64 < math.prod(sides) <= self.largest
            and topology == "x".join(map(str, sides))  # no leading zeros
        )


def _make_gpu(name: str, label: str, machines: str, *aliases: str, arch: str = "amd64") -> Gpu:
    """Make a model from *machines* such as ``1:g2-standard-4 2:g2-standard-24``."""
    sizes: dict[int, Accelerator] = {}
    for pair in machines.split():
        number, machine = pair.split(":")
        count = int(number)
        sizes[count] = Accelerator(
            kind="gpu", name=name, count=count, machine=machine, label=label, arch=arch
        )
    return Gpu(name=name, label=label, sizes=sizes, aliases=aliases)


def _make_tpu(name: str, default: int, *aliases: str, slices: Iterable[str], **rest: Any) -> Tpu:
    """Make a generation; each of *slices* is a label, a machine, and topologies."""
    made: list[Accelerator] = []
    for row in slices:
        label, machine, *topologies = row.split()
        made += (_make_slice(name, label, machine, topology) for topology in topologies)
    return Tpu(name=name, default=default, slices=tuple(made), aliases=aliases, **rest)


def _make_slice(name: str, label: str, machine: str, topology: str) -> Accelerator:
    """Make a slice; *machine* ends with the number of its chips, as in ``-4t``."""
    chips = math.prod(int(side) for side in topology.split("x"))
    chips_per_host = int(machine.rpartition("-")[2].removesuffix("t"))
    return Accelerator(
        kind="tpu",
        name=name,
        count=chips,
        hosts=chips // chips_per_host,
        topology=topology,
        machine=machine,
        label=label,
    )


_N1_SMALL = "1:n1-standard-4 2:n1-standard-8 4:n1-standard-16"

GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _make_gpu(
            "l4", "nvidia-l4", "1:g2-standard-4 2:g2-standard-24 4:g2-standard-48 8:g2-standard-96"
        ),
        _make_gpu("t4", "nvidia-tesla-t4", _N1_SMALL),
        _make_gpu(
            "a100",
            "nvidia-tesla-a100",
            "1:a2-highgpu-1g 2:a2-highgpu-2g 4:a2-highgpu-4g 8:a2-highgpu-8g 16:a2-megagpu-16g",
            "a100-40gb",
        ),
        # Google documents no type with 16. keras-kinetic accepts it, so a pool may exist.
        _make_gpu(
            "a100-80gb",
            "nvidia-a100-80gb",
            " ".join(f"{count}:a2-ultragpu-{count}g" for count in (1, 2, 4, 8, 16)),
        ),
        _make_gpu(
            "h100",
            "nvidia-h100-80gb",
            "1:a3-highgpu-1g 2:a3-highgpu-2g 4:a3-highgpu-4g 8:a3-highgpu-8g",
            "h100-80gb",
        ),
        _make_gpu("h100-mega", "nvidia-h100-mega-80gb", "8:a3-megagpu-8g", "h100-mega-80gb"),
        _make_gpu("h200", "nvidia-h200-141gb", "8:a3-ultragpu-8g", "h200-141gb"),
        _make_gpu("b200", "nvidia-b200", "8:a4-highgpu-8g"),
        # The hosts have Grace processors, which are Arm; GKE taints such nodes.
        _make_gpu("gb200", "nvidia-gb200", "4:a4x-highgpu-4g", arch="arm64"),
        _make_gpu("gb300", "nvidia-gb300", "4:a4x-maxgpu-4g-metal", arch="arm64"),
        _make_gpu(
            "rtx-pro-6000",
            "nvidia-rtx-pro-6000",
            "1:g4-standard-48 2:g4-standard-96 4:g4-standard-192 8:g4-standard-384",
        ),
        _make_gpu(
            "v100",
            "nvidia-tesla-v100",
            "1:n1-standard-8 2:n1-standard-16 4:n1-standard-32 8:n1-standard-64",
        ),
        _make_gpu("p100", "nvidia-tesla-p100", _N1_SMALL),
        _make_gpu("p4", "nvidia-tesla-p4", _N1_SMALL),
    )
}

_CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16"
_SQUARES = "2x2 2x4 4x4 4x8 8x8 8x16 16x16"

TPUS: Mapping[str, Tpu] = {
    tpu.name: tpu
    for tpu in (
        _make_tpu(
            *("tpu7x", 4, "7x", "v7x", "ironwood"),
            slices=[
                "tpu7x tpu7x-standard-1t 1x1x1",
                f"tpu7x tpu7x-standard-4t {_CUBES}",
            ],
            largest=9216,
        ),
        _make_tpu(
            *("v6e", 8, "v6e-slice", "trillium"),
            # Eight chips come on one machine or on two: see this module's docstring.
            slices=[
                "tpu-v6e-slice ct6e-standard-1t 1x1",
                "tpu-v6e-slice ct6e-standard-8t 2x4",
                f"tpu-v6e-slice ct6e-standard-4t {_SQUARES}",
            ],
        ),
        _make_tpu(
            *("v5p", 8, "v5p-slice"),
            slices=[f"tpu-v5p-slice ct5p-hightpu-4t {_CUBES} 16x16x24"],
            largest=6144,
        ),
        _make_tpu(
            *("v5litepod", 4, "v5e", "v5-lite-podslice"),
            slices=[
                "tpu-v5-lite-podslice ct5lp-hightpu-1t 1x1",
                "tpu-v5-lite-podslice ct5lp-hightpu-8t 2x4",
                f"tpu-v5-lite-podslice ct5lp-hightpu-4t {_SQUARES}",
            ],
        ),
        _make_tpu(
            *("v4", 4, "v4-podslice"),
            slices=[f"tpu-v4-podslice ct4p-hightpu-4t {_CUBES}"],
            largest=4096,
        ),
        _make_tpu(
            *("v3", 4, "v3-device", "v3-slice", "v3-podslice"),
            # A slice on a single host has another label than larger ones.
            slices=[
                "tpu-v3-device ct3-hightpu-4t 2x2",
                "tpu-v3-slice ct3p-hightpu-4t 4x4 4x8 8x8 8x16 16x16 16x32 32x32 32x64",
            ],
            cores={8: 4},
            labels=("tpu-v3-podslice",),
        ),
    )
}

BARE_GPUS: Mapping[int, str] = {1: "h100", 2: "h100", 4: "h100", 8: "h100", 16: "a100"}
"""The GPU model for a bare number of GPUs; newer hardware never changes this table."""

BARE_TPUS: Mapping[int, str] = {
    **dict.fromkeys((1, 4), "v5litepod"),
    **dict.fromkeys((8, 16), "v6e"),
    32: "v5p",
    **dict.fromkeys((64, 128, 256), "v5litepod"),
    **dict.fromkeys((512, 1024, 2048, 4096), "v4"),
}
"""The TPU generation for a bare number of chips; newer hardware never changes this table."""


MOST_HOSTS = 1024
"""Limit of hosts without accelerators in one job."""

PREFIXED = re.compile(r"(cpu|gpu|tpu)(?:[:-](.+))?", re.ASCII | re.DOTALL)
COUNT = re.compile(r"[0-9]{1,6}", re.ASCII)
GPU_AND_COUNT = re.compile(r"(.+)x([0-9]{1,6})", re.ASCII)
TPU_AND_SIZE = re.compile(r"(.+)-([0-9]{1,6}(?:x[0-9]{1,6}){0,2})", re.ASCII)

GPU_NAMES = {alias: gpu for gpu in GPUS.values() for alias in (gpu.name, gpu.label, *gpu.aliases)}
TPU_NAMES = {alias: tpu for tpu in TPUS.values() for alias in (tpu.name, *tpu.aliases)}


@own_frames_left_out
def parse(text: str, *, spot: bool = False) -> Accelerator:
    """Read the name of an accelerator; the module's documentation has the grammar.

    Args:
        text: A name such as ``tpu-v6e-8``, ``gpu-a100x4:spot`` or ``cpu``.
        spot: Ask for spot machines, whether or not the name does.

    Raises:
        ConfigurationError: There is no such accelerator; the message has the nearest names.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(
            f"accelerator must be a name such as 'tpu-v5e-1', not {type(text).__name__}"
        )
    body, hosts, named_spot = _split_options(text)
    prefixed = PREFIXED.fullmatch(body)
    kind, rest = (prefixed[1], prefixed[2] or "") if prefixed else ("", body)
    found = _parse_cpu(rest) if kind == "cpu" else _parse_gpu(kind, rest) or _parse_tpu(kind, rest)
    if found is None:
        _raise_unknown(text, body, f":hosts={hosts}" * bool(hosts) + ":spot" * named_spot)
    if hosts is not None:
        found = _on_hosts(found, hosts)
    return replace(found, spot=spot or named_spot)


def catalogue() -> tuple[Accelerator, ...]:
    """Return every accelerator of the table, with each layout of a TPU slice."""
    return (
        CPU,
        *(accelerator for gpu in GPUS.values() for accelerator in gpu.sizes.values()),
        *(accelerator for tpu in TPUS.values() for accelerator in tpu.by_size),
    )


def _split_options(text: str) -> tuple[str, int | None, bool]:
    """Split a name into its body, its number of hosts, and whether it is spot."""
    body, hosts, spot = text.strip().lower(), None, False
    while True:
        head, colon, option = body.rpartition(":")
        name, equals, value = option.partition("=")
        if colon and option == "spot" and not spot:
            spot = True
        elif colon and equals and name == "hosts" and COUNT.fullmatch(value) and hosts is None:
            hosts = int(value)
        else:
            return body, hosts, spot
        body = head


def _parse_cpu(rest: str) -> Accelerator | None:
    if rest and not COUNT.fullmatch(rest):
        return None
    return Accelerator(kind="cpu", name="cpu", count=int(rest or 0))


def _parse_gpu(kind: str, rest: str) -> Accelerator | None:
    """Return the GPUs that *rest* names; None if it names no GPU, or if *kind* is ``tpu``."""
    if kind == "tpu":
        return None
    if COUNT.fullmatch(rest):
        name = BARE_GPUS.get(int(rest))
        return GPUS[name].sizes[int(rest)] if name else None
    if gpu := GPU_NAMES.get(rest if rest or kind != "gpu" else "l4"):
        return gpu.sizes[min(gpu.sizes)]
    counted = GPU_AND_COUNT.fullmatch(rest)
    if counted is None or (gpu := GPU_NAMES.get(counted[1])) is None:
        return None
    if (count := int(counted[2])) not in gpu.sizes:
        choices = join_with_or(f"gpu-{gpu.name}x{number}" for number in sorted(gpu.sizes))
        raise ConfigurationError(
            f"no machine has {count} GPUs of the model {gpu.name}; there are {choices}"
        )
    return gpu.sizes[count]


def _parse_tpu(kind: str, rest: str) -> Accelerator | None:
    """Return the slice that *rest* names; None if it names no slice, or if *kind* is ``gpu``."""
    if kind == "gpu":
        return None
    if COUNT.fullmatch(rest):
        name = BARE_TPUS.get(int(rest))
        return _of_size(TPUS[name], rest) if name else None
    if tpu := TPU_NAMES.get(rest if rest or kind != "tpu" else "v5litepod"):
        return _of_size(tpu, str(tpu.default))
    sized = TPU_AND_SIZE.fullmatch(rest)
    if sized is None or (tpu := TPU_NAMES.get(sized[1])) is None:
        return None
    return _of_size(tpu, sized[2])


def _of_size(tpu: Tpu, size: str) -> Accelerator:
    """Return the slice whose number of chips, or whose shape, is *size*."""
    if "x" in size:
        found = next(iter(tpu.shaped(size)), None)
    else:
        found = tpu.sized(tpu.cores.get(int(size), int(size)))
    if found is None:
        chips = join_with_or(dict.fromkeys(str(listed.count) for listed in tpu.by_size))
        shapes = join_with_or(dict.fromkeys(listed.topology for listed in tpu.by_size))
        raise ConfigurationError(
            f"TPU {tpu.name} has no slice {size}; sizes: {chips} chips; shapes: {shapes}"
        )
    return found


def _on_hosts(accelerator: Accelerator, hosts: int) -> Accelerator:
    """Return *accelerator* on that number of hosts; for a TPU, this chooses the layout."""
    if accelerator.kind == "cpu" and 0 < hosts <= MOST_HOSTS:
        return replace(accelerator, hosts=hosts)
    for layout in accelerator.layouts:
        if layout.hosts == hosts:
            return layout
    possible = join_with_or(str(layout.hosts) for layout in accelerator.layouts)
    raise ConfigurationError(
        f"{accelerator} can't have {hosts} hosts; its number of hosts is {possible}"
    )


def _raise_unknown(text: str, body: str, options: str) -> NoReturn:
    names = {str(accelerator) for accelerator in catalogue()}
    known = names | {name.partition("-")[2] or name for name in names} | {*GPU_NAMES} | {*TPU_NAMES}
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    otherwise = (
        "names are like 'tpu-v6e-8', 'gpu-a100x4' and 'cpu'; the GPUs are "
        f"{', '.join(GPUS)} and the TPUs {', '.join(TPUS)}"
    )
    if body in _ANY_GPU:
        hint = "for a GPU write its model, such as 'gpu-l4', 'gpu-a100' or 'gpu-h100'"
    else:
        hint = suggest(
            body + options, sorted(name + options for name in known), otherwise=otherwise
        )
    raise ConfigurationError(f"there is no accelerator {shown!r}; {hint}")


_ANY_GPU = frozenset({"cuda", "nvidia", "cuda:0", "gpu:cuda", "gpu-cuda"})
"""Names for any GPU in other libraries; kinetic needs a model."""


def markdown() -> str:
    """Return the tables of all accelerators in Markdown, as the documentation shows them."""
    lines = [
        "| GPU | other names | count: machine | GKE label |",
        "| --- | --- | --- | --- |",
    ]
    for gpu in GPUS.values():
        sizes = gpu.sizes.values()
        machines = ", ".join(f"{listed.count}: `{listed.machine}`" for listed in sizes)
        note = "".join({f" ({listed.arch})" for listed in sizes if listed.arch != "amd64"})
        lines.append(
            f"| `gpu-{gpu.name}`{note} | {_quote_names(gpu.aliases)} | {machines} | `{gpu.label}` |"
        )
    lines += [
        "",
        "| TPU slice | chips | topology | hosts | machine | GKE label |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{accelerator}` | {accelerator.count} | {accelerator.topology} | {accelerator.hosts} "
        f"| `{accelerator.machine}` | `{accelerator.label}` |"
        for accelerator in catalogue()
        if accelerator.kind == "tpu"
    ]
    lines += ["", "| TPU | other names | without a number |", "| --- | --- | --- |"]
    lines += [
        f"| `{tpu.name}` | {_quote_names(tpu.aliases)} | `{_of_size(tpu, str(tpu.default))}` |"
        for tpu in TPUS.values()
    ]
    return "\n".join(lines) + "\n"


def _quote_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
