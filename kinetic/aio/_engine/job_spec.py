"""Build the specification of an attempt's job, and launch it."""

from __future__ import annotations

import functools
import getpass
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kinetic import _labels, configuration
from kinetic._runner.protocol import directory_urls, wire
from kinetic.aio._engine.session import Session
from kinetic.aio._net.retry import is_refusal
from kinetic.aio._preparing.calls import UploadedCall
from kinetic.aio._submissions.ids import Identity
from kinetic.aio.ports import JobSpec
from kinetic.errors import BackendError

if TYPE_CHECKING:
    from kinetic._runner.protocol.workers import Crew, Terms

LABEL_LENGTH = 200
"""Maximum characters of a function's name in a label; a platform may shorten the name further."""


class JobSpecBuilder:
    """Build the job of each attempt, which has an order for the runner, and launch it."""

    def __init__(
        self,
        session: Session,
        identity: Identity,
        uploaded: UploadedCall,
        *,
        prunable: bool = False,
    ) -> None:
        self._cluster = session.platform.cluster
        self._identity = identity
        self._options = options = uploaded.call.options
        self._data, self._init = uploaded.data, uploaded.init
        self._labels = {
            "app": session.platform.app,
            "app.kubernetes.io/name": "kinetic",
            "app.kubernetes.io/managed-by": "kinetic",
            _labels.USER: _user_name(),
            _labels.FUNCTION: uploaded.call.name[:LABEL_LENGTH],
            _labels.KIND: "item" if identity.leased else "job",
            _labels.CLIENT: session.client_id,
            **identity.labels,
        }
        # For a batch, `partial` takes half the time of `dataclasses.replace`.
        self._order = functools.partial(
            wire.Order,
            store=session.platform.store.url,
            scope=identity.scope,
            group_id=identity.id if identity.leased else None,
            budgets=identity.budgets,
            function=uploaded.function,
            code=uploaded.code,
            requirements=uploaded.image.requirements,
            timeout=options.timeout,
            client=uploaded.client,
            root=_path_as_loaded(str(uploaded.project.root or ""), uploaded.call.function),
            owned=uploaded.call.owned,
            debug_s=configuration.debug_wait_s() if options.debug else None,
            stood=os.getcwd() if options.debug else "",
            prunable=prunable,
        )
        self._job = functools.partial(
            JobSpec,
            image=uploaded.image,
            environment={**uploaded.environment, **uploaded.image.environment},
            key=identity.key,
            resources=uploaded.resources,
            timeout=options.timeout,
            start_timeout=options.start_timeout,
            owned=uploaded.call.owned,
        )

    async def launch(self, attempt: int, arguments: wire.Input, *, by_worker: bool) -> None:
        """Start an attempt of a single job, unless the platform has it in spite of an error.

        *by_worker* says that a worker carries out the attempt.

        Raises:
            LaunchError: The platform refused the job.
            Throttled: The platform accepts no more jobs now.
            BackendError: The request failed in another way, and the platform doesn't show the job.
        """
        identity = self._identity
        order = self._order(
            job_id=identity.job_id(0),
            index=0,
            attempt=attempt,
            arguments=arguments,
            data=self._data,
            output_dir=identity.output_dir(0),
        )
        labels = _labels.of_attempt({**self._labels, _labels.ROUND: "0"}, 0, attempt)
        name = identity.attempt_name(0, attempt)
        crew: Crew | None = None
        if by_worker:
            from kinetic._runner.protocol.workers import Terms  # most local jobs need no worker

            crew = self._crew(Terms(budgets=identity.budgets, single=True))
        try:
            await self._cluster.launch(self._job(name=name, labels=labels, order=order, crew=crew))
        except BackendError as exc:
            # The platform may have started the job although its reply was lost.
            if is_refusal(exc) or not await self._cluster.find(names=[name]):
                raise

    def worker(self, number: int, fence: int, terms: Terms) -> JobSpec:
        """Return the job of each worker of round *number*; its order has no item.

        *fence* is that of this process's lease.
        """
        order = self._order(
            job_id="",
            fence=fence,
            index=0,
            attempt=0,
            arguments=wire.Input("", 0, 0, ""),
            data=self._data,
        )
        labels = {**self._labels, _labels.KIND: _labels.WORKER, _labels.ROUND: str(number)}
        name, crew = self._identity.round_name(number), self._crew(terms)
        job: JobSpec = self._job(name=name, labels=labels, order=order, crew=crew)
        # The limits of time are those of an item: its worker keeps them.
        return replace(job, timeout=None, start_timeout=None, owned=False)

    def _crew(self, terms: Terms) -> Crew:
        from kinetic._runner.protocol.workers import Crew

        return Crew(
            terms=terms,
            outputs=self._identity.output_base,
            created=self._identity.created,
            isolation=self._options.isolation,
            init=self._init,
            recycle=self._options.recycle,
        )


def _path_as_loaded(root: str, function: Any) -> str:
    """Return the path of *root* by which Python loaded the function; links stay unresolved."""
    file = os.path.abspath(getattr(getattr(function, "__code__", None), "co_filename", ""))
    relative = os.path.relpath(os.path.realpath(file), root) if root else ""
    if relative and file.endswith(f"{os.sep}{relative}"):
        return file.removesuffix(f"{os.sep}{relative}")
    return root


def output_base(session: Session, uploaded: UploadedCall, submission_id: str) -> str:
    """Return the base of a submission's output directories; see `Identity.output_dir`."""
    configured = uploaded.call.options.output_dir or session.target.output_dir
    if configured:
        if "://" in configured:
            return configured.rstrip("/")
        return os.path.abspath(os.path.expanduser(configured))
    url = session.platform.store.url
    return f"{directory_urls.directory_of(url) or url}/outputs/{submission_id}"


def _user_name() -> str:
    """Return the user's name, or their ID: in a container, a user may have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"
