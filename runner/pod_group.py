"""The set of pods that a job on several hosts runs in, where nobody else ends it.

The pods of a LeaderWorkerSet are started again whenever they end. So none of
them ends by itself, and the one that leads deletes the set when the function
has ended, whether or not a client lives.
"""

from __future__ import annotations

import http.client
import os
import random
import re
import signal
import ssl
import sys
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["delete", "rest"]

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Kubernetes mounts it; without a container, KINETIC_POD_ACCOUNT_FOLDER says where it is."""

API = "/apis/leaderworkerset.x-k8s.io/v1"
PATIENCE_S = 600.0
TIMEOUT_S = 30.0
ROLE = """\
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: kinetic-runner, namespace: {namespace}}}
rules:
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [delete]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: {account}-runner, namespace: {namespace}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: kinetic-runner}}
subjects: [{{kind: ServiceAccount, name: {account}, namespace: {namespace}}}]"""


def delete(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Delete the LeaderWorkerSet *name* of the pod's own namespace; whether it is going.

    Tries for ten minutes; what cannot be done is said in the log.
    """
    account = Path(environ.get("KINETIC_POD_ACCOUNT_FOLDER", ACCOUNT))
    try:
        namespace = (account / "namespace").read_text().strip()
    except OSError as exc:
        _say(f"cannot delete its own LeaderWorkerSet {name}: no service account is mounted ({exc})")
        return False
    end, pause = time.monotonic() + PATIENCE_S, 1.0
    while True:
        try:
            status, said = _request(name, namespace, environ, account)
        except (OSError, http.client.HTTPException, KeyError) as exc:
            status, said = 0, f"{type(exc).__name__}: {exc}"
        if status in (200, 202, 404):
            return True
        if status == 403:
            role = ROLE.format(namespace=namespace, account=_refused(said))
            words = f"may not delete its own LeaderWorkerSet {name}, which keeps its hosts busy"
            _say(f"{words}; delete it, and let the next one, with\n{role}")
            return False
        if time.monotonic() + pause > end:
            _say(f"cannot delete its own LeaderWorkerSet {name} ({status or said}); delete it")
            return False
        time.sleep(random.uniform(pause / 2, pause))
        pause = min(30.0, pause * 2)


def _request(
    name: str, namespace: str, environ: Mapping[str, str], account: Path
) -> tuple[int, str]:
    trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    api = http.client.HTTPSConnection(host, int(port), timeout=TIMEOUT_S, context=trusted)
    try:
        api.request(
            "DELETE",
            f"{API}/namespaces/{namespace}/leaderworkersets/{name}?propagationPolicy=Background",
            headers={"Authorization": f"Bearer {(account / 'token').read_text().strip()}"},
        )
        answer = api.getresponse()
        return answer.status, answer.read(4096).decode(errors="replace")
    finally:
        api.close()


def _refused(said: str) -> str:
    """The name of the service account that a refusal is about."""
    found = re.search(r"system:serviceaccount:[^:]+:([a-z0-9.-]+)", said)
    return found[1] if found else "kinetic"


def rest() -> None:
    """Do nothing until the pod is asked to end; SIGTERM has to be held back before."""
    signal.sigwait([signal.SIGTERM])


def _say(words: str) -> None:
    print(f"kinetic: this job {words}", file=sys.stderr)
