"""The process kubelet does with a pod what a kubelet does."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from tests.cluster.fixtures import Namespace
from tests.cluster.orders import FOREVER, Watched, condition, ended, follow_until, pod

STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)"


def waiting(found: dict[str, Any]) -> str:
    """Why the container of a pod waits."""
    states = found["status"].get("containerStatuses") or [{"state": {}}]
    return states[0]["state"].get("waiting", {}).get("reason", "")


def events(namespace: Namespace, name: str) -> dict[str, str]:
    """What has been told about a pod: messages by reason."""
    found = namespace.call("GET", "events", fieldSelector=f"involvedObject.name={name}")
    return {one["reason"]: one["message"] for one in found["items"]}


@pytest.mark.everyday
def test_a_pod_runs_and_its_log_is_read_through_the_api_server(namespace: Namespace) -> None:
    namespace.call("POST", "pods", pod("p", "print('first'); print('second', end='')"))
    found = Watched(namespace, "p").until("Succeeded", "Failed")
    assert (found["status"]["phase"], ended(found)["exitCode"]) == ("Succeeded", 0)
    assert namespace.log("p") == b"first\nsecond"
    assert namespace.log("p", tailLines="1") == b"second"
    stamped = namespace.log("p", timestamps="true").decode().splitlines()
    assert [line.split(" ")[1] for line in stamped] == ["first", "second"]
    whole_seconds = stamped[0][:19] + "Z"  # all that the API server hands on
    assert namespace.log("p", sinceTime=whole_seconds) == b"first\nsecond"
    assert namespace.log("p", sinceTime=whole_seconds.replace("20", "21", 1)) == b""


@pytest.mark.parametrize(
    ("code", "exit_code", "reason", "message"),
    [
        ("print('why'); raise SystemExit(3)", 3, "Error", "why\n"),
        ("import os; os.kill(os.getpid(), 11)", 139, "Error", None),
        (
            "import os; open(os.environ['KINETIC_TERMINATION_LOG'], 'w').write('so'); os._exit(42)",
            42,
            "Error",
            "so",
        ),
    ],
)
def test_how_a_process_ended_is_told(
    namespace: Namespace, code: str, exit_code: int, reason: str, message: str | None
) -> None:
    fallback = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    namespace.call("POST", "pods", pod("p", code, container=fallback))
    found = Watched(namespace, "p").until("Failed")
    told = ended(found)
    assert (told["exitCode"], told["reason"], told.get("message")) == (exit_code, reason, message)


def test_what_a_pod_is_given_is_what_its_spec_says(namespace: Namespace) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}}
    secret["data"] = {"key": base64.b64encode(b"k\xff").decode(), "token": "Z2Vow7Y="}
    code = (
        "import json, os; print(json.dumps([os.environ.get(n) for n in "
        "('HOME_TOO', 'A', 'TOKEN', 'UID_', 'NODE', 'NOTE', 'NOTHING')] + "
        "[open(os.environ['KINETIC_KEY_FILE'], 'rb').read().hex()]))"
    )
    env = [
        {"name": "A", "value": "$$(X) $(Y)"},
        {"name": "HOME_TOO", "value": "<$(A)>"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
        {"name": "UID_", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "NOTE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['a/b']"}}},
        {"name": "NOTHING", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['c']"}}},
    ]
    volume = {
        "name": "key",
        "secret": {"secretName": "s", "items": [{"key": "key", "path": "key"}]},
    }
    mount = {"name": "key", "mountPath": "/var/run/kinetic", "readOnly": True}
    order = pod(
        "p", code, env=env, annotations={"a/b": "ü"}, volumes=[volume],
        container={"volumeMounts": [mount]},
    )  # fmt: skip
    uid = namespace.call("POST", "pods", order)["metadata"]["uid"]
    missing = Watched(namespace, "p")
    missing.when(lambda found: waiting(found) == "ContainerCreating")
    namespace.call("POST", "secrets", secret)
    Watched(namespace, "p").until("Succeeded")
    told = json.loads(namespace.log("p"))
    assert told == ["<$(X) $(Y)>", "$(X) $(Y)", "gehö", uid, "cpu-1", "ü", "", b"k\xff".hex()]


def test_a_pod_may_speak_to_the_api_server_as_its_account(namespace: Namespace) -> None:
    code = """
