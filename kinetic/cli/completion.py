"""``kinetic completion``: what a shell needs to complete commands, options and file names."""

from __future__ import annotations

import click


@click.command(short_help="Print what a shell needs to complete all this.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script for SHELL: eval "$(kinetic completion bash)" in its start-up file."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(context.find_root().command, {}, "kinetic", "_KINETIC_COMPLETE")
    click.echo(made.source())
