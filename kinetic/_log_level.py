"""Apply KINETIC_LOG_LEVEL to kinetic's own log."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from absl import logging as absl_logging

from kinetic import configuration

PACKAGE_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")

log_level: str = (os.environ.get("KINETIC_LOG_LEVEL") or "WARNING").strip().upper()
"""The value of KINETIC_LOG_LEVEL when this module was loaded; WARNING if it wasn't set."""


class _KineticFilter(logging.Filter):
    """Drop kinetic's records below *level*, and all others below the logger's original level."""

    def __init__(self, logger: logging.Logger, level: int) -> None:
        super().__init__()
        self._logger = logger
        self._level = level
        self._original_level = logger.level
        self._logger_level = min(level, logger.getEffectiveLevel())
        logger.setLevel(self._logger_level)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.pathname.startswith(PACKAGE_FOLDER):
            return record.levelno >= self._level
        if self._logger.level != self._logger_level:
            return True  # the program has changed the logger's level since, so that level applies
        return record.levelno >= (self._original_level or logging.getLogger().level)


def apply_log_level(environ: Mapping[str, str] = os.environ) -> None:
    """Apply KINETIC_LOG_LEVEL, once in each process; if the variable isn't set, change nothing.

    If the program configures no logging, absl writes to standard error.

    Raises:
        ConfigurationError: KINETIC_LOG_LEVEL names no level.
    """
    level = configuration.log_level(environ)
    logger = absl_logging.get_absl_logger()
    if level is None or any(
        isinstance(log_filter, _KineticFilter) for log_filter in logger.filters
    ):
        return
    logger.addFilter(_KineticFilter(logger, level))
