"""The workspace of a worker: each item in a process of its own finds the project as submitted."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.job.workspace import JobPlace
from kinetic._runner.protocol import wire
from kinetic._runner.worker.kept_workspace import KeptWorkspace

from .process import Batch

PROJECT = {
    "a.txt": b"1",
    "helper.py": b"VALUE = 1",
    "package/__init__.py": b"",
    "package/deep/b.txt": b"2",
    "package/deep/c.txt": b"3",
}


def look() -> dict[str, Any]:
    """Return the content of all files, and the names of the folders."""
    files = {
        os.path.relpath(os.path.join(folder, name)): Path(folder, name).read_bytes()
        for folder, _, names in os.walk(".")
        for name in names
        if not folder.endswith("__pycache__")
    }
    folders = sorted(folder for folder, _, _ in os.walk("."))
    return {"files": files, "folders": folders, "beside": sorted(os.listdir(".."))}


def spoil(way: str) -> dict[str, Any]:
    """Look at the workspace, and then change it in some *way*."""
    import mmap

    found, path = look(), Path("package/deep/b.txt")
    before = path.stat()
    match way:
        case "write":
            path.write_bytes(b"spoiled")
        case "write and set the times back":
            path.write_bytes(b"x")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        case "write through a mapping":
            with open(path, "r+b") as file:
                mapped = mmap.mmap(file.fileno(), 1)
            mapped[0] = 0
            os._exit(0)
        case "truncate":
            os.truncate(path, 0)
        case "add":
            Path("new").mkdir()
            Path("new/file").touch()
            Path("package/new").touch()
        case "delete":
            path.unlink()
            shutil.rmtree("package")
        case "delete the working directory":
            shutil.rmtree(os.getcwd())
        case "rename":
            os.rename("package", "moved")
            Path("moved/deep/b.txt").write_bytes(b"spoiled")
            os.rename("moved", "package")
        case "move the workspace":
            os.rename(os.getcwd(), "../other")
            os.mkdir("../workspace")
            Path("../workspace/a.txt").write_bytes(b"spoiled")
        case "replace by a link":
            os.rename(os.getcwd(), "../other")
            os.symlink("other", "../workspace")
            path.write_bytes(b"spoiled")
        case "modes":
            path.chmod(0o600)
            os.chmod("package", 0o500)
        case "leave a process":
            if os.fork() == 0:
                while True:
                    path.write_bytes(b"spoiled")
        case "write beside it":
            Path("../file").touch()
            Path("../folder/file").parent.mkdir()
            Path("../folder/file").touch()
        case _:
            pass
    return found


WAYS = [
    "write", "write and set the times back", "write through a mapping", "truncate", "add", "delete",
    "delete the working directory", "rename", "move the workspace", "replace by a link", "modes",
    "leave a process", "write beside it",
]  # fmt: skip


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a disk, or in memory, where the times of files can't be trusted."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.path.isdir("/dev/shm"):
        pytest.skip("this system has no file system in memory")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        yield Path(memory)


def is_trusted(folder: Path) -> bool:
    return not str(folder).startswith("/dev/shm")


def test_each_item_finds_the_project_as_it_was_submitted(folder: Path) -> None:
    inputs = ["nothing", *(name for way in WAYS for name in ("nothing", way)), "nothing"]
    batch = Batch(folder, spoil, inputs, project=PROJECT, reusable=is_trusted(folder))
    batch.run()
    lost = {inputs.index("write through a mapping")}  # it has no value
    for index in range(len(inputs)):
        if index not in lost:
            assert batch.value(index)["files"] == PROJECT, f"after {inputs[index - 1]}"
            assert batch.value(index) == batch.value(0), f"after {inputs[index - 1]}"


def test_without_a_watch_files_are_compared_or_made_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(folder)
    batch = Batch(folder / "b", look, [], project=PROJECT)
    code = wire.Order.decode(batch.order_text).code
    work = folder / "work"
    work.mkdir()
    place = JobPlace(work=work, cache=folder / "c", mounts=True, reusable=is_trusted(folder))
    kept = KeptWorkspace(code, batch.objects, place, watches=False)
    root = Path.cwd()
    for _ in range(2):
        kept.restore()
        os.chdir(root)
        assert look()["files"] == PROJECT
        Path("a.txt").write_bytes(b"2")
        Path("package/new").touch()
        Path("helper.py").unlink()
        kept.restore()
        os.chdir(root)
        assert look()["files"] == PROJECT
        inodes = {path: path.stat().st_ino for path in root.rglob("*")}
        kept.restore()
        if is_trusted(folder):
            assert {path: path.stat().st_ino for path in root.rglob("*")} == inodes


def test_without_a_project_the_workspace_of_each_item_is_empty(folder: Path) -> None:
    def fill(number: int) -> list[str]:
        found = sorted(os.listdir("."))
        Path("file").touch()
        Path("folder/__pycache__").mkdir(parents=True)
        Path("__pycache__").mkdir()
        return found

    batch = Batch(folder, fill, range(3), reusable=is_trusted(folder))
    batch.run()
    assert [batch.value(index) for index in range(3)] == [[], [], []]


def test_bytecode_of_unchanged_files_stays(folder: Path) -> None:
    def compile_once(number: int) -> tuple[int, int]:
        helper: Any = importlib.import_module("helper")
        return helper.VALUE, os.stat(helper.__cached__).st_ino

    batch = Batch(folder, compile_once, range(3), project=PROJECT, reusable=is_trusted(folder))
    batch.run()
    assert len({batch.value(index) for index in range(3)}) == 1


def test_the_module_of_an_item_is_not_that_which_an_earlier_item_has_written(folder: Path) -> None:
    def replace_module(number: int) -> int:
        helper: Any = importlib.import_module("helper")
        found: int = helper.VALUE
        status = os.stat("helper.py")
        Path("helper.py").write_text("VALUE = 2")
        os.utime("helper.py", ns=(status.st_atime_ns, status.st_mtime_ns))
        import py_compile

        py_compile.compile("helper.py")
        return found

    batch = Batch(folder, replace_module, range(3), project=PROJECT, reusable=is_trusted(folder))
    batch.run()
    assert [batch.value(index) for index in range(3)] == [1, 1, 1]


def test_bytecode_that_an_item_has_written_by_hand_does_not_stay(folder: Path) -> None:
    def plant(number: int) -> list[str]:
        os.makedirs("__pycache__", exist_ok=True)
        found = sorted(os.listdir("__pycache__"))
        importlib.import_module("helper")
        if number == 1:
            Path("__pycache__/other.txt").touch()
        return found

    batch = Batch(folder, plant, range(4), project=PROJECT, reusable=is_trusted(folder))
    batch.run()
    found = [batch.value(index) for index in range(4)]
    assert found[0] == [] and found[1] == found[3] != [] and "other.txt" not in found[2]


def test_a_project_that_cannot_be_restored_fails_its_items_and_says_why(tmp_path: Path) -> None:
    def remove_the_project(number: int) -> None:
        Path("a.txt").unlink()
        shutil.rmtree(tmp_path / "b" / "cache")
        shutil.rmtree(tmp_path / "b" / "store" / "code")

    batch = Batch(tmp_path / "b", remove_the_project, range(2), project=PROJECT)
    batch.run()
    assert batch.states() == [wire.ItemState.SUCCEEDED, wire.ItemState.FAILED]
    assert batch.outcomes(1)[0].phase == "context extract"
    assert "no longer in the store" in batch.error(1)["message"]
