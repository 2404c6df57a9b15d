"""The table of error codes agrees with the errors, their messages, and docs/troubleshooting.md.

``KINETIC_GOLDEN=write pytest tests/docs/test_troubleshooting.py`` rewrites the page's entries.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kinetic import errors
from kinetic._explanations import BY_CODE, ENTRIES, GROUPS, Entry
from kinetic._tracebacks import hint
from kinetic.job_status import Reason
from tests.docs import generated

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- the entries: generated -->\n", "<!-- the end of the entries -->\n"


def codes_of_errors() -> set[str]:
    """Return every code that an exception can have."""
    classes = [getattr(errors, name) for name in errors.__all__]
    losses = [errors.JobLost("", reason=reason) for reason in Reason]
    return {error.code for error in (*classes, *losses)}


def as_markdown(entry: Entry) -> str:
    return (
        f"### {entry.code}: {entry.title}\n\n```text\n{entry.message}\n```\n\n"
        f"**Cause.** {entry.cause}\n\n**Fix.** {entry.fix}\n\n"
    )


def entries() -> str:
    text = ""
    for digit, title in GROUPS.items():
        text += f"## {title}\n\n"
        text += "".join(as_markdown(entry) for entry in ENTRIES if entry.code.startswith(digit))
    return text


def string_literals() -> Iterator[str]:
    """Yield the string literals of the code; a NUL replaces each value in an f-string."""
    for folder in (ROOT / "kinetic", ROOT / "runner"):
        for file in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    constants = [part for part in node.values if isinstance(part, ast.Constant)]
                    yield "\0".join(str(part.value) for part in constants)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_every_error_has_an_entry_and_every_entry_an_error() -> None:
    assert len(BY_CODE) == len(ENTRIES)
    assert [entry.code for entry in ENTRIES] == sorted(BY_CODE)
    assert {code for code in BY_CODE if not code.startswith("KN0")} == codes_of_errors()


@pytest.mark.full
def test_the_messages_of_the_entries_are_those_of_the_code() -> None:
    literals = "\n".join(string_literals())
    reason = re.compile(rf"\(({'|'.join(Reason)})\)")
    with_own_message = [entry for entry in ENTRIES if entry.code not in ("KN002", "KN100")]
    missing = [
        (entry.code, part)
        for entry in with_own_message
        for part in reason.sub("(…)", entry.message).split("…")
        if part.strip(" :()") and part.strip(" :()") not in literals
    ]
    assert not missing


def test_the_page_has_the_entries() -> None:
    generated.check(PAGE, BEGIN, END, entries())


def test_an_error_of_the_api_names_its_code() -> None:
    import kinetic

    with pytest.raises(errors.ConfigurationError) as caught:
        kinetic.attach("grp-local-000000000000")
    assert hint(caught.value) in caught.value.__notes__
    assert hint(ValueError()) == ""
