"""Credentials from a program that the ``exec`` section of a kubeconfig names.

kubernetes-asyncio checks the section, and makes the command line and the environment. kinetic runs
the program itself: the library's `ExecProvider.run` shows a login prompt only after the program has
ended, leaves a hanging program running, and ignores ``interactiveMode`` and ``provideClusterInfo``.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from absl import logging

from kinetic._messages import one_line
from kinetic.errors import AuthError, ConfigurationError

TIMEOUT_S = 300.0
"""Timeout of a plugin in seconds; some plugins wait for a login in a browser."""

POLL_S = 0.1
"""How often kinetic shows what a plugin has printed, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """An ``exec`` section, the path of its kubeconfig, and the cluster to log in to."""

    section: Mapping[str, Any] = field(repr=False)
    file: str
    cluster: Mapping[str, Any]

    async def run(self, timeout_s: float = TIMEOUT_S) -> Mapping[str, Any]:
        """Run the plugin; return the ``status`` of its reply, with the expiry as a `datetime`.

        A cancelled call kills the plugin and its children.

        Raises:
            AuthError: The plugin isn't installed, fails, or times out.
            ConfigurationError: The section, or the plugin's reply, is invalid.
        """
        from kubernetes_asyncio.config.exec_provider import ExecProvider
        from kubernetes_asyncio.config.kube_config import ConfigNode

        try:
            provider = ExecProvider(ConfigNode("exec", dict(self.section)))
            command, *arguments = map(str, provider.args)
            environ = {str(name): str(value) for name, value in provider.env.items()}
        except Exception as exc:  # the library raises many types for malformed sections
            raise ConfigurationError(
                f"a user's exec section in {self.file} is invalid: {exc}; fix it"
            ) from exc
        if os.sep in command:  # a path is relative to the kubeconfig's folder, as in kubectl
            command = os.path.join(os.path.dirname(self.file), command)
        interactive = self._is_interactive()
        environ["KUBERNETES_EXEC_INFO"] = self._request(interactive)
        # Files, because a browser that the plugin leaves running would keep pipes open.
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            try:
                process = await asyncio.create_subprocess_exec(
                    command,
                    *arguments,
                    env=environ,
                    stdin=None if interactive else asyncio.subprocess.DEVNULL,
                    start_new_session=not interactive,  # so that kinetic can also kill its children
                    stdout=stdout,
                    stderr=stderr,
                )
            except OSError as exc:  # it's missing, for another machine, or lacks an interpreter
                hint = one_line(str(self.section.get("installHint") or ""))
                message = f"{self} cannot be run: {exc}; install it for this machine. {hint}"
                raise AuthError(message.rstrip()) from exc
            shown = 0
            try:
                async with asyncio.timeout(timeout_s):
                    while process.returncode is None:
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(process.wait(), POLL_S)
                        shown += self._log_messages(os.pread(stderr.fileno(), 65536, shown))
            except TimeoutError as exc:
                raise AuthError(
                    f"{self} gave no credentials within {timeout_s:g} s; run it in a terminal"
                ) from exc
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill() if interactive else os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
            stdout.seek(0)
            if process.returncode == 0:
                return self._parse_reply(stdout.read().decode(errors="replace"))
            stderr.seek(0)
            errors = one_line(stderr.read().decode(errors="replace")[-500:])
            raise AuthError(
                f"{self} ended with code {process.returncode}: {errors or 'it printed no message'}"
            )

    def __str__(self) -> str:
        return f"the credential plugin {str(self.section.get('command'))!r}"

    def _is_interactive(self) -> bool:
        """Return whether the plugin gets the terminal of this process, if there is one."""
        mode = self.section.get("interactiveMode") or "IfAvailable"
        has_terminal = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
        if mode == "Always" and not has_terminal:
            raise AuthError(f"{self} needs a terminal; first run it in a terminal to log in")
        return mode != "Never" and has_terminal

    def _request(self, interactive: bool) -> str:
        spec: dict[str, Any] = {"interactive": interactive}
        if self.section.get("provideClusterInfo"):
            spec["cluster"] = self.cluster
        version = self.section["apiVersion"]
        return json.dumps({"apiVersion": version, "kind": "ExecCredential", "spec": spec})

    def _log_messages(self, written: bytes) -> int:
        """Log the whole lines in *written*, such as where to log in; return their length."""
        lines = written[: written.rfind(b"\n") + 1]
        for line in lines.decode(errors="replace").splitlines():
            if text := one_line(line, 500):
                logging.warning("%s: %s", self.section["command"], text)
        return len(lines)

    def _parse_reply(self, text: str) -> Mapping[str, Any]:
        """Return the status in a reply; lines before and after its JSON don't count."""
        problem = f"{self} (a user's exec section in {self.file})"
        try:
            start = re.search(r"^[ \t]*\{", text, re.MULTILINE)
            reply, _ = json.JSONDecoder().raw_decode(text, start.end() - 1 if start else 0)
            status = cast("dict[str, Any]", {**reply["status"]})
            version, kind = reply["apiVersion"], reply["kind"]
            if expiry := status.get("expirationTimestamp"):
                status["expirationTimestamp"] = datetime.datetime.fromisoformat(expiry)
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigurationError(
                f"{problem} didn't return an ExecCredential ({type(exc).__name__}: {exc}); run it "
                "in a terminal to see what it prints"
            ) from exc
        if (version, kind) != (wanted := self.section["apiVersion"], "ExecCredential"):
            raise ConfigurationError(
                f"{problem} answered with {kind} {version}, but the kubeconfig says {wanted}; "
                "correct its apiVersion"
            )
        if not status.get("token") and not (
            status.get("clientCertificateData") and status.get("clientKeyData")
        ):
            raise AuthError(
                f"{problem} gave neither a token nor a certificate with its key; run it in a "
                "terminal to log in"
            )
        return status
