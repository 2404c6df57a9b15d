"""Import once, in the interpreter, the installed packages that its items import.

`foresight` finds packages that the first item must import before any code of the project runs.
`Recorder` notes in an item's process which others the item imports. Before its next fork, the
interpreter imports them with `import_all`.

An import must have the effect that it has in the item's own process. So the interpreter imports
what a `Recorder` has noted only while its environment, working directory, ``sys.path``, and
warnings filters are those with which the item's import began. It imports nothing of the project,
and no accelerator runtime.
"""

from __future__ import annotations

import _thread
import gc
import importlib
import os
import resource
import signal
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

ACCELERATORS = frozenset(
    [
        "cupy",
        "jax",
        "jaxlib",
        "libtpu",
        "mxnet",
        "onnxruntime",
        "paddle",
        "pycuda",
        "pyopencl",
        "tensorflow",
        "tensorrt",
        "torch",
        "torch_xla",
        "triton",
        "warp",
    ]
)
"""Packages that may start threads or take a device, which a fork can't use."""

LIMIT_S = 60
"""How long the imports may take, in seconds; then the kernel ends the interpreter."""

TRIAL_FORKS = 5


class Candidate(NamedTuple):
    """A module that items import, and the state of the process when the import began.

    The state is None if nothing can change it before the import. *names* may be submodules to
    import, too.
    """

    name: str
    state: int | None
    names: tuple[str, ...] = ()


class Recorder:
    """A finder that finds nothing, and notes which imports of installed modules begin.

    Make it in the interpreter, when ``sys.path`` is that of the items, and put it first into
    ``sys.meta_path``.
    """

    def __init__(self) -> None:
        self._folders = installed_folders()
        self._project = names_in_project(self._folders)
        self._begun = list[Candidate]()
        self._is_open = False
        self._thread = 0

    def begin(self) -> None:
        """Record from now on, in this thread."""
        self._thread = _thread.get_ident()
        self._is_open = True

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Note the import of *name*, unless it is a part of another package's import."""
        if not self._is_open or _thread.get_ident() != self._thread:
            return
        root = name.partition(".")[0]
        # Neither is an installed package.
        if root in sys.stdlib_module_names or root in self._project:
            return
        if root in ACCELERATORS:
            self._is_open = False  # later imports may use it
            if self._is_inside():
                self._begun.pop()
        elif not self._is_inside():
            self._begun.append(Candidate(name, state_of_process()))

    def _is_inside(self) -> bool:
        """Return whether the installed module that was noted last is still being imported."""
        module = sys.modules.get(self._begun[-1].name) if self._begun else None
        spec = getattr(module, "__spec__", None)
        return getattr(spec, "_initializing", False) and _is_below(self._folders, module)

    def candidates(self) -> list[Candidate]:
        """Return the installed modules that were imported."""
        return [it for it in self._begun if _is_below(self._folders, sys.modules.get(it.name))]


def state_of_process() -> int:
    """Return a hash of what imports may depend on; equal in a process and its forks.

    The variables that kinetic sets for an item don't count.
    """
    of_item = ("KINETIC_", "JOB_ID")
    variables = sorted(it for it in os.environ.items() if not it[0].startswith(of_item))
    return hash((repr(variables), os.getcwd(), repr(sys.path), repr(warnings.filters)))


