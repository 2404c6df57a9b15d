"""Test `Data`: accepted paths and URIs, errors, ``repr``, and the content hash."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import pickle
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio
from kinetic.data import Data
from kinetic.errors import DataError
from tests.data.conftest import MakeTree


def documented_hash(root: Path) -> str:
    """Compute the content hash by the documented rule, as simply as possible."""
    total = b""
    for folder, folders, files in os.walk(root, followlinks=False):
        folders.sort()
        for name in sorted(files):
            file = Path(folder, name)
            relative = file.relative_to(root).as_posix().encode(errors="surrogateescape")
            total += hashlib.sha256(relative + b"\0" + file.read_bytes()).digest()
    return hashlib.sha256(b"dir:" + total).hexdigest()


def test_an_empty_path_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="empty") as caught:
        Data("")
    assert isinstance(caught.value, DataError)


def test_a_missing_path_is_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing at .*/missing"):
        Data(str(tmp_path / "missing"))


def test_a_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("file").write_text("x")
    assert Data("file").path == Data("~/file").path == Data("./a/../file").path
    assert Data("file").path == str(tmp_path / "file")
    assert Data(tmp_path).path == str(tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "uri",
    [
        "gs://",
        "gs:///object",
        "gs://Bad_Bucket!/x",
        "gs://bucket",
        "hf://",
        "hf:///x",
        "hf://a/b/c",
        "hf://a?splitt=train",
        "hf://a?split",
        "hf://a?split=",
        "hf://a?split=x&split=y",
        "s3://bucket/x",
        "https://example.com/x.csv",
    ],
)
def test_a_malformed_uri_is_a_value_error_that_names_it(uri: str) -> None:
    with pytest.raises(ValueError, match=re.escape(uri)):
        Data(uri)


def test_hf_cannot_be_mounted() -> None:
    with pytest.raises(ValueError, match="fuse"):
        Data("hf://imdb", fuse=True)


@pytest.mark.parametrize(
    ("uri", "is_dir"),
    [
        ("gs://my-bucket/datasets/imagenet/", True),
        ("gs://my-bucket/", True),
        ("gs://my-bucket/datasets/weights.h5", False),
        ("gs://my.bucket-1/a/b c.txt", False),
    ],
)
def test_a_trailing_slash_makes_a_gs_uri_a_directory(uri: str, is_dir: bool) -> None:
    data = Data(uri, fuse=True)
    assert (data.path, data.is_dir, data.is_gcs, data.is_hf) == (uri, is_dir, True, False)
    assert data.fuse


@pytest.mark.parametrize("uri", ["hf://imdb?split=train", "hf://owner/name", "hf://a-b/c.d_e"])
def test_hf_is_a_directory(uri: str) -> None:
    data = Data(uri, hf_trust_remote_code=True)
    assert (data.is_dir, data.is_gcs, data.is_hf, data.hf_trust_remote_code) == (
        *(True, False, True, True),
    )


def test_a_gs_uri_without_slash_and_suffix_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Data("gs://bucket/dataset")
        Data("gs://bucket/dataset/")
        Data("gs://bucket/weights.h5")
    assert [record.getMessage() for record in caplog.records] == [
        "gs://bucket/dataset names one object; to name a directory, write gs://bucket/dataset/"
    ]


def test_a_uri_has_no_content_hash() -> None:
    for uri in ("gs://bucket/x.csv", "hf://imdb"):
        with pytest.raises(ValueError, match="local"):
            Data(uri).content_hash()


def test_equality_is_identity_and_repr_is_a_call(make_tree: MakeTree) -> None:
    root = make_tree("tree", {"a": b"1"})
    data, other = Data(str(root)), Data(str(root), fuse=True)
    assert data != Data(str(root))
    assert len({data, other}) == 2
    assert repr(data) == f"Data({str(root)!r})"
    assert repr(other) == f"Data({str(root)!r}, fuse=True)"
    assert repr(Data("hf://x", hf_trust_remote_code=True)) == (
        "Data('hf://x', hf_trust_remote_code=True)"
    )
    with pytest.raises(AttributeError):
        data.path = "elsewhere"  # type: ignore[misc]


def test_the_hash_is_the_documented_one(make_tree: MakeTree) -> None:
    tree = {"b": b"2", "a": b"1", "b.d/c": b"3", "B/z": b"", "B/y/x": b"4", "ü": b"\0"}
    root = make_tree("tree", tree)
    assert Data(str(root)).content_hash() == documented_hash(root)
    digest = hashlib.sha256(b"b\x00" + b"2").digest()
    assert Data(str(root / "b")).content_hash() == hashlib.sha256(b"file:" + digest).hexdigest()


def test_big_files_hash_by_the_same_rule(make_tree: MakeTree) -> None:
    body = os.urandom(1 << 20)
    root = make_tree("tree", {"x/big1": body * 3, "small": b"s", "big2": body + b"!", "z": b""})
    os.utime(root / "big2", (1, 1))
    expected = documented_hash(root)
    assert Data(str(root)).content_hash() == expected
    (root / "big2").write_bytes(body + b"?")
    assert Data(str(root)).content_hash() == documented_hash(root) != expected


def test_links_to_files_are_read_and_links_to_directories_are_not(make_tree: MakeTree) -> None:
    outside = make_tree("outside", {"in/x": b"secret"})
    root = make_tree("tree", {"a": b"1", "d/e": b"2"})
    (root / "file").symlink_to(outside / "in/x")
    (root / "folder").symlink_to(outside / "in")
    (root / "d" / "loop").symlink_to(root)
    assert Data(str(root)).content_hash() == documented_hash(root)
    (outside / "in/x").write_bytes(b"changed")
    assert Data(str(root)).content_hash() == documented_hash(root)


def test_a_data_whose_path_is_a_link_follows_it(make_tree: MakeTree, tmp_path: Path) -> None:
    root = make_tree("tree", {"a": b"1"})
    link = tmp_path / "link"
    link.symlink_to(root)
    assert Data(str(link)).is_dir
    assert Data(str(link)).content_hash() == Data(str(root)).content_hash()


def test_the_hash_is_a_snapshot_and_pickling_drops_it(make_tree: MakeTree) -> None:
    root = make_tree("tree", {"a": b"1"})
    data = Data(str(root))
    before = data.content_hash()
    (root / "a").write_bytes(b"2")
    assert data.content_hash() == before
    copies = [pickle.loads(pickle.dumps(data)), copy.copy(data), copy.deepcopy(data)]
    assert {found.content_hash() for found in copies} == {documented_hash(root)} != {before}
    assert {(found.path, found.fuse, found.is_dir) for found in copies} == {
        (data.path, False, True)
    }


def test_a_data_can_be_unpickled_without_its_path(make_tree: MakeTree) -> None:
    root = make_tree("tree", {"a": b"1"})
    pickled = pickle.dumps(Data(str(root)))
    (root / "a").unlink()
    root.rmdir()
    assert pickle.loads(pickled).is_dir
    with pytest.raises(DataError, match="changed"):
        pickle.loads(pickled).content_hash()


def test_concurrent_threads_hash_a_data_once(make_tree: MakeTree) -> None:
    root = make_tree("tree", {f"{i}": os.urandom(100) for i in range(200)})
    data = Data(str(root))
    start = threading.Barrier(4)
    snapshots: list[object] = []

    def hash_data() -> None:
        start.wait()
        snapshots.append(data.__kinetic_snapshot__())

    threads = [threading.Thread(target=hash_data) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(snapshots) == 4
    assert len({id(snapshot) for snapshot in snapshots}) == 1


def test_the_error_names_a_file_that_cannot_be_uploaded(make_tree: MakeTree) -> None:
    root = make_tree("tree", {"a": b"1"})
    os.mkfifo(root / "pipe")
    started = time.monotonic()
    with pytest.raises(DataError, match="tree/pipe is neither a file"):
        Data(str(root)).content_hash()
    assert time.monotonic() - started < 60  # hashing does not wait for a writer
    (root / "pipe").unlink()
    (root / "dangling").symlink_to("nowhere")
    with pytest.raises(DataError, match="dangling links to a missing file"):
        Data(str(root)).content_hash()
    (root / "dangling").unlink()
    (root / "circle").symlink_to("circle")
    with pytest.raises(DataError, match=r"circle cannot be read: .*symbolic links"):
        Data(str(root)).content_hash()


@pytest.mark.skipif(sys.platform == "darwin", reason="names are Unicode there")
def test_names_that_are_not_unicode_are_hashed(make_tree: MakeTree) -> None:
    root = make_tree("tree", {"a": b"1"})
    (root / os.fsdecode(b"\xff\xfe")).write_bytes(b"2")
    assert Data(str(root)).content_hash() == documented_hash(root)


def test_an_argument_of_a_wrong_type_is_named(tmp_path: Path) -> None:
    wrong: Any = 5
    with pytest.raises(TypeError, match=r"the path of Data must be text .*, not 5"):
        Data(wrong)
    for name in ("fuse", "hf_trust_remote_code"):
        options: Any = {name: "yes"}
        with pytest.raises(TypeError, match=f"{name} of Data must be True or False, not 'yes'"):
            Data(str(tmp_path), **options)


async def test_the_hash_is_also_available_as_a_coroutine(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    data = Data(str(tmp_path))
    assert await aio.content_hash(data) == Data(str(tmp_path)).content_hash()
    with pytest.raises(DataError, match="not local"):
        await aio.content_hash(Data("gs://bucket/a"))
