"""kinetic's log: absl's functions, with the name kinetic on the records of this package."""

from __future__ import annotations

import os
from logging import LogRecord

from absl import logging as logging

PACKAGE_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def _name_own_record(record: LogRecord) -> bool:
    """Name a record of this package kinetic: a user needn't know whose logger it has."""
    if record.pathname.startswith(PACKAGE_FOLDER):
        record.name = "kinetic"
    return True


logging.get_absl_logger().addFilter(_name_own_record)
