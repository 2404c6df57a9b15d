"""Test data in a pod: from buckets and hubs, mounted by the cluster, and volumes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.job import namespace, views, workspace
from kinetic._runner.protocol import stand_ins, wire
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic._runner.stores.gcs import EMULATOR
from tests import programs
from tests.gcs.server import GcsServer, Stored
from tests.runner.pods import Pods


@pytest.fixture
def pods(tmp_path: Path, server: GcsServer) -> Pods:
    return Pods.over_directory(tmp_path, {EMULATOR: server.url})


def add_objects(server: GcsServer, **files: bytes) -> None:
    """Add objects to the bucket; ``__`` in a name stands for a slash."""
    for number, (name, body) in enumerate(files.items()):
        server.objects[name.replace("__", "/")] = Stored(body, {}, number + 1)


def read_files(number: int = 0) -> dict[str, str]:
    """Run in the job: return the contents of the data's files by path."""
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


def run(pods: Pods, *refs: wire.DataRef, number: int = 0, **variables: str) -> Any:
    """Run `read_files` in a pod and return its value, or the message of its error."""
    pod = pods.run(pods.order(read_files, number, data=refs), **variables)
    return pods.value() if pod.code == 0 else pods.error()["message"]


def test_all_objects_of_a_folder_are_fetched(pods: Pods, server: GcsServer) -> None:
    add_objects(server, set__a=b"1", set__sub__b=b"2", set__sub__deep__c=b"", setting=b"not this")
    server.objects["set/"] = Stored(b"", {}, 50)
    server.objects["set/empty/"] = Stored(b"", {}, 51)
    server.objects["set/large"] = Stored(b"large" * 7_000_000, {}, 52)
    found = run(pods, wire.DataRef(uri="gs://kn-test/set/"))
    large = ("large" * 8)[:40]
    assert found == {"a": "1", "sub/b": "2", "sub/deep/c": "", "empty/": "", "large": large}


@pytest.mark.full
def test_many_objects_are_fetched_at_once(pods: Pods, server: GcsServer) -> None:
    add_objects(server, **{f"many__{number}": b"x" for number in range(1200)})
    # The server waits until it has five downloads, then cuts them.
    server.fail("media", times=20, at=0, among=5)
    assert len(run(pods, wire.DataRef(uri="gs://kn-test/many/"))) == 1200
    assert server.most > 4
    assert server.requests["list"] == 2


def test_a_single_object_is_fetched_as_one_file(pods: Pods, server: GcsServer) -> None:
    add_objects(server, **{"set__weights.h5": b"w"})
    found = run(pods, wire.DataRef(uri="gs://kn-test/set/weights.h5", is_dir=False))
    assert [(os.path.basename(path), body) for path, body in found.items()] == [("weights.h5", "w")]


@pytest.mark.parametrize(
    ("uri", "is_dir", "message"),
    [
        ("gs://kn-test/nothing/", True, "no objects under gs://kn-test/nothing/"),
        ("gs://kn-test/nothing", False, "no object gs://kn-test/nothing"),
        ("gs://kn-test/up/", True, "name of a file"),
        ("gs://kn-test/both/", True, "both an object and a folder"),
        ("gs://kn-other/x/", True, "bucket"),
    ],
)
def test_data_that_cannot_be_fetched_is_an_error(
    pods: Pods, server: GcsServer, uri: str, is_dir: bool, message: str
) -> None:
    add_objects(server, both__a=b"", both__a__b=b"", **{"up__..__x": b""})
    error = run(pods, wire.DataRef(uri=uri, is_dir=is_dir))
    assert error.startswith("kinetic data resolve failed") and message in error


def test_a_volume_is_at_its_path(pods: Pods, server: GcsServer, tmp_path: Path) -> None:
    add_objects(server, set__a=b"1")
    point = tmp_path / "not" / "there" / "yet"

    def read_a(path: str) -> str:
        with open(f"{path}/a") as file:
            return file.read()

    ref = wire.DataRef(uri="gs://kn-test/set/", mount=str(point))
    pod = pods.run(pods.order(read_a, str(point), data=(ref,)))
    assert (pod.code, pods.value()) == (0, "1")


WITHOUT_MOUNTS = """
import sys
sys.path.insert(0, {root!r})
import threading
from kinetic._runner.job import views
from kinetic._runner.protocol import stand_ins, wire
from kinetic._runner.job import workspace

# A process with a second thread cannot enter a namespace; this simulates a container.
threading.Thread(target=threading.Event().wait, daemon=True).start()
place = workspace.JobPlace(work={work!r}, cache={work!r} + "/c", mounts=False, exclusive=True)
views.prepare([wire.DataRef(uri="gs://kn-test/set/", mount={point!r})], None, place)
print(stand_ins.data_path(0), open({point!r} + "/a").read())
"""


@pytest.mark.parametrize("before", ["nothing", "empty", "full"])
def test_without_the_right_to_mount_a_volume_is_moved_to_its_path(
    pods: Pods, server: GcsServer, tmp_path: Path, before: str
) -> None:
    add_objects(server, set__a=b"1")
    point, work = tmp_path / "point", tmp_path / "work"
    work.mkdir()
    if before != "nothing":
        point.mkdir()
    if before == "full":
        (point / "of the image").touch()
    root = str(Path(__file__).parents[2])
    code = WITHOUT_MOUNTS.format(root=root, work=str(work), point=str(point))
    done = programs.run(sys.executable, "-c", code, env={**os.environ, **pods.environ})
    if before == "full":
        assert "a volume cannot be at" in done.stderr
        assert (point / "of the image").exists()
    else:
        assert done.stdout == f"{point} 1\n", done.stderr


