"""A Kubernetes cluster, on GKE or anywhere, as the place where jobs run: a Job for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kinetic._tasks import bounded, release
from kinetic.aio._net.retry import growing
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.diagnosis.documents import part
from kinetic.aio.kubernetes.diagnosis.held import refused_request
from kinetic.aio.kubernetes.diagnosis.verdict import Outlook
from kinetic.aio.kubernetes.logs import job_log
from kinetic.aio.kubernetes.manifests import (
    ATTEMPT,
    Paths,
    Placement,
    before,
    by_items,
    by_jobs,
    by_labels,
    job_manifest,
    object_name,
)
from kinetic.aio.kubernetes.port_forward import dialled
from kinetic.aio.kubernetes.secrets import Secrets, submission_secret
from kinetic.aio.kubernetes.tables import Rhythm
from kinetic.aio.kubernetes.watch import Diagnostics, Patience, found, observed, sought
from kinetic.aio.ports import JobSpec, Observation, Phase
from kinetic.errors import AlreadyThere, LaunchError, NotFound, Refused, Throttled, Unavailable

if TYPE_CHECKING:
    from anyio.abc import ByteStream

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
LEAVING_S = 10.0
"""How long after its grace a pod of the attempt before may take to be gone."""

GOING_S = 120.0
"""How long is waited for a Job of this name that is being deleted."""


async def launched(api: Api, paths: Paths, secrets: Secrets, at: Placement, job: JobSpec) -> None:
    """Start *job*; one with this name already there is success, but not one that is going.

    A batch's Secret comes before its first Job. A single job's comes after it,
    because the Job owns it: the pod waits for it in between.

    Raises:
        LaunchError: It was refused.
        Throttled: A quota is used up.
        AuthError: A right is missing.
        Unavailable: The API server does not answer.

    Cancelled: the job may or may not exist; delete it by name.
    """
    if not job.name:
        raise LaunchError("'' is no name for a job", reason="order")
    secret = submission_secret(job)
    manifest = job_manifest(job, replace(at, secret=secret))
    if await _comes_by_itself(api, paths, job):
        return
    await made(api, paths, secrets, job, secret, manifest)


async def made(
    api: Api, paths: Paths, secrets: Secrets, job: JobSpec, secret: str, manifest: dict[str, Any]
) -> None:
    """Make *manifest*, and *secret* for its pods; see `launched`.

    Raises:
        LaunchError: It was refused.
    """
    shared = bool(job.assignment.get("group_id"))
    try:
        if shared:
            await secrets.ensure(job, secret)
        # The submitter of a batch retries by itself, and reports a missing right at once.
        owner, new = await _created(api, paths, manifest, 0.0 if shared else None)
        if not shared:
            async with _undone(api, paths, owner if new else None):
                await secrets.give(job, secret, owner)
    except Refused as exc:
        raise _explained(exc, job.name) from exc


async def _comes_by_itself(api: Api, paths: Paths, job: JobSpec) -> bool:
    """Whether the Job of an earlier attempt makes a pod for this one.

    It does when the platform ended its last one. While that one is on its way
    out this is not decided, and waited for.
    """
    number = job.labels.get(ATTEMPT, "")
    if not number.isdecimal() or int(number) < 2:
        return False
    loop, pauses = asyncio.get_running_loop(), growing(FIRST_PAUSE_S, LONGEST_PAUSE_S, 1.5)
    deadline = loop.time() + job.grace + LEAVING_S
    while True:
        seen = await found(api, paths, by_items([job.name]))
        mine = [one for one in seen if one.name == job.name]
        if mine:
            return True
        if all(one.phase in (Phase.ENDED, Phase.GONE) for one in seen) or loop.time() > deadline:
            return False
        await asyncio.sleep(next(pauses))


@asynccontextmanager
async def _undone(api: Api, paths: Paths, made: dict[str, Any] | None) -> AsyncGenerator[None]:
    """Remove the Job that was just made when it does not get what it needs."""
    try:
        yield
    except BaseException:
        if made is not None:
            options = {
                "propagationPolicy": "Background",
                "preconditions": {"uid": made["metadata"]["uid"]},
            }
            path = f"{paths.jobs}/{made['metadata']['name']}"
            removal = api.call("DELETE", path, body=options)
            await release(removal, what=f"removing {path} after a failure")
        raise


async def _created(
    api: Api, paths: Paths, manifest: dict[str, Any], rights_s: float | None
) -> tuple[dict[str, Any], bool]:
    """The Job, and whether it was made now."""
    name = str(manifest["metadata"]["name"])
    loop, pauses = asyncio.get_running_loop(), growing(FIRST_PAUSE_S, LONGEST_PAUSE_S, 1.5)
    deadline = loop.time() + GOING_S
    while True:
        try:
            return await api.call("POST", paths.jobs, body=manifest, rights_s=rights_s), True
        except AlreadyThere:
            pass
        try:
            there = await api.call("GET", f"{paths.jobs}/{name}")
        except NotFound:
            continue
        if not part(there, "metadata").get("deletionTimestamp"):
            return there, False
        if loop.time() > deadline:
            raise Unavailable(
                f"Job {name} is being deleted for more than {GOING_S:g} s, so none can be made in "
                "its place; see what holds it (its finalizers)",
                retryable=True,
            )
        await asyncio.sleep(next(pauses))


def _explained(refused: Refused, name: str) -> Exception:
    """What the server said, in the user's words: a quota may have room, a policy may change."""
    found = refused_request(refused.answer)
    words = f"{name} was refused: {found.text}" if refused.answer else str(refused)
    if found.outlook is Outlook.OPEN:
        return Throttled(words, retryable=True)
    return LaunchError(
        words,
        reason=found.reason.value if found.reason is not None else "",
        passing=found.outlook is Outlook.BLOCKED,
    )


