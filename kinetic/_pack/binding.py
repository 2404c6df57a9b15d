"""Whether a function takes the arguments of a call, asked before anything is sent."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Binding", "signature_of"]

MOST = 1000
"""Shapes of calls that are remembered."""


class Binding:
    """The parameters of a function; what has no signature to be read takes everything."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._signature: inspect.Signature | None
        try:  # what a wrapper is called with counts, not what it wraps
            self._signature = signature_of(function, follow_wrapped=False)
        except Exception:  # a builtin's cannot be read, and __signature__ may be anything
            self._signature = None
        self._known: dict[tuple[Any, ...], str] = {}

    def misfit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why the function cannot be called with these arguments; empty when it can.

        Calls of one shape, as those of a batch are, are looked at once.
        """
        shape = (len(args), *kwargs)
        if (found := self._known.get(shape)) is None:
            if len(self._known) >= MOST:
                self._known.clear()
            found = self._known[shape] = self._bound(args, kwargs)
        return found

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if self._signature is None:
            return ""
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            return f"{self._shown()}: {exc}"
        return ""

    def _shown(self) -> str:
        name: str = getattr(self._function, "__name__", type(self._function).__name__)
        try:
            shown = str(self._signature)
        except Exception:  # of the user's: the repr of a default
            shown = ""
        return f"{name}{shown}" if 0 < len(shown) <= 200 else f"{name}()"


def signature_of(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature:
    """Its signature, with annotations as they are written where Python computes them lazily.

    Raises:
        ValueError, TypeError: There is none.
    """
    if sys.version_info >= (3, 14):  # which computes annotations only now, and may be unable to
        from annotationlib import Format

        return inspect.signature(
            function, follow_wrapped=follow_wrapped, annotation_format=Format.STRING
        )
    return inspect.signature(function, follow_wrapped=follow_wrapped)
