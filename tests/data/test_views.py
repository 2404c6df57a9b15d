"""Test the views that a job has of its data: exact copies that only this job changes."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kinetic._runner.job import namespace, processes, views, workspace
from kinetic._runner.protocol import manifest, stand_ins, wire
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic.aio._preparing import data_upload
from kinetic.aio.local.store import DirectoryStore
from kinetic.data import Data
from tests.data.conftest import Machine, MakeTree, Ship

PLAIN = st.sampled_from(["a", "b.txt", ".hidden", "with space", "per%cent", "-", "...", "~"])
ANY = (
    st.binary(min_size=1, max_size=40)
    .filter(lambda name: not set(name) & {0, 47} and name not in (b".", b".."))
    .map(os.fsdecode)
)
NAMES = PLAIN if sys.platform == "darwin" else PLAIN | ANY  # macOS accepts only Unicode names
CONTENTS = st.one_of(
    st.binary(max_size=60),
    st.just(b"\x89KNO\r\n\x1a\n like the header of an object"),
    st.sampled_from([1 << 18, (1 << 18) + 1, 1 << 20, 1_100_000]).map(lambda size: b"x" * size),
)
TREES = st.recursive(
    st.tuples(CONTENTS, st.booleans()),
    lambda inner: st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


def write_tree(root: Path, tree: Any) -> None:
    """Write nested dicts whose leaves are tuples of content and executable."""
    if isinstance(tree, dict):
        root.mkdir()
        for name, inner in tree.items():
            write_tree(root / name, inner)
    else:
        root.write_bytes(tree[0])
        root.chmod(0o755 if tree[1] else 0o644)


def read_tree(root: Path) -> Any:
    """Read what `write_tree` has written."""
    if root.is_dir():
        return {entry.name: read_tree(entry) for entry in root.iterdir()}
    return root.read_bytes(), bool(root.stat().st_mode & 0o100)


def prepare_views(refs: list[wire.DataRef], store: DirectoryStore, folder: Path) -> list[Path]:
    """Prepare views in this process, which may not mount, and return their paths."""
    views.prepare(refs, store_objects(store), Machine(folder).place())
    return [Path(stand_ins.data_path(k)) for k in range(len(refs))]


def store_objects(store: DirectoryStore) -> DirectoryObjects:
    return DirectoryObjects.from_url(store.url)


@given(tree=TREES)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
async def test_the_view_of_any_tree_is_exact(tree: Any) -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        write_tree(folder / "name", tree)
        store = DirectoryStore(folder / "store")
        ref = await data_upload.upload(store, Data(str(folder / "name")))
        (view,) = prepare_views([ref], store, folder)
        assert read_tree(view) == tree
        assert isinstance(tree, dict) or view.name == "name"
        assert ref.digest == Data(str(view)).content_hash()
    finally:
        shutil.rmtree(folder)


@given(content=TREES.filter(lambda tree: isinstance(tree, dict)), cut=st.integers(1, 400))
@settings(max_examples=40, deadline=None)
def test_a_manifest_is_read_whole_or_refused(content: Any, cut: int) -> None:
    entries: list[manifest.Entry] = []
    empty: list[str] = []

    def walk(tree: Any, path: str) -> None:
        if not isinstance(tree, dict):
            digest = hashlib.sha256(path.encode(errors="replace")).hexdigest()
            entries.append(manifest.Entry(path, len(tree[0]), tree[1], digest))
            return
        if not tree and path:
            empty.append(path)
        for name, inner in tree.items():
            walk(inner, f"{path}/{name}" if path else name)

    walk(content, "")
    original = manifest.Manifest(is_dir=True, entries=tuple(entries), empty=tuple(empty))
    body = original.to_bytes()
    assert manifest.Manifest.from_bytes(body) == original
    with pytest.raises(ValueError, match="a manifest cannot be read"):
        manifest.Manifest.from_bytes(body[: max(0, len(body) - cut)])


@pytest.mark.parametrize("path", ["../out", "/out", "a/../../out", "a//b", ".", "", "a\0b"])
def test_a_manifest_with_paths_outside_its_tree_is_refused(path: str) -> None:
    entry = manifest.Entry(path, 1, False, "00" * 32)
    for invalid in (
        manifest.Manifest(is_dir=True, entries=(entry,)),
        manifest.Manifest(is_dir=True, entries=(), empty=(path,)),
    ):
        with pytest.raises(ValueError, match="not inside its tree"):
            manifest.Manifest.from_bytes(invalid.to_bytes())


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"version":2}', b'{"version":1,"kind":"dir","entries":[[]]}']
)
def test_a_damaged_manifest_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match="a manifest cannot be read"):
        manifest.Manifest.from_bytes(body)


@pytest.mark.parametrize("mounts", [True, False])
async def test_large_content_is_mounted_where_possible(
    machine: Machine, ship: Ship, mounts: bool
) -> None:
    """Changes of a job reach neither the next job nor the cache."""
    tree = {f"{i % 7}/{i}": b"%d" % i for i in range(300)} | {"gone/": None}
    big = os.urandom(1 << 20) * 40
    refs = [await ship(tree), await ship({"big.bin": big}, file="big.bin")]
    body = """
    mounted = [line.split()[4] for line in open("/proc/self/mountinfo") if " overlay " in line]
    own = (path for path in mounted if path.startswith(f"{place.work}/"))
    answer["mounted"] = sorted(os.path.relpath(path, place.work) for path in own)
    answer["found"] = sum(len(names) for _, _, names in os.walk(paths[0]))
    answer["byte"] = open(paths[1], "rb").read(1).hex()
    answer["name"] = os.path.basename(paths[1])
    Path(paths[0], "0", "0").write_text("changed")
    shutil.rmtree(Path(paths[0], "1"))
    os.rename(Path(paths[0], "2"), Path(paths[0], "two"))
    with open(paths[1], "r+b") as file:
        file.write(b"changed")
    os.rmdir(Path(paths[0], "gone"))
    """
    overlays = mounts and namespace.available() == "root"
    for _ in range(2):
        answer = machine.run(body, *refs, mounts=mounts)
        assert answer.pop("mounted") == (["data/0", "data/1"] if overlays else [])
        assert answer == {
            "found": 300,
            "byte": big[:1].hex(),
            "name": "big.bin",
        }
    assert (machine.cache / "data").exists() == overlays
    shutil.rmtree(machine.folder / "work-1")  # an overlay's files can be removed


async def test_folders_with_special_characters_can_be_layers(
    tmp_path: Path, make_tree: MakeTree
) -> None:
    """Commas, colons, and backslashes have a meaning in the mount options of an overlay."""
    machine = Machine(tmp_path / "a,b:c\\d e=f")
    machine.folder.mkdir()
    root = make_tree("tree", {f"{i}": b"x" for i in range(201)})
    ref = await data_upload.upload(DirectoryStore(machine.store), Data(str(root)))
    body = """
    answer["overlays"] = sum(" overlay " in line for line in open("/proc/self/mountinfo"))
    answer["found"] = len(os.listdir(paths[0]))
    """
    before = machine.run(
        "answer['n'] = sum(' overlay ' in l for l in open('/proc/self/mountinfo'))"
    )
    overlays = before["n"] + (namespace.available() == "root")
    assert machine.run(body, ref) == {"overlays": overlays, "found": 201}


async def test_fuse_data_is_read_only_where_mounts_are_possible(
    machine: Machine, ship: Ship
) -> None:
    tree = {"a": b"1", "d/b": b"2"}
    refs = [await ship(tree, fuse=True), await ship(tree, file="a", fuse=True)]
    body = """
    answer["seen"] = [Path(paths[0], "d/b").read_text(), Path(paths[1]).read_text()]
    answer["errors"] = []
    for file in (Path(paths[0], "new"), Path(paths[0], "a"), Path(paths[1])):
        try:
            file.write_text("x")
        except OSError as error:
            answer["errors"].append(errno.errorcode[error.errno])
    """
    denied = ["EROFS"] * 3 if namespace.available() else []
    for _ in range(2):
        assert machine.run(body, *refs) == {"seen": ["2", "1"], "errors": denied}
    assert machine.run(body, *refs, mounts=False) == {"seen": ["2", "1"], "errors": []}


async def test_content_that_was_changed_in_the_store_is_refused(
    machine: Machine, ship: Ship
) -> None:
    tree = {"small": b"1", "large": b"x" * (1 << 19)}
    for name, body in tree.items():
        ref = await ship(tree | {"id": name.encode()})
        file = machine.store / "data" / ref.digest / "files" / name
        file.chmod(0o600)
        file.write_bytes(b"y" + body[1:])
        answer = machine.run("", ref)
        assert answer["error"].startswith("ValueError")
        assert answer["error"].endswith(f"{name} is not what was submitted: its SHA-256 differs")


async def test_a_manifest_is_checked_against_the_order(machine: Machine, ship: Ship) -> None:
    ref = await ship({"a": b"1"})
    other = await ship({"a": b"2"})
    for wrong in (
        replace(ref, uri=other.uri),
        replace(ref, digest=other.digest),
        replace(ref, is_dir=False),
    ):
        assert "is not what was submitted" in machine.run("", wrong)["error"]
    file = machine.store / ref.uri
    file.write_bytes(file.read_bytes().replace(b"420", b"493"))  # makes a file executable
    assert "is not what was submitted" in machine.run("", ref)["error"]


async def test_the_error_about_a_missing_object_names_it_and_the_fix(
    machine: Machine, ship: Ship
) -> None:
    ref = await ship({"a": b"1"})
    (machine.store / "data" / ref.digest / "files" / "a").unlink()
    answer = machine.run("", ref)
    assert answer["error"].startswith(
        f"RuntimeError: data/{ref.digest}/files/a is no longer in the store"
    )
    assert "submit again" in answer["error"]
    machine.objects.delete([ref.uri])
    assert f"RuntimeError: {ref.uri} is no longer in the store" in machine.run("", ref)["error"]


@pytest.mark.parametrize("uri", ["hf://imdb", "hf://imdb?split=train"])
def test_a_library_that_is_missing_is_named(machine: Machine, uri: str) -> None:
    if importlib.util.find_spec("datasets") or importlib.util.find_spec("huggingface_hub"):
        pytest.skip("a library is installed")
    answer = machine.run("", wire.DataRef(uri=uri))
    assert answer["error"].startswith(f"RuntimeError: {uri} needs datasets")


def test_a_process_without_data_says_so(machine: Machine) -> None:
    answer = machine.run("stand_ins.data_path(0)")
    assert answer["error"] == ("RuntimeError: this process isn't the job that Data 0 was sent to")


class RemoteObjects:
    """A remote store: no file of this machine is an object."""

    def __init__(self, objects: DirectoryObjects) -> None:
        self._objects = objects
        self.fetched: list[int] = []

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> Any:
        return self._objects.get(name, start, stop)

    def path(self, name: str) -> Path | None:
        return None

    def fetch(self, name: str, path: Path, size: int = 0) -> None:
        self.fetched.append(size)
        self._objects.fetch(name, path, size)


async def test_objects_of_a_remote_store_are_fetched(
    machine: Machine, ship: Ship, store: DirectoryStore, make_tree: MakeTree
) -> None:
    tree = {"small": b"1", "large": os.urandom(1 << 19)}
    ref = await ship(make_tree("tree", tree, executable=["large"]))
    objects = RemoteObjects(store_objects(store))
    views.prepare([ref], objects, machine.place())
    view = Path(stand_ins.data_path(0))
    assert {name: (view / name).read_bytes() for name in os.listdir(view)} == tree
    assert os.access(view / "large", os.X_OK)
    assert objects.fetched == [1 << 19]


def test_only_large_trees_are_mounted() -> None:
    if processes.LINUX and os.geteuid() == 0:
        large = [workspace.Weight(201, 0), workspace.Weight(1, 33 << 20)]
        assert all(workspace.worth_mounting(weight, mounts=True) for weight in large)
        assert not any(workspace.worth_mounting(weight, mounts=False) for weight in large)
    assert not workspace.worth_mounting(workspace.Weight(200, 32 << 20), mounts=True)
