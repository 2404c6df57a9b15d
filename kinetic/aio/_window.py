"""How far those who consume a batch let it run ahead of them."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Delivery", "Window"]


class Window:
    """``limit`` bounds the items that have begun and were not delivered, while anybody consumes.

    Each consumer is to get every item: the slowest decides.
    """

    def __init__(self, limit: int | None, on_change: Callable[[], None]) -> None:
        self.limit = limit
        self._on_change = on_change
        self._consumers: list[Delivery] = []

    @property
    def delivered(self) -> int | None:
        """How many items the slowest has got; None when nobody consumes."""
        return min((one.count for one in self._consumers), default=None)

    @property
    def bound(self) -> int | None:
        """How many items may have begun at most for now; None: any number."""
        delivered = self.delivered
        return None if self.limit is None or delivered is None else self.limit + delivered

    def begin(self, count: int = 0) -> Delivery:
        """Somebody who has got *count* items consumes from now on, and `Delivery.end`s it."""
        delivery = Delivery(self, count)
        self._consumers.append(delivery)
        self._on_change()
        return delivery

    def changed(self) -> None:
        """A consumer has got something."""
        if self.limit is not None:
            self._on_change()

    def lift(self) -> None:
        """From now on it bounds nothing."""
        self.limit = None
        self._on_change()

    def leave(self, delivery: Delivery) -> None:
        """A consumer takes no more."""
        if delivery in self._consumers:
            self._consumers.remove(delivery)
            self._on_change()


class Delivery:
    """How many items, refused ones included, one consumer has got."""

    def __init__(self, window: Window, count: int) -> None:
        self.count = count
        self._window = window

    def add(self, items: int = 1) -> None:
        """So many more have reached it."""
        self.count += items
        self._window.changed()

    def end(self) -> None:
        """It takes no more, and holds nobody up."""
        self._window.leave(self)
