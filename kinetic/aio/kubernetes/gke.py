"""Run jobs on a Kubernetes cluster, on GKE or elsewhere, as Kubernetes Jobs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kinetic._runner.protocol import wire
from kinetic._tasks import release
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.compute_classes import find_class
from kinetic.aio.kubernetes.diagnosis.admission import refused_request
from kinetic.aio.kubernetes.diagnosis.causes import Outlook
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, get_dict, get_list
from kinetic.aio.kubernetes.diagnosis.facts import Pod
from kinetic.aio.kubernetes.logs import item_log, job_log
from kinetic.aio.kubernetes.manifests import (
    Paths,
    Placement,
    by_items,
    by_job,
    by_labels,
    job_manifest,
    object_name,
)
from kinetic.aio.kubernetes.observations import cause_of_end
from kinetic.aio.kubernetes.pending import Diagnostics, Patience
from kinetic.aio.kubernetes.port_forward import dial_pod
from kinetic.aio.kubernetes.reflector import Bell, Namespace, Rhythm
from kinetic.aio.kubernetes.rounds import extension, growth, round_manifest, size_of
from kinetic.aio.kubernetes.secrets import Secrets, submission_secret
from kinetic.aio.kubernetes.tables import Table
from kinetic.aio.kubernetes.watch import find_jobs, watch_jobs, with_items
from kinetic.aio.ports import ItemOutput, JobSpec, Observation
from kinetic.errors import AlreadyThere, Conflict, LaunchError, NotFound, Refused, Throttled

if TYPE_CHECKING:
    from anyio.abc import ByteStream


async def create_job(
    api: Api, paths: Paths, secrets: Secrets, job: JobSpec, manifest: dict[str, Any]
) -> dict[str, Any] | None:
    """Create *manifest*, and the Secret that its pods read; return the Job if it existed before.

    For a batch, kinetic creates the Secret before the first Job. For a single job, it creates the
    Secret after the Job, which owns the Secret; the pod waits for the Secret.

    Raises:
        LaunchError: The API server refuses the Job or its Secret.
    """
    if not job.name:
        raise LaunchError("a job's name can't be empty", reason="order")
    is_shared, secret = job.order.group_id is not None, submission_secret(job)
    try:
        if is_shared:
            await secrets.ensure_for_batch(job, secret)
        found: dict[str, Any] | None = None
        try:
            created = await api.call("POST", paths.jobs, body=manifest, metadata_only=True)
            owner = {**manifest, "metadata": get_dict(created, "metadata")}
        except AlreadyThere:
            name = manifest["metadata"]["name"]
            owner = found = await api.call("GET", f"{paths.jobs}/{name}")
        if not is_shared:
            try:
                await secrets.create_for_job(job, secret, owner)
            except BaseException:
                if found is None:  # else the Job's pod would wait for the Secret
                    path = f"{paths.jobs}/{owner['metadata']['name']}"
                    options = {
                        "propagationPolicy": "Background",
                        "preconditions": {"uid": owner["metadata"]["uid"]},
                    }
                    removal = api.call("DELETE", path, body=options)
                    await release(removal, operation=f"removing {path} after a failure")
                raise
    except Refused as exc:
        raise _as_backend_error(exc, job.name) from exc
    return found


def _as_backend_error(refused: Refused, name: str) -> Exception:
    """Return the error for a refusal: an exceeded quota is temporary, a policy isn't."""
    cause = refused_request(refused.answer)
    message = f"{name} was refused: {cause.text}" if refused.answer else str(refused)
    if cause.outlook is Outlook.OPEN:
        return Throttled(message, retryable=True)
    passing = cause.outlook is Outlook.BLOCKED
    return LaunchError(message, reason=str(cause.reason or ""), passing=passing)


