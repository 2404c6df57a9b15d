"""A job on several hosts: one value, one outcome whichever host fails, and it runs once."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.pod import job
from kinetic._runner.pod.job import Hosts
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.wire import Kind
from tests.runner.pods import Pod, Pods, until

HOSTS = 3


def of(index: int, port: int = 1, count: int = HOSTS) -> dict[str, str]:
    """What a pod is told of the hosts."""
    where = f"127.0.0.1:{port}"
    return {"KINETIC_HOSTS": str(count), "KINETIC_HOST": str(index), "KINETIC_COORDINATOR": where}


def start(pods: Pods, order: wire.Order, **own: str) -> list[Pod]:
    """All hosts, the first one last: the others have to wait for it."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"KINETIC_JAX": "0"} | own
    started = [
        pods.start(order, f"uid-{index}", **of(index, port), **own)
        for index in reversed(range(HOSTS))
    ]
    return started[::-1]


def play(folder: str, part: str) -> str:
    """On each host: leave a mark; the second and third then do their part.

    They fail when the first one runs: it could be too late to begin otherwise.
    """
    import os
    import signal

    host = os.environ["KINETIC_HOST"]
    with open(f"{folder}/{host}.{os.getpid()}", "w"):
        pass
    while part in ("raise", "die") and not any(one[0] == "0" for one in os.listdir(folder)):
        time.sleep(0.01)
    if host == "2" and part == "raise":
        raise LookupError("the third host has nothing")
    if host == "1" and part == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if part != "value":
        time.sleep(60)
    return f"of host {host}"


def ran(pods: Pods) -> list[str]:
    """Which hosts have run the function, each as often as it has."""
    return sorted(name.partition(".")[0] for name in os.listdir(pods.folder / "ran"))


def played(pods: Pods, part: str) -> wire.Order:
    (pods.folder / "ran").mkdir()
    return pods.order(play, str(pods.folder / "ran"), part)


def test_the_value_is_that_of_the_first_host(pods: Pods) -> None:
    started = start(pods, played(pods, "value"))
    assert [pod.wait() for pod in started] == [0, 0, 0], [pod.output for pod in started]
    assert pods.value() == "of host 0"
    assert pods.outcome().executor == "uid-0"
    assert ran(pods) == ["0", "1", "2"]


def test_the_exception_of_the_host_that_fails_is_the_outcome(pods: Pods) -> None:
    started = start(pods, played(pods, "raise"))
    assert [pod.wait() for pod in started] == [wire.EXIT_FINAL] * 3
    outcome, words = pods.outcome(), pods.error()
    assert (outcome.kind, outcome.reason, outcome.executor) == (Kind.ERROR, "user error", "uid-0")
    assert (words["qualname"], words["message"]) == ("LookupError", "the third host has nothing")
    assert words["traceback"].startswith("On host 2 of 3:\nTraceback")
    assert "another host has ended this attempt" in started[0].output


def test_a_host_that_is_late_is_waited_for(pods: Pods) -> None:
    order = played(pods, "value")
    first = pods.start(order, "uid-0", **of(0, count=2), KINETIC_JAX="0")
    until(lambda: ran(pods) == ["0"], first)
    assert not pods.objects.exists(pods.name("outcome"))
    assert pods.run(order, "uid-1", **of(1, count=2), KINETIC_JAX="0").code == 0
    assert (first.wait(), pods.value(), ran(pods)) == (0, "of host 0", ["0", "1"])


def test_a_value_that_waits_for_other_hosts_may_be_stopped(pods: Pods) -> None:
    pod = pods.start(played(pods, "value"), "uid-0", **of(0, count=2), KINETIC_JAX="0")
    until(lambda: ran(pods) == ["0"], pod)
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == wire.EXIT_RETRY
    assert pods.outcome().reason == "preempted"


def test_the_death_of_one_host_is_the_outcome(pods: Pods) -> None:
    started = start(pods, played(pods, "die"))
    assert [pod.wait() for pod in started] == [wire.EXIT_FINAL] * 3
    assert (pods.outcome().kind, pods.outcome().executor) == (Kind.LOST, "uid-0")
    assert "on host 1 of 3: the job's process was killed by SIGKILL" in pods.error()["message"]


