"""What a server says about when to ask again."""

from __future__ import annotations

import email.utils
import math
import time

__all__ = ["retry_after"]


def retry_after(value: str | None, now: float | None = None) -> float | None:
    """Seconds to wait by a Retry-After header, which holds them or a date; None if it says none."""
    if not value:
        return None
    try:
        wish = float(value)
    except ValueError:
        try:
            until = email.utils.parsedate_to_datetime(value).timestamp()
        except ValueError:
            return None
        wish = until - (time.time() if now is None else now)
    return max(0.0, wish) if math.isfinite(wish) else None
