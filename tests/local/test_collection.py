"""Shared files are removed when unused for long, and never while a job needs them."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

import kinetic
from kinetic import aio
from kinetic._collector import (
    DAY_S,
    LIMITED_KEPT_S,
    NOTHING,
    STORE_KEPT_S,
    Directory,
    Limits,
    Unit,
    choose_units,
    collect,
    sizes,
)
from kinetic._runner.job import workspace
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic.aio import _shared_objects
from kinetic.aio._shared_objects import RENEW_AFTER_S
from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.local.store import DirectoryStore
from kinetic.aio.ports import Image
from kinetic.collection import Collection
from kinetic.errors import BackendError
from tests.jobs import eventually
from tests.scripts import Program

from .conftest import end_supervisor, hear_job, spec

LONG_S = 100 * DAY_S


def unit(name: str, days: float, size: int = 1) -> Unit:
    return Unit("store/code", name, 1, size, -days * DAY_S)


def names(units: list[Unit]) -> list[str]:
    return [unit.name for unit in units]


def age(folder: Path, seconds: float = LONG_S) -> None:
    """Set the last use of everything in *folder* to *seconds* ago."""
    then = time.time() - seconds
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (then, then), follow_symlinks=False)


def files(folder: Path) -> set[str]:
    found = {os.path.join(at, name) for at, _, names in os.walk(folder) for name in names}
    return {os.path.relpath(path, folder) for path in found if "/.tmp/" not in path}


def test_a_full_disk_keeps_only_what_needs_space_for_its_removal(tmp_path: Path) -> None:
    def fail(names: Iterable[str]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = Directory(tmp_path / "store")
    for name in ("code/unused.zip", "batches/grp-1/late"):
        store.objects.create(name, b"x")
    age(tmp_path)
    store.delete = fail  # the log of a batch grows by a deletion
    assert {*collect(tmp_path, NOTHING, store).freed} == {"store/code"}


# --- choosing what to remove ---


def test_old_files_are_removed_unless_needed() -> None:
    units = [unit("old", 31), unit("needed", 40), unit("new", 29)]
    assert names(choose_units(units, {"needed"}, Limits(), 0.0)) == ["old"]


def test_a_size_limit_removes_only_the_least_recently_used() -> None:
    units = [unit("b", 20, 4), unit("a", 21, 4), unit("needed", 22, 4), unit("c", 19, 4)]
    removed = choose_units(units, {"needed"}, Limits(size=8), 0.0)
    assert names(removed) == ["a", "b"]


def test_recently_used_files_stay_despite_the_size_limit() -> None:
    assert STORE_KEPT_S >= 2 * RENEW_AFTER_S
    units = [unit("a", 0.9, 100), unit("b", 1.1, 100)]
    limits = Limits(age_s=0, size=0, kept_s=STORE_KEPT_S)
    assert names(choose_units(units, (), limits, 0.0)) == ["b"]


def test_limits_come_from_the_environment() -> None:
    environ = {"KINETIC_CACHE_AGE_S": "7", "KINETIC_CACHE_SIZE_MB": "1.5"}
    assert Limits.of(environ) == Limits(age_s=7.0, size=1_500_000.0)
    assert Limits.of({}) == Limits(age_s=30 * DAY_S, size=20e9)


# --- jobs ---


def value(data: object = None) -> int:
    return 5


def wait_for(gate: str) -> int:
    import time
    from pathlib import Path

    print("waiting", flush=True)
    while not Path(gate).exists():
        time.sleep(0.01)
    return 5


async def test_what_nobody_needs_goes_and_is_made_anew_for_the_next_job(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "words").write_text("words")
    data = kinetic.Data(str(tmp_path / "words"))
    async with aio.Client(backend="local") as client:
        assert await client.run(value, data) == 5
        assert await client.collect() == Collection({}), "everything was just used"
        age(home / "store")
        age(home / "cache")
        collected = await client.collect()
        assert {*collected.freed} == {"store/code", "store/functions", "store/data", "cache/code"}
        assert collected.freed["store/data"].files == 2 and collected.freed["cache/code"].files > 10
        assert collected.files > 10 and collected.size > 10_000
        assert files(home / "store") == files(home / "cache" / "code") == set()
        assert await client.collect() == Collection({})
        assert await client.run(value, kinetic.Data(str(tmp_path / "words"))) == 5


def test_a_tree_that_a_process_has_is_not_discarded(tmp_path: Path) -> None:
    tree = str(tmp_path / "tree")
    script = (
        "import sys\n"
        "from kinetic._runner.job import workspace as trees\n"
        "trees.shared_tree(sys.argv[1], lambda part: trees.Weight(0, 0))\n"
        "print('has it', flush=True); sys.stdin.read()\n"
    )
    with Program("-c", script, tree) as process:
        process.expect("has it")
        age(tmp_path / "tree")
        assert not workspace.discard_tree(tree, time.time())
    assert not workspace.discard_tree(tree, time.time() - LONG_S - DAY_S), "a process used it since"
    assert workspace.discard_tree(tree, time.time()) and not os.path.exists(tree)
    assert workspace.shared_tree(
        tree, lambda part: workspace.Weight(0, 0)
    ).weight == workspace.Weight(0, 0)


def test_a_tree_whose_builder_was_killed_goes(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "data" / "ab"
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "file").write_bytes(bytes(1000))
    builder = os.open(folder, os.O_RDONLY)
    fcntl.flock(builder, fcntl.LOCK_EX)
    assert collect(tmp_path, NOTHING, Directory(tmp_path / "store")).freed == {}
    os.close(builder)
    freed = collect(tmp_path, Limits(), Directory(tmp_path / "store")).freed
    assert freed["cache/data"].size == 1000 and not folder.exists()


async def test_an_environment_goes_a_day_after_its_last_use(
    cluster: LocalCluster, home: Path, tmp_path: Path
) -> None:
    used, half, fresh = (home / "cache" / "environments" / name for name in "abc")
    for folder in (used, half, fresh):
        folder.mkdir(parents=True)
        (folder / "kinetic-ready").touch()
    age(home / "cache")
    (half / "kinetic-ready").unlink()
    os.utime(fresh / "kinetic-ready")
    (used / "venv").symlink_to(sys.prefix)
    store = Directory(tmp_path / "store")
    creator = os.open(half, os.O_RDONLY)
    fcntl.flock(creator, fcntl.LOCK_EX)
    image = Image(uri="", command=(str(used / "venv" / "bin" / "python"),))
    source = "import time; print('runs', flush=True); time.sleep(60)"
    await hear_job(cluster, spec("user", source, image=image))
    assert collect(home, NOTHING, store).freed == {}, "one is used, one is made, one was used"
    os.close(creator)
    end_supervisor(home)
    assert collect(home, NOTHING, store).freed["cache/environments"].files == 1
    assert [*fresh.parent.iterdir()] == [fresh]


def test_a_tree_that_is_renewed_during_a_collection_stays_whole(tmp_path: Path) -> None:
    objects = DirectoryObjects(tmp_path)
    both = ["data/ab/manifest", "data/ab/files/x"]
    for name in both:
        objects.create(name, b"x")
    age(tmp_path)
    listed = {info.name: info.used for info in objects.look_up(both)}
    objects.renew(both[1:])
    assert not objects.collect(listed), "one of the two was used"
    assert objects.renew(both) == set()
    assert objects.collect({info.name: info.used for info in objects.look_up(both)})
    assert objects.renew(both) == {*both}


async def test_what_a_killed_process_was_writing_is_swept_after_a_day(home: Path) -> None:
    async with aio.Client(backend="local") as client:
        assert await client.run(value) == 5
        parts = home / "store" / ".tmp"
        for name in ("old", "new"):
            (parts / name).write_bytes(b"half")
        os.utime(parts / "old", (time.time() - 1.1 * DAY_S,) * 2)
        await client.collect()
        left = {path.name for path in parts.iterdir() if not path.name.endswith(".lock")}
        assert left == {"new"}, "a process may be writing it now"


@pytest.mark.full
async def test_the_supervisor_collects_by_itself(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aio.Client(backend="local") as client:
        assert await client.run(value) == 5
    functions = home / "store" / "functions"
    assert files(functions) != set()
    age(home / "store")
    age(home / "cache")
    end_supervisor(home)
    monkeypatch.setenv("KINETIC_LOCAL_IDLE_S", "0")
    async with aio.Client(backend="local") as client:
        await client.list_jobs()
    await eventually(lambda: files(functions) == set() and not files(home / "cache" / "code"))


def test_a_pass_over_nothing_makes_nothing(tmp_path: Path) -> None:
    store = Directory(tmp_path / "store")
    assert collect(tmp_path / "home", Limits(), store) == Collection({})
    assert [*tmp_path.iterdir()] == []


def test_a_store_in_a_directory_keeps_its_size_limit(tmp_path: Path) -> None:
    store = Directory(tmp_path / "store")
    for number in range(6):
        store.objects.create(f"code/{number}.zip", bytes(1000))
    store.objects.create("batches/grp/manifest", b'{"name": "code/0.zip"}')
    age(tmp_path / "store", LIMITED_KEPT_S + 1)
    store.objects.create("code/new.zip", bytes(1000))
    limits = Limits(size=3000)
    assert collect(tmp_path, limits, store, unused_s=DAY_S).freed["store/code"].files == 4
    left = {Path(name).name for name in files(tmp_path / "store" / "code")}
    assert {"0.zip", "new.zip"} < left and len(left) == 3
    assert sizes(tmp_path, {})["store/code"].files == 3
    assert collect(tmp_path, NOTHING, store).freed["store/code"].files == 2
    assert {Path(name).name for name in files(tmp_path / "store" / "code")} == {"0.zip"}


async def test_everything_goes_that_no_live_job_uses(home: Path, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("words")
    gate = tmp_path / "gate"
    async with aio.Client(backend="local") as client:
        assert await client.run(value, kinetic.Data(str(tmp_path / "words"))) == 5
        waiting = await client.submit(wait_for, str(gate))
        async for line in waiting.logs(follow=True):
            assert line == "waiting"
            break
        freed = (await client.collect(everything=True)).freed
        assert {*freed} - {"cache/code"} == {"store/functions", "store/data"}
        gate.touch()
        assert await waiting == 5
    async with aio.Client(backend="local") as client:
        freed = (await client.collect(everything=True)).freed
        assert {*freed} - {"cache/code"} == {"store/functions", "store/code", "cache/pack"}
        assert await client.run(value) == 5, "what is needed again is made again"


async def test_a_submission_notices_that_its_code_was_collected(tmp_path: Path) -> None:
    """A collection may have looked for manifests before a submission stored its own."""
    store = DirectoryStore(tmp_path)
    await _shared_objects.ensure(store, "code/1.zip", b"code")
    age(tmp_path)
    await _shared_objects.hold(store, ["code/1.zip"])
    assert (await store.list("code/"))[0].used > time.time() - 60
    await store.delete(["code/1.zip"])
    with pytest.raises(BackendError, match=r"code/1.zip .* submit again"):
        await _shared_objects.hold(store, ["code/1.zip"])
