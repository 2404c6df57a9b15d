"""Test the directory in which a job runs: unpacked once, and private to each job."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import sys
import textwrap
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.job import namespace, workspace
from kinetic._runner.protocol import overlay, wire
from tests.data.conftest import Machine
from tests.scripts import Program

LIST_FILES = """
answer["files"] = sorted(
    os.path.relpath(os.path.join(folder, name))
    for folder, _, names in os.walk(".") for name in names
)
"""


def archive(
    machine: Machine,
    members: dict[str, bytes],
    modes: dict[str, int] | None = None,
    **options: Any,
) -> wire.Code:
    """Put a project's archive into the store."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, body in members.items():
            info = zipfile.ZipInfo(name)
            folder = name.endswith("/")
            kind = stat.S_IFDIR | 0o755 if folder else stat.S_IFREG | 0o644
            info.external_attr = (modes or {}).get(name, kind) << 16
            file.writestr(info, body)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    machine.objects.create(f"code/{digest}.zip", content.getvalue())
    return wire.Code(name=f"code/{digest}.zip", digest=digest, **options)


def changed(machine: Machine, code: wire.Code, files: Mapping[str, bytes | None]) -> wire.Code:
    """Put an overlay into the store; None removes a file."""
    content = overlay.encode(
        {
            name: None if body is None else overlay.Change(0o755, None if name[-1] == "/" else body)
            for name, body in files.items()
        }
    )
    digest = hashlib.sha256(content).hexdigest()
    name = f"code/{digest}.overlay"
    machine.objects.create(name, content)
    return replace(code, overlay=wire.Input(name, 0, len(content), digest))


def preparation_error(machine: Machine, code: wire.Code) -> Exception:
    """Prepare the workspace and return the error that this raises."""
    with pytest.raises((OSError, RuntimeError, ValueError)) as caught:
        workspace.prepare(code, machine.objects, machine.place())
    return caught.value


def test_without_code_the_workspace_is_empty(machine: Machine) -> None:
    answer = machine.run(LIST_FILES + "answer['cwd'] = os.getcwd()")
    assert answer == {"files": [], "cwd": str(machine.folder / "work-1" / "workspace")}


def test_the_working_directory_and_the_import_path_are_restored(machine: Machine) -> None:
    members = {
        "main.py": b"A = 1",
        "src/pkg/__init__.py": b"B = 2",
        "data/x.txt": b"x",
        "out/": b"",
    }
    code = archive(machine, members, sys_path=("", "src", "not/there"), cwd="data")
    answer = machine.run(
        """
        import main, pkg
        answer["values"] = [main.A, pkg.B, Path("x.txt").read_text()]
        answer["path"] = [os.path.relpath(entry, "..") for entry in sys.path[:3]]
        answer["empty"] = os.listdir("../out")
        """,
        code=code,
    )
    assert answer == {"values": [1, 2, "x"], "path": [".", "src", "not/there"], "empty": []}


def test_a_working_directory_that_was_not_packed_is_created(machine: Machine) -> None:
    code = archive(machine, {"a": b"1"}, cwd="ignored/runs")
    assert machine.run("answer['names'] = os.listdir()", code=code) == {"names": []}


def test_modes_are_kept(machine: Machine) -> None:
    modes = {
        "run.sh": stat.S_IFREG | 0o6755,
        "quiet": stat.S_IFREG | 0o400,
        "closed/": stat.S_IFDIR | 0o555,
        "closed/in": stat.S_IFREG | 0o640,
    }
    code = archive(machine, dict.fromkeys(modes, b"x"), modes)
    body = "answer.update({n: oct(os.stat(n).st_mode & 0o7777) for n in sorted(os.listdir())})"
    for _ in range(2):
        assert machine.run(body + "; os.remove('closed/in')", code=code) == {
            "closed": "0o755",
            "quiet": "0o400",
            "run.sh": "0o755",
        }


def test_overlays_of_a_job_are_private_to_it(machine: Machine) -> None:
    code = archive(machine, {"a": b"1", "d/b": b"2"})
    first = machine.run(
        LIST_FILES + "Path('a').write_text('changed'); os.remove('d/b'); Path('d/c').touch()",
        code=code,
    )
    assert first["files"] == ["a", "d/b"]
    second = machine.run(LIST_FILES + "answer['a'] = Path('a').read_text()", code=code)
    assert second == {"files": ["a", "d/b"], "a": "1"}
    assert len(os.listdir(machine.cache / "code")) == 1


