"""Wrong arguments raise errors that name the argument and its rule, before anything is sent."""

from __future__ import annotations

import asyncio
import functools
import json
import pickle
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kinetic
from kinetic import aio, errors
from kinetic.aio._submissions.manifest import uploaded_call_of
from kinetic.aio.platforms import Platform
from kinetic.testing import memory_platform
from tests.engine.severed import on_loop_time

pytestmark = pytest.mark.looptime(noop_cycles=300)


@pytest.fixture
async def platform() -> Platform:
    return on_loop_time(memory_platform())


@pytest.fixture
def platform_outside() -> Platform:
    return memory_platform()


def same(x: Any) -> Any:
    return x


def inverse(x: int) -> float:
    return 1 / x


OPTIONS: dict[str, list[Any]] = {
    "retries": ["1", 1.5, None, True, -1],
    "max_concurrent": [2.5, "4"],
    "window": ["a"],
    "batch_timeout": ["1m", 0, float("nan")],
    "fail_fast": ["no"],
    "cancel_running_on_fail": [1],
    "progress": ["yes"],
    "name": [5],
    "project": [5],
    "tags": [["a"], "team=x", {"a": 1}, {1: "a"}],
    "input_mode": [3],
}


def refused(name: str, value: object) -> Any:
    """Expect an error that names the argument, the rule and the value."""
    message = rf"(?m)^{name} must be .*, not {re.escape(repr(value))}$"
    return pytest.raises(errors.ConfigurationError, match=message)


@pytest.mark.parametrize("name", OPTIONS)
async def test_a_wrong_option_is_named_before_anything_is_sent(
    client: aio.Client, platform: Platform, name: str
) -> None:
    for value in OPTIONS[name]:
        options: dict[str, Any] = {name: value}
        with refused(name, value):
            await client.run_async_map(same, [1], **options)
    assert await platform.store.list("") == []


async def test_cancel_running_on_fail_is_refused_without_fail_fast(
    client: aio.Client, platform: Platform
) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"cancel_running_on_fail.*fail_fast=True"):
        await client.run_async_map(same, [1], cancel_running_on_fail=True)
    assert await platform.store.list("") == []


class Frame:
    """Iterates over the names of its columns, as a DataFrame does."""

    columns = ("a", "b")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def to_dict(self, orient: str) -> list[dict[str, int]]:
        return [{"a": 1, "b": 2}]


class Rows:
    """Iterates over rows, and has a method for columns, as a result of a database does."""

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])

    def columns(self, *names: str) -> Rows:
        return self


async def test_a_table_is_refused_unless_it_iterates_over_rows(client: aio.Client) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"to_dict\('records'\)"):
        await client.run_async_map(same, Frame())
    batch = await client.run_async_map(same, Rows())
    assert await batch.results() == [1, 2]


@pytest.mark.parametrize("inputs", ["abc", b"abc", {"a": 1}, 3, None])
async def test_inputs_that_are_meant_as_one_are_refused_with_a_hint(
    client: aio.Client, platform: Platform, inputs: Any
) -> None:
    with pytest.raises(errors.ConfigurationError, match="inputs must be an iterable") as caught:
        await client.run_async_map(same, inputs)
    assert "write [...] around a single one" in str(caught.value)
    assert await platform.store.list("") == []


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (lambda batch: batch.job(1.5), "index", 1.5),
        (lambda batch: batch.job("a"), "index", "a"),
        (lambda batch: batch.job(True), "index", True),
        (lambda batch: batch.retry_failed(5), "indices", 5),
        (lambda batch: batch.retry_failed("12"), "indices", "12"),
        (lambda batch: batch.retry_failed(["a"]), "indices", "a"),
        (lambda batch: batch.wait(timeout="x"), "timeout", "x"),
        (lambda batch: batch.results(timeout=-1), "timeout", -1),
        (lambda batch: batch.results(cleanup="no"), "cleanup", "no"),
        (lambda batch: anext(batch.outcomes(timeout="x")), "timeout", "x"),
        (lambda batch: batch.detach(seal=1), "seal", 1),
        (lambda batch: batch.resume(inputs="abc"), "inputs", "abc"),
        (lambda batch: batch.resume(force=1), "force", 1),
    ],
)
async def test_a_batch_names_a_wrong_argument_and_goes_on(
    client: aio.Client, call: Callable[[Any], Any], name: str, value: object
) -> None:
    batch = await client.run_async_map(same, [1])
    with refused(name, value):
        await call(batch)
    assert await batch.results() == [1]


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (lambda client: client.list_batches(tags="x"), "tags", "x"),
        (lambda client: client.list_batches(name=1), "name", 1),
        (lambda client: client.list_batches(limit=-1), "limit", -1),
        (lambda client: client.list_batches(limit="3"), "limit", "3"),
        (lambda client: client.attach(3), "job_id", 3),
        (lambda client: client.attach(""), "job_id", ""),
        (lambda client: client.attach_batch(None), "group_id", None),
        (lambda client: client.cleanup(None), "submission", None),
        (lambda client: client.attach_batch("grp-1", poll_timeout="1"), "poll_timeout", "1"),
    ],
)
async def test_a_client_names_a_wrong_argument(
    client: aio.Client, call: Callable[[Any], Any], name: str, value: object
) -> None:
    with refused(name, value):
        await call(client)


