"""Test metrics and pruning with real jobs on this machine, through the sync and async API."""

from __future__ import annotations

import pytest

JOBS = """
@remote
def learns(rate, steps=5):
    for step in range(steps):
        kinetic.report(step, rate * step)
    return rate

@remote
def endless(rate):
    step = 0
    while True:
        kinetic.report(step, {"loss": rate})
        step += 1
        time.sleep(0.005)

@remote
def fails_first(folder):
    attempt = int(os.environ["KINETIC_ATTEMPT"])
    kinetic.report(attempt * 10, 1.0)
    kinetic.report(attempt * 10 + 1, 1.0)
    if attempt == 1:
        raise ValueError("once")
    return attempt

def store():
    return pathlib.Path(os.environ.get("KINETIC_HOME", "~/.kinetic")).expanduser() / "store"

def stored(batch):
    return len(list(store().glob(f"batches/{batch.group_id}/metrics/*")))
"""


def test_metrics_are_read_while_jobs_run_later_and_from_another_process(script) -> None:
    code = f"""{JOBS}
import subprocess
batch = learns.run_async_map([1, 2, 3])
found = sorted(batch.metrics())
print(len(found), found[0], found[-1])

async def main():
    attached = await kinetic.aio.attach_batch(batch.group_id)
    job = await attached.job(1)
    return (
        sorted([metric async for metric in attached.metrics()]),
        [metric async for metric in job.metrics()],
        sorted([metric async for metric in batch.metrics()]),
    )

all_found, of_job, of_sync = asyncio.run(main())
print(all_found == found == of_sync, of_job[1])
print([tuple(metric) for metric in batch.job(1).metrics()] == [tuple(m) for m in of_job])
code = '''import kinetic, sys
print(len(list(kinetic.attach_batch(sys.argv[1]).metrics(timeout=30))))
print(len(list(kinetic.attach(sys.argv[1] + "-2").metrics())))'''
print(subprocess.check_output([sys.executable, "-c", code, batch.group_id], text=True).split())
single = learns.run_async(4, steps=2)
print([tuple(metric) for metric in single.metrics()], single.result())
"""
    script(code).prints(
        "15 Metric(index=0, attempt=1, step=0, value=0.0) "
        "Metric(index=2, attempt=1, step=4, value=12.0)",
        "True JobMetric(attempt=1, step=1, value=2.0)",
        "True",
        "['15', '5']",
        "[(1, 0, 0.0), (1, 1, 4.0)] 4",
    )


def test_a_pruned_item_has_succeeded_with_an_outcome_of_its_own(script) -> None:
    code = f"""{JOBS}
with endless.run_async_map([1, 2], prunable=True, retries=3) as batch:
    left = {{0, 1}}
    for metric in batch.metrics(timeout=60):
        if metric.step >= 3 and metric.index in left:
            left.discard(metric.index)
            batch.prune(metric.index, metric.attempt)
            batch.prune(metric.index)  # once more does no harm
    for index, given, outcome in batch.outcomes(ordered=True):
        match outcome:
            case kinetic.Pruned(step=step, value=value):
                print(index, given, outcome.ok, step >= 3, value)
    print(batch.status_counts(), batch.failures(), batch.reason() == "")
    job = batch.job(0)
    noted = dict(job.noted())
    print(job.status(), job.reason()[:14], noted.pop("step") >= 3, noted)
    for call in (job.result, lambda: job.save_result("value"), outcome.unwrap):
        try:
            call()
        except kinetic.Pruned as pruned:
            print(type(pruned).__name__, pruned.value)
    print(batch.retry_failed(), batch.progress().__next__().pruned)
    batch.prune(0)  # it has ended: nothing happens
    print(stored(batch) > 2)
    values = batch.results()
    print([type(value).__name__ for value in values], stored(batch))
    for read in (batch.metrics, job.metrics, kinetic.attach_batch(batch.group_id).metrics):
        try:
            next(read())
        except kinetic.errors.NotFound as error:
            print("collected" in str(error))
    print([type(completion.outcome).__name__ for completion in batch.outcomes()])
    try:
        batch.job(1).result()
    except kinetic.Pruned:
        print("still pruned")
"""
    script(code).prints(
        "0 1 False True {'loss': 1.0}",
        "1 2 False True {'loss': 2.0}",
        "{'SUCCEEDED': 2} [] True",
        "JobStatus.SUCCEEDED pruned at step True {'value.loss': 1.0}",
        "Pruned {'loss': 1.0}",
        "Pruned {'loss': 1.0}",
        "Pruned {'loss': 2.0}",
        "0 2",
        "True",
        "['Pruned', 'Pruned'] 0",
        "True",
        "True",
        "True",
        "['Pruned', 'Pruned']",
        "still pruned",
    )


