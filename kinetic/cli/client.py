"""Give commands a client, an event loop, and the options that select where jobs are."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import click

if TYPE_CHECKING:
    from kinetic import aio

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])
AsyncCommand = Callable[..., Coroutine[Any, Any, Any]]


class FilePath(click.Path):
    """A type of option with `Path` values, which imports `pathlib` only to convert a value."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the path as click does, and return it as `Path`."""
        from pathlib import Path

        return Path(os.fsdecode(super().convert(value, param, ctx)))


SYNONYMS = {
    **dict.fromkeys(("ls", "ps"), ("jobs list", "batches list")),
    **dict.fromkeys(("kill", "stop"), ("jobs cancel", "batches cancel")),
    **dict.fromkeys(("delete", "rm"), ("jobs cleanup", "batches cleanup")),
    **dict.fromkeys(("auth", "login", "whoami"), ("doctor", "init")),
    **dict.fromkeys(("exec", "start", "submit"), ("run",)),
    "top": ("batches watch",),
}
"""Commands to suggest for a command of another tool that kinetic hasn't."""


class Group(click.Group):
    """A group of commands that suggests commands for an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that *args* name.

        Raises:
            click.UsageError: There is none; the message has the commands with a similar name.
        """
        name = args[0]
        known = self.get_command(ctx, name) is not None
        if known or ctx.resilient_parsing or name.startswith("-"):
            return super().resolve_command(ctx, args)
        root = ctx.find_root()
        here = ctx.command_path.removeprefix(root.command_path).split()
        found = [*_similar(self, name, here), *_similar(root.command, name, [])]
        found += [tuple(command.split()) for command in SYNONYMS.get(name, ()) if not here]
        suggestions = ", ".join(
            f"`{root.command_path} {' '.join(words)}`" for words in dict.fromkeys(found)
        )
        hint = f"Did you mean {suggestions}?" if found else f"Try {ctx.command_path} --help."
        raise click.UsageError(f"No such command {name!r}. {hint}", ctx)


def _similar(group: click.Command, name: str, path: list[str]) -> list[tuple[str, ...]]:
    """Return the commands below *group* that are called like *name*, with the words before them."""
    from difflib import get_close_matches

    assert isinstance(group, click.Group)
    names = [name] if name in group.commands else get_close_matches(name, group.commands)
    found = [(*path, similar) for similar in names]
    for child_name, child in group.commands.items():
        if isinstance(child, click.Group) and name in child.commands:
            found.append((*path, child_name, name))
    return found


class _Stderr:
    """Write to the current `sys.stderr`, which a live display replaces temporarily."""

    def write(self, text: str, /) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class TargetOptions(NamedTuple):
    """The values of the shared options; None means that the environment or the profile decides."""

    project: str | None = None
    zone: str | None = None
    cluster: str | None = None
    namespace: str | None = None
    backend: str | None = None
    store: str | None = None
    kube_context: str | None = None

    def given(self) -> dict[str, str]:
        """Return the options on the command line, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def set_context(self) -> None:
        """Put --kube-context into the environment, because no function takes it as an argument."""
        if self.kube_context is not None:
            os.environ["KINETIC_KUBE_CONTEXT"] = self.kube_context

    def target(self) -> dict[str, Any]:
        """Return the options that name a target, by name."""
        return {name: value for name, value in self._asdict().items() if name != "kube_context"}

    def client(self, *, creates_store: bool = False) -> aio.Client:
        """Return a client for these options; the caller closes it."""
        import logging

        from kinetic import aio

        folder = self.store if self.store is not None and "://" not in self.store else None
        if folder and not creates_store and not os.path.isdir(os.path.expanduser(folder)):
            raise click.BadParameter(f"there is no store at {folder}", param_hint="--store")
        logging.basicConfig(format="kinetic: %(message)s", stream=_Stderr())
        self.set_context()
        return aio.Client(**self.target())

    def run(self, work: Callable[[aio.Client], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine of *work* with an open client."""

        async def run_with_client() -> T:
            async with self.client() as client:
                return await work(client)

        return run_async(run_with_client())


