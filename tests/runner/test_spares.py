"""Test workspaces that serve one job after another: each job finds the original files."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from kinetic._runner.job import spares

DIGEST = "1" * 64
FILES = {"a": b"1", "package/b": b"2", "package/deep/c": b"3", "package/deep/d": b"4"}


class Job:
    """The working directory of a job whose project has `FILES`."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.root = self.work / spares.WORKSPACE
        self.copied: list[str] = []
        for name, content in FILES.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        spares.write_record(str(self.work), DIGEST)

    def restore(self, *replaced: str) -> bool:
        self.copied.clear()
        return spares.restore(str(self.work), DIGEST, self._fill, {f"/{name}" for name in replaced})

    def _fill(self, missing: Iterable[str]) -> None:
        for name in missing:
            self.copied.append(name[1:])
            (self.root / name[1:]).write_bytes(FILES[name[1:]])

    def read_files(self) -> dict[str, bytes]:
        """Return the files that the next job finds, after checking that none is a link."""
        files = [path for path in self.root.rglob("*") if not path.is_dir()]
        assert not any(path.is_symlink() for path in self.root.rglob("*"))
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    if not spares.can_keep(str(tmp_path)):
        pytest.skip("this file system doesn't show every change of a file")
    return Job(tmp_path)


def test_an_unchanged_workspace_costs_no_copy(job: Job) -> None:
    before = {path: path.stat().st_ino for path in job.root.rglob("*")}
    for _ in range(3):
        assert job.restore() and not job.copied
    assert {path: path.stat().st_ino for path in job.root.rglob("*")} == before


def test_files_that_the_caller_replaces_are_not_copied(job: Job) -> None:
    for number in range(3):
        (job.root / "package" / "deep" / "c").write_bytes(b"changed by the job")
        assert job.restore("a", "new")
        assert job.copied == ["package/deep/c"], "it is recorded again"
        assert "a" not in job.read_files()
        (job.root / "a").write_bytes(b"%d" % number)
        (job.root / "new").touch()
    assert job.restore() and job.copied == ["a"]
    assert job.read_files() == FILES
    assert job.restore() and not job.copied