BATCH = "grp-local-000000000000"


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda client: client.attach(BATCH), f"attach_batch('{BATCH}')"),
        (lambda client: client.attach("grp-123456789012"), "attach_batch('grp-123456789012')"),
        (lambda client: client.attach_batch(f"{BATCH}-3"), "kinetic batches"),
        (lambda client: client.attach_batch("job-local-1"), "attach('job-local-1')"),
        (lambda client: client.attach("kinetic-job-1234567890ab"), "job-1234567890ab"),
    ],
)
async def test_an_id_of_the_other_kind_names_the_call_that_takes_it(
    client: aio.Client, call: Callable[[Any], Any], hint: str
) -> None:
    with pytest.raises(errors.ConfigurationError) as caught:
        await call(client)
    assert hint in str(caught.value)


@pytest.mark.parametrize("text", ["nosuch", "../x", "job-", "job-local-000000000000"])
async def test_what_is_not_there_is_not_found_whatever_it_looks_like(
    client: aio.Client, text: str
) -> None:
    for attach in (client.attach, client.attach_batch):
        if attach == client.attach_batch and text.startswith("job-local"):
            continue  # an ID of the other kind
        with pytest.raises(errors.NotFound) as caught:
            await attach(text)
        assert text in str(caught.value)


async def test_a_batch_error_names_the_first_failure_and_what_to_do(client: aio.Client) -> None:
    batch = await client.run_async_map(inverse, [1, 0, 2, 0])
    with pytest.raises(errors.BatchError) as caught:
        await batch.results()
    text = str(caught.value)
    assert text.startswith(f"Batch {batch.group_id}: 2 of 4 jobs failed; ")
    assert "item 1: ZeroDivisionError: division by zero. " in text
    assert text.endswith("outcomes() yields each, retry_failed() runs them again")
    bare = errors.BatchError("grp-1", [], [None], first_failure="item 0: it.")
    assert str(pickle.loads(pickle.dumps(bare))) == str(bare)


async def test_a_batch_error_offers_no_retry_for_an_input_that_was_not_sent(
    client: aio.Client,
) -> None:
    lock = threading.Lock()
    mixed = await client.run_async_map(inverse, [0, lock, 2])
    with pytest.raises(errors.BatchError) as caught:
        await mixed.results()
    assert str(caught.value).endswith(
        "retry_failed() runs them again; but it can't help where the input couldn't be sent, such "
        "as item 1: run corrected inputs in another batch"
    )
    assert len(await mixed.failures()) == 1
    only = await client.run_async_map(inverse, [lock, 2])
    with pytest.raises(errors.BatchError) as caught:
        await only.results()
    assert "retry_failed()" not in str(caught.value)
    assert str(caught.value).endswith("run corrected inputs in another batch")


