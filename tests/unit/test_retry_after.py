from __future__ import annotations

import email.utils
import time

import pytest

from kinetic.aio._net.http import retry_after


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("", None),
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        (email.utils.formatdate(1000, usegmt=True), 10.0),
        (email.utils.formatdate(900, usegmt=True), 0.0),
    ],
)
def test_it_holds_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after(value, now=990.0) == seconds


def test_a_date_counts_from_now() -> None:
    assert 900 < (retry_after(email.utils.formatdate(time.time() + 1000)) or 0) <= 1000
