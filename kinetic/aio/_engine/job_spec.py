"""The order for one attempt, and what undoes a submission."""

from __future__ import annotations

import asyncio
import getpass
import itertools
import os
import time
import urllib.parse
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kinetic import configuration
from kinetic._runner.protocol import wire
from kinetic.aio._engine.ids import Identity
from kinetic.aio._engine.prepare import UploadedCall
from kinetic.aio._engine.session import Session
from kinetic.aio._engine.submission import (
    LABEL_ATTEMPT,
    LABEL_CLIENT,
    LABEL_INDEX,
    LABEL_ROUND,
    LABEL_SUBMISSION,
)
from kinetic.aio._net.retry import is_answer
from kinetic.aio.ports import JobSpec, Store
from kinetic.errors import BackendError, StoreFull

CONFIRM_PAUSE_S = 0.01

LABEL_LENGTH = 200
"""Characters of a function's name that are told; what a platform cannot take of them it changes."""


@dataclass(slots=True)  # not frozen: one is made for each job, in a third of the time
class AttemptSpec:
    """Everything one attempt adds to what its submission shares."""

    index: int
    attempt: int
    arguments: wire.Input
    data: tuple[wire.DataRef, ...] = ()
    fence: int = 1
    round: int = 0


class JobSpecBuilder:
    """Builds the order and the platform's job of each attempt of a submission."""

    def __init__(self, session: Session, identity: Identity, placed: UploadedCall) -> None:
        self._cluster = session.platform.cluster
        self._identity = identity
        self._data = placed.data
        options = placed.call.options
        self._template = JobSpec(
            name="",
            labels={
                "app": session.platform.app,
                "app.kubernetes.io/name": "kinetic",
                "app.kubernetes.io/managed-by": "kinetic",
                "kinetic.dev/user": _user(),
                "kinetic.dev/function": placed.call.name[:LABEL_LENGTH],
                "kinetic.dev/kind": "job" if identity.group_id is None else "item",
                LABEL_SUBMISSION: identity.id,
                LABEL_CLIENT: session.client_id,
            },
            image=placed.image,
            order=wire.Order(
                store=session.platform.store.url,
                scope=identity.scope,
                job_id="",
                index=0,
                attempt=0,
                group_id=identity.group_id,
                budgets=identity.budgets,
                function=placed.function,
                arguments=_NOTHING,
                code=placed.code,
                requirements=placed.image.requirements,
                data=placed.data,
                timeout=options.timeout,
                client=placed.client,
                root=_as_loaded(str(placed.project.root or ""), placed.call.function),
                owned=placed.call.owned,
                **(_debugging() if options.debug else {}),
            ),
            environment=placed.environment,
            key=identity.key,
            resources=placed.resources,
            timeout=options.timeout,
            start_timeout=options.start_timeout,
            owned=placed.call.owned,
        )

    def spec(self, one: AttemptSpec) -> JobSpec:
        """Return the job of one attempt, as the platform is asked for it."""
        identity, template = self._identity, self._template
        order = replace(
            template.order,
            job_id=identity.job_id(one.index),
            index=one.index,
            attempt=one.attempt,
            fence=one.fence,
            arguments=one.arguments,
            data=(*self._data, *one.data),
            output_dir=identity.output_dir(one.index),
        )
        labels = {
            **template.labels,
            LABEL_INDEX: str(one.index),
            LABEL_ATTEMPT: str(one.attempt),
            LABEL_ROUND: str(one.round),
        }
        name = identity.attempt_name(one.index, one.attempt)
        return replace(template, name=name, labels=labels, order=order)

    async def launch(self, one: AttemptSpec) -> None:
        """Start one attempt; a platform that took it and failed to say so is asked again.

        Raises:
            LaunchError: It was refused.
            Throttled: The platform takes no more now.
            BackendError: The platform does not answer, and has no such job.
        """
        spec = self.spec(one)
        try:
            await self._cluster.launch(spec)
        except BackendError as exc:
            if is_answer(exc) or not await self._cluster.find(names=[spec.name]):
                raise


def _debugging() -> dict[str, Any]:
    """Return what only a job that waits for a debugger has to know."""
    return {"debug_s": configuration.debug_wait_s(), "stood": os.getcwd()}


