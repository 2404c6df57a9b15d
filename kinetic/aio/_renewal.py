"""Shared content of a batch that goes on for days: renewed, so that it is there for every job."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import NoReturn

from absl import logging

from kinetic._runner.wire import DataRef
from kinetic.aio import _data, _sharing
from kinetic.aio._release import bounded
from kinetic.aio._stock import Stock
from kinetic.aio._submit import Placed
from kinetic.aio.ports import Store
from kinetic.errors import BackendError, KineticError

__all__ = ["keep_renewing", "renewed"]

AT_ONCE = 16


async def renewed(store: Store, placed: Placed, data: Iterable[DataRef] = ()) -> list[str]:
    """Have what the jobs of *placed* read for some time to come; the names of what is gone."""
    parts = (placed.code, placed.function, placed.image.requirements)
    names = [one.name for one in parts if one is not None]
    uris = {one.uri: None for one in (*placed.data, *data) if "://" not in one.uri}
    gone: list[str] = []

    async def renew(name: str) -> None:
        if name in uris:
            there = await _data.renew(store, name)
        else:
            info = await store.look(name)
            fresh = info is not None and _sharing.is_fresh(info)
            there = fresh or (info is not None and not await store.renew([name]))
        if not there:
            gone.append(name)

    await bounded(renew, [*names, *uris], at_once=AT_ONCE)
    return sorted(gone)


async def keep_renewing(store: Store, placed: Placed, stock: Stock, whose: str) -> NoReturn:
    """Look at it once a day, until cancelled."""
    while True:
        await asyncio.sleep(_sharing.DAY_S)
        try:
            gone = await renewed(store, placed, _data_of(stock))
        except BackendError as exc:
            logging.warning("%s: shared content was not renewed: %s; tomorrow again", whose, exc)
            continue
        if gone:
            logging.error(
                "%s: %s is gone from the store, so jobs to come will fail; have the bucket's "
                "lifecycle rule wait for longer than jobs take, and submit again",
                whose,
                gone[0],
            )


def _data_of(stock: Stock) -> Iterator[DataRef]:
    """The `Data` in the inputs that this process has stored."""
    for index in range(stock.count):
        try:
            place = stock.place(index)
        except KineticError:
            continue  # it could not be pickled
        if place is not None:
            yield from place[1]
