"""Unusual object names that every store must accept."""

from __future__ import annotations

HOSTILE = [
    "plain",
    "a/b/c",
    " leading and trailing ",
    "..",
    ".",
    "a/../b",
    ".tmp",
    ".tmp/x",
    "double//slash",
    "percent%2Fnot/a%slash",
    "ünïcode/名前/🙂",
    "new\nline\ttab",
    "quote\"and'and\\back",
    "a" * 200,
    "star*and?and[",
    "hash#and&and+and=and;and:",
    "trailing/",
]
