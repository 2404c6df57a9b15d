"""Pack a call on this machine, and upload it; each stage takes a frozen value and returns the next.

`pack` does everything that blocks, in one worker thread. `upload_call` uploads what the store
lacks. A batch packs and uploads once for all its items.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import cloudpickle
from absl import logging

from kinetic import configuration, environment
from kinetic._binding import Binding
from kinetic._log_level import shown_levels
from kinetic._messages import format_size
from kinetic._packing import archive, discover, payload
from kinetic._progress.steps import step
from kinetic._runner.protocol import stand_ins, wire
from kinetic._runner.protocol.spool import Spooled
from kinetic._tasks import all_or_none, in_thread, stop_point
from kinetic._tracebacks import of_the_caller
from kinetic.aio import _shared_objects
from kinetic.aio._connection import Connection
from kinetic.aio._preparing.scratch import Scratch
from kinetic.aio.platforms import Capacity
from kinetic.aio.ports import Image, ImageRequest, Resources, Store
from kinetic.configuration import Target
from kinetic.data import JOB_VARIABLE, Data
from kinetic.errors import ConfigurationError
from kinetic.options import DEFAULT_ACCELERATOR, Options, settings_of, usage_hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The user's call.

    ``arguments`` is None for a batch; ``pickled`` is their pickle, made at the call, if they are
    small and of built-in types. ``function`` is None if another process has uploaded it.
    ``inputs`` are a batch's inputs that exist already; the project's archive leaves out the
    `Data` in these inputs. An ``owned`` call is a single job that ends with this process.
    """

    function: Callable[..., Any] | None
    name: str
    options: Options
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    pickled: bytes | None = None
    inputs: Sequence[Any] = ()
    owned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCall:
    """A call whose archive and pickles are on this machine.

    ``overlay`` has what changed since ``archive``; see `archive.Packer`. The pickles lie in memory
    or in ``spool``, which the caller removes. ``data`` are the `Data` of the call,
    those of its volumes first.
    """

    call: Call
    project: discover.Project
    archive: archive.Archive | None
    overlay: Spooled | None
    pickled_function: Spooled
    pickled_init: Spooled | None
    pickled_arguments: Spooled | None
    data: tuple[Data, ...]
    environment: Mapping[str, str] = field(repr=False)
    spool: Scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedCall:
    """The shared part of all attempts of a submission, whose content is in the store.

    ``init`` is the pickle of the functions that the option ``init`` maps from arguments.
    ``data`` says where the store has each element of ``data_table``, in the same order.
    ``captured_names`` are the names of the captured environment variables. ``client``
    describes this process: its versions, which the runner compares with the job's, and the levels
    of its loggers.
    """

    call: Call
    project: discover.Project
    code: wire.Code | None
    function: wire.Input
    init: wire.Input | None
    data: tuple[wire.DataRef, ...]
    data_table: tuple[Data, ...]
    image: Image
    resources: Resources
    environment: Mapping[str, str] = field(repr=False)
    captured_names: tuple[str, ...]
    client: Mapping[str, str]

    @property
    def shared_names(self) -> list[str]:
        """The names of the shared objects that jobs read; of `Data` in the store, see ``data``."""
        parts = (self.function, self.init, self.image.requirements)
        return [
            *(self.code.names if self.code is not None else ()),
            *(part.name for part in parts if part is not None),
            *filter(None, [self.image.runner]),
        ]


def single_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, owned: bool
) -> Call:
    """Return the call of a single job."""
    plain, settings = _checked(function)
    binding = Binding(plain, settings.init)
    if misfit := binding.find_mismatch(args, kwargs):
        hints = (usage_hint(name) for name in kwargs if not binding.accepts_keyword(name))
        raise of_the_caller(TypeError("; ".join(filter(None, (misfit, *hints)))))
    return Call(
        function=plain,
        name=_name_of(plain),
        options=settings,
        arguments=(args, kwargs),
        # The caller's other tasks may change the arguments while this one waits for its turn.
        pickled=payload.pickle_plain_call(args, kwargs),
        owned=owned,
    )


def batch_call(function: Callable[..., Any], project: str | None, cluster: str | None) -> Call:
    """Return the call of a batch, without inputs; None keeps the function's project or cluster."""
    plain, settings = _checked(function)
    project, cluster = project or settings.project, cluster or settings.cluster
    settings = settings.changed(project=project, cluster=cluster)
    return Call(function=plain, name=_name_of(plain), options=settings)


