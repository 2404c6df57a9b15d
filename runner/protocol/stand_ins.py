"""What a job uses in place of the client's decorated functions, `Data`, and source files.

Pickled calls refer to the names in this module.
"""

from __future__ import annotations

import functools
import linecache
import types
import typing
from typing import Any, NoReturn, Self

data_paths: list[str] = []
"""The paths of this job's Data, by number."""


def data_path(number: int) -> str:
    """Return the path of Data *number* in this job; unpickling arguments calls this.

    Raises:
        RuntimeError: This process isn't a job with that Data.
    """
    if not 0 <= number < len(data_paths):
        raise RuntimeError(f"this process isn't the job that Data {number} was sent to")
    return data_paths[number]


def source_at(file: str, path: str) -> str:
    """Return *file*, and let tracebacks show its lines from *path*, where the job has a copy."""
    # With this entry, linecache reads the copy only on demand, because most jobs never need it.
    entries: dict[str, Any] = linecache.cache
    entries[file] = (functools.partial(_read_source, path),)
    return file


def _read_source(path: str) -> str | None:
    from importlib.machinery import SourceFileLoader

    return SourceFileLoader("", path).get_source("")


def source_of(file: str, text: str) -> str:
    """Return *file*, and let tracebacks show its lines from *text*, such as a notebook's cell."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return file


_FUNCTION_ATTRIBUTES = frozenset({"__doc__", "__module__"})
"""Attributes to read from the function, because every instance inherits them from its class."""


class Decorated(functools.partial[Any]):
    """Replaces a function that ``kinetic.run`` decorates in the script or the project.

    It delegates unknown attributes to the function. It derives from `functools.partial`, because a
    partial call adds no line to a traceback.
    """

    @property
    def __wrapped__(self) -> Any:
        """The function, with the arguments that `functools.partial` has merged into this object."""
        if self.args or self.keywords:
            return functools.partial(self.func, *self.args, **self.keywords)
        return self.func

    @property
    def local(self) -> Any:
        """The function itself, for a call in this process."""
        return self.__wrapped__

    def options(self, **changes: Any) -> Self:
        """Return this object: a call in this process has no settings to change."""
        return self

    def run_async(self, /, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError, because a job can't start jobs."""
        self._refuse("run_async")

    def run_async_map(self, /, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError, because a job can't start jobs."""
        self._refuse("run_async_map")

    @property
    def __kinetic__(self) -> NoReturn:
        """Raise RuntimeError: only a submission reads the settings, and a job submits nothing."""
        self._refuse("submitting it")

    def _refuse(self, operation: str) -> NoReturn:
        name = getattr(self, "__name__", type(self.func).__name__)
        raise RuntimeError(
            f"{name}: {operation} starts jobs, and a job can't start jobs; to call the function in "
            f"this process, use {name}(...) or {name}.local(...)"
        )

    def __get__(self, instance: object, owner: type[object] | None = None) -> Decorated:
        return self if instance is None else Decorated(types.MethodType(self.__wrapped__, instance))

    def __getattribute__(self, name: str) -> Any:
        if name in _FUNCTION_ATTRIBUTES:
            return getattr(self.func, name)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.func, name)

    def __repr__(self) -> str:
        return f"<kinetic function {getattr(self, '__qualname__', self.func)} in its job>"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # `typing.cast` returns the function, and every Python has it. The reader may lack kinetic.
        return typing.cast, (None, self.__wrapped__)