@pytest.mark.parametrize(
    ("mode", "inputs", "message"),
    [
        ("kwargs", [1], 'input_mode="kwargs".* dicts, not int'),
        ("kwargs", [{"x": 1}, {1: 2}], 'input_mode="kwargs".* keys, not int'),
        ("args", [1], 'input_mode="args".* lists or tuples, not int'),
        ("labelled", [(1, {}), 2], 'input_mode="labelled".* pairs .*, not int'),
        ("labelled", [(1, {}), (2, 3.5)], 'input_mode="labelled".* dict after .*, not float'),
        ("labelled", [(1, {}), (2, {3: 4})], 'input_mode="labelled".* keys, not int'),
        ("labelled", [(1, {}), (len, {})], "the label .* can't be written as JSON"),
    ],
)
async def test_inputs_that_do_not_fit_the_mode_are_refused_in_a_list_and_fail_alone_in_an_iterator(
    client: aio.Client, platform: Platform, mode: str, inputs: list[Any], message: str
) -> None:
    last = len(inputs) - 1
    refusal = f"^input {last}: {message}.* Nothing was sent$"
    with pytest.raises(errors.ConfigurationError, match=refusal):
        await client.run_async_map(dict, inputs, input_mode=mode)
    assert await platform.store.list("") == []
    batch = await client.run_async_map(dict, iter(inputs), input_mode=mode)
    with pytest.raises(errors.BatchError, match=message):
        await batch.results()
    assert type(batch.submission_failures[last]) is errors.SubmissionError


@pytest.mark.parametrize("function", [3, None, same(1)], ids=str)
async def test_what_cannot_be_called_is_refused_before_anything_is_sent(
    client: aio.Client, platform: Platform, function: Any
) -> None:
    for call in (
        lambda: client.submit(function, 1),
        lambda: client.run(function, 1),
        lambda: client.run_async_map(function, [1]),
    ):
        with pytest.raises(TypeError, match="kinetic runs functions, not"):
            await call()
    assert await platform.store.list("") == []


def train(config: dict[str, float], *, steps: int = 1) -> Any:
    return config, steps


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap *function* so that its first argument is always an empty dict."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function({}, *args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing a required argument: 'config'"),
        (({}, 1), {}, "too many positional arguments"),
        (({},), {"step": 1}, "unexpected keyword argument 'step'"),
        (({},), {"retries": 1}, r"run_async_map\(inputs, retries=\.\.\.\)$"),
        (({},), {"timeout": 1}, r"run\(timeout=\.\.\.\), or f\.options\(timeout=\.\.\.\)$"),
        (({},), {"steps": 1, "spot": 1, "name": ""}, r"options\(spot=.*inputs, name="),
    ],
)
async def test_a_call_that_does_not_fit_the_function_is_a_type_error_before_anything_is_sent(
    client: aio.Client, platform: Platform, args: Any, kwargs: Any, message: str
) -> None:
    for function in (train, kinetic.run("cpu")(train), functools.partial(train)):
        with pytest.raises(TypeError, match=message):
            await client.submit(function, *args, **kwargs)
        with pytest.raises(TypeError, match=message):
            await client.run(function, *args, **kwargs)
    assert await platform.store.list("") == []


async def test_a_call_is_bound_to_what_is_called_and_not_to_what_that_wraps(
    client: aio.Client,
) -> None:
    assert await client.run(wrapped(train), steps=3) == ({}, 3)
    assert await client.run(functools.partial(train, {}), steps=4) == ({}, 4)
    assert await client.run(max, 1, 2) == 2


async def test_a_list_with_an_input_that_does_not_fit_is_refused_before_anything_is_sent(
    client: aio.Client, platform: Platform
) -> None:
    with pytest.raises(errors.ConfigurationError, match="input 1 does not fit") as caught:
        await client.run_async_map(train, [{"config": {}}, {"lr": 0.1}])
    assert "train(config" in str(caught.value) and 'input_mode="single"' in str(caught.value)
    with pytest.raises(errors.ConfigurationError, match=r'each element .*input_mode="single"'):
        await client.run_async_map(train, [(1, 2)])
    with pytest.raises(errors.ConfigurationError) as caught:
        await client.run_async_map(train, [{"config": {}, "lr": 0.1}], input_mode="kwargs")
    assert await platform.store.list("") == []
    batch = await client.run_async_map(train, [{"lr": 0.1}], input_mode="single")
    assert await batch.results() == [({"lr": 0.1}, 1)]


@pytest.mark.parametrize("inputs", [list, iter])
async def test_an_empty_dict_or_tuple_is_no_argument(
    client: aio.Client, inputs: Callable[[list[Any]], Any]
) -> None:
    def pair(n: Any = 1, m: int = 2) -> Any:
        return n, m

    batch = await client.run_async_map(pair, inputs([{"n": 5}, {}, (), {"m": 7}]))
    assert await batch.results() == [(5, 2), (1, 2), (1, 2), (1, 7)]


