"""Set environment variables in a fork, which copies each page of memory that it writes to."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

_ENCODING = sys.getfilesystemencoding()


def add_to_environment(variables: Mapping[str, str]) -> None:
    """Set environment variables; `os.environ.update` would write to three times as many pages."""
    data: dict[bytes, bytes] = vars(os.environ)["_data"]
    for variable, text in variables.items():
        name = variable.encode(_ENCODING, "surrogateescape")
        value = text.encode(_ENCODING, "surrogateescape")
        if data.get(name) != value:
            os.putenv(name, value)
            data[name] = value
    if "TZ" in variables:
        time.tzset()
