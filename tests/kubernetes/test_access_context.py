"""Access through a kubeconfig's context: credentials, certificates, proxies, and errors."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kinetic.aio.kubernetes.access import open_context
from kinetic.errors import AuthError, BackendError, ConfigurationError, Unavailable
from tests.cluster import certificates
from tests.kubernetes.faults import FaultServer, status
from tests.kubernetes.kubeconfigs import (
    PODS,
    Config,
    authorizations,
    connect,
    make_client_certificate,
    opened,
    secured,
)


async def test_the_named_context_is_used_and_not_the_current_one(
    server: FaultServer, config: Config
) -> None:
    before = config.path.read_bytes(), config.path.stat().st_mtime_ns
    async with opened(config) as api:
        assert api.server == server.url
        await api.call("GET", PODS)
    assert authorizations(server) == ["Bearer first"]
    assert before == (config.path.read_bytes(), config.path.stat().st_mtime_ns)


async def test_a_server_may_have_a_path(server: FaultServer, config: Config) -> None:
    config.cluster["server"] = f"{server.url}/k8s/clusters/c-1/"
    await connect(config)
    assert server.paths == [f"GET /k8s/clusters/c-1{PODS}"]


async def test_several_files_are_merged_and_the_first_that_has_a_name_wins(
    server: FaultServer, config: Config, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "token").write_text("from the file beside\n")
    users = [{"name": "me", "user": {"tokenFile": "token"}}]
    (other / "config").write_text(json.dumps({"users": users}))
    empty = tmp_path / "empty"
    empty.touch()
    paths = [tmp_path / "missing", empty, other / "config", config.path]
    config.environ["KUBECONFIG"] = os.pathsep.join(str(path) for path in paths)
    async with opened(config) as api:
        await api.call("GET", PODS)
    assert authorizations(server) == ["Bearer from the file beside"]


@pytest.mark.parametrize(
    ("user", "header"),
    [
        ({}, None),
        ({"token": "t"}, "Bearer t"),
    ],
)
async def test_a_user_sends_its_token(
    server: FaultServer, config: Config, user: dict[str, Any], header: str | None
) -> None:
    config.user = user
    await connect(config)
    assert authorizations(server) == [header]


@pytest.mark.parametrize("text", ["# my clusters\n", "---\n# none\n", "\ufeff# a BOM\n", "\n"])
async def test_a_file_with_only_comments_is_passed_over(
    server: FaultServer, config: Config, tmp_path: Path, text: str
) -> None:
    (tmp_path / "notes").write_text(text, encoding="utf-8")
    for paths in ((tmp_path / "notes", config.path), (config.path, tmp_path / "notes")):
        config.environ["KUBECONFIG"] = os.pathsep.join(str(path) for path in paths)
        async with opened(config) as api:
            await api.call("GET", PODS)
    assert authorizations(server) == ["Bearer first"] * 2


async def test_the_error_names_the_one_file_that_is_broken_and_quotes_no_line(
    config: Config, tmp_path: Path
) -> None:
    (tmp_path / "broken").write_text("users: [{name: me, user: {token: sesame}}")
    config.environ["KUBECONFIG"] = f"{config.path}{os.pathsep}{tmp_path / 'broken'}"
    with pytest.raises(ConfigurationError, match=f"{tmp_path / 'broken'} isn't a valid") as caught:
        await config.open()
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("where", ["token", "tokenFile"])
async def test_line_breaks_around_a_token_do_not_belong_to_it(
    server: FaultServer, config: Config, tmp_path: Path, where: str
) -> None:
    (tmp_path / "file").write_bytes(b"\r\nsesame\r\n\n")
    config.user = {"token": "sesame\n"} if where == "token" else {"tokenFile": "file"}
    await connect(config)
    assert authorizations(server) == ["Bearer sesame"]


async def test_a_context_without_a_user_works(server: FaultServer, config: Config) -> None:
    del config.context["user"]
    await connect(config)
    assert authorizations(server) == [None]


async def test_a_user_who_impersonates_another_sends_the_headers(
    server: FaultServer, config: Config
) -> None:
    config.user |= {"as": "ada", "as-groups": ["a", "b"], "as-user-extra": {"why": ["test"]}}
    await connect(config)
    seen = server.seen[0]
    assert (seen.headers["Impersonate-User"], seen.groups) == ("ada", ["a", "b"])
    assert seen.headers["Impersonate-Extra-why"] == "test"


async def test_a_login_in_another_terminal_is_used_when_the_old_token_is_refused(
    server: FaultServer, config: Config
) -> None:
    async with opened(config) as api:
        await api.call("GET", PODS)
        config.user = {"token": "second"}
        config.write()
        await api.call("GET", PODS)
        server.then(status(401, "Unauthorized"))
        await api.call("GET", PODS)
    assert authorizations(server) == [
        "Bearer first",
        "Bearer first",
        "Bearer first",
        "Bearer second",
    ]


async def test_a_client_stays_with_the_cluster_it_was_opened_for(
    server: FaultServer, config: Config
) -> None:
    async with opened(config) as api:
        config.cluster["server"] = "https://another.example"
        config.write()
        await api.call("GET", PODS)
        server.then(status(401, "Unauthorized"))
        with pytest.raises(AuthError, match=r"names the server https://another.example now"):
            await api.call("GET", PODS)
    assert len(server.seen) == 2


async def test_a_token_file_is_read_again_when_its_token_is_refused(
    server: FaultServer, config: Config, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("one\n")
    config.user = {"tokenFile": "token", "token": "the file goes first"}
    config.write()
    async with opened(config) as api:
        await api.call("GET", PODS)
        (tmp_path / "token").write_text("two")
        server.then(status(401, "Unauthorized"))
        await api.call("GET", PODS)
    assert authorizations(server) == ["Bearer one", "Bearer one", "Bearer two"]


async def test_an_auth_provider_is_refused_with_what_to_use_instead(config: Config) -> None:
    config.user = {"auth-provider": {"name": "oidc", "config": {"id-token": "x"}}}
    config.write()
    with pytest.raises(ConfigurationError, match=r"auth-provider.*gke-gcloud-auth-plugin"):
        await config.open()


@pytest.mark.parametrize("inline", [True, False], ids=["in it", "in a file"])
async def test_the_ca_of_the_cluster_is_trusted_and_no_other(
    config: Config, tmp_path: Path, inline: bool
) -> None:
    async with secured(tmp_path) as server:
        ca = (tmp_path / "ca.crt").read_bytes()
        config.cluster = {"server": server.url}
        if inline:
            config.cluster["certificate-authority-data"] = base64.b64encode(ca).decode()
        else:
            config.cluster["certificate-authority"] = "ca.crt"
        await connect(config)
        (tmp_path / "other").mkdir()
        other = certificates.make(tmp_path / "other").ca.read_bytes()
        config.cluster = {
            "server": server.url,
            "certificate-authority-data": base64.b64encode(other).decode(),
        }
        config.write()
        async with opened(config) as api:
            with pytest.raises(AuthError, match=r"is not the cluster's.*belong together"):
                await api.call("GET", PODS)
        config.cluster["insecure-skip-tls-verify"] = True
        await connect(config)
        assert len(server.seen) == 2


@pytest.mark.parametrize("comment", ["# Főtanúsítvány", "subject=/CN=ä"])
@pytest.mark.parametrize("encoding", ["utf-8", "iso-8859-2"])
@pytest.mark.parametrize("inline", [True, False], ids=["in it", "in a file"])
async def test_certificates_and_keys_may_have_comments_in_any_encoding(
    config: Config, tmp_path: Path, inline: bool, encoding: str, comment: str
) -> None:
    def commented(path: Path) -> bytes:
        line = comment.encode(encoding) + b"\r\n"
        return line + path.read_bytes() + line

    async with secured(tmp_path, ask=True) as server:
        config.cluster, config.user = {"server": server.url}, {}
        for values, field, name in (
            (config.cluster, "certificate-authority", "ca.crt"),
            (config.user, "client-certificate", "me.crt"),
            (config.user, "client-key", "me.key"),
        ):
            content = commented(tmp_path / name)
            (tmp_path / f"commented-{name}").write_bytes(content)
            if inline:
                values[f"{field}-data"] = base64.encodebytes(content).decode()
            else:
                values[field] = f"commented-{name}"
        await connect(config)
        assert len(server.seen) == 1


async def test_the_files_of_a_user_are_beside_the_kubeconfig_of_the_user(
    config: Config, tmp_path: Path
) -> None:
    """kubernetes-asyncio looks for them beside the kubeconfig of the cluster."""
    folder = tmp_path / "users"
    folder.mkdir()
    async with secured(tmp_path, ask=True) as server:
        for name in ("me.crt", "me.key"):
            (tmp_path / name).rename(folder / name)
        user = {"client-certificate": "me.crt", "client-key": "./me.key"}
        (folder / "config").write_text(json.dumps({"users": [{"name": "me", "user": user}]}))
        config.cluster = {"server": server.url, "certificate-authority": "ca.crt"}
        config.environ["KUBECONFIG"] = f"{folder / 'config'}{os.pathsep}{config.path}"
        await connect(config)
        assert len(server.seen) == 1


async def test_a_certificate_with_nothing_but_its_address_may_be_the_ca(
    config: Config, tmp_path: Path
) -> None:
    """Small clusters have such certificates; Python 3.13 refuses them by default."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(make_client_certificate(tmp_path), tmp_path / "me.key")
    async with FaultServer(context) as server:
        config.cluster = {"server": server.url, "certificate-authority": "me.crt"}
        await connect(config)


