"""Test which control sequences of a job's output reach the terminal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic._messages import remove_control_sequences, unstyled

STYLE = re.compile(r"\x1b\[[0-9;:]*m")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

tokens = st.sampled_from(
    ["\x1b", "[", "]", "m", "31", ";", ":", "?", ">", " ", "P", "\\", "\x07", "\x9b", "\x9c",
     "\x9d", "\x90", "\r", "\n", "\t", "c", "(", "B", "\x00", "\x7f", "\x18", "text", "\x1b[31m",
     "\x1b[2J"]
)  # fmt: skip
texts = st.lists(tokens | st.text(max_size=3), max_size=30).map("".join)


@given(texts)
def test_only_styles_are_kept(text: str) -> None:
    assert not CONTROL.search(STYLE.sub("", remove_control_sequences(text)))
    assert not CONTROL.search(unstyled(text))


@given(st.lists(texts, max_size=5))
def test_sequences_split_across_blocks_are_removed(blocks: list[str]) -> None:
    assert not CONTROL.search(
        STYLE.sub("", "".join(remove_control_sequences(block) for block in blocks))
    )


@given(texts)
def test_removal_is_idempotent_and_keeps_line_breaks(text: str) -> None:
    assert remove_control_sequences(remove_control_sequences(text)) == remove_control_sequences(
        text
    )
    assert remove_control_sequences(text).count("\n") == text.count("\n")


@given(st.text(st.characters(exclude_categories=["Cc"])))
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert remove_control_sequences(f"{text}\t\n") == f"{text}\t\n"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m"),
        ("a\x1b[2Jb\x1b[?25lc\x1b[>4;1md", "abcd"),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b", "ab"),
        ("\x1bP1;2q###\x1b\\a\x1bcb\x9b31mc", "abc"),
        ("10%\r50%\r100%\r\ndone\r\n", "100%\ndone\n"),
        ("\x1b[32m50%\x1b[0m\r100%", "\x1b[32m\x1b[0m100%"),
    ],
)
def test_a_line_is_shown_in_its_final_state(written: str, shown: str) -> None:
    assert remove_control_sequences(written) == shown
