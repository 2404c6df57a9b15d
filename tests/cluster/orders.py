"""Pods and jobs as the harness's own tests order them, and a way to wait for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from tests.cluster.fixtures import Namespace

Json = dict[str, Any]
WAIT_S = 60.0


def pod(name: str, code: str, *, grace: int = 5, **spec: Any) -> Json:
    """A pod that runs Python *code*; *spec* are more fields of its one container or itself."""
    container = {
        "name": "main",
        "image": "example.org/python:1",
        "command": ["python3", "-u", "-c", code],
    }
    container |= {key: spec.pop(key) for key in ("env", "resources", "command") if key in spec}
    container |= spec.pop("container", {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": spec.pop("annotations", {})},
        "spec": {
            "restartPolicy": "Never",
            "serviceAccountName": "kinetic",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": grace,
            "containers": [container],
            **spec,
        },
    }


def job(name: str, template: Json, **spec: Any) -> Json:
    """An Indexed Job of one, of pods like *template*."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": 1,
            "parallelism": 1,
            "podReplacementPolicy": "Failed",
            "template": {"metadata": template["metadata"] | {"name": ""}, "spec": template["spec"]},
            **spec,
        },
    }


class Watched:
    """Objects by name or label, watched until one is as it should be.

    *kind* is their place below the namespace, as `Namespace.call` takes it. *since* is an answer
    of the server's: what has happened after it is seen, and nothing that was before.
    """

    def __init__(
        self,
        namespace: Namespace,
        name: str = "",
        kind: str = "pods",
        *,
        label: str = "",
        since: Json | None = None,
    ) -> None:
        self._namespace = namespace
        self._kind = kind
        self._query = {"watch": "1", "timeoutSeconds": f"{WAIT_S:.0f}", "labelSelector": label}
        if name:
            self._query["fieldSelector"] = f"metadata.name={name}"
        if since is not None:
            self._query["resourceVersion"] = since["metadata"]["resourceVersion"]

    def until(self, *phases: str) -> Json:
        """Its object, once it is in one of the *phases*."""
        return self.when(lambda found: found["status"].get("phase") in phases)

    def gone(self) -> None:
        """Return once it is deleted."""
        self._first(lambda event: event["type"] == "DELETED")

    def when(self, right: Callable[[Json], Any]) -> Json:
        """Its object, once *right* says so.

        Raises:
            AssertionError: Not within `WAIT_S`; with the last that was seen.
        """
        return self._first(lambda event: right(event["object"]))

    def _first(self, right: Callable[[Json], Any]) -> Json:
        last: Json = {}
        with self._namespace.stream(f"{self._kind}?{urlencode(self._query)}") as events:
            for line in events:
                event = json.loads(line)
                last = event["object"]
                if right(event):
                    return last
        raise AssertionError(f"{self._query} after {WAIT_S:g} s: {json.dumps(last, indent=1)}")


FOREVER = "import time; print('up'); time.sleep(600)"


def ended(found: dict[str, Any]) -> dict[str, Any]:
    """How the container of a pod ended."""
    return found["status"]["containerStatuses"][0]["state"]["terminated"]


def condition(found: dict[str, Any], kind: str) -> dict[str, Any]:
    """A condition of a pod, by its type; a new pod has none yet."""
    conditions = found["status"].get("conditions") or ()
    return next((one for one in conditions if one["type"] == kind), {})


def follow_until(namespace: Namespace, name: str, mark: bytes) -> bytes:
    """Read a pod's log as it comes, once there is one, until *mark* is in it."""
    Watched(namespace, name).until("Running", "Failed", "Succeeded")
    read = b""
    with namespace.stream(f"pods/{name}/log?follow=true") as lines:
        for line in lines:
            read += line
            if mark in read:
                return read
    raise AssertionError(f"{mark!r} is not in {read!r}")
