"""Make the changes to this machine that a node needs, and undo all of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

ADDRESS = "10.96.0.1"
"""The machine's address for its containers, and that of the API server's service."""

BRIDGE = "kn0"
SUBNET, GATEWAY = "10.244.0.0/22", "10.244.0.1"
CGROUP = "kinetic-node"
CGROUPS = Path("/sys/fs/cgroup")
NAMESPACES = Path("/run/netns")
SYSCTLS = (
    "vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes", "net/ipv4/ip_forward",
)  # fmt: skip
TRACES = ("/var/lib/cni", "/var/lib/kubelet", "/var/log/containers")
"""Folders that the programs create whatever the settings say; `borrowed` removes new ones."""

END_S = 10.0


@contextlib.contextmanager
def borrowed(folder: Path, ip: Path) -> Iterator[None]:
    """Prepare the machine for a node that keeps its files in *folder*; restore it afterwards.

    At the end of the block, kill the shims of containers in *folder* and unmount what is in it.
    """
    with contextlib.ExitStack() as undo:  # runs all callbacks, the last one first
        for name in SYSCTLS:
            undo.callback(_setting(name).write_text, _setting(name).read_text())
        for trace in TRACES:
            if not Path(trace).exists():
                undo.callback(shutil.rmtree, trace, ignore_errors=True)
        undo.callback(_remove_cgroups)
        _make_cgroups()
        undo.callback(_run, ip, "address", "delete", f"{ADDRESS}/32", "dev", "lo")
        _run(ip, "address", "replace", f"{ADDRESS}/32", "dev", "lo")
        undo.callback(_run, ip, "link", "delete", BRIDGE, check=False)  # the first pod creates it
        undo.callback(_remove_namespaces, ip, _namespaces())
        undo.callback(_unmount, folder)
        undo.callback(_end_shims, folder)
        yield


def _run(*command: str | Path, check: bool = True) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, check=False)
    if check and done.returncode:
        raise OSError(f"{command}: {done.stderr.decode(errors='replace')}")


def _setting(name: str) -> Path:
    return Path("/proc/sys", name)


def _namespaces() -> set[str]:
    return {path.name for path in NAMESPACES.glob("cni-*")}


def _remove_namespaces(ip: Path, others: set[str]) -> None:
    for name in _namespaces() - others:
        _run(ip, "netns", "delete", name)


def _controllers() -> list[Path]:
    """Return the roots of the cgroup hierarchies: one in version 2, several in version 1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in CGROUPS.iterdir() if (path / "cgroup.procs").exists()]


def _make_cgroups() -> None:
    for root in _controllers():
        (root / CGROUP).mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems") if root.name == "cpuset" else ():
            (root / CGROUP / name).write_text((root / name).read_text())


def _remove_cgroups() -> None:
    for root in _controllers():
        for folder, _, _ in os.walk(root / CGROUP, topdown=False):
            _until(lambda folder=folder: _removed(folder))  # killed processes take time to end


def _removed(folder: str) -> bool:
    """Try to remove *folder*, and return whether it no longer exists."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_S
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)


def _end_shims(folder: Path) -> None:
    """Kill containerd's shims, which outlive it, and their containers."""
    shims = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            command = process.cmdline()
            if "containerd-shim" in "".join(command[:1]) and str(folder) in " ".join(command):
                shims += [process, *process.children(recursive=True)]
    for process in shims:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(shims, timeout=END_S)


def _unmount(folder: Path) -> None:
    """Unmount what is in *folder*, innermost first; mounts in use go once they are free."""
    mounts = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for path in sorted((path for path in mounts if path.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", path], capture_output=True, check=False)
