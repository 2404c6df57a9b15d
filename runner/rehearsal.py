"""Jobs that come to nothing: they leave caches filled and bytecode adapted behind.

The warm parent carries some out before all others, in a folder of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from . import pickles, removal, results, stopping
from .directory import DirectoryObjects
from .processes import NOBODY

__all__ = ["Orders", "in_a_folder"]


class Orders:
    """What a warm parent is told about jobs in *folder*: ``shared`` once, `next` for each."""

    def __init__(self, folder: str) -> None:
        space: dict[str, Any] = {"__name__": "__main__"}
        exec("def identity(value):\n    return value", space)  # pickled by value, as users' are
        function = pickles.dumps(space["identity"])
        self.arguments = pickles.dumps(((0,), {}))
        self._folder = folder
        self._made = 0
        objects = DirectoryObjects(f"{folder}/store")
        objects.create("function", function)
        digest = results.digest(function)
        part = {"name": "function", "start": 0, "stop": len(function), "digest": digest}
        assignment = {
            "version": [1, 0],
            "store": objects.url,
            "scope": "batches/rehearsal/",
            "function": part,
            "code": {"name": "code", "digest": digest, "sys_path": [""], "cwd": ""},
        }
        shared: dict[str, Any] = {
            "assignment": assignment,
            "environment": {"KINETIC_REHEARSAL": "1"},
            "key": digest,
            "cache": folder,
            "memory_bytes": None,
            "mounts": False,
            "command": [],
        }
        self.shared = json.dumps(shared).encode()

    def next(self) -> bytes:
        """The next job's own part; its workspace is there."""
        self._made += 1
        number, work = self._made, f"{self._folder}/{self._made}"
        os.makedirs(f"{work}/workspace")
        arguments = {"name": "inputs", "start": 0, "stop": len(self.arguments), "digest": ""}
        own = {
            "overrides": {},
            "executor": NOBODY,
            "log": f"{self._folder}/log",
            "work": work,
            "assignment": {
                "job_id": f"rehearsal-{number}",
                "index": number,
                "attempt": 1,
                "fence": 1,
                "arguments": arguments,
                "output_dir": f"{self._folder}/{number}",
            },
            "environment": {"KINETIC_JOB_ID": f"rehearsal-{number}"},
        }
        return json.dumps(own).encode()


@contextmanager
def in_a_folder(parent: str) -> Generator[Orders]:
    """Orders in a new folder of *parent*; what jobs change in this process is put back."""
    folder = f"{parent}/rehearsal-{os.getpid()}"
    os.mkdir(folder, 0o700)
    path, streams = [*sys.path], (os.dup(1), os.dup(2))
    taken = {number: signal.getsignal(number) for number in stopping.STOPS}
    try:
        yield Orders(folder)
    finally:
        os.chdir("/")
        sys.path[:] = path
        for number, handler in taken.items():
            signal.signal(number, handler)
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
            os.close(stream)
        removal.remove_if_small(folder)
