"""Test volumes at any path: private to the job, invisible outside, and removed with it."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kinetic._runner.job import namespace
from tests.data.conftest import NOBODY, ROOT, Machine, Ship

pytestmark = pytest.mark.skipif(not namespace.available(), reason="the kernel gives no namespace")

POINT = "/kinetic-test-volume"
"""A path that exists on no machine."""


def alive(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@functools.cache
def available_to(uid: int | None) -> str:
    """Return the kind of namespace that processes of a user can get."""
    machine = Machine(Path(tempfile.mkdtemp(prefix="kn-", dir="/tmp")), uid)
    try:
        answer = machine.run("answer['kind'] = namespace.available()")
        return str(answer["kind"])
    finally:
        shutil.rmtree(machine.folder)


@pytest.fixture(params=["own", "unprivileged"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Return a machine whose jobs run as this user, then one of an unprivileged user."""
    uid = None
    if request.param == "unprivileged":
        if os.geteuid() != 0:
            pytest.skip("only root can change the user, and `own` is unprivileged already")
        if available_to(NOBODY) != "user":
            pytest.skip("the kernel gives unprivileged users no namespace")
        uid = NOBODY
    folder = Path(tempfile.mkdtemp(prefix="kn-", dir="/tmp"))
    yield Machine(folder, uid)
    shutil.rmtree(folder)


async def test_a_volume_at_a_path_that_does_not_exist(machine: Machine, ship: Ship) -> None:
    ref = await ship({"a": b"1", "d/b": b"2"}, POINT)
    entries = os.listdir("/")
    answer = machine.run(
        f"""
        answer["path"] = paths[0]
        answer["seen"] = Path("{POINT}/d/b").read_text()
        Path("{POINT}/a").write_text("changed")
        Path("{POINT}/new").mkdir()
        answer["names"] = sorted(os.listdir("{POINT}"))
        answer["kind"] = namespace.entered()
        answer["uid"] = [os.getuid(), os.getgid()]
        answer["others"] = sorted(os.listdir("/"))
        """,
        ref,
    )
    assert answer.pop("kind") == ("root" if os.geteuid() == 0 and not machine.uid else "user")
    uid = os.getuid() if machine.uid is None else machine.uid
    assert answer == {
        "path": POINT,
        "seen": "2",
        "names": ["a", "d", "new"],
        "uid": [uid, uid],
        "others": sorted([*entries, POINT[1:]]),
    }
    assert sorted(os.listdir("/")) == sorted(entries)
    answer = machine.run(f"answer['a'] = Path('{POINT}/a').read_text()", ref)
    assert answer == {"a": "1"}


async def test_other_processes_do_not_see_a_volume(machine: Machine, ship: Ship) -> None:
    ref = await ship({"a": b"1"}, POINT)
    marker = machine.folder / "marker"
    process = machine.start(
        f"""
        import time
        Path({str(marker)!r}).touch()
        deadline = time.monotonic() + 20
        while Path({str(marker)!r}).exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        answer["still"] = Path("{POINT}/a").read_text()
        """,
        ref,
    )
    while not marker.exists() and process.poll() is None:
        os.sched_yield()
    assert not os.path.lexists(POINT)
    with open("/proc/self/mountinfo") as mounts:
        assert POINT not in mounts.read()
    marker.unlink()
    assert process.communicate(timeout=60)[0] == '{"still": "1"}\n'


