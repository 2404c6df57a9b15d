"""The supervisor runs the workers of a submission, replaces them, and needs no client."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pickle
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kinetic._runner.protocol import frames, signing, wire
from kinetic._runner.protocol.workers import Crew, Terms, WorkerId
from kinetic.accelerators import parse
from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.ports import ItemOutput, JobSpec, Observation, Phase, Resources
from kinetic.errors import NotFound
from tests.jobs import DEADLINE_S, eventually, gone, job_spec
from tests.workers.process import KEY, SCOPE, Batch

from .conftest import supervisor_pid

NAME = "grp-000000000000-0"
LABELS = {"kinetic.dev/submission": "grp-000000000000", "test": "yes"}


@pytest.fixture
def runner() -> None:
    """Use the real runner."""


def spec(batch: Batch, name: str) -> JobSpec:
    group = name.rpartition("-")[0]
    order = replace(wire.Order.decode(batch.order_text), group_id=group)
    labels = {**LABELS, "kinetic.dev/submission": group}
    return job_spec(name, {}, order=order, key=KEY, labels=labels, grace=1.0)


async def scale(
    cluster: LocalCluster,
    batch: Batch,
    workers: int,
    *,
    name: str = NAME,
    resources: Resources | None = None,
    environment: Mapping[str, str] | None = None,
    **terms: Any,
) -> None:
    known = Terms(workers=workers, budgets=batch.budgets, **terms)
    crew = Crew(terms=known, outputs=str(batch.folder / "outputs"), created=time.time())
    job = spec(batch, name)
    job = replace(
        job,
        resources=resources or job.resources,
        environment=environment or job.environment,
        crew=crew,
    )
    await cluster.scale(job, number=0, ranks=range(workers))


async def workers_of(cluster: LocalCluster) -> list[Observation]:
    found = await cluster.find(labels=LABELS)
    return [it for it in found if "kinetic.dev/index" not in it.labels]


async def running_item(cluster: LocalCluster) -> Observation:
    """Return the only item, once it runs."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            for it in await cluster.find(labels=LABELS):
                if "kinetic.dev/index" in it.labels:
                    return it
            await asyncio.sleep(0.01)


def square(number: int) -> int:
    return number * number


def mark_and_wait(path: str) -> str:
    """Write this process's ID, and wait until the file is emptied."""
    import time

    mark = Path(path)
    if mark.exists():
        return "again"
    mark.write_text(str(os.getpid()))
    while mark.read_text():
        time.sleep(0.01)
    return "first"


async def final(batch: Batch) -> None:
    await eventually(lambda: batch.requests().done)


def use_memory(size: int) -> int:
    """Use so many bytes; without any, end by the kernel's signal."""
    if not size:
        os.kill(os.getpid(), signal.SIGKILL)
    return len(bytearray(size))


async def test_an_item_that_the_kernel_killed_ran_out_of_memory(
    cluster: LocalCluster, tmp_path: Path, home: Path, group: Path
) -> None:
    await cluster.find()  # starts a supervisor
    (group / "cgroup.procs").write_text(str(supervisor_pid(home)))
    batch = Batch(tmp_path / "b", use_memory, [0, 256 << 20, 1])
    await scale(cluster, batch, 1)
    await final(batch)
    (lost,), (greedy,), (value,) = (batch.outcomes(index) for index in range(3))
    assert (lost.reason, lost.exit_code) == ("lost", -9)
    assert (greedy.reason, greedy.exit_code) == ("out of memory", -9)
    assert value.kind is wire.Kind.VALUE


