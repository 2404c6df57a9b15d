"""Test the hints at the end of a job's error."""

from __future__ import annotations

import sys

CODE = """
import traceback

@kinetic.run(backend="local", accelerator="cpu", memory="256Mi")
def fails(reason):
    if reason == "variable":
        return os.environ["WANTED"]
    if reason == "other key":
        return {}["WANTED"]
    if reason == "module":
        import nothing_of_this_name.inside
    return len(bytearray(1 << 40))

for reason in ("variable", "module", "memory", "other key"):
    try:
        fails(reason)
    except Exception:
        text = traceback.format_exc()
        last = text.rstrip().splitlines()[-1]
        print(text.count(last), last)
"""

HINTS = (
    ["'WANTED'", "capture_env_vars="],
    ["install nothing_of_this_name for", sys.executable],
    ["memory=", "256 MiB"],
)


def test_an_error_ends_with_a_hint(script) -> None:
    with script(CODE) as process:
        for hint in HINTS:
            last = process.line()
            assert last.startswith("1 ") and all(word in last for word in hint), last
        last = process.line()
        assert last.endswith("KeyError: 'WANTED'"), "a key that names no variable gets no hint"
        assert process.end() == (0, "", "")
