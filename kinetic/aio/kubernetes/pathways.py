"""Run jobs on several hosts of a Kubernetes cluster: a set of pods for each attempt."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from absl import logging

from kinetic._tasks import bounded
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.gke import AT_ONCE, GkeCluster, made
from kinetic.aio.kubernetes.logs import merged
from kinetic.aio.kubernetes.manifests import Paths, Placement, by_labels
from kinetic.aio.kubernetes.multihost import (
    HOST,
    LIFE,
    GroupTable,
    group_name,
    jobset_manifest,
    lws_manifest,
)
from kinetic.aio.kubernetes.pending import Diagnostics, Patience
from kinetic.aio.kubernetes.reflector import Rhythm
from kinetic.aio.kubernetes.secrets import submission_secret
from kinetic.aio.kubernetes.watch import observed, sought
from kinetic.aio.ports import JobSpec, Observation
from kinetic.errors import AuthError, LaunchError, NotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of sets: where the API server keeps them, and how to make or stop one.

    ``stop`` is the change to a set's spec that ends its pods and keeps the set.
    ``label`` is a label that only this kind's controller puts on pods.
    ``makers`` gives kind and name of the objects that make the pods of a set, by the set's name.
    """

    name: str
    label: str
    api: str
    collection: str
    manifest: Callable[[JobSpec, Placement], dict[str, Any]]
    stop: Mapping[str, Any]
    makers: Callable[[str], Sequence[tuple[str, str]]]
    home: str


KINDS: Mapping[str, Kind] = {
    "lws": Kind(
        name="LeaderWorkerSet",
        label="leaderworkerset.sigs.k8s.io/name",
        api="leaderworkerset.x-k8s.io/v1",
        collection="leaderworkersets",
        manifest=lws_manifest,
        stop={"replicas": 0},
        makers=lambda name: (
            ("LeaderWorkerSet", name),
            ("StatefulSet", name),
            ("StatefulSet", f"{name}-0"),
        ),
        home="https://lws.sigs.k8s.io",
    ),
    "jobset": Kind(
        name="JobSet",
        label="jobset.sigs.k8s.io/jobset-name",
        api="jobset.x-k8s.io/v1alpha2",
        collection="jobsets",
        manifest=jobset_manifest,
        stop={"suspend": True},
        makers=lambda name: (("JobSet", name), ("Job", f"{name}-{HOST}-0")),
        home="https://jobset.sigs.k8s.io",
    ),
}
"""The kinds, by their names in ``KINETIC_MULTIHOST``."""


class _Sets:
    """The sets of one kind in a namespace."""

    def __init__(self, api: Api, kind: Kind, namespace: str, patience: Patience) -> None:
        self.kind = kind
        self.paths = Paths(namespace)
        self.paths.jobs = f"/apis/{kind.api}/namespaces/{namespace}/{kind.collection}"
        self.inquiry = Diagnostics(api, self.paths, patience, stop=kind.stop, makers=kind.makers)

    def table(self, *, hints: bool = True) -> GroupTable:
        """Return an empty table."""
        return GroupTable(label=self.kind.label, hints=hints, makers=self.kind.makers)

    def path(self, name: str) -> str:
        """Return where the set of the attempt *name* is."""
        return f"{self.paths.jobs}/{group_name(name)}"


