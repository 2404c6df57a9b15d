"""The client: opens platforms, submits functions, and finds jobs and batches."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import os
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack, cast, overload

import anyio.to_thread
from absl import logging

from kinetic import _log_level, configuration
from kinetic._messages import describe_error
from kinetic._tasks import (
    AsyncOnly,
    await_shared,
    end_all,
    in_thread,
    release,
    require_loop,
    running_loop,
)
from kinetic._tracebacks import own_frames_left_out
from kinetic.aio import _lazy
from kinetic.aio._engine.in_flight import CLOSED, AttemptLimit, InFlight
from kinetic.aio._plain_call import run_plain_call
from kinetic.aio.platforms import BACKENDS, Platform, backend_named_in, open_platform
from kinetic.errors import ClientClosed, NotFound, PortalError
from kinetic.options import MapOptions, MapSettings, Options, check, show_in_signature

if TYPE_CHECKING:
    from kinetic._progress.standing import Goal
    from kinetic.accelerators import Accelerator
    from kinetic.aio._engine.batch import Batch
    from kinetic.aio._engine.session import JobRef, Session
    from kinetic.aio._lazy import Follow
    from kinetic.aio._preparing.calls import Call
    from kinetic.aio.batch import BatchHandle
    from kinetic.aio.job import JobHandle
    from kinetic.aio.ports import Store
    from kinetic.aio.sweeps import OnFailure, Sweep
    from kinetic.collection import Collection
    from kinetic.job_record import JobRecord
    from kinetic.outcome import X
    from kinetic.sweeps.protocol import Optimizer, Space, Study

__all__ = ["Client", "implicit_client", "run_async_map"]


P = ParamSpec("P")
T = TypeVar("T")

MAX_PACKING = 8
"""Maximum number of calls packed at once; packing a thousand at once would block the loop."""


class Client(AsyncOnly):
    """Submit functions from one event loop, and find jobs and batches.

    The client closes at the end of ``async with Client() as client:``. Jobs and detached batches
    then continue; kinetic undoes submissions in progress, and ends the jobs of `run`. You can open
    any number of clients, in one loop or several. A client, its handles, and their iterators belong
    to the loop of the first call; in another loop, they raise `PortalError`.

    Args:
        backend, project, zone, cluster, namespace: Where to run functions whose decorator
            doesn't say where. None: as the environment, the profile, or the default says.
        store: A directory or ``gs://bucket`` instead of the backend's own store.
        max_concurrent: Limit of unfinished attempts of this client. On this machine, it limits the
            unfinished single jobs, and the workers of batches, together. None: no limit.
        platform: Adapters for tests.

    Raises:
        ConfigurationError: *max_concurrent* isn't an int of at least 1, or None.

    Example::

        async with kinetic.aio.Client(backend="local") as client:
            print(await client.run(train, 0.1))
    """

    def __init__(
        self,
        *,
        backend: str | None = None,
        project: str | None = None,
        zone: str | None = None,
        cluster: str | None = None,
        namespace: str | None = None,
        store: str | None = None,
        max_concurrent: int | None = None,
        platform: Platform | None = None,
    ) -> None:
        check(max_concurrent=max_concurrent)
        _log_level.apply_log_level()
        _warn_of_misspelt_variables()
        self._target_settings = {
            "backend": backend,
            "project": project,
            "zone": zone,
            "cluster": cluster,
            "namespace": namespace,
        }
        self._store = store
        self._platform = platform
        self.limit = AttemptLimit(max_concurrent)
        self._packing_limit = asyncio.Semaphore(MAX_PACKING)
        self._id = os.urandom(6).hex()
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of the first call; the client belongs to it from then on."""
        self._sessions: dict[tuple[Path, configuration.Target], asyncio.Task[Session]] = {}
        self._in_flight = InFlight()
        self.closed = False

    def _require_loop(self) -> None:
        self._loop = self._loop or running_loop()
        require_loop(
            self._loop,
            "this client",
            "open a client in each loop: `async with kinetic.aio.Client() as client:`. The "
            "functions of kinetic.aio, such as `kinetic.aio.run`, open one for each loop",
        )

    def _require_open(self) -> None:
        if os.getpid() != self._process:
            raise ClientClosed("this client belongs to the parent process; open another client")
        if self.closed:
            raise ClientClosed(CLOSED)
        self._require_loop()

    async def __aenter__(self) -> Self:
        self._require_open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Undo submissions and `run` calls in progress, and close every connection.

        A second call does nothing. A call in a forked child does nothing either, because the
        connections belong to the parent. Cancelled: undoing and closing still finish, each within
        30 s.

        Raises:
            PortalError: The client belongs to another event loop.
        """
        if os.getpid() != self._process:
            self.closed = True
            return
        self._require_loop()
        self.closed = True
        sessions, self._sessions = self._sessions, {}
        try:
            await release(self._in_flight.end(), operation="undoing submissions in progress")
        finally:
            await release(_close([*sessions.values()]), operation="closing the client")

    # --- submitting ---

    @overload
    async def submit(
        self, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> JobHandle[T]: ...

    @overload
    async def submit(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> JobHandle[T]: ...

    async def submit(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> JobHandle[Any]:
        """Start ``function(*args, **kwargs)`` and return the job's handle.

        Returns once the platform has accepted the job; it may start later.

        Args:
            function: The function to run, plain or decorated.
            args, kwargs: Its arguments; kinetic pickles them.

        Raises:
            TypeError: The function doesn't take these arguments; nothing was sent.
            ConfigurationError: A setting is wrong.
            PackError: The function or an argument can't be shipped.
            DataError: A `Data` can't be shipped.
            LaunchError: The platform refused the job.
            BackendError: The store or the platform doesn't answer.

        Cancelled: the job and its objects are removed, within 30 s; shared content stays.

        Example::

            job = await client.submit(train, 0.1)
            loss = await job
        """
        return await self._submit(_lazy.calls.single_call(function, args, kwargs, owned=False))

    async def _submit(self, call: Call) -> JobHandle[Any]:
        self._require_open()
        async with self._in_flight.block():
            async with self._packing_limit:
                session, call = await self._open_for_call(call)
                packed = await _lazy.calls.pack(session, call)
            try:
                uploaded = await _lazy.calls.upload_call(session, packed)
                record, job_ref = await _lazy.beginning.start_job(session, packed, uploaded)
            finally:
                packed.spool.remove()
            return _job(record, job_ref)

    @overload
    async def run(
        self, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...

    @overload
    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    @own_frames_left_out
    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Submit a job, wait for it, and return its value; the awaiting task owns the job.

        With ``debug=True``, kinetic first forwards the debugger to port KINETIC_DEBUG_PORT (5678).

        Args:
            function: The function to run, plain or decorated.
            args, kwargs: Its arguments; kinetic pickles them.

        Raises:
            SubmissionError: The job could not be submitted.
            JobError: The job has no value; see `JobHandle.result`.
            Exception: The exception that the function raised.

        Cancelled: the job is cancelled and removed, within 30 s; its output directory stays.

        Example::

            loss = await client.run(train, 0.1)
        """
        return await self.run_owned(function, args, kwargs)

    async def run_owned(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        stream_logs: bool = False,
    ) -> Any:
        """Do as `run`; internal.

        The job ends with this client, or if this process dies and the platform notices.
        """
        self._require_open()
        call = _lazy.calls.single_call(function, args, kwargs, owned=True)
        async with self._in_flight.block():
            return await run_plain_call(
                lambda: self._submit(call), debug=call.options.debug, stream_logs=stream_logs
            )

    @overload
    async def run_async_map(
        self,
        function: Callable[..., Coroutine[Any, Any, T]],
        inputs: Iterable[X] | AsyncIterable[X],
        **options: Unpack[MapOptions],
    ) -> BatchHandle[T, X]: ...

    @overload
    async def run_async_map(
        self,
        function: Callable[..., T],
        inputs: Iterable[X] | AsyncIterable[X],
        **options: Unpack[MapOptions],
    ) -> BatchHandle[T, X]: ...

    @show_in_signature(MapSettings)
    async def run_async_map(
        self,
        function: Callable[..., Any],
        inputs: Iterable[Any] | AsyncIterable[Any],
        **options: Unpack[MapOptions],
    ) -> BatchHandle[Any]:
        """Run a function once for each input, and return the batch's handle.

        kinetic pickles each input, and uploads its `Data`, before it pulls the next one. If the
        length of *inputs* is known, it does so for all inputs before this method returns. So later
        changes to an input have no effect.

        Args:
            function: A plain function, or one with a kinetic decorator.
            inputs: Any iterable, lazy or infinite, sync or async. One job runs for each input.
            input_mode: How an input becomes arguments. ``single``: it is the only argument;
                ``args``: a sequence of arguments; ``kwargs``: a dict. ``auto``: a dict gives
                keyword arguments, a list or tuple positional ones, anything else is the only
                argument. ``labelled``: a
                pair of a label, which the function does not get, and a dict of keyword arguments.
            max_concurrent: How many jobs may be unfinished at once. None: no limit. On this
                machine: how many workers run the jobs, at most one for each slot.
            retries: How many times a failed item may run again.
            fail_fast: Start nothing more after the first failure.
            cancel_running_on_fail: With *fail_fast*, also stop the jobs that run.
            name, tags: `list_batches` finds the batch by these.
            project, cluster: Where the batch runs. None: as the function's options say.
            window: Limit of submitted items that your ``for`` loop has not read yet. None: no limit
                if the length of *inputs* is known, else twice *max_concurrent*.
            batch_timeout: Seconds for the whole batch; then kinetic cancels it.
            budget: US dollars, estimated by list prices. When ended attempts cost this much,
                nothing more starts; running attempts continue.
            prunable: Let `BatchHandle.prune` end attempts that call `kinetic.report`. Default: no.
            progress: Show a progress line while you wait. None: no line.

        Raises:
            ConfigurationError: An option is wrong, or *budget* is set and the machine has no known
                price, or *inputs* is an empty list, a string, or a dict. Also if an input doesn't
                fit the function's parameters. If the length of *inputs* is unknown, only the job of
                such an input fails, with a `SubmissionError`.
            SubmissionError: The function or its project can't be shipped.

        Cancelled: nothing of the batch is left, except content that other calls share.

        Example::

            async with await client.run_async_map(train, [0.1, 0.2, 0.3]) as batch:
                print(await batch.results())
        """
        return await self.start_batch(function, inputs, MapSettings.of(**options))

    async def start_batch(
        self,
        function: Callable[..., Any],
        inputs: Iterable[Any] | AsyncIterable[Any],
        settings: MapSettings,
        goal: Goal | None = None,
    ) -> BatchHandle[Any]:
        """Do as `run_async_map`; *goal* is what a sweep searches for; internal."""
        from kinetic._progress import display

        check(inputs=inputs)
        call = _lazy.calls.batch_call(function, settings.project, settings.cluster)
        self._require_open()
        with display.showing_steps(settings.progress):
            async with self._in_flight.block():
                session, call = await self._open_for_call(call)
                batch = await _lazy.batches.start(session, call, inputs, settings, goal)
        return _batch(batch, progress=settings.progress)

    async def sweep(
        self,
        function: Callable[..., Any],
        optimizer: Optimizer | Study,
        space: Space | None = None,
        *,
        trials: int | None,
        on_failure: OnFailure = "tell",
        metric: str | None = None,
        resume: bool = False,
        **options: Unpack[MapOptions],
    ) -> Sweep:
        """Search for the arguments with the best value, and return the sweep.

        The optimizer proposes a trial whenever a job may start, and learns each value when the job
        has ended. Its methods run in a thread of their own, one after the other.

        Args:
            function: The function, plain or decorated; it returns the number to minimize or
                maximize.
            optimizer: A study of Optuna, or an optimizer of `kinetic.sweeps`, or of yours.
            space: For a study: a function of the trial that returns the keyword arguments, or a
                dict of distributions. Other optimizers have their space already: None.
            trials: How many trials to run; cancelled ones don't count. None: as many as the
                optimizer proposes.
            on_failure: What to do when a trial fails. ``tell``: tell the optimizer. ``retry``: run
                the trial again, *retries* times (default: 2), and then tell. ``ignore``: tell the
                optimizer that the trial was cancelled. kinetic runs a preempted trial again in any
                case.
            metric: The number to use if the function returns, or reports, a dict. None: the only
                number in it. It has no effect on a number that isn't in a dict.
            resume: Continue the sweep of this *name*, or begin it if there is none. Default: False.
            options: Those of `run_async_map`, except ``input_mode``.

        Raises:
            ConfigurationError: An argument is wrong, or *function* doesn't take the parameters of
                the space. Or the optimizer can't propose the trials of the sweep to continue: its
                space has changed.
            Conflict: Another process runs the sweep of this name, or that sweep hasn't ended and
                *resume* is false.
            SubmissionError: The function or its project can't be shipped.

        Cancelled: kinetic removes a new sweep. A sweep that was continued stays.

        Example::

            search = kinetic.sweeps.RandomSearch(space, seed=1)
            async with await client.sweep(train, search, trials=50) as sweep:
                async for trial in sweep:
                    print(trial.params, trial.value)
            print(sweep.best)
        """
        from kinetic.aio import sweeps

        return await sweeps.start(
            self,
            function,
            optimizer,
            space,
            trials=trials,
            on_failure=on_failure,
            metric=metric,
            resume=resume,
            **options,
        )

    async def store_of(
        self, function: Callable[..., Any], project: str | None, cluster: str | None
    ) -> Store:
        """Return the store of batches of *function*; internal."""
        call = _lazy.calls.batch_call(function, project, cluster)
        session, _ = await self._open_for_call(call)
        return session.platform.store

    # --- finding ---

    async def attach(
        self, job_id: str, project: str | None = None, cluster: str | None = None
    ) -> JobHandle[Any]:
        """Return the handle of a single job or of a batch's item, whichever process submitted it.

        Args:
            job_id: The job's ID.
            project, cluster: Where it runs. None: as the client's settings say.

        Raises:
            ConfigurationError: *job_id* is the ID of a batch.
            NotFound: The store has no such job.
            WireError: The signature of the job's description is wrong.

        Example::

            job = await client.attach("job-local-0123456789ab")
            print(await job.status())
        """
        check(job_id=job_id, project=project, cluster=cluster)
        item = _lazy.ids.item_of(job_id)
        session = await self._session_for_id(job_id, project, cluster)
        if item is not None:
            batch = await _lazy.batches.attach(session, item[0])
            return await _batch(batch, attached=True).job(item[1])
        manifest = await _lazy.manifest.read_manifest(session, job_id)
        job_ref = await self._job_ref(session, job_id, manifest)
        return _job(manifest, job_ref)

    async def attach_batch(
        self,
        group_id: str,
        project: str | None = None,
        cluster: str | None = None,
        poll_interval: float = 10.0,
        poll_timeout: float | None = None,
    ) -> BatchHandle[Any]:
        """Return a handle of a batch, whichever process submitted it; the handle only observes.

        Args:
            group_id: The batch's ID.
            project, cluster: Where the batch runs. None: as the client's settings say.
            poll_interval: Accepted for compatibility; has no effect.
            poll_timeout: If another process hasn't submitted all items after this number of
                seconds from now, a wait on this handle raises `ResultTimeout`. None: no limit. Once
                all items are known, only ``timeout=`` of the wait counts.

        Raises:
            ConfigurationError: *group_id* is the ID of a job.
            NotFound: The store has no such batch.
            WireError: The signature of the batch, or of its inputs, is wrong.
        """
        check(group_id=group_id, project=project, cluster=cluster)
        check(poll_interval=poll_interval, poll_timeout=poll_timeout)
        _lazy.ids.require_batch_id(group_id)
        session = await self._session_for_id(group_id, project, cluster)
        batch = await _lazy.batches.attach(session, group_id)
        return _batch(batch, attached=True, poll_timeout=poll_timeout)

    async def full_id(self, prefix: str, *, exists: bool = False) -> str:
        """Return the only ID of a job or batch in the store that begins with *prefix*.

        If *prefix* is a full ID, return it; only with *exists*, check that the store has it.

        Raises:
            ConfigurationError: *prefix* can't begin an ID, or several IDs begin with it.
            NotFound: No ID in the store begins with *prefix*.
        """
        if _lazy.ids.is_full_id(prefix) and not exists:
            return prefix
        return await _lazy.listing.full_id(await self._session_for_id(prefix, None, None), prefix)

    async def cleanup(
        self, submission: str, project: str | None = None, cluster: str | None = None
    ) -> None:
        """Remove a batch or a single job by its ID: jobs and objects; output directories stay.

        kinetic doesn't read the objects, so damaged ones are also removed. If the store has none,
        this logs a warning.

        Args:
            submission: The ID of a batch or of a single job.
            project, cluster: Where it runs. None: as the client's settings say.

        Raises:
            ConfigurationError: *submission* is the ID of a batch's item.
            NotFound: The text isn't an ID.
            BackendError: The jobs don't end within 180 s, or a service does not answer.

        Cancelled: a part may be removed; call `cleanup` again to remove the rest.
        """
        check(submission=submission, project=project, cluster=cluster)
        _lazy.ids.require_submission_id(submission)  # checks the ID before a platform opens
        session = await self._session_for_id(submission, project, cluster)
        try:
            if (found := await _lazy.listing.full_id(session, submission)) != submission:
                raise NotFound(f"{submission} is only the beginning of {found}")
        except NotFound as exc:
            logging.warning("nothing to clean up: %s", exc)
        await _lazy.batches.remove(session, submission)

    async def list_batches(
        self,
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
        project: str | None = None,
        cluster: str | None = None,
        limit: int | None = None,
    ) -> list[BatchHandle[Any]]:
        """List the batches in the store, the newest first; their handles only observe.

        Args:
            name: List only batches with this name.
            tags: List only batches that have all of these tags.
            project, cluster: Where to look. None: as the client's settings say.
            limit: Maximum number of batches. None: no limit.

        Raises:
            ConfigurationError: An argument is wrong.
        """
        check(name=name, tags=tags, project=project, cluster=cluster, limit=limit)
        session = await self._open(self._settings(project=project, cluster=cluster))
        found = await _lazy.batches.list_batches(session, name, tags, limit)
        return [_batch(batch, attached=True) for batch in found]

    async def list_jobs(
        self,
        project: str | None = None,
        zone: str | None = None,
        cluster: str | None = None,
        namespace: str | None = None,
        limit: int | None = None,
        items: bool = True,
    ) -> list[JobHandle[Any]]:
        """List the jobs that the platform knows, the newest first.

        On a cluster, the list includes jobs on several hosts. On this machine, it includes single
        jobs that were neither cancelled nor cleaned up, and the items of batches that a worker has
        taken. It omits jobs whose objects are in another store.

        Args:
            project, zone, cluster, namespace: Where to look.
                None: as the client's settings say.
            limit: Maximum number of jobs. None: no limit.
            items: Whether the list has the items of batches. Default: yes.

        Raises:
            ConfigurationError: An argument is wrong.
        """
        check(project=project, cluster=cluster, limit=limit, items=items)
        settings = self._settings(project=project, zone=zone, cluster=cluster, namespace=namespace)
        session = await self._open(settings)
        names = BACKENDS[session.target.backend].same_cluster
        other_sessions = [await self._open({**settings, "backend": backend}) for backend in names]
        found = await _lazy.listing.records(session, other_sessions, limit, items=items)
        return [_job(record, self.follow_record) for record in found]

    async def collect(self, *, everything: bool = False) -> Collection:
        """Remove unused contents from the store and from this machine's caches.

        In the store, kinetic removes code, functions, requirements, and `Data` that nothing refers
        to and nothing has used for a day. It also removes the remains of jobs and batches whose
        process died, the names of sweeps without batches, and build contexts from the bucket of
        builds. A job refers to its content until it ends, a batch until `results` or `cleanup`. To
        remove a job's or batch's own objects, call ``cleanup(gcs=True)`` on it.

        The caches in ``KINETIC_HOME/cache`` are archives of projects, unpacked projects and `Data`,
        and environments. KINETIC_CACHE_AGE_S and KINETIC_CACHE_SIZE_MB limit them, and a store in a
        directory. Every ten minutes, the local supervisor also applies these limits. An environment
        stays for a day after its last use.

        Args:
            everything: Also remove what was used within a day, if no unfinished job and no batch
                needs it. Don't use this while another process submits to a bucket: its job may
                fail because its code no longer exists. Default: False.

        Returns:
            The removed contents, by folder.

        Raises:
            ConfigurationError: A setting is wrong.
            AuthError: You may not list or delete objects of the bucket.
            BackendError: The store does not answer.

        Cancelled: the removal in progress ends first.
        """
        from kinetic import _collector
        from kinetic.aio._shared_objects import BlockingStore

        session = await self._open(self._target_settings)
        platform, limits = session.platform, _collector.Limits.of(os.environ)
        store = _collector.directory_of(platform.store.url) or BlockingStore(platform.store)
        builds = BlockingStore(platform.builds) if platform.builds is not None else None
        await in_thread(_lazy.scratch.sweep_scratch)
        home = configuration.home(os.environ)
        if everything:
            limits = _collector.NOTHING
        collect = functools.partial(_collector.collect, unused_s=_collector.DAY_S)
        return await in_thread(collect, home, limits, store, builds)

    # --- sessions ---

    async def follow_record(self, record: JobRecord, *, whole: bool = True) -> JobRef:
        """Return a reference by which a handle that has no session follows its job.

        If the job is an item of a batch, *whole* says whether to read and follow the whole batch.

        Raises:
            NotFound: There is no such job in the store.
        """
        location = (record.project or None, record.cluster_name or None)
        session = await self._session_for_id(record.group_id or record.job_id, *location)
        if record.group_id is not None:
            find_batch = _lazy.batches.attach if whole else _lazy.batches.open_unread
            batch = await find_batch(session, record.group_id)
            return batch.job_ref(record.group_index or 0)
        manifest = await _lazy.manifest.read_manifest(session, record.job_id)
        return await self._job_ref(session, record.job_id, manifest)

    async def _job_ref(self, session: Session, job_id: str, manifest: dict[str, Any]) -> JobRef:
        """Follow a single job, and return a reference to it."""
        submission = session.find_followed(job_id)
        if submission is None:
            identity = await _lazy.beginning.identity_of(session, job_id, manifest)
            new_submission = _lazy.submission.Submission(identity, session.platform)
            submission = session.follow(new_submission, is_own=False)
        return _lazy.session.JobRef(session=session, submission=submission, index=0)

    async def _open_for_call(self, call: Call) -> tuple[Session, Call]:
        """Return the session of *call*, and the call with an accelerator that the platform has."""
        session = await self._session(call.options)
        requested = call.options.parsed_accelerator
        available = await session.platform.layout(requested)
        if available == requested:
            return session, call
        options = call.options.changed(accelerator=str(available))
        return await self._session(options), dataclasses.replace(call, options=options)

    async def _session(self, settings: Options) -> Session:
        given = {name: getattr(settings, name) for name in self._target_settings}
        return await self._open(self._settings(**given), settings.parsed_accelerator)

    async def _session_for_id(
        self, given_id: str, project: str | None, cluster: str | None
    ) -> Session:
        """Open the platform of a job or batch; the ID may name a backend."""
        settings = self._settings(project=project, cluster=cluster)
        settings["backend"] = backend_named_in(given_id) or settings["backend"]
        session = await self._open(settings)
        opened_backend = BACKENDS[session.target.backend]
        if opened_backend.same_cluster and f"-{opened_backend.id_marker}" not in given_id:
            # The ID lacks this backend's marker, so the other backend of its cluster has the job.
            session = await self._open({**settings, "backend": opened_backend.same_cluster[0]})
        return session

    def _settings(self, **given: str | None) -> dict[str, str | None]:
        """Return the *given* settings; replace each None by the client's own setting."""
        chosen = {name: value for name, value in given.items() if value is not None}
        return {**self._target_settings, **chosen}

    async def _open(
        self, settings: Mapping[str, str | None], accelerator: Accelerator | None = None
    ) -> Session:
        """Return the session for these settings; the first call opens its platform."""
        from kinetic._progress.entry import requested_mode

        self._require_open()
        given: dict[str, Any] = {**settings, "store": self._store}
        requested_mode(os.environ)  # its error comes before anything is sent
        target = configuration.resolve(**given, accelerator=accelerator)
        session_key = (configuration.home(os.environ), target)
        opening = self._sessions.get(session_key)
        if opening is None or (opening.done() and opening.exception() is not None):
            opening = asyncio.create_task(self._open_session(target), name="kinetic open platform")
            self._sessions[session_key] = opening
        return await await_shared(opening, "the client")

    async def _open_session(self, target: configuration.Target) -> Session:
        platform = self._platform or await open_platform(target)
        await anyio.to_thread.run_sync(_lazy.scratch.sweep_scratch, abandon_on_cancel=True)
        return _lazy.session.Session(target, platform, self._id, self.limit)


