"""How a worker reads inputs from the slots of a batch."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.protocol import frames, wire
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic._runner.worker.inputs import FOOTER_READ_BYTES, Inputs, StoredInput
from tests.workers.process import KEY, SCOPE, Batch


class Counting:
    """A store that counts the requests."""

    def __init__(self, objects: DirectoryObjects) -> None:
        self._objects = objects
        self.requests = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.requests[name] += 1
        return getattr(self._objects, name)


def slots_of(batch: Batch) -> dict[int, wire.Slot]:
    """Return the slots with inputs, by number."""
    found = batch.objects.list(f"{SCOPE}inputs/")
    slots = [wire.Slot.verified(it.metadata, KEY, SCOPE, it.name) for it in found]
    return {number: slot for number, slot in enumerate(slots) if slot.total is None}


@pytest.mark.parametrize(
    ("size", "first"),
    [(10, 1), (FOOTER_READ_BYTES // 4, 2), (FOOTER_READ_BYTES, 2)],
    ids=["all of the slot at once", "the footer, then some inputs", "the footer, then one input"],
)
def test_the_first_input_of_a_slot_takes_a_request_or_two_and_each_further_one_takes_one(
    tmp_path: Path, size: int, first: int
) -> None:
    values = [bytes([number]) * size for number in range(8)]
    batch = Batch(tmp_path, len, values)
    store = Counting(batch.objects)
    inputs, slot = Inputs(store, SCOPE), slots_of(batch)[0]
    for number, value in enumerate(values):
        store.requests.clear()
        found = inputs.read(number, 0, slot)
        assert isinstance(found, StoredInput)
        assert pickle.loads(frames.unpack(found.content).frames[0])[0] == (value,)
        assert store.requests.total() == (1 if number else first)
    batch.objects.delete([wire.input_key(SCOPE, 0)])
    assert inputs.read(3, 0, slot) is None, "a cleanup has removed it"