class GkeCluster:
    """`kinetic.aio.ports.Cluster` on one namespace of the cluster that *api* connects to.

    *placement* says where and how to place jobs. Creating the object sends no request. Closing the
    cluster closes *api*; jobs keep running.

    Workers run all jobs. Kubernetes replaces the pod of a single job only if it disrupted that pod.
    With *use_compute_classes*, jobs use the ComputeClass for their accelerator, if the cluster has
    such a class.
    """

    shows_items = False
    replaces = True

    def __init__(
        self,
        api: Api,
        placement: Placement,
        *,
        use_compute_classes: bool = False,
        patience: Patience | None = None,
        rhythm: Rhythm | None = None,
    ) -> None:
        self._api = api
        self._placement = placement
        self._paths = Paths(placement.namespace)
        self._secrets = secrets = Secrets(api, self._paths)
        self.root_key, self.keep_secret, self.secret = secrets.root_key, secrets.keep, secrets.kept
        self._use_classes = use_compute_classes
        self._diagnostics = Diagnostics(api, self._paths, patience or Patience())
        self._namespace = Namespace(api, self._paths, rhythm or Rhythm(), Bell())

    async def launch(self, job: JobSpec) -> None:
        """Start *job* by two writing requests: for the Job and its Secret; see `Cluster.launch`.

        Raises:
            Throttled: A quota is exceeded.
        """
        manifest = job_manifest(job, await self._placement_of(job))
        await create_job(self._api, self._paths, self._secrets, job, manifest)

    async def drop_secret(self, names: Collection[str]) -> None:
        """Drop the secrets of these names; see `Cluster.drop_secret`."""
        await self._secrets.drop(names)
        await self._end_mixed_rounds(names)

    async def finish(self, name: str, fence: int) -> None:
        """Drop what pods of a batch need, because all its jobs have ended; see `Cluster.finish`."""
        await self._secrets.finish(name, fence)
        await self._end_mixed_rounds([name])

    async def _end_mixed_rounds(self, names: Collection[str]) -> None:
        """Delete the rounds of ended batches whose pods other containers might keep running.

        This client may close before the workers end, and they may lack the right to delete.
        """
        prefixes = tuple(f"{object_name(name)}-r" for name in names)
        over = {name for name in self._diagnostics.mixed_rounds if name.startswith(prefixes)}
        self._diagnostics.mixed_rounds -= over
        await self.delete(names=over)

    # --- workers (`kinetic.aio.ports.Workers`) ---

    async def scale(self, job: JobSpec, *, number: int, ranks: range) -> int:
        """Start the workers of a round, which is one Job, or more of them; see `Workers.scale`."""
        placement, workers = await self._placement_of(job), ranks.stop
        manifest = round_manifest(job, number=number, workers=workers, placement=placement)
        found = await create_job(self._api, self._paths, self._secrets, job, manifest)
        if found is None:
            return workers
        with contextlib.suppress(NotFound):  # another process has just deleted the Job
            return await self._grow(found, workers)
        return 0

    async def grow(self, name: str, workers: int) -> int:
        """Start more workers of a round that has some; see `Workers.grow`."""
        with contextlib.suppress(NotFound):
            found = await self._api.call("GET", f"{self._paths.jobs}/{object_name(name)}")
            return await self._grow(found, workers)
        return 0

    async def _grow(self, job: Document, workers: int) -> int:
        """Give the round of *job* so many workers, if it has fewer; return how many it has."""
        path = f"{self._paths.jobs}/{get_dict(job, 'metadata')['name']}"
        while True:
            size = 0 if cause_of_end(job) is not None else size_of(job)
            if not size:
                await self._refuse_unfit(job)
                return 0
            # In a queue, a change of the number would suspend all workers.
            if size >= workers or self._placement.queue:
                return size
            try:
                await self._api.call("PATCH", path, body=growth(job, workers))
            except Conflict:
                job = await self._api.call("GET", path)
            else:
                return workers

    async def _refuse_unfit(self, job: Document) -> None:
        """Raise LaunchError if the round of *job* is over because its workers can't start."""
        if (cause := cause_of_end(job)) is not None:
            raise LaunchError(cause.summary, reason=str(cause.reason or ""))
        if condition(job, "Failed") is None and condition(job, "FailureTarget") is None:
            return
        name = str(get_dict(job, "metadata")["name"])
        query = {"labelSelector": by_job(name), "limit": "1"}
        pods = get_list(await self._api.call("GET", self._paths.pods, query=query), "items")
        for end in (Pod(pod).end for pod in pods):
            if end.get("exitCode") == wire.EXIT_FINAL:  # the image can't run a worker
                lines = str(end.get("message") or "").strip().splitlines()
                why = lines[-1] if lines else f"exit code {wire.EXIT_FINAL}"
                raise LaunchError(f"the workers of {name} can't run: {why}", reason="setup")

    async def extend(self, name: str, seconds: float) -> None:
        """Let a round continue for *seconds* from now; see `Workers.extend`."""
        path = f"{self._paths.jobs}/{object_name(name)}"
        with contextlib.suppress(NotFound):
            if change := extension(await self._api.call("GET", path), seconds):
                await self._api.call("PATCH", path, body=change)

    async def tell(self, labels: Mapping[str, str]) -> None:
        """Do nothing: the workers look at the store by themselves."""

    def item_log(
        self, place: ItemOutput, *, follow: bool = False, tail: int | None = None
    ) -> AsyncGenerator[str]:
        """Yield what a running item has written; see `Workers.item_log`."""
        return item_log(self._namespace, place, follow=follow, tail=tail)

    async def _placement_of(self, job: JobSpec) -> Placement:
        placement = replace(self._placement, secret=submission_secret(job))
        if not self._use_classes:
            return placement
        name = await find_class(self._api, job.resources.accelerator)
        return replace(placement, compute_class=name)

    async def delete(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        keep_logs: bool = False,
    ) -> None:
        """Delete jobs by name, or all that carry *labels*; their pods get their grace period.

        A log ends with its pod, so *keep_logs* has no effect; the pod stores the last MiB before.
        """
        selectors = [by_items(names)] if names else []
        selectors += [by_labels(labels)] if labels is not None else []
        for selector in selectors:
            query = {"labelSelector": selector, "propagationPolicy": "Background"}
            await self._api.call("DELETE", self._paths.jobs, query=query)

    async def find(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        explained: bool = False,
    ) -> list[Observation]:
        """Read the state of jobs; see `Cluster.find`. A deleted one stays while a pod may run."""
        diagnostics = self._diagnostics if explained else None
        return await find_jobs(self._namespace, names, labels, diagnostics)

    def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        """Yield the current state, then every change; see `Cluster.watch`.

        It follows the logs of at most 100 workers, which say what they run. kinetic's log explains
        why a job doesn't start. The watch ends a job that can never start, or that waits longer
        than its ``start_timeout``.
        """
        jobs = watch_jobs(self._namespace, by_labels(labels), self._diagnostics, Table())
        return with_items(self._namespace, jobs)

    def logs(
        self, name: str, *, follow: bool = False, tail: int | None = None
    ) -> AsyncGenerator[str]:
        """Yield lines of the job's output; see `Cluster.logs`."""
        return job_log(partial(self._namespace_of, name), name, follow=follow, tail=tail)

    async def _namespace_of(self, name: str) -> Namespace:
        """Return where to read the objects of the attempt *name*."""
        del name
        return self._namespace

    async def dial(self, name: str, port: int, *, host: int = 0) -> ByteStream:
        """Connect to *port* of the pod's loopback through the API server; see `Cluster.dial`."""
        return await dial_pod(self._api, self._paths, name, port, host)

    async def aclose(self) -> None:
        """Close the connections; jobs keep running."""
        await self._secrets.aclose()
        await self._api.aclose()
