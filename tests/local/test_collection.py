"""What many jobs share goes when nobody has used it for long, and never from under anybody."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kinetic
from kinetic import aio
from kinetic._collector import (
    CACHE_KEPT_S,
    STORE_KEPT_S,
    Directory,
    Limits,
    Unit,
    choose_units,
    collect,
)
from kinetic._runner.job import workspace
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic.aio._shared_objects import DAY_S, RENEWED_S
from kinetic.collection import Collection

from .conftest import end_supervisor, eventually

LONG_S = 100 * DAY_S


def unit(name: str, days: float, size: int = 1) -> Unit:
    return Unit("store/code", name, 1, size, -days * DAY_S)


def names(units: list[Unit]) -> list[str]:
    return [one.name for one in units]


def age(folder: Path, seconds: float = LONG_S) -> None:
    """Everything in *folder* was used so long ago."""
    then = time.time() - seconds
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (then, then), follow_symlinks=False)


def files(folder: Path) -> set[str]:
    found = {os.path.join(at, name) for at, _, names in os.walk(folder) for name in names}
    return {os.path.relpath(one, folder) for one in found if "/.tmp/" not in one}


# --- what is chosen ---


def test_what_is_too_old_goes_unless_it_is_needed() -> None:
    units = [unit("old", 31), unit("needed", 40), unit("new", 29)]
    assert names(choose_units(units, {"needed"}, Limits(), STORE_KEPT_S, 0.0)) == ["old"]


def test_of_what_is_too_large_the_least_recently_used_goes_and_no_more_than_it_takes() -> None:
    units = [unit("b", 20, 4), unit("a", 21, 4), unit("needed", 22, 4), unit("c", 19, 4)]
    going = choose_units(units, {"needed"}, Limits(size=8), STORE_KEPT_S, 0.0)
    assert names(going) == ["a", "b"]


def test_what_a_submission_under_way_may_count_on_stays_however_large_it_is() -> None:
    assert STORE_KEPT_S >= 2 * RENEWED_S
    units = [unit("a", 0.9, 100), unit("b", 1.1, 100)]
    assert names(choose_units(units, (), Limits(age_s=0, size=0), STORE_KEPT_S, 0.0)) == ["b"]


def test_limits_come_from_the_environment() -> None:
    environ = {"KINETIC_CACHE_AGE_S": "7", "KINETIC_CACHE_SIZE_MB": "1.5"}
    assert Limits.of(environ) == Limits(age_s=7.0, size=1_500_000.0)
    assert Limits.of({}) == Limits(age_s=30 * DAY_S, size=20e9)


# --- jobs ---


def value(data: object = None) -> int:
    return 5


async def test_what_nobody_needs_goes_and_is_made_anew_for_the_next_job(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "words").write_text("words")
    data = kinetic.Data(str(tmp_path / "words"))
    async with aio.Client(backend="local") as client:
        assert await client.run(value, data) == 5
        assert await client.collect() == Collection({}), "all of it was just used"
        age(home / "store")
        age(home / "cache")
        done = await client.collect()
        assert {*done.freed} == {"store/code", "store/functions", "store/data", "cache/code"}
        assert done.freed["store/data"].files == 2 and done.freed["cache/code"].files > 10
        assert done.files > 10 and done.size > 10_000
        assert files(home / "store") == files(home / "cache" / "code") == set()
        assert await client.collect() == Collection({})
        assert await client.run(value, kinetic.Data(str(tmp_path / "words"))) == 5


def test_a_tree_that_a_process_has_is_not_discarded(tmp_path: Path) -> None:
    place = str(tmp_path / "place")
    script = (
        "import sys\n"
        "from kinetic._runner.job import workspace as trees\n"
        "trees.shared_tree(sys.argv[1], lambda part: trees.Weight(0, 0))\n"
        "print('has it', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"has it\n"
        age(tmp_path / "place")
        assert not workspace.discard_tree(place, time.time())
        process.stdin.close()
    assert not workspace.discard_tree(place, time.time() - LONG_S - DAY_S), "it was used since"
    assert workspace.discard_tree(place, time.time()) and not os.path.exists(place)
    assert workspace.shared_tree(
        place, lambda part: workspace.Weight(0, 0)
    ).weight == workspace.Weight(0, 0)


def test_what_is_renewed_while_it_is_collected_is_seen_whole_or_not_at_all(tmp_path: Path) -> None:
    objects = DirectoryObjects(tmp_path)
    both = ["data/ab/manifest", "data/ab/files/x"]
    for name in both:
        objects.create(name, b"x")
    age(tmp_path)
    listed = {one.name: one.used for one in objects.look_up(both)}
    objects.renew(both[1:])
    assert not objects.collect(listed), "one of them was used"
    assert objects.renew(both) == set()
    assert objects.collect({one.name: one.used for one in objects.look_up(both)})
    assert objects.renew(both) == {*both}


async def test_what_a_killed_process_was_writing_is_swept_after_a_day(home: Path) -> None:
    async with aio.Client(backend="local") as client:
        assert await client.run(value) == 5
        parts = home / "store" / ".tmp"
        for name in ("old", "new"):
            (parts / name).write_bytes(b"half")
        os.utime(parts / "old", (time.time() - 1.1 * DAY_S,) * 2)
        await client.collect()
        left = {one.name for one in parts.iterdir() if not one.name.endswith(".lock")}
        assert left == {"new"}, "somebody may be writing it now"


async def test_the_supervisor_collects_by_itself(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aio.Client(backend="local") as client:
        assert await client.run(value) == 5
    left = home / "store" / "functions"
    assert files(left) != set()
    age(home / "store")
    age(home / "cache")
    (home / "store/outputs/job-local-0123456789ab/deep").mkdir(parents=True)
    age(home / "store/outputs")
    end_supervisor(home)
    monkeypatch.setenv("KINETIC_LOCAL_IDLE_S", "0")
    async with aio.Client(backend="local") as client:
        await client.list_jobs()
    await eventually(lambda: files(left) == set() and not files(home / "cache" / "code"))
    await eventually(lambda: [*(home / "store/outputs").iterdir()] == [])


def test_a_pass_over_nothing_makes_nothing(tmp_path: Path) -> None:
    store = Directory(tmp_path / "store")
    assert collect(tmp_path / "home", Limits(), store, Limits()) == Collection({})
    assert [*tmp_path.iterdir()] == []
    assert CACHE_KEPT_S > 0
