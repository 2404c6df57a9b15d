"""Where the API server keeps what is ours, and how it is asked for by labels."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from kinetic.aio.clusters._job_manifest import ATTEMPT, ITEM, JOB, MANAGED
from kinetic.aio.clusters._names import item_name, items_of, label_value, object_name

__all__ = ["Paths", "before", "by_items", "by_jobs", "by_labels"]

NAMES = 50
"""Names of jobs in one selector: a request's address has its limits."""


class Paths:
    """The addresses of one namespace's collections."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.secrets = f"/api/v1/namespaces/{namespace}/secrets"
        self.events = f"/api/v1/namespaces/{namespace}/events"
        self.nodes = "/api/v1/nodes"


def by_labels(labels: Mapping[str, str]) -> str:
    """A selector for what is ours and carries all of *labels*, jobs and pods alike."""
    wanted = {MANAGED: "kinetic"} | {key: label_value(value) for key, value in labels.items()}
    return ",".join(f"{key}={value}" for key, value in wanted.items())


def by_jobs(names: Collection[str]) -> Iterator[str]:
    """Selectors that together find the Jobs that were made for these attempts."""
    yield from _any_of(JOB, {object_name(name) for name in names})


def by_items(names: Collection[str]) -> Iterator[str]:
    """Selectors that find the jobs, and the pods, these attempts are in, and a few more."""
    yield from _any_of(ITEM, {object_name(item) for name in names for item in items_of(name)})


def before(name: str, attempt: int) -> str:
    """A selector for all Jobs that attempt number *attempt*, called *name*, may be in."""
    numbers = ",".join(str(one) for one in range(1, attempt + 1))
    item = object_name(item_name(name, str(attempt)))
    return f"{MANAGED}=kinetic,{ITEM}={item},{ATTEMPT} in ({numbers})"


def _any_of(label: str, values: Collection[str]) -> Iterator[str]:
    known = sorted(values)
    for start in range(0, len(known), NAMES):
        some = known[start : start + NAMES]
        chosen = f"{label}={some[0]}" if len(some) == 1 else f"{label} in ({','.join(some)})"
        yield f"{MANAGED}=kinetic,{chosen}"
