"""Show from a job the log records that the program which submitted it shows."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging


def follow(levels: str) -> None:
    """Set the *levels* of loggers, a JSON object; write to standard error if no handler is set.

    The function's modules are imported: a program that sets up logging in them has its handlers.
    """
    logging.basicConfig()
    for name, level in json.loads(levels).items():
        if name == "absl":
            # absl must create its logger itself, because the logger has a class of its own.
            with contextlib.suppress(ImportError):
                importlib.import_module("absl.logging")
        logging.getLogger(name).setLevel(level)
