"""Entry point of the fork server: ``python -P warm.py {descriptor} [fresh]``.

With ``fresh``, each job starts a new interpreter, so the fork server doesn't load the job code.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path


def main(fd: int, *, fresh: bool) -> None:
    """Serve the supervisor, which has the other end of the socket *fd*."""
    folder = Path(__file__).resolve().parents[1]
    runpy.run_path(str(folder / "remote_runner.py"))["load_runner"](folder)
    fork_server = importlib.import_module("kinetic_runner.fork.fork_server")
    if not fresh:
        importlib.import_module("kinetic_runner.fork.child").preload()
    os.chdir("/")
    fork_server.serve(fd)


if __name__ == "__main__":
    main(int(sys.argv[1]), fresh="fresh" in sys.argv[2:])
