"""Test what is read from a server's errors: the message, the body, and ``Retry-After``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kinetic.aio._net.http import HttpError, parse_retry_after, proxy_for

MESSAGE = {"message": "pods is forbidden"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"kind": "Status", **MESSAGE}), "pods is forbidden"),
        (json.dumps({"error": {"code": 403, **MESSAGE}}), "pods is forbidden"),
        (json.dumps({"errors": [MESSAGE, {"code": "DENIED"}]}), "pods is forbidden; DENIED"),
        (f"Forbidden: {json.dumps({'error': MESSAGE})}", "pods is forbidden"),
        ("<html>\n  a proxy", "<html> a proxy"),
        ('{"error": "invalid_grant"}', '{"error": "invalid_grant"}'),
        ('{"errors": ["a", 1]}', '{"errors": ["a", 1]}'),
        ('["a"]', '["a"]'),
        ("", "no reason given"),
        ("404 page not found\n", "no reason given"),
    ],
)
def test_the_message_of_an_error_is_found_and_is_one_line(text: str, message: str) -> None:
    assert HttpError(403, text).message == message


@pytest.mark.parametrize(
    ("text", "body"), [('{"a": 1}', {"a": 1}), ("", {}), ("{", {}), ("[1]", {}), ("x {}", {})]
)
def test_a_body_that_is_not_an_object_is_empty(text: str, body: dict[str, Any]) -> None:
    assert HttpError(400, text).body == body


def test_errors_of_the_server_are_retryable() -> None:
    retryable = [status for status in range(300, 600) if HttpError(status).retryable]
    assert retryable == [408, 429, 500, 502, 503, 504]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("", None),
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("Thu, 01 Jan 1970 00:16:40 GMT", None),
    ],
)
def test_retry_after_is_read_as_seconds(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value) == seconds


@pytest.mark.parametrize(
    ("host", "is_direct"),
    [
        ("10.1.2.3", True),
        ("11.1.2.3", False),
        ("192.168.0.7", True),
        ("192.168.0.8", False),
        ("[fd00::7]", True),
        ("[fe80::7]", False),
        ("cluster.local.example", True),
        ("cluster.example", False),
        ("127.0.0.1", True),
        ("[::1]", True),
        ("localhost", True),
    ],
)
def test_servers_of_this_machine_and_of_listed_networks_need_no_proxy(
    host: str, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = "http://proxy.example:3128"
    monkeypatch.setenv("https_proxy", proxy)
    monkeypatch.setenv("no_proxy", "10.0.0.0/8, fd00::/8,192.168.0.7,local.example")
    assert proxy_for(f"https://{host}:6443") == (None if is_direct else proxy)
