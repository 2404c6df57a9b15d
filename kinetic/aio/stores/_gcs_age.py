"""The time of last use of what many share: a bucket's lifecycle rule collects it by that.

The service calls it custom time. It is set when an object is written, can only
be set to a later one, and changes nothing of the object's generation.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection

from kinetic.aio.stores import _gcs_batch
from kinetic.aio.stores._gcs_errors import Refusal, Verb
from kinetic.aio.stores._gcs_http import Http
from kinetic.aio.stores._gcs_object import described

__all__ = ["now", "renewed"]

TOO_EARLY = 400
SKEW = datetime.timedelta(days=1)
"""How far a clock may be ahead of another one."""


def now() -> str:
    """This moment, as the service takes it."""
    return _text(datetime.datetime.now(datetime.UTC))


def _text(moment: datetime.datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def renewed(http: Http, names: Collection[str]) -> set[str]:
    """Set it to now for all of *names*; those that are not there.

    Raises:
        AuthError: A permission is missing.
        Unavailable: The service did not answer.

    Cancelled: any of them may be renewed.
    """
    moment = datetime.datetime.now(datetime.UTC)
    task = _gcs_batch.Task(
        verb=Verb.RENEW,
        method="PATCH",
        body={"customTime": _text(moment)},
        known=frozenset({_gcs_batch.ABSENT, TOO_EARLY}),
    )
    found = await _gcs_batch.each(http, task, names)
    absent = {name for name, status in found.items() if status == _gcs_batch.ABSENT}
    for name in found.keys() - absent:  # somebody whose clock is ahead was faster
        try:
            about = await described(http, name)
        except Refusal as refusal:
            if refusal.status != _gcs_batch.ABSENT:
                raise http.explained(refusal, Verb.GET, name) from None
            absent.add(name)
            continue
        if about.used is None or about.used < (moment - SKEW).timestamp():
            raise http.explained(Refusal(TOO_EARLY), Verb.RENEW, name)
    return absent