def test_a_large_project_is_mounted_where_possible(machine: Machine) -> None:
    members = {f"{i % 20}/{i}": b"%d" % i for i in range(1000)}
    code = archive(machine, members)
    body = """
    kind = [line.split()[8] for line in open("/proc/self/mountinfo") if "/workspace " in line]
    answer["kind"] = kind
    answer["found"] = sum(len(names) for _, _, names in os.walk("."))
    Path("0/0").write_text("changed")
    os.remove("1/1")
    os.rename("2", "two")
    """
    for _ in range(2):
        answer = machine.run(body, code=code)
        assert answer["found"] == 1000
        assert answer["kind"] == (["overlay"] if namespace.available() == "root" else [])
    answer = machine.run(body, code=code, mounts=False)
    assert answer == {"kind": [], "found": 1000}


@pytest.mark.parametrize(
    "name",
    ["../out", "/etc/out", "a/../../out", "a//b", "./a", "a/./b", "..", "a/.."],
)
def test_members_outside_the_workspace_are_refused(machine: Machine, name: str) -> None:
    error = preparation_error(machine, archive(machine, {"fine": b"1", name: b"out"}))
    assert isinstance(error, ValueError)
    assert "is not a path inside the workspace" in str(error)
    assert not (machine.folder / "out").exists()
    assert not list(machine.cache.rglob("tree-*"))


def test_links_and_devices_are_refused(machine: Machine) -> None:
    for kind in (stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO):
        code = archive(
            machine, {"link": b"/etc", "link/passwd": str(kind).encode()}, {"link": kind | 0o777}
        )
        assert (
            str(preparation_error(machine, code))
            == "the archive's 'link' isn't a file or directory"
        )


