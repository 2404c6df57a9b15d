"""docs/commands.md lists every command and option of the command line's parser.

``KINETIC_GOLDEN=write pytest tests/docs/test_commands.py`` rewrites the page's entries.
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
"""Code in a help text, with or without backticks."""


def walk(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    yield context
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from walk(child, click.Context(child, info_name=name, parent=context))


def with_backticks(text: str) -> str:
    return PLAIN.sub(lambda match: f"`{match[1]}`" if match[1] else match[0], text)


def as_markdown(context: click.Context) -> str:
    command = context.command
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    text = (
        f"## {context.command_path}\n\n{with_backticks(inspect.cleandoc(command.help or ''))}\n\n"
    )
    text += f"```text\n{usage}\n```\n\n"
    shared, rows = [], []
    for parameter in command.params:
        if record := parameter.get_help_record(context):
            (shared if is_shared(parameter) else rows).append(record)
    if len(shared) < len(OPTIONS):
        rows, shared = rows + shared, []
    text += table(rows)
    if shared:
        text += "It also takes the [shared options](#shared-options).\n\n"
    return text


def is_shared(parameter: click.Parameter) -> bool:
    if not isinstance(parameter, click.Option):
        return False
    help_text, _ = OPTIONS.get((parameter.name or "").replace("_", "-"), ("", ""))
    return help_text != "" and (parameter.help or "").startswith(help_text)


def table(rows: list[tuple[str, str]]) -> str:
    bar = str.maketrans({"|": r"\|"})
    lines = [
        f"| `{option.translate(bar)}` | {' '.join(with_backticks(text).split()).translate(bar)} |\n"
        for option, text in rows
        if text
    ]
    return "".join(["| option | what it does |\n|---|---|\n", *lines, "\n"]) if lines else ""


def entries() -> str:
    root = click.Context(cli, info_name="kinetic", **cli.context_settings)
    context = click.Context(cli.commands["gc"], parent=root)
    shared = [
        option.get_help_record(context) for option in filter(is_shared, context.command.params)
    ]
    text = f"## Shared options\n\n{table([record for record in shared if record])}"
    return text + "".join(as_markdown(context) for context in walk(cli, root))


def test_the_page_has_the_commands() -> None:
    generated.check(PAGE, BEGIN, END, entries())
