"""How the user wants a batch to run: checked once, kept in its manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from absl import logging

from kinetic._rules import check
from kinetic.aio import fanout
from kinetic.aio._inputs import INPUT_MODES
from kinetic.errors import ConfigurationError

__all__ = ["Terms"]

MANY_UNBOUNDED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """See `kinetic.aio.Client.run_async_map`; ``batch_timeout`` is in seconds.

    Raises:
        ConfigurationError: A value is wrong.
    """

    input_mode: str = "auto"
    max_concurrent: int | None = 64
    retries: int = 0
    fail_fast: bool = False
    cancel_running_on_fail: bool = False
    name: str | None = None
    tags: dict[str, str] = field(default_factory=dict[str, str])
    window: int | None = None
    batch_timeout: float | None = None

    def __post_init__(self) -> None:
        if self.batch_timeout == math.inf:
            object.__setattr__(self, "batch_timeout", None)
        for name in self.__slots__:
            check(**{name: getattr(self, name)})
        if self.input_mode not in INPUT_MODES:
            raise ConfigurationError(
                f"input_mode must be one of {', '.join(INPUT_MODES)}, not {self.input_mode!r}"
            )

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Terms:
        """As a manifest has them; unknown ones are ignored."""
        return cls(**{name: fields[name] for name in cls.__slots__ if name in fields})

    def to_json(self) -> dict[str, Any]:
        """For a manifest."""
        return asdict(self)

    @property
    def policy(self) -> fanout.Policy:
        """For the decisions."""
        return fanout.Policy(
            max_concurrent=self.max_concurrent,
            fail_fast=self.fail_fast,
            cancel_running=self.cancel_running_on_fail,
        )

    def window_for(self, length: int | None) -> int | None:
        """What bounds the items that were not delivered; inputs of unknown length have a bound."""
        if self.window is None and length is None and self.max_concurrent is not None:
            return 2 * self.max_concurrent
        return self.window

    def check_length(self, length: int | None) -> None:
        """Refuse an empty list, and warn of a long one that starts at once.

        Raises:
            ConfigurationError: There is nothing to run.
        """
        if length == 0:
            raise ConfigurationError("inputs is empty: there is nothing to run")
        if self.max_concurrent is None and (length or 0) > MANY_UNBOUNDED:
            logging.warning("max_concurrent=None starts all %d jobs at once", length)
