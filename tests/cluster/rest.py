"""Requests to the API server as the harness makes them: plain, and with no module of kinetic's."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
TIMEOUT_S = 45.0
BUSY, BUSY_S = 429, 0.5
"""Until a server is asked again that takes no requests: one that has just begun says so."""

Json = dict[str, Any]


class Refused(Exception):
    """The API server said no: its code, and its words, as an object of the kind ``Status``."""

    def __init__(self, code: int, status: Json) -> None:
        super().__init__(f"{code}: {status.get('message') or status.get('text')}")
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A server, and as whom to speak to it."""

    server: str
    ca: Path
    token: str

    def tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca)

    def call(self, method: str, path: str, body: Json | None = None, **query: str) -> Json:
        """One request, made by the thread that asks.

        Raises:
            Refused: The server said no.
            OSError: It could not be reached.
        """
        return decoded(self.read(method, path, body, **query))

    def read(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        timeout_s: float = TIMEOUT_S,
        **query: str,
    ) -> bytes:
        """The same for what may be no JSON: a log."""
        url = f"{self.server}{path}{'?' if query else ''}{urllib.parse.urlencode(query)}"
        request = urllib.request.Request(
            url,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", **content(method)},
        )
        with self.opened(request, timeout_s) as answer:
            return answer.read()

    def opened(self, request: urllib.request.Request, timeout_s: float) -> http.client.HTTPResponse:
        """The answer to *request*, as soon as the server takes it; each piece in *timeout_s*.

        Raises:
            Refused: The server said no.
            OSError: It could not be reached.
        """
        until = time.monotonic() + timeout_s
        while True:
            try:
                answer: http.client.HTTPResponse = urllib.request.urlopen(
                    request, context=self.tls(), timeout=timeout_s
                )
            except urllib.error.HTTPError as refusal:
                with refusal:
                    refused = Refused(refusal.code, decoded(refusal.read()))
                if refused.code != BUSY or time.monotonic() > until:
                    raise refused from None
            else:
                return answer
            time.sleep(BUSY_S)


def content(method: str, kind: str | None = None) -> dict[str, str]:
    """The header that says what a body is."""
    return {"Content-Type": kind or (MERGE if method == "PATCH" else "application/json")}


def decoded(body: bytes) -> Json:
    """An answer; what is no JSON object (of ``/readyz``) is the text of one."""
    try:
        answer = json.loads(body)
    except ValueError:
        return {"text": body.decode(errors="replace")}
    return answer if isinstance(answer, dict) else {"text": answer}


class Session:
    """The same from within a loop: many requests at once over few connections."""

    def __init__(self, account: Account) -> None:
        self._account = account

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            base_url=self._account.server,
            headers={"Authorization": f"Bearer {self._account.token}"},
            connector=aiohttp.TCPConnector(ssl=self._account.tls(), limit=64),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        kind: str | None = None,
        **query: str,
    ) -> Json:
        """One request.

        Raises:
            Refused: The server said no.
            aiohttp.ClientError, TimeoutError: It could not be reached.
        """
        data = None if body is None else json.dumps(body).encode()
        async with self._session.request(
            method, path, data=data, params=query, headers=content(method, kind)
        ) as answer:
            text = await answer.read()
            if answer.status >= 400:
                raise Refused(answer.status, decoded(text))
            return decoded(text)

    async def lines(self, path: str, **query: str) -> AsyncIterator[bytes]:
        """The lines of an answer that goes on: a watch, or a log that is followed.

        Raises:
            Refused: The server said no.
            aiohttp.ClientError: The connection broke.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S)
        async with self._session.get(path, params=query, timeout=timeout) as answer:
            if answer.status >= 400:
                raise Refused(answer.status, decoded(await answer.read()))
            rest = b""
            async for chunk in answer.content.iter_any():
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    yield line
            if rest:
                yield rest

    async def watch(self, path: str, since: str, **query: str) -> AsyncIterator[Mapping[str, Any]]:
        """Events after the resource version *since*.

        Raises:
            Refused: 410, when that is too long ago; or another refusal.
        """
        lines = self.lines(path, watch="1", resourceVersion=since, **query)
        async for line in lines:
            event = json.loads(line)
            if event["type"] == "ERROR":
                raise Refused(event["object"].get("code", 0), event["object"])
            yield event
