"""Data in a pod: from buckets and hubs, mounted ones, and volumes at their paths."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.job import namespace
from kinetic._runner.protocol import wire
from kinetic._runner.stores.gcs import EMULATOR
from tests import programs
from tests.gcs.server import GcsServer, Stored
from tests.runner.pods import Pods


@pytest.fixture
def pods(tmp_path: Path, server: GcsServer) -> Pods:
    return Pods.over_directory(tmp_path, {EMULATOR: server.url})


def plant(server: GcsServer, **files: bytes) -> None:
    """Objects in the bucket; ``__`` in a name is a slash."""
    for number, (name, body) in enumerate(files.items()):
        server.objects[name.replace("__", "/")] = Stored(body, {}, number + 1)


def tree(number: int = 0) -> dict[str, str]:
    """In the job: the files of a Data, by path."""
    import os

    from kinetic_runner.protocol import stand_ins

    root = stand_ins.data_path(number)
    found = {}
    if os.path.isfile(root):
        with open(root) as file:
            return {root: file.read()}
    for folder, folders, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            with open(path) as file:
                found[os.path.relpath(path, root)] = file.read(40)
        if not folders and not names:
            found[os.path.relpath(folder, root) + "/"] = ""
    return found


def run(pods: Pods, *refs: wire.DataRef, number: int = 0, **own: str) -> Any:
    """What the job sees, or the words of its error."""
    pod = pods.run(pods.order(tree, number, data=refs), **own)
    return pods.value() if pod.code == 0 else pods.error()["message"]


def test_a_folder_of_a_bucket_comes_whole(pods: Pods, server: GcsServer) -> None:
    plant(server, set__a=b"1", set__sub__b=b"2", set__sub__deep__c=b"", setting=b"not this")
    server.objects["set/"] = Stored(b"", {}, 50)
    server.objects["set/empty/"] = Stored(b"", {}, 51)
    server.objects["set/large"] = Stored(b"large" * 7_000_000, {}, 52)
    found = run(pods, wire.DataRef(uri="gs://kn-test/set/"))
    large = ("large" * 8)[:40]
    assert found == {"a": "1", "sub/b": "2", "sub/deep/c": "", "empty/": "", "large": large}


def test_many_objects_come_side_by_side(pods: Pods, server: GcsServer) -> None:
    plant(server, **{f"many__{number}": b"x" for number in range(1200)})
    server.fail("media", times=20, at=0, among=5)  # each is held until five are there, then cut
    assert len(run(pods, wire.DataRef(uri="gs://kn-test/many/"))) == 1200
    assert server.most > 4
    assert server.requests["list"] == 2


def test_a_single_object_comes_as_one_file(pods: Pods, server: GcsServer) -> None:
    plant(server, **{"set__weights.h5": b"w"})
    found = run(pods, wire.DataRef(uri="gs://kn-test/set/weights.h5", is_dir=False))
    assert [(os.path.basename(path), body) for path, body in found.items()] == [("weights.h5", "w")]


@pytest.mark.parametrize(
    ("uri", "is_dir", "words"),
    [
        ("gs://kn-test/nothing/", True, "nothing at gs://kn-test/nothing/"),
        ("gs://kn-test/nothing", False, "no object gs://kn-test/nothing"),
        ("gs://kn-test/up/", True, "name of a file"),
        ("gs://kn-test/both/", True, "both an object and a folder"),
        ("gs://kn-other/x/", True, "bucket"),
    ],
)
def test_what_cannot_come_is_told(
    pods: Pods, server: GcsServer, uri: str, is_dir: bool, words: str
) -> None:
    plant(server, both__a=b"", both__a__b=b"", **{"up__..__x": b""})
    said = run(pods, wire.DataRef(uri=uri, is_dir=is_dir))
    assert said.startswith("kinetic data resolve failed") and words in said


def test_a_volume_is_at_its_path(pods: Pods, server: GcsServer, tmp_path: Path) -> None:
    plant(server, set__a=b"1")
    point = tmp_path / "not" / "there" / "yet"

    def look(path: str) -> str:
        with open(f"{path}/a") as file:
            return file.read()

    ref = wire.DataRef(uri="gs://kn-test/set/", mount=str(point))
    pod = pods.run(pods.order(look, str(point), data=(ref,)))
    assert (pod.code, pods.value()) == (0, "1")


ALONE = """
import sys
sys.path.insert(0, {root!r})
import threading
from kinetic._runner.job import views
from kinetic._runner.protocol import stand_ins, wire
from kinetic._runner.job import workspace

