"""What has died between two tests is there again for the next."""

from __future__ import annotations

import pytest

from tests.cluster.fixtures import Namespace

pytestmark = pytest.mark.timeout(180)


def test_what_has_died_is_started_again(namespace: Namespace) -> None:
    plane, kubelet = namespace.control_plane, namespace.kubelet
    for process in (plane._processes["kube-apiserver"], kubelet._process):
        process.kill()
        process.wait()
    plane.heal()
    kubelet.heal()
    container = {"name": "c", "image": "any", "command": ["python3", "-c", "print('well')"]}
    spec = {"containers": [container], "restartPolicy": "Never"}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
    namespace.call("POST", "pods", body)
    with namespace.stream("pods?watch=true&fieldSelector=metadata.name=p") as lines:
        assert any(b'"phase":"Succeeded"' in line.replace(b" ", b"") for line in lines)
