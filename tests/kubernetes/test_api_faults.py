"""Requests to a failing API server: what is retried, how often, and which error is raised."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from aiohttp import web

from kinetic.aio._net.http import new_socket
from kinetic.aio.kubernetes.access import Access
from kinetic.aio.kubernetes.api import Api, Limits
from kinetic.errors import (
    AlreadyThere,
    AuthError,
    BackendError,
    Conflict,
    Expired,
    NotFound,
    Refused,
    Throttled,
    Unavailable,
)
from tests.kubernetes.faults import (
    LIMITS,
    FaultServer,
    Handler,
    Tokens,
    answer,
    reset,
    silence,
    status,
    stream,
)
from tests.kubernetes.kubeconfigs import authorizations

JOBS = "/apis/batch/v1/namespaces/team/jobs"

HASTY = replace(LIMITS, retry=replace(LIMITS.retry, total_s=3.0))
SILENCE_S = 0.3
"""The idle timeout in tests of a silent server."""


@pytest.fixture
def tokens() -> Tokens:
    return Tokens()


@asynccontextmanager
async def opened(
    url: str, limits: Limits | None = None, tokens: Tokens | None = None
) -> AsyncIterator[Api]:
    api = Api(Access(server=url, name="a test", credentials=(tokens or Tokens()).passes), limits)
    try:
        yield api
    finally:
        await api.aclose()


@pytest.fixture
async def api(server: FaultServer, tokens: Tokens) -> AsyncIterator[Api]:
    async with opened(server.url, LIMITS, tokens) as api:
        yield api


async def lines(api: Api, idle: float | None = 30.0) -> list[bytes]:
    return [line async for line in api.lines("/x", idle_s=idle)]


async def test_a_request_has_its_query_body_and_headers(server: FaultServer, api: Api) -> None:
    server.then(answer({"kind": "Job"}, 201))
    query = {"labelSelector": "kinetic.dev/a in (b,c),d!=e ü", "limit": "500"}
    assert await api.call("POST", JOBS, query=query, body={"a": "ü"}) == {"kind": "Job"}
    seen = server.seen[0]
    assert (seen.method, seen.path, seen.query) == ("POST", JOBS, query)
    assert (seen.body, seen.headers["Content-Type"]) == (b'{"a":"\\u00fc"}', "application/json")
    assert seen.headers["Authorization"] == "Bearer token-1"
    await api.call("PATCH", f"{JOBS}/x", body={})
    assert server.seen[1].headers["Content-Type"] == "application/merge-patch+json"
    await api.call("DELETE", f"{JOBS}/x")
    assert (server.seen[2].body, "Content-Type" in server.seen[2].headers) == (b"", False)


@pytest.mark.parametrize(
    "fault",
    [
        status(500),
        status(502),
        status(503),
        status(504),
        status(429),
        status(409, "Conflict", "cannot update the resourcequota"),
        answer("<html>", 503),
        reset(),
        stream(b'{"a": ', then="cut"),
    ],
    ids=["500", "502", "503", "504", "429", "409", "a page", "reset", "cut"],
)
async def test_a_temporary_fault_is_retried(server: FaultServer, api: Api, fault: Handler) -> None:
    server.then(fault, fault)
    assert await api.call("POST", JOBS, body={}) == {}
    assert len(server.seen) == 3


async def test_a_half_open_connection_is_given_up_after_the_idle_timeout(
    server: FaultServer,
) -> None:
    server.then(silence(), stream(b'{"a"', then="silent"))
    loop = asyncio.get_running_loop()
    before = loop.time()
    async with opened(server.url, replace(LIMITS, idle_s=SILENCE_S)) as api:
        assert await api.call("GET", JOBS) == {}
    assert len(server.seen) >= 3
    assert loop.time() - before >= 2 * SILENCE_S


@pytest.mark.full
async def test_a_slow_answer_is_not_taken_for_silence(server: FaultServer) -> None:
    idle = 4.0

    async def slow(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b"{", b'"a"', b":", b"1", *[b" "] * 15, b"}"):
            await response.write(piece)
            await asyncio.sleep(idle / 16)  # together longer than the idle timeout
        return response

    server.then(slow)
    async with opened(server.url, replace(LIMITS, idle_s=idle)) as api:
        assert await api.call("GET", JOBS) == {"a": 1}
    assert len(server.seen) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "kind"),
    [(status(429, Retry_After="0"), Throttled), (status(503), Unavailable), (reset(), Unavailable)],
    ids=["429", "503", "reset"],
)
async def test_retries_end_after_the_time_limit(
    server: FaultServer, fault: Handler, kind: type[BackendError]
) -> None:
    server.always = fault
    async with opened(server.url, HASTY) as api:
        with pytest.raises(kind, match=r"create jobs in namespace 'team' of a test") as caught:
            await api.call("POST", JOBS, body={})
    assert caught.value.retryable
    assert 20 < len(server.seen) < 2000


@pytest.mark.full
async def test_the_error_names_a_server_that_does_not_answer() -> None:
    with socket.socket() as taken:  # keeps the port free of listeners
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with opened(url, HASTY) as api:
            with pytest.raises(Unavailable, match=f"{url} does not answer"):
                await api.call("GET", JOBS)
            with pytest.raises(Unavailable, match=f"{url} does not answer"):
                await lines(api)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (status(400, "BadRequest"), Refused),
        (status(403, "Forbidden", 'jobs "x" is forbidden: exceeded quota: q'), Refused),
        (status(404, "NotFound"), NotFound),
        (answer("404 page not found\n", 404), NotFound),
        (status(409, "AlreadyExists"), AlreadyThere),
        (status(410, "Expired"), Expired),
        (status(413, "RequestEntityTooLarge"), Refused),
        (status(422, "Invalid"), Refused),
        (answer("moved", 302, Location="/login"), BackendError),
        (answer("<html>log in</html>"), BackendError),
        (answer([1]), BackendError),
    ],
)
async def test_a_definite_answer_is_not_retried(
    server: FaultServer, api: Api, fault: Handler, kind: type[BackendError]
) -> None:
    server.then(fault)
    with pytest.raises(BackendError) as caught:
        await api.call("POST", JOBS, body={})
    assert type(caught.value) is kind
    assert not caught.value.retryable
    assert len(server.seen) == 1
    if isinstance(caught.value, Refused):
        assert caught.value.answer["kind"] == "Status"


async def test_a_change_that_another_writer_has_made_is_not_repeated(
    server: FaultServer, api: Api
) -> None:
    server.then(status(409, "Conflict"))
    with pytest.raises(Conflict):
        await api.call("PUT", f"{JOBS}/x", body={})
    assert len(server.seen) == 1


UNSERVED = [
    answer("404 page not found\n", 404),
    status(404, "NotFound", "the server could not find the requested resource"),
]


@pytest.mark.parametrize("fault", UNSERVED, ids=["a page", "a status"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_server_that_restarts_may_not_know_its_paths(
    server: FaultServer, api: Api, method: str, fault: Handler
) -> None:
    await api.call("GET", JOBS)
    server.then(fault, fault)
    await api.call(method, JOBS)
    assert len(server.seen) == 4
    server.then(fault)
    with pytest.raises(NotFound):  # only some clusters have this kind of object
        await api.call(method, "/apis/leaderworkerset.x-k8s.io/v1/namespaces/team/leaderworkersets")


async def test_a_refusal_that_arrives_in_pieces_is_read_whole(
    server: FaultServer, api: Api
) -> None:
    body = json.dumps({"kind": "Status", "message": "m" * 20_000}).encode()
    server.then(stream(body[:9], body[9:500], body[500:], code=422))
    with pytest.raises(Refused) as caught:
        await api.call("POST", JOBS, body={})
    assert len(caught.value.answer["message"]) == 20_000


FORBIDDEN = status(403, "Forbidden", 'User "ada" cannot create resource "jobs"')


async def test_a_permission_that_has_worked_may_be_missing_for_a_moment(
    server: FaultServer, api: Api
) -> None:
    server.then(FORBIDDEN)
    with pytest.raises(AuthError):
        await api.call("POST", JOBS, body={})
    await api.call("POST", JOBS, body={})
    server.then(FORBIDDEN, FORBIDDEN)
    await api.call("POST", JOBS, body={})
    assert len(server.seen) == 5
    with pytest.raises(AuthError):
        server.then(FORBIDDEN)
        await lines(api)
    assert await lines(api) == [b"{}"]
    server.then(FORBIDDEN, FORBIDDEN)
    assert await lines(api) == [b"{}"]
    assert len(server.seen) == 10


async def test_a_permission_that_stays_missing_raises_after_a_while(server: FaultServer) -> None:
    async with opened(server.url, replace(LIMITS, rights_s=0.2)) as api:
        await api.call("POST", JOBS, body={})
        server.always = FORBIDDEN
        with pytest.raises(AuthError, match="cannot create"):
            await api.call("POST", JOBS, body={})
        assert len(server.seen) > 3


async def test_a_refused_token_is_renewed_once(
    server: FaultServer, api: Api, tokens: Tokens
) -> None:
    await api.call("GET", JOBS)
    server.then(status(401, "Unauthorized"))
    await api.call("GET", JOBS)
    server.then(status(401, "Unauthorized"))
    assert await lines(api) == [b"{}"]
    assert authorizations(server) == [f"Bearer token-{number}" for number in (1, 1, 2, 2, 3)]
    server.always = status(401, "Unauthorized", "no")
    with pytest.raises(AuthError, match=r"does not accept the credentials \(no\); log in again"):
        await api.call("GET", JOBS)
    assert len(server.seen) == 7


async def test_lines_are_whole_however_they_are_split(server: FaultServer, api: Api) -> None:
    long = b"x" * 300_000
    server.then(stream(b"a\n\nb", b"c\r\n\xff\x00", b"\n" + long, long + b"\nend"))
    assert await lines(api) == [b"a", b"", b"bc\r", b"\xff\x00", long + long, b"end"]


async def test_a_line_that_is_too_long_raises(server: FaultServer, api: Api) -> None:
    server.then(stream(b"a\n", *[b"x" * (1 << 20)] * 9, then="silent"))
    with pytest.raises(Unavailable, match="longer than 8 MiB"):
        async with asyncio.timeout(30):
            await lines(api)


@pytest.mark.parametrize("pieces", [(), (b"a\n",)], ids=["before", "after"])
async def test_a_silent_stream_counts_as_dead(
    server: FaultServer, api: Api, pieces: tuple[bytes, ...]
) -> None:
    server.then(stream(*pieces, then="silent"))
    with pytest.raises(Unavailable, match="does not answer as it should"):
        await lines(api, idle=0.2)
    async with asyncio.timeout(30):
        while not server.seen:  # the client may give up before the server handles the request
            await asyncio.sleep(0.01)
    assert len(server.seen) == 1


async def test_a_stream_without_an_idle_timeout_may_be_silent(server: FaultServer) -> None:
    server.then(stream(b"a\n", then="silent"))
    async with opened(server.url, replace(LIMITS, idle_s=SILENCE_S)) as api:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * SILENCE_S):
                await lines(api, idle=None)


async def test_a_stream_that_breaks_raises_and_is_not_repeated(
    server: FaultServer, api: Api
) -> None:
    server.then(stream(b"a\nb", then="cut"))
    received = []
    with pytest.raises(Unavailable):
        async for line in api.lines("/x"):
            received.append(line)  # noqa: PERF401 # keeps the lines before the break
    assert (received, len(server.seen)) == ([b"a"], 1)


async def test_a_stream_that_is_refused_says_why(server: FaultServer, api: Api) -> None:
    server.then(status(410, "Expired", "too old resource version: 1 (2)"))
    with pytest.raises(Expired, match="too old resource version"):
        await lines(api)
    server.then(status(429, Retry_After="7"))
    with pytest.raises(Throttled) as caught:
        await lines(api)
    assert caught.value.retry_after == 7.0


async def test_leaving_a_stream_closes_its_connection(server: FaultServer, api: Api) -> None:
    server.then(stream(b"a\n", then="silent"))
    async with aclosing(api.lines("/x")) as following:
        assert await anext(following) == b"a"
    async with asyncio.timeout(30):
        while not server.ended["/x"]:
            await asyncio.sleep(0.01)


def test_connections_are_probed_by_the_system() -> None:
    with new_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ())) as created:
        assert created.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if sys.platform == "linux":
            assert created.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
            assert created.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


async def test_streams_do_not_hold_up_requests(server: FaultServer, tokens: Tokens) -> None:
    api = Api(
        Access(server=server.url, name="a test", credentials=tokens.passes),
        Limits(requests=2),
    )
    server.then(*[stream(b"a\n", then="silent")] * 150)
    streams = [api.lines("/x") for _ in range(150)]
    assert await asyncio.gather(*(anext(lines) for lines in streams)) == [b"a"] * 150
    assert await api.call("GET", JOBS) == {}
    await api.aclose()
    for opened_stream in streams:
        with pytest.raises(BackendError, match="closed meanwhile"):
            await anext(opened_stream)


async def test_pending_requests_and_streams_fail_when_the_client_is_closed(
    server: FaultServer, api: Api
) -> None:
    server.then(stream(b'{"a": ', then="silent"), stream(b"a\n", then="silent"))
    asking = asyncio.create_task(api.call("GET", JOBS))
    while not server.busy:
        await asyncio.sleep(0)
    async with aclosing(api.lines("/x", idle_s=None)) as following, asyncio.timeout(60):
        assert await anext(following) == b"a"
        reading = asyncio.ensure_future(anext(following))
        await asyncio.sleep(0)  # lets the task wait for the next line
        await api.aclose()
        for pending in (asking, reading):
            with pytest.raises(BackendError, match="closed meanwhile"):
                await pending
    with pytest.raises(BackendError, match="is closed; open another"):
        await api.call("GET", JOBS)


@pytest.mark.full
def test_a_client_stays_on_its_loop() -> None:
    async def ask(api: Api) -> None:
        with pytest.raises(BackendError) as caught:
            await api.call("GET", JOBS)
        messages.append(str(caught.value))

    messages: list[str] = []

    async def make() -> Api:
        access = Access(server="http://127.0.0.1:1", name="a test", credentials=Tokens().passes)
        api = Api(access, HASTY)
        await ask(api)
        return api

    with asyncio.Runner() as first:
        api = first.run(make())
        with asyncio.Runner() as second:
            second.run(ask(api))
        first.run(api.aclose())
    assert "does not answer" in messages[0]
    assert "belongs to another event loop" in messages[1]


async def test_a_request_keeps_its_turn_while_it_waits_to_retry(
    server: FaultServer, tokens: Tokens
) -> None:
    """A server that refuses requests gets fewer at a time, and retries go before new requests."""
    limits = replace(LIMITS, requests=4)
    api = Api(Access(server=server.url, name="a test", credentials=tokens.passes), limits)
    started: set[str] = set()
    done: set[str] = set()

    async def work(request: web.BaseRequest) -> web.StreamResponse:
        body = (await request.read()).decode()
        is_retry = body in started
        started.add(body)
        assert len(started - done) <= 4
        if not is_retry:
            return await status(429, "TooManyRequests", Retry_After="0.01")(request)
        done.add(body)
        return await answer({})(request)

    server.always = work
    calls = (api.call("POST", JOBS, body={"n": number}) for number in range(40))
    assert await asyncio.gather(*calls) == [{}] * 40
    assert len(server.seen) == 80
    await api.aclose()


async def test_a_cancelled_request_frees_its_connection(server: FaultServer, api: Api) -> None:
    server.then(*[silence()] * 64)  # as many as the client sends at a time
    tasks = [asyncio.create_task(api.call("GET", "/held")) for _ in range(100)]
    while server.busy < 64:
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(30):
        while server.busy:
            await asyncio.sleep(0.01)
    server.then(*[answer({})] * 40)
    await asyncio.gather(*(api.call("GET", JOBS) for _ in range(40)))
