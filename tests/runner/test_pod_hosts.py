"""Test a job on several hosts: it runs once and has one outcome, whichever host fails."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.job.hosts import Hosts, Watch, host_done
from kinetic._runner.pod.follower import order_name
from kinetic._runner.protocol import frames, signing, wire
from kinetic._runner.protocol.wire import Kind
from kinetic._runner.protocol.workers import EXIT_SURPLUS, WorkerId
from kinetic._runner.stores.directory import DirectoryObjects, Listing
from kinetic.aio._preparing.inputs import EncodedInput
from kinetic.aio._submissions.inputs import chunk_body
from tests.runner.calls import KEY, SCOPE
from tests.runner.pods import Pod, Pods, until, worker_variables

HOSTS = 3


def host_variables(index: int, port: int = 1, count: int = HOSTS) -> dict[str, str]:
    """Return the variables that tell a pod about the hosts of its job."""
    return worker_variables() | {
        "KINETIC_HOSTS": str(count),
        "KINETIC_HOST": str(index),
        "KINETIC_COORDINATOR": f"127.0.0.1:{port}",
    }


def start_hosts(pods: Pods, order: wire.Order, **variables: str) -> list[Pod]:
    """Start all hosts, the first one last, because the others have to wait for it."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"KINETIC_JAX": "0"} | variables
    started = [
        pods.start(order, f"uid-{index}", **{**host_variables(index, port), **variables})
        for index in reversed(range(HOSTS))
    ]
    return started[::-1]


def behave(folder: str, behavior: str) -> str:
    """Run on each host: leave a mark in *folder*, then return, fail, or wait.

    A host fails only after the first host has left its mark. Otherwise the first host might
    find that the attempt has ended and not run the function.
    """
    import os
    import signal

    host = os.environ["KINETIC_HOST"]
    with open(f"{folder}/{host}.{os.getpid()}", "w"):
        pass
    while behavior in ("raise", "die") and not any(
        name.startswith("0.") for name in os.listdir(folder)
    ):
        time.sleep(0.01)
    if host == "2" and behavior == "raise":
        raise LookupError("the third host has nothing")
    if host == "1" and behavior == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if behavior != "value":
        time.sleep(60)
    return f"of host {host}"


def runs(pods: Pods) -> list[str]:
    """Return the hosts that have run the function; one entry per run."""
    return sorted(name.partition(".")[0] for name in os.listdir(pods.folder / "runs"))


def order_of(pods: Pods, behavior: str) -> wire.Order:
    """Return an order that calls `behave`."""
    (pods.folder / "runs").mkdir()
    return pods.order(behave, str(pods.folder / "runs"), behavior)


def take(pods: Pods, order: wire.Order) -> None:
    """Claim the attempt of *order*, and tell the other hosts, as the first host."""
    pods.claim("uid-0")
    name = order_name(order.scope, WorkerId(0, "life", 0))
    content = order.encode().encode()
    pods.objects.create(name, content, {"mac": signing.sign(KEY, order.scope, name, content)})


def test_the_outcome_is_the_value_of_the_first_host(pods: Pods) -> None:
    order = replace(order_of(pods, "value"), timeout=40 * 86400.0)  # more than a poll may wait
    started = start_hosts(pods, order)
    assert [pod.wait() for pod in started] == [0, 0, 0], [pod.output for pod in started]
    assert pods.value() == "of host 0"
    assert pods.outcome().executor == "uid-0"
    assert runs(pods) == ["0", "1", "2"]


def test_the_exception_of_the_host_that_fails_is_the_outcome(pods: Pods) -> None:
    started = start_hosts(pods, order_of(pods, "raise"))
    assert [pod.wait() for pod in started] == [EXIT_SURPLUS, wire.EXIT_FINAL, wire.EXIT_FINAL]
    outcome, error = pods.outcome(), pods.error()
    assert (outcome.kind, outcome.reason, outcome.executor) == (Kind.ERROR, "user error", "uid-0")
    assert (error["qualname"], error["message"]) == ("LookupError", "the third host has nothing")
    assert error["traceback"].startswith("On host 2 of 3:\nTraceback")
    assert "another host has ended this attempt" in started[0].output


def test_the_outcome_waits_for_a_late_host(pods: Pods) -> None:
    order = order_of(pods, "value")
    first = pods.start(order, "uid-0", **host_variables(0, count=2), KINETIC_JAX="0")
    until(lambda: runs(pods) == ["0"], first)
    assert not pods.objects.exists(pods.key("outcome"))
    assert pods.run(order, "uid-1", **host_variables(1, count=2), KINETIC_JAX="0").code == 0
    assert (first.wait(), pods.value(), runs(pods)) == (0, "of host 0", ["0", "1"])