async def test_a_lazy_input_that_does_not_fit_fails_by_itself(client: aio.Client) -> None:
    batch = await client.run_async_map(train, iter([{"config": {}}, {"lr": 0.1}, {"config": {}}]))
    first, second, third = await batch.results(return_exceptions=True)
    assert first == third == ({}, 1)
    assert isinstance(second, errors.SubmissionError)
    assert 'input_mode="single"' in str(second)
    assert list(batch.submission_failures) == [1]


@pytest.mark.parametrize("limit", [0, "4", True, 2.5])
async def test_a_wrong_limit_of_a_client_is_refused_in_words(limit: Any) -> None:
    with pytest.raises(errors.ConfigurationError, match="max_concurrent must be an int of at"):
        aio.Client(max_concurrent=limit)


async def test_a_request_for_several_hosts_warns_that_there_is_one(
    client: aio.Client, caplog: pytest.LogCaptureFixture
) -> None:
    spread = kinetic.run(backend="local", accelerator="cpu:hosts=3")(same)
    assert await client.run(spread, 1) == 1
    [warning] = [record for record in caplog.records if "hosts" in record.getMessage()]
    assert warning.levelname == "WARNING"
    assert "the 3 hosts of cpu:hosts=3 become one process here" in warning.getMessage()


def test_outside_asyncio_an_error_says_so(platform_outside: Platform) -> None:
    client = aio.Client(platform=platform_outside)
    for call in (client.submit(same, 1), client.run_async_map(same, [1]), aio.submit(same, 1)):
        with pytest.raises(errors.PortalError, match="runs on asyncio"):
            call.send(None)


async def test_a_second_cleanup_returns_at_once(platform: Platform) -> None:
    loop = asyncio.get_running_loop()
    async with aio.Client(platform=platform) as client, aio.Client(platform=platform) as other:
        batch = await client.run_async_map(same, [1, 2])
        assert await batch.results() == [1, 2]
        found = await other.attach_batch(batch.group_id)
        await batch.cleanup()
        since = loop.time()
        await batch.cleanup()
        await found.cleanup()
        assert loop.time() - since < 5
        assert await platform.store.list("batches/") == []


CLEANED: list[Callable[[Any], Any]] = [
    lambda batch: batch.results(),
    lambda batch: batch.wait(),
    lambda batch: batch.statuses(),
    lambda batch: batch.status_counts(),
    lambda batch: batch.job(0),
    lambda batch: batch.detach(),
    lambda batch: batch.retry_failed(),
    lambda batch: batch.resume(),
    lambda batch: anext(batch.outcomes()),
    lambda batch: anext(batch.as_completed()),
    lambda batch: anext(batch.progress()),
    lambda batch: batch.jobs[0].result(),
    lambda batch: batch.jobs[0].tail(),
]


async def test_after_cleanup_every_call_says_that_it_was_cleaned_up(client: aio.Client) -> None:
    batch = await client.run_async_map(same, [1, 2])
    await batch.results()
    await batch.cleanup()
    await batch.cancel()
    await batch.submitted()
    for call in CLEANED:
        with pytest.raises(errors.NotFound, match=f"batch {batch.group_id} was cleaned up"):
            await call(batch)


