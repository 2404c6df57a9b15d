"""Run any Python function on cloud TPUs and GPUs, or isolated on this machine."""

import os as _os
import sys as _sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kinetic import aio, collections, data, debug, errors, job_status, jobs, outcome, sweeps
    from kinetic._log_level import log_level
    from kinetic._runner.protocol.metrics import report, should_stop
    from kinetic._version import __version__ as __version__
    from kinetic.aio import submit
    from kinetic.data import Data
    from kinetic.errors import BatchError, KineticError, Pruned
    from kinetic.function import RemoteCallable, RemoteFunction, run
    from kinetic.job_status import JobStatus
    from kinetic.jobs import (
        BatchHandle,
        JobHandle,
        attach,
        attach_batch,
        cleanup,
        collect,
        list_batches,
        list_jobs,
    )
    from kinetic.metric import JobMetric, Metric
    from kinetic.outcome import Cancelled, Completion, Failed, Lost, Outcome, Succeeded
    from kinetic.progress import Progress
    from kinetic.worker import Worker

__all__ = [
    "BatchError",
    "BatchHandle",
    "Cancelled",
    "Completion",
    "Data",
    "Failed",
    "JobHandle",
    "JobMetric",
    "JobStatus",
    "KineticError",
    "Lost",
    "Metric",
    "Outcome",
    "Progress",
    "Pruned",
    "RemoteCallable",
    "RemoteFunction",
    "Succeeded",
    "Worker",
    "aio",
    "attach",
    "attach_batch",
    "cleanup",
    "collect",
    "collections",
    "data",
    "debug",
    "errors",
    "job_status",
    "jobs",
    "list_batches",
    "list_jobs",
    "log_level",
    "outcome",
    "report",
    "run",
    "should_stop",
    "submit",
    "sweeps",
]

# Importing kinetic loads only this file; the first use of a name loads the name's module.
_MODULES = {
    name: module
    for module, names in {
        "": "aio collections data debug errors job_status jobs outcome sweeps",  # submodules
        "kinetic._log_level": "log_level",
        "kinetic.aio": "submit",
        "kinetic.data": "Data",
        "kinetic._runner.protocol.metrics": "report should_stop",
        "kinetic.errors": "BatchError KineticError Pruned",
        "kinetic.function": "RemoteCallable RemoteFunction run",
        "kinetic.job_status": "JobStatus",
        "kinetic.jobs": (
            "BatchHandle JobHandle attach attach_batch cleanup collect list_batches list_jobs"
        ),
        "kinetic.metric": "JobMetric Metric",
        "kinetic.outcome": "Cancelled Completion Failed Lost Outcome Succeeded",
        "kinetic.progress": "Progress",
        "kinetic.worker": "Worker",
    }.items()
    for name in names.split()
}

_NAMES_ELSEWHERE = {
    "Client": "kinetic.aio.Client",
    **dict.fromkeys(("function", "remote", "task"), "@kinetic.run(...)"),
    **dict.fromkeys(("map", "run_async_map", "starmap"), "f.run_async_map(inputs)"),
    **dict.fromkeys(("run_async", "spawn"), "f.run_async(...)"),
    "sweep": "f.sweep(...)",
}
"""Names that other libraries, or other modules of kinetic, have for these."""

_IN_JOBS = {
    "report": "kinetic_runner.protocol.metrics",
    "run": "kinetic_runner.protocol.stand_ins",
    "should_stop": "kinetic_runner.protocol.metrics",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    module = "kinetic._version" if name == "__version__" else _MODULES.get(name)
    if "kinetic_runner" in _sys.modules:  # in a job
        module = _IN_JOBS.get(name, module)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        if name in _NAMES_ELSEWHERE:
            message += f": use {_NAMES_ELSEWHERE[name]}"
        raise AttributeError(message, name=name, obj=_sys.modules[__name__])
    value = getattr(import_module(module), name) if module else import_module(f"kinetic.{name}")
    globals()[name] = value
    return value


# keras-kinetic also installs a folder named kinetic, and its files replace ours. Only keras-kinetic
# has the file that this line looks for.
if _os.path.exists(_os.path.join(__path__[0], "core", "core.py")):
    import warnings

    warnings.warn(
        f"{__path__[0]} has files of keras-kinetic and of kinetic-aio, which replace each other; "
        "to fix it, run: pip uninstall -y keras-kinetic kinetic-aio; pip install kinetic-aio",
        stacklevel=2,
    )


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
