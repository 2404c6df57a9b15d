"""Let `multiprocessing` in a job send functions and classes that no other process can import.

kinetic sends the functions and classes of the user's script and project to the job by value.
`multiprocessing` pickles them by name, and its workers couldn't import them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

MODULE = "multiprocessing.reduction"


def patch_multiprocessing() -> None:
    """Make `multiprocessing` pickle by value what can't be imported, here and in its workers."""
    if MODULE in sys.modules:
        _patch(sys.modules[MODULE])
    else:
        sys.meta_path.insert(0, _PatchOnImport())


class _PatchOnImport:
    """A finder that patches `MODULE` when the job imports it.

    Few jobs import it, and each fork of a warm parent would copy some of its memory. The finder
    stays in ``sys.meta_path``: an import in another thread, which iterates over the list, would
    skip a finder if this one was removed.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_patch(module: Any) -> None:
                execute(module)
                if module.__name__ == MODULE:  # all modules of a zip file share one loader
                    _patch(module)

            loader.exec_module = execute_and_patch
        return spec


def _patch(module: Any) -> None:
    # The user's project may have a package of the same name, without this class.
    pickler_class = getattr(module, "ForkingPickler", None)
    if pickler_class is not None and "reducer_override" not in vars(pickler_class):
        pickler_class.reducer_override = _make_reducer()


def _make_reducer() -> Callable[[Any, Any], Any]:
    """Create the ``reducer_override`` method for the pickler of `multiprocessing`.

    Workers get the method by value, because they can't import the runner.
    """
    import cloudpickle

    def is_found(obj: Any) -> bool:
        name = str(getattr(obj, "__module__", None))
        found: Any = sys.modules.get(name) if name != "__main__" else None
        for part in obj.__qualname__.split("."):
            found = getattr(found, part, None)
        return found is obj

    def install(value: Any) -> Any:  # a worker calls this when it loads an `InstallOnLoad`
        from multiprocessing.reduction import ForkingPickler

        pickler_class: Any = ForkingPickler
        pickler_class.reducer_override = reducer_override
        return value

    class InstallOnLoad:
        def __init__(self, value: Any) -> None:
            self.value = value

        def __reduce__(self) -> Any:
            return install, (self.value,)

    def reducer_override(self: Any, obj: Any) -> Any:
        if not isinstance(obj, (type, type(is_found))) or is_found(obj):
            return NotImplemented

        # Include multiprocessing's reducers for locks and connections in closures.
        base: Any = cloudpickle.Pickler
        dispatch_table = {**base.dispatch_table, **self.dispatch_table}
        pickler: Any = type("Pickler", (base,), {"dispatch_table": dispatch_table})
        content = io.BytesIO()
        pickler(content).dump(InstallOnLoad(obj))
        return cloudpickle.loads, (content.getvalue(),)

    for helper in (is_found, install, reducer_override, InstallOnLoad):
        helper.__module__ = "__main__"
    return reducer_override
