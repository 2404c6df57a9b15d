"""The job's ``__main__``, which has the definitions of the script, also in child processes.

A child that `multiprocessing` starts by "spawn" or "forkserver" imports the main module of its
parent. The job has none that can be imported: running the script again would submit jobs. So
the job writes a module that loads the same definitions from the pickled function.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..protocol import pickles, stand_ins

MODULE = "kinetic_main"
"""The name of the module that a child imports."""

_SOURCE = """\
import pathlib, runpy
folder = pathlib.Path({folder!r})
runpy.run_path(str(folder / "remote_runner.py"))["load_runner"](folder)
from kinetic_runner.job.main_module import definitions
globals().update(definitions({pickle!r}))
"""


def install(read_function: Callable[[], bytes], work: str) -> None:
    """Give this process an empty ``__main__``; *read_function* returns the pickled function."""
    main = types.ModuleType("__main__")
    folder = f"{work}/main"
    main.__spec__ = _Spec(read_function, folder)  # type: ignore[assignment]
    sys.modules["__main__"] = main
    sys.path.append(folder)
    sys.meta_path.append(stand_ins.MissingKinetic)


class _Spec:
    """The spec of ``__main__``; few jobs need the module, so reading ``name`` writes it."""

    loader = origin = submodule_search_locations = None

    def __init__(self, read_function: Callable[[], bytes], folder: str) -> None:
        self._read_function = read_function
        self._folder = Path(folder)

    @property
    def parent(self) -> str:
        """The package of the script, which its functions bring; relative imports compare both."""
        return vars(sys.modules["__main__"]).get("__package__") or ""

    @property
    def name(self) -> str:
        """The name of a module with the definitions of ``__main__``."""
        source = self._folder / f"{MODULE}.py"
        if not source.exists():
            self._folder.mkdir(exist_ok=True)
            content = self._folder / "definitions"
            content.write_bytes(pickle.dumps((stand_ins.data_paths, self._read_function())))
            runner = os.fspath(Path(__file__).resolve().parents[1])
            partial = source.with_suffix(f".{threading.get_ident()}")  # threads may start children
            partial.write_text(_SOURCE.format(folder=runner, pickle=os.fspath(content)))
            partial.replace(source)
        return MODULE


def definitions(path: str) -> dict[str, Any]:
    """Return what the ``__main__`` of the job's own process got; *path* has its pickle."""
    sys.meta_path.append(stand_ins.MissingKinetic)
    with open(path, "rb") as file:
        stand_ins.data_paths[:], function = pickle.load(file)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    pickles.load(function)
    return {name: value for name, value in vars(main).items() if name not in _MACHINERY}


_MACHINERY = frozenset({"__builtins__", "__loader__", "__name__", "__spec__"})