def test_sigterm_ends_a_host_that_waits_for_the_others(pods: Pods) -> None:
    pod = pods.start(
        order_of(pods, "value"), "uid-0", **host_variables(0, count=2), KINETIC_JAX="0"
    )
    until(lambda: runs(pods) == ["0"], pod)
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == wire.EXIT_RETRY
    assert pods.outcome().reason == "preempted"


def test_an_outage_does_not_end_the_wait_for_the_others(tmp_path: Path) -> None:
    class Away(DirectoryObjects):
        def look_up(self, names: Iterable[str]) -> Listing:
            raise TimeoutError("no answer")

    nothing = wire.Input("", 0, 0, "")
    order = wire.Order(
        store="", scope=SCOPE, job_id="", index=0, attempt=1, function=nothing, arguments=nothing
    )
    assert not Watch(order, Away(tmp_path)).all_done(HOSTS)


def test_the_death_of_one_host_is_the_outcome(pods: Pods) -> None:
    started = start_hosts(pods, order_of(pods, "die"))
    assert [pod.wait() for pod in started] == [EXIT_SURPLUS, wire.EXIT_FINAL, wire.EXIT_FINAL]
    assert (pods.outcome().kind, pods.outcome().executor) == (Kind.LOST, "uid-0")
    assert "on host 1 of 3: its process was killed by SIGKILL" in pods.error()["message"]


def test_a_restarted_host_does_not_run_the_function(pods: Pods) -> None:
    order = order_of(pods, "wait")
    take(pods, order)
    pods.objects.create(pods.key("host-1"), b"", {"executor": "uid-1"})
    pod = pods.run(order, "uid-1", **host_variables(1))
    assert pod.code == wire.EXIT_FINAL
    assert "host 1 of 3 ended without an outcome" in pods.error()["message"]
    assert runs(pods) == []


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"JOB_COMPLETION_INDEX": "0"}, None),
        (host_variables(2), Hosts(count=3, index=2, coordinator="127.0.0.1:1")),
        (
            {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "a-0.a.ns"},
            Hosts(count=4, index=0, coordinator="a-0.a.ns:8476"),
        ),
        (
            {"KINETIC_HOSTS": "2", "JOB_COMPLETION_INDEX": "1", "KINETIC_COORDINATOR": "j-0-0.j"},
            Hosts(count=2, index=1, coordinator="j-0-0.j:8476"),
        ),
    ],
)
def test_the_hosts_are_read_from_the_environment(
    environ: dict[str, str], found: Hosts | None
) -> None:
    assert Hosts.of(environ) == found


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_jax_finds_the_hosts(pods: Pods) -> None:
    def gather() -> Any:
        import jax
        from jax.experimental import multihost_utils

        found = multihost_utils.process_allgather(jax.numpy.ones(2))
        return jax.process_count(), jax.process_index(), float(found.sum())

    site_packages = str(Path(importlib.import_module("jax").__file__ or "").parents[1])
    started = start_hosts(
        pods, pods.order(gather), KINETIC_JAX="1", JAX_PLATFORMS="cpu", PYTHONPATH=site_packages
    )
    assert [pod.wait() for pod in started] == [0, 0, 0], [pod.output for pod in started]
    assert pods.value() == (3, 0, 6.0)


# --- a LeaderWorkerSet, which restarts pods that have ended --------------------------------


REFUSAL = (
    'leaderworkersets.leaderworkerset.x-k8s.io "job-1" is forbidden: User '
    '"system:serviceaccount:team:trainer" cannot delete resource "leaderworkersets" in API group '
    '"leaderworkerset.x-k8s.io" in the namespace "team"'
)


class Api(BaseHTTPRequestHandler):
    """An API server that answers only the deletion of a LeaderWorkerSet."""

    requests: list[tuple[str, str, str]]
    answers: list[int]
    port: int

    def do_DELETE(self) -> None:
        self.requests.append((self.path, self.headers["Authorization"], self.command))
        self.rfile.read(int(self.headers["Content-Length"]))
        status = self.answers.pop(0)
        body = {403: json.dumps({"message": REFUSAL})}.get(status, "{}").encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path) -> Iterator[type[Api]]:
    """Run an API server with TLS, and make the service account's files for it."""
    account = tmp_path / "account"
    account.mkdir()
    request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
    subject = "-subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    files = "-keyout key.pem -out account/ca.crt"
    command = f"{request} {subject} {files}".split()
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (account / "token").write_text("of the pod\n")
    (account / "namespace").write_text("team")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(account / "ca.crt", tmp_path / "key.pem")
    Api.requests, Api.answers = [], [200]
    with HTTPServer(("127.0.0.1", 0), Api) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        Api.port = server.server_port
        try:
            yield Api
        finally:
            server.shutdown()
            thread.join()


