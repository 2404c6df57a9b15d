"""When the service fails, the store either retries or raises an error that says what to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinetic.aio._net.http import HttpError
from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.gcs.http import EMULATOR, Limits, refusal_error
from kinetic.aio.gcs.store import GcsStore
from kinetic.errors import (
    AuthError,
    BackendError,
    Conflict,
    KineticError,
    NotFound,
    WireError,
)
from tests.gcs.conftest import QUICK
from tests.gcs.server import Fault, GcsServer, Stored

Work = Callable[[GcsStore, Path], Awaitable[object]]
LARGE = bytes(range(256)) * 12_000  # 3 MB: a resumable upload, ranges

OPERATIONS: dict[str, Work] = {
    "create": lambda store, path: store.create("new", b"x"),
    "create large": lambda store, path: store.create("new", LARGE),
    "replace": lambda store, path: _replace(store),
    "get": lambda store, path: store.get("there"),
    "fetch": lambda store, path: store.fetch("there", path / "copy"),
    "list": lambda store, path: store.list(""),
    "delete": lambda store, path: store.delete(["there"]),
    "delete many": lambda store, path: store.delete([f"n{i}" for i in range(20)]),
}


async def _replace(store: GcsStore) -> None:
    stored = await store.get("there")
    await store.replace("there", b"newer", generation=stored.generation)


@pytest.fixture(params=OPERATIONS)
def operation(request: pytest.FixtureRequest) -> Work:
    return OPERATIONS[request.param]


@pytest.mark.parametrize(
    "how",
    [{"times": 12, "status": 503}, {"times": 3}, {"times": 3, "late": True}],
    ids=["503", "cut before the effect", "cut after it"],
)
async def test_a_temporary_fault_is_retried(
    server: GcsServer, store: GcsStore, tmp_path: Path, operation: Work, how: dict[str, Any]
) -> None:
    await store.create("there", b"content")
    fault = server.fail("*", **how)
    await operation(store, tmp_path)
    # After a late cut, the store may find that its content has arrived and not try again.
    assert fault.seen == how["times"] or "late" in how


# The library that starts a large upload waits for ten seconds.
LONG = {"create large": pytest.mark.full}


@pytest.mark.parametrize(
    "operation",
    [pytest.param(name, marks=LONG.get(name, ())) for name in OPERATIONS],
    indirect=True,
)
async def test_silence_is_not_waited_for(
    server: GcsServer, wary: GcsStore, tmp_path: Path, operation: Work
) -> None:
    await wary.create("there", b"content")
    silence = server.fail("*", stall=True)
    await operation(wary, tmp_path)
    assert silence.seen == 1


@pytest.mark.parametrize(
    "fault",
    [Fault("*", 10**6, status=status) for status in (400, 401, 403, 404, 409, 410, 412, 429, 503)]
    + [Fault("*", 10**6), Fault("*", 10**6, status=200, text="{no json")],
    ids=lambda fault: str(fault.status) + ("" if fault.text != "{no json" else " no json"),
)
async def test_every_fault_raises_an_error_of_kinetic(
    server: GcsServer, tmp_path: Path, operation: Work, fault: Fault
) -> None:
    policy = RetryPolicy(total_s=0.05, first_pause_s=0.002, longest_pause_s=0.01)
    limits = Limits(retry=policy, piece_bytes=64 * 1024)
    store = GcsStore("gs://kn-test", {EMULATOR: server.url}, limits=limits)
    server.faults = [replace(fault)]
    try:
        await operation(store, tmp_path)
        failure = None
    except KineticError as exc:
        failure = exc
    finally:
        await store.aclose()
    assert list(tmp_path.iterdir()) == []
    if failure is None:
        # Deleting succeeds on 404 and ignores an answer's body; creating returns False on 412.
        assert fault.status in (200, 404, 412)
        return
    assert "gs://kn-test" in str(failure)
    assert getattr(failure, "retryable", False) == (fault.status in (0, 200, 429, 503))


@pytest.mark.parametrize(
    ("name", "permission"),
    [
        ("create", "storage.objects.create"),
        ("get", "storage.objects.get"),
        ("list", "storage.objects.list"),
        ("delete many", "storage.objects.delete"),
    ],
)
async def test_a_missing_permission_is_named_with_its_bucket(
    server: GcsServer, store: GcsStore, tmp_path: Path, name: str, permission: str
) -> None:
    denied = f"you@example.com does not have {permission} access to the Google Cloud Storage object"
    server.fail("*", times=10, status=403, text=denied)
    with pytest.raises(AuthError, match=rf"lack {permission} .*you@example.* gs://kn-test "):
        await OPERATIONS[name](store, tmp_path)


async def test_a_rate_limit_is_not_taken_for_a_missing_permission(
    server: GcsServer, store: GcsStore
) -> None:
    text = json.dumps({"error": {"message": "slow", "errors": [{"reason": "rateLimitExceeded"}]}})
    server.fail("create", times=2, status=403, text=text)
    assert await store.create("x", b"")


async def test_an_untrusted_connection_fails_at_once(server: GcsServer) -> None:
    store = GcsStore("gs://kn-test", {EMULATOR: server.url.replace("http", "https")})
    with pytest.raises(BackendError, match="no trusted connection") as raised:
        async with asyncio.timeout(30):
            await store.list("")
    assert not raised.value.retryable
    await store.aclose()


async def test_a_missing_bucket_is_named(server: GcsServer, store: GcsStore) -> None:
    server.buckets.clear()
    with pytest.raises(NotFound, match=r"no bucket gs://kn-test; create it"):
        await store.list("a")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("No such object: my-bucket/x", "there is no 'x' in gs://my-bucket"),
        ("The specified bucket does not exist.", "there is no bucket gs://my-bucket; create it"),
    ],
)
def test_a_missing_object_is_told_from_a_missing_bucket(message: str, says: str) -> None:
    refusal = HttpError(404, json.dumps({"error": {"code": 404, "message": message}}))
    assert says in str(refusal_error(refusal, "get", "my-bucket", "x"))


async def test_create_succeeds_when_the_reply_to_it_is_lost(
    server: GcsServer, store: GcsStore
) -> None:
    server.fail("create", late=True)
    assert await store.create("x", b"mine", {"k": "v"})
    assert dict((await store.get("x")).metadata) == {"k": "v"}
    assert not await store.create("x", b"other")
    assert server.requests["metadata"] == 3  # by both creations, and by `get`


async def test_of_fifty_creators_whose_replies_are_lost_one_wins(
    server: GcsServer, store: GcsStore
) -> None:
    server.fail("create", times=40, late=True)
    bodies = [bytes([number]) for number in range(50)]
    won = await asyncio.gather(*(store.create("race", body) for body in bodies))
    assert won.count(True) == 1
    assert (await store.get("race")).body == bodies[won.index(True)]


async def test_replace_succeeds_when_the_reply_to_it_is_lost(
    server: GcsServer, store: GcsStore
) -> None:
    await store.create("lease", b"1")
    first = (await store.get("lease")).generation
    server.fail("create", late=True)
    assert await store.begin("other", b"1") == server.objects["other"].generation
    server.fail("create", late=True)
    second = await store.replace("lease", b"2", generation=first)
    assert (await store.get("lease")).generation == second
    with pytest.raises(Conflict):
        await store.replace("lease", b"x", generation=first)


@pytest.mark.parametrize("body", [b"right", LARGE], ids=["small", "large"])
async def test_content_that_arrives_damaged_each_time_is_not_kept(
    server: GcsServer, hasty: GcsStore, body: bytes
) -> None:
    for kind in ("create", "put"):
        server.fail(kind, times=10**6, status=400, body=lambda body: body[:-1])
    with pytest.raises(WireError, match=r"'x'.*gs://kn-test"):
        await hasty.create("x", body)
    assert server.objects == {}


@pytest.mark.parametrize("way", ["get", "fetch"])
async def test_a_damaged_download_is_repeated(
    server: GcsServer, hasty: GcsStore, tmp_path: Path, way: str
) -> None:
    await hasty.create("there", b"content")
    once = server.fail("media", body=lambda body: b"C" + body[1:])
    await OPERATIONS[way](hasty, tmp_path)
    assert once.seen == 1
    server.fail("media", times=10**6, body=lambda body: b"C" + body[1:])
    (tmp_path / "copy").unlink(missing_ok=True)
    with pytest.raises(WireError, match=r"'there'.*gs://kn-test"):
        await OPERATIONS[way](hasty, tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_of_many_deletions_only_those_that_failed_are_repeated(
    server: GcsServer, store: GcsStore
) -> None:
    names = [f"n{number}" for number in range(250)]
    server.objects = {name: Stored(b"", {}, 1) for name in names}
    server.fail("delete", times=20, status=503)
    await store.delete([*names, "absent"])
    assert server.objects == {}
    assert server.batched == {"delete": 251}
    assert server.requests["delete"] == 20


@pytest.mark.parametrize(
    "fault",
    [{"status": 404}, {"status": 400}, {"body": lambda content: content.replace(b"HTTP/1.1", b"")}],
    ids=["unknown", "refused", "damaged"],
)
async def test_without_batches_each_object_is_deleted_by_a_request_of_its_own(
    server: GcsServer, store: GcsStore, fault: dict[str, Any]
) -> None:
    """An emulator, or a proxy that allows only some paths, may refuse them."""
    names = ["plain", "a/b c?d#é", "50%", "--kinetic-batch", "x\u2028y"]
    for name in names:
        await store.create(name, b"")
    server.fail("batch", times=100, **fault)
    await store.delete(names)
    assert server.objects == {}
    assert server.requests["delete"] == len(names)


async def test_batches_take_any_name_and_any_login(
    server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(server.login(tmp_path)))
    store = GcsStore("gs://kn-test/folder", {}, endpoint=server.url, limits=QUICK)
    names = ["plain", "a/b c?d#é", "50%", "--kinetic-batch", "x\u2028y"]
    for name in names:
        await store.create(name, b"")
    assert server.tokens is not None
    server.tokens.clear()  # the first batch learns that its token has expired
    await store.delete(names)
    assert server.objects == {}
    assert (server.requests["batch"], server.requests["delete"]) == (2, 0)
    await store.aclose()


async def test_an_object_replaced_during_a_download_is_read_again(
    server: GcsServer, store: GcsStore, tmp_path: Path
) -> None:
    await store.create("x", LARGE)
    server.fail("media", times=2, at=300_000)
    fetching = asyncio.create_task(store.fetch("x", tmp_path / "x"))
    while not server.requests["media"]:
        await asyncio.sleep(0)
    server.objects["x"].generation += 1
    server.objects["x"].body = LARGE[::-1]
    await fetching
    assert (tmp_path / "x").read_bytes() == LARGE[::-1]


async def test_fetch_does_not_overwrite_a_file(store: GcsStore, tmp_path: Path) -> None:
    await store.create("there", b"new")
    (tmp_path / "copy").write_bytes(b"old")
    with pytest.raises(BackendError, match="copy"):
        await store.fetch("there", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"old"
    with pytest.raises(BackendError, match="nowhere"):
        await store.fetch("there", tmp_path / "nowhere" / "copy")
