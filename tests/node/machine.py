"""What a node changes on the machine it is on, and how all of it is undone."""

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
"""The machine's, for its containers: the cluster's own name for its API server leads there, too."""

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
"""Folders that are made whatever the settings say; those that were not there go again."""

END_S = 10.0


@contextlib.contextmanager
def borrowed(folder: Path, ip: Path) -> Iterator[None]:
    """Within, the machine carries a node that keeps its things in *folder*; then as it was before.

    Processes that serve containers of that folder are ended, its mounts are taken away.
    """
    with contextlib.ExitStack() as undo:  # what was registered last is done first, come what may
        for name in SYSCTLS:
            undo.callback(_setting(name).write_text, _setting(name).read_text())
        for trace in TRACES:
            if not Path(trace).exists():
                undo.callback(shutil.rmtree, trace, ignore_errors=True)
        undo.callback(_remove_cgroups)
        _make_cgroups()
        undo.callback(_run, ip, "address", "delete", f"{ADDRESS}/32", "dev", "lo")
        _run(ip, "address", "replace", f"{ADDRESS}/32", "dev", "lo")
        undo.callback(_run, ip, "link", "delete", BRIDGE, check=False)  # it comes with a pod
        undo.callback(_remove_namespaces, ip, _namespaces())
        undo.callback(_unmount, folder)
        undo.callback(_end_shims, folder)
        yield


def _run(*command: str | Path, check: bool = True) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, check=False)
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
    """The roots of the hierarchies of control groups: one in version 2, many in version 1."""
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
            _until(lambda folder=folder: _gone(folder))  # what was killed in it takes its time


def _gone(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _until(done: Callable[[], bool]) -> None:
    until = time.monotonic() + END_S
    while not done() and time.monotonic() < until:
        time.sleep(0.05)


def _end_shims(folder: Path) -> None:
    """Those who keep containers do it for longer than the runtime lives."""
    shims = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            words = process.cmdline()
            if "containerd-shim" in "".join(words[:1]) and str(folder) in " ".join(words):
                shims += [process, *process.children(recursive=True)]
    for process in shims:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(shims, timeout=END_S)


def _unmount(folder: Path) -> None:
    """The innermost first; what is still in use goes with who uses it."""
    mounted = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for place in sorted((one for one in mounted if one.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", place], capture_output=True, check=False)
