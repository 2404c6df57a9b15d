"""What belongs to debugging a job."""

from __future__ import annotations

import subprocess

__all__ = ["cleanup_port_forward"]


def cleanup_port_forward(proc: subprocess.Popen[bytes] | None) -> None:
    """End the forwarder that `JobHandle.debug_attach` returned, and wait until it has ended.

    One that ended already, or None, is fine.
    """
    if proc is None:
        return
    from kinetic.aio._debug import end

    end(proc)