async def test_the_rest_of_the_system_still_works(machine: Machine, ship: Ship) -> None:
    ref = await ship({"a": b"1"}, POINT)
    links = {
        name: os.readlink(f"/{name}") for name in os.listdir("/") if os.path.islink(f"/{name}")
    }
    answer = machine.run(
        f"""
        answer["links"] = {{n: os.readlink("/" + n) for n in {sorted(links)!r}}}
        answer["proc"] = Path("/proc/self/comm").exists() and os.path.isdir("/sys/kernel")
        answer["null"] = open("/dev/null", "wb").write(b"x")
        answer["output"] = subprocess.run(
            ["/bin/sh", "-c", "cat {POINT}/a; pwd"], capture_output=True, text=True, check=True
        ).stdout
        answer["cwd"] = os.getcwd()
        answer["temporary"] = Path(tempfile.mkdtemp()).is_dir()
        outside = Path({str(machine.folder)!r}, "result")
        outside.write_text("durable")
        try:
            Path("/kinetic-lost").touch()
        except OSError as error:
            answer["refused"] = errno.errorcode[error.errno] in ("EROFS", "EACCES")
        """,
        ref,
    )
    workspace = str(machine.folder / "work-1" / "workspace")
    assert answer == {
        "links": links,
        "proc": True,
        "null": 1,
        "output": f"1{workspace}\n",
        "cwd": workspace,
        "temporary": True,
        "refused": True,
    }
    assert (machine.folder / "result").read_text() == "durable"


async def test_a_volume_hides_existing_files_only_from_the_job(
    machine: Machine, ship: Ship
) -> None:
    point = machine.folder / "point"
    point.mkdir()
    (point / "real").write_text("real")
    ref = await ship({"a": b"1"}, str(point))
    answer = machine.run(
        f"""
        answer["names"] = os.listdir({str(point)!r})
        shutil.rmtree({str(point)!r}, ignore_errors=True)
        answer["after"] = os.listdir({str(point)!r})
        """,
        ref,
    )
    assert answer == {"names": ["a"], "after": []}
    assert os.listdir(point) == ["real"]


@pytest.mark.parametrize("sticky", [False, True])
async def test_a_volume_below_an_existing_directory(
    machine: Machine, ship: Ship, sticky: bool
) -> None:
    """Existing files stay writable. A new file is kept, or creating it is an error."""
    outer = machine.folder / "outer"
    (outer / "sub").mkdir(parents=True)
    (outer / "file").write_text("old")
    (outer / "link").symlink_to("file")
    outer.chmod(0o1777 if sticky else 0o755)
    refs = [await ship({"a": b"1"}, f"{outer}/x/y"), await ship({"b": b"2"}, f"{outer}/z")]
    answer = machine.run(
        f"""
        os.chdir({str(outer)!r})
        answer["names"] = sorted(os.listdir())
        answer["seen"] = [Path(n).read_text() for n in ("x/y/a", "z/b", "file", "link")]
        Path("file").write_text("new")
        Path("sub/made").write_text("new")
        try:
            Path("made").touch()
            answer["made"] = True
        except OSError as error:
            answer["made"] = errno.errorcode[error.errno]
        """,
        *refs,
    )
    assert answer == {
        "names": ["file", "link", "sub", "x", "z"],
        "seen": ["1", "2", "old", "old"],
        "made": True if sticky else "EROFS",
    }
    assert sorted(os.listdir(outer)) == ["file", "link", "sub"]
    assert (outer / "file").read_text() == (outer / "sub" / "made").read_text() == "new"


async def test_volumes_inside_volumes(machine: Machine, ship: Ship) -> None:
    refs = [
        await ship({"deep": b"4"}, f"{POINT}/made/for/it"),
        await ship({"in": b"2"}, f"{POINT}/sub"),
        await ship({"sub/hidden": b"0", "a": b"1"}, POINT),
        await ship({"in": b"3"}, f"{POINT}/sub/sub"),
        await ship({"side": b"5"}, f"{POINT}-2/x"),
    ]
    answer = machine.run(
        f"""
        for name in ("a", "sub/in", "sub/sub/in", "made/for/it/deep"):
            answer[name] = Path("{POINT}", name).read_text()
        answer["side"] = Path("{POINT}-2/x/side").read_text()
        answer["hidden"] = os.path.exists("{POINT}/sub/hidden")
        """,
        *refs,
    )
    assert answer == {
        "a": "1",
        "sub/in": "2",
        "sub/sub/in": "3",
        "made/for/it/deep": "4",
        "side": "5",
        "hidden": False,
    }