async def test_a_batch_runs_to_its_end_without_any_client(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    batch = Batch(tmp_path / "b", square, range(60))
    await scale(cluster, batch, 2)
    await cluster.aclose()
    await final(batch)
    assert [batch.value(index) for index in range(60)] == [i * i for i in range(60)]
    assert all([*attempts] == [1] for attempts in batch.attempts().values())


async def test_more_workers_than_slots_wait_and_leave_nothing(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    batch = Batch(tmp_path / "b", square, range(20))
    await scale(cluster, batch, 5)
    await final(batch)
    async with asyncio.timeout(DEADLINE_S):
        while [it for it in await cluster.find(labels=LABELS) if it.phase is not Phase.ENDED]:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kill", ["interpreter", "child"])
async def test_what_dies_costs_its_item_one_attempt(
    cluster: LocalCluster, tmp_path: Path, kill: str
) -> None:
    mark = tmp_path / "mark"
    batch = Batch(tmp_path / "b", mark_and_wait, [str(mark)], retries=1)
    await scale(cluster, batch, 1, backoff_s=0.01)
    child = psutil.Process(int(await eventually(lambda: mark.exists() and mark.read_text())))
    interpreter = child.parent()
    assert interpreter is not None
    {"interpreter": interpreter, "child": child}[kill].kill()
    await lost_once(batch, child)


async def lost_once(batch: Batch, child: psutil.Process) -> None:
    """Check that the item's first attempt is lost with its *child*, and that it ran again."""
    await final(batch)
    assert [outcome.kind for outcome in batch.outcomes(0)] == ["lost", "value"]
    assert batch.value(0) == "again"
    assert not child.is_running()


async def test_a_round_that_is_ended_leaves_no_process(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    batch = Batch(tmp_path / "b", mark_and_wait, [str(mark)])
    await scale(cluster, batch, 1)
    child = psutil.Process(int(await eventually(lambda: mark.exists() and mark.read_text())))
    batch.append(wire.Request(kind="stop"))
    (worker,) = await workers_of(cluster)
    await cluster.delete(labels=LABELS)
    await gone(cluster, worker.name)
    assert batch.states() == [wire.ItemState.CANCELLED]
    assert not child.is_running()
    assert not await workers_of(cluster)


async def test_a_worker_hears_of_a_stop_at_once(cluster: LocalCluster, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    batch = Batch(tmp_path / "b", mark_and_wait, [str(mark)])
    await scale(cluster, batch, 1)
    await eventually(lambda: mark.exists() and mark.read_text())
    batch.append(wire.Request(kind="stop"))
    await cluster.tell(LABELS)
    await final(batch)
    assert batch.states() == [wire.ItemState.CANCELLED]


async def test_submissions_take_turns_in_a_slot(cluster: LocalCluster, tmp_path: Path) -> None:
    def note(path: str) -> None:
        import time

        with open(path, "a") as file:
            file.write(f"{os.environ['KINETIC_JOB_ID']}\n")
        while not Path(f"{path}.go").exists():
            time.sleep(0.01)

    order = tmp_path / "order"
    held = Batch(tmp_path / "held", mark_and_wait, [str(tmp_path / "mark")])
    long = Batch(tmp_path / "long", note, [str(order)] * 20)
    short = Batch(tmp_path / "short", note, [str(order)] * 3)
    await scale(cluster, held, 1, name="grp-000000000001-0")  # takes one of the two slots for good
    await eventually(lambda: (tmp_path / "mark").exists())
    await scale(cluster, long, 1, name="grp-000000000002-0")
    await eventually(order.exists)
    await scale(cluster, short, 1, name="grp-000000000003-0")
    (tmp_path / "order.go").touch()
    await final(long)
    await final(short)
    (tmp_path / "mark").write_text("")
    await final(held)
    ran = [line.rpartition("-")[0][-1] for line in order.read_text().split()]
    assert sorted(ran) == ["2"] * 20 + ["3"] * 3
    assert ran.index("3") == 1, "the short batch waited for the end of the long one"


async def test_a_worker_that_waits_for_slots_leaves_when_asked(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    mine = Batch(tmp_path / "mine", say_and_wait, [str(tmp_path / f"m{n}") for n in range(4)])
    other = Batch(tmp_path / "other", say_and_wait, [str(tmp_path / "o")])

    async def until_begun(batch: Batch, count: int) -> None:
        prefix = wire.block_prefix(SCOPE, 0)
        await eventually(
            lambda: sum("claim" in it.name for it in batch.objects.list(prefix)) == count
        )

    await scale(cluster, mine, 2)
    await until_begun(mine, 2)
    await scale(cluster, other, 1, name="grp-000000000001-0")
    for number in range(2):
        (tmp_path / f"m{number}").touch()
    await until_begun(other, 1)
    await until_begun(mine, 3)  # so one of its two workers waits for a slot
    # The claims say which one runs. The supervisor may still list an item that has just ended.
    (running,) = [mine.attempts()[index][1].executor for index in mine.attempts() if index > 1]
    (waiting,) = [it for it in await workers_of(cluster) if it.executor != running]
    mine.append(wire.Request(kind="leave", ranks=(int(waiting.name.split(".")[2]),)))
    await cluster.tell({"kinetic.dev/submission": "grp-000000000000"})
    async with asyncio.timeout(DEADLINE_S):
        while (await cluster.find(names=[waiting.name]))[0].phase is not Phase.ENDED:
            await asyncio.sleep(0.01)
    assert (await running_item(cluster)).executor == running, "no slot became free meanwhile"
    for name in ("o", "m2", "m3"):
        (tmp_path / name).touch()
    await final(mine)
    await final(other)
    assert all([*attempts] == [1] for attempts in mine.attempts().values())


def say_and_wait(path: str) -> None:
    """Print a line, wait until the file exists, and print another."""
    import time

    print("before", path, flush=True)
    while not Path(path).exists():
        time.sleep(0.01)
    print("after", path, flush=True)


async def test_a_running_item_is_found_with_its_log(cluster: LocalCluster, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("one", "two")]
    batch = Batch(tmp_path / "b", say_and_wait, paths)
    await scale(cluster, batch, 1)
    found = await running_item(cluster)
    group = LABELS["kinetic.dev/submission"]
    assert found.name == f"{group}-0-1" and found.phase is Phase.RUNNING
    assert [it.executor for it in await workers_of(cluster)] == [found.executor]
    lines = cluster.logs(found.name, follow=True)
    assert await anext(lines) == f"before {paths[0]}"
    Path(paths[0]).touch()
    assert [line async for line in lines] == [f"after {paths[0]}"]
    async with asyncio.timeout(DEADLINE_S):
        while (second := await running_item(cluster)).name == found.name:
            await asyncio.sleep(0.01)
        while [line async for line in cluster.logs(second.name)] != [f"before {paths[1]}"]:
            await asyncio.sleep(0.01)
    Path(paths[1]).touch()
    await final(batch)
    with pytest.raises(NotFound):
        [line async for line in cluster.logs(found.name)]
    for index, path in enumerate(paths):
        outcome = batch.outcomes(index)[-1]
        log, me = outcome.log, WorkerId.parse(outcome.writer)
        assert log is not None and me is not None
        place = ItemOutput(f"{NAME}.{me.job}.{me.rank}.{me.restarts}", log, ("", ""), since=0.0)
        lines = cluster.item_log(place)
        assert [line async for line in lines] == [f"before {path}", f"after {path}"]
        lines = cluster.item_log(place, tail=1)
        assert [line async for line in lines] == [f"after {path}"]


async def test_watchers_hear_of_items(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "go"
    batch = Batch(tmp_path / "b", say_and_wait, [str(path)])
    watch = cluster.watch(LABELS)
    await scale(cluster, batch, 1)
    seen: list[Phase] = []
    async with asyncio.timeout(DEADLINE_S):
        async for it in watch:
            if it.labels.get("kinetic.dev/index") == "0":
                seen.append(it.phase)
                path.touch()
            if it.ended:
                break
    assert seen == [Phase.RUNNING] and it.ended == ((0, 1),)
    assert batch.states() == [wire.ItemState.SUCCEEDED]


async def test_an_item_that_dies_with_its_worker_is_reported_with_the_cause(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    batch = Batch(tmp_path / "b", mark_and_wait, [str(mark)], retries=1)
    await scale(cluster, batch, 1, backoff_s=0.01)
    found = await running_item(cluster)
    await eventually(lambda: mark.exists() and mark.read_text())
    watch = cluster.watch(LABELS)
    await anext(watch)  # it is connected
    child = psutil.Process(int(mark.read_text()))
    interpreter = child.parent()
    assert interpreter is not None
    worker = interpreter.parent()
    assert worker is not None
    worker.kill()
    async with asyncio.timeout(DEADLINE_S):
        async for it in watch:
            if it.name == found.name and it.phase is Phase.GONE:
                break
    assert it.executor == found.executor and "SIGKILL" in it.message
    await lost_once(batch, child)


async def test_an_item_that_is_deleted_looks_for_its_stop(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    batch = Batch(tmp_path / "b", say_and_wait, [str(tmp_path / "go")])
    await scale(cluster, batch, 1)
    found = await running_item(cluster)
    batch.append(wire.Request(kind="stop", items=(0,)))
    await cluster.delete(names=[found.name])
    await final(batch)
    assert batch.states() == [wire.ItemState.CANCELLED]


async def test_a_worker_that_gets_other_gpus_shows_them_to_its_items(
    home: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    def note_gpu(path: str) -> str | None:
        import time

        Path(f"{path}.begun").touch()
        while not Path(path).exists():
            time.sleep(0.01)
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def batch(name: str, count: int) -> Batch:
        return Batch(
            tmp_path / name, note_gpu, [str(tmp_path / f"{name}{n}") for n in range(count)]
        )

    environ |= {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "KINETIC_LOCAL_SLOTS": "4"}
    cluster = LocalCluster(home, environ)
    moving, held, other = batch("moving", 2), batch("held", 1), batch("other", 1)
    gpu = Resources(accelerator=parse("gpu-l4"))
    try:
        for number, it in enumerate((moving, held, other)):
            await scale(cluster, it, 1, name=f"grp-00000000000{number}-0", resources=gpu)
            if it is not other:
                await eventually((tmp_path / f"{it.folder.name}0.begun").exists)
        (tmp_path / "moving0").touch()
        await eventually((tmp_path / "other0.begun").exists)
        assert not (tmp_path / "moving1.begun").exists(), "it has given its GPU back"
        (tmp_path / "held0").touch()
        (tmp_path / "moving1").touch()
        await final(moving)
        assert [moving.value(index) for index in range(2)] == ["GPU-a", "GPU-b"]
        (tmp_path / "other0").touch()
        await final(other)
        assert other.value(0) == "GPU-a" and held.value(0) == "GPU-b"
    finally:
        await cluster.aclose()


def describe(output: str) -> dict[str, Any]:
    """Return what this process looks like to the user's code."""
    import faulthandler
    import gc
    import logging
    import resource
    import sys
    import threading
    import warnings

    main: Any = sys.modules["__main__"]
    numbers = sorted(signal.valid_signals())
    limits = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return {
        "cwd": os.getcwd(),
        "environ": {**os.environ},
        "umask": os.umask(0o22),
        "argv": sys.argv,
        "path": sys.path,
        "finders": [getattr(it, "__name__", type(it).__name__) for it in sys.meta_path],
        "flags": str(sys.flags),
        "handlers": [str(signal.getsignal(number)).partition(" at ")[0] for number in numbers],
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "wakeup": signal.set_wakeup_fd(-1),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "leads": (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
        "nice": os.nice(0),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "stdin": os.readlink("/proc/self/fd/0"),
        "streams": [(it.encoding, it.errors) for it in (sys.stdin, sys.stdout, sys.stderr)],
        "main thread": threading.main_thread().native_id == threading.get_native_id(),
        "collects": gc.isenabled(),
        "main": (main.__name__, main.__package__, sorted(vars(main)), main.__spec__.name),
        "filters": str(warnings.filters),
        "logging": (logging.root.level, str(logging.root.handlers)),
        "crashes": faulthandler.is_enabled(),
        "outputs": (os.path.isdir(output), os.environ.get("KINETIC_OUTPUT_PATH")),
    }


@pytest.mark.parametrize("fresh", [False, True], ids=["forked", "fresh"])
async def test_an_item_is_like_a_job_of_its_own(
    cluster: LocalCluster, tmp_path: Path, fresh: bool
) -> None:
    output = str(tmp_path / "b" / "outputs" / "0")
    batch = Batch(tmp_path / "b", describe, [output], project={"a/b.txt": b"1"})
    environment = {"PATH": os.environ["PATH"], "KINETIC_MINE": "x"}
    if fresh:
        environment["PYTHONHASHSEED"] = "7"
    content = frames.pack([pickle.dumps(((output,), {}))])
    batch.objects.create("arguments", content)
    digest = hashlib.sha256(content).hexdigest()
    job = spec(batch, "grp-000000000000-9")
    order = replace(
        job.order,
        arguments=wire.Input("arguments", 0, len(content), digest),
        job_id="grp-000000000000-0",
        output_dir=output,
        scope="alone/",
    )
    key = signing.submission_key(b"root", order.scope)
    await cluster.launch(replace(job, order=order, environment=environment, key=key))
    outcome = f"{wire.attempt_key(order.scope, 0, 1, 'outcome')}"
    await eventually(lambda: batch.objects.exists(outcome))
    alone = pickle.loads(frames.unpack(batch.objects.get(outcome)[0]).frames[0])
    await scale(cluster, batch, 1, environment=environment)
    await final(batch)
    item = batch.value(0)

    def plain(found: dict[str, Any]) -> Any:
        work = found["cwd"].removesuffix("/workspace")
        mark = found["environ"]["KINETIC_LOCAL_PROCESS"].rpartition(":")[2][:8]
        del found["environ"]["KINETIC_LOCAL_PROCESS"]
        found["finders"] = [it for it in found["finders"] if it != "Recorder"]
        return json.loads(json.dumps(found).replace(work, "WORK").replace(mark, "MARK"))

    assert plain(item) == plain(alone)