def _checked(function: Callable[..., Any]) -> tuple[Callable[..., Any], Options]:
    """Return the plain function and its settings.

    Raises:
        ConfigurationError: The function can't take an argument that ``init`` gives.
        RuntimeError: A job imports a module of the project, which submits at its top level.
    """
    if JOB_VARIABLE in os.environ:
        stand_ins.refuse_during_import("a function of kinetic")
    plain, settings = settings_of(function)
    settings.check_init(plain)
    return plain, settings


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


async def pack(connection: Connection, call: Call) -> PackedCall:
    """Discover the project, pickle the call and archive the tree, in a worker thread.

    If the connection has packed the project before, pack only what changed since.

    Raises:
        ConfigurationError: The platform can't fulfil the options.
        PackError: The project, the function, or an argument can't be shipped.

    Cancelled: kinetic waits for the thread, which stops at the next folder or MiB of a file. It
    then removes the spool folder.
    """
    _refuse_options(connection, call.options)
    spool, check = Scratch(), stop_point()
    try:
        with step(f"packing {call.name}") as packing_step:

            def report(done: int, total: int) -> None:
                check()
                packing_step.update(done, total)

            packed = await in_thread(
                _pack, connection.packer, call, spool, dict(os.environ), report
            )
    except BaseException:
        spool.remove()
        raise
    if packed.archive is not None:
        root, files, size = packed.project.root, packed.archive.files, packed.archive.size
        logging.info("Packed %s: %d files, %s", root, files, format_size(size))
    if packed.overlay is not None:
        logging.info("Packed what changed since: %s", format_size(packed.overlay.size))
    return packed


def _pack(
    packer: archive.Packer,
    call: Call,
    spool: Scratch,
    environ: dict[str, str],
    report: Callable[[int, int], None],
) -> PackedCall:
    """Do the work of `pack` that blocks."""
    assert call.function is not None
    captured = environment.capture(call.options.capture_env_vars or (), environ)
    cwd = discover.current_directory()
    project = discover.find_project(call.function, environ=environ, cwd=cwd)
    volumes = call.options.volumes or {}
    table = payload.DataTable(tuple(volumes.values()))
    function = payload.dump_function(call.function, project, table, spool.folder)
    init = arguments = None
    if call.options.init is not None:
        init = payload.dump_init(call.options.init, project, table, spool.folder, call.name)
    if call.pickled is not None:
        digest = hashlib.sha256(call.pickled).hexdigest()
        arguments = Spooled(call.pickled, digest, len(call.pickled))
    elif call.arguments is not None:
        args, kwargs = call.arguments
        arguments = payload.dump_arguments(
            args, kwargs, project, table, spool.folder, call.name, function=call.function
        )
    packed_archive = overlay = None
    if project.root is not None:
        # `upload_all` uploads the local `Data`, so the archive leaves them out.
        data = (*table.items, *_data_in(call.inputs))
        local_paths = [Path(entry.path) for entry in data if not (entry.is_gcs or entry.is_hf)]
        cache = configuration.home(environ) / "cache" / "pack"
        packed_archive, overlay = packer.pack(
            project.root,
            exclude=local_paths,
            cache=cache,
            environ=environ,
            progress=report,
        )
    return PackedCall(
        call=call,
        project=project,
        archive=packed_archive,
        overlay=overlay,
        pickled_function=function,
        pickled_init=init,
        pickled_arguments=arguments,
        data=tuple(table.items),
        environment=captured,
        spool=spool,
    )


def _data_in(value: Any, depth: int = 4) -> Iterator[Data]:
    """Yield the `Data` in nested containers, down to *depth* levels."""
    if isinstance(value, Data):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        for element in cast("Any", value.values() if isinstance(value, dict) else value):
            yield from _data_in(element, depth - 1)


async def upload_call(connection: Connection, packed: PackedCall) -> UploadedCall:
    """Upload the code, function, and data that the store lacks, and find the image.

    Raises:
        ConfigurationError: The backend can't fulfil the options.
        DataError: A `Data` changed while it was uploaded.
        BackendError: The store failed.

    Cancelled: some content-addressed objects may already be in the store. They are complete, and
    the next submission uses them.
    """
    store, options = connection.platform.store, packed.call.options
    target = connection.target
    output_dir = options.output_dir or target.output_dir or ""
    if _writes_to_cloud_storage(connection, output_dir) and not output_dir.startswith("gs://"):
        raise ConfigurationError(
            f"local jobs can't write to output_dir={output_dir!r}; name a directory of this "
            "machine or a gs:// prefix, leave output_dir out to use a directory in the store, or "
            'choose a backend other than "local"'
        )
    request = image_request(options, target, packed.project, packed.call.function)
    code, function, init, refs, image = await all_or_none(
        _upload_code(store, packed),
        _upload_function(store, packed.pickled_function),
        _upload_init(store, packed.pickled_init),
        upload_all(store, packed.data, packed.call.options.volumes or {}),
        connection.platform.images.resolve(request),
    )
    return UploadedCall(
        call=packed.call,
        project=packed.project,
        code=code,
        function=function,
        init=init,
        data=refs,
        data_table=packed.data,
        image=image,
        resources=_resources(options),
        environment=job_environment(connection, packed.environment, output_dir),
        captured_names=tuple(sorted(packed.environment)),
        client=_describe_client(),
    )


