"""A job in a pod: the container's first process, which supervises the job's process.

The first process stays small and does what must not depend on the user's code; see `guard.Guard`.
The job runs in a child process, which commits its own outcome. If the child dies before that, the
first process commits a failure.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import pwd
import re
import signal
import ssl
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..job import processes
from ..pauses import pauses
from ..protocol import wire
from ..stores.objects import open_store
from . import job
from .attempt import close_dead, death_of, oom_kills
from .guard import Channel, Guard, Limits, ProcessEnd
from .job import RUNNER_VARIABLES, Pod, read_pod

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Kubernetes mounts the service account; KINETIC_POD_ACCOUNT_FOLDER overrides this path."""

API_PATH = "/apis/leaderworkerset.x-k8s.io/v1"
PATIENCE_S = 600.0
"""How long to retry the deletion of a LeaderWorkerSet, in seconds."""

TIMEOUT_S = 30.0
"""Timeout of one request for the deletion, in seconds."""
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


def delete_worker_set(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Delete the LeaderWorkerSet *name* in the pod's namespace; return whether that worked.

    Retry for ten minutes, and log a failure.
    """
    account = Path(environ.get("KINETIC_POD_ACCOUNT_FOLDER", ACCOUNT))
    try:
        namespace = (account / "namespace").read_text().strip()
    except OSError as exc:
        _log(f"cannot delete its own LeaderWorkerSet {name}: no service account is mounted ({exc})")
        return False
    status, answer = 0, ""
    for pause in pauses(1.0, 30.0, PATIENCE_S):
        try:
            status, answer = _request(name, namespace, environ, account)
        except (OSError, http.client.HTTPException, KeyError) as exc:
            status, answer = 0, f"{type(exc).__name__}: {exc}"
        if status in (200, 202, 404):
            return True
        if status == 403:
            role = ROLE.format(namespace=namespace, account=_refused_account(answer))
            problem = f"may not delete its own LeaderWorkerSet {name}, which keeps its hosts busy"
            _log(f"{problem}; delete it, and let the next one, with\n{role}")
            return False
        time.sleep(pause)
    _log(f"cannot delete its own LeaderWorkerSet {name} ({status or answer}); delete it")
    return False


def _request(
    name: str, namespace: str, environ: Mapping[str, str], account: Path
) -> tuple[int, str]:
    """Ask the API server to delete the LeaderWorkerSet; return the HTTP status and answer."""
    ssl_context = ssl.create_default_context(cafile=str(account / "ca.crt"))
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    connection = http.client.HTTPSConnection(
        host, int(port), timeout=TIMEOUT_S, context=ssl_context
    )
    try:
        connection.request(
            "DELETE",
            f"{API_PATH}/namespaces/{namespace}/leaderworkersets/{name}?propagationPolicy=Background",
            headers={"Authorization": f"Bearer {(account / 'token').read_text().strip()}"},
        )
        answer = connection.getresponse()
        return answer.status, answer.read(4096).decode(errors="replace")
    finally:
        connection.close()


def _refused_account(answer: str) -> str:
    """Return the service account that the API server's *answer* refuses; ``kinetic`` if unclear."""
    found = re.search(r"system:serviceaccount:[^:]+:([a-z0-9.-]+)", answer)
    return found[1] if found else "kinetic"


def wait_for_stop() -> None:
    """Do nothing until the pod is asked to stop; the caller has blocked SIGTERM."""
    signal.sigwait([signal.SIGTERM])


def _log(message: str) -> None:
    print(f"kinetic: this job {message}", file=sys.stderr)


CLAIM_S = 60.0
"""How long, in seconds, the guard of a dead job waits for the claim of the first host."""


def main() -> int:
    """Run the job that the environment describes, and return the exit code."""
    try:
        pod = read_pod(os.environ)
    except (ValueError, OSError) as exc:
        print(f"kinetic: this job cannot be run: {exc}", file=sys.stderr)
        return wire.EXIT_FINAL
    if library := _missing_library(pod.order.store):
        problem = f"its image lacks {library}; install google-cloud-storage into it"
        print(f"kinetic: this job cannot be run: {problem}", file=sys.stderr)
        return wire.EXIT_FINAL
    for name in RUNNER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(pod.order.variables())
    os.environ.setdefault("KINETIC_POD_BEGAN", repr(time.monotonic()))  # see stores.gcs
    folder = tempfile.mkdtemp(prefix="kinetic-run-")
    _provide_user(folder)
    killed_before = oom_kills()
    process_end = _run_in_child(pod, folder)
    code = process_end.reported
    if code is None:
        code = _close_dead_job(pod, process_end, out_of_memory=oom_kills() > killed_before)
    was_restarted = os.path.exists(os.path.join(folder, job.RESTARTED_MARK))
    with contextlib.suppress(OSError):  # the container's end removes large folders
        processes.remove_if_small(folder)
    if pod.group and not process_end.stopped:
        is_first = pod.hosts is None or pod.hosts.is_first
        if is_first and not delete_worker_set(pod.group) and not was_restarted:
            return code  # the container's end makes the client look for the outcome
        wait_for_stop()
    return code


def _provide_user(folder: str) -> None:
    """Set ``HOME`` and ``USER`` if the image lacks them for this user: libraries need a home."""
    if not os.access(os.path.expanduser("~"), os.W_OK):
        os.environ["HOME"] = os.path.join(folder, "home")
        os.mkdir(os.environ["HOME"], 0o700)
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", "kinetic")


def _missing_library(store: str) -> str:
    """Return the name of a missing library that the store needs; empty if it has all."""
    for name in ("requests", "google.auth", "google_crc32c") if store.startswith("gs://") else ():
        try:
            found = importlib.util.find_spec(name)
        except ImportError:  # the parent package is missing
            found = None
        if found is None:
            return name
    return ""


def _close_dead_job(pod: Pod, process_end: ProcessEnd, *, out_of_memory: bool) -> int:
    """Write a failure as the outcome of a job that has left none; return the exit code."""
    order, executor = pod.order, pod.executor
    death = death_of(process_end, order, out_of_memory=out_of_memory)
    if pod.hosts is not None:
        death = replace(death, message=f"on {pod.hosts.name}: {death.message}")
    print(f"kinetic: {death.message}", file=sys.stderr)
    try:
        objects = open_store(order.store)
        if pod.hosts is not None and not pod.hosts.is_first:
            attempt_id = (order.scope, order.index, order.attempt)
            claim = wire.attempt_key(*attempt_id, "claim")
            executor = job.wait_for_claimant(claim, objects, CLAIM_S) or executor
    except (OSError, ValueError) as exc:
        print(f"kinetic: can't write the outcome: {exc}", file=sys.stderr)
        return wire.EXIT_RETRY
    host, receipt = pod.host, pod.restarts.receipt
    return close_dead(order, pod.key, executor, death, process_end, host, receipt, objects)


def _run_in_child(pod: Pod, folder: str) -> ProcessEnd:
    """Run the job in a child process, guard it, and return how it ended."""
    channel, guard_pid = Channel(), os.getpid()
    # Each process unblocks the signals after it has installed its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, processes.STOP_SIGNALS)
    source, sink = os.pipe()  # one pipe for both outputs keeps their order
    pid = os.fork()
    if pid == 0:
        os.close(source)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os.close(sink)
        channel.guard_end.close()
        job.run_job_and_exit(pod, folder, channel, guard_pid)
    os.close(sink)
    channel.job_end.close()
    order = pod.order
    start = wire.start_allowance(order.debug_s)
    limits = Limits(timeout=order.timeout, start=start, grace=order.grace)
    return Guard(pid, {source: 1}, channel, limits).watch()