async def _close(sessions: Sequence[asyncio.Task[Session]]) -> None:
    opened = await end_all(sessions)  # a session that is open stays so
    closing = (session.aclose() for session in opened if not isinstance(session, BaseException))
    for result in await asyncio.gather(*closing, return_exceptions=True):
        if isinstance(result, BaseException):
            logging.warning("can't close the client: %s", describe_error(result))


@functools.cache
def _warn_of_misspelt_variables() -> None:
    for name, similar in configuration.misspelt_variables().items():
        logging.warning("%s has no effect on kinetic: did you mean %s?", name, similar)


def _job(record: dict[str, Any], follow: JobRef | Follow) -> JobHandle[Any]:
    from kinetic.aio.job import JobHandle

    return JobHandle[Any].from_dict(record).bound(follow)


def _batch(batch: Batch, **options: Any) -> BatchHandle[Any]:
    from kinetic.aio.batch import BatchHandle

    return BatchHandle(batch, **options)


# --- the implicit client of a loop, whose methods are the functions of `kinetic.aio` ---

_IMPLICIT: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, tuple[Client, AsyncGenerator[None, None]]
] = weakref.WeakKeyDictionary()
"""The implicit client of each loop, and the generator that closes it."""


async def implicit_client() -> Client:
    """Return the client that module-level functions share on the running loop."""
    loop = running_loop()
    client, _ = _IMPLICIT.get(loop, (None, None))
    if client is None or client.closed:
        client = Client()
        # `asyncio.run` closes open async generators at its end, so `lifetime` closes the client.
        lifetime = _lifetime(client)
        _IMPLICIT[loop] = client, lifetime
        await anext(lifetime)
    return client


