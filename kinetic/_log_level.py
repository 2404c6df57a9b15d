"""Apply KINETIC_LOG_LEVEL to kinetic's own log, and read the levels that the program has set."""

from __future__ import annotations

import logging
import os

from kinetic import configuration
from kinetic._log import PACKAGE_FOLDER
from kinetic._log import logging as absl_logging

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

    @property
    def program_level(self) -> int:
        """The level that the program has set for the logger; 0 if it has set none."""
        is_changed = self._logger.level != self._logger_level
        return self._logger.level if is_changed else self._original_level

    def filter(self, record: logging.LogRecord) -> bool:
        if record.pathname.startswith(PACKAGE_FOLDER):
            return record.levelno >= self._level
        if self._logger.level != self._logger_level:
            return True  # the program has changed the logger's level since, so that level applies
        return record.levelno >= (self._original_level or logging.getLogger().level)


def apply_log_level() -> None:
    """Apply KINETIC_LOG_LEVEL, once in each process; if the variable isn't set, change nothing.

    If the program configures no logging, absl writes to standard error.

    Raises:
        ConfigurationError: KINETIC_LOG_LEVEL names no level.
    """
    level = configuration.log_level()
    logger = absl_logging.get_absl_logger()
    if level is None or any(
        isinstance(log_filter, _KineticFilter) for log_filter in logger.filters
    ):
        return
    logger.addFilter(_KineticFilter(logger, level))


def shown_levels() -> dict[str, int]:
    """Return by logger from which level on this process shows its records; the root's name is "".

    A job doesn't run the part of the script that sets up logging, so kinetic sends these levels.
    Loggers that show what their parent shows are left out, and so is a root that shows warnings.
    """
    root = logging.getLogger()
    levels = {"": _shown_level(root, root.level)}
    for name, logger in sorted(root.manager.loggerDict.copy().items()):
        # The job would create a logger of a special class as a plain one, except that of absl.
        is_plain = type(logger) is logging.Logger or name == "absl"
        if not (is_plain and isinstance(logger, logging.Logger)):
            continue
        own = (entry for entry in logger.filters if isinstance(entry, _KineticFilter))
        level = next((entry.program_level for entry in own), logger.level)
        if level or logger.handlers:
            parent = logger.parent
            while parent is not None and parent.name not in levels:
                parent = parent.parent
            inherited = levels["" if parent is None else parent.name]
            shown = _shown_level(logger, level or logger.getEffectiveLevel())
            if shown != inherited:
                levels[name] = shown
    if levels[""] == logging.WARNING:
        del levels[""]
    return levels


def _shown_level(logger: logging.Logger, level: int) -> int:
    """Return the lowest level that a handler shows of *logger*, whose own level is *level*."""
    handlers: list[logging.Handler] = []
    current: logging.Logger | None = logger
    while current is not None:
        handlers += (
            entry for entry in current.handlers if not isinstance(entry, logging.NullHandler)
        )
        current = current.parent if current.propagate else None
    # In a job, all records go to its log, so files count only without another handler.
    handlers = [
        entry for entry in handlers if not isinstance(entry, logging.FileHandler)
    ] or handlers
    # absl adds a handler with its first record, Python shows warnings without one.
    least = logging.NOTSET if logger.name == "absl" else logging.WARNING
    return max(level, min((entry.level for entry in handlers), default=least))