OPTIONS = {
    "project": ("Google Cloud project.", "none"),
    "zone": ("Zone of the GKE cluster.", "us-central1-a"),
    "cluster": ("Name of the GKE cluster.", "kinetic-cluster"),
    "namespace": ("Kubernetes namespace of the jobs.", "default"),
    "backend": ("local, gke, or pathways.", "gke with a project or context, else local"),
    "store": ("Bucket (gs://NAME) or folder for inputs and results.", "the backend's own"),
    "kube-context": ("Context of the kubeconfig to use instead of a GKE cluster.", "none"),
}
"""The shared options: their help, and their defaults if no variable or profile sets them."""


def with_target_options(command: Command) -> Command:
    """Give *command* the shared options as its argument ``options``."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        options = TargetOptions(**{name: kwargs.pop(name) for name in TargetOptions._fields})
        return command(*args, options=options, **kwargs)

    return cast("Command", with_options(*OPTIONS)(wrapper))


def with_options(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Give a command those of the shared options that have these *names*."""

    def decorate(command: Callable[..., Any]) -> Any:
        for name in reversed(names):
            help_text, default_value = OPTIONS[name]
            variable = f"KINETIC_{name.replace('-', '_').upper()}"
            help_text += f" Default: {variable}, then the profile, then {default_value}."
            command = click.option(f"--{name}", metavar="TEXT", help=help_text)(command)
        return command

    return decorate


def with_client(command: AsyncCommand) -> Callable[..., Any]:
    """Run the coroutine *command* with an open client as its first argument."""

    @functools.wraps(command)
    def wrapper(options: TargetOptions, **kwargs: Any) -> Any:
        return options.run(functools.partial(command, **kwargs))

    return with_target_options(wrapper)


def with_job(command: AsyncCommand) -> Callable[..., Any]:
    """Run the coroutine *command* with the job that its argument JOB_ID names."""

    @functools.wraps(command)
    async def wrapper(client: aio.Client, job_id: str, **kwargs: Any) -> Any:
        return await command(await client.attach(await client.full_id(job_id)), **kwargs)

    return click.argument("job_id")(with_client(wrapper))


def with_batch(command: AsyncCommand) -> Callable[..., Any]:
    """Run the coroutine *command* with the batch that its argument GROUP_ID names."""

    @functools.wraps(command)
    async def wrapper(client: aio.Client, group_id: str, **kwargs: Any) -> Any:
        return await command(await client.attach_batch(await client.full_id(group_id)), **kwargs)

    return click.argument("group_id")(with_client(wrapper))


def json_option(command: Command) -> Command:
    """Give *command* the option ``--json`` as its argument ``as_json``."""
    help_text = "Print JSON for programs; its field `schema` names the form."
    decorated: Any = click.option("--json", "as_json", is_flag=True, help=help_text)(command)
    return cast("Command", decorated)


class UserError(Exception):
    """An exception of the user's code, as text: its type must not choose the exit code."""


def format_error(error: BaseException) -> str:
    """Format the type and the message of *error*, as the last line of a traceback does."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine of a command on a new event loop.

    Raises:
        UserError: The function of a job raised an exception.
    """
    try:
        import asyncio

        return asyncio.run(coroutine)
    except Exception as exc:
        from kinetic._tracebacks import REMOTE_TRACEBACK
        from kinetic.errors import JobFailed

        # Python wraps the StopIteration of a coroutine.
        error = exc.__cause__ if isinstance(exc.__cause__, StopIteration) else exc
        if not any(REMOTE_TRACEBACK in note for note in getattr(error, "__notes__", ())):
            raise  # an error of the command itself
        message = str(error) if isinstance(error, JobFailed) else format_error(error)
        raise UserError(message) from exc
    finally:
        coroutine.close()  # without effect unless Ctrl-C came before the loop