def test_a_view_is_kept_until_it_changes(
    server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_objects(server, set__a=b"1", set__b=b"2", conf=b"3")
    monkeypatch.setenv(EMULATOR, server.url)
    outer, image = tmp_path / "outer", tmp_path / "etc"
    image.mkdir()
    (image / "of the image").touch()
    volumes = (
        wire.DataRef(uri="gs://kn-test/set/", mount=str(outer)),
        wire.DataRef(uri="gs://kn-test/set/", mount=str(outer / "inner")),
        wire.DataRef(uri="gs://kn-test/conf", mount=str(image / "conf"), is_dir=False),
    )
    argument = wire.DataRef(uri="gs://kn-test/set/")
    folders = {name: tmp_path / name for name in ("work", "cache")}
    place = workspace.JobPlace(**folders, mounts=False, exclusive=True)

    def fetched(*refs: wire.DataRef) -> int:
        before = server.requests["media"]
        views.prepare(refs, DirectoryObjects(tmp_path / "store"), place)
        found = files_below(str(outer)) | files_below(str(image))
        assert found == {"a", "b", "inner/a", "inner/b", "conf", "of the image"}
        return server.requests["media"] - before

    assert fetched(*volumes, argument) == 7
    assert fetched(*volumes, argument) == 0
    (outer / "inner" / "new").touch()
    assert fetched(*volumes, argument) == 4  # the outer volume contains the inner one
    (image / "conf").write_text("4")
    assert fetched(*volumes, argument) == 1
    Path(stand_ins.data_path(3), "a").unlink()
    assert fetched(*volumes) == 0
    assert fetched(*volumes, argument) == 2  # an item without it has removed it
    stand_ins.data_paths.clear()


def test_data_that_the_cluster_has_mounted_is_used_in_place(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted" / "a").write_text("1")
    mount = str(tmp_path / "mounted")
    ref = wire.DataRef(uri="gs://kn-test/set/", fuse=True, mount=mount)
    assert run(pods, ref) == {"a": "1"}
    single = wire.DataRef(uri="gs://kn-test/set/a", fuse=True, mount=mount, is_dir=False)
    pods.objects.delete([pods.key("claim"), pods.key("outcome")])
    assert run(pods, single) == {f"{mount}/a": "1"}


def test_data_that_the_cluster_has_not_mounted_is_an_error(pods: Pods) -> None:
    error = run(pods, wire.DataRef(uri="gs://kn-test/set/", fuse=True))
    assert "/_kinetic/fuse-data/0" in error and "FUSE driver" in error


DATASETS = """
import json, os

class Dataset:
    def __init__(self, options):
        self.options = options

    def save_to_disk(self, folder):
        os.makedirs(folder)
        with open(f"{folder}/options", "w") as file:
            json.dump(self.options, file)

def load_dataset(path, **options):
    return Dataset([path, options])
"""
HUB = """
import json, os

def snapshot_download(name, *, repo_type, revision, local_dir):
    os.makedirs(local_dir)
    with open(f"{local_dir}/options", "w") as file:
        json.dump([name, repo_type, revision], file)
"""


def test_a_dataset_is_loaded_with_the_options_of_its_address(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "datasets.py").write_text(DATASETS)
    uri = "hf://owner/name?split=train&config_name=small&revision=v1"
    found = run(pods, wire.DataRef(uri=uri), PYTHONPATH=str(tmp_path / "libraries"))
    assert found == {"options": '["owner/name", {"name": "small", "split": "train"'[:40]}


def test_without_the_datasets_library_the_repository_is_downloaded(
    pods: Pods, tmp_path: Path
) -> None:
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "huggingface_hub.py").write_text(HUB)
    path = str(tmp_path / "libraries")
    found = run(pods, wire.DataRef(uri="hf://owner/name?revision=v1"), PYTHONPATH=path)
    assert found == {"options": '["owner/name", "dataset", "v1"]'}
    pods.objects.delete([pods.key("claim"), pods.key("outcome")])
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
    """An unprivileged user cannot create the folder, and ``os.walk`` wouldn't follow a link."""
    if not namespace.available():
        pytest.skip("this system has no private mounts")
    point = pods.folder / "point"
    point.mkdir()
    unprivileged = "setpriv --bounding-set -all --inh-caps -all"  # like a container
    script = f"mount -t tmpfs none {point} && echo 0 > /proc/sys/user/max_user_namespaces && "
    script += f'exec {unprivileged} "$@"'
    namespace_command = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    pods.command = (*namespace_command, *pods.command)
    add_objects(server, **{f"set__{name}": body for name, body in content.items()})
    single = len(content) == 1
    uri = "gs://kn-test/set/b" if single else "gs://kn-test/set/"
    ref = wire.DataRef(uri=uri, is_dir=not single, mount=f"{point}{mount}")
    pod = pods.run(pods.order(files_below, str(point), data=(ref,)))
    assert pod.code == 0, pod.output
    assert pods.value() == paths


def files_below(root: str) -> set[str]:
    """Run in the job: return the paths of all files and all empty folders."""
    import os

    found = set()
    for folder, folders, names in os.walk(root):
        listed = names if names or folders else [""]
        found |= {os.path.relpath(os.path.join(folder, name), root) for name in listed}
    return found
