"""The directory a job runs in: unpacked once, private to each job, never left."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import stat
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.job import namespace, workspace
from kinetic._runner.protocol import wire
from tests.data.conftest import Place

LOOK = """
answer["files"] = sorted(
    os.path.relpath(os.path.join(place, name))
    for place, _, names in os.walk(".") for name in names
)
"""


def archive(
    place: Place,
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
    place.objects.create(f"code/{digest}.zip", content.getvalue())
    return wire.Code(name=f"code/{digest}.zip", digest=digest, **options)


def refused(place: Place, code: wire.Code) -> Exception:
    """What preparing this raises; a job that gets that far changes nothing of its process."""
    with pytest.raises((OSError, RuntimeError, ValueError)) as caught:
        workspace.prepare(code, place.objects, place.site())
    return caught.value


def test_without_code_the_workspace_is_empty(place: Place) -> None:
    answer = place.run(LOOK + "answer['cwd'] = os.getcwd()")
    assert answer == {"files": [], "cwd": str(place.folder / "work-1" / "workspace")}


def test_the_caller_s_place_is_rebuilt(place: Place) -> None:
    members = {
        "main.py": b"A = 1",
        "src/pkg/__init__.py": b"B = 2",
        "data/x.txt": b"x",
        "out/": b"",
    }
    code = archive(place, members, sys_path=("", "src", "not/there"), cwd="data")
    answer = place.run(
        """
        import main, pkg
        answer["values"] = [main.A, pkg.B, Path("x.txt").read_text()]
        answer["path"] = [os.path.relpath(one, "..") for one in sys.path[:3]]
        answer["empty"] = os.listdir("../out")
        """,
        code=code,
    )
    assert answer == {"values": [1, 2, "x"], "path": [".", "src", "not/there"], "empty": []}


def test_a_directory_that_was_not_shipped_is_made_to_stand_in(place: Place) -> None:
    code = archive(place, {"a": b"1"}, cwd="ignored/runs")
    assert place.run("answer['names'] = os.listdir()", code=code) == {"names": []}


def test_modes_are_kept(place: Place) -> None:
    modes = {
        "run.sh": stat.S_IFREG | 0o6755,
        "quiet": stat.S_IFREG | 0o400,
        "closed/": stat.S_IFDIR | 0o555,
        "closed/in": stat.S_IFREG | 0o640,
    }
    code = archive(place, dict.fromkeys(modes, b"x"), modes)
    look = "answer.update({n: oct(os.stat(n).st_mode & 0o7777) for n in sorted(os.listdir())})"
    for _ in range(2):
        assert place.run(look + "; os.remove('closed/in')", code=code) == {
            "closed": "0o755",
            "quiet": "0o400",
            "run.sh": "0o755",
        }


def test_what_a_job_writes_stays_with_it(place: Place) -> None:
    code = archive(place, {"a": b"1", "d/b": b"2"})
    first = place.run(
        LOOK + "Path('a').write_text('mine'); os.remove('d/b'); Path('d/c').touch()", code=code
    )
    assert first["files"] == ["a", "d/b"]
    second = place.run(LOOK + "answer['a'] = Path('a').read_text()", code=code)
    assert second == {"files": ["a", "d/b"], "a": "1"}
    assert len(os.listdir(place.cache / "code")) == 1


def test_a_project_of_thousands_is_not_copied_where_it_can_be_mounted(place: Place) -> None:
    members = {f"{i % 20}/{i}": b"%d" % i for i in range(1000)}
    code = archive(place, members)
    body = """
    kind = [line.split()[8] for line in open("/proc/self/mountinfo") if "/workspace " in line]
    answer["kind"] = kind
    answer["found"] = sum(len(names) for _, _, names in os.walk("."))
    Path("0/0").write_text("mine")
    os.remove("1/1")
    os.rename("2", "two")
    """
    for _ in range(2):
        answer = place.run(body, code=code)
        assert answer["found"] == 1000
        assert answer["kind"] == (["overlay"] if namespace.available() == "root" else [])
    answer = place.run(body, code=code, mounts=False)
    assert answer == {"kind": [], "found": 1000}


@pytest.mark.parametrize(
    "name",
    ["../out", "/etc/out", "a/../../out", "a//b", "./a", "a/./b", "..", "a/.."],
)
def test_no_member_leaves_the_workspace(place: Place, name: str) -> None:
    error = refused(place, archive(place, {"fine": b"1", name: b"out"}))
    assert isinstance(error, ValueError)
    assert "is not a path inside the workspace" in str(error)
    assert not (place.folder / "out").exists()
    assert not list(place.cache.rglob("tree-*"))


def test_links_and_devices_are_refused(place: Place) -> None:
    for kind in (stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO):
        code = archive(
            place, {"link": b"/etc", "link/passwd": str(kind).encode()}, {"link": kind | 0o777}
        )
        assert str(refused(place, code)) == "the archive's 'link' isn't a file or directory"


def test_a_member_does_not_replace_another(place: Place) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("a", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("a", b"2")
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    place.objects.create("code/x.zip", content.getvalue())
    error = refused(place, wire.Code(name="code/x.zip", digest=digest))
    assert isinstance(error, FileExistsError)


@pytest.mark.parametrize(("cwd", "entry"), [("../..", ""), (None, "/etc"), (None, "a/../..")])
def test_the_caller_s_place_is_inside(place: Place, cwd: str | None, entry: str) -> None:
    code = archive(place, {"a": b"1"}, cwd=cwd, sys_path=(entry,))
    before = os.getcwd(), list(sys.path)
    assert "is not a path inside the workspace" in str(refused(place, code))
    assert (os.getcwd(), sys.path) == before


def test_an_archive_that_is_not_the_submitted_one_is_refused(place: Place) -> None:
    code = archive(place, {"a": b"1"})
    other = wire.Code(name=code.name, digest="0" * 64)
    assert "its SHA-256 differs" in str(refused(place, other))
    gone = wire.Code(name="code/gone.zip", digest="1" * 64)
    assert str(refused(place, gone)) == (
        "the project's archive code/gone.zip is no longer in the store; submit the job again"
    )
    odd = wire.Code(name=code.name, digest="../" * 21 + "x")
    assert "isn't a SHA-256" in str(refused(place, odd))


def test_a_store_without_files_is_fetched_from(place: Place) -> None:
    """An object that begins like a header has one of its own, so no file is its content."""
    code = archive(place, {"a": b"1"})
    body = place.objects.get(code.name)[0]
    place.objects.delete([code.name])
    place.objects.create(code.name, body, {"some": "metadata"})
    assert place.objects.path(code.name) is None
    assert place.run(LOOK, code=code)["files"] == ["a"]
    assert not list(place.cache.rglob("archive"))


def test_many_jobs_at_once_unpack_once(place: Place) -> None:
    code = archive(place, {f"{i}": b"x" * 10_000 for i in range(150)})
    processes = [place.start(LOOK, code=code) for _ in range(6)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert len(set(outputs)) == 1
    assert outputs[0].count('"149"') == 1
    (tree,) = (place.cache / "code").glob("*/*")
    assert tree.name == "tree-150-1500000"


def test_whoever_dies_over_it_leaves_it_to_the_next(tmp_path: Path) -> None:
    """Killed half-way, waiting ones go on; nobody sees the half."""
    place = tmp_path / "place"
    script = textwrap.dedent(
        f"""
        import os, sys, time
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from kinetic._runner.job import workspace as trees
        def build(part):
            open(os.path.join(part, "half"), "w").close()
            print("building", flush=True)
            time.sleep(60)
        trees.shared_tree({str(place)!r}, build)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"building\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()

    def build(part: str) -> workspace.Weight:
        assert os.listdir(part) == []
        Path(part, "whole").write_text("x")
        return workspace.Weight(1, 1)

    tree = workspace.shared_tree(str(place), build)
    assert os.listdir(tree.path) == ["whole"]
    assert os.listdir(place) == ["tree-1-1"]

    def never(part: str) -> workspace.Weight:
        raise AssertionError(part)

    assert workspace.shared_tree(str(place), never) == tree


def test_a_build_that_fails_is_begun_anew(tmp_path: Path) -> None:
    def fail(part: str) -> workspace.Weight:
        Path(part, "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        workspace.shared_tree(str(tmp_path / "p"), fail)
    assert (
        workspace.shared_tree(str(tmp_path / "p"), lambda part: workspace.Weight(0, 0)).weight.files
        == 0
    )


def test_a_copy_is_exact(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "d" / "e").mkdir(parents=True)
    (source / "big").write_bytes(os.urandom(3_000_000))
    (source / "edge").write_bytes(b"x" * workspace.READ_AT_ONCE)
    (source / "edge+1").write_bytes(b"x" * (workspace.READ_AT_ONCE + 1))
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


def test_a_tree_that_lost_something_is_noticed(place: Place) -> None:
    """As the cleaners of temporary directories do it."""
    code = archive(place, {"a": b"1", "d/b": b"2"})
    assert place.run(LOOK, code=code)["files"] == ["a", "d/b"]
    (tree,) = (place.cache / "code").glob("*/*")
    (tree / "d" / "b").unlink()
    assert f"{tree} was changed" in str(refused(place, code))
