"""What stays between the items of one interpreter: the function, its ``init`` values, its loop.

With ``isolation="worker"``, an interpreter has one session for its life. With
``isolation="process"``, each item's process has its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..job import attempt, views
from ..protocol import pickles, stand_ins
from .foresight import PlainUnpickler

if TYPE_CHECKING:
    from ..job.workspace import JobPlace
    from ..protocol import wire
    from ..stores.objects import Objects

_UNSET: Any = object()


class Session:
    """The function, the values of ``init``, and the event loop.

    Args:
        function: The bytes of the function.
        init: The bytes of the mapping from arguments to the functions that make them; None without.
        data: The `Data` that all items share, if the session stays.
        stays: Whether a later item uses the session.

    ``on_loop`` is called when the session has made its event loop.
    """

    def __init__(
        self, function: bytes, init: bytes | None, data: Sequence[wire.DataRef], *, stays: bool
    ) -> None:
        self.stays = stays
        self.on_loop: Callable[[], None] = lambda: None
        self.values: dict[str, Any] = {}
        self.shared = len(data) if stays else 0
        self._function_bytes = function
        self._init_bytes = init
        self._data = data
        self._data_paths: list[str] | None = None
        self._function: Any = _UNSET
        self._generators: list[Any] = []
        self._runner: Any = None

    def prepare_shared_data(self, objects: Objects, place: JobPlace) -> list[str]:
        """Prepare the `Data` that all items share; return the paths."""
        if self._data_paths is None:
            if self.shared:
                views.prepare(self._data, objects, place)
            self._data_paths = stand_ins.data_paths[: self.shared]
        return self._data_paths

    def function(self, load: Callable[[bytes], Any]) -> Any:
        """Return the function; items of one session call the same object."""
        if self._function is _UNSET:
            self._function = load(self._function_bytes)
        return self._function

    def load_plain_function(self) -> None:
        """Load the function now if that runs no code of the user or of a package, for all forks."""
        if self._function is not _UNSET:
            return
        namespace = vars(sys.modules["__main__"])
        before = dict(namespace)
        try:
            self._function = pickles.load(self._function_bytes, unpickler=PlainUnpickler)
        except Exception:  # each fork loads it, and reports what fails
            namespace.clear()
            namespace.update(before)

    def begin(self, load: Callable[[bytes], Any]) -> None:
        """Call the functions of ``init`` unless this session has done so.

        Raises:
            Exception: A function failed. `close` ends what the others have begun.
        """
        if self._init_bytes is None:
            return
        functions: dict[str, Callable[[], Any]] = load(self._init_bytes)
        self._init_bytes = None
        import inspect  # forks without ``init`` are cheaper

        for argument, make in functions.items():
            value: Any = make()
            if inspect.isgeneratorfunction(make):
                generator, value = value, next(value, _UNSET)
                self._generators.append(generator)
            elif inspect.isasyncgenfunction(make):
                generator, value = value, self.wait_for(anext(value, _UNSET))
                self._generators.append(generator)
            elif inspect.isawaitable(value):
                value = self.wait_for(value)
            if value is _UNSET:
                raise RuntimeError(f"the generator function for {argument!r} yields no value")
            self.values[argument] = value

    def wait_for(self, value: Any) -> Any:
        """Return the value of an awaitable, from the session's event loop."""
        if self._runner is None:
            import asyncio  # forks of an interpreter without asyncio are cheaper

            self._runner = asyncio.Runner()
            self._runner.get_loop()
            self.on_loop()
        return self._runner.run(attempt.await_value(value))

    def close(self) -> None:
        """Run what the generator functions of ``init`` have after their ``yield``; end the loop."""
        generators, self._generators = self._generators, []
        for generator in reversed(generators):
            try:
                if hasattr(generator, "__next__"):
                    is_over = next(generator, _UNSET) is _UNSET
                else:
                    is_over = self.wait_for(anext(generator, _UNSET)) is _UNSET
                if not is_over:
                    raise RuntimeError("a generator function of init= yields more than one value")
            except Exception as exc:  # the other generators must end, too
                sys.excepthook(type(exc), exc, exc.__traceback__)
        if self._runner is not None:
            self._runner.close()
            self._runner = None