# With a second thread no process gets a namespace, as none does in a container.
threading.Thread(target=threading.Event().wait, daemon=True).start()
site = workspace.Site(work={work!r}, cache={work!r} + "/c", mounts=False, exclusive=True)
views.prepare([wire.DataRef(uri="gs://kn-test/set/", mount={point!r})], None, site)
print(stand_ins.data_path(0), open({point!r} + "/a").read())
"""


@pytest.mark.parametrize("there", ["nothing", "empty", "full"])
def test_in_a_container_that_may_not_mount_a_volume_is_moved_to_its_path(
    pods: Pods, server: GcsServer, tmp_path: Path, there: str
) -> None:
    plant(server, set__a=b"1")
    point, work = tmp_path / "point", tmp_path / "work"
    work.mkdir()
    if there != "nothing":
        point.mkdir()
    if there == "full":
        (point / "of the image").touch()
    root = str(Path(__file__).parents[2])
    code = ALONE.format(root=root, work=str(work), point=str(point))
    done = programs.run(sys.executable, "-c", code, env={**os.environ, **pods.environ})
    if there == "full":
        assert "a volume cannot be at" in done.stderr
        assert (point / "of the image").exists()
    else:
        assert done.stdout == f"{point} 1\n", done.stderr


def test_what_the_cluster_has_mounted_is_taken_where_it_is(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted" / "a").write_text("1")
    mount = str(tmp_path / "mounted")
    ref = wire.DataRef(uri="gs://kn-test/set/", fuse=True, mount=mount)
    assert run(pods, ref) == {"a": "1"}
    single = wire.DataRef(uri="gs://kn-test/set/a", fuse=True, mount=mount, is_dir=False)
    pods.objects.delete([pods.name("claim"), pods.name("outcome")])
    assert run(pods, single) == {f"{mount}/a": "1"}


def test_what_should_be_mounted_and_is_not_is_told(pods: Pods) -> None:
    said = run(pods, wire.DataRef(uri="gs://kn-test/set/", fuse=True))
    assert "/_kinetic/fuse-data/0" in said and "FUSE driver" in said


DATASETS = """
import json, os

class Dataset:
    def __init__(self, told):
        self.told = told

    def save_to_disk(self, folder):
        os.makedirs(folder)
        with open(f"{folder}/told", "w") as file:
            json.dump(self.told, file)

def load_dataset(path, **told):
    return Dataset([path, told])
"""
HUB = """
import json, os

def snapshot_download(name, *, repo_type, revision, local_dir):
    os.makedirs(local_dir)
    with open(f"{local_dir}/told", "w") as file:
        json.dump([name, repo_type, revision], file)
"""


def test_a_dataset_is_loaded_as_its_address_says(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "datasets.py").write_text(DATASETS)
    uri = "hf://owner/name?split=train&config_name=small&revision=v1"
    found = run(pods, wire.DataRef(uri=uri), PYTHONPATH=str(tmp_path / "libraries"))
    assert found == {"told": '["owner/name", {"name": "small", "split": "train"'[:40]}


def test_without_datasets_the_files_of_the_repository_come(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "huggingface_hub.py").write_text(HUB)
    path = str(tmp_path / "libraries")
    found = run(pods, wire.DataRef(uri="hf://owner/name?revision=v1"), PYTHONPATH=path)
    assert found == {"told": '["owner/name", "dataset", "v1"]'}
    pods.objects.delete([pods.name("claim"), pods.name("outcome")])
    assert "needs datasets where" in run(
        pods, wire.DataRef(uri="hf://owner/name?split=train"), PYTHONPATH=path
    )


@pytest.mark.parametrize(
    ("mount", "content", "paths"),
    [
        ("", {"sub__a": b"1", "b": b"2"}, {"sub/a", "b"}),
        ("/inner", {"sub__a": b"1", "b": b"2"}, {"inner/sub/a", "inner/b"}),
        ("/b", {"b": b"2"}, {"b"}),
        ("/", {"b": b"2"}, {"b"}),
    ],
)
def test_a_volume_fills_the_folder_that_its_pod_mounts(
    pods: Pods, server: GcsServer, mount: str, content: dict[str, bytes], paths: set[str]
) -> None:
    """An unprivileged user may not make it, and ``os.walk`` would not follow a link."""
    if not namespace.available():
        pytest.skip("this system has no private mounts")
    point = pods.folder / "point"
    point.mkdir()
    bare = "setpriv --bounding-set -all --inh-caps -all"  # as in a container
    script = f"mount -t tmpfs none {point} && echo 0 > /proc/sys/user/max_user_namespaces && "
    script += f'exec {bare} "$@"'
    inside = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    pods.command = (*inside, *pods.command)
    plant(server, **{f"set__{name}": body for name, body in content.items()})
    single = len(content) == 1
    uri = "gs://kn-test/set/b" if single else "gs://kn-test/set/"
    ref = wire.DataRef(uri=uri, is_dir=not single, mount=f"{point}{mount}")
    pod = pods.run(pods.order(files_below, str(point), data=(ref,)))
    assert pod.code == 0, pod.output
    assert pods.value() == paths


def files_below(root: str) -> set[str]:
    """In the job: all files, and the folders that are empty."""
    import os

    found = set()
    for folder, folders, names in os.walk(root):
        kept = names if names or folders else [""]
        found |= {os.path.relpath(os.path.join(folder, name), root) for name in kept}
    return found
