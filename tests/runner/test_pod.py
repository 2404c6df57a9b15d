"""Test a pod's first process: orders, exit codes, restarts, timeouts, killed jobs, and logs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from kinetic._runner.protocol import signing, wire
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic._runner.protocol.wire import Kind
from kinetic._runner.protocol.workers import EXIT_SURPLUS
from kinetic._runner.stores.directory import LOG_FILE
from tests import programs
from tests.gcs.server import GcsServer
from tests.runner.calls import KEY, RUNNER, SCOPE
from tests.runner.pods import Pod, Pods, environment_of, until, worker_variables


@pytest.fixture
def in_any_bucket(any_server: str, tmp_path: Path) -> Iterator[Pods]:
    """Return pods over a new folder in a bucket of each storage server."""
    with Pods.over_bucket(tmp_path, any_server, f"gs://kn-test/{uuid.uuid4()}") as pods:
        yield pods


def add(a: int, b: int = 0) -> int:
    return a + b


def fail(message: str) -> None:
    print("about to fail")
    raise ValueError(message)


# --- jobs in a bucket ---------------------------------------------------------------------


def test_arguments_and_values_are_in_the_bucket(in_any_bucket: Pods) -> None:
    pod = in_any_bucket.run(in_any_bucket.order(add, 40, 2))
    assert (pod.code, in_any_bucket.value()) == (wire.EXIT_VALUE, 42), pod.output
    assert in_any_bucket.outcome().executor == "uid-1"
    claim = in_any_bucket.claim_metadata()
    assert abs(float(claim.pop("at")) - time.time()) < 60
    assert claim == {"executor": "uid-1", "worker": "0.life.0.0.0"}


def test_a_job_costs_few_requests(in_bucket: Pods, server: GcsServer) -> None:
    order = in_bucket.order(add, 1)
    server.requests.clear()
    assert in_bucket.run(order).code == 0
    assert server.requests["create"] == 2, "the claim and the outcome"
    # The downloads are the function, its arguments, and between them a request to stop.
    assert server.requests["media"] == 3
    assert server.requests.total() == 5


# --- exit codes, outcomes, and receipts ---------------------------------------------------


def test_a_failure_is_final_with_its_message_and_the_last_lines_of_its_log(pods: Pods) -> None:
    pod = pods.run(pods.order(fail, "no good"))
    assert pod.code == EXIT_SURPLUS
    outcome, error = pods.outcome(), pods.error()
    assert (outcome.kind, outcome.reason) == (Kind.ERROR, "user error")
    assert error["message"] == "no good"
    assert error["log"].startswith("about to fail\n")
    assert "about to fail" in pod.output and "ValueError: no good" in pod.output


def test_a_small_value_is_in_the_receipt_and_no_files_are_left(pods: Pods) -> None:
    pod = pods.run(pods.order(add, 1))
    receipt = pod.receipt
    assert receipt is not None
    assert (receipt.index, receipt.attempt) == (0, 1)
    assert wire.Outcome.verified(receipt.metadata, KEY, SCOPE, 0, 1) == pods.outcome()
    assert receipt.metadata == pods.objects.stat(pods.key("outcome")).metadata
    assert wire.body_of(b"", receipt.metadata) == pods.body()
    assert os.listdir(pod.folder / "tmp") == [], "the pod deletes its working directory"
    assert kept_log(pods) is None, "the function printed nothing"


def test_the_receipt_of_a_larger_value_is_its_header(pods: Pods) -> None:
    pod = pods.run(pods.order(lambda: "x" * 10_000))
    assert pod.receipt is not None and wire.BODY not in pod.receipt.metadata
    assert wire.Outcome.verified(pod.receipt.metadata, KEY, SCOPE, 0, 1).kind is Kind.VALUE


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"KINETIC_ORDER": "{"}, "cannot be run"),
        ({"KINETIC_ORDER": "{}"}, "format None"),
        ({"KINETIC_ORDER": '{"version": 9}'}, "format 9"),
        ({"KINETIC_POD_UID": ""}, "KINETIC_POD_UID"),
        ({"KINETIC_KEY_FILE": "/nowhere/key"}, "/nowhere/key"),
        (worker_variables() | {"KINETIC_HOSTS": "3"}, "KINETIC_COORDINATOR"),
    ],
)
def test_an_order_that_cannot_be_read_is_final(
    pods: Pods, variables: dict[str, str], message: str
) -> None:
    pod = pods.run(pods.order(add, 1), **variables)
    assert pod.code == wire.EXIT_FINAL, "a restart would not help"
    assert message in pod.output
    assert not pods.objects.exists(pods.key("claim"))


def test_a_value_that_cannot_be_stored_is_an_error(pods: Pods) -> None:
    order = pods.order(lambda: b"x" * 10_000_000)
    values = Path(pods.store.removeprefix("file://"), SCOPE, "values")
    values.parent.mkdir(parents=True, exist_ok=True)
    values.touch()  # a file, where a folder is needed
    assert pods.run(order).code == EXIT_SURPLUS
    assert (pods.outcome().kind, pods.outcome().phase) == (Kind.ERROR, "commit")
    assert "the job succeeded, but its result can't be stored" in pods.error()["message"]


def test_variables_and_arguments_of_the_runner_are_hidden_from_the_function(pods: Pods) -> None:
    def list_variables() -> tuple[list[str], str, list[str]]:
        import os
        import sys

        names = [name for name in os.environ if name.startswith("KINETIC_")]
        return sorted(names), os.environ["KINETIC_ATTEMPT"], sys.argv

    order = pods.order(list_variables, budgets=RetryBudgets(user=3))
    pods.close(wire.Outcome(kind=Kind.ERROR, reason="user error"), 1)
    assert pods.run(order, KINETIC_FAILURES="1", KINETIC_JOB_ID="grp-1-0").code == 0
    names, attempt, argv = pods.value(2)
    assert not {"KINETIC_ORDER", "KINETIC_KEY_FILE", "KINETIC_FAILURES"} & set(names)
    assert ("KINETIC_JOB_ID" in names, attempt, argv) == (True, "2", [""])


# --- restarts by Kubernetes ---------------------------------------------------------------


@pytest.mark.parametrize("failures", ["0", "1"], ids=["a duplicate", "a restart"])
def test_the_function_does_not_run_after_a_value(pods: Pods, failures: str) -> None:
    order = pods.order(fail, "it must not run")
    pods.claim("uid-0")
    pods.close(wire.Outcome(kind=Kind.VALUE, executor="uid-0"))
    pod = pods.run(order, KINETIC_FAILURES=failures)
    assert (pod.code, pods.outcome().executor) == (wire.EXIT_VALUE, "uid-0")
    assert "about to fail" not in pod.output


def test_a_duplicate_of_a_voided_attempt_does_not_wait(pods: Pods) -> None:
    pods.claim(wire.VOID)
    assert pods.run(pods.order(add, 1)).code == EXIT_SURPLUS


def test_a_restart_closes_the_attempts_of_disrupted_and_refused_pods(pods: Pods) -> None:
    order = pods.order(add, 1, budgets=RetryBudgets(infrastructure=2))
    pods.claim("uid-0")
    pod = pods.run(order, "uid-2", KINETIC_FAILURES="1", KINETIC_DISRUPTIONS="1")
    assert (pod.code, pods.value(3)) == (0, 1), pod.output
    first, second = pods.outcome(1), pods.outcome(2)
    assert (first.kind, first.executor, first.reason) == (Kind.LOST, "uid-0", "preempted")
    assert (second.kind, second.executor, second.reason) == (Kind.LOST, wire.VOID, "preempted")


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_disruptions_have_a_separate_budget(pods: Pods, budget: int) -> None:
    order = pods.order(add, 1, budgets=RetryBudgets(infrastructure=budget))
    pod = pods.run(order, KINETIC_DISRUPTIONS="2")
    if budget == 2:
        assert (pod.code, pods.value(3)) == (0, 1)
        return
    assert pod.code == EXIT_SURPLUS
    assert not pods.objects.exists(pods.key("claim", budget + 2)), "the job has failed"


def test_a_restart_after_a_stop_starts_nothing(pods: Pods) -> None:
    order = pods.order(add, 1)
    pods.claim("uid-0")
    pods.stop()
    assert pods.run(order, KINETIC_DISRUPTIONS="1").code == EXIT_SURPLUS
    assert pods.outcome(1).kind is Kind.CANCELLED
    assert not pods.objects.exists(pods.key("claim", 2))


# --- signals and timeouts -----------------------------------------------------------------


def stay(fifo: str, mode: str) -> None:
    import signal
    import time

    print("the job runs")
    if mode == "ignore signals":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    try:
        with open(fifo, "w") as pipe:
            pipe.write("ready")
        while True:
            time.sleep(0.05)  # a signal just before a sleep is handled after it
    finally:
        with open(fifo + ".cleaned", "w"):
            pass


def start_staying(pods: Pods, mode: str = "", **changes: Any) -> Pod:
    """Start a pod that runs until it is stopped; return it once its function runs."""
    fifo = pods.folder / "fifo"
    os.mkfifo(fifo)
    pod = pods.start(pods.order(stay, str(fifo), mode, **changes))
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)

    def ready() -> bool:
        with contextlib.suppress(BlockingIOError):
            return os.read(reading, 16) == b"ready"
        return False

    try:
        until(ready, pod)
    finally:
        os.close(reading)
    return pod


def terminate(pod: Pod) -> int:
    """Send SIGTERM and return the exit code."""
    pod.process.send_signal(signal.SIGTERM)
    return pod.wait(30)


def test_sigterm_is_a_preemption_and_lets_the_code_clean_up(pods: Pods) -> None:
    pod = start_staying(pods)
    assert terminate(pod) == wire.EXIT_RETRY
    assert (pods.outcome().kind, pods.outcome().reason) == (Kind.ERROR, "preempted")
    assert (pods.folder / "fifo.cleaned").exists()
    assert (kept_log(pods) or "").startswith("the job runs\n")


def test_sigterm_before_the_claim_ends_a_pod_whose_store_does_not_answer(
    in_bucket: Pods, server: GcsServer
) -> None:
    order = in_bucket.order(add, 1)
    fault = server.fail("create", times=1000, status=503)
    pod = in_bucket.start(order)
    until(lambda: fault.seen, pod)
    assert terminate(pod) == wire.EXIT_RETRY  # without the signal it retries for a minute
    assert "asked to stop" in pod.output
    assert not in_bucket.objects.exists(in_bucket.key("claim"))


def test_sigterm_ends_a_host_that_waits_for_the_first_one(
    in_bucket: Pods, server: GcsServer
) -> None:
    second = {"KINETIC_HOSTS": "2", "KINETIC_HOST": "1", "KINETIC_COORDINATOR": "127.0.0.1:1"}
    second |= worker_variables()
    order = in_bucket.order(add, 1)
    server.requests.clear()
    pod = in_bucket.start(order, **second)
    until(server.requests.total, pod)
    assert terminate(pod) == wire.EXIT_RETRY
    assert "asked to stop" in pod.output


def test_sigterm_after_a_stop_is_a_cancellation(pods: Pods) -> None:
    pod = start_staying(pods)
    pods.stop()
    assert terminate(pod) == EXIT_SURPLUS
    assert pods.outcome().kind is Kind.CANCELLED


def test_a_job_that_ignores_sigterm_is_killed_after_its_grace_period(pods: Pods) -> None:
    pod = start_staying(pods, "ignore signals", grace=1.0)
    start = time.monotonic()
    assert terminate(pod) == wire.EXIT_RETRY
    assert time.monotonic() - start > 0.7
    outcome = pods.outcome()
    assert (outcome.kind, outcome.reason, outcome.phase) == (Kind.ERROR, "preempted", "lost")
    assert "did not end in time" in pods.error()["message"]
    assert pods.error()["log"] == "the job runs\n"
    assert (kept_log(pods) or "").startswith("the job runs\n")


def test_an_installer_gets_requirements_and_constraints_in_files_of_their_own(pods: Pods) -> None:
    uv = pods.folder / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text('#!/bin/sh\nshift 4\necho "$1 $3"\ncat "$2" "$4"\n')
    uv.chmod(0o700)
    body = b"numpy\n# kn:constraints\nsix==1\n"
    digest = hashlib.sha256(body).hexdigest()
    pods.objects.create("requirements.txt", body)
    requirements = wire.Input(name="requirements.txt", start=0, stop=len(body), digest=digest)
    order = pods.order(add, 1, requirements=requirements)
    pod = pods.start(order, PATH=f"{uv.parent}:{os.environ['PATH']}")
    assert pod.wait() == wire.EXIT_VALUE
    assert "--requirement --constraint\nnumpy\nsix==1\n" in pod.output


def test_a_failed_installation_is_an_error_with_its_output(pods: Pods) -> None:
    uv = pods.folder / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text("#!/bin/sh\necho there is no such package\nexit 1\n")
    uv.chmod(0o700)
    pods.objects.create("requirements.txt", b"")
    requirements = wire.Input("requirements.txt", 0, 0, hashlib.sha256(b"").hexdigest())
    order = pods.order(add, 1, requirements=requirements)
    pod = pods.run(order, PATH=f"{uv.parent}:{os.environ['PATH']}")
    assert pod.code == EXIT_SURPLUS and pod.receipt is not None
    assert pods.outcome().phase == "requirements"
    for text in (pods.error()["log"], kept_log(pods)):
        assert "there is no such package" in (text or "")


def test_sigterm_ends_an_installer(pods: Pods) -> None:
    """The installer gets no signal from the node and would run for ten minutes."""
    uv = pods.folder / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text("#!/bin/sh\necho $$ installs\nexec sleep 600\n")
    uv.chmod(0o700)
    digest = hashlib.sha256(b"").hexdigest()
    pods.objects.create("requirements.txt", b"")
    requirements = wire.Input(name="requirements.txt", start=0, stop=0, digest=digest)
    order = pods.order(add, 1, requirements=requirements, grace=120.0)
    pod = pods.start(order, PATH=f"{uv.parent}:{os.environ['PATH']}")
    until(lambda: " installs\n" in pod.output, pod)
    assert terminate(pod) == wire.EXIT_RETRY
    assert not pods.objects.exists(pods.key("claim")), "the next pod closes the attempt"
    (installer,) = re.findall(r"(\d+) installs\n", pod.output)
    assert not Path("/proc", installer).exists()


def test_a_preemption_is_final_once_the_budget_is_used_up(pods: Pods) -> None:
    assert terminate(start_staying(pods, budgets=RetryBudgets(infrastructure=0))) == EXIT_SURPLUS


def test_a_job_that_runs_too_long_times_out(pods: Pods) -> None:
    pod = pods.run(pods.order(time.sleep, 60, timeout=1.5))
    assert pod.code == EXIT_SURPLUS
    assert (pods.outcome().kind, pods.outcome().reason) == (Kind.ERROR, "deadline")
    assert "timeout of 1.5 s" in pods.error()["message"]


@pytest.mark.full
def test_a_job_that_ignores_signals_times_out(pods: Pods) -> None:
    pod = start_staying(pods, "ignore signals", timeout=15.0, grace=1.0)  # enough time to start
    assert pod.wait() == EXIT_SURPLUS
    assert pods.outcome().reason == "deadline"
    assert "did not end when asked to" in pods.error()["message"]


def test_a_committed_value_counts_although_sigterm_follows(pods: Pods) -> None:
    def linger() -> str:
        import atexit
        import time

        atexit.register(time.sleep, 60)
        return "done"

    pod = pods.start(pods.order(linger, timeout=60.0, grace=1.0))
    until(lambda: pods.objects.exists(pods.key("outcome")), pod)
    assert terminate(pod) == 0
    assert pods.value() == "done"


# --- killed jobs, and processes that outlive them -----------------------------------------


def kill(number: int) -> None:
    import os

    print("the last line", flush=True)
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV")]
)
def test_a_killed_job_is_lost_and_its_error_has_the_last_output(
    pods: Pods, number: int, name: str
) -> None:
    pod = pods.run(pods.order(kill, int(number)))
    assert pod.code == EXIT_SURPLUS
    outcome, error = pods.outcome(), pods.error()
    assert (outcome.kind, outcome.reason, outcome.exit_code) == (Kind.LOST, "lost", -number)
    assert name in error["message"] and "the last line" in error["message"]
    assert "the last line" in error["log"]
    assert (kept_log(pods) or "").startswith("the last line")
    assert pod.receipt is not None


def test_a_job_that_calls_os_exit_is_lost(pods: Pods) -> None:
    def exit_at_once() -> None:
        import os

        os._exit(0)

    pod = pods.run(pods.order(exit_at_once))
    assert pod.code == EXIT_SURPLUS
    assert pods.outcome().exit_code == 0
    assert "its process ended with exit code 0" in pods.error()["message"]


def test_a_job_dies_with_its_pod(pods: Pods) -> None:
    def write_pid(fifo: str) -> None:
        import os
        import time

        with open(fifo, "w") as pipe:
            pipe.write(str(os.getpid()))
        time.sleep(60)

    os.mkfifo(pods.folder / "fifo")
    pod = pods.start(pods.order(write_pid, str(pods.folder / "fifo")))
    with open(pods.folder / "fifo") as pipe:
        job = int(pipe.read())
    os.kill(pod.process.pid, signal.SIGKILL)
    pod.wait()
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{job}"):
        assert time.monotonic() < deadline, "the job lives on"
    assert not pods.objects.exists(pods.key("outcome")), "the submitter finds out"


def test_a_process_that_outlives_the_function_does_not_delay_the_pod(pods: Pods) -> None:
    def leave_behind() -> str:
        subprocess.Popen(["sleep", "600"])
        return "done"

    start = time.monotonic()
    pod = pods.run(pods.order(leave_behind))
    assert (pod.code, pods.value()) == (0, "done")
    assert time.monotonic() - start < 60


def test_a_job_whose_output_nobody_reads_times_out(pods: Pods) -> None:
    def shout() -> None:
        while True:
            print("x" * 1000)

    order = pods.order(shout, timeout=1.5, grace=1.0)
    process = Pod.unread(pods, order)
    try:
        deadline = time.monotonic() + 60
        while not pods.objects.exists(pods.key("outcome")):
            assert time.monotonic() < deadline, "no outcome"
        assert pods.outcome().reason == "deadline"
    finally:
        process.stdout.close()
        process.wait()


def test_bytes_of_any_kind_are_passed_on(pods: Pods) -> None:
    def shout() -> None:
        import os

        os.write(1, bytes(range(256)) + b"\n")
        print("\udc80 and ü")

    pod = pods.run(pods.order(shout))
    assert pod.code == 0
    written = pod.log.read_bytes()
    assert bytes(range(256)) in written and "\\udc80 and ü".encode() in written


@pytest.mark.parametrize("writable", [True, False])
def test_a_job_whose_home_is_not_writable_gets_another(pods: Pods, writable: bool) -> None:
    """A user that isn't in the image's ``/etc/passwd`` has ``/`` as home."""

    def write_to_home() -> str:
        import os

        home = os.path.expanduser("~")
        with open(f"{home}/.cached", "w") as file:
            file.write("kept_log")
        return home

    home = str(pods.folder) if writable else "/nonexistent"
    assert pods.run(pods.order(write_to_home), HOME=home).code == 0
    assert (pods.value() == home) == os.path.exists(pods.value()) == writable


def test_two_threads_may_print_at_once(pods: Pods) -> None:
    def print_both() -> None:
        def print_often(word: str) -> None:
            for _ in range(500):
                print(word)

        running = [threading.Thread(target=print_often, args=(word,)) for word in ("left", "right")]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    pod = pods.run(pods.order(print_both))
    assert pod.output.count("left") == pod.output.count("right") == 500


def test_a_library_that_the_image_lacks_is_named_and_final(pods: Pods, tmp_path: Path) -> None:
    order = pods.order(add, 1)
    pods.command = (sys.executable, "-S", "-u", str(RUNNER))
    pod = pods.run(order)
    assert (pod.code, "lacks cloudpickle; install" in pod.output) == (wire.EXIT_FINAL, True)
    (tmp_path / "libraries").mkdir()
    os.symlink(Path(cloudpickle.__file__).parent, tmp_path / "libraries" / "cloudpickle")
    order = replace(order, store="gs://kn-test")
    pod = pods.run(order, PYTHONPATH=str(tmp_path / "libraries"))
    assert pod.code == wire.EXIT_FINAL
    assert "lacks google-cloud-storage; install" in pod.output


# --- kept logs ----------------------------------------------------------------------------


def kept_log(pods: Pods, host: int = 0) -> str | None:
    """Verify and return the kept log of the first attempt, or ``None`` without one."""
    key = wire.log_key(SCOPE, 0, 1, host)
    if not pods.objects.exists(key):
        return None
    content, metadata = pods.objects.get(key)[0], pods.objects.stat(key).metadata
    assert signing.is_signed(metadata, KEY, SCOPE, key, content)
    return content.decode()


def print_to_both(text: str) -> None:
    import sys

    print(text, flush=True)
    print("to stderr", file=sys.stderr)


def test_the_end_of_the_log_is_kept(in_any_bucket: Pods) -> None:
    pod = in_any_bucket.run(in_any_bucket.order(print_to_both, "to stdout"))
    assert kept_log(in_any_bucket) == pod.output == "to stdout\nto stderr\n"


def test_the_last_lines_of_a_long_log_are_kept_and_fewer_are_in_the_error(pods: Pods) -> None:
    def count() -> None:
        for number in range(120_000):
            print(f"line {number}")
        raise RuntimeError

    pod = pods.run(pods.order(count))
    assert pod.output.count("line ") >= 120_000, "the log itself is whole"
    kept = kept_log(pods) or ""
    assert wire.LOG_BYTES - 20 < len(kept) <= wire.LOG_BYTES
    lines = [line for line in kept.splitlines() if line.startswith("line")]
    assert lines == [f"line {119_999 - n}" for n in reversed(range(len(lines)))]
    last = pods.error()["log"].splitlines()
    assert len(last) <= 20
    assert [line for line in last if line.startswith("line")][-1] == "line 119999"


def test_lines_of_stdout_and_stderr_keep_their_order(pods: Pods) -> None:
    """This holds although the container has a pipe for each."""

    def print_numbers() -> None:
        import sys

        for number in range(0, 2000, 2):
            print(number)
            print(number + 1, file=sys.stderr)

    folder = pods.folder / "pod-numbers"
    environment = environment_of(pods, pods.order(print_numbers), "uid", folder, {})
    done = programs.run(*pods.command, env=environment, cwd=folder, timeout=60)
    assert done.stdout.splitlines() == [str(number) for number in range(2000)]


def test_the_error_of_a_failing_store_has_no_traceback(pods: Pods) -> None:
    order = pods.order(add, 1)
    claims = Path(pods.store.removeprefix("file://"), order.scope, LOG_FILE)
    claims.mkdir(parents=True)  # a folder, where a file is needed
    pod = pods.run(order)
    assert pod.code not in (wire.EXIT_VALUE, wire.EXIT_FINAL)
    assert "kinetic: " in pod.output and "Traceback" not in pod.output, pod.output