def import_all(candidates: Iterable[Candidate]) -> str:
    """Import modules in this process; return why it must not fork any more, or an empty text."""
    folders = (*installed_folders(), os.path.dirname(os.__file__))
    modules, files, fork_s = {*sys.modules}, _open_files(), _cpu_of_fork()
    began = _cpu_time()
    signal.alarm(LIMIT_S)
    sys.meta_path.insert(0, _AcceleratorRefusal)
    for name, state, submodules in candidates:
        if state in (None, state_of_process()):  # else the import may do something else here
            try:
                __import__(name, None, None, submodules)
            except BaseException as exc:
                return f"the import of {name} fails: {type(exc).__name__}: {exc}"
        if _AcceleratorRefusal.refused:  # the package may have caught the exception
            return f"they import {_AcceleratorRefusal.refused}"
    sys.meta_path.remove(_AcceleratorRefusal)
    signal.alarm(0)
    import_s = _cpu_time() - began
    for name in sorted(sys.modules.keys() - modules):
        module = sys.modules[name]
        if getattr(module, "__file__", None) and not _is_below(folders, module):
            return f"they import {name}, which isn't an installed package"
    slower_s = _cpu_of_fork() - fork_s  # some libraries end their threads at a fork
    threading: Any = importlib.import_module("threading")
    # A fork has only one thread, and may wait for a lock that another one held.
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        return "they start threads"
    if _open_files() - files:  # which all forks would share
        return "they open files"
    if generator := _other_generator():
        return f"they make a generator of random numbers ({generator})"
    if slower_s > import_s + fork_s:  # the second term is for the inaccuracy of the measurement
        return "forks become slower than the imports"
    return ""


class _AcceleratorRefusal:
    """A finder that lets no import of an accelerator runtime begin."""

    refused = ""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        """Raise ImportError if *name* is in such a runtime."""
        if name.partition(".")[0] in ACCELERATORS:
            cls.refused = name
            raise ImportError(f"{name} can't be shared")


def seed_again() -> None:
    """Give this fork random numbers of its own; the module `random` does so by itself."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def installed_folders() -> Sequence[str]:
    """Return the folders of ``sys.path`` that have installed packages."""
    names = ("site-packages", "dist-packages")
    return [path for path in sys.path if os.path.basename(path) in names]


def names_in_project(installed: Sequence[str]) -> frozenset[str]:
    """Return the names of modules in the folders of ``sys.path`` that have no installed ones."""
    names = set[str]()
    for folder in sys.path:
        if folder not in installed and os.path.isdir(folder or "."):
            names |= {name.partition(".")[0] for name in os.listdir(folder or ".")}
    return frozenset(names)


def _is_below(folders: Iterable[str], module: Any) -> bool:
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    return is_below(folders, spec, file)


def is_below(folders: Iterable[str], spec: Any, file: str | None = None) -> bool:
    """Return whether a module is in one of *folders*."""
    file = file or getattr(spec, "origin", None)
    if not file:  # a namespace package
        file = next(iter(getattr(spec, "submodule_search_locations", None) or ()), "")
    return any(f"{file}".startswith(f"{folder}/") for folder in folders)


def _cpu_of_fork() -> float:
    """Return how many seconds of CPU time a fork takes."""
    times = list[float]()
    for _ in range(TRIAL_FORKS):
        before = _cpu_time()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        times.append(_cpu_time() - before)
    return min(times)


def _cpu_time() -> float:
    """Return the seconds of CPU time of this process and its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _open_files() -> set[str]:
    return {*os.listdir("/proc/self/fd")}


def _other_generator() -> str:
    """Return the type of a generator that all forks would continue alike; empty without one."""
    random: Any = sys.modules.get("random")
    if random is None:
        return ""
    kinds, known = [random.Random], [random._inst]  # this one gets a new seed in each fork
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        kinds.append(numpy_random.BitGenerator)
        known.append(numpy_random.mtrand._rand._bit_generator)
    objects: list[Any] = gc.get_objects()
    names: Any = getattr(sys.modules.get("tempfile"), "_RandomNameSequence", None)
    # Such a sequence makes a new generator in each process.
    known += [getattr(it, "_rng", None) for it in objects if type(it) is names]
    # There are far fewer types than objects.
    found = {it for it in {*map(type, objects)} if issubclass(it, tuple(kinds))}
    for it in [it for it in objects if type(it) in found]:
        if not (isinstance(it, random.SystemRandom) or any(it is other for other in known)):
            return f"{type(it).__module__}.{type(it).__qualname__}"
    return ""