def test_a_host_that_is_started_again_runs_nothing(pods: Pods) -> None:
    order = played(pods, "wait")
    pods.claim("uid-0")
    pods.objects.create(pods.name("host-1"), b"", {"executor": "uid-1"})
    pod = pods.run(order, "uid-1", **of(1))
    assert pod.code == wire.EXIT_FINAL
    assert "host 1 of 3 ended without an outcome" in pods.error()["message"]
    assert ran(pods) == []


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"JOB_COMPLETION_INDEX": "0"}, None),
        (of(2), Hosts(count=3, index=2, coordinator="127.0.0.1:1")),
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
def test_hosts_are_told_by_the_environment(environ: dict[str, str], found: Hosts | None) -> None:
    assert Hosts.of(environ) == found


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_jax_finds_the_hosts(pods: Pods) -> None:
    def together() -> Any:
        import jax
        from jax.experimental import multihost_utils

        found = multihost_utils.process_allgather(jax.numpy.ones(2))
        return jax.process_count(), jax.process_index(), float(found.sum())

    place = str(Path(importlib.import_module("jax").__file__ or "").parents[1])
    started = start(
        pods, pods.order(together), KINETIC_JAX="1", JAX_PLATFORMS="cpu", PYTHONPATH=place
    )
    assert [pod.wait() for pod in started] == [0, 0, 0], [pod.output for pod in started]
    assert pods.value() == (3, 0, 6.0)


# --- a set that would start its pods again ------------------------------------------------


REFUSAL = (
    'leaderworkersets.leaderworkerset.x-k8s.io "job-1" is forbidden: User '
    '"system:serviceaccount:team:trainer" cannot delete resource "leaderworkersets" in API group '
    '"leaderworkerset.x-k8s.io" in the namespace "team"'
)


class Api(BaseHTTPRequestHandler):
    """As much of an API server as the deletion of a set takes."""

    seen: list[tuple[str, str, str]]
    answers: list[int]
    port: int

    def do_DELETE(self) -> None:
        self.seen.append((self.path, self.headers["Authorization"], self.command))
        status = self.answers.pop(0)
        said = {403: json.dumps({"message": REFUSAL})}.get(status, "{}").encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path) -> Iterator[type[Api]]:
    """An API server with a certificate, and the service account that knows it."""
    account = tmp_path / "account"
    account.mkdir()
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
    about = "-subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    files = "-keyout key.pem -out account/ca.crt"
    command = f"{made} {about} {files}".split()
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (account / "token").write_text("of the pod\n")
    (account / "namespace").write_text("team")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(account / "ca.crt", tmp_path / "key.pem")
    Api.seen, Api.answers = [], [200]
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


def grouped(pods: Pods, api: Any) -> dict[str, str]:
    pods.objects.create(pods.name(job.host_done(1)), b"")  # the other host has ended
    return of(0, count=2) | {
        "KINETIC_JAX": "0",
        "KINETIC_LWS": "job-1",
        "KINETIC_SERVICE_ACCOUNT": "trainer",  # says a client in the pod; the mount has its name
        "KINETIC_POD_ACCOUNT_FOLDER": str(pods.folder / "account"),
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(api.port),
    }


def test_the_leader_deletes_its_set_when_the_function_has_ended(pods: Pods, api: Any) -> None:
    api.answers = [500, 200]
    pod = pods.start(played(pods, "value"), "uid-0", **grouped(pods, api))
    until(lambda: len(api.seen) == 2, pod)
    path = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/team/leaderworkersets/job-1"
    assert api.seen[0] == (f"{path}?propagationPolicy=Background", "Bearer of the pod", "DELETE")
    assert pods.value() == "of host 0"
    assert pod.process.poll() is None, "it would be started again"
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 0


def test_a_leader_that_is_started_again_runs_nothing_and_deletes_its_set(
    pods: Pods, api: Any
) -> None:
    order = played(pods, "value")
    pods.claim("uid-0")  # the container is another, the pod may be the same
    pod = pods.start(order, "uid-0", **grouped(pods, api))
    until(lambda: api.seen, pod)
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == wire.EXIT_FINAL
    assert (pods.outcome().kind, ran(pods)) == (Kind.LOST, [])


def test_a_leader_that_may_not_delete_its_set_says_with_which_role_it_may(
    pods: Pods, api: Any
) -> None:
    api.answers = [403]
    pod = pods.start(played(pods, "value"), "uid-0", **grouped(pods, api))
    subjects = "subjects: [{kind: ServiceAccount, name: trainer, namespace: team}]"
    until(lambda: subjects in pod.output, pod)
    assert "verbs: [delete]" in pod.output
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 0
