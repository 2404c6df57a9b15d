"""The steps of attaching a debugger to a job; `JobHandle.debug_attach` does all of them.

::

    port = wait_for_debug_server(job)
    forwarder = start_port_forward(job.k8s_name, job.namespace, 5678, port)
    print_attach_instructions(5678)
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

from kinetic.configuration import DEBUG_PORT, DEBUG_WAIT_S

if TYPE_CHECKING:
    from kinetic.aio._debugging.attaching import Forwarder
    from kinetic.jobs import JobHandle

__all__ = [
    "DEBUGPY_PORT",
    "DEBUG_WAIT_TIMEOUT",
    "cleanup_port_forward",
    "print_attach_instructions",
    "start_port_forward",
    "wait_for_debug_server",
]

DEBUGPY_PORT = DEBUG_PORT
"""The port that a plain call with ``debug=True`` forwards, unless KINETIC_DEBUG_PORT is set."""

DEBUG_WAIT_TIMEOUT = DEBUG_WAIT_S
"""Seconds that a job waits for its debugger, and that `wait_for_debug_server` waits for a job."""


def wait_for_debug_server(
    handle: JobHandle[Any], timeout: float = DEBUG_WAIT_TIMEOUT, poll_interval: float = 5
) -> int:
    """Wait until the debugger of a job listens, and return its port on the job's machine.

    Args:
        handle: A job with ``debug=True``.
        timeout: Seconds to wait; after that, the job keeps running.
        poll_interval: Accepted for compatibility; has no effect.

    Raises:
        ConfigurationError: The job has no debugger (``debug=True``).
        ResultTimeout: *timeout* has passed (a ``TimeoutError``).
        JobError: The job has ended (a ``RuntimeError``).
    """
    from kinetic import aio
    from kinetic._sync.portal import PORTAL
    from kinetic.options import check

    check(timeout=timeout)
    job = aio.JobHandle[Any].from_dict(handle.to_dict())
    return PORTAL.call(job.debugger, timeout=timeout).port


def start_port_forward(
    pod_name: str, namespace: str, local_port: int, remote_port: int
) -> Forwarder:
    """Forward *local_port* of this machine to *remote_port* of a job's machine, without kubectl.

    The forwarder ends with the job, with this process, or when you call `cleanup_port_forward`.

    Args:
        pod_name: The job's name on its platform: `JobHandle.k8s_name`.
        namespace: The job's namespace; other settings come from the environment and the profile.
        local_port: A port of this machine's loopback; 0 for any free one.
        remote_port: The port that `wait_for_debug_server` returned.

    Raises:
        ConfigurationError: The port is taken (a ``ValueError``).
        NotFound: No such job is running.
        AuthError: You lack a permission.
        Unavailable: The platform does not answer.
    """
    from kinetic import configuration
    from kinetic._sync.portal import PORTAL
    from kinetic.aio._debugging import attaching
    from kinetic.aio.platforms import backend_named_in

    attaching.require_port(local_port)
    target = configuration.resolve(backend=backend_named_in(pod_name), namespace=namespace or None)
    address = attaching.DebuggerAddress(name=pod_name, host=0, port=remote_port)
    forwarder, _ = PORTAL.call(attaching.forward, target, address, local_port)
    return forwarder


def print_attach_instructions(local_port: int, working_dir: str | None = None) -> None:
    """Print the VS Code configuration to attach to *local_port* of this machine.

    *working_dir* is the folder where the editor finds the project. None: the folder that is open in
    the editor.
    """
    from kinetic.aio._debugging.attaching import DebuggerAddress, instructions

    # To debugpy, a dot is the working directory of the program that is debugged.
    address = DebuggerAddress(name="the job", host=0, port=0, root=".")
    sys.stdout.write(instructions(address, local_port, working_dir) + "\n")
    sys.stdout.flush()


def cleanup_port_forward(proc: subprocess.Popen[bytes] | None) -> None:
    """End the forwarder *proc*, which `JobHandle.debug_attach` returned, and wait for its end.

    Does nothing if *proc* is None or has ended already.
    """
    if proc is None:
        return
    from kinetic.aio._debugging.attaching import end

    end(proc)
