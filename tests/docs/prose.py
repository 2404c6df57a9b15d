"""The sentences of a Markdown page, without code, tables, and headings.

`python -m tests.docs.prose` prints the figures of each page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MAX_WORDS", "PAGES", "ROOT", "Prose", "read"]

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *(ROOT / name for name in ("CODE_OF_CONDUCT.md", "SECURITY.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MAX_WORDS = 25

_FENCE = re.compile(r"^\s*(`{3,})[^\n]*\n.*?^\s*\1\s*$", re.MULTILINE | re.DOTALL)
_CARD = re.compile(r"^:{3,}.*$|^:[\w-]+: .*$", re.MULTILINE)
_ENDED = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |#))")
_NOT_PROSE = re.compile(r"\s*(?:#|\||<)")
_CODE = re.compile(r"`+[^`]+`+")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_NEXT_SENTENCE = re.compile(r"(?<=[.!?])[\"'*)]*\s+(?=[\"'*(\[]*(?:[A-Z0-9]|kinetic\b))")
_ODD_BEGINNING = re.compile(r"[\W_]*(?:Who|What|Whoever)\b(?!.*\?$)")


@dataclass(frozen=True)
class Prose:
    sentences: list[str]
    last_paragraph: str

    @property
    def long(self) -> list[str]:
        return [sentence for sentence in self.sentences if len(sentence.split()) > MAX_WORDS]

    @property
    def oddly_begun(self) -> list[str]:
        """Sentences that make a clause the subject; a question may begin with What."""
        return [sentence for sentence in self.sentences if _ODD_BEGINNING.match(sentence)]


def read(page: Path) -> Prose:
    text = _CARD.sub("", _FENCE.sub("\n", page.read_text(encoding="utf-8")))
    parts = _ENDED.split(text)
    paragraphs = [part for part in parts if part.strip() and not _NOT_PROSE.match(part)]
    sentences = [
        sentence.strip()
        for paragraph in paragraphs
        for sentence in _NEXT_SENTENCE.split(_plain(paragraph))
        if sentence.strip(" .*-")
    ]
    return Prose(sentences, paragraphs[-1].strip() if paragraphs else "")


def _plain(paragraph: str) -> str:
    """Count a piece of code as one word, and a link as its text."""
    text = re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "", paragraph)
    return _LINK.sub(r"\1", _CODE.sub("Code", text)).replace("\n", " ")


if __name__ == "__main__":
    for page in PAGES:
        found = read(page)
        if found.sentences:
            print(
                f"{page.relative_to(ROOT).as_posix():40}"
                f" {len(found.sentences):4} sentences, {len(found.long):3} long"
                f" ({100 * len(found.long) / len(found.sentences):3.0f} %),"
                f" {len(found.oddly_begun)} oddly begun,"
                f" {'Next' if found.last_paragraph.startswith('Next:') else 'no next'}"
            )
