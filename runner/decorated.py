"""What a decorated function is inside a job: itself, run in place, with the methods it had."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from typing import Any, NoReturn, Self

__all__ = ["Decorated"]

_OF_THE_FUNCTION = frozenset({"__doc__", "__module__"})
"""What every instance would have from its class."""


class Decorated:
    """A function of the script or the project that ``kinetic.run`` decorates there.

    Everything else that is asked of it is asked of the function.
    """

    def __init__(self, function: Any) -> None:
        self.__wrapped__ = function
        if sys.version_info >= (3, 12) and inspect.iscoroutinefunction(function):
            inspect.markcoroutinefunction(self)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def local(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.__wrapped__(*args, **kwargs)

    def options(self, **changes: Any) -> Self:
        """The same: there is nothing to set for a call in this process."""
        return self

    def run_async(self, /, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: this is a job."""
        self._refuse("run_async")

    def run_async_map(self, /, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: this is a job."""
        self._refuse("run_async_map")

    @property
    def __kinetic__(self) -> NoReturn:
        """Asked for by whatever would submit it."""
        self._refuse("submitting it")

    def _refuse(self, what: str) -> NoReturn:
        name = getattr(self, "__name__", type(self.__wrapped__).__name__)
        raise RuntimeError(
            f"{name}: {what} starts jobs, and this is one already; {name}.local(...), or "
            f"{name}(...), calls it in this process"
        )

    def __get__(self, instance: object, owner: type[object] | None = None) -> Decorated:
        return self if instance is None else Decorated(types.MethodType(self.__wrapped__, instance))

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_THE_FUNCTION:
            return getattr(self.__wrapped__, name)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # it is not even made
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __repr__(self) -> str:
        return f"<kinetic function {getattr(self, '__qualname__', self.__wrapped__)} in its job>"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # As what every Python can read: it may go to where this module is not.
        return typing.cast, (None, self.__wrapped__)
