"""Names and label values that Kubernetes takes, for anything people call things."""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata

__all__ = [
    "JOB_NAME",
    "LABEL",
    "attempt_name",
    "item_name",
    "items_of",
    "label_value",
    "object_name",
]

JOB_NAME = 52
"""The most characters of a Job's name: its pods add an index and five random ones, within 63."""

LABEL = 63

_DIGEST = 10


def object_name(text: str, *, longest: int = JOB_NAME) -> str:
    """*text* as the name of an object: a DNS label of at most *longest* characters.

    What is legal stays as it is. Anything else keeps what can be read of it
    and gets a digest of the whole, so that different texts have different names.
    """
    if len(text) <= longest and re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", text, re.ASCII):
        return text
    words = re.sub(r"[^a-z0-9]+", "-", _ascii(text).lower()).strip("-")
    if not words[:1].isalpha():
        words = f"k-{words}".rstrip("-")
    return _shortened(words, text, longest, "-")


def item_name(name: str, attempt: str | None) -> str:
    """*name* of a job, without the number of its attempt where it ends with one."""
    return name.removesuffix(f"-{attempt}") if attempt else name


def attempt_name(name: str, attempt: int, other: int) -> str:
    """What attempt *other* is called of the item whose *attempt* is called *name*.

    The first attempt of some has no number.
    """
    return name if attempt == other else f"{item_name(name, str(attempt))}-{other}"


def items_of(name: str) -> list[str]:
    """The names of items that an attempt called *name* may belong to."""
    return [*dict.fromkeys((name, re.sub(r"-[0-9]+$", "", name)))]


@functools.lru_cache(4096)
def label_value(text: str) -> str:
    """*text* as a label's value: at most 63 of ``[A-Za-z0-9_.-]``; what is legal stays."""
    if len(text) <= LABEL and re.fullmatch(r"([A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)?", text, re.ASCII):
        return text
    words = re.sub(r"[^A-Za-z0-9_.-]+", "-", _ascii(text)).strip("-_.")
    return _shortened(words, text, LABEL, "-_.")


def _ascii(text: str) -> str:
    """Letters without their accents."""
    plain = unicodedata.normalize("NFKD", text)
    return "".join(one for one in plain if not unicodedata.combining(one))


def _shortened(words: str, text: str, longest: int, ends: str) -> str:
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST]
    head = words[: longest - _DIGEST - 1].rstrip(ends)
    return f"{head}-{digest}" if head else f"k-{digest}"
