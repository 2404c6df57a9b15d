"""How much of kinetic's own log is seen, where KINETIC_LOG_LEVEL says so."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from absl import logging as absl_logging

from kinetic import configuration

OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")

log_level: str = (os.environ.get("KINETIC_LOG_LEVEL") or "WARNING").strip().upper()
"""What KINETIC_LOG_LEVEL said when this was first asked for; without it, what one sees."""


class _OnlyOurs(logging.Filter):
    """Of absl's logger, which many libraries share: ours from *level* on, of others as before."""

    def __init__(self, logger: logging.Logger, level: int) -> None:
        super().__init__()
        self._logger = logger
        self._level = level
        self._before = logger.level
        self._lowered = min(level, logger.getEffectiveLevel())
        logger.setLevel(self._lowered)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.pathname.startswith(OURS):
            return record.levelno >= self._level
        if self._logger.level != self._lowered:
            return True  # somebody has set it since, and for everybody
        return record.levelno >= (self._before or logging.getLogger().level)


def obey(environ: Mapping[str, str] = os.environ) -> None:
    """Once a process, have KINETIC_LOG_LEVEL hold; without it, nothing is touched.

    Where the program has configured no logging, absl has the lines go to standard error.

    Raises:
        ConfigurationError: There is no such level.
    """
    level = configuration.log_level(environ)
    logger = absl_logging.get_absl_logger()
    if level is None or any(isinstance(one, _OnlyOurs) for one in logger.filters):
        return
    logger.addFilter(_OnlyOurs(logger, level))
