"""Test the scan of a project: order, links, special files, and the fingerprint."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from kinetic._packing import ignore, tree
from kinetic.errors import PackError

from .conftest import Make, settle

RULES = ignore.Rules()


def scan(root: Path, *exclude: Path) -> tree.Tree:
    return tree.scan(root, RULES, exclude)


def names(root: Path, *exclude: Path) -> list[str]:
    return [entry.name for entry in scan(root, *exclude).entries]


def test_names_are_ordered_by_their_bytes(tmp_path: Path, make: Make) -> None:
    created = ["a/x", "a.txt", "a-b/x", "A", "ä", "a/b/c", "z/", "a/b.c"]
    make(tmp_path, dict.fromkeys(created, ""))
    entry_names = names(tmp_path)
    assert entry_names == sorted(entry_names, key=str.encode)
    assert {"a/", "a/b/", "z/", "ä"} <= set(entry_names)


def test_links_inside_the_project_are_followed(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"runs/7/w": "weights", "conf.a": "a"})
    (tmp_path / "latest").symlink_to("runs/7")
    (tmp_path / "conf").symlink_to(tmp_path / "conf.a")
    scanned = scan(tmp_path)
    assert {"latest/", "latest/w", "conf", "runs/7/w"} <= {entry.name for entry in scanned.entries}
    assert scanned.omitted == ()


def test_links_out_of_the_project_are_omitted_and_named(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"secret/key": "", "project/m.py": "", "project-2/x": ""})
    (tmp_path / "project/far").symlink_to(tmp_path / "secret")
    (tmp_path / "project/key").symlink_to("../secret/key")
    (tmp_path / "project/near").symlink_to("../project-2")
    (tmp_path / "project/host").symlink_to("/etc/hostname")
    scanned = scan(tmp_path / "project")
    assert [entry.name for entry in scanned.entries] == ["m.py"]
    assert [line.partition(" ")[0] for line in scanned.omitted] == ["far", "host", "key", "near"]
    assert all("out of the project" in line for line in scanned.omitted)


def test_cycles_of_links_are_cut(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"a/m": "", "b/n": ""})
    (tmp_path / "a/up").symlink_to("..")
    (tmp_path / "a/self").symlink_to("self")
    (tmp_path / "a/cwd").symlink_to(".")
    (tmp_path / "a/b").symlink_to("../b")
    (tmp_path / "b/a").symlink_to("../a")
    scanned = scan(tmp_path)
    entry_names = {entry.name for entry in scanned.entries}
    assert {"a/m", "a/b/n", "b/a/m"} <= entry_names
    assert len(entry_names) < 12
    assert any("leads back" in line for line in scanned.omitted)


def test_many_links_between_folders_do_not_multiply_the_entries(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {f"{folder}/f": "" for folder in range(6)})
    for folder in range(6):
        for other in range(6):
            if other != folder:
                (tmp_path / f"{folder}/to{other}").symlink_to(f"../{other}")
    assert len(scan(tmp_path).entries) < 6 * 5**4 * 3


def test_broken_links_and_special_files_are_omitted_and_named(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"m.py": ""})
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    cwd = os.getcwd()
    os.chdir(tmp_path)  # the path of a socket is limited to 104 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("sock")
    finally:
        os.chdir(cwd)
    os.makedirs(os.fsencode(tmp_path) + b"/d\xff")
    scanned = scan(tmp_path)
    assert [entry.name for entry in scanned.entries] == ["m.py"]
    assert len(scanned.omitted) == 4


def test_excluded_paths_are_left_out_under_every_name(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"data/big": "", "data/sub/x": "", "m.py": "", "database": ""})
    (tmp_path / "alias").symlink_to("data")
    (tmp_path / "one").symlink_to("data/big")
    assert names(tmp_path, tmp_path / "data") == ["database", "m.py"]
    assert names(tmp_path, tmp_path / "alias") == ["database", "m.py"]
    assert "data/sub/x" in names(tmp_path, tmp_path / "data/big")
    # The project is packed even if a user also passes it as data.
    assert "m.py" in names(tmp_path, tmp_path)
    assert "m.py" in names(tmp_path, tmp_path.parent)


def test_a_project_may_be_deeper_than_the_recursion_limit(tmp_path: Path) -> None:
    cwd = os.getcwd()
    os.chdir(tmp_path)
    try:
        for _ in range(700):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(cwd)
    assert len(scan(tmp_path).entries) == 700
    shutil.rmtree(tmp_path / "d")


def test_a_root_that_is_no_folder_is_an_error(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"file": ""})
    for root in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(PackError, match=root.name):
            scan(root)


def test_every_change_of_a_file_changes_the_fingerprint(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"a": "1", "d/b": "2"})
    seen = {scan(tmp_path).fingerprint}

    def assert_changed() -> None:
        fingerprint = scan(tmp_path).fingerprint
        assert fingerprint not in seen
        seen.add(fingerprint)

    (tmp_path / "a").write_text("22")
    assert_changed()
    (tmp_path / "a").chmod(0o755)
    assert_changed()
    before = (tmp_path / "a").stat()
    settle(tmp_path)  # otherwise the ctime may be the same
    (tmp_path / "a").write_text("33")
    os.utime(tmp_path / "a", ns=(before.st_atime_ns, before.st_mtime_ns))  # like rsync
    assert_changed()
    (tmp_path / "d/b").rename(tmp_path / "d/c")
    assert_changed()
    (tmp_path / "e").mkdir()
    assert_changed()
    (tmp_path / "e").chmod(0o700)
    assert_changed()


def test_excluded_files_do_not_change_the_fingerprint(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"a": "1"})
    before = scan(tmp_path).fingerprint
    make(tmp_path, {"__pycache__/a.pyc": "", ".git/index": ""})
    assert scan(tmp_path).fingerprint == before