async def test_a_volume_inside_a_read_only_volume(machine: Machine, ship: Ship) -> None:
    refs = [
        await ship({"a": b"1", "d/b": b"2"}, POINT, fuse=True),
        await ship({"c": b"3"}, f"{POINT}/d/made"),
    ]
    answer = machine.run(
        f"""
        answer["seen"] = [Path("{POINT}", n).read_text() for n in ("a", "d/b", "d/made/c")]
        Path("{POINT}/d/made/new").touch()
        try:
            Path("{POINT}/a").write_text("x")
        except OSError as error:
            answer["error"] = errno.errorcode[error.errno]
        """,
        *refs,
    )
    assert answer == {"seen": ["1", "2", "3"], "error": "EROFS"}


async def test_a_file_as_a_volume(machine: Machine, ship: Ship) -> None:
    """The file is in the mounted directory, or at the path itself if that ends with its name."""
    tree = {"config.json": b"{}"}
    refs = [
        await ship(tree, POINT, file="config.json"),
        await ship(tree, f"{POINT}-2/config.json", file="config.json"),
    ]
    answer = machine.run(
        """
        answer["paths"] = paths
        answer["seen"] = [Path(path).read_text() for path in paths]
        Path(paths[1]).write_text("changed")
        """,
        *refs,
    )
    assert answer == {
        "paths": [f"{POINT}/config.json", f"{POINT}-2/config.json"],
        "seen": ["{}", "{}"],
    }


async def test_data_paths_of_volumes_and_arguments(machine: Machine, ship: Ship) -> None:
    refs = [await ship({"a": b"1"}, f"{POINT}/"), await ship({"b": b"2"})]
    answer = machine.run("answer['paths'] = paths", *refs)
    assert answer == {"paths": [POINT, str(machine.folder / "work-1" / "data" / "1")]}


async def test_large_volumes_do_not_reach_the_cache(machine: Machine, ship: Ship) -> None:
    ref = await ship({f"{i}": b"x" for i in range(250)}, POINT)
    body = f"""
    answer["found"] = len(os.listdir("{POINT}"))
    answer["one"] = Path("{POINT}/1").read_text()
    Path("{POINT}/1").write_text("changed")
    os.remove("{POINT}/2")
    answer["overlay"] = " overlay " in open("/proc/self/mountinfo").read()
    """
    for _ in range(2):
        answer = machine.run(body, ref)
        assert answer.pop("overlay") or not answer
        assert answer == {"found": 250, "one": "x"}
    # The job's user can remove the files that the layers leave behind.
    script = f"shutil.rmtree({str(machine.folder / 'work-1')!r}); answer['removed'] = True"
    assert machine.run(script) == {"removed": True}


async def test_mount_paths_that_are_refused(machine: Machine, ship: Ship) -> None:
    stdlib = os.path.dirname(os.__file__)
    mounts = ["/", "//", "/proc/x", "/sys", "/dev/kinetic", "relative", "/usr/..", stdlib]
    mounts += [
        str(machine.folder),
        str(machine.store),
        f"{machine.cache}/new",
        f"{machine.store}/jobs/x",
    ]
    ref = await ship({"a": b"1"})
    answer = machine.run(
        f"""
        import dataclasses
        for number, mount in enumerate({mounts!r}):
            own_place = dataclasses.replace(place, work=place.work / str(number))
            own_place.work.mkdir()
            try:
                views.prepare([dataclasses.replace(refs[0], mount=mount)], objects, own_place)
            except Exception as error:
                answer[mount] = f"{{type(error).__name__}}: {{error}}"
        """,
        ref,
    )
    assert list(answer) == mounts
    for mount, error in answer.items():
        assert error.startswith("RuntimeError: a volume ")
        assert os.path.normpath(mount) in error


