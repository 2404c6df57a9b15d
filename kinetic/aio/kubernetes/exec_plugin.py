"""Credentials from a program that the ``exec`` section of a kubeconfig names.

kinetic runs the program itself, because kubernetes_asyncio sets no timeout, leaves the program
running when the caller is cancelled, and doesn't tell the program about the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from absl import logging

from kinetic._messages import one_line
from kinetic.errors import AuthError

T = TypeVar("T")

TIMEOUT_S = 300.0
"""Timeout of a plugin in seconds; some plugins wait for a login in a browser."""

MAX_KEPT = 2000
"""How many of the last characters of a plugin's stderr kinetic keeps for an error message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A token, or a certificate with its key; ``until`` is its expiry, by `time.time`."""

    token: str = field(repr=False)
    certificate: str | None
    key: str | None = field(repr=False)
    until: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A user's ``exec`` section, the folder of its kubeconfig, and the cluster to log in to."""

    section: Mapping[str, Any] = field(repr=False)
    folder: Path
    cluster: Mapping[str, Any]
    environ: Mapping[str, str] = field(repr=False)

    async def run(self, timeout_s: float = TIMEOUT_S) -> Reply:
        """Run the plugin and parse its reply; a cancelled call kills the plugin and its children.

        Raises:
            AuthError: The plugin isn't installed, fails, times out, or its reply is invalid.
        """
        command, interactive = self._command(), self._is_interactive()
        async with _pipe(_read_all) as (stdout, out), _pipe(self._log) as (stderr, log):
            try:
                process = await asyncio.create_subprocess_exec(
                    command,
                    *[str(argument) for argument in self.section.get("args") or ()],
                    env=self._environment(interactive),
                    stdin=None if interactive else asyncio.subprocess.DEVNULL,
                    start_new_session=not interactive,  # so that kinetic can also kill its children
                    stdout=stdout,
                    stderr=stderr,
                )
            except OSError as exc:  # the plugin is for another machine, or lacks its interpreter
                message = f"{self} cannot be run: {exc}; install it for this machine"
                raise AuthError(message) from exc
            try:
                async with asyncio.timeout(timeout_s):
                    code = await process.wait()
            except TimeoutError as exc:
                raise AuthError(
                    f"{self} gave no credentials within {timeout_s:g} s; run it in a terminal"
                ) from exc
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill() if interactive else os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
        if code != 0:
            errors = await log or "it printed no message"
            raise AuthError(f"{self} ended with code {code}: {errors}")
        return self._parse_reply(await out)

    def __str__(self) -> str:
        return f"the credential plugin {str(self.section.get('command'))!r}"

    def _command(self) -> str:
        command = str(self.section.get("command") or "")
        path = self.environ.get("PATH", os.defpath)
        if os.sep in command:  # a path is relative to the kubeconfig's folder, as in kubectl
            command = str(self.folder / command)
        executable = shutil.which(command, path=path)
        if executable is None:
            hint = one_line(str(self.section.get("installHint") or ""))
            raise AuthError(f"{self} is not on this machine; install it. {hint}".rstrip())
        return executable

    def _is_interactive(self) -> bool:
        """Return whether the plugin gets the terminal of this process, if there is one."""
        mode = self.section.get("interactiveMode") or "IfAvailable"
        has_terminal = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
        if mode == "Always" and not has_terminal:
            raise AuthError(f"{self} needs a terminal; first run it in a terminal to log in")
        return mode != "Never" and has_terminal

    def _environment(self, interactive: bool) -> dict[str, str]:
        """Return the plugin's environment, in which KUBERNETES_EXEC_INFO has the request."""
        spec: dict[str, Any] = {"interactive": interactive}
        if self.section.get("provideClusterInfo"):
            spec["cluster"] = dict(self.cluster)
        info = {"apiVersion": self._version, "kind": "ExecCredential", "spec": spec}
        variables = {
            str(variable["name"]): str(variable["value"])
            for variable in self.section.get("env") or ()
        }
        return {**self.environ, **variables, "KUBERNETES_EXEC_INFO": json.dumps(info)}

    @property
    def _version(self) -> str:
        return str(self.section.get("apiVersion") or "client.authentication.k8s.io/v1")

    async def _log(self, stream: asyncio.StreamReader) -> str:
        """Log the plugin's messages, such as where to log in; return the last of them."""
        last = ""
        while piece := await stream.read(4096):
            text = piece.decode(errors="replace")
            last = (last + text)[-MAX_KEPT:]
            for line in filter(None, (one_line(line, 500) for line in text.splitlines())):
                logging.warning("%s: %s", self.section.get("command"), line)
        return one_line(last, 500)

    def _parse_reply(self, out: bytes) -> Reply:
        try:
            answer: Any = json.loads(out)
            status = cast("dict[str, Any]", answer["status"])
            version, kind = answer["apiVersion"], answer["kind"]
            expiry, until = status.get("expirationTimestamp"), None
            if expiry:
                until = datetime.datetime.fromisoformat(str(expiry)).timestamp()
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise AuthError(f"{self} didn't return an ExecCredential") from exc
        if (version, kind) != (self._version, "ExecCredential"):
            raise AuthError(
                f"{self} answered with {kind} {version}, but the kubeconfig says {self._version}"
            )
        token = str(status.get("token") or "")
        certificate, key = status.get("clientCertificateData"), status.get("clientKeyData")
        if not token and not (certificate and key):
            raise AuthError(f"{self} gave neither a token nor a certificate with its key")
        return Reply(token=token, certificate=certificate, key=key, until=until)


@contextlib.asynccontextmanager
async def _pipe(
    read: Callable[[asyncio.StreamReader], Coroutine[Any, Any, T]],
) -> AsyncGenerator[tuple[int, asyncio.Task[T]]]:
    """Yield the end of a pipe for a plugin, and a task that reads the pipe until this block ends.

    A program that the plugin leaves running, such as a browser, may keep the pipe open. With its
    own pipes, asyncio would not notice the end of the plugin then.
    """
    stream, (reader, writer) = asyncio.StreamReader(), os.pipe()
    try:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), io.FileIO(reader)
        )
        task = asyncio.create_task(read(stream), name="kinetic credential plugin")
        try:
            yield writer, task
        finally:
            transport.close()
            await task
    finally:
        os.close(writer)


async def _read_all(stream: asyncio.StreamReader) -> bytes:
    return await stream.read()
