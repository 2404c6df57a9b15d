"""Let `multiprocessing` in a job send functions and classes that no other process can import.

kinetic sends the functions and classes of the user's script and project to the job by value.
`multiprocessing` pickles them by name, and its workers couldn't import them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any


def teach_multiprocessing() -> None:
    """Make `multiprocessing` pickle by value what can't be imported, here and in its workers."""
    from multiprocessing.reduction import ForkingPickler

    taught: Any = ForkingPickler
    if "reducer_override" not in vars(taught):
        taught.reducer_override = _reducer()


def _reducer() -> Callable[[Any, Any], Any]:
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

    def install(sent: Any) -> Any:
        from multiprocessing.reduction import ForkingPickler

        taught: Any = ForkingPickler
        taught.reducer_override = reducer_override
        return sent

    class Sent:
        def __init__(self, value: Any) -> None:
            self.value = value

        def __reduce__(self) -> Any:
            return install, (self.value,)

    def reducer_override(self: Any, obj: Any) -> Any:
        if not isinstance(obj, (type, type(is_found))) or is_found(obj):
            return NotImplemented

        # Include multiprocessing's reducers for locks and connections in closures.
        usual: Any = cloudpickle.Pickler
        known = {**usual.dispatch_table, **self.dispatch_table}
        pickler: Any = type("Pickler", (usual,), {"dispatch_table": known})
        content = io.BytesIO()
        pickler(content).dump(Sent(obj))
        return cloudpickle.loads, (content.getvalue(),)

    for one in (is_found, install, reducer_override, Sent):
        one.__module__ = "__main__"
    return reducer_override
