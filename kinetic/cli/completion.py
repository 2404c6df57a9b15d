"""``kinetic completion``: shell completion of commands, options, and file names."""

from __future__ import annotations

import click


@click.command(short_help="Print a script for shell completion.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a completion script for SHELL.

    Add this line to the start-up file: eval "$(kinetic completion bash)"
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(context.find_root().command, {}, "kinetic", "_KINETIC_COMPLETE")
    click.echo(made.source())
