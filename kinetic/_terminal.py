"""What a terminal may be sent of a text that somebody else wrote."""

from __future__ import annotations

import re

__all__ = ["shown", "unstyled"]

_STYLE = re.compile(r"\x1b\[[0-9;:]*m")
"""Colours and the like: the one kind of sequence that changes nothing but how text looks."""

_COMMAND = re.compile(
    r"""(?!\x1b\[[0-9;:]*m)(?:                   # anything but a style
        (?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]         # CSI: moves, clears, asks for an answer
        | (?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])    # OSC, DCS and the like, with all they say
          [^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?
        | \x1b[ -/]*[0-~]                        # two characters, or a few
        | [\x00-\x08\x0b-\x1f\x7f-\x9f]          # a control character, or the rest of a sequence
    )""",
    re.VERBOSE,
)

_OVERWRITTEN = re.compile(r"^[^\n]*\r(?=[^\r\n])", re.MULTILINE)


def shown(text: str) -> str:
    """*text* as it may be written to a terminal: colours stay, all other commands are gone.

    Of a line that was written over, as progress bars do by a carriage return, the
    last state stays. Newlines and tabs are kept. Pieces of a text that are taken
    one by one are as harmless as the whole.
    """
    if "\r" in text:
        text = _OVERWRITTEN.sub(lambda line: "".join(_STYLE.findall(line[0])), text)
    return _COMMAND.sub("", text)


def unstyled(text: str) -> str:
    """The same without colours, where somebody else's would not fit."""
    return _STYLE.sub("", shown(text))
