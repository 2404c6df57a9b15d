"""A minimal editor: the part of the Debug Adapter Protocol that a breakpoint needs."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import subprocess
from pathlib import Path
from typing import Any, Self

from kinetic import aio

DEADLINE_S = 60.0


class Editor:
    """A connection to the debugger on *port* of this machine."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        self._file = self._socket.makefile("rb")
        self._number = 0
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()
        self._socket.close()

    def send(self, command: str, **arguments: Any) -> int:
        """Send a request and return its number."""
        self._number += 1
        message = {"seq": self._number, "type": "request", "command": command}
        body = json.dumps(message | {"arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        return self._number

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request, wait for the response, and return its body."""
        return self.answer(self.send(command, **arguments))

    def answer(self, number: int) -> dict[str, Any]:
        """Wait for the response to a request and return its body."""
        while True:
            message = self._read()
            if message["type"] == "response" and message["request_seq"] == number:
                assert message["success"], message
                body: dict[str, Any] = message.get("body") or {}
                return body
            if message["type"] == "event":
                self._events.append(message)

    def event(self, name: str) -> dict[str, Any]:
        """Wait for the next event of this name and return its body."""
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
        """Attach, set a breakpoint, and return whether the debugger has verified it."""
        self.ask("initialize", adapterID="test", pathFormat="path", linesStartAt1=True)
        attach_number = self.send("attach", **configuration)
        self.event("initialized")
        breakpoints = [{"line": line}]
        body = self.ask("setBreakpoints", source={"path": str(file)}, breakpoints=breakpoints)
        self.ask("configurationDone")
        self.answer(attach_number)
        return bool(body["breakpoints"][0]["verified"])

    def stopped(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Wait until the job stops; return the innermost frame and its local variables."""
        thread = self.event("stopped")["threadId"]
        (frame, *_) = self.ask("stackTrace", threadId=thread)["stackFrames"]
        scopes = self.ask("scopes", frameId=frame["id"])["scopes"]
        reference = scopes[0]["variablesReference"]
        variables = self.ask("variables", variablesReference=reference)["variables"]
        return frame, {variable["name"]: variable["value"] for variable in variables}

    def continue_job(self) -> None:
        """Continue the job."""
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


async def attached(job: aio.JobHandle[Any], **options: Any) -> tuple[subprocess.Popen[bytes], Any]:
    """Attach to *job*; return the forwarder and the printed configuration for an editor."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        forwarder = await job.debug_attach(local_port=0, **options)
    return forwarder, json.loads(printed.getvalue().partition("\n")[2])


def stopped_at(
    configuration: Any, file: object, line: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Attach, wait until the job stops at *line*, continue it; return frame and variables."""
    with Editor(configuration["connect"]["port"]) as editor:
        assert editor.begin(configuration, Path(str(file)), line)
        frame_and_variables = editor.stopped()
        editor.continue_job()
    return frame_and_variables
