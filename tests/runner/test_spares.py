"""Workspaces that serve one job after another: each finds what the first one found."""

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
    """The folder of a job, whose project has `FILES`."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.root = self.work / spares.WORKSPACE
        self.copied: list[str] = []
        for name, content in FILES.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        spares.write_record(str(self.work), DIGEST)

    def restore(self) -> bool:
        self.copied.clear()
        return spares.restore(str(self.work), DIGEST, self._fill)

    def _fill(self, missing: Iterable[str]) -> None:
        for name in missing:
            self.copied.append(name[1:])
            (self.root / name[1:]).write_bytes(FILES[name[1:]])

    def found(self) -> dict[str, bytes]:
        """What the next job finds; nothing of it is a link."""
        files = [path for path in self.root.rglob("*") if not path.is_dir()]
        assert not any(path.is_symlink() for path in self.root.rglob("*"))
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    if not spares.can_keep(str(tmp_path)):
        pytest.skip("this file system doesn't show every change of a file")
    return Job(tmp_path)


def test_a_workspace_that_no_job_has_changed_costs_no_copy(job: Job) -> None:
    before = {path: path.stat().st_ino for path in job.root.rglob("*")}
    for _ in range(3):
        assert job.restore() and not job.copied
    assert {path: path.stat().st_ino for path in job.root.rglob("*")} == before


def _rewrite(root: Path) -> None:
    """Change a file, and set back all that a program can."""
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


def _to_a_link(root: Path) -> None:
    (root / "package" / "b").unlink()
    (root / "package" / "b").symlink_to("../a")


def _to_a_folder(root: Path) -> None:
    (root / "package" / "b").unlink()
    (root / "package" / "b" / "inner").mkdir(parents=True)


def _link_elsewhere(root: Path) -> None:
    """What is written to later, by the other name, must not be the next job's file."""
    os.link(root / "package" / "b", root.parent / "mine")


def _open_up(root: Path) -> None:
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
        _to_a_link,
        _to_a_folder,
        _link_elsewhere,
        _open_up,
        _remove,
        _move,
    ],
)
def test_a_file_that_a_job_has_changed_is_copied_again(
    job: Job, change: Callable[[Path], object]
) -> None:
    inode = (job.root / "package" / "b").stat().st_ino
    held = (job.root / "package" / "b").open("rb")  # so that no file gets its number
    change(job.root)
    assert job.restore() and job.copied == ["package/b"]
    assert job.found() == FILES
    assert (job.root / "package" / "b").stat().st_ino != inode
    held.close()
    assert job.restore() and not job.copied


@pytest.mark.parametrize("to", ["gone", "link", "file", "moved", "closed"])
def test_a_folder_that_a_job_has_changed_is_as_before(job: Job, tmp_path: Path, to: str) -> None:
    package = job.root / "package"
    mode = package.stat().st_mode
    if to == "closed":
        package.chmod(0o500)
    elif to == "moved":
        package.rename(job.root / "other")
    else:
        shutil.move(package, tmp_path / "elsewhere")
    if to == "link":
        package.symlink_to(tmp_path / "elsewhere")
    elif to == "file":
        package.touch()
    assert job.restore()
    assert job.found() == FILES and package.stat().st_mode == mode
    assert job.restore() and not job.copied


def test_what_a_job_has_added_is_removed_and_costs_no_copy(job: Job) -> None:
    (job.root / "package" / "__pycache__").mkdir()
    (job.root / "package" / "__pycache__" / "b.pyc").touch()
    (job.root / "out").symlink_to("/etc")
    (job.root / "model").write_bytes(b"x")
    assert job.restore() and not job.copied
    assert job.found() == FILES
    assert not (job.root / "package" / "__pycache__").exists()


@pytest.mark.parametrize("what", ["torn", "link"])
def test_what_cannot_be_restored_is_not_used(job: Job, tmp_path: Path, what: str) -> None:
    if what == "torn":
        record = next(path for path in job.work.iterdir() if path != job.root)
        os.truncate(record, 20)
    else:
        job.root.rename(tmp_path / "moved")
        job.root.symlink_to(tmp_path / "moved")
    assert not job.restore()
    assert not os.path.lexists(job.root)
    assert spares.project_of(os.listdir(job.work)) == ""


def test_no_folder_is_kept_where_a_store_through_a_mapping_does_not_show(tmp_path: Path) -> None:
    """The probe says what this very file system does with such a store."""
    path = tmp_path / "file"
    path.write_bytes(b"0")
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 1) as content:
        content[0] += 1
        before = path.stat().st_ctime_ns
        until = time.monotonic() + 1
    shows = False
    while not shows and time.monotonic() < until:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 1) as content:
            content[0] += 1
        shows = path.stat().st_ctime_ns > before
    assert spares.can_keep(str(tmp_path)) is shows
    assert os.listdir(tmp_path) == ["file"]