def test_duplicate_members_are_refused(machine: Machine) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("a", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("a", b"2")
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    machine.objects.create("code/x.zip", content.getvalue())
    error = preparation_error(machine, wire.Code(name="code/x.zip", digest=digest))
    assert isinstance(error, FileExistsError)


@pytest.mark.parametrize(("cwd", "entry"), [("../..", ""), (None, "/etc"), (None, "a/../..")])
def test_a_working_directory_or_import_path_outside_is_refused(
    machine: Machine, cwd: str | None, entry: str
) -> None:
    code = archive(machine, {"a": b"1"}, cwd=cwd, sys_path=(entry,))
    before = os.getcwd(), list(sys.path)
    assert "is not a path inside the workspace" in str(preparation_error(machine, code))
    assert (os.getcwd(), sys.path) == before


def test_an_archive_with_another_digest_is_refused(machine: Machine) -> None:
    code = archive(machine, {"a": b"1"})
    other = wire.Code(name=code.name, digest="0" * 64)
    assert "its SHA-256 differs" in str(preparation_error(machine, other))
    missing = wire.Code(name="code/gone.zip", digest="1" * 64)
    assert str(preparation_error(machine, missing)) == (
        "the project's archive code/gone.zip is no longer in the store; submit the job again"
    )
    malformed = wire.Code(name=code.name, digest="../" * 21 + "x")
    assert "isn't a SHA-256" in str(preparation_error(machine, malformed))


def test_an_archive_without_its_own_file_is_fetched(machine: Machine) -> None:
    """An object with metadata is stored with a header, so no file has exactly its content."""
    code = archive(machine, {"a": b"1"})
    body = machine.objects.get(code.name)[0]
    machine.objects.delete([code.name])
    machine.objects.create(code.name, body, {"some": "metadata"})
    assert machine.objects.path(code.name) is None
    assert machine.run(LIST_FILES, code=code)["files"] == ["a"]
    assert not list(machine.cache.rglob("archive"))


@pytest.mark.parametrize("count", [1, 1000])  # copied, or mounted where possible
def test_what_has_changed_is_applied_to_this_job_only(machine: Machine, count: int) -> None:
    members = {"a": b"1", "d/b": b"2", "old/": b"", "old/x": b"3", "turned": b"4", "quiet": b"5"}
    members |= {f"many/{number}": b"" for number in range(count)}
    code = archive(machine, members)
    files = {"old/x": None, "old/": None, "turned": None, "a": b"new", "new/deep/c": b"6"}
    files |= {"turned/": b"", "turned/y": b"7", "quiet": b"8", "many/absent": None}
    body = """
    answer["old"], answer["modes"] = os.path.exists("old"), os.stat("quiet").st_mode & 0o777
    answer["files"] = {name: open(name).read() for name in
        ("a", "d/b", "old/x", "new/deep/c", "turned", "turned/y", "quiet") if os.path.isfile(name)}
    Path("quiet").write_text("written")
    """
    other = changed(machine, code, {"a": b"other"})
    for job in (changed(machine, code, files), other, code):
        answer = machine.run(body, code=job)
        if job.overlay is None or job is other:
            expected = {"a": "1", "d/b": "2", "old/x": "3", "turned": "4", "quiet": "5"}
            expected["a"] = "other" if job is other else "1"
            assert answer == {"old": True, "modes": 0o644, "files": expected}
        else:
            expected = {"a": "new", "d/b": "2", "new/deep/c": "6", "turned/y": "7", "quiet": "8"}
            assert answer == {"old": False, "modes": 0o755, "files": expected}
    assert len(os.listdir(machine.cache / "code")) == 1, "the project is unpacked once"


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out", "d/../../out/"])
@pytest.mark.parametrize("body", [b"out", None])
def test_overlays_outside_the_workspace_are_refused(
    machine: Machine, name: str, body: bytes | None
) -> None:
    code = changed(machine, archive(machine, {"a": b"1"}), {name: body})
    assert "is not a path inside the workspace" in str(preparation_error(machine, code))
    assert not (machine.folder / "out").exists()


def test_overlays_that_are_missing_or_damaged_are_errors(machine: Machine) -> None:
    code = changed(machine, archive(machine, {"a": b"1"}), {"a": b"2"})
    assert code.overlay is not None
    damaged = replace(code, overlay=code.overlay._replace(digest="0" * 64))
    assert "is not what was submitted" in str(preparation_error(machine, damaged))
    machine.objects.delete([code.overlay.name])
    error = preparation_error(machine, code)
    assert isinstance(error, RuntimeError) and "submit the job again" in str(error)


def test_concurrent_jobs_unpack_once(machine: Machine) -> None:
    code = archive(machine, {f"{i}": b"x" * 10_000 for i in range(150)})
    processes = [machine.start(LIST_FILES, code=code) for _ in range(6)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert len(set(outputs)) == 1
    assert outputs[0].count('"149"') == 1
    (tree,) = (machine.cache / "code").glob("*/*")
    assert tree.name == "tree-150-1500000"


def test_the_next_process_builds_a_tree_whose_builder_was_killed(tmp_path: Path) -> None:
    """No process uses the incomplete tree."""
    shared = tmp_path / "shared"
    script = textwrap.dedent(
        f"""
        import os, sys, time
        from kinetic._runner.job import workspace as trees
        def build(part):
            open(os.path.join(part, "half"), "w").close()
            print("building", flush=True)
            time.sleep(60)
        trees.shared_tree({str(shared)!r}, build)
        """
    )
    with Program("-c", script) as process:
        process.expect("building")

    def build(part: str) -> workspace.Weight:
        assert os.listdir(part) == []
        Path(part, "whole").write_text("x")
        return workspace.Weight(1, 1)

    tree = workspace.shared_tree(str(shared), build)
    assert os.listdir(tree.path) == ["whole"]
    assert os.listdir(shared) == ["tree-1-1"]

    def fail(part: str) -> workspace.Weight:
        raise AssertionError(part)

    assert workspace.shared_tree(str(shared), fail) == tree


def test_a_failed_build_starts_again(tmp_path: Path) -> None:
    def fail(part: str) -> workspace.Weight:
        Path(part, "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        workspace.shared_tree(str(tmp_path / "p"), fail)
    tree = workspace.shared_tree(str(tmp_path / "p"), lambda part: workspace.Weight(0, 0))
    assert tree.weight.files == 0


def test_a_copy_has_the_contents_and_modes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "d" / "e").mkdir(parents=True)
    (source / "big").write_bytes(os.urandom(3_000_000))
    (source / "edge").write_bytes(b"x" * workspace.ONE_READ_BYTES)
    (source / "edge+1").write_bytes(b"x" * (workspace.ONE_READ_BYTES + 1))
    (source / "d" / "none").write_bytes(b"")
    (source / "big").chmod(0o755)
    (source / "d").chmod(0o555)
    before = os.umask(0o077)
    try:
        workspace.copy(str(source), str(tmp_path / "copy"))
    finally:
        assert os.umask(before) == 0o077
    copied = {
        path.relative_to(tmp_path / "copy").as_posix(): (
            path.stat().st_mode & 0o777,
            path.read_bytes() if path.is_file() else None,
        )
        for path in (tmp_path / "copy").rglob("*")
    }
    assert copied == {
        "d": (0o755, None),
        "d/e": (0o755, None),
        "d/none": (0o644, b""),
        "big": (0o755, (source / "big").read_bytes()),
        "edge": (0o644, (source / "edge").read_bytes()),
        "edge+1": (0o644, (source / "edge+1").read_bytes()),
    }


def test_a_shared_tree_that_lost_a_file_is_an_error(machine: Machine) -> None:
    """Cleaners of temporary directories delete single files."""
    code = archive(machine, {"a": b"1", "d/b": b"2"})
    assert machine.run(LIST_FILES, code=code)["files"] == ["a", "d/b"]
    (tree,) = (machine.cache / "code").glob("*/*")
    (tree / "d" / "b").unlink()
    assert f"{tree} was changed" in str(preparation_error(machine, code))