def test_a_new_attempt_begins_a_new_curve(script) -> None:
    code = f"""{JOBS}
batch = fails_first.run_async_map([here], retries=1)
print([tuple(metric) for metric in batch.metrics()])
print([tuple(metric) for metric in batch.job(0).metrics()], batch.results(cleanup=False))
print([tuple(metric) for metric in kinetic.attach_batch(batch.group_id).metrics()] != [])
batch.cleanup()
print(stored(batch))
try:
    next(batch.metrics())
except kinetic.errors.NotFound:
    print("cleaned up")
"""
    script(code).prints(
        "[(0, 1, 10, 1.0), (0, 1, 11, 1.0), (0, 2, 20, 1.0), (0, 2, 21, 1.0)]",
        "[(1, 10, 1.0), (1, 11, 1.0), (2, 20, 1.0), (2, 21, 1.0)] [2]",
        "True",
        "0",
        "cleaned up",
    )


def test_a_batch_with_failures_keeps_its_pruned_items(script) -> None:
    code = f"""{JOBS}
@remote
def mixed(kind):
    if kind == "pruned":
        raise kinetic.Pruned(4, 0.5)
    return 1 / kind

batch = mixed.run_async_map(["pruned", 0, 2])
try:
    batch.results()
except kinetic.BatchError as error:
    print([repr(value) for value in error.partial_results], len(error.failures))
print([repr(value) for value in batch.results(return_exceptions=True)])
try:
    mixed("pruned")
except kinetic.Pruned as pruned:
    print(pruned)
"""
    script(code).prints(
        "['Pruned(4, 0.5)', 'None', '0.5'] 1",
        "['Pruned(4, 0.5)', \"ZeroDivisionError('division by zero')\", '0.5']",
        "pruned at step 4, where its value was 0.5",
    )


@pytest.mark.full
def test_waits_for_metrics_end_and_wrong_calls_are_refused(script) -> None:
    code = f"""{JOBS}
with endless.run_async_map([1]) as batch:
    for call in (
        lambda: list(batch.metrics(timeout=0.5)),
        lambda: list(batch.job(0).metrics(timeout=0.5)),
        lambda: batch.prune(0),
        lambda: batch.prune("0"),
        lambda: next(batch.metrics(timeout="soon")),
    ):
        try:
            call()
        except kinetic.KineticError as error:
            print(type(error).__name__)
    print(next(batch.metrics()).step)
with endless.run_async_map([1], prunable=True) as batch:
    try:
        batch.prune(1)
    except kinetic.KineticError as error:
        print(type(error).__name__)
    batch.prune(0, 2)  # no such attempt: nothing happens
    print(next(metric.step for metric in batch.metrics() if metric.step >= 50))
try:
    batch.cleanup()
    batch.prune(0)
except kinetic.KineticError as error:
    print(type(error).__name__)
"""
    script(code).prints(
        "ResultTimeout",
        "ResultTimeout",
        "ConfigurationError",
        "ConfigurationError",
        "ConfigurationError",
        "0",
        "NotFound",
        "50",
        "NotFound",
    )