class PathwaysCluster(GkeCluster):
    """`kinetic.aio.ports.Cluster` on one namespace, with a set of pods for each job.

    *kind* names the one of `KINDS` that new jobs get; the rest is as for `GkeCluster`. Sets
    of the other kinds, where the cluster has them, are found, watched, and deleted alike.
    Kubernetes starts nothing again: each attempt is a set of its own.
    """

    def __init__(
        self,
        api: Api,
        at: Placement | None = None,
        *,
        kind: str = "lws",
        patience: Patience | None = None,
        rhythm: Rhythm | None = None,
    ) -> None:
        super().__init__(api, at, patience=patience, rhythm=rhythm)
        self._kind = KINDS[kind]
        every = {
            name: _Sets(api, one, self._at.namespace, patience or Patience())
            for name, one in KINDS.items()
        }
        self._own = every.pop(kind)
        self._candidates = [*every.values()]
        self._others: Sequence[_Sets] | None = None

    async def launch(self, job: JobSpec) -> None:
        """Start *job*; a set of this name that exists already is success.

        Raises:
            LaunchError: The API server refuses it, or the cluster has no such kind of sets.
            Throttled: A quota is used up.
            AuthError: A right is missing.
            Unavailable: The API server does not answer.

        Cancelled: the job may or may not exist; delete it by name.
        """
        if not job.name:
            raise LaunchError("'' is no name for a job", reason="order")
        secret = submission_secret(job)
        own = {**self._at.annotations, LIFE: secrets.token_hex(8)}
        manifest = self._kind.manifest(job, replace(self._at, secret=secret, annotations=own))
        try:
            await made(self._api, self._own.paths, self._secrets, job, secret, manifest)
        except NotFound as exc:
            kind, where = self._kind, f"namespace {self._at.namespace} of {self._api.cluster}"
            raise LaunchError(
                f"{job.name} was refused, there are no {kind.collection} in {where}: {exc}; have "
                f"{kind.name} installed in the cluster ({kind.home}), or choose the other kind of "
                f"sets with KINETIC_MULTIHOST ({' or '.join(KINDS)})",
                reason="refused",
            ) from exc

    async def delete(
        self, *, names: Collection[str] = (), labels: Mapping[str, str] | None = None
    ) -> None:
        """Delete jobs by name, or all that carry *labels*; their pods get their grace period."""
        kinds = await self._kinds()
        query = {"propagationPolicy": "Background"}

        async def delete(name: str) -> None:
            for sets in kinds:
                with suppress(NotFound):
                    await self._api.call("DELETE", sets.path(name), query=query)
                    return

        await bounded(delete, names, at_once=AT_ONCE)
        if labels is not None:
            query["labelSelector"] = by_labels(labels)
            for sets in kinds:
                with suppress(NotFound):  # the cluster lacks its own kind of sets
                    await self._api.call("DELETE", sets.paths.jobs, query=query)

    async def _kinds(self) -> Sequence[_Sets]:
        """Return its own kind of sets, and the other kinds that the cluster has and lets it see."""
        if self._others is None:
            self._others = [one for one in self._candidates if await self._has(one)]
        return [self._own, *self._others]

    async def _has(self, sets: _Sets) -> bool:
        try:
            await self._api.call("GET", sets.paths.jobs, query={"limit": "1"})
        except NotFound:
            return False
        except AuthError as exc:
            logging.info("%s are not looked at: %s", sets.kind.collection, exc)
            return False
        return True

    async def find(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        explained: bool = False,
    ) -> list[Observation]:
        """Read jobs as of one moment; see `GkeCluster.find`."""
        found: list[Observation] = []
        for sets in await self._kinds():
            empty, inquiry = partial(sets.table, hints=False), sets.inquiry if explained else None
            with suppress(NotFound):  # the cluster lacks its own kind of sets
                found += await sought(self._api, sets.paths, names, labels, empty, inquiry)
        return found

    async def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        """Yield what exists now, then every change, forever; it reconnects by itself.

        The end of each host, and the deletion of the set, come as the end of another
        executor than the one that claimed: the store may have an outcome then.

        Raises:
            BackendError: You may not read it.
        """
        selector = by_labels(labels)
        own, *others = await self._kinds()
        news = self._observed(own, selector)
        if others:  # followed even if the cluster lacks its own kind
            streams = [self._observed(sets, selector) for sets in others]
            news = merged([self._awaited(own, selector), *streams])
        async with aclosing(news) as told:
            async for seen in told:
                yield seen

    def _observed(self, sets: _Sets, selector: str) -> AsyncGenerator[Observation]:
        return observed(
            self._api, sets.paths, selector, sets.inquiry, self._rhythm, empty=sets.table
        )

    async def _awaited(self, sets: _Sets, selector: str) -> AsyncGenerator[Observation]:
        """Do as `_observed`, once the cluster has such sets."""
        while True:
            with suppress(NotFound):
                async with aclosing(self._observed(sets, selector)) as told:
                    async for seen in told:
                        yield seen
            await asyncio.sleep(self._rhythm.longest_wish_s)

    async def _paths_of(self, name: str) -> Paths:
        """Return the paths of the kind of sets that the attempt is one of."""
        kinds = await self._kinds()
        for sets in kinds if len(kinds) > 1 else ():
            with suppress(NotFound):
                await self._api.call("GET", sets.path(name))
                return sets.paths
        return self._own.paths