AT_ONCE = 16
"""Requests that one call of the port makes at a time."""

MOST_ATTEMPTS = 100
"""What ends with a larger number than this is not taken for the name of a later attempt."""


class GkeCluster:
    """`kinetic.aio.ports.Cluster` on one namespace of the cluster that *api* speaks to.

    *at* is where and how jobs are placed: its namespace, if it names one, else
    the one of *api*; its Secret is chosen for each submission. Nothing is asked
    before the first call. Closing it closes *api*; jobs go on.

    A job is retried by whoever submitted it. Kubernetes itself only replaces a
    pod that it disrupted.
    """

    def __init__(
        self,
        api: Api,
        at: Placement | None = None,
        *,
        patience: Patience | None = None,
        rhythm: Rhythm | None = None,
    ) -> None:
        placement = at or Placement(namespace="")
        namespace = placement.namespace or api.default_namespace
        self._api = api
        self._at = replace(placement, namespace=namespace)
        self._paths = Paths(namespace)
        self._secrets = Secrets(api, self._paths)
        self._inquiry = Diagnostics(api, self._paths, patience or Patience())
        self._rhythm = rhythm or Rhythm()

    async def launch(self, job: JobSpec) -> None:
        """Start *job*; one with this name already there is success.

        Two requests that write, for a job of a batch one.

        Raises:
            LaunchError: It was refused, in the API server's words.
            Throttled: A quota is used up now.
            AuthError: A right is missing.
            Unavailable: The API server does not answer.

        Cancelled: the job may or may not exist; delete it by name.
        """
        await launched(self._api, self._paths, self._secrets, self._at, job)

    async def delete(
        self, *, names: Collection[str] = (), labels: Mapping[str, str] | None = None
    ) -> None:
        """Stop and forget jobs by name, or all that carry *labels*; their pods get their grace."""
        for name in names if len(names) == 1 else ():
            await self._delete_one(name)
        if len(names) > 1:
            await bounded(self._delete_all, by_jobs(names), at_once=AT_ONCE)
            await bounded(self._delete_around, names, at_once=AT_ONCE)
        if labels is not None:
            await self._delete_all(by_labels(labels))

    async def _delete_one(self, name: str) -> None:
        query = {"propagationPolicy": "Background"}
        try:
            await self._api.call("DELETE", f"{self._paths.jobs}/{object_name(name)}", query=query)
        except NotFound:
            await self._delete_around(name)

    async def _delete_around(self, name: str) -> None:
        """A later attempt may be a pod in an earlier one's Job."""
        _, _, number = name.rpartition("-")
        if number.isdecimal() and 1 < int(number) <= MOST_ATTEMPTS:
            await self._delete_all(before(name, int(number)))

    async def _delete_all(self, selector: str) -> None:
        query = {"labelSelector": selector, "propagationPolicy": "Background"}
        await self._api.call("DELETE", self._paths.jobs, query=query)

    async def find(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        explained: bool = False,
    ) -> list[Observation]:
        """A consistent read; without *names* and *labels*, everything of kinetic's.

        A job that is deleted is there until no pod of it can run any more. *explained*
        asks as well why jobs wait, of the first few.
        """
        inquiry = self._inquiry if explained else None
        return await sought(self._api, self._paths, names, labels, inquiry=inquiry)

    async def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        """What is there now, then every change, for ever; reconnects by itself.

        A job that does not start is explained in the log. One that can never
        start, or waits for longer than its ``start_timeout``, is ended: by
        whoever watches it.

        Raises:
            BackendError: It may not be read.
        """
        news = observed(self._api, self._paths, by_labels(labels), self._inquiry, self._rhythm)
        async with aclosing(news) as told:
            async for seen in told:
                yield seen

    async def logs(
        self, name: str, *, follow: bool = False, tail: int | None = None
    ) -> AsyncGenerator[str]:
        """Lines of the job's output; see `kinetic.aio.kubernetes.logs.job_log`.

        Raises:
            NotFound: There is no such job, or its log is gone.
        """
        lines = job_log(self._api, self._paths, name, self._rhythm, follow=follow, tail=tail)
        async with aclosing(lines) as told:
            async for line in told:
                yield line

    async def dial(self, name: str, port: int, *, host: int = 0) -> ByteStream:
        """A connection to *port* of the pod's loopback, by way of the API server.

        Raises:
            NotFound: No pod of the job is running.
            AuthError: A right is missing.
            Unavailable: The API server does not answer.
        """
        return await dialled(self._api, self._paths, name, port, host)

    async def root_key(self) -> bytes:
        """The namespace's secret, in a Secret of its own; made on first use, 32 bytes.

        Raises:
            ConfigurationError: The Secret holds something else.
        """
        return await self._secrets.root_key()

    async def keep_secret(self, name: str, content: bytes) -> None:
        """Keep *content* in a Secret, in place of what was there.

        Raises:
            ConfigurationError: It is larger than a Secret may be.
        """
        await self._secrets.keep(name, content)

    async def secret(self, name: str) -> bytes:
        """What `keep_secret` has kept.

        Raises:
            NotFound: Nothing is kept under this name.
        """
        return await self._secrets.kept(name)

    async def drop_secret(self, names: Collection[str]) -> None:
        """Keep these no longer, nor what the pods of these batches read."""
        await self._secrets.drop(names)

    async def finish(self, name: str, fence: int) -> None:
        """Remove the Secret that the pods of a batch read."""
        await self._secrets.finish(name, fence)

    async def aclose(self) -> None:
        """Close the connections; jobs go on."""
        await self._secrets.aclose()
        await self._api.aclose()
