"""The root command, and the exit code of each kind of error."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from kinetic.cli import (
    accelerators,
    batches,
    clusters,
    doctor,
    images,
    init,
    jobs,
    machine,
    output,
    run,
    settings,
    sweep,
)
from kinetic.cli.client import Group, UserError, json_option
from kinetic.cli.output import note

SUCCEEDED, FAILED, USAGE, NOT_FOUND, NO_ACCESS, TIMED_OUT, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

EXIT_CODES = (
    ("NotFound", NOT_FOUND),
    ("AuthError", NO_ACCESS),
    ("ResultTimeout", TIMED_OUT),
    ("ConfigurationError", USAGE),
)
"""Exit codes by class of `kinetic.errors`; the first match counts, any other error is `FAILED`."""

SUGGESTIONS = {NOT_FOUND: "kinetic jobs list, kinetic batches list", NO_ACCESS: "kinetic doctor"}
"""Commands to suggest after an exit code."""


@click.group(
    cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option("--profile", metavar="NAME", help="Profile to use instead of the current one.")
@click.version_option(package_name="kinetic-aio", message="%(package)s %(version)s")
@json_option
@click.pass_context
def cli(context: click.Context, profile: str | None, as_json: bool) -> None:
    """Run functions on TPUs, GPUs, or this machine, and manage their jobs.

    --json stands before or after the name of the command.
    """
    from kinetic import configuration

    if as_json:
        context.default_map = _json_by_default(cli)
    configuration.log_level()  # an invalid level is an error in every command
    if profile is None:
        return
    if context.invoked_subcommand == "profile":
        raise click.UsageError("--profile has no effect on `kinetic profile`: leave it out")
    os.environ["KINETIC_PROFILE"] = profile


def _json_by_default(group: click.Group) -> dict[str, Any]:
    """Return defaults with which each command below *group* prints JSON."""
    return {
        name: _json_by_default(command) if isinstance(command, click.Group) else {"as_json": True}
        for name, command in group.commands.items()
    }


@cli.command(short_help="Print a script for shell completion.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@json_option
def completion(shell: str, as_json: bool) -> None:
    """Print a completion script for SHELL.

    Add this line to the shell's start-up file: eval "$(kinetic completion bash)"
    """
    from click.shell_completion import get_completion_class

    completion_class = get_completion_class(shell)
    assert completion_class is not None
    script = completion_class(cli, {}, "kinetic", "_KINETIC_COMPLETE").source()
    if as_json:
        output.json_line("completion", {"shell": shell, "script": script}, indent=2)
    else:
        click.echo(script)


@cli.command(short_help="Explain an error code, such as KN204.")
@click.argument("code", required=False)
@json_option
def explain(code: str | None, as_json: bool) -> None:
    """Print what CODE means: what you see, the cause, and the fix.

    Without CODE, list all codes.
    """
    import textwrap
    from dataclasses import asdict

    from kinetic._explanations import BY_CODE, ENTRIES

    if code is None:
        rows = [asdict(entry) for entry in ENTRIES]
        output.table("codes", ("code", "title"), rows, as_json=as_json)
        return
    entry = BY_CODE.get(code.upper())
    if entry is None:
        raise click.UsageError(f"there is no code {code}; `kinetic explain` lists all")
    if as_json:
        output.json_line("code", asdict(entry), indent=2)
        return
    click.echo(f"{entry.code}: {entry.title}\n")
    for name in ("message", "cause", "fix"):
        paragraph = f"{name.capitalize():<9}{getattr(entry, name)}"
        click.echo(textwrap.fill(paragraph, 88, subsequent_indent=" " * 9, break_on_hyphens=False))


for command in (
    run.run,
    sweep.sweep,
    jobs.jobs,
    batches.batches,
    jobs.outputs,
    settings.config,
    settings.profile,
    accelerators.accelerators,
    images.build_image,
    images.image,
    machine.package,
    machine.gc,
    machine.local,
    doctor.doctor,
    clusters.up,
    clusters.down,
    clusters.status,
    clusters.pool,
    init.init,
):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: with 0 if it succeeded, or with the code of its error."""
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed before Python started, as by `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # None if something replaces the stream
    if reconfigure is not None and sys.stdout.errors in ("strict", "surrogateescape"):
        # As on standard error: a character that the terminal lacks must not end the command.
        reconfigure(errors="backslashreplace")
    try:
        code = cli.main(args=arguments, prog_name="kinetic", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else SUCCEEDED
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        note("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Otherwise the interpreter flushes the remaining output at exit, and reports an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED  # click exits with the same code if it notices the closed pipe
    except Exception as exc:
        from kinetic import errors
        from kinetic._tracebacks import hint

        if not isinstance(exc, (UserError, errors.KineticError, errors.BatchError, OSError)):
            raise  # a bug in kinetic: the traceback helps to report it
        code = exit_code(exc)
        advice = f"(try: {SUGGESTIONS[code]})" if code in SUGGESTIONS else ""
        note("\n".join(line for line in (str(exc), advice, hint(exc)) if line))
        return code


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that failed with *error*."""
    from kinetic import errors

    if isinstance(error, TimeoutError):
        return TIMED_OUT
    error_types = ((getattr(errors, name), code) for name, code in EXIT_CODES)
    return next((code for error_type, code in error_types if isinstance(error, error_type)), FAILED)
