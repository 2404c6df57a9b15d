"""Mistakes that a library of this kind has made, or easily makes: each in one test.

Others of them are shown to be absent elsewhere:

====================================================== ============================================
a job whose result was taken meanwhile runs again      platforms/test_batches: each_job_completes_…
an early end of taking results loses inputs            platforms/test_batches: fail_fast_without_…
items share one output directory, and know no index    platforms/test_batches: an_item_knows_…
a returned exception counts as a failure               platforms/test_batches: outcomes_are_…
cancelling goes job by job                             test_resources: a_thousand_jobs_in_the_queue
a cancel from elsewhere leaves the queue running       test_kills: another_process_cancels_…
the rest of a batch dies with its submitter, unsaid    test_kills: a_batch_whose_submitter_…
an environment in the project is pickled by value      pack/test_travel: a_virtual_environment_…
threads take modules from each other while pickling    pack/test_payload: threads_do_not_take_…
jobs ask for no CPU and crowd one machine              local/test_cluster: cpus_are_slots
markup in a log line ends the stream                   platforms/test_calls: output_is_kept_…
Ctrl-C leaves the job of a call running                platforms/test_processes: ctrl_c_of_…
no terminal for a debugger is noticed too late         face/test_jobs: debugging_without_…
a host's label is that of its slice                    unit/test_accelerators: a_single_v3_host_…
something finished runs again                          test_kills: every test, by its marks
a damaged argument is executed                         runner/test_attempt: damaged_content_…
threads that linger keep a job alive                   runner/test_attempt: threads_left_behind_…
containers arrive as something else                    platforms/test_calls: values_are_what_…
an exception that cannot be rebuilt hides what it was  platforms/test_calls: what_cannot_be_…
a job that has no room waits without a word            platforms/test_jobs: a_job_that_no_machine_…
Data of some form, or a volume, does not arrive        platforms/test_calls: data_of_…, volumes_…
leaving with 0 is a failure                            runner/test_attempt: leaving_with_success_…
====================================================== ============================================
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

import kinetic
from kinetic import aio, errors
from kinetic._runner.protocol import signing
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic.aio._lease import EXPIRY_S
from kinetic.aio.images.current import CurrentInterpreter
from kinetic.aio.local.cluster import LocalCluster, root_key
from kinetic.aio.local.store import DirectoryStore
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import JobSpec, Object, Observation
from kinetic.job_status import JobStatus

from .conftest import DEADLINE_S, soon, word_of


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builtins that are submitted are part of next to nothing."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)


@pytest.fixture
async def client() -> AsyncIterator[aio.Client]:
    async with aio.Client(backend="local") as client, asyncio.timeout(2 * DEADLINE_S):
        yield client


class Store(DirectoryStore):
    """A store with moods."""

    fails: str = ""
    hangs = False

    async def fetch(self, name: str, path: Path) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        await super().fetch(name, path)

    async def get(self, name: str, **where: Any) -> Object:
        if self.fails and self.fails in name:
            self.fails = ""
            raise errors.Unavailable("the network is down")
        return await super().get(name, **where)


class Cluster(LocalCluster):
    """A platform with moods."""

    fails = 0
    loses_replies = False
    refuses = False

    async def launch(self, job: JobSpec) -> None:
        if self.refuses:
            raise errors.LaunchError("there is no such machine", reason="quota")
        await super().launch(job)
        if self.loses_replies:
            raise errors.Unavailable("the reply was lost")

    async def find(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        explained: bool = False,
    ) -> list[Observation]:
        self._stumble()
        return await super().find(names=names, labels=labels, explained=explained)

    async def watch(self, labels: Mapping[str, str]) -> AsyncIterator[Observation]:
        self._stumble()
        async for seen in super().watch(labels):
            yield seen
            self._stumble()

    def _stumble(self) -> None:
        if self.fails > 0:
            self.fails -= 1
            raise errors.Unavailable("the network is down")


class Moody:
    """A platform that can be made to fail, and its client."""

    def __init__(self, home: Path) -> None:
        self.store = Store(home / "store")
        self.cluster = Cluster(home)
        platform = Platform(
            store=self.store, images=CurrentInterpreter(), cluster=self.cluster, marker="local-"
        )
        self.client = aio.Client(backend="local", platform=platform)


@pytest.fixture
async def moody(home: Path) -> AsyncIterator[Moody]:
    moody = Moody(home)
    async with moody.client, asyncio.timeout(2 * DEADLINE_S):
        yield moody


# --- many jobs ------------------------------------------------------------------------------------


async def test_a_retried_item_completes_once_by_its_last_attempt(client, tmp_path: Path) -> None:
    def second_time_lucky(number: int) -> int:
        mark = tmp_path / str(number)
        if number % 2 and not mark.exists():
            mark.touch()
            raise RuntimeError("not yet")
        return number

    batch = await client.run_async_map(second_time_lucky, range(4), retries=1)
    async with aio.Client() as other:
        seen_there = await other.attach_batch(batch.group_id)
        there = asyncio.create_task(seen_there.results(ordered=False, cleanup=False))
        assert sorted(await batch.results(ordered=False, cleanup=False)) == [0, 1, 2, 3]
        assert sorted(await there) == [0, 1, 2, 3], "an observer sees retries as well"
        ended = [job.group_index async for job in seen_there.as_completed()]
        assert sorted(ended) == [0, 1, 2, 3]


@pytest.mark.parametrize("take", ["results", "as_completed"])
async def test_a_platform_that_stumbles_costs_nothing(moody: Moody, take: str) -> None:
    batch = await moody.client.run_async_map(abs, range(-6, 0), max_concurrent=2)
    moody.cluster.fails = 2
    if take == "results":
        assert await batch.results() == [6, 5, 4, 3, 2, 1]
    else:
        assert len([job async for job in batch.as_completed()]) == 6
    assert await batch.status_counts() == {"SUCCEEDED": 6}


async def test_what_ends_the_submission_is_told_to_whoever_waits(client) -> None:
    def inputs():
        yield -1
        raise LookupError("no more of them")

    batch = await client.run_async_map(abs, inputs())

    async def take_one_by_one() -> None:
        async for _ in batch.as_completed():
            pass

    for wait in (batch.results, batch.wait, take_one_by_one, lambda: batch.results(ordered=False)):
        with pytest.raises(LookupError, match="no more of them"):
            await wait()


async def test_a_timeout_bounds_collecting_too(moody: Moody) -> None:
    batch = await moody.client.run_async_map(os.urandom, [300_000])
    await batch.wait()
    moody.store.hangs = True
    with pytest.raises(TimeoutError):
        await batch.results(timeout=0.2)
    moody.store.hangs = False
    assert len(await batch.results()) == 1


async def test_a_retry_goes_on_from_what_its_item_has_written(client) -> None:
    def resumes(_: int) -> list[str]:
        place = Path(os.environ["KINETIC_OUTPUT_DIR"])
        (place / os.environ["KINETIC_ATTEMPT"]).touch()
        if os.environ["KINETIC_ATTEMPT"] == "1":
            raise RuntimeError("half-way")
        return sorted(path.name for path in place.iterdir())

    batch = await client.run_async_map(resumes, [0], retries=1)
    assert await batch.results() == [["1", "2"]]
    assert await batch.jobs[0].outputs() == ["1", "2"]


async def test_a_second_reader_gets_the_results_too(client) -> None:
    batch = await client.run_async_map(abs, [-1, -2])
    assert await batch.results(cleanup=False) == [1, 2]
    async with aio.Client() as other:
        again = await other.attach_batch(batch.group_id)
        assert await again.results() == [1, 2]
        assert None not in again.jobs
        job = await other.attach(batch.jobs[1].job_id)
        assert await job.result() == 2
        assert await again.results() == [1, 2]


async def test_the_target_of_a_batch_is_that_of_its_jobs(client) -> None:
    batch = await client.run_async_map(abs, [-1], project="theirs")
    await batch.results(cleanup=False)
    assert [job.project for job in batch.jobs if job] == ["theirs"]


async def test_a_moment_without_network_does_not_make_jobs_unavailable(
    moody: Moody, home: Path
) -> None:
    batch = await moody.client.run_async_map(abs, [-1, -2])
    await batch.results(cleanup=False)
    other = Moody(home)
    async with other.client:
        other.store.fails = "manifest"
        with pytest.raises(errors.Unavailable):
            await other.client.attach_batch(batch.group_id)
        other.store.fails = ".outcome"  # for whoever is first: the observer, or who wants results
        found = await other.client.attach_batch(batch.group_id)
        assert None not in found.jobs
        with contextlib.suppress(errors.Unavailable, errors.BatchError):
            await found.results(cleanup=False)
        assert not other.store.fails, "nobody asked"
        assert None not in found.jobs
        assert await found.results(cleanup=False) == [1, 2]


async def test_a_cancelled_item_is_not_tried_again(client, tmp_path: Path) -> None:
    def hang(number: int) -> None:
        (tmp_path / f"{number}.{os.environ['KINETIC_ATTEMPT']}").touch()
        while True:
            time.sleep(0.05)

    batch = await client.run_async_map(hang, range(5), max_concurrent=1, retries=3)
    await soon((tmp_path / "0.1").exists)
    await batch.cancel()
    assert await batch.status_counts() == {"NOT_FOUND": 5}
    assert [path.name for path in tmp_path.glob("*.[1-4]")] == ["0.1"]
    assert await batch.failures() == []


async def test_attaching_to_jobs_that_were_cleaned_up_waits_for_nothing(client) -> None:
    batch = await client.run_async_map(abs, [-1, -2, -3])
    await batch.results(cleanup=True)
    for job in batch.jobs:
        await job.cleanup()
    async with aio.Client() as other, asyncio.timeout(EXPIRY_S - 10.0):  # not until that is over
        found = await other.attach_batch(batch.group_id)
        with pytest.raises(errors.NotFound, match="collected"):
            await found.results()
        await found.cleanup()
        with pytest.raises(errors.NotFound, match="cleaned up"):
            await (await other.attach_batch(batch.group_id)).results()
        assert await batch.jobs[0].status() is JobStatus.NOT_FOUND
        with pytest.raises(errors.NotFound):
            await other.attach(f"{batch.group_id}-0")


async def test_looking_at_items_that_wait_starts_and_ends_nothing(client, tmp_path: Path) -> None:
    def wait(number: int) -> int:
        while not (tmp_path / "go").exists():
            time.sleep(0.005)
        return number

    batch = await client.run_async_map(wait, range(4), max_concurrent=1)
    for _ in range(2):
        counts = await batch.status_counts()
        assert sum(counts.values()) <= 1, "only what was submitted is counted"
        assert len([job for job in batch.jobs if job is not None]) <= 1
    late = await client.attach(f"{batch.group_id}-3")
    assert await late.status() is JobStatus.PENDING
    assert await late.reason() == ""
    (tmp_path / "go").touch()
    assert await batch.results() == [0, 1, 2, 3]


async def test_attaching_in_the_same_client_sees_a_lazy_batch_to_its_end(client) -> None:
    async def inputs():
        for number in range(-3, 0):
            yield number

    batch = await client.run_async_map(abs, inputs(), max_concurrent=1)
    async with await client.attach_batch(batch.group_id) as same:
        pass  # leaving it ends nothing: it was only attached to
    assert await same.results(cleanup=False) == [3, 2, 1]
    assert await batch.results() == [3, 2, 1]


# --- one job --------------------------------------------------------------------------------------


async def test_homes_and_stores_do_not_mix(
    client, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aio.Client(backend="local", store=str(tmp_path / "other")) as elsewhere:
        here, there = await client.submit(abs, -1), await elsewhere.submit(abs, -2)
        with pytest.raises(errors.NotFound):
            await elsewhere.attach(here.job_id)
        with tempfile.TemporaryDirectory(prefix="kn-", dir="/tmp") as another:
            monkeypatch.setenv("KINETIC_HOME", another)
            from tests.conftest import end_processes

            third = await client.submit(abs, -3)
            assert [job.job_id for job in await client.list_jobs()] == [third.job_id]
            assert await here.status() not in (JobStatus.NOT_FOUND, JobStatus.FAILED)
            assert [await here, await there, await third] == [1, 2, 3]
            monkeypatch.setenv("KINETIC_HOME", str(home))
            assert await (await client.submit(abs, -4)) == 4
            assert end_processes(Path(another)) == []


async def test_data_that_left_the_store_is_never_an_empty_directory(
    client, home: Path, tmp_path: Path
) -> None:
    place = tmp_path / "data"
    place.mkdir()
    (place / "a.txt").write_text("content")
    assert await client.run(os.listdir, kinetic.Data(str(place))) == ["a.txt"]
    for stored in (home / "store" / "data").rglob("files/*"):
        stored.unlink()
    word = await word_of(await client.submit(os.listdir, kinetic.Data(str(place))))
    assert word.end == ["a.txt"] or ("data resolve" in word.reason and "a.txt" in word.reason)


async def test_a_job_that_exists_already_is_left_alone(
    moody: Moody, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Taken(Store):
        async def create(
            self,
            name: str,
            body: bytes | Path,
            metadata: Mapping[str, str] | None = None,
            *,
            shared: bool = False,
        ) -> bool:
            if name.endswith("handle.json"):
                await super().create(name, b"somebody else's")
            return await super().create(name, body, metadata, shared=shared)

    platform = Platform(
        store=Taken(home / "store"),
        images=CurrentInterpreter(),
        cluster=moody.cluster,
        marker="local-",
    )
    async with aio.Client(backend="local", platform=platform) as client:
        with pytest.raises(errors.Conflict, match="exists already"):
            await client.submit(abs, -1)
        [theirs] = (home / "store" / "jobs").rglob("*.json")
        assert theirs.read_text() == "somebody else's"


async def test_a_launch_whose_reply_was_lost_is_a_job(moody: Moody) -> None:
    moody.cluster.loses_replies = True
    job = await moody.client.submit(abs, -1)
    assert await job == 1


async def test_a_launch_that_was_refused_leaves_nothing(moody: Moody, home: Path) -> None:
    moody.cluster.refuses = True
    with pytest.raises(errors.LaunchError, match="no such machine") as caught:
        await moody.client.submit(abs, -1)
    assert caught.value.reason == "quota"
    assert not [path for path in (home / "store").glob("jobs/**/*") if path.is_file()]
    assert await moody.client.list_jobs() == []
    batch = await moody.client.run_async_map(abs, [-1, -2])
    with pytest.raises(errors.BatchError) as failed:
        await batch.results()
    assert {type(one) for one in failed.value.submission_failures.values()} == {errors.LaunchError}


async def test_only_the_jobs_own_prefix_is_deleted(client, home: Path) -> None:
    objects = DirectoryObjects(home / "store")
    job = await client.submit(abs, -1)
    await job.result(cleanup=False)
    neighbours = [f"jobs/{job.job_id}0/handle.json", f"jobs/{job.job_id}-1/x", "jobs/other"]
    for name in neighbours:
        objects.create(name, b"theirs")
    await job.cleanup()
    assert [one.name for one in objects.list("jobs/")] == sorted(neighbours)


async def test_unknown_fields_of_a_handle_are_ignored(client, home: Path) -> None:
    job = await client.submit(abs, -1)
    await job.result(cleanup=False)
    path = home / "store" / "jobs" / job.job_id / "handle.json"
    content = json.loads(path.read_text()) | {"of_a_later_version": [1], "submitter": None}
    content.pop("mac")
    scope, name = f"jobs/{job.job_id}/", f"jobs/{job.job_id}/handle.json"
    key = signing.submission_key(root_key(home), scope)
    path.chmod(0o600)
    path.write_bytes(signing.signed_json(key, scope, name, json.dumps(content).encode()))
    async with aio.Client() as other:
        found = await other.attach(job.job_id)
        assert found == job and found.func_name == "abs"
        assert await found.result() == 1


async def test_a_link_that_waits_where_a_result_arrives_is_not_followed(
    home: Path, tmp_path: Path
) -> None:
    store = DirectoryStore(home / "store")
    await store.create("plain", b"new")
    await store.create("headed", b"new", {"a": "b"})
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("old")
    link.symlink_to(victim)
    for name in ("plain", "headed"):
        with pytest.raises(errors.BackendError):
            await store.fetch(name, link)
    assert victim.read_text() == "old"


async def test_a_large_result_arrives_in_a_place_of_its_own(
    client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    job = await client.submit(os.urandom, 1_000_000)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    assert len(await job) == 1_000_000
    assert [*place.iterdir()] == []


async def test_status_changes_of_a_job_that_has_ended_are_told_once(client) -> None:
    told: list[JobStatus] = []
    job = await client.submit(abs, -1)
    await job.result(cleanup=False)
    async with aio.Client() as other:
        found = await other.attach(job.job_id)
        assert await found.result(cleanup=False, on_status_change=told.append) == 1
        assert told == [JobStatus.SUCCEEDED]
