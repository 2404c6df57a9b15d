"""Credentials from an exec plugin: when it runs, what it receives, and its failures."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from kinetic.aio.kubernetes.exec_plugin import Plugin
from kinetic.errors import AuthError, ConfigurationError, Unavailable
from tests.cluster import certificates
from tests.kubernetes.faults import FaultServer, answer, status
from tests.kubernetes.kubeconfigs import API_VERSION, PODS, Config, authorizations, opened, secured

CREDENTIAL = {"apiVersion": API_VERSION, "kind": "ExecCredential"}
COUNTING = """
import json, os, pathlib, sys
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
runs = pathlib.Path(os.environ["RUNS"])
count = int(runs.read_text() or 0) + 1 if runs.exists() else 1
runs.write_text(str(count))
pathlib.Path(os.environ["RUNS"] + ".info").write_text(json.dumps([sys.argv[1:], info]))
status = {"token": f"token-{count}"}
if until := os.environ.get("UNTIL"):
    status["expirationTimestamp"] = until
print(json.dumps({"kind": "ExecCredential", "apiVersion": info["apiVersion"], "status": status}))
"""


def later(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


async def test_a_plugin_runs_once_and_again_when_its_token_is_refused(
    server: FaultServer, config: Config, tmp_path: Path
) -> None:
    env = [{"name": "RUNS", "value": str(tmp_path / "runs")}, {"name": "UNTIL", "value": later(99)}]
    config.plugin(COUNTING, args=["--for", 7], env=env)

    async def first_is_refused(request: web.BaseRequest) -> web.StreamResponse:
        old = request.headers["Authorization"] == "Bearer token-1"
        return await (status(401, "Unauthorized") if old else answer({}))(request)

    async with opened(config) as api:
        await asyncio.gather(*(api.call("GET", PODS) for _ in range(20)))
        server.always = first_is_refused  # requests may still carry token 1 once token 2 exists
        await asyncio.gather(*(api.call("GET", PODS) for _ in range(10)))
    assert (tmp_path / "runs").read_text() == "2"
    arguments, info = json.loads((tmp_path / "runs.info").read_text())
    assert arguments == ["--for", "7"]
    assert info == {**CREDENTIAL, "spec": {"interactive": False}}
    assert set(authorizations(server)) == {"Bearer token-1", "Bearer token-2"}


async def test_a_plugin_runs_again_when_its_token_is_about_to_expire(
    server: FaultServer, config: Config, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    env = [{"name": "RUNS", "value": str(runs)}, {"name": "UNTIL", "value": later(0)}]
    config.plugin(COUNTING, env=env)
    async with opened(config) as api:
        await api.call("GET", PODS)  # the first token has expired, so no request uses it
        assert runs.read_text() == "2"
        config.plugin(COUNTING, env=[env[0], {"name": "UNTIL", "value": later(3600)}])
        await api.call("GET", PODS)
        await api.call("GET", PODS)
        assert runs.read_text() == "3"


async def test_a_plugin_that_asks_for_cluster_info_gets_it(config: Config, tmp_path: Path) -> None:
    files = certificates.make(tmp_path)
    extension = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "a"}}
    config.cluster |= {"certificate-authority": files.ca.name, "extensions": [extension]}
    env = [{"name": "RUNS", "value": str(tmp_path / "runs")}]
    config.plugin(COUNTING, env=env, provideClusterInfo=True, interactiveMode="Never")
    async with opened(config):
        pass
    _, info = json.loads((tmp_path / "runs.info").read_text())
    assert info["spec"]["cluster"] == {
        "server": config.cluster["server"],
        "certificate-authority-data": base64.b64encode(files.ca.read_bytes()).decode(),
        "config": {"audience": "a"},
    }


async def test_a_plugin_that_fails_temporarily_is_run_again(
    server: FaultServer, config: Config, tmp_path: Path
) -> None:
    offline = tmp_path / "offline"
    until = later(0)  # each request needs a new token
    program = f"import os, sys\nif os.path.exists({str(offline)!r}): sys.exit('no network')\n"
    env = [{"name": "RUNS", "value": str(tmp_path / "runs")}, {"name": "UNTIL", "value": until}]
    config.plugin(program + COUNTING, env=env)
    async with opened(config) as api:
        await api.call("GET", PODS)
        offline.touch()
        with pytest.raises(Unavailable, match="no network"):
            await api.call("GET", PODS)
        offline.unlink()
        await api.call("GET", PODS)
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("program", "section", "message"),
    [
        ("import sys; sys.exit('please\\nlog in')", {}, "ended with code 1: please log in"),
        (
            f"print({json.dumps({**CREDENTIAL, 'status': {}})!r})",
            {},
            "neither a token nor a certificate",
        ),
        ("", {"command": "no-such", "installHint": "get it at x.example"}, "get it at x.example"),
        ("", {"command": "./missing"}, "cannot be run: .*/missing.*; install it"),
        ("", {"interactiveMode": "Always"}, "needs a terminal"),
    ],
)
async def test_the_error_says_why_a_plugin_returns_no_credentials(
    config: Config, program: str, section: dict[str, Any], message: str
) -> None:
    config.plugin(program, **section)
    with pytest.raises(AuthError, match=message):
        await config.open()


@pytest.mark.parametrize(
    ("program", "section", "message"),
    [
        ("", {}, "didn't return an ExecCredential"),
        ("print('{}')", {}, "didn't return an ExecCredential"),
        ("print([1])", {}, "didn't return an ExecCredential"),
        ("print('log {in} first')", {}, "didn't return an ExecCredential"),
        (f"print({json.dumps({**CREDENTIAL, 'status': 7})!r})", {}, "didn't return an ExecCred"),
        (
            'print(\'{"apiVersion": "v0", "kind": "ExecCredential", "status": {}}\')',
            {},
            "answered with ExecCredential v0, but the kubeconfig says client.auth",
        ),
        ("", {"apiVersion": None}, "apiVersion"),
        ("", {"args": "one"}, "is invalid: .*; fix it"),
        ("", {"env": [{"value": "x"}]}, "key name in exec/env/0; fix it"),
    ],
)
async def test_the_error_names_the_kubeconfig_of_a_section_or_a_reply_that_is_invalid(
    config: Config, program: str, section: dict[str, Any], message: str
) -> None:
    config.plugin(program, **section)
    with pytest.raises(ConfigurationError, match=message) as caught:
        await config.open()
    assert f"exec section in {config.path}" in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"\x7fELF of another machine", b"#!/no/such/interpreter\n"], ids=["ELF", "script"]
)
async def test_the_error_names_a_plugin_that_cannot_be_run(config: Config, content: bytes) -> None:
    config.plugin("")
    (config.path.parent / "plugin").write_bytes(content)
    with pytest.raises(AuthError, match=r"'\./plugin' cannot be run: .*install it for this"):
        await config.open()


HANGING = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(os.environ["PIDS"]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["timeout", "cancelled"])
async def test_a_plugin_that_hangs_is_ended_with_its_children(
    config: Config, tmp_path: Path, how: str
) -> None:
    pids = tmp_path / "pids"
    config.plugin(HANGING)
    section = config.user["exec"] | {"env": [{"name": "PIDS", "value": str(pids)}]}
    plugin = Plugin(section=section, file=str(config.path), cluster={})
    running = asyncio.create_task(plugin.run(1.0 if how == "timeout" else 60.0))
    if how == "timeout":
        with pytest.raises(AuthError, match="gave no credentials within 1 s"):
            await running
    else:
        async with asyncio.timeout(60):
            while not pids.exists() or " " not in pids.read_text():
                await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    if pids.exists():
        numbers = [int(pid) for pid in pids.read_text().split()]
        async with asyncio.timeout(30):
            while any(alive(number) for number in numbers):
                await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_plugin_may_leave_a_program_running_that_has_its_output(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as the browser in which a user logs in."""
    pid, reply = tmp_path / "pid", {**CREDENTIAL, "status": {"token": "t"}}
    config.plugin(
        "import pathlib, subprocess, sys\n"
        "program = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(program.pid))\n"
        "print('log in at x.example', file=sys.stderr)\n"
        f"print({json.dumps(reply)!r})"
    )
    plugin = Plugin(section=config.user["exec"], file=str(config.path), cluster={})
    try:
        assert (await plugin.run(30.0))["token"] == "t"
        assert alive(int(pid.read_text()))
    finally:
        psutil.Process(int(pid.read_text())).kill()
    assert "log in at x.example" in caplog.text


