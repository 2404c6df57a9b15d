"""The supervisor's entry: ``python -P -m kinetic._local HOME READY_FD``.

It leaves the process that started it by a second fork, decides by a lock
whether it is the one, and says so through the descriptor: one JSON line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn


def main(home: Path, ready: int) -> None:
    """Become the supervisor of *home*, or find that there is one."""
    if os.fork():
        os._exit(0)  # nobody has to wait for a supervisor's end
    told: list[Mapping[str, object]] = []

    def tell(words: Mapping[str, object]) -> None:
        told.append(words)
        try:
            os.write(ready, json.dumps(words).encode() + b"\n")
            os.close(ready)
        except OSError:
            return  # whoever asked has gone; others will come

    try:
        _begin(home, tell)
    except OSError as exc:
        if told:
            raise
        tell({"error": exc.strerror or str(exc), "file": str(exc.filename or home)})
        raise SystemExit(1) from exc


def _begin(home: Path, tell: Callable[[Mapping[str, object]], None]) -> None:
    from kinetic._local import founding

    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    supervisor = founding.found(home, os.environ, tell)
    if supervisor is not None:
        supervisor.run()


def _main() -> NoReturn:
    main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