async def test_the_kubeconfig_may_set_the_name_in_the_certificate(
    config: Config, tmp_path: Path
) -> None:
    async with secured(tmp_path) as server:
        config.cluster = {"server": server.url, "certificate-authority": "ca.crt"}
        for name, matches in (("kubernetes.default.svc", True), ("another.example", False)):
            config.cluster["tls-server-name"] = name
            config.write()
            async with opened(config) as api:
                if matches:
                    await api.call("GET", PODS)
                else:
                    with pytest.raises(AuthError, match=r"another\.example"):
                        await api.call("GET", PODS)


async def test_a_client_certificate_is_sent_and_its_key_is_not_left_in_a_file(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    async with secured(tmp_path, ask=True) as server:
        config.cluster = {"server": server.url, "certificate-authority": "ca.crt"}
        certificate, key = (tmp_path / name for name in ("me.crt", "me.key"))
        config.user = {
            "client-certificate-data": base64.b64encode(certificate.read_bytes()).decode(),
            "client-key-data": base64.b64encode(key.read_bytes()).decode(),
        }
        config.write()
        async with opened(config) as api:
            await api.call("GET", PODS)
            server.then(status(401, "Unauthorized"))
            await api.call("GET", PODS)
        config.user = {"client-certificate": "me.crt", "client-key": "me.key"}
        await connect(config)
        config.user = {}
        config.write()
        async with opened(config) as api:
            with pytest.raises(Exception, match=r"does not answer|trusted"):
                await api.call("GET", PODS)
    assert not list(scratch.iterdir())


async def test_a_proxy_is_taken_from_the_context_or_from_the_environment(
    server: FaultServer, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.cluster = {"server": "http://cluster.example", "proxy-url": server.url}
    await connect(config)
    del config.cluster["proxy-url"]
    config.write()
    monkeypatch.setenv("http_proxy", server.url)
    async with opened(config) as api:
        monkeypatch.delenv("http_proxy")
        await api.call("GET", PODS)
    assert len(server.seen) == 2
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    config.cluster = {"server": server.url}
    await connect(config)
    assert len(server.seen) == 3
    config.cluster["proxy-url"] = "socks5://localhost:1"
    config.write()
    with pytest.raises(ConfigurationError, match="http and https proxies only"):
        await config.open()


@asynccontextmanager
async def tunnel() -> AsyncIterator[tuple[str, list[str]]]:
    """Start an HTTP proxy that supports CONNECT; yield its URL and the targets it connects to."""
    targets: list[str] = []
    tasks: set[asyncio.Task[None]] = set()

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(65536):
                sink.write(piece)
                await sink.drain()
        sink.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, target, _ = (await reader.readuntil(b"\r\n\r\n")).decode().split(" ", 2)
        assert method == "CONNECT"
        targets.append(target)
        host, _, port = target.rpartition(":")
        answers, upstream = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for ends in ((reader, upstream), (answers, writer)):
            tasks.add(asyncio.create_task(copy(*ends)))

    proxy = await asyncio.start_server(connect, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}", targets
    proxy.close()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("code", "error"), [(403, BackendError), (404, BackendError), (503, Unavailable)]
)
async def test_the_refusal_of_a_proxy_is_not_taken_for_the_servers(
    config: Config, code: int, error: type[BackendError]
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % code)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
        config.cluster = {"server": "https://cluster.example"}
        config.cluster["proxy-url"] = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        config.write()
        async with opened(config) as api:
            with pytest.raises(BackendError, match=f"proxy doesn't connect .{code} No") as raised:
                await api.call("GET", PODS)
    assert type(raised.value) is error


async def test_a_proxy_sees_only_encrypted_traffic(config: Config, tmp_path: Path) -> None:
    async with secured(tmp_path) as server, tunnel() as (proxy, targets):
        config.cluster = {"server": server.url, "certificate-authority": "ca.crt"}
        config.cluster["proxy-url"] = proxy
        await connect(config)
        assert targets == [server.url.removeprefix("https://")]
        assert authorizations(server) == ["Bearer first"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no kubeconfig at"),
        ("", "there is no kubeconfig at"),
        ("{", r"isn.t a valid kubeconfig \(ParserError: .* line 1, column 2\); fix it"),
        ("just words", "isn't a valid kubeconfig"),
        ("clusters: 7", "context 'c' of .*/config cannot be used"),
        ("{}", "there is no kubeconfig at"),
        ("contexts: []", "/config cannot be used .*no context 'c'; there are none"),
        ("contexts: [{name: cc, context: {cluster: a}}]", "no context 'c'; .*'cc'"),
        ("contexts: [{name: c}]", "/config cannot be used .*key context"),
        ("contexts: [{name: c, context: {cluster: a}}]", "name a in .*clusters"),
        (
            "contexts: [{name: c, context: {cluster: a}}]\nclusters: [{name: a, cluster: {}}]",
            "has no usable server",
        ),
        (
            """contexts: [{name: c, context: {cluster: a, user: u}}]
clusters: [{name: a, cluster: {server: "https://x.example"}}]""",
            "name u in .*users",
        ),
    ],
)
async def test_the_error_for_a_bad_kubeconfig_names_the_problem(
    config: Config, text: str | None, message: str
) -> None:
    config.path.unlink()
    if text is not None:
        config.path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        await config.open()


