"""Functions, values, errors, output and environments travel to jobs and back."""

from __future__ import annotations

import asyncio
import collections
import functools
import os
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kinetic
from kinetic import errors
from kinetic.job_status import JobStatus

from .crew import behaviour
from .harness import Harness


class Model:
    def __init__(self, scale: int) -> None:
        self.scale = scale

    def predict(self, value: int) -> int:
        return self.scale * value


class Adder:
    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, value: int) -> int:
        return value + self.by


async def double(value: int, *, times: int = 1) -> int:
    await asyncio.sleep(0)
    return 2 * value * times


@behaviour
async def test_whatever_can_be_called_is_called_there(harness: Harness) -> None:
    """Closures, lambdas, methods, partials, objects, builtins, coroutine functions."""
    offset = 10
    calls = [
        harness.run(lambda value: value + offset, 5),
        harness.run(functools.partial(Model(3).predict, value=4)),
        harness.run(Adder(3), 4),
        harness.run(os.path.basename, "a/b"),
        harness.run(double, 10, times=2),
    ]
    assert await asyncio.gather(*calls) == [15, 12, 7, "b", 40]


class Point(NamedTuple):
    x: int
    y: Any


class Custom(Exception):
    """An exception from this module, which stands for the user's project."""


@behaviour
async def test_values_are_what_they_were(harness: Harness) -> None:
    """Classes of the project, containers, and containers that hold themselves."""
    mapping = collections.defaultdict(list, {"a": [1]})
    cycle: list[Any] = [1]
    cycle.append(cycle)
    knot: tuple[Any, ...] = ([],)
    knot[0].append(knot)

    def look(point: Point, mapping: Any, counts: Any, cycle: Any, knot: Any) -> Any:
        assert type(point).__name__ == "Point" and counts["missing"] == 0
        assert cycle[1] is cycle and knot[0][0] is knot
        mapping["new"].append(point.x)
        return Point(type(mapping).__name__, mapping["new"]), counts, {3: {"x"}}, None, cycle, knot

    point, counts, nested, nothing, again, tied = await harness.run(
        look, Point(1, 2), mapping, cycle=cycle, knot=knot, counts=collections.Counter("aab")
    )
    assert type(point) is Point and point == ("defaultdict", [1])
    assert type(counts) is collections.Counter and counts == collections.Counter("aab")
    assert (nested, nothing) == ({3: {"x"}}, None)
    assert again[1] is again and tied[0][0] is tied


@behaviour
async def test_large_values_and_arguments_travel(harness: Harness) -> None:
    def reverse(value: bytes) -> bytes:
        return value[::-1]

    value = os.urandom(1 << 23)
    assert await harness.run(reverse, value) == value[::-1]


@behaviour
async def test_the_users_exception_comes_back_as_itself(harness: Harness) -> None:
    def fail(error: type[Exception]) -> None:
        print("about to fail")
        raise error("which")

    job, other = await asyncio.gather(harness.submit(fail, KeyError), harness.submit(fail, Custom))
    with pytest.raises(KeyError, match="which") as caught:
        await job.result(cleanup=True)
    [note] = caught.value.__notes__
    assert "Remote traceback" in note and "in fail" in note
    assert await job.status() is JobStatus.FAILED
    assert "user error" in await job.reason()
    assert job in await harness.client.list_jobs(), "a failed job is kept"
    assert "about to fail" in [line async for line in job.logs()]
    assert await harness.objects(job.job_id)
    with pytest.raises(Custom):
        await other


@behaviour
async def test_what_cannot_be_rebuilt_or_pickled_is_described_as_text(harness: Harness) -> None:
    def raise_it() -> None:
        raise type("Picky", (Exception,), {"lock": threading.Lock()})("no way")

    def lock() -> Any:
        return {"lock": threading.Lock()}

    def leave(code: int) -> None:
        sys.exit(code)

    picky, result, zero, nonzero = await asyncio.gather(
        harness.submit(raise_it),
        harness.submit(lock),
        harness.submit(leave, 0),
        harness.submit(leave, 3),
    )
    with pytest.raises(errors.JobFailed, match=r"Picky: no way\n.*cannot pickle") as caught:
        await picky
    assert caught.value.remote_type.endswith("Picky")
    assert "in raise_it" in caught.value.remote_traceback
    assert any("in raise_it" in note for note in caught.value.__notes__)
    with pytest.raises(errors.JobFailed, match=r"cannot be pickled.*lock"):
        await result
    assert await zero is None
    with pytest.raises(errors.JobError, match="SystemExit: 3"):
        await nonzero


@behaviour
async def test_output_is_kept_line_by_line(harness: Harness) -> None:
    def talk() -> None:
        print("[/INST] not markup")
        print("to stderr", file=sys.stderr)
        for number in range(20):
            print("line", number)

    job = await harness.submit(talk)
    lines = [line async for line in job.logs(follow=True)]
    await job.result(cleanup=False)
    assert lines[0] == "[/INST] not markup" and lines[-1] == "line 19"
    assert "to stderr" in lines
    assert (await job.tail(5)).splitlines() == [f"line {n}" for n in range(15, 20)]
    assert [line async for line in job.logs()] == lines