def image_request(
    options: Options, target: Target, project: discover.Project, function: Any
) -> ImageRequest:
    """Return the facts that decide the image of *function*, which is part of *project*."""
    return ImageRequest(
        mode=options.container_image or "bundled",
        category=options.parsed_accelerator.kind,
        base_image_repo=options.base_image_repo or target.base_image_repo,
        python=platform.python_version(),
        entry_dir=project.entry_dir,
        root=project.root,
        scripts=discover.scripts_of(function),
    )


def job_environment(
    connection: Connection, captured: Mapping[str, str], output_dir: str
) -> dict[str, str]:
    """Return the environment of a job: *captured*, and what every job of the platform gets."""
    # The project that pays for a pod's requests to buckets.
    base = environment.capture([wire.BILLING_PROJECT], os.environ)
    if connection.platform.capacity is not None:  # a pod has its image's environment
        base |= environment.base_environment(os.environ)
    if _writes_to_cloud_storage(connection, output_dir):
        base |= environment.storage_environment(os.environ)
    return {**base, **captured}


def capture_again(
    connection: Connection, batch_id: str, names: Sequence[str], output_dir: str
) -> dict[str, str]:
    """Return the environment of a batch's jobs, with the variables *names* of this process.

    Raises:
        ConfigurationError: This process lacks one of the variables.
    """
    if missing := [name for name in names if name not in os.environ]:
        raise ConfigurationError(
            f"{batch_id} needs the environment variables {', '.join(missing)}, which only the "
            "process that submitted it had; set them in this process and call again"
        )
    if names:
        message = "%s: captured these variables again, from this process: %s"
        logging.warning(message, batch_id, ", ".join(names))
    captured = {name: os.environ[name] for name in names}
    return job_environment(connection, captured, output_dir)


def _writes_to_cloud_storage(connection: Connection, output_dir: str) -> bool:
    """Return whether a job on this machine writes its outputs to Cloud Storage."""
    return connection.target.backend == "local" and "://" in output_dir


async def upload_all(
    store: Store, data: Sequence[Data], volumes: Mapping[str, Data]
) -> tuple[wire.DataRef, ...]:
    """Upload each `Data` once by content; return their references, the volumes first."""
    if not data:
        return ()
    from kinetic.aio._preparing import data_upload  # most calls have no `Data`

    mounts = list(volumes)
    refs = await all_or_none(*(data_upload.upload(store, entry) for entry in data))
    return tuple(
        replace(ref, mount=mounts[position]) if position < len(mounts) else ref
        for position, ref in enumerate(refs)
    )


async def _upload_code(store: Store, packed: PackedCall) -> wire.Code | None:
    if packed.archive is None:
        return None
    name, overlay = f"code/{packed.archive.digest}.zip", None
    uploads = [_upload(store, name, packed.archive.path)]
    if (packed_overlay := packed.overlay) is not None:
        digest = packed_overlay.digest
        overlay = wire.Input(f"code/{digest}.overlay", 0, packed_overlay.size, digest)
        uploads.append(_upload(store, overlay.name, packed_overlay.content))
    await all_or_none(*uploads)
    return wire.Code(
        name=name,
        digest=packed.archive.digest,
        overlay=overlay,
        sys_path=packed.project.sys_path,
        cwd=packed.project.cwd,
    )


async def _upload_function(store: Store, function: Spooled) -> wire.Input:
    name = f"functions/{function.digest}.pkl"
    await _upload(store, name, function.content)
    return wire.Input(name=name, start=0, stop=function.size, digest=function.digest)


async def _upload_init(store: Store, init: Spooled | None) -> wire.Input | None:
    return None if init is None else await _upload_function(store, init)


