"""What is called elsewhere, and what comes back: functions, values, errors, output, environment."""

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
from .place import Place


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
async def test_whatever_can_be_called_is_called_there(place: Place) -> None:
    """Closures, lambdas, methods, partials, objects, builtins, coroutine functions."""
    offset = 10
    calls = [
        place.run(lambda value: value + offset, 5),
        place.run(functools.partial(Model(3).predict, value=4)),
        place.run(Adder(3), 4),
        place.run(os.path.basename, "a/b"),
        place.run(double, 10, times=2),
    ]
    assert await asyncio.gather(*calls) == [15, 12, 7, "b", 40]


class Point(NamedTuple):
    x: int
    y: Any


class Custom(Exception):
    """Of this module, which is the user's project."""


class Coded(Exception):
    """Its ``args`` are not what its ``__init__`` takes."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.code = code


@behaviour
async def test_values_are_what_they_were(place: Place) -> None:
    """Classes of the project, containers, and containers that hold themselves."""
    words = collections.defaultdict(list, {"a": [1]})
    loop: list[Any] = [1]
    loop.append(loop)
    knot: tuple[Any, ...] = ([],)
    knot[0].append(knot)

    def look(point: Point, words: Any, counts: Any, loop: Any, knot: Any) -> Any:
        assert type(point).__name__ == "Point" and counts["missing"] == 0
        assert loop[1] is loop and knot[0][0] is knot
        words["new"].append(point.x)
        return Point(type(words).__name__, words["new"]), counts, {3: {"x"}}, None, loop, knot

    point, counts, nested, nothing, again, tied = await place.run(
        look, Point(1, 2), words, loop=loop, knot=knot, counts=collections.Counter("aab")
    )
    assert type(point) is Point and point == ("defaultdict", [1])
    assert type(counts) is collections.Counter and counts == collections.Counter("aab")
    assert (nested, nothing) == ({3: {"x"}}, None)
    assert again[1] is again and tied[0][0] is tied


@behaviour
async def test_large_values_and_arguments_travel(place: Place) -> None:
    def reverse(value: bytes) -> bytes:
        return value[::-1]

    value = os.urandom(1 << 23)
    assert await place.run(reverse, value) == value[::-1]


@behaviour
async def test_the_users_exception_comes_back_as_itself(place: Place) -> None:
    def fail(error: type[Exception]) -> None:
        print("about to fail")
        raise error("which")

    job, other = await asyncio.gather(place.submit(fail, KeyError), place.submit(fail, Custom))
    with pytest.raises(KeyError, match="which") as caught:
        await job.result(cleanup=True)
    [note] = caught.value.__notes__
    assert "Remote traceback" in note and "in fail" in note
    assert await job.status() is JobStatus.FAILED
    assert "user error" in await job.reason()
    assert job in await place.client.list_jobs(), "a failed job is kept"
    assert "about to fail" in [line async for line in job.logs()]
    assert await place.objects(job.job_id)
    with pytest.raises(Custom):
        await other


@behaviour
async def test_an_exception_keeps_its_type_whatever_its_class_takes(place: Place) -> None:
    def fail(code: int) -> None:
        raise Coded(code, where="there")

    def gather() -> None:
        raise ExceptionGroup("some", [Coded(2, where="there"), KeyError("k")]) from Coded(
            3, where="x"
        )

    single, group = await asyncio.gather(place.submit(fail, 1), place.submit(gather))
    with pytest.raises(Coded, match="1 at there") as caught:
        await single
    assert caught.value.code == 1
    with pytest.raises(ExceptionGroup) as grouped:
        await group
    first, second = grouped.value.exceptions
    assert (type(first), type(second)) == (Coded, KeyError)
    assert type(grouped.value.__cause__) is Coded
    batch = await place.map(fail, [4])
    [error] = await batch.results(return_exceptions=True)
    assert type(error) is Coded and error.code == 4


@behaviour
async def test_what_cannot_be_rebuilt_or_pickled_is_told_in_words(place: Place) -> None:
    def raise_it() -> None:
        raise type("Picky", (Exception,), {"lock": threading.Lock()})("no way")

    def lock() -> Any:
        return {"lock": threading.Lock()}

    def leave(code: int) -> None:
        sys.exit(code)

    picky, result, well, badly = await asyncio.gather(
        place.submit(raise_it),
        place.submit(lock),
        place.submit(leave, 0),
        place.submit(leave, 3),
    )
    with pytest.raises(errors.JobFailed, match=r"Picky: no way\n.*cannot pickle") as caught:
        await picky
    assert caught.value.remote_type.endswith("Picky")
    assert "in raise_it" in caught.value.remote_traceback
    assert any("in raise_it" in note for note in caught.value.__notes__)
    with pytest.raises(errors.JobFailed, match=r"cannot be pickled.*lock"):
        await result
    assert await well is None
    with pytest.raises(errors.JobError, match="SystemExit: 3"):
        await badly


@behaviour
async def test_output_is_kept_line_by_line(place: Place) -> None:
    def talk() -> None:
        print("[/INST] not markup")
        print("to stderr", file=sys.stderr)
        for number in range(20):
            print("line", number)

    job = await place.submit(talk)
    lines = [line async for line in job.logs(follow=True)]
    await job.result(cleanup=False)
    assert lines[0] == "[/INST] not markup" and lines[-1] == "line 19"
    assert "to stderr" in lines
    assert (await job.tail(5)).splitlines() == [f"line {n}" for n in range(15, 20)]
    assert [line async for line in job.logs()] == lines


@behaviour
async def test_the_environment_is_what_was_captured(place: Place) -> None:
    """And is written to the store in no form."""

    def environment() -> dict[str, str]:
        return dict(os.environ)

    job = await place.submit(place.on(environment, capture_env_vars=["SWEEP_*"]))
    seen = await job.result(cleanup=False)
    assert (
        seen["SWEEP_RATE"] == "$(HOME) 'and' more"
        and seen["SWEEP_SECRET_TOKEN"] == "squeamish-ossifrage"
    )
    assert "NOT_ASKED_FOR" not in seen
    assert seen["KINETIC_INDEX"] == "0" and seen["KINETIC_ATTEMPT"] == "1"
    assert seen["KINETIC_JOB_ID"] == job.job_id
    assert {"PATH", "HOME"} <= seen.keys()
    names = [name for name in await place.objects(job.job_id) if not name.endswith(".outcome")]
    assert len(names) >= 3
    for name in names:
        found = await place.ports.store.get(name)
        assert b"squeamish" not in found.body and "squeamish" not in str(found.metadata)


@behaviour
async def test_two_jobs_writing_the_same_path_do_not_meet(place: Place) -> None:
    def write(text: str) -> str:
        Path("same.txt").write_text(text)
        return Path("same.txt").read_text()

    values = await asyncio.gather(*(place.run(write, str(number)) for number in range(2)))
    assert values == ["0", "1"]
    assert not Path("same.txt").exists()


@behaviour
async def test_data_of_every_form_arrives(
    place: Place,
) -> None:
    """Uploaded once by its content; what a job writes into it stays its own."""
    folder, one = place.folder / "folder", place.folder / "one.txt"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "x.txt").write_text("x")
    one.write_text("one")

    def read(place: str, file: str, nested: Any, again: str) -> list[Any]:
        found = [Path(place, "deep", "x.txt"), Path(file), Path(nested["a"][0]), Path(nested["b"])]
        texts = [path.read_text() for path in found]
        for path in found:
            path.write_text("mine")
        Path(place, "deep", "new").touch()
        assert type(nested["c"]).__name__ == "Point" and nested["c"].y["d"] == [file]
        return [*texts, nested["b"] == file, sorted(os.listdir(Path(again, "deep")))]

    async def call() -> list[Any]:
        file = kinetic.Data(str(one))
        words = collections.defaultdict(list, {"d": [file]})
        nested = {"a": [kinetic.Data(str(one))], "b": file, "c": Point(1, words)}
        mounted = place.name == "local"  # on a cluster, by a driver of the cluster's own
        folders = [kinetic.Data(str(folder)), kinetic.Data(str(folder), fuse=mounted)]
        value: list[Any] = await place.run(read, folders[0], file, nested, folders[1])
        return value

    with place.told() as told:
        assert await call() == ["x", "one", "one", "one", True, ["x.txt"]]
        assert len([line for line in told if line.startswith("Uploading data")]) == 2
        told.clear()
        one.write_text("two")
        assert await call() == ["x", "two", "two", "two", True, ["x.txt"]]
        assert len([line for line in told if line.startswith("Uploading data")]) == 1
        assert any("Data cache hit" in line and str(folder) in line for line in told)


@behaviour
async def test_volumes_are_where_they_were_asked_for(place: Place) -> None:
    from kinetic._runner.job import namespace

    if place.name == "local" and not namespace.available():
        pytest.skip("this system has no private mounts")
    places = {name: str(place.folder / "mounted" / name) for name in ("a", "b")}
    for name in places:
        (place.folder / name).mkdir()
        (place.folder / name / "f").write_text(name)

    def read(places: dict[str, str], argument: str) -> list[str]:
        Path(places["a"], "new").write_text("mine")
        return [Path(place, "f").read_text() for place in (*places.values(), argument)]

    volumes = {path: kinetic.Data(str(place.folder / name)) for name, path in places.items()}
    function = place.on(read, volumes=volumes)
    data = kinetic.Data(str(place.folder / "b"))
    assert await place.run(function, places, data) == ["a", "b", "b"]
    assert [path.name for path in (place.folder / "a").iterdir()] == ["f"]
    if place.name == "local":
        assert not Path(places["a"]).exists(), "nobody else sees it"


def write_outputs() -> str:
    """By the path, wherever the place is."""
    out = Path(os.environ["KINETIC_OUTPUT_PATH"])
    (out / "deep").mkdir()
    (out / "deep" / "model.bin").write_bytes(b"weights")
    return os.environ["KINETIC_OUTPUT_DIR"]


@behaviour
async def test_outputs_are_found_again(place: Place) -> None:
    """In a folder that was named, and where they are kept else."""
    folder = str(place.folder / "out")
    jobs = [
        await place.submit(write_outputs),
        await place.submit(place.on(write_outputs, output_dir=folder)),
    ]
    for job in jobs:
        assert await job == job.output_dir
        assert await job.outputs() == ["deep/model.bin"]
    assert jobs[1].output_dir == folder
