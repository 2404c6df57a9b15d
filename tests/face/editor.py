"""What an editor says to a debugger: what a breakpoint takes of the Debug Adapter Protocol."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import subprocess
from pathlib import Path
from typing import Any, Self

from kinetic import aio

PATIENCE_S = 60.0


class Editor:
    """A connection to the debugger on *port* of this machine."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._file = self._socket.makefile("rb")
        self._number = 0
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()
        self._socket.close()

    def send(self, command: str, **arguments: Any) -> int:
        """Ask for something; the answer may come much later."""
        self._number += 1
        message = {"seq": self._number, "type": "request", "command": command}
        body = json.dumps(message | {"arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        return self._number

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer."""
        return self.answer(self.send(command, **arguments))

    def answer(self, number: int) -> dict[str, Any]:
        """The answer to a request."""
        while True:
            message = self._read()
            if message["type"] == "response" and message["request_seq"] == number:
                assert message["success"], message
                body: dict[str, Any] = message.get("body") or {}
                return body
            if message["type"] == "event":
                self._events.append(message)

    def event(self, name: str) -> dict[str, Any]:
        """The next event of this name."""
        while True:
            for at, message in enumerate(self._events):
                if message["event"] == name:
                    del self._events[: at + 1]
                    body: dict[str, Any] = message.get("body") or {}
                    return body
            message = self._read()
            if message["type"] == "event":
                self._events.append(message)

    def begin(self, configuration: dict[str, Any], file: Path, line: int) -> bool:
        """Attach with a breakpoint; whether that was found."""
        self.ask("initialize", adapterID="test", pathFormat="path", linesStartAt1=True)
        attaching = self.send("attach", **configuration)
        self.event("initialized")
        said = self.ask("setBreakpoints", source={"path": str(file)}, breakpoints=[{"line": line}])
        self.ask("configurationDone")
        self.answer(attaching)
        return bool(said["breakpoints"][0]["verified"])

    def stopped(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Where it stands: the innermost frame, and the local variables there."""
        thread = self.event("stopped")["threadId"]
        (frame, *_) = self.ask("stackTrace", threadId=thread)["stackFrames"]
        scopes = self.ask("scopes", frameId=frame["id"])["scopes"]
        reference = scopes[0]["variablesReference"]
        found = self.ask("variables", variablesReference=reference)["variables"]
        return frame, {one["name"]: one["value"] for one in found}

    def go_on(self) -> None:
        """Let it run."""
        self.ask("continue", threadId=1)

    def _read(self) -> dict[str, Any]:
        length = 0
        while (header := self._file.readline()) not in (b"\r\n", b""):
            name, _, value = header.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        assert length, "the debugger has closed the connection"
        message: dict[str, Any] = json.loads(self._file.read(length))
        return message


async def attached(job: aio.JobHandle[Any], **how: Any) -> tuple[subprocess.Popen[bytes], Any]:
    """The forwarder, and what an editor is told."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        forwarder = await job.debug_attach(local_port=0, **how)
    return forwarder, json.loads(said.getvalue().partition("\n")[2])


def stopped_at(told: Any, file: object, line: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Attach as an editor does, let it run to a line and on; what was seen there."""
    with Editor(told["connect"]["port"]) as editor:
        assert editor.begin(told, Path(str(file)), line)
        seen = editor.stopped()
        editor.go_on()
    return seen