async def test_an_iterator_that_raises_is_named_with_what_to_do(
    client: aio.Client, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> AsyncIterator[int]:
        yield 1
        yield 2
        raise ValueError("my iterator broke")

    batch = await client.run_async_map(same, broken())
    with pytest.raises(ValueError, match="my iterator broke") as caught:
        await batch.results()
    [note] = caught.value.__notes__
    assert f"The iterator of the inputs of {batch.group_id} raised this" in note
    assert "resume(inputs=...)" in note and "resume(seal=True)" in note
    assert "stopped: ValueError: my iterator broke" in caplog.text and note in caplog.text
    await batch.resume(seal=True)
    assert await batch.results() == [1, 2]


async def test_a_batch_that_is_found_knows_how_much_is_stored(platform: Platform) -> None:
    """A caller that provides the remaining inputs can skip the stored ones."""
    async with aio.Client(platform=platform) as client, aio.Client(platform=platform) as other:
        batch = await client.run_async_map(same, [1, 2, 3], name="three")
        await batch.results()
        [found] = await other.list_batches(name="three")
        assert found.stored == 3
        again = await other.attach_batch(batch.group_id)
        assert (again.stored, again.finished) == (3, True)


async def test_an_index_out_of_range_names_the_items(client: aio.Client) -> None:
    batch = await client.run_async_map(same, [1, 2])
    for index in (2, -1):
        for read in (batch.job(index), batch.input(index), batch.retry_failed([index])):
            with pytest.raises(
                errors.NotFound, match=f"no item {index}: it has 2 items, numbered from 0$"
            ):
                await read
    assert await batch.results() == [1, 2]


async def test_an_index_beyond_the_inputs_taken_so_far_says_so(client: aio.Client) -> None:
    gate = asyncio.Event()

    async def inputs() -> AsyncIterator[int]:
        yield 1
        await gate.wait()

    batch = await client.run_async_map(same, inputs())
    assert (await anext(batch.as_completed())).job_id
    with pytest.raises(errors.NotFound, match="no item 3: it has 1 item so far"):
        await batch.input(3)
    gate.set()
    assert await batch.results() == [1]


async def test_cancelling_what_has_ended_keeps_the_logs(client: aio.Client) -> None:
    batch = await client.run_async_map(inverse, [1])
    await batch.wait()
    job = await batch.job(0)
    before = await job.tail()
    await batch.cancel()
    assert await job.tail() == before
    await batch.results()
    with pytest.raises(errors.NotFound, match="cleanup=False"):
        await job.tail()
    with pytest.raises(errors.NotFound, match="cleanup=False"):
        async for _ in job.logs():
            pass


async def test_a_value_is_saved_only_in_a_folder_that_exists(
    client: aio.Client, tmp_path: Path
) -> None:
    job = await client.submit(same, [1, 2])
    with pytest.raises(errors.ConfigurationError, match=r"there is no folder .*nowhere;"):
        await job.save_result(tmp_path / "nowhere" / "value.pkl")
    assert await job.save_result(tmp_path / "value.pkl") > 0
    assert await aio.load_result(tmp_path / "value.pkl") == [1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["value.pkl"]


async def test_what_has_no_log_is_a_runtime_error_as_well(client: aio.Client) -> None:
    batch = await client.run_async_map(inverse, [1])
    await batch.results()
    single = await client.submit(inverse, 1)
    await single.result()  # removes the job
    for job in (await batch.job(0), single):
        with pytest.raises(RuntimeError) as tail:
            await job.tail()
        with pytest.raises(RuntimeError) as logs:
            await anext(aiter(job.logs()))
        assert type(tail.value) is type(logs.value) is errors.NoLog
        assert isinstance(tail.value, errors.NotFound) and job.job_id in str(tail.value)


async def test_a_local_store_that_is_no_directory_is_named_as_it_was_given() -> None:
    async with aio.Client(backend="local", store="http://x") as client:
        with pytest.raises(errors.ConfigurationError, match="not in 'http://x': set KINETIC_STORE"):
            await client.submit(same, 1)


async def test_a_batch_that_failed_fast_counts_the_cancelled_apart(client: aio.Client) -> None:
    batch = await client.run_async_map(
        inverse, [0, 1, 2, 3], max_concurrent=1, fail_fast=True, cancel_running_on_fail=True
    )
    with pytest.raises(errors.BatchError) as caught:
        await batch.results()
    text = str(caught.value)
    assert "1 of 4 jobs failed, 3 were cancelled (fail_fast); the first is item 0: Zero" in text
    assert len(caught.value.failures) == 4


async def for_ever(x: Any) -> None:
    await asyncio.Event().wait()


async def test_what_a_batch_timeout_has_cancelled_names_it(client: aio.Client) -> None:
    batch = await client.run_async_map(for_ever, [1, 2], batch_timeout=5)
    cause = r": of 2 jobs, 2 were cancelled \(batch_timeout=5 s was over"
    with pytest.raises(errors.BatchError, match=cause):
        await batch.results()


async def test_a_timeout_without_end_is_none(client: aio.Client) -> None:
    batch = await client.run_async_map(same, [1], batch_timeout=float("inf"))
    assert batch._batch.manifest["terms"]["batch_timeout"] is None
    assert await batch.results(timeout=float("inf")) == [1]
    bare = kinetic.run(timeout=float("inf"), start_timeout=float("inf"))(same)
    assert (bare.__kinetic__.timeout, bare.__kinetic__.start_timeout) == (None, None)
    assert await (await client.submit(bare, 2)).result(timeout=float("inf")) == 2


async def test_a_resumed_batch_requests_the_same_machines(client: aio.Client) -> None:
    function = kinetic.run(accelerator="v5e-8:hosts=2", spot=True, cpu=3, memory="1Gi")(same)
    batch = await client.run_async_map(function, [1])
    manifest = json.loads(json.dumps(batch._batch.manifest))
    assert manifest["placed"]["resources"] == {
        "accelerator": "tpu-v5litepod-8:hosts=2:spot",
        "cpu": 3,
        "memory_bytes": 1 << 30,
    }
    found = uploaded_call_of(manifest, {}).resources
    assert found.accelerator == function.__kinetic__.parsed_accelerator
    assert (found.cpu, found.memory_bytes) == (3, 1 << 30)
    assert await batch.results() == [1]


async def test_the_reason_of_a_failed_job_has_the_type_of_its_exception(client: aio.Client) -> None:
    job = await client.submit(inverse, 0)
    with pytest.raises(ZeroDivisionError):
        await job.result()
    assert "ZeroDivisionError: division by zero" in await job.reason()


def raise_without_text(x: Any) -> None:
    raise ValueError


async def test_the_reason_of_an_exception_without_text_is_its_type(client: aio.Client) -> None:
    batch = await client.run_async_map(raise_without_text, [1])
    with pytest.raises(errors.BatchError, match=r"item 0: ValueError\. "):
        await batch.results()
    assert (await (await batch.job(0)).reason()).endswith(": ValueError")


async def test_a_handle_is_shown_in_short_with_the_status_seen_last(client: aio.Client) -> None:
    job = await client.submit(same, "<b>")
    assert repr(job).startswith(f"JobHandle({job.job_id!r}, function='same', status='")
    assert await job.result(cleanup=False) == "<b>"
    assert f"status='SUCCEEDED', created_at='{job.created_at}')" in repr(job)
    assert "\n" not in repr(job) and len(repr(job)) < 160
    assert "<td>SUCCEEDED</td>" in job._repr_mimebundle_()["text/html"]


async def test_what_a_notebook_shows_of_a_handle_is_escaped(client: aio.Client) -> None:
    batch = await client.run_async_map(same, [1, 2], name="<script>&\n")
    await batch.wait()
    assert f"BatchHandle({batch.group_id!r}, name=" in repr(batch)
    assert "ended='2 of 2'" in repr(batch)
    shown = batch._repr_mimebundle_()
    assert shown["text/plain"] == repr(batch)
    assert "&lt;script&gt;&amp;" in shown["text/html"]
    assert "<script>" not in shown["text/html"]
    assert '<th scope="col">succeeded</th></tr><tr><td>2</td>' in shown["text/html"]


async def test_showing_a_handle_sends_no_request() -> None:
    platform = memory_platform()
    async with aio.Client(backend="local", platform=platform) as client:
        batch = await client.run_async_map(same, [1, 2])
        job = await client.submit(same, 3)
        await batch.wait()
        await job.result(cleanup=False)
        async with aio.Client(backend="local", platform=platform) as other:
            [listed] = await other.list_batches()
            platform.store.requests.clear()
            shown = [handle._repr_mimebundle_() for handle in (batch, job, listed)]
            assert not platform.store.requests
    assert [bundle["text/plain"] for bundle in shown] == [
        repr(handle) for handle in (batch, job, listed)
    ]
    assert "<caption>Items</caption>" in shown[0]["text/html"]
    assert "<caption>Items</caption>" not in shown[2]["text/html"], "its items are unknown"


async def test_a_batch_says_when_it_was_made_as_its_jobs_do(client: aio.Client) -> None:
    batch = await client.run_async_map(same, [1])
    assert (await batch.job(0)).created_at[:16] == batch.created_at[:16]
    assert batch.created_at.endswith("Z")
    assert (await client.attach_batch(batch.group_id)).created_at == batch.created_at


async def test_the_report_that_was_written_is_linked(
    client: aio.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await client.run_async_map(same, [1])
    await batch.wait()
    await batch.report(tmp_path / 'a "b" & c.html')
    elsewhere = batch._repr_mimebundle_()["text/html"]
    assert (
        f'<a href="{tmp_path.as_uri()}/a%20%22b%22%20%26%20c.html">{tmp_path}/a &quot;b'
        in elsewhere
    )
    monkeypatch.chdir(tmp_path)
    nearby = batch._repr_mimebundle_()["text/html"]
    assert '<a href="a%20%22b%22%20%26%20c.html">a &quot;b&quot; &amp; c.html</a>' in nearby
