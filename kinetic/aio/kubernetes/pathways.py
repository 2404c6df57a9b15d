"""Run jobs on several hosts of a Kubernetes cluster: each worker is a set of pods."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

from absl import logging

from kinetic._tasks import for_each
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.gke import GkeCluster, create_job
from kinetic.aio.kubernetes.logs import merge_streams
from kinetic.aio.kubernetes.manifests import Paths, Placement, by_labels
from kinetic.aio.kubernetes.multihost import GroupTable
from kinetic.aio.kubernetes.pending import Diagnostics, Patience
from kinetic.aio.kubernetes.reflector import Namespace, Rhythm
from kinetic.aio.kubernetes.secrets import MAX_CONCURRENT_REQUESTS, submission_secret
from kinetic.aio.kubernetes.sets import KINDS, Kind, name_of_set
from kinetic.aio.kubernetes.watch import find_jobs, watch_jobs
from kinetic.aio.ports import ItemOutput, JobSpec, Observation
from kinetic.errors import AuthError, LaunchError, NotFound


class _Sets:
    """The sets of one kind in a namespace; a set has the pods that run a job on several hosts."""

    def __init__(self, namespace: Namespace, kind: Kind, patience: Patience) -> None:
        self.kind = kind
        self.paths = paths = Paths(namespace.paths.namespace)
        paths.jobs = f"/apis/{kind.api}/namespaces/{paths.namespace}/{kind.collection}"
        self.namespace = replace(namespace, paths=paths)
        self.diagnostics = Diagnostics(
            namespace.api, paths, patience, stop=kind.stop, makers=kind.makers
        )

    def table(self) -> GroupTable:
        """Return an empty table that evaluates sets of this kind."""
        return GroupTable(self.kind.label)

    def path(self, name: str) -> str:
        """Return the API path of the set that runs the attempt *name*."""
        return f"{self.paths.jobs}/{name_of_set(name)}"


class PathwaysCluster(GkeCluster):
    """`kinetic.aio.ports.Cluster` on one namespace, with a set of pods for each worker.

    *kind*, a key of `KINDS`, is the kind of set for new workers; see `GkeCluster` for the other
    arguments. The cluster object also finds, watches, and deletes sets of the other kinds, if the
    cluster supports them. Kubernetes restarts nothing: each worker runs one item at most.
    """

    replaces = False

    def __init__(
        self,
        api: Api,
        placement: Placement,
        *,
        kind: str = "lws",
        patience: Patience | None = None,
        rhythm: Rhythm | None = None,
    ) -> None:
        super().__init__(api, placement, patience=patience, rhythm=rhythm)
        sets_by_name = {
            name: _Sets(self._namespace, set_kind, patience or Patience())
            for name, set_kind in KINDS.items()
        }
        self._own_sets = sets_by_name.pop(kind)
        self._candidates = tuple(sets_by_name.values())
        self._other_sets: Sequence[_Sets] | None = None

    async def launch(self, job: JobSpec) -> None:
        """Start *job* as a set; see `Cluster.launch`."""
        await self._create(job, None)

    async def scale(self, job: JobSpec, *, number: int, ranks: range) -> int:
        """Start a set for each rank; see `Workers.scale`."""
        await for_each(lambda rank: self._create(job, rank), ranks, limit=MAX_CONCURRENT_REQUESTS)
        return ranks.stop

    async def grow(self, name: str, workers: int) -> int:
        """Start nothing: only the process that submits the batch can start sets."""
        return workers

    async def extend(self, name: str, seconds: float) -> None:
        """Do nothing: a set has no deadline."""

    def item_log(
        self, place: ItemOutput, *, follow: bool = False, tail: int | None = None
    ) -> AsyncGenerator[str]:
        """Yield what the hosts of a set have written: it runs no other item."""
        return self.logs(place.worker, follow=follow, tail=tail)

    async def _create(self, job: JobSpec, rank: int | None) -> None:
        placement = replace(self._placement, secret=submission_secret(job))
        kind = self._own_sets.kind
        manifest = kind.manifest(job, placement, life=secrets.token_hex(8), rank=rank)
        try:
            await create_job(self._api, self._own_sets.paths, self._secrets, job, manifest)
        except NotFound as exc:
            raise LaunchError(
                f"{job.name} was refused, because {self._api.cluster} has no {kind.collection} in "
                f"namespace {self._placement.namespace}: {exc}; have {kind.name} installed in the "
                f"cluster ({kind.home}), or set KINETIC_MULTIHOST to another kind of set "
                f"({' or '.join(KINDS)})",
                reason="refused",
            ) from exc

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
        kinds = await self._kinds()
        query = {"propagationPolicy": "Background"}

        async def delete(name: str) -> None:
            for sets in kinds:
                with suppress(NotFound):
                    await self._api.call("DELETE", sets.path(name), query=query)
                    return

        await for_each(delete, names, limit=MAX_CONCURRENT_REQUESTS)
        if labels is not None:
            query["labelSelector"] = by_labels(labels)
            for sets in kinds:
                with suppress(NotFound):  # the cluster lacks the definition of this kind of set
                    await self._api.call("DELETE", sets.paths.jobs, query=query)

    async def _kinds(self) -> Sequence[_Sets]:
        """Return the kind of set for new jobs, and the other kinds that exist and are readable."""
        if self._other_sets is None:
            self._other_sets = [sets for sets in self._candidates if await self._is_supported(sets)]
        return [self._own_sets, *self._other_sets]

    async def _is_supported(self, sets: _Sets) -> bool:
        """Return whether the cluster has this kind of set, and these credentials may read it."""
        try:
            await self._api.call("GET", sets.paths.jobs, query={"limit": "1"})
        except NotFound:
            return False
        except AuthError as exc:
            logging.info("kinetic ignores %s: %s", sets.kind.collection, exc)
            return False
        return True

    async def find(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        explained: bool = False,
    ) -> list[Observation]:
        """Read the state of jobs, of one kind of set after the other; see `GkeCluster.find`."""
        found: list[Observation] = []
        for sets in await self._kinds():
            diagnostics = sets.diagnostics if explained else None
            with suppress(NotFound):  # the cluster lacks the definition of this kind of set
                found += await find_jobs(sets.namespace, names, labels, diagnostics, sets.table)
        return found

    async def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        """Yield the current state, then every change; see `Cluster.watch`."""
        selector = by_labels(labels)
        own_sets, *others = await self._kinds()
        # The watch of a kind that the cluster lacks fails, and with it the merged stream.
        kinds = [own_sets, *others] if not others or await self._is_supported(own_sets) else others
        streams = [watch_jobs(it.namespace, selector, it.diagnostics, it.table()) for it in kinds]
        async with aclosing(merge_streams(streams)) as observations:
            async for observation in observations:
                yield observation

    async def _namespace_of(self, name: str) -> Namespace:
        """Return where to read the kind of set that runs the attempt *name*."""
        kinds = await self._kinds()
        for sets in kinds if len(kinds) > 1 else ():
            with suppress(NotFound):
                await self._api.call("GET", sets.path(name))
                return sets.namespace
        return self._own_sets.namespace
