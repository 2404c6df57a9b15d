"""A Kubernetes cluster, on GKE or anywhere, as the place where jobs run: a Job for each."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from kinetic.aio._release import bounded
from kinetic.aio.clusters._api import Api
from kinetic.aio.clusters._forward import dialled
from kinetic.aio.clusters._job_manifest import Placement
from kinetic.aio.clusters._kube_inquiry import Inquiry, Patience
from kinetic.aio.clusters._kube_launch import launched
from kinetic.aio.clusters._kube_logs import job_log
from kinetic.aio.clusters._kube_paths import Paths, before, by_jobs, by_labels
from kinetic.aio.clusters._kube_reflect import Rhythm
from kinetic.aio.clusters._kube_secrets import Secrets
from kinetic.aio.clusters._kube_watch import observed, sought
from kinetic.aio.clusters._names import object_name
from kinetic.aio.ports import JobSpec, Observation
from kinetic.errors import NotFound

if TYPE_CHECKING:
    from anyio.abc import ByteStream

__all__ = ["GkeCluster"]

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
        placement = at or Placement(namespace="", restarts=0)
        namespace = placement.namespace or api.default_namespace
        self._api = api
        self._at = replace(placement, namespace=namespace)
        self._paths = Paths(namespace)
        self._secrets = Secrets(api, self._paths)
        self._inquiry = Inquiry(api, self._paths, patience or Patience())
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
        self, *, names: Collection[str] = (), labels: Mapping[str, str] | None = None
    ) -> list[Observation]:
        """A consistent read; without *names* and *labels*, everything of kinetic's.

        A job that is deleted is there until no pod of it can run any more.
        """
        return await sought(self._api, self._paths, names, labels)

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
        """Lines of the job's output; see `kinetic.aio.clusters._kube_logs.job_log`.

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