def leader_variables(pods: Pods, api: Any) -> dict[str, str]:
    """Return the variables of a set's leader, whose other host has ended."""
    pods.objects.create(pods.key(host_done(1)), b"")
    return host_variables(0, count=2) | {
        "KINETIC_JAX": "0",
        "KINETIC_LWS": "job-1",
        "KINETIC_SERVICE_ACCOUNT": "trainer",
        "KINETIC_POD_ACCOUNT_FOLDER": str(pods.folder / "account"),
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(api.port),
    }


def test_the_leader_deletes_its_set_when_the_function_has_ended(pods: Pods, api: Any) -> None:
    api.answers = [500, 200]
    pod = pods.start(order_of(pods, "value"), "uid-0", **leader_variables(pods, api))
    until(lambda: len(api.requests) == 2, pod)
    path = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/team/leaderworkersets/job-1"
    assert api.requests[0] == (
        f"{path}?propagationPolicy=Background",
        "Bearer of the pod",
        "DELETE",
    )
    assert pods.value() == "of host 0"
    assert pod.process.poll() is None, "the set would restart it"
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 0


def test_a_restarted_leader_deletes_its_set_and_does_not_run_the_function(
    pods: Pods, api: Any
) -> None:
    order = order_of(pods, "value")
    take(pods, order)  # by an earlier container of the same pod
    pod = pods.start(order, "uid-0", **leader_variables(pods, api))
    until(lambda: api.requests, pod)
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == EXIT_SURPLUS
    assert (pods.outcome().kind, runs(pods)) == (Kind.LOST, [])


def test_a_leader_that_may_not_delete_its_set_names_the_command_that_grants_it(
    pods: Pods, api: Any
) -> None:
    api.answers = [403]
    pod = pods.start(order_of(pods, "value"), "uid-0", **leader_variables(pods, api))
    until(lambda: "kinetic doctor --manifest" in pod.output, pod)
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 0


# --- a batch, whose items the first host takes ------------------------------------------------


def store_batch(pods: Pods, order: wire.Order, items: int) -> None:
    """Store a batch, whose items are all called like *order*: manifest, inputs, and their end."""
    pods.objects.create(f"{SCOPE}manifest", b"")
    arguments, _ = pods.objects.get(order.arguments.name)
    pods.objects.delete([order.arguments.name])
    encoded = EncodedInput(None, arguments, hashlib.sha256(arguments).hexdigest(), "a")
    chunk = [encoded] * items
    body = chunk_body(chunk, 0, {}, {})
    footer = hashlib.sha256(frames.footer_of(body)).hexdigest()
    slots = wire.Slot(0, items, footer, len(body)), wire.Slot(total=items)
    for number, (slot, content) in enumerate(zip(slots, (body, b""), strict=True)):
        name = wire.input_key(SCOPE, number)
        assert pods.objects.create(name, content, slot.signed(KEY, SCOPE, name))


def test_a_set_takes_one_open_item_of_a_batch_on_all_hosts(pods: Pods) -> None:
    order = order_of(pods, "value")
    store_batch(pods, order, items=2)
    whole = replace(order, arguments=wire.Input("", 0, 0, ""))  # as of a worker
    started = start_hosts(pods, whole, **worker_variables(single=False))
    assert [pod.wait() for pod in started] == [0, 0, 0], [pod.output for pod in started]
    assert (pods.value(), runs(pods)) == ("of host 0", ["0", "1", "2"])
    assert not pods.objects.exists(wire.attempt_key(SCOPE, 1, 1, "claim")), "another set takes it"


def test_a_set_that_finds_no_open_item_ends_on_all_hosts(pods: Pods) -> None:
    order = order_of(pods, "value")
    store_batch(pods, order, items=1)
    pods.claim("uid-of-another-set")
    whole = replace(order, arguments=wire.Input("", 0, 0, ""))  # as of a worker
    started = start_hosts(pods, whole, **worker_variables(single=False))
    assert [pod.wait() for pod in started] == [EXIT_SURPLUS, 0, 0], [it.output for it in started]
    assert runs(pods) == []


def test_a_set_that_is_asked_to_leave_takes_no_item(pods: Pods) -> None:
    order = order_of(pods, "value")
    store_batch(pods, order, items=1)
    name = wire.control_key(SCOPE, 0)
    leave = wire.Request(kind="leave", ranks=(0,))
    pods.objects.create(name, *leave.signed(KEY, SCOPE, name))
    whole = replace(order, arguments=wire.Input("", 0, 0, ""))  # as of a worker
    started = start_hosts(pods, whole, **worker_variables(single=False))
    assert [pod.wait() for pod in started] == [EXIT_SURPLUS, 0, 0], [it.output for it in started]
    assert runs(pods) == []
