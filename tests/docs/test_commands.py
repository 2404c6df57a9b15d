"""docs/commands.md has every command and option, as the parser of the command line has them.

``KINETIC_GOLDEN=write pytest tests/docs/test_commands.py`` writes the page's entries anew.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from kinetic.cli.app import cli
from kinetic.cli.client import OPTIONS
from tests.docs import generated
from tests.docs.prose import ROOT

PAGE = ROOT / "docs" / "commands.md"
BEGIN, END = "<!-- the commands: generated -->\n", "<!-- the end of the commands -->\n"
PLAIN = re.compile(r"`[^`]+`|(?<!\S)(--[a-z][\w-]*|[\w.]+=(?:\"\w+\")?|KINETIC_\w+)")
"""Code in a help text: some of it stands without backticks."""


def walk(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    yield context
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from walk(child, click.Context(child, info_name=name, parent=context))


def marked(text: str) -> str:
    return PLAIN.sub(lambda one: f"`{one[1]}`" if one[1] else one[0], text)


def as_markdown(context: click.Context) -> str:
    command = context.command
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    text = f"## {context.command_path}\n\n{marked(inspect.cleandoc(command.help or ''))}\n\n"
    text += f"```text\n{usage}\n```\n\n"
    shared, rows = [], []
    for one in command.params:
        if record := one.get_help_record(context):
            (shared if is_shared(one) else rows).append(record)
    if len(shared) < len(OPTIONS):
        rows, shared = rows + shared, []
    text += table(rows)
    if shared:
        text += "It also takes the [shared options](#shared-options).\n\n"
    return text


def is_shared(one: click.Parameter) -> bool:
    words, _ = OPTIONS.get((one.name or "").replace("_", "-"), ("", ""))
    return isinstance(one, click.Option) and words != "" and (one.help or "").startswith(words)


def table(rows: list[tuple[str, str]]) -> str:
    bar = str.maketrans({"|": r"\|"})
    lines = [
        f"| `{option.translate(bar)}` | {' '.join(marked(words).split()).translate(bar)} |\n"
        for option, words in rows
        if words
    ]
    return "".join(["| option | what it does |\n|---|---|\n", *lines, "\n"]) if lines else ""


def entries() -> str:
    root = click.Context(cli, info_name="kinetic", **cli.context_settings)
    context = click.Context(cli.commands["gc"], parent=root)
    shared = [one.get_help_record(context) for one in context.command.params if is_shared(one)]
    text = f"## Shared options\n\n{table([one for one in shared if one])}"
    return text + "".join(as_markdown(context) for context in walk(cli, root))


def test_the_page_has_the_commands() -> None:
    generated.check(PAGE, BEGIN, END, entries())