def _rewrite(root: Path) -> None:
    """Change a file, then restore all attributes that a program can set."""
    path = root / "package" / "b"
    before = path.stat()
    path.write_bytes(b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace(root: Path) -> None:
    other = root.parent / "other"
    shutil.copy2(root / "package" / "b", other)
    other.write_bytes(b"x")
    os.replace(other, root / "package" / "b")


def _map(root: Path) -> None:
    with open(root / "package" / "b", "r+b") as file, mmap.mmap(file.fileno(), 1) as content:
        content[0] += 1


def _turn_into_link(root: Path) -> None:
    (root / "package" / "b").unlink()
    (root / "package" / "b").symlink_to("../a")


def _turn_into_folder(root: Path) -> None:
    (root / "package" / "b").unlink()
    (root / "package" / "b" / "inner").mkdir(parents=True)


def _link_elsewhere(root: Path) -> None:
    """Link a file outside the workspace, where later writes would change the next job's file."""
    os.link(root / "package" / "b", root.parent / "linked")


def _make_writable(root: Path) -> None:
    (root / "package" / "b").chmod(0o777)


def _remove(root: Path) -> None:
    (root / "package" / "b").unlink()


def _move(root: Path) -> None:
    os.rename(root / "package" / "b", root / "moved")


@pytest.mark.parametrize(
    "change",
    [
        _rewrite,
        _replace,
        _map,
        _turn_into_link,
        _turn_into_folder,
        _link_elsewhere,
        _make_writable,
        _remove,
        _move,
    ],
)
def test_a_file_that_a_job_has_changed_is_copied_again(
    job: Job, change: Callable[[Path], object]
) -> None:
    inode = (job.root / "package" / "b").stat().st_ino
    opened = (job.root / "package" / "b").open("rb")  # keeps its inode number from being reused
    change(job.root)
    assert job.restore() and job.copied == ["package/b"]
    assert job.read_files() == FILES
    assert (job.root / "package" / "b").stat().st_ino != inode
    opened.close()
    assert job.restore() and not job.copied


@pytest.mark.parametrize("change", ["removed", "link", "file", "moved", "read-only"])
def test_a_folder_that_a_job_has_changed_is_restored(job: Job, tmp_path: Path, change: str) -> None:
    package = job.root / "package"
    mode = package.stat().st_mode
    if change == "read-only":
        package.chmod(0o500)
    elif change == "moved":
        package.rename(job.root / "other")
    else:
        shutil.move(package, tmp_path / "elsewhere")
    if change == "link":
        package.symlink_to(tmp_path / "elsewhere")
    elif change == "file":
        package.touch()
    assert job.restore()
    assert job.read_files() == FILES and package.stat().st_mode == mode
    assert job.restore() and not job.copied


def test_files_that_a_job_has_added_are_removed_without_a_copy(job: Job) -> None:
    (job.root / "package" / "__pycache__").mkdir()
    (job.root / "package" / "__pycache__" / "b.pyc").touch()
    (job.root / "out").symlink_to("/etc")
    (job.root / "model").write_bytes(b"x")
    assert job.restore() and not job.copied
    assert job.read_files() == FILES
    assert not (job.root / "package" / "__pycache__").exists()


@pytest.mark.parametrize(
    ("name", "change", "stays"),
    [
        ("package/__pycache__/e.cpython-311.pyc", "", True),
        ("package/__pycache__/e.cpython-311.pyc", "package/e.py", False),
        ("package/__pycache__/e.cpython-311.pyc", "a", False),
        ("package/__pycache__/other.cpython-311.pyc", "", False),
        ("package/__pycache__/e.cpython-311.nbi", "", False),
        ("package/cache/e.cpython-311.pyc", "", False),
    ],
)
def test_bytecode_of_unchanged_files_stays(
    name: str, change: str, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that changes a module leaves bytecode that a later job could take for its own."""
    monkeypatch.setitem(FILES, "package/e.py", b"5")
    if not spares.can_keep(str(tmp_path)):
        pytest.skip("this file system doesn't show every change of a file")
    job = Job(tmp_path)
    path = job.root / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"code")
    if change:
        (job.root / change).write_bytes(b"9")
    assert job.restore()
    assert path.exists() == stays and path.parent.exists() == stays
    assert job.copied == ([change] if change else [])
    assert job.read_files().items() >= FILES.items()


@pytest.mark.parametrize("damage", ["record", "link"])
def test_a_workspace_that_cannot_be_restored_is_deleted(
    job: Job, tmp_path: Path, damage: str
) -> None:
    if damage == "record":
        record = next(path for path in job.work.iterdir() if path != job.root)
        os.truncate(record, 20)
    else:
        job.root.rename(tmp_path / "moved")
        job.root.symlink_to(tmp_path / "moved")
    assert not job.restore()
    assert not os.path.lexists(job.root)
    assert not [name for name in os.listdir(job.work) if name.endswith(spares.RECORD)]


def test_workspaces_are_kept_only_if_writes_through_mappings_change_the_ctime(
    tmp_path: Path,
) -> None:
    """`can_keep` agrees with a check of this file system."""
    path = tmp_path / "file"
    path.write_bytes(b"0")
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 1) as content:
        content[0] += 1
        before = path.stat().st_ctime_ns
        deadline = time.monotonic() + 1
    ctime_changes = False
    while not ctime_changes and time.monotonic() < deadline:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 1) as content:
            content[0] += 1
        ctime_changes = path.stat().st_ctime_ns > before
    assert spares.can_keep(str(tmp_path)) is ctime_changes
    assert os.listdir(tmp_path) == ["file"]
