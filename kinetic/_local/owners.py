"""Processes whose end is the end of the jobs that they wait for."""

from __future__ import annotations

import os
import socket
import struct

from kinetic._local.jobs import Job

__all__ = ["Owner", "peer_process"]


class Owner:
    """A process, held by a descriptor that can be read from when it has ended.

    Raises:
        ProcessLookupError: It has.
        OSError: This system cannot tell.
    """

    def __init__(self, pid: int) -> None:
        self.jobs: set[Job] = set()
        self._descriptor = os.pidfd_open(pid)

    def fileno(self) -> int:
        """For a selector."""
        return self._descriptor

    def close(self) -> None:
        """Hold it no longer."""
        os.close(self._descriptor)


def peer_process(sock: socket.socket) -> int:
    """The process at the other end, as it was when it connected; 0 if its end cannot be seen."""
    if not hasattr(os, "pidfd_open"):
        return 0
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", packed)[0])  # 0, too, where it is in another namespace