@pytest.mark.parametrize(
    ("cluster", "user", "message"),
    [
        ({"certificate-authority": "no.crt"}, {}, r"certificate-authority .*/no\.crt"),
        ({"certificate-authority-data": "no"}, {}, "certificate-authority-data is not base64"),
        ({"certificate-authority-data": "bm8="}, {}, "certificate-authority is not a certificate"),
        ({}, {"client-certificate": "no"}, "client-certificate cannot be read: .*/no"),
        ({}, {"client-certificate-data": "bm8="}, "client-certificate and client-key cannot be"),
        ({}, {"tokenFile": "no"}, "tokenFile cannot be read: .*/no"),
        ({}, {"token": "a\nb"}, "token has a line break"),
        ({}, {"token": "ä"}, "token has .*character that no token has"),
    ],
)
async def test_the_error_names_what_a_context_lacks(
    config: Config, cluster: dict[str, Any], user: dict[str, Any], message: str
) -> None:
    config.cluster = {"server": "https://127.0.0.1:1", **cluster}
    config.user = user
    config.write()
    with pytest.raises(ConfigurationError, match=f"{message}.*; fix {config.path}"):
        await config.open()


async def test_the_default_kubeconfig_is_in_the_home_folder(config: Config, tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    config.path.rename(tmp_path / ".kube" / "config")
    access = await open_context("c", {"HOME": str(tmp_path)})
    assert access.server == config.cluster["server"]
    await access.credentials.aclose()
