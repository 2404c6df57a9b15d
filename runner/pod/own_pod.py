"""Requests about this pod to the API server, with the token of the pod's service account."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..job_log import say
from ..pauses import pauses

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Kubernetes mounts the service account; KINETIC_POD_ACCOUNT_FOLDER overrides this path."""

SETS = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/{namespace}/leaderworkersets"
JOBS = "/apis/batch/v1/namespaces/{namespace}/jobs"
PODS = "/api/v1/namespaces/{namespace}/pods"

WAIT_S = 5.0
"""How long the end of a pod may wait for the answer that says which containers the pod has."""

GRACE_S = 1
"""The grace of a pod whose program has ended. The node may report that end only after the grace."""


def delete_worker_set(name: str) -> bool:
    """Delete the LeaderWorkerSet *name* in the pod's namespace; return whether that worked.

    Retry for ten minutes, and log a failure.
    """
    status, answer = _delete(f"{SETS}/{name}?propagationPolicy=Background", {}, 600.0)
    if status in (200, 202, 404):
        return True
    if status == 403:
        problem = f"may not delete its own LeaderWorkerSet {name}, which keeps its hosts busy"
        say(f"this job {problem}; delete it, and apply the Roles of `kinetic doctor --manifest`")
    else:
        say(
            f"this job cannot delete its own LeaderWorkerSet {name} ({status or answer}); delete it"
        )
    return False


class OwnPod:
    """This pod, which containers of others may keep on its node after the program's end.

    A thread finds out which containers the pod has, while the program runs. The dry run of the
    pod's deletion returns the pod, and takes only the right to delete. Without that right, this
    class does nothing, and a client ends the pod.
    """

    def __init__(self, uid: str, name: str) -> None:
        self._uid = uid
        self._name = name
        self._document: Mapping[str, Any] = {}
        self._thread = threading.Thread(target=self._look, name="kinetic pod", daemon=True)
        if name:
            self._thread.start()

    def _look(self) -> None:
        body = {"dryRun": ["All"], "preconditions": {"uid": self._uid}}
        status, answer = _delete(f"{PODS}/{self._name}", body, 600.0)
        if status in (200, 202):
            with contextlib.suppress(ValueError):
                self._document = json.loads(answer)

    def remove(self, *, whole: bool) -> None:
        """Delete this pod, and if *whole* its Job, if the pod has containers of others.

        After a success, Kubernetes would replace the pod: its other containers fail when they are
        stopped.
        """
        if self._name:
            self._thread.join(WAIT_S)
        if len(self._document.get("spec", {}).get("containers", ())) < 2:
            return
        for owner in self._document["metadata"].get("ownerReferences", ()) if whole else ():
            body = {"preconditions": {"uid": owner["uid"]}, "propagationPolicy": "Background"}
            _delete(f"{JOBS}/{owner['name']}", body, WAIT_S)
        options = {"preconditions": {"uid": self._uid}, "gracePeriodSeconds": GRACE_S}
        _delete(f"{PODS}/{self._name}", options, WAIT_S)


def _delete(path: str, options: Mapping[str, Any], total_s: float) -> tuple[int, str]:
    """Send a DELETE with *options*; return the HTTP status, 0 for none, and the answer.

    Retry for *total_s* what may be temporary.
    """
    status, answer = 0, ""
    for pause in pauses(1.0, 30.0, total_s=total_s):
        try:
            status, answer = _request(path, options)
        except FileNotFoundError:
            return 0, "the pod has no token"
        except (OSError, http.client.HTTPException, KeyError) as exc:
            status, answer = 0, f"{type(exc).__name__}: {exc}"
        if status in (200, 202, 403, 404, 409):
            break
        time.sleep(pause)
    return status, answer


def _request(path: str, options: Mapping[str, Any]) -> tuple[int, str]:
    account = Path(os.environ.get("KINETIC_POD_ACCOUNT_FOLDER", ACCOUNT))
    namespace = (account / "namespace").read_text().strip()
    connection = http.client.HTTPSConnection(
        os.environ["KUBERNETES_SERVICE_HOST"],
        int(os.environ.get("KUBERNETES_SERVICE_PORT", "443")),
        timeout=30.0,
        context=ssl.create_default_context(cafile=str(account / "ca.crt")),
    )
    token = (account / "token").read_text().strip()
    try:
        connection.request(
            "DELETE",
            path.format(namespace=namespace),
            body=json.dumps(options),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()