def _as_loaded(root: str, function: Any) -> str:
    """*root* by the path that the function's file was loaded by: there may be links in it."""
    file = os.path.abspath(getattr(getattr(function, "__code__", None), "co_filename", ""))
    inside = os.path.relpath(os.path.realpath(file), root) if root else ""
    if inside and file.endswith(f"{os.sep}{inside}"):
        return file.removesuffix(f"{os.sep}{inside}")
    return root


_NOTHING = wire.Input(name="", start=0, stop=0, digest="")


async def remove(
    session: Session,
    scope: str,
    *,
    names: Collection[str] = (),
    labels: Mapping[str, str] | None = None,
    jobs: bool = True,
    objects: bool = True,
    timeout: float = 180.0,
    ended: bool = False,
) -> None:
    """Take a submission away: its jobs, then its objects.

    A late process finds a stop request, or finds no inputs, at every moment in
    between. With *ended* its processes are known to be gone already. Where a
    store is too full for the request, the platform ends them without it.
    """
    store, cluster = session.platform.store, session.platform.cluster
    if objects and not ended:
        try:
            await _store_stop(session, scope)
        except StoreFull:
            if not jobs:
                raise
    if jobs:
        await cluster.delete(names=names, labels=labels)
        if not ended:
            await until_gone(session, names, timeout, labels=labels)
    if objects:
        await _remove_objects(store, scope)
        if not ended:  # who had looked before the handle went may have told of its end since
            await store.delete([one.name for one in await store.list(scope)])


async def _store_stop(session: Session, scope: str) -> None:
    stop, key = wire.Request(kind="stop", cause=wire.CLEANUP), await session.key(scope)
    for slot in itertools.count():
        name = wire.control_key(scope, slot)
        if await session.platform.store.create(name, *stop.signed(key, scope, name)):
            return


async def _remove_objects(store: Store, scope: str) -> None:
    """Remove what jobs read first, and last the object by which the submission is found."""
    listed = [one.name for one in await store.list(scope)]
    inputs = [name for name in listed if name.startswith(f"{scope}inputs/")]
    last = [name for name in listed if name.startswith(f"{scope}control/")]
    last += [f"{scope}lease", f"{scope}manifest", f"{scope}handle.json"]
    await store.delete(inputs)
    await store.delete([name for name in listed if name not in {*inputs, *last}])
    await store.delete(last)


async def undo(session: Session, scope: str, name: str) -> None:
    """Take away what was begun of a submission with one job.

    Whether or not the platform can be reached: a late process finds no inputs.
    """
    try:
        await remove(session, scope, names=[name], timeout=25.0)
    except BackendError:
        await remove(session, scope, jobs=False, ended=True)
        raise


async def until_gone(
    session: Session,
    names: Collection[str],
    timeout: float,
    *,
    labels: Mapping[str, str] | None = None,
) -> None:
    """Wait until the platform has forgotten jobs that it was told to delete.

    Raises:
        BackendError: They are still there after *timeout* seconds.
    """
    deadline, pause = time.monotonic() + timeout, CONFIRM_PAUSE_S
    while found := await session.platform.cluster.find(names=names, labels=labels):
        if time.monotonic() > deadline:
            raise BackendError(
                f"{found[0].name} was deleted and is still there after {timeout:g} s"
            )
        await asyncio.sleep(pause)
        pause = min(1.0, pause * 1.5)
        if pause == 1.0:  # somebody may have launched since
            await session.platform.cluster.delete(names=names, labels=labels)


def output_base(session: Session, placed: UploadedCall, identity_id: str) -> str:
    """Where its jobs leave what is kept; `Identity.output_dir` says where each of them does."""
    configured = placed.call.options.output_dir or session.target.output_dir
    if configured:
        if "://" in configured:
            return configured.rstrip("/")
        return os.path.abspath(os.path.expanduser(configured))
    url = session.platform.store.url
    if url.startswith("file://"):
        url = urllib.parse.unquote(url.removeprefix("file://"))
    return f"{url}/outputs/{identity_id}"


def new_id(kind: str, marker: str) -> str:
    """An id nobody else has: ``job-…`` or ``grp-…``, with the platform's marker."""
    return f"{kind}-{marker}{os.urandom(6).hex()}"


def _user() -> str:
    """Who submits; in a container there need be no name for that."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"uid-{os.getuid()}" if hasattr(os, "getuid") else "unnamed"
