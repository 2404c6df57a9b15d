"""Test every entry of the accelerator table, every way to name it, and invalid names.

After a change of the table, regenerate the reference page::

    python -m tests.unit.test_accelerators
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic.accelerators import (
    BARE_GPUS,
    BARE_TPUS,
    GPUS,
    TPUS,
    Accelerator,
    catalogue,
    markdown,
    parse,
)
from kinetic.errors import ConfigurationError

PAGE = Path(__file__).parents[2] / "docs" / "accelerators.md"
BEGIN, END = "<!-- the table: generated -->\n", "<!-- end of the table -->\n"
EVERYTHING = catalogue()

CUBES = "4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16"


# --- the table ---


@pytest.mark.parametrize("entry", EVERYTHING, ids=str)
def test_an_entry_is_consistent_and_its_names_parse(entry: Accelerator) -> None:
    assert entry.chips_per_host * entry.hosts == entry.count
    assert entry.multi_host == (entry.hosts > 1)
    assert entry.arch == ("arm64" if entry.name in ("gb200", "gb300") else "amd64")
    name = str(entry)
    bare = name.removeprefix("gpu-").removeprefix("tpu-")
    assert parse(name) == parse(bare) == parse(f"  {name.upper()}\n") == entry
    assert [other for other in EVERYTHING if str(other) == name] == [entry]
    if entry.kind != "cpu":
        assert parse(f"{entry.kind}:{bare}") == parse(f"{entry.kind}-{bare}") == entry
    spot = parse(f"{entry}:spot")
    assert spot == parse(name, spot=True) == parse(str(spot)) and spot.spot
    assert str(spot) == f"{entry}:spot"
    assert spot.node_selector == {**entry.node_selector, "cloud.google.com/gke-spot": "true"}


@pytest.mark.parametrize("entry", EVERYTHING, ids=str)
def test_the_node_labels_and_the_resource_of_an_entry(entry: Accelerator) -> None:
    selector = entry.node_selector
    match entry.kind:
        case "cpu":
            assert (selector, entry.resource) == ({}, "")
        case "gpu":
            assert selector == {"cloud.google.com/gke-accelerator": entry.label}
            assert (entry.resource, entry.hosts, entry.topology) == ("nvidia.com/gpu", 1, "")
        case "tpu":
            key = "cloud.google.com/gke-tpu-accelerator"
            assert entry.label in (selector.get(key), *entry.node_affinity.get(key, ()))
            assert selector["cloud.google.com/gke-tpu-topology"] == entry.topology
            assert entry.resource == "google.com/tpu"
            assert math.prod(int(side) for side in entry.topology.split("x")) == entry.count
            assert entry.machine.endswith(f"-{entry.chips_per_host}t")
            is_default = entry == entry.layouts[0]
            assert not is_default or parse(f"{entry.name}-{entry.topology}") == entry


def test_a_single_v3_host_is_a_device() -> None:
    """Its nodes lack the label of a slice."""
    assert parse("v3-4").label == "tpu-v3-device"
    assert {parse(f"v3-{chips}").label for chips in (16, 32, 1024)} == {"tpu-v3-slice"}


# The table of the public package: the chips or GPUs of each name and shape.
PUBLIC_GPUS = {
    "l4": (1, 2, 4, 8),
    "t4": (1, 2, 4),
    "v100": (1, 2, 4, 8),
    "a100": (1, 2, 4, 8, 16),
    "a100-80gb": (1, 2, 4, 8, 16),
    "h100": (1, 2, 4, 8),
    "p4": (1, 2, 4),
    "p100": (1, 2, 4),
}
PUBLIC_TPUS = {
    ("v3", "tpu-v3-podslice", "ct3-hightpu-4t"): "2x2",
    ("v3", "tpu-v3-podslice", "ct3p-hightpu-4t"): "4x4 4x8 8x8 8x16 16x16 16x32 32x32 32x64",
    ("v4", "tpu-v4-podslice", "ct4p-hightpu-4t"): f"2x2x1 2x2x2 2x2x4 2x4x4 {CUBES}",
    ("v5litepod", "tpu-v5-lite-podslice", "ct5lp-hightpu-1t"): "1x1",
    ("v5litepod", "tpu-v5-lite-podslice", "ct5lp-hightpu-8t"): "2x4",
    ("v5litepod", "tpu-v5-lite-podslice", "ct5lp-hightpu-4t"): "2x2 4x4 4x8 8x8 8x16 16x16",
    ("v5p", "tpu-v5p-slice", "ct5p-hightpu-4t"): "2x2x2 2x2x4 2x4x4",
    ("v6e", "tpu-v6e-slice", "ct6e-standard-4t"): "2x4 4x4",
}


@pytest.mark.parametrize("kind", ["", "tpu:", "tpu-"])
def test_every_slice_of_the_public_package_has_a_layout_for_its_pool(kind: str) -> None:
    for (name, label, machine), topologies in PUBLIC_TPUS.items():
        for topology in topologies.split():
            chips = math.prod(map(int, topology.split("x")))
            for text in (f"{kind}{name}-{chips}", f"{kind}{name}-{topology}"):
                found = parse(text).among({(machine, topology)})
                assert (found.machine, found.topology) == (machine, topology), text
                (key,) = found.node_affinity or ["cloud.google.com/gke-tpu-accelerator"]
                labels = found.node_affinity.get(key) or [found.node_selector[key]]
                assert label in labels, text


@pytest.mark.parametrize("kind", ["", "gpu:", "gpu-"])
def test_every_gpu_name_of_the_public_package_is_accepted(kind: str) -> None:
    for name, counts in PUBLIC_GPUS.items():
        for alias in (name, GPUS[name].label):
            for count in counts:
                found = parse(f"{kind}{alias}x{count}")
                assert (found.name, found.count) == (name, count)
            assert parse(f"{kind}{alias}").count == 1


@pytest.mark.parametrize(
    "text", ["cpu:0", "cpu:8", "gpu", "tpu", "gpu:16", "16", "tpu:32", "tpu:1"]
)
def test_every_general_name_of_the_public_package_is_accepted(text: str) -> None:
    found = parse(text)
    assert found.kind == text.partition(":")[0].replace("16", "gpu")


# --- names ---


@pytest.mark.parametrize(
    ("text", "name"),
    [
        # names in the documentation of `run`
        ("tpu-v5e-1", "tpu-v5litepod-1"),
        ("tpu-v3-8", "tpu-v3-4"),
        ("tpu-v5litepod-4", "tpu-v5litepod-4"),
        ("tpu-v6e-8", "tpu-v6e-8"),
        ("tpu-v5litepod-2x4", "tpu-v5litepod-8"),
        ("gpu-l4", "gpu-l4"),
        ("gpu-a100", "gpu-a100"),
        ("l4", "gpu-l4"),
        ("a100", "gpu-a100"),
        # models and generations alone
        ("b200", "gpu-b200x8"),
        ("gb200", "gpu-gb200x4"),
        ("v6e", "tpu-v6e-8"),
        ("v5p", "tpu-v5p-8"),
        ("v5e", "tpu-v5litepod-4"),
        ("v4", "tpu-v4-4"),
        ("v3", "tpu-v3-4"),
        ("tpu7x", "tpu7x-4"),
        ("gpu", "gpu-l4"),
        ("tpu", "tpu-v5litepod-4"),
        # numbers
        ("gpu-a100x4", "gpu-a100x4"),
        ("a100x1", "gpu-a100"),
        ("gpu:4", "gpu-h100x4"),
        ("gpu-16", "gpu-a100x16"),
        ("8", "gpu-h100x8"),
        ("32", "tpu-v5p-32"),
        ("tpu:1", "tpu-v5litepod-1"),
        ("tpu:4", "tpu-v5litepod-4"),
        ("tpu-8", "tpu-v6e-8"),
        ("tpu:4096", "tpu-v4-4096"),
        # labels and other names
        ("nvidia-tesla-t4", "gpu-t4"),
        ("nvidia-h100-80gbx8", "gpu-h100x8"),
        ("gpu-nvidia-l4", "gpu-l4"),
        ("rtx-pro-6000x2", "gpu-rtx-pro-6000x2"),
        ("tpu-v5-lite-podslice", "tpu-v5litepod-4"),
        ("tpu-v6e-slice-16", "tpu-v6e-16"),
        ("trillium-4", "tpu-v6e-4"),
        ("tpu-v7x-8", "tpu7x-8"),
        ("ironwood-4x4x4", "tpu7x-64"),
        # shapes
        ("v5p-8x8x8", "tpu-v5p-512"),
        ("v5p-4x4x12", "tpu-v5p-4x4x12"),
        ("v5p-4x8x16", "tpu-v5p-4x8x16"),
        ("tpu7x-16x16x36", "tpu7x-16x16x36"),
        # layouts
        ("v6e-8:hosts=1", "tpu-v6e-8"),
        ("v6e-2x4:hosts=2", "tpu-v6e-8:hosts=2"),
        ("v5e-8:spot:hosts=2", "tpu-v5litepod-8:hosts=2:spot"),
        # processors
        ("cpu", "cpu"),
        ("CPU:4", "cpu:4"),
        ("cpu:16:spot", "cpu:16:spot"),
        ("cpu:hosts=3", "cpu:hosts=3"),
        ("cpu:4:spot:hosts=2", "cpu:4:hosts=2:spot"),
        ("cpu:hosts=1", "cpu"),
    ],
)
def test_the_canonical_name_of_a_name(text: str, name: str) -> None:
    assert str(parse(text)) == name
    assert parse(name) == parse(text)


def test_each_alias_is_its_model() -> None:
    for gpu in GPUS.values():
        for alias in (gpu.label, *gpu.aliases):
            assert parse(alias) == parse(f"gpu-{alias}") == parse(gpu.name)
    for tpu in TPUS.values():
        for alias in tpu.aliases:
            assert parse(alias) == parse(f"tpu-{alias}") == parse(tpu.name)


def test_each_number_without_a_model_means_an_entry() -> None:
    for count, name in BARE_GPUS.items():
        assert parse(f"gpu:{count}") == parse(str(count)) == parse(f"{name}x{count}")
    for count, name in BARE_TPUS.items():
        assert parse(f"tpu:{count}") == parse(f"{name}-{count}")


# --- layouts ---


@pytest.mark.parametrize(
    ("name", "single", "double"),
    [
        ("v6e-8", "ct6e-standard-8t", "ct6e-standard-4t"),
        ("v5litepod-2x4", "ct5lp-hightpu-8t", "ct5lp-hightpu-4t"),
    ],
)
def test_eight_chips_have_layouts_with_one_host_and_with_two(
    name: str, single: str, double: str
) -> None:
    on_one, on_two = parse(name).layouts
    assert (on_one.machine, on_one.hosts, on_one.chips_per_host) == (single, 1, 8)
    assert (on_two.machine, on_two.hosts, on_two.chips_per_host) == (double, 2, 4)
    assert on_one == parse(name)


def test_the_pools_decide_which_layout_is_used() -> None:
    either = parse("tpu-v6e-8")
    single, double = ("ct6e-standard-8t", "2x4"), ("ct6e-standard-4t", "2x4")
    assert either.among({single}) == either
    assert either.among({double}) == parse("tpu-v6e-8:hosts=2")
    assert either.among({single, double}) == either
    assert either.among(set()) == either
    # a pool with the same machine and another topology doesn't count
    assert either.among({("ct6e-standard-4t", "2x2")}) == either
    assert parse("v6e-8:spot").among({double}) == parse("v6e-8:hosts=2:spot")


def test_an_explicit_layout_is_kept() -> None:
    named = parse("tpu-v6e-8:hosts=2")
    assert named.among({("ct6e-standard-8t", "2x4")}) == named


def test_the_pods_of_two_hosts_cannot_land_on_half_of_one() -> None:
    """Nodes of both layouts have the same TPU labels, so the machine type must decide."""
    on_one, on_two = parse("tpu-v6e-8").layouts
    assert "node.kubernetes.io/instance-type" not in on_one.node_selector
    assert on_two.node_selector["node.kubernetes.io/instance-type"] == "ct6e-standard-4t"


# --- invalid names ---


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a100-4", "did you mean 'a100x4'"),
        ("v6e8", "'v6e-8'"),
        ("gpu-v6e-8", "'tpu-v6e-8'"),
        ("tpu-l4", "'gpu-l4'"),
        ("h1000", "'h100'"),
        ("nvidia-l5", "'nvidia-l4'"),
        ("zzz", "names are like"),
        ("", "names are like"),
        ("x" * 10_000, "names are like"),
        ("cpu:many", "'cpu'"),
        ("l4x3", "gpu-l4x1, gpu-l4x2, gpu-l4x4 or gpu-l4x8"),
        ("b200x1", "there are gpu-b200x8"),
        ("v6e-12", "1, 4, 8, 16"),
        ("v6e-4x2", "2x2, 2x4, 4x4"),
        ("v5p-4x4x10", "4x4x4"),
        ("v5p-8x4x8", "4x8x8"),
        ("v5p-4x4x012", "4x4x4"),
        ("v5p-0x4x4", "4x4x4"),
        ("v5p-16x16x28", "16x16x24"),
        ("v6e-4x4x8", "4x4"),
        ("v6e-16:hosts=2", "its number of hosts is 4"),
        ("l4:hosts=2", "its number of hosts is 1"),
        ("l4:spot:spot", "no accelerator"),
        ("l4:hosts=", "no accelerator"),
        ("l4:", "no accelerator"),
        ("gpu:", "no accelerator"),
        ("a100 x4", "'a100x4'"),
        ("l4x٤", "no accelerator"),
        ("3", "no accelerator"),
        ("9" * 5000, "no accelerator"),
        # a suggestion keeps the options that were asked for
        ("v5litepood-4:spot", "'v5litepod-4:spot'"),
        ("gpu-a100x4:spto", "'gpu-a100x4'"),
        ("tpu-v6e-16x:hosts=2", ":hosts=2'"),
        ("cuda", "'gpu-l4'"),
        ("CUDA:0", "'gpu-h100'"),
    ],
)
def test_an_unknown_name_is_an_error_that_helps(text: str, hint: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(text)
    assert hint in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [None, 4, b"l4", ["l4"]])
def test_a_name_that_is_not_text_is_an_error(value: object) -> None:
    with pytest.raises(ConfigurationError, match="must be a name"):
        parse(value)  # type: ignore[arg-type]


NAMES = ["gpu", "tpu", "cpu", "l4", "a100", "v5p", "v6e", "tpu7x", "nvidia-l4", "hosts=2", "spot"]
BETWEEN = ["-", ":", "x", "=", "0", "1", "4", "8", "2x4", "4x4x12", "16", "0004", " ", "٤", ""]
WORDS = st.sampled_from([*NAMES, *BETWEEN])


@given(st.text() | st.lists(WORDS, max_size=7).map("".join))
@settings(max_examples=300)
def test_any_text_is_an_accelerator_or_a_configuration_error(text: str) -> None:
    try:
        found = parse(text)
    except ConfigurationError:
        return
    assert parse(str(found)) == found
    assert found in found.layouts


@given(st.tuples(*[st.integers(1, 6)] * 3), st.sampled_from(["v4", "v5p", "tpu7x"]))
def test_larger_shapes_are_multiples_of_four_in_order(
    fourths: tuple[int, int, int], name: str
) -> None:
    sides = sorted(4 * fourth for fourth in fourths)
    text = f"{name}-{'x'.join(map(str, sides))}"
    if math.prod(sides) > max(TPUS[name].largest, 64):
        with pytest.raises(ConfigurationError):
            parse(text)
    else:
        found = parse(text)
        assert found.count == math.prod(sides) == 4 * found.hosts


# --- the page ---


def test_the_page_of_the_reference_is_current() -> None:
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert table == markdown(), "regenerate it: python -m tests.unit.test_accelerators"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + markdown() + END + rest.partition(END)[2])
