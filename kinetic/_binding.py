"""Check calls against the parameters of a function, before a job makes them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection
from typing import Any

from kinetic._messages import suggest

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Binding:
    """The parameters of a function; a function without a readable signature accepts anything.

    Calls leave out the arguments in *init*: those that the option ``init`` gives by name.
    """

    def __init__(self, function: Callable[..., Any], init: Collection[str] | None = None) -> None:
        self._function = function
        self._init = init or ()
        self._signature: inspect.Signature | None
        try:  # the job calls the wrapper, so the wrapper's own parameters count
            self._signature = signature_of(function, follow_wrapped=False)
        except Exception:  # builtins may have no signature, and __signature__ may be anything
            self._signature = None
        self._mismatches: dict[tuple[Any, ...], str] = {}

    @property
    def positional(self) -> list[str]:
        """The names of the positional parameters."""
        return self._names(_BY_POSITION)

    def _names(self, kinds: Collection[Any]) -> list[str]:
        parameters = self._signature.parameters.values() if self._signature is not None else ()
        return [parameter.name for parameter in parameters if parameter.kind in kinds]

    def accepts_keyword(self, name: str) -> bool:
        """Return whether the function takes a keyword argument of this name."""
        if self._signature is None or name in self._names(_BY_NAME):
            return True
        return bool(self._names((inspect.Parameter.VAR_KEYWORD,)))

    def find_init_mismatch(self) -> str:
        """Return why the function can't take the arguments in *init*; empty if it can."""
        function: Any = self._function
        for name in self._init:
            if not self.accepts_keyword(name):
                names = self._names(_BY_NAME)
                hint = suggest(name, names, otherwise=f"it takes {', '.join(names) or 'none'}")
                return f"{self._signature_text()} takes no keyword argument {name!r}: {hint}"
            # A call may replace an argument of a partial, and so would init, silently.
            if isinstance(function, functools.partial) and name in function.keywords:
                return (
                    f"functools.partial gives {self._signature_text()} the argument {name!r}, too"
                )
        return ""

    def find_mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return why the function can't be called with these arguments; empty if it can.

        Calls of one shape, such as those of a batch, are checked once.
        """
        shape = (len(args), *kwargs)
        if (mismatch := self._mismatches.get(shape)) is None:
            mismatch = self._mismatches[shape] = self._check(args, kwargs)
        return mismatch

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        by_position = self.positional[: len(args)]
        for name in self._init:
            if name in kwargs:
                return f"{self._signature_text()}: init gives the argument {name!r}; leave it out"
            if name in by_position:
                return (
                    f"{self._signature_text()}: argument {by_position.index(name) + 1} of the "
                    f"call is {name!r}, which init gives; make it the last parameter"
                )
        if self._signature is None:
            return ""
        try:
            self._signature.bind(*args, **kwargs, **dict.fromkeys(self._init))
        except TypeError as exc:
            return f"{self._signature_text()}: {exc}"
        return ""

    def _signature_text(self) -> str:
        name: str = getattr(self._function, "__name__", type(self._function).__name__)
        try:
            signature = str(self._signature)
        except Exception:  # the repr of a default is user code
            signature = ""
        return f"{name}{signature}" if 0 < len(signature) <= 200 else f"{name}()"


def signature_of(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature:
    """Return the signature of *function*, with annotations as text where Python has them lazily.

    Raises:
        ValueError, TypeError: *function* has no signature.
    """
    if sys.version_info >= (3, 14):  # computing annotations may fail
        from annotationlib import Format

        return inspect.signature(
            function, follow_wrapped=follow_wrapped, annotation_format=Format.STRING
        )
    return inspect.signature(function, follow_wrapped=follow_wrapped)