async def test_two_volumes_at_one_path_are_refused(machine: Machine, ship: Ship) -> None:
    refs = [await ship({"a": b"1"}, POINT), await ship({"a": b"2"}, f"{POINT}/.")]
    assert "have the same path" in machine.run("", *refs)["error"]
    link = machine.folder / "link"
    link.symlink_to(POINT)
    refs = [await ship({"a": b"1"}, POINT), await ship({"a": b"2"}, str(link))]
    assert "have the same path" in machine.run("", *refs)["error"]


async def test_a_volume_at_or_below_a_file_is_an_error(machine: Machine, ship: Ship) -> None:
    file = machine.folder / "file"
    file.write_text("x")
    answer = machine.run("", await ship({"a": b"1"}, f"{file}/below"))
    assert answer["error"].startswith("NotADirectoryError")
    answer = machine.run("", await ship({"a": b"1"}, str(file)))
    assert "is a directory, but that path is a file" in answer["error"]


async def test_without_mounts_the_error_names_an_alternative(machine: Machine, ship: Ship) -> None:
    ref = await ship({"a": b"1"}, POINT)
    answer = machine.run("", ref, mounts=False)
    assert answer["error"].startswith("RuntimeError: volumes need a private mount namespace")
    assert "pass the Data as an argument instead" in answer["error"]


async def test_a_process_with_threads_is_refused(machine: Machine, ship: Ship) -> None:
    ref = await ship({"a": b"1"}, POINT)
    before = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    answer = machine.run("", ref, before=before)
    assert "a process with threads cannot get a mount namespace" in answer["error"]


async def test_a_volume_in_a_root_that_cannot_be_pivoted(machine: Machine, ship: Ship) -> None:
    """The root is a chroot into a plain directory, like in some sandboxes."""
    if namespace.available() != "root" or machine.uid is not None:
        pytest.skip("only root can call chroot")
    chroot = machine.folder / "chroot"
    chroot.mkdir()
    ref = await ship({"a": b"1"}, POINT)
    answer = machine.run(
        f"""
        answer["seen"] = Path("{POINT}/a").read_text()
        answer["names"] = "proc" in os.listdir("/")
        answer["output"] = subprocess.run(
            ["cat", "{POINT}/a"], capture_output=True, text=True, check=True
        ).stdout
        """,
        ref,
        before=f"""
        namespace.enter()
        with os.scandir("/") as entries:
            for entry in entries:
                namespace._mirror_entry(entry, f"{chroot}/{{entry.name}}")
        os.chroot({str(chroot)!r})
        os.chdir("/")
        """,
    )
    assert answer == {"seen": "1", "names": True, "output": "1"}
    assert os.listdir(chroot) != []


def test_the_job_still_dies_with_its_parent_and_can_be_read(machine: Machine) -> None:
    """A user namespace changes credentials; the death signal and /proc must survive that."""
    script = f"""
    import ctypes, os, signal, sys, time
    sys.path.insert(0, {str(ROOT)!r})
    from kinetic._runner.job import namespace
    from kinetic._runner.job import processes
    uid = {machine.uid!r}
    if uid is not None:
        os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        processes.die_with(parent)
        namespace.enter()
        os.write(writing, b"x")
        signal.pause()
    os.read(reading, 1)
    environment = open(f"/proc/{{child}}/environ", "rb").read()
    os.kill(child, 0)
    print(child, len(environment) > 0, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    output, _ = process.communicate(timeout=60)  # until parent and child have closed the pipe
    assert process.returncode == -signal.SIGKILL
    child, readable = output.split()
    assert readable == "True"
    deadline = time.monotonic() + 60
    while alive(int(child)):
        assert time.monotonic() < deadline


def test_available_is_cached(machine: Machine) -> None:
    body = """
    answer["first"] = namespace.available()
    answer["again"] = namespace.available()
    answer["forks"] = namespace.available.cache_info().misses
    answer["entered"] = namespace.entered()
    """
    answer = machine.run(body)
    assert answer["first"] == answer["again"] != ""
    assert (answer["forks"], answer["entered"]) == (1, "")
