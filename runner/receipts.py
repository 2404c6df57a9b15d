"""The receipt of an outcome: a signed copy that arrives with the word that the container ended.

It is the container's termination message, which holds 4096 bytes. Whoever reads
it checks the signature as of the outcome itself.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass

from .frames import MALFORMED

__all__ = ["LIMIT", "Receipt", "parse"]

LIMIT = 4096
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The metadata of an outcome, whose it is, and its body where that is small enough."""

    index: int
    attempt: int
    metadata: Mapping[str, str]
    body: bytes | None = None

    def to_text(self) -> str:
        """As a termination message; empty when even the header is too large for one."""
        for body in (self.body, None):
            fields = {
                "kinetic": VERSION,
                "index": self.index,
                "attempt": self.attempt,
                "header": self.metadata["header"],
                "mac": self.metadata["mac"],
                "body": None if body is None else base64.b85encode(body).decode(),
            }
            text = json.dumps(fields, separators=(",", ":"))
            if len(text) <= LIMIT:
                return text
        return ""


def parse(text: str) -> Receipt | None:
    """The receipt in a termination message, or None if it is none."""
    if not text.startswith('{"kinetic":'):
        return None
    try:
        fields = json.loads(text)
        if fields["kinetic"] != VERSION:
            return None
        body = fields["body"]
        return Receipt(
            index=int(fields["index"]),
            attempt=int(fields["attempt"]),
            metadata={"header": str(fields["header"]), "mac": str(fields["mac"])},
            body=None if body is None else base64.b85decode(body),
        )
    except MALFORMED:
        return None