import os, ssl, urllib.error, urllib.request
folder = os.environ['KINETIC_POD_ACCOUNT_FOLDER']
read = lambda name: open(f'{folder}/{name}').read()
host, port = (os.environ[f'KUBERNETES_SERVICE_{name}'] for name in ('HOST', 'PORT'))
request = urllib.request.Request(
    f'https://{host}:{port}/api/v1/namespaces/{read("namespace")}/pods',
    headers={'Authorization': f'Bearer {read("token")}'},
)
try:
    urllib.request.urlopen(request, context=ssl.create_default_context(cadata=read('ca.crt')))
except urllib.error.HTTPError as refusal:
    print(refusal.code, refusal.read().decode())
"""
    order = pod("p", code, serviceAccountName="kinetic", automountServiceAccountToken=True)
    namespace.call("POST", "pods", order)
    Watched(namespace, "p").until("Succeeded")
    account = f"system:serviceaccount:{namespace.name}:kinetic"
    assert '403 {"kind":"Status"' in namespace.log("p").decode()
    assert account in namespace.log("p").decode()


def test_a_process_that_fails_is_started_again_where_that_is_the_policy(
    namespace: Namespace,
) -> None:
    code = "import os, sys; been = os.path.exists('been'); open('been', 'w'); sys.exit(not been)"
    namespace.call("POST", "pods", pod("p", code, restartPolicy="OnFailure"))
    found = Watched(namespace, "p").until("Succeeded")
    (told,) = found["status"]["containerStatuses"]
    assert told["restartCount"] == 1
    assert told["lastState"]["terminated"]["exitCode"] == 1


def test_a_deleted_pod_has_its_grace_and_is_gone(namespace: Namespace) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(15, lambda *a: (print('asked to end'), sys.exit(7)))\n"
        "print('up')\n"
        "while True: time.sleep(0.1)"  # so that no signal comes too early for it
    )
    namespace.call("POST", "pods", pod("p", code))
    Watched(namespace, "p").until("Running")
    follow_until(namespace, "p", b"up")
    watched = Watched(namespace, "p", since=namespace.call("DELETE", "pods/p"))
    assert ended(watched.until("Failed"))["exitCode"] == 7
    watched.gone()


def test_a_pod_has_no_longer_than_its_deadline(namespace: Namespace) -> None:
    namespace.call("POST", "pods", pod("p", FOREVER, activeDeadlineSeconds=5))
    found = Watched(namespace, "p").until("Failed")
    assert (found["status"]["reason"], ended(found)["exitCode"]) == ("DeadlineExceeded", 143)


def test_memory_beyond_the_limit_ends_a_pod(namespace: Namespace) -> None:
    limits = {"limits": {"memory": "100Mi"}}
    code = "import time; held = [b'x' * 2**20 for _ in range(200)]; time.sleep(600)"
    namespace.call("POST", "pods", pod("p", code, resources=limits))
    told = ended(Watched(namespace, "p").until("Failed"))
    assert (told["exitCode"], told["reason"]) == (137, "OOMKilled")


def test_accelerators_are_counted_by_the_real_scheduler(namespace: Namespace) -> None:
    topology = {"cloud.google.com/gke-tpu-topology": "2x2"}
    namespace.kubelet.add_node("tpu-1", tpu=4, labels=topology)
    chips = {"google.com/tpu": "4"}
    for name in ("one", "two"):
        order = pod(
            name, FOREVER, resources={"limits": chips, "requests": chips}, nodeSelector=topology
        )
        namespace.call("POST", "pods", order)
        if name == "one":  # the scheduler takes them in any order
            Watched(namespace, "one").until("Running")
    waits = Watched(namespace, "two").when(
        lambda one: condition(one, "PodScheduled").get("status") == "False"
    )
    assert "Insufficient google.com/tpu" in condition(waits, "PodScheduled")["message"]
    namespace.call("DELETE", "pods/one", gracePeriodSeconds="1")
    Watched(namespace, "two").until("Running")
