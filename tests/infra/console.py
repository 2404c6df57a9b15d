"""Run the command `kinetic` in a process, as a person would."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio.from_thread
import anyio.to_thread

from tests.infra.google import Google
from tests.terminals import Terminal

SITE = ("--project", "acme-1", "--cluster", "lab")


@dataclass
class Console:
    """Run `kinetic` in processes whose environment has only the variables *environ*."""

    folder: Path
    environ: dict[str, str]

    def __post_init__(self) -> None:
        self.environ = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.folder),
            "KINETIC_HOME": str(self.folder / "home"),
            **self.environ,
        }

    @classmethod
    def of(cls, google: Google, folder: Path, token: str = "token") -> Console:
        """Return a console that uses *google* and a login whose token is *token*."""
        user = {"type": "authorized_user", "client_id": "c", "client_secret": "s"}
        user |= {"refresh_token": "r", "token_uri": f"{google.url}/token"}
        (folder / "adc.json").write_text(json.dumps(user))
        google.token = token
        login = {"GOOGLE_APPLICATION_CREDENTIALS": str(folder / "adc.json")}
        return cls(folder, {**google.environ, **login})

    async def run(self, *arguments: str, exit_code: int = 0) -> str:
        """Return what the command prints on both streams, the standard one first."""
        return "".join(await self.streams(*arguments, exit_code=exit_code))

    async def streams(
        self, *arguments: str, exit_code: int = 0, stdin: str = ""
    ) -> tuple[str, str]:
        """Return what the command prints on each stream; it must end with *exit_code*.

        A pipe with *stdin* is its standard input.
        """

        def process() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-m", "kinetic", *arguments],
                env=self.environ,
                cwd=self.folder,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )

        ended = await anyio.to_thread.run_sync(process)
        assert ended.returncode == exit_code, ended.stdout + ended.stderr
        return ended.stdout, ended.stderr

    async def typed(self, keys: str, *arguments: str) -> str:
        """Return what the command prints on a terminal where a person types *keys*."""

        def process() -> str:
            controller, terminal = pty.openpty()
            with subprocess.Popen(
                [sys.executable, "-m", "kinetic", *arguments],
                env=self.environ,
                cwd=self.folder,
                stdin=terminal,
                stdout=terminal,
                stderr=terminal,
            ) as child:
                os.close(terminal)
                os.write(controller, keys.encode())
                output = b""
                with contextlib.suppress(OSError):  # raised when the last process has ended
                    while chunk := os.read(controller, 65536):
                        output += chunk
                os.close(controller)
                assert child.wait(timeout=100) == 0, output.decode()
            return output.decode()

        return await anyio.to_thread.run_sync(process)

    async def in_shell(self, line: str, question: str, keys: bytes, *, exit_code: int = 0) -> str:
        """Return what a terminal shows if a person types *keys* at *question*.

        A shell runs *line*, in which ``kinetic`` is the command.
        """
        function = f'set -o pipefail; kinetic() {{ "{sys.executable}" -m kinetic "$@"; }}; {line}'
        starting = "import os, sys; os.execv('/bin/bash', ['bash', '-c', sys.argv[1]])"

        def process() -> str:
            screen = Terminal(columns=200)
            try:
                asking = screen.start("-c", starting, function, env=self.environ, cwd=self.folder)
                screen.shows(question.encode())
                screen.type(keys)
                screen.rest()
                assert asking.wait(60) == exit_code, screen.lines
            finally:
                screen.close()
            return screen.raw.decode()

        return await anyio.to_thread.run_sync(process)

    async def interrupted(self, question: str, *arguments: str) -> str:
        """Return what the command prints if a person presses Ctrl-C once at *question*."""
        return await self.answered(question, b"\x03", *arguments, exit_code=130)

    async def answered(
        self,
        question: str,
        keys: bytes,
        *arguments: str,
        meanwhile: Callable[[], None] | None = None,
        exit_code: int = 0,
    ) -> str:
        """Return what the command prints if a person types *keys* at *question*.

        While the command waits for the person, call *meanwhile* on the event loop, and let the
        loop close what it aborts.
        """

        def process() -> str:
            screen = Terminal(columns=200)
            try:
                command = ("-m", "kinetic", *arguments)
                asking = screen.start(*command, env=self.environ, cwd=self.folder)
                screen.shows(question.encode())
                # Python reports a Ctrl-C just before this read only after the read.
                screen.until(lambda: reads_input(asking.pid))
                if meanwhile is not None:
                    anyio.from_thread.run_sync(meanwhile)
                    # A transport that *meanwhile* aborts closes its socket one turn later.
                    anyio.from_thread.run(anyio.sleep, 0)
                screen.type(keys)
                screen.rest()
                assert asking.wait(60) == exit_code, screen.lines
            finally:
                screen.close()
            return screen.raw.decode()

        return await anyio.to_thread.run_sync(process)


def reads_input(pid: int) -> bool:
    """Return whether the process waits in a system call for its standard input."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[1:2] == ["0x0"]
