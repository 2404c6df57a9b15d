"""The docstrings of the sync API are those of the async API, in the words of a sync caller.

``KINETIC_GOLDEN=write pytest tests/face/test_sync_texts.py`` writes them into `kinetic/jobs.py`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from tests.docs import generated
from tests.docs.prose import ROOT

SYNC = ROOT / "kinetic" / "jobs.py"
ASYNC = [ROOT / "kinetic" / "aio" / f"{name}.py" for name in ("job", "batch", "sweeps", "client")]
ASYNC_FUNCTIONS = ROOT / "kinetic" / "aio" / "__init__.py"

OWN_TEXTS = {
    *("JobHandle", "BatchHandle", "Sweep"),  # how a script uses one, and closes it
    *("JobHandle.facing", "JobHandle.logs"),  # have another signature, or result
    "Sweep.batch",  # an attribute there
    "run",  # prints the output
}

AT_THE_END = """When your script ends, its process first submits the rest of the inputs; a further
Ctrl-C ends the process at once."""

WORDS = [
    (r"Closed or cancelled: ", "After a break or Ctrl-C: "),
    (r"^Cancelled: ", "Ctrl-C: "),
    (r"^(?P<margin> +)(?P<before>.*)\basync (?=with|for)", r"\g<margin>\g<before>"),
    (r"^(?P<margin> {4,}.*)\bawait ", r"\g<margin>"),
    (r"\bclient\.submit\((\w+), ", r"\1.run_async("),
    (r"\bclient\.run_async_map\((\w+), ", r"\1.run_async_map("),
    (r"\bclient\.sweep\((\w+), ", r"\1.sweep("),
    (r"\bkinetic\.aio\.sweep\((\w+), ", r"\1.sweep("),
    (r"``async (with|for)``", r"``\1``"),
    (r"print\(job\.group_index, job\)", "print(job.group_index, job.result())"),
    (r"^(?P<line> {4,}loss = job)$", r"\g<line>.result()"),
    (r"`Client\.(\w+)`", r"`\1`"),
    (r"kinetic\.aio\.load_result", "kinetic.jobs.load_result"),
    (r"\bclient\.(\w+)\(", r"kinetic.jobs.\1("),
    (r"as the client's settings say", "as environment, profile, or default says"),
    (r"(progress line while you wait. None:) no line", r"\1 show it"),
    (
        r"(nothing of the batch is left, except content that other calls share\.)",
        rf"\1\n{AT_THE_END}",
    ),
]
"""What to replace in the text of the async API, in this order."""

ALSO_ASYNC = "``async for`` also works, in any event loop."


def sync_text(text: str, *, iterates: bool) -> str:
    """Return the docstring of a sync function, from that of its async namesake."""
    for pattern, replacement in WORDS:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    if iterates:
        summary, gap, rest = text.partition("\n\n")
        text = f"{summary}\n\n{ALSO_ASYNC}{gap}{rest}"
    return text


def functions(path: Path) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the public functions and methods of a file that have a docstring, by name."""
    found: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    for node in ast.parse(path.read_text()).body:
        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for member in node.body if isinstance(node, ast.ClassDef) else [node]:
            if not isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not member.name.startswith("_") and ast.get_docstring(member):
                found[f"{owner}{member.name}"] = member
    return found


def expected_texts() -> dict[str, str]:
    sources = functions(ASYNC_FUNCTIONS)
    for path in ASYNC:
        for name, function in functions(path).items():
            sources[name.removeprefix("Client.")] = function
    texts: dict[str, str] = {}
    for name, function in functions(SYNC).items():
        if name not in OWN_TEXTS:
            text = ast.get_docstring(sources[name])
            iterates = "Iteration[" in ast.unparse(function.returns or ast.Constant(""))
            texts[name] = sync_text(text or "", iterates=iterates)
    return texts


def with_texts(code: str, texts: dict[str, str]) -> str:
    """Return the code of the sync API with these docstrings."""
    lines = code.splitlines()
    for name, function in sorted(functions(SYNC).items(), key=lambda it: -it[1].lineno):
        if name not in texts:
            continue
        docstring = function.body[0]
        margin = " " * docstring.col_offset
        end = "\n" if "\n" in texts[name] else ""
        body = textwrap.indent(f'"""{texts[name]}{end}', margin) + (margin if end else "") + '"""'
        lines[docstring.lineno - 1 : docstring.end_lineno] = body.splitlines()
    return "\n".join(lines) + "\n"


def test_the_texts_of_the_sync_api_are_those_of_the_async_one() -> None:
    texts = expected_texts()
    assert len(texts) > 50
    if generated.WRITES:
        SYNC.write_text(with_texts(SYNC.read_text(), texts))
    code = SYNC.read_text()
    assert with_texts(code, texts) == code, "see the docstring of this file"
