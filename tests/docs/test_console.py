"""Run the `console` blocks of all pages and the skill, and parse all commands of shell blocks.

A `console` block shows commands after `$ `, and their output. All blocks of a page run in order,
in one empty project and one new home. `…` in the output stands for any text. An `sh` block shows
commands that no test runs; `NOT_RUN` says why.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest

from kinetic.cli.app import cli
from tests import programs
from tests.cli.changing import CHANGING
from tests.docs.prose import PAGES, ROOT

CLOUD = "needs a project of Google Cloud"
CLUSTER = "needs a cluster"
LIBRARIES = "installs libraries; tests/docs/test_examples.py runs the program where they are"
WRITTEN = [*PAGES, ROOT / "AGENTS.md", ROOT / "skills/kinetic/SKILL.md"]
"""All pages with commands: those of the site, and those that only agents read."""

NOT_RUN = {
    "AGENTS.md": "runs the tests",
    "README.md": "installs packages and runs the tests; .ci/run runs these commands",
    "CONTRIBUTING.md": "runs the tests",
    "benchmarks/README.md": "takes minutes",
    "docs/getting_started.md": "installs kinetic",
    "docs/install.md": "installs kinetic",
    "docs/protocol.md": "is a test, which tests/simulation runs",
    "docs/examples/gemma4_finetuning.md": LIBRARIES,
    "docs/examples/jax_training.md": LIBRARIES,
    "docs/examples/keras_training.md": LIBRARIES,
    "docs/examples/llm_finetuning.md": LIBRARIES,
    "docs/examples/pytorch_training.md": LIBRARIES,
    "docs/guides/clusters.md": CLOUD,
    "docs/guides/coming_from_keras_kinetic.md": "installs kinetic, and runs the reader's program",
    "docs/guides/containers.md": CLOUD + ", or Docker",
    "docs/guides/doctor.md": CLUSTER,
    "docs/guides/kubernetes.md": CLUSTER,
    "docs/guides/own_cluster.md": CLUSTER,
    "docs/guides/queues.md": CLUSTER,
    "docs/index.md": "installs kinetic, and " + CLOUD + "; test_first_steps.py runs the rest",
}
"""Why no test runs the `sh` blocks of a page."""

VARYING = (
    (r"((?:job|grp)-local)-[0-9a-f]{12}", r"\1-ID"),
    *CHANGING,
    (r"process \d+", "process NUMBER"),
    (r"(-rw-{7}) .* (?=/)", r"\1 "),
    (r"CPython 3\.\d+\.\d+\S* on \w+ \w+", "CPython VERSION on MACHINE"),
    (r"\d+ ok", "NUMBER ok"),
    (r"\d+ files ship, [\d.]+ kB", "NUMBER files ship, SIZE"),
)
"""Patterns of text that differs from run to run, and their replacements."""

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"Save this as `([\w.]+)`:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(kinetic [a-z][^`]*)`")
JOB = re.compile(r"\b(?:job|grp)-local-[0-9a-f]{12}\b")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[str]:
    found = BLOCK.findall(page.read_text())
    return [text for language, text in found if language in languages]


def files(page: Path) -> dict[str, str]:
    """Return the files that the page tells its reader to save."""
    return dict(FILE.findall(page.read_text()))


def steps(block: str) -> list[tuple[str, str]]:
    """Return each command of a `console` block with the output below it."""
    assert block.startswith("$ "), block
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


def normalized(text: str) -> str:
    for pattern, replacement in VARYING:
        text = re.sub(pattern, replacement, text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def agrees(shown: str, printed: str) -> bool:
    pattern = re.escape(normalized(shown)).replace("…", ".*?")
    return re.fullmatch(pattern, normalized(printed), re.DOTALL) is not None


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each `kinetic` command in a block."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("();<>|&"):
                if words[:1] == ["kinetic"]:
                    yield words
                words = []
            elif words or "=" not in word:
                words.append(word)


def parse(words: list[str]) -> None:
    """Parse a command as `kinetic` does, and check the values of its options; run nothing.

    Raises:
        click.UsageError: There is no such command or option, or it doesn't take that value.
    """
    command: click.Command = cli
    title, rest, context = words[0], words[1:], None
    while True:
        context = command.make_context(title, rest, parent=context)
        if not isinstance(command, click.Group):
            return
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        _, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command, title = found, found.name or ""


def test_only_pages_with_a_reason_have_sh_blocks() -> None:
    assert {name(page) for page in WRITTEN if blocks(page, "sh")} == {*NOT_RUN}
    assert [name(page) for page in WRITTEN if blocks(page, "bash", "shell", "zsh")] == []


def test_every_command_of_a_block_is_one_of_the_command_line() -> None:
    found = [
        (name(page), words)
        for page in WRITTEN
        for block in blocks(page, "console", "sh")
        for text in (
            [command for command, _ in steps(block)] if block.startswith("$ ") else [block]
        )
        for words in commands(text)
    ]
    invalid = []
    for page, words in found:
        try:
            parse(words)
        except click.exceptions.Exit:
            pass  # `--version` and `--help` end the parser
        except click.ClickException as error:
            invalid.append((page, words, error.format_message()))
    assert len(found) > 30
    assert invalid == []


def test_every_command_and_option_in_a_sentence_exists() -> None:
    found = [
        (name(page), words)
        for page in WRITTEN
        for code in INLINE.findall(BLOCK.sub("", page.read_text()))
        for words in commands(code)
    ]
    absent = []
    for page, words in found:
        try:
            parse(words)
        except click.exceptions.Exit:
            pass
        except click.ClickException as error:  # in a sentence, arguments may be missing
            if error.format_message().startswith("No such"):
                absent.append((page, words))
    assert len(found) > 100
    assert absent == []


def test_the_skill_has_a_name_and_a_description_that_agents_can_read() -> None:
    text = (ROOT / "skills/kinetic/SKILL.md").read_text()
    front = text.removeprefix("---\n").partition("\n---\n")[0]
    fields = dict(line.split(": ", 1) for line in front.splitlines())
    assert fields.keys() == {"name", "description"}
    assert fields["name"] == "kinetic"
    assert 100 < len(fields["description"]) <= 1024
    paths = re.findall(r"`(docs/[^`]*\.md)`", text)
    assert paths and [path for path in paths if not (ROOT / path).is_file()] == []


def test_the_links_of_the_page_for_agents_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "AGENTS.md").read_text())
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_a_command_that_does_not_exist_is_found() -> None:
    (words,) = commands("KINETIC_ZONE=z kinetic pool add --min-node 1 | head  # a comment")
    with pytest.raises(click.NoSuchOption):
        parse(words)


def test_an_output_that_differs_is_found() -> None:
    assert agrees(
        "job-local-0123456789ab ended\n…\nat last", "job-local-ba9876543210 ended\n\nat last"
    )
    assert not agrees("job-local-0123456789ab ended", "job-local-0123456789ab failed")


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in WRITTEN if blocks(page, "console")], ids=name)
def test_the_commands_of_a_page_print_what_it_shows(
    page: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = home / "project"
    project.mkdir()
    (project / "pyproject.toml").touch()
    shutil.copytree(ROOT / "examples", project / "examples")
    for file, text in (files(ROOT / "docs/cli.md") | files(page)).items():
        (project / file).write_text(text)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("KINETIC_HOME")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("COLUMNS", raising=False)
    ids: dict[str, str] = {}  # job ID on the page → job ID in this run
    for block in blocks(page, "console"):
        for command, shown in steps(block):
            printed = output(command, ids, cwd=project).replace(str(home), "/home/me")
            assert agrees(shown, printed), f"$ {command}\n{printed}"
            ids |= zip(JOB.findall(shown), JOB.findall(printed), strict=False)


def output(command: str, ids: Mapping[str, str], *, cwd: Path) -> str:
    command = JOB.sub(lambda match: ids[match[0]], command)
    # A library that pytest loads, readline, puts COLUMNS into the environment, but not into this.
    environ = {**os.environ}
    return programs.output("bash", "-c", f"exec 2>&1; {command}", cwd=cwd, env=environ, timeout=60)
