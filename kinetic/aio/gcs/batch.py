"""Send many small requests to Cloud Storage as one.

The answer has a part for each request, in the same order. For the format, see
https://cloud.google.com/storage/docs/batch.
"""

from __future__ import annotations

import email.parser
import email.policy
from collections.abc import Sequence
from typing import NamedTuple

PATH = "/batch/storage/v1"

MAX_REQUESTS = 100
"""How many requests the service takes at once."""

_BOUNDARY = "kinetic-batch"  # percent-encoded paths have no line break, so none contains it

CONTENT_TYPE = f"multipart/mixed; boundary={_BOUNDARY}"


class Request(NamedTuple):
    """A request without content; ``path`` is encoded, with its query."""

    method: str
    path: str


class Answer(NamedTuple):
    """The status of a request, and the content of its answer."""

    status: int
    content: bytes


def encode(requests: Sequence[Request]) -> bytes:
    """Return the content of a request that has all *requests*."""
    lines = list[str]()
    for number, request in enumerate(requests):
        lines += [
            f"--{_BOUNDARY}",
            "Content-Type: application/http",
            f"Content-ID: <{number}>",  # some emulators skip a part without it
            "",
            f"{request.method} {request.path} HTTP/1.1",
            "",
            "",
        ]
    return "\r\n".join([*lines, f"--{_BOUNDARY}--", ""]).encode()


def decode(content_type: str, content: bytes) -> list[Answer]:
    """Return the answers in *content*.

    Raises:
        ValueError: The content isn't the answer to a batch.
    """
    head = f"Content-Type: {content_type}\r\n\r\n".encode()
    whole = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + content)
    if not whole.is_multipart():
        raise ValueError(f"the answer to a batch of requests has the type {content_type!r}")
    return [_answer_of(part.get_payload(decode=True)) for part in whole.iter_parts()]


def _answer_of(payload: object) -> Answer:
    if not isinstance(payload, bytes):
        raise ValueError("a part of the answer to a batch of requests has no content")
    head, _, content = payload.partition(b"\r\n\r\n")
    version, status, *_ = head.split(maxsplit=2)
    if not version.startswith(b"HTTP/"):
        raise ValueError("a part of the answer to a batch of requests isn't an answer")
    return Answer(int(status), content)
