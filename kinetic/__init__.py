"""Run any Python function on cloud TPUs and GPUs, or isolated on this machine."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kinetic import aio, debug, errors, job_status, jobs, outcome
    from kinetic.aio import submit
    from kinetic.data import Data
    from kinetic.errors import BatchError, KineticError
    from kinetic.function import RemoteFunction, run
    from kinetic.job_status import JobStatus
    from kinetic.jobs import (
        BatchHandle,
        JobHandle,
        attach,
        attach_batch,
        collect,
        list_batches,
        list_jobs,
    )
    from kinetic.outcome import Cancelled, Completion, Failed, Lost, Outcome, Succeeded
    from kinetic.progress import Progress

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "BatchHandle",
    "Cancelled",
    "Completion",
    "Data",
    "Failed",
    "JobHandle",
    "JobStatus",
    "KineticError",
    "Lost",
    "Outcome",
    "Progress",
    "RemoteFunction",
    "Succeeded",
    "aio",
    "attach",
    "attach_batch",
    "collect",
    "debug",
    "errors",
    "job_status",
    "jobs",
    "list_batches",
    "list_jobs",
    "outcome",
    "run",
    "submit",
]

# Importing kinetic loads this file and nothing else; a name loads what it needs.
_HOMES = {
    "BatchError": "kinetic.errors",
    "BatchHandle": "kinetic.jobs",
    "Cancelled": "kinetic.outcome",
    "Completion": "kinetic.outcome",
    "Data": "kinetic.data",
    "Failed": "kinetic.outcome",
    "JobHandle": "kinetic.jobs",
    "JobStatus": "kinetic.job_status",
    "KineticError": "kinetic.errors",
    "Lost": "kinetic.outcome",
    "Outcome": "kinetic.outcome",
    "Progress": "kinetic.progress",
    "RemoteFunction": "kinetic.function",
    "Succeeded": "kinetic.outcome",
    "aio": "",
    "attach": "kinetic.jobs",
    "attach_batch": "kinetic.jobs",
    "collect": "kinetic.jobs",
    "debug": "",
    "errors": "",
    "job_status": "",
    "jobs": "",
    "list_batches": "kinetic.jobs",
    "list_jobs": "kinetic.jobs",
    "outcome": "",
    "run": "kinetic.function",
    "submit": "kinetic.aio",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name) if home else import_module(f"kinetic.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
