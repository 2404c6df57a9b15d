"""The control plane ends, comes back and forgets on order; pods do not mind."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.fixtures import Namespace
from tests.cluster.orders import Json, Watched, follow_until, pod
from tests.cluster.rest import Refused

WAITS = """
import pathlib, time
print('up')
while not pathlib.Path('go').exists(): time.sleep(0.02)
print('went')
"""


def test_a_user_without_rights_is_refused(control_plane: ControlPlane) -> None:
    with pytest.raises(Refused, match=r'403: .*User "dev" cannot list'):
        control_plane.account("dev").call("GET", "/api/v1/namespaces/default/pods")


def test_a_pod_outlives_the_api_server_and_its_end_is_told_after(namespace: Namespace) -> None:
    plane = namespace.control_plane
    uid = namespace.call("POST", "pods", pod("p", WAITS))["metadata"]["uid"]
    follow_until(namespace, "p", b"up")
    page = two_secrets(namespace)
    plane.kill_api()
    with pytest.raises(OSError, match="refused"):
        plane.call("GET", "/readyz")
    (namespace.kubelet.work(uid) / "go").touch()
    plane.compact()
    plane.start_api()
    Watched(namespace, "p").until("Succeeded")
    assert namespace.log("p") == b"up\nwent\n"
    forgotten(namespace, page)


def two_secrets(namespace: Namespace) -> Json:
    """The first page of a list of two, whose second is deleted meanwhile."""
    for name in ("a", "b"):
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
        namespace.call("POST", "secrets", body)
    page: Json = namespace.call("GET", "secrets", limit="1")["metadata"]
    namespace.call("DELETE", "secrets/b")
    return page


def forgotten(namespace: Namespace, page: Json) -> None:
    """To go on from *page*, with a list or a watch, is refused with 410."""
    with pytest.raises(Refused) as refusal:
        namespace.call("GET", "secrets", limit="1", **{"continue": page["continue"]})
    assert refusal.value.code == 410
    with namespace.stream(f"secrets?watch=1&resourceVersion={page['resourceVersion']}") as events:
        assert json.loads(next(iter(events)))["object"]["code"] == 410


def test_requests_of_a_user_are_counted(namespace: Namespace) -> None:
    plane = namespace.control_plane
    admin, path = plane.account("admin"), f"/api/v1/namespaces/{namespace.name}"
    for name in ("a", "b"):
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
        admin.call("POST", f"{path}/secrets", body)
    admin.call("GET", f"{path}/secrets/a")
    namespace.call("GET", "secrets")
    assert plane.requests(namespace.name) == {"create secrets": 2, "get secrets": 1}


def test_a_token_can_be_taken_back(namespace: Namespace) -> None:
    plane = namespace.control_plane
    before = plane.account("admin")
    plane.expire_token("admin")
    with pytest.raises(Refused, match="401"):
        before.call("GET", "/api/v1/namespaces/default")
    plane.account("admin").call("GET", "/api/v1/namespaces/default")
    assert plane.account("admin").token in plane.kubeconfig.read_text()
    namespace.call("POST", "pods", pod("p", "print('the others go on')"))
    Watched(namespace, "p").until("Succeeded")


def test_a_frozen_api_server_keeps_the_line_and_says_nothing(namespace: Namespace) -> None:
    plane = namespace.control_plane
    with plane.frozen_api():
        with pytest.raises((TimeoutError, urllib.error.URLError)):
            plane.account().read("GET", "/readyz", timeout_s=0.3)
    until = time.monotonic() + 60
    while True:  # that it stood still may be noticed there, too
        with contextlib.suppress(Refused):
            assert plane.call("GET", "/readyz")["text"] == "ok"
            break
        assert time.monotonic() < until
