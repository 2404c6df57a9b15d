"""What a process has read of a submission's items."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping

from ..protocol import wire
from ..protocol.retry_budgets import RetryBudgets
from ..protocol.workers import Requests


class Items:
    """Input slots, attempts, and which items are final; facts only grow."""

    def __init__(self, budgets: RetryBudgets, requests: Requests) -> None:
        self.stored = 0
        self.total: int | None = None  # once the end of the inputs is stored
        self.slots: list[wire.Slot] = []
        self.spent_s = 0.0
        self.failed = set[int]()
        self._firsts: list[int] = []
        self._slot_numbers: list[int] = []
        self._budgets = budgets
        self._requests = requests
        self._attempts: dict[int, dict[int, wire.Attempt]] = {}
        self._final = set[int]()
        self._latest: tuple[int, wire.Item] | None = None  # an index and its state

    def add_slot(self, slot: wire.Slot) -> None:
        """Note the next input slot."""
        if slot.total is not None:
            self.total = slot.total
        else:
            self._firsts.append(slot.first)
            self._slot_numbers.append(len(self.slots))
            self.stored = slot.first + slot.count
        self.slots.append(slot)

    def slot_of(self, number: int) -> int:
        """Return the number of the input slot that has the input of an item."""
        return self._slot_numbers[bisect.bisect_right(self._firsts, number) - 1]

    def attempts(self, index: int) -> Mapping[int, wire.Attempt]:
        """Return the attempts of an item that were read."""
        return self._attempts.get(index, {})

    def merge(self, found: Mapping[int, Mapping[int, wire.Attempt]]) -> None:
        """Add what a listing says. Facts only grow, so an older listing does no harm."""
        self._latest = None
        for index, attempts in found.items():
            known = self._attempts.setdefault(index, {})
            for number, new in attempts.items():
                old = known.get(number, wire.Attempt())
                if new.outcome is not None and old.outcome is None:
                    started, ended = new.outcome.started, new.outcome.ended
                    self.spent_s += max(0.0, ended - started) if started and ended else 0.0
                known[number] = wire.Attempt(
                    old.executor if new.executor is None else new.executor,
                    new.outcome if old.outcome is None else old.outcome,
                    new.claimed or old.claimed,
                    new.worker or old.worker,
                )

    def state(self, index: int) -> wire.Item:
        """Return the state of an item by what was read."""
        if self._latest is not None and self._latest[0] == index:
            return self._latest[1]
        standing = self._requests.standing(index)
        state = wire.item_state(standing, self.attempts(index), self._budgets)
        self._latest = index, state
        return state

    def is_final(self, index: int) -> bool:
        """Return whether an item is final, by what was read of it after the last request."""
        return index in self._final

    def read_requests(self, named: Iterable[int] | None) -> None:
        """Doubt what new requests change: the *named* items, or all. Values stay."""
        self._latest = None
        doubted = [*self._final] if named is None else [i for i in named if i in self._final]
        for index in doubted:
            if self.state(index).state is not wire.ItemState.SUCCEEDED:
                self._final.discard(index)
                self.failed.discard(index)

    def conclude(self, indexes: Iterable[int]) -> None:
        """Note which of *indexes* are final; their block was listed after the requests."""
        for index in indexes:
            state = self.state(index).state
            if state.final:
                self._final.add(index)
            if state is wire.ItemState.FAILED:
                self.failed.add(index)

    def open_blocks(self) -> list[range]:
        """Return the indexes of each block that has an item which isn't final."""
        blocks: list[range] = []
        for first in range(0, self.stored, wire.BLOCK_SIZE):
            block = range(first, min(first + wire.BLOCK_SIZE, self.stored))
            if any(index not in self._final for index in block):
                blocks.append(block)
        return blocks
