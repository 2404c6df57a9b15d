"""The command `kinetic` in processes, as a person types it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from tests.infra.google import Google

SITE = ("--project", "acme-1", "--cluster", "lab")


@dataclass
class Console:
    """Runs `kinetic` in processes, with the variables *environ* and without others."""

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

    async def run(self, *arguments: str, ends: int = 0) -> str:
        """Return what the command prints on both streams, the standard one first."""
        return "".join(await self.streams(*arguments, ends=ends))

    async def streams(self, *arguments: str, ends: int = 0) -> tuple[str, str]:
        """Return what the command prints on each stream; it has to end with the code *ends*."""

        def process() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-m", "kinetic", *arguments],
                env=self.environ,
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )

        ended = await anyio.to_thread.run_sync(process)
        assert ended.returncode == ends, ended.stdout + ended.stderr
        return ended.stdout, ended.stderr

    async def typed(self, keys: str, *arguments: str) -> str:
        """Return what the command prints on a terminal where a person types *keys*."""

        def process() -> str:
            ours, theirs = pty.openpty()
            with subprocess.Popen(
                [sys.executable, "-m", "kinetic", *arguments],
                env=self.environ,
                cwd=self.folder,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
            ) as child:
                os.close(theirs)
                os.write(ours, keys.encode())
                output = b""
                with contextlib.suppress(OSError):  # a terminal whose last process has ended
                    while more := os.read(ours, 65536):
                        output += more
                os.close(ours)
                assert child.wait(timeout=100) == 0, output.decode()
            return output.decode()

        return await anyio.to_thread.run_sync(process)