async def _upload(store: Store, name: str, content: bytes | Path) -> None:
    sent = await _shared_objects.ensure(store, name, content)
    logging.info("Uploaded %s to %s" if sent else "%s is in %s already", name, store.url)


async def hold_shared(
    connection: Connection, uploaded: UploadedCall, *, waited: float = 0.0
) -> None:
    """Make sure that the store still has what the new manifest of *uploaded* names.

    The submission has *waited* for this many seconds since the upload.

    Raises:
        BackendError: A collection has removed a part.
    """
    data = [ref.uri for ref in uploaded.data if "://" not in ref.uri]
    names = [*uploaded.shared_names, *data]
    await _shared_objects.hold(connection.platform.store, names, waited=waited)


def _resources(options: Options) -> Resources:
    accelerator = options.parsed_accelerator
    return Resources(
        accelerator=accelerator,
        cpu=options.cpu or (accelerator.count if accelerator.kind == "cpu" else 0) or 1.0,
        memory_bytes=options.memory_bytes,
    )


def _describe_client() -> dict[str, str]:
    from kinetic._version import __version__

    return {
        "python": platform.python_version(),
        "cloudpickle": cloudpickle.__version__,
        "kinetic": __version__,
        "executable": sys.executable,
        "log_levels": json.dumps(levels) if (levels := shown_levels()) else "",
    }


def log_choice(connection: Connection, uploaded: UploadedCall) -> None:
    """Log where a submission runs, and why; once per process, log what differs from the options."""
    target, call, options = connection.target, uploaded.call, uploaded.call.options
    logging.info("%s runs on %s (%s)", call.name, target.backend, target.why)
    substitute = _describe_substitute(options, connection.platform.capacity)
    if target.backend == "local" and substitute:
        # The user did not choose the default accelerator, so its substitute needs no warning.
        is_explicit = options.accelerator != DEFAULT_ACCELERATOR
        _log_once(logging.WARNING if is_explicit else logging.INFO, substitute)
    is_batch = call.arguments is None
    if is_batch and options.init is not None and options.isolation == "process":
        _log_once(
            logging.WARNING,
            f"{call.name}: init runs for each item, because each has a process of its own; with "
            "isolation='worker', it runs once for many items",
        )


_logged: set[str] = set()
"""What `_log_once` has logged."""


def _log_once(level: int, message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        logging.log(level, "%s", message)


def _describe_substitute(options: Options, capacity: Capacity | None) -> str:
    """Describe this machine's substitute for the accelerator; empty if it needs none."""
    requested, accelerator, changes = options.accelerator, options.parsed_accelerator, list[str]()
    if capacity is not None and accelerator.kind != "cpu":
        if not capacity.gpus:
            changes.append(f"{requested} becomes this machine's own processors ({capacity.cpus})")
        elif accelerator.kind == "tpu":
            changes.append(f"{requested} becomes this machine's own GPUs ({capacity.gpus})")
    if accelerator.hosts > 1:
        changes.append(f"the {accelerator.hosts} hosts of {requested} become one process here")
    if not changes:
        return ""
    return (
        f'backend="local": {", ".join(changes)}; backend="gke" runs on a cluster with {requested}'
    )


def _refuse_options(connection: Connection, options: Options) -> None:
    """Raise `ConfigurationError` if the platform can't run jobs with these options."""
    asked = "isolation='worker'" if options.isolation == "worker" else "init"
    is_asked = options.isolation == "worker" or options.init is not None
    # A worker that isn't replaced runs one item, so no later item could use what `init` made.
    if is_asked and not connection.platform.cluster.replaces:
        raise ConfigurationError(
            f"{asked} works on backend='local' and backend='gke' only, where a machine runs "
            "several items"
        )
    if (capacity := connection.platform.capacity) is not None:
        _refuse_excess(capacity, options)


def _refuse_excess(capacity: Capacity, options: Options) -> None:
    """Raise `ConfigurationError` if a job asks for more than the machine has."""
    cpus, memory = capacity.cpus, capacity.memory_bytes
    if options.cpu is not None and math.ceil(options.cpu) > cpus:
        raise ConfigurationError(
            f"cpu={options.cpu:g} is more than the {cpus} CPUs that local jobs may use; ask for "
            'less, raise KINETIC_LOCAL_SLOTS, or choose a backend other than "local"'
        )
    if options.memory_bytes is not None and options.memory_bytes > memory:
        raise ConfigurationError(
            f"memory={options.memory!r} is more than this machine has, {memory >> 20}Mi; ask for "
            'less, or choose a backend other than "local"'
        )
