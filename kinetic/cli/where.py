"""Where a command looks: the options that all of them share, and the client they open."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import click

if TYPE_CHECKING:
    from kinetic import aio

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])


class FilePath(click.Path):
    """A path that a command gets as `Path`; `kinetic --help` need not import `pathlib`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the path as click does, and return it as `Path`."""
        from pathlib import Path

        return Path(os.fsdecode(super().convert(value, param, ctx)))


class Where(NamedTuple):
    """The values of the shared options; None leaves a setting to environment and profile."""

    project: str | None = None
    zone: str | None = None
    cluster: str | None = None
    namespace: str | None = None
    backend: str | None = None
    store: str | None = None
    kube_context: str | None = None

    def given(self) -> dict[str, str]:
        """Return the options that were given, by their names."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def point(self) -> None:
        """Let the environment say what is no argument of anything."""
        if self.kube_context is not None:
            os.environ["KINETIC_KUBE_CONTEXT"] = self.kube_context

    def client(self, *, begins: bool = False) -> aio.Client:
        """A client that looks there; to be closed. Only what *begins* something makes a store.

        Raises:
            NotFound: There is no such folder.
        """
        import logging

        from kinetic import aio
        from kinetic.errors import NotFound

        folder = self.store if self.store is not None and "://" not in self.store else None
        if folder is not None and not begins and not os.path.isdir(os.path.expanduser(folder)):
            raise NotFound(f"there is no store at {folder}: correct --store")
        logging.basicConfig(format="kinetic: %(message)s")
        self.point()
        return aio.Client(
            backend=self.backend,
            project=self.project,
            zone=self.zone,
            cluster=self.cluster,
            namespace=self.namespace,
            store=self.store,
        )


OPTIONS = (
    ("project", "The Google Cloud project."),
    ("zone", "The zone of the cluster."),
    ("cluster", "The name of the cluster."),
    ("namespace", "The Kubernetes namespace."),
    ("backend", "gke, pathways or local."),
    ("store", "The bucket (gs://…) or folder with the objects of jobs."),
    ("kube-context", "A context of the kubeconfig, instead of a GKE cluster."),
)


def placed(command: Command) -> Command:
    """Give a command the shared options, as one argument ``where``."""

    @functools.wraps(command)
    def with_where(*args: Any, **kwargs: Any) -> Any:
        said = {name.replace("-", "_"): kwargs.pop(name.replace("-", "_")) for name, _ in OPTIONS}
        return command(*args, where=Where(**said), **kwargs)

    made: Any = with_where
    for name, words in reversed(OPTIONS):
        made = click.option(f"--{name}", metavar="TEXT", help=words)(made)
    return cast("Command", made)


def json_option(command: Command) -> Command:
    """Give a command ``--json``, as its argument ``as_json``."""
    words = "Print JSON (docs/reference/cli.md has its forms)."
    made: Any = click.option("--json", "as_json", is_flag=True, help=words)(command)
    return cast("Command", made)


class TheirError(Exception):
    """What code of the user raised, in words: its class says nothing about the command."""


def said_by(error: BaseException) -> str:
    """An exception of somebody else's, as Python would name it."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def carry_out(work: Coroutine[Any, Any, T]) -> T:
    """Do the work of a command, on an event loop of its own.

    Raises:
        TheirError: The function of a job raised something.
    """
    import asyncio

    try:
        return asyncio.run(work)
    except Exception as exc:
        if (theirs := _of_a_job(exc)) is None:
            raise
        raise TheirError(theirs) from exc


def _of_a_job(error: Exception) -> str | None:
    """What the function of a job raised, in words; None if it is the command's own error."""
    from kinetic._tracebacks import REMOTE_TRACEBACK
    from kinetic.errors import JobFailed

    if isinstance(error.__cause__, StopIteration):  # which no coroutine may raise as it is
        error = error.__cause__
    if not any(REMOTE_TRACEBACK in one for one in getattr(error, "__notes__", ())):
        return None
    return str(error) if isinstance(error, JobFailed) else said_by(error)