async def test_lines_around_the_reply_of_a_plugin_do_not_count(
    server: FaultServer, config: Config
) -> None:
    reply = json.dumps({**CREDENTIAL, "status": {"token": "t\n"}}, indent=1)
    config.plugin(f"print('using {{the}} profile x')\nprint({reply!r})\nprint('done')")
    async with opened(config) as api:
        await api.call("GET", PODS)
    assert authorizations(server) == ["Bearer t"]


async def test_a_plugin_shows_where_to_log_in_while_it_waits(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """kubernetes-asyncio would show it only after the login."""
    fifo, reply = tmp_path / "fifo", {**CREDENTIAL, "status": {"token": "t"}}
    os.mkfifo(fifo)
    config.plugin(
        "import sys\n"
        "print('open https://x.example', file=sys.stderr, flush=True)\n"
        f"open({str(fifo)!r}).read()\n"
        f"print({json.dumps(reply)!r})"
    )
    opening = asyncio.create_task(config.open())
    async with asyncio.timeout(60):
        while "open https://x.example" not in caplog.text:
            await asyncio.sleep(0.01)
        assert not opening.done()
        fifo.write_text("logged in")
        await (await opening).credentials.aclose()


async def test_a_plugin_may_return_a_certificate(config: Config, tmp_path: Path) -> None:
    async with secured(tmp_path, ask=True) as server:
        config.cluster = {"server": server.url, "certificate-authority": "ca.crt"}
        reply = {
            "clientCertificateData": (tmp_path / "me.crt").read_text(),
            "clientKeyData": (tmp_path / "me.key").read_text(),
        }
        document = {**CREDENTIAL, "status": reply}
        config.plugin(f"print({json.dumps(document)!r})")
        async with opened(config) as api:
            await api.call("GET", PODS)
        assert authorizations(server) == [None]