async def close_implicit_client() -> None:
    """Close the client that `implicit_client` has made on the running loop, if there is one."""
    client, _ = _IMPLICIT.get(running_loop(), (None, None))
    if client is not None:
        await client.aclose()


async def _lifetime(client: Client) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        with contextlib.suppress(PortalError):  # the program hasn't closed its loop
            loop = running_loop()
            await client.aclose()
            _IMPLICIT.pop(loop, None)  # the entry would keep the loop alive


class _Shared:
    """Turn each method of `Client` into a function that calls it on the implicit client."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(Client, name)

        @functools.wraps(method)
        async def call(*args: Any, **kwargs: Any) -> Any:
            return await method(await implicit_client(), *args, **kwargs)

        function: Any = call
        signature = inspect.signature(method)
        parameters = [*signature.parameters.values()][1:]  # without ``self``
        function.__signature__ = signature.replace(parameters=parameters)
        function.__module__, function.__qualname__ = "kinetic.aio", name
        function.__doc__ = (method.__doc__ or "").replace("await client.", "await kinetic.aio.")
        return own_frames_left_out(call) if name == "run" else call


_shared = cast("Client", _Shared())
attach = _shared.attach
attach_batch = _shared.attach_batch
cleanup = _shared.cleanup
collect = _shared.collect
list_batches = _shared.list_batches
list_jobs = _shared.list_jobs
run = _shared.run
run_async_map = _shared.run_async_map
submit = _shared.submit
sweep = _shared.sweep