@behaviour
async def test_the_environment_is_what_was_captured(harness: Harness) -> None:
    """The store never contains the captured values."""

    def environment() -> dict[str, str]:
        return dict(os.environ)

    job = await harness.submit(harness.on(environment, capture_env_vars=["SWEEP_*"]))
    seen = await job.result(cleanup=False)
    assert (
        seen["SWEEP_RATE"] == "$(HOME) 'and' more"
        and seen["SWEEP_SECRET_TOKEN"] == "squeamish-ossifrage"
    )
    assert "NOT_ASKED_FOR" not in seen
    assert seen["KINETIC_INDEX"] == "0" and seen["KINETIC_ATTEMPT"] == "1"
    assert seen["KINETIC_JOB_ID"] == job.job_id
    assert {"PATH", "HOME"} <= seen.keys()
    names = [name for name in await harness.objects(job.job_id) if not name.endswith(".outcome")]
    assert len(names) >= 3
    for name in names:
        found = await harness.ports.store.get(name)
        assert b"squeamish" not in found.body and "squeamish" not in str(found.metadata)


@behaviour
async def test_two_jobs_writing_the_same_path_do_not_meet(harness: Harness) -> None:
    def write(text: str) -> str:
        Path("same.txt").write_text(text)
        return Path("same.txt").read_text()

    values = await asyncio.gather(*(harness.run(write, str(number)) for number in range(2)))
    assert values == ["0", "1"]
    assert not Path("same.txt").exists()


@behaviour
async def test_data_of_every_form_arrives(harness: Harness) -> None:
    """The same content is uploaded once; what a job writes into its copy stays there."""
    folder, single = harness.folder / "folder", harness.folder / "one.txt"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "x.txt").write_text("x")
    single.write_text("one")

    def read(tree: str, file: str, nested: Any, again: str) -> list[Any]:
        found = [Path(tree, "deep", "x.txt"), Path(file), Path(nested["a"][0]), Path(nested["b"])]
        texts = [path.read_text() for path in found]
        for path in found:
            path.write_text("mine")
        Path(tree, "deep", "new").touch()
        assert type(nested["c"]).__name__ == "Point" and nested["c"].y["d"] == [file]
        return [*texts, nested["b"] == file, sorted(os.listdir(Path(again, "deep")))]

    async def call() -> list[Any]:
        file = kinetic.Data(str(single))
        mapping = collections.defaultdict(list, {"d": [file]})
        nested = {"a": [kinetic.Data(str(single))], "b": file, "c": Point(1, mapping)}
        mounted = harness.name == "local"  # a cluster would need its own driver for mounts
        folders = [kinetic.Data(str(folder)), kinetic.Data(str(folder), fuse=mounted)]
        value: list[Any] = await harness.run(read, folders[0], file, nested, folders[1])
        return value

    with harness.messages() as messages:
        assert await call() == ["x", "one", "one", "one", True, ["x.txt"]]
        assert len([line for line in messages if line.startswith("Uploading data")]) == 2
        messages.clear()
        single.write_text("two")
        assert await call() == ["x", "two", "two", "two", True, ["x.txt"]]
        assert len([line for line in messages if line.startswith("Uploading data")]) == 1
        assert any("Data cache hit" in line and str(folder) in line for line in messages)


@behaviour
async def test_volumes_are_where_they_were_asked_for(harness: Harness) -> None:
    from kinetic._runner.job import namespace

    if harness.name == "local" and not namespace.available():
        pytest.skip("this system has no private mounts")
    mounts = {name: str(harness.folder / "mounted" / name) for name in ("a", "b")}
    for name in mounts:
        (harness.folder / name).mkdir()
        (harness.folder / name / "f").write_text(name)

    def read(mounts: dict[str, str], argument: str) -> list[str]:
        Path(mounts["a"], "new").write_text("mine")
        return [Path(folder, "f").read_text() for folder in (*mounts.values(), argument)]

    volumes = {path: kinetic.Data(str(harness.folder / name)) for name, path in mounts.items()}
    function = harness.on(read, volumes=volumes)
    data = kinetic.Data(str(harness.folder / "b"))
    assert await harness.run(function, mounts, data) == ["a", "b", "b"]
    assert [path.name for path in (harness.folder / "a").iterdir()] == ["f"]
    if harness.name == "local":
        assert not Path(mounts["a"]).exists(), "only the job sees the mount"


def write_outputs() -> str:
    """Write through the local path; return the location, which may be a URL."""
    out = Path(os.environ["KINETIC_OUTPUT_PATH"])
    (out / "deep").mkdir()
    (out / "deep" / "model.bin").write_bytes(b"weights")
    return os.environ["KINETIC_OUTPUT_DIR"]


@behaviour
async def test_outputs_are_found_again(harness: Harness) -> None:
    """Both in a given output folder and in the default one."""
    folder = str(harness.folder / "out")
    jobs = [
        await harness.submit(write_outputs),
        await harness.submit(harness.on(write_outputs, output_dir=folder)),
    ]
    for job in jobs:
        assert await job == job.output_dir
        assert await job.outputs() == ["deep/model.bin"]
    assert jobs[1].output_dir == folder
