"""Access tokens: all requests share one fetch, refused tokens are renewed, errors are clear."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.gcs.store import GcsStore
from kinetic.errors import AuthError, BackendError, Unavailable
from tests import programs
from tests.gcs.conftest import QUICK
from tests.gcs.server import GcsServer

SHORT = replace(QUICK, connect_s=5.0, retry=RetryPolicy(total_s=0.01))


@pytest.fixture(autouse=True)
def credentials(server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = server.login(tmp_path)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    return path


@pytest.fixture
async def store(server: GcsServer) -> AsyncIterator[GcsStore]:
    store = GcsStore("gs://kn-test", {}, endpoint=server.url, limits=QUICK)
    yield store
    await store.aclose()


async def test_a_token_that_is_refused_is_renewed_once(
    server: GcsServer, store: GcsStore, tmp_path: Path
) -> None:
    await store.create("x", b"content")
    assert server.tokens is not None
    for operation in (store.get("x"), store.list(""), store.fetch("x", tmp_path / "x")):
        server.tokens.clear()
        await operation
    assert server.requests["token"] == 4


async def test_a_service_that_accepts_no_token_is_asked_twice(
    server: GcsServer, store: GcsStore
) -> None:
    server.fail("list", times=100, status=401, text="Invalid Credentials")
    with pytest.raises(AuthError, match="gcloud auth application-default login"):
        await store.list("")
    assert server.requests["list"] == 2


async def test_a_revoked_login_fails_without_retries(server: GcsServer, store: GcsStore) -> None:
    await store.create("x", b"")
    assert server.tokens is not None
    server.tokens.clear()
    server.fail("token", times=100, status=400, text="invalid_grant: it was revoked")
    with pytest.raises(AuthError, match="it was revoked"):
        await store.list("")
    assert server.requests["token"] == 2


async def test_a_later_login_is_used_after_a_refusal(
    server: GcsServer, store: GcsStore, credentials: Path
) -> None:
    await store.create("x", b"")
    assert server.tokens is not None
    server.tokens.clear()
    server.fail("token", times=1, status=400, text="invalid_grant: reauth related error")
    with pytest.raises(AuthError, match="gcloud auth application-default login"):
        await store.list("")
    login = json.loads(credentials.read_text()) | {"refresh_token": "later"}
    credentials.write_text(json.dumps(login))
    assert [info.name for info in await store.list("")] == ["x"]
    assert server.logins == ["r", "later"]


async def test_a_failing_token_server_is_asked_again(server: GcsServer, store: GcsStore) -> None:
    server.fail("token", times=2, status=503)
    server.fail("token", times=2)
    assert await store.create("x", b"")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"credentials\.json, which does not exist"),
        ("{", r"credentials\.json, which holds no credentials"),
        ('{"type": "unheard"}', r"credentials\.json cannot be used.*unheard"),
        ("{}", r"credentials\.json, which holds no credentials"),
        ('{"type": "authorized_user"}', "cannot be used.*client_id"),
    ],
)
async def test_credentials_that_cannot_be_used_are_named(
    store: GcsStore, credentials: Path, content: str | None, message: str
) -> None:
    if content is None:
        credentials.unlink()
    else:
        credentials.write_text(content)
    with pytest.raises(AuthError, match=rf"{message}.*gcloud auth application-default login"):
        await store.list("")


async def test_the_refusal_of_a_proxy_does_not_revoke_the_login(
    credentials: Path, store: GcsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    login = json.loads(credentials.read_text()) | {"token_uri": "https://issuer.example/token"}
    credentials.write_text(json.dumps(login))
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        with pytest.raises(BackendError, match="the proxy doesn't connect") as raised:
            await store.list("")
    assert not isinstance(raised.value, AuthError)


async def test_the_proxy_in_the_environment_is_used(
    server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url.replace("//", "//me:secret@"))
    monkeypatch.setenv("no_proxy", "other.example,127.0.0.1")
    store = GcsStore("gs://kn-test", {}, endpoint="http://storage.example", limits=QUICK)
    assert await store.create("x", b"through")
    assert server.objects["x"].body == b"through"
    assert server.proxied == {"Basic bWU6c2VjcmV0"}
    await store.aclose()
    monkeypatch.setenv("no_proxy", "storage.example")
    store = GcsStore("gs://kn-test", {}, endpoint="http://storage.example", limits=SHORT)
    with pytest.raises(Unavailable, match=r"storage\.example"):
        await store.list("")
    await store.aclose()


async def test_a_node_that_does_not_know_its_new_pod_yet_is_asked_again(
    server: GcsServer, store: GcsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = [b"404 Not Found", b"403 Forbidden", b"200 OK"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        content, status = b'{"access_token": "pod", "expires_in": 3600}', statuses.pop(0)
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(head % status + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        await writer.drain()
        writer.close()

    assert server.tokens is not None
    server.tokens.add("pod")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as node:
        port = node.sockets[0].getsockname()[1]
        library = "gcloud.aio.auth.token.GCE_ENDPOINT_TOKEN"
        monkeypatch.setattr(library, f"http://127.0.0.1:{port}/token")
        assert await store.list("") == []
    assert not statuses


NOWHERE = """
import asyncio
from kinetic.aio.gcs.store import GcsStore
from kinetic.errors import AuthError

async def main():
    asyncio.get_running_loop().slow_callback_duration = 60
    store = GcsStore("gs://kn-test")
    try:
        await store.list("")
    except AuthError as exc:
        print(exc)
    await store.aclose()

asyncio.run(main())
"""


def test_the_error_without_credentials_says_how_to_get_them(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "GCE_METADATA_HOST": "127.0.0.1:9"}
    done = programs.run(sys.executable, *("-W", "error", "-X", "dev", "-c", NOWHERE), env=environ)
    assert done.stderr == ""
    assert "gcloud auth application-default login" in done.stdout
