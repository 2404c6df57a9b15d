"""Test the notes: short JSON summaries of inputs, results, and errors beside their pickles."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic._runner.protocol import notes, outcomes, wire
from kinetic._runner.protocol.notes import NOTE_BYTES, note_of_call, note_of_error, note_of_result


class Pair(NamedTuple):
    loss: float
    step: int


@dataclass
class Scores:
    accuracy: float
    per_class: list[float]
    _hidden: int = 3


class Optimizer(enum.StrEnum):
    ADAM = "adam"


class Zero:
    """It looks like a scalar of NumPy: an array without dimensions."""

    shape = ()

    def item(self) -> float:
        return 0.25


class Traps:
    """It raises on access to any unknown attribute."""

    def item(self) -> float:
        return 0.0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Liar(float):
    def __float__(self) -> float:
        raise RuntimeError("float")

    def __repr__(self) -> str:
        return "</script>"


@pytest.mark.parametrize(
    ("value", "note"),
    [
        (None, None),
        (3, {"result": 3}),
        (True, {"result": True}),
        (0.5, {"result": 0.5}),
        (Liar(0.5), {"result": 0.5}),
        (Optimizer.ADAM, {"result": "adam"}),
        ("x" * 500, {"result": "x" * 100}),
        (math.nan, {"result": "nan"}),
        (-math.inf, {"result": "-inf"}),
        (1 << 70, None),
        (b"bytes", None),
        (Zero(), {"result": 0.25}),
        ({"loss": Zero(), "best": [Zero()]}, {"loss": 0.25, "best[0]": 0.25}),
        ({"a": {"b": {"c": Zero()}}}, {"a.b.c": 0.25}),
        ({"loss": 0.1, "best": {"step": 3}, 7: 1}, {"loss": 0.1, "best.step": 3}),
        ({"history": [0.1] * 1000, "loss": None}, {"loss": None}),
        ((1, "a"), {"[0]": 1, "[1]": "a"}),
        ({"p": [1, 2]}, {"p[0]": 1, "p[1]": 2}),
        (Pair(0.1, 3), {"loss": 0.1, "step": 3}),
        (Scores(0.9, [0.1, 0.2]), {"accuracy": 0.9, "per_class[0]": 0.1, "per_class[1]": 0.2}),
        ({}, None),
        (object(), None),
    ],
)
def test_the_scalars_of_a_result_are_noted(value: Any, note: Any) -> None:
    assert note_of_result(value) == note


def test_an_object_that_raises_ends_the_note_and_nothing_else() -> None:
    assert note_of_result(Traps()) is None
    assert note_of_result([1, Traps(), 2]) == {"[0]": 1}


def test_a_container_that_contains_itself_has_a_finite_note() -> None:
    cyclic: list[Any] = [1]
    cyclic.append(cyclic)
    assert note_of_result(cyclic) == {"[0]": 1, "[1][0]": 1, "[1][1][0]": 1}


def test_the_note_of_a_call_names_its_arguments() -> None:
    assert note_of_call((0.1, {"lr": 3}), {"seed": 1, "data": object()}) == {
        "[0]": 0.1,
        "[1].lr": 3,
        "seed": 1,
    }
    assert note_of_call((object(),), {}) is None


def test_an_error_is_noted_by_its_type_and_the_beginning_of_its_message() -> None:
    assert note_of_error("ValueError", "bad") == {"error": "ValueError: bad"}
    assert note_of_error("", "the job was asked to stop") == {"error": "the job was asked to stop"}
    assert note_of_error("KeyError", "") == {"error": "KeyError"}
    text = outcomes.ErrorText(qualname="ValueError", message="bad", traceback="", phase="data")
    assert text.note == {"error": "bad"}, "outside the user's code, the message suffices"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=15,
)


@given(VALUES, st.text(), st.text())
def test_the_note_of_any_value_is_short_strict_json(value: Any, kind: str, message: str) -> None:
    of_value = (note_of_result(value), note_of_call((value,), {kind: value}))
    for note in (*of_value, note_of_error(kind, message * 100)):
        if note is not None:
            text = json.dumps(note, allow_nan=False, separators=(",", ":"))
            assert len(text) <= NOTE_BYTES
            assert notes.read(json.loads(text)) == note


@given(VALUES)
def test_only_scalars_are_read(content: Any) -> None:
    for name, value in notes.read(content).items():
        assert isinstance(name, str)
        assert value is None or isinstance(value, (bool, int, float, str))


@pytest.mark.parametrize("character", ["a", '"', "\\", "\u4e00", "\x00", "\U0001f600"])
def test_a_receipt_has_the_longest_note_if_not_the_body(character: str) -> None:
    texts = {f"name {n}": character * 100 for n in range(20)}
    of_result = note_of_result({**texts, "loss": 0.5})
    assert of_result is not None and len(of_result) < 20 and of_result["loss"] == 0.5
    for note in (of_result, note_of_error(character * 50, character * 5000)):
        outcome = wire.Outcome(kind=wire.Kind.ERROR, body="0" * 64, note=note, ended=1.0)
        content, metadata = outcome.stored(b"key", "batches/g/", 7, 1, b"x" * wire.BODY_BYTES)
        assert not content
        receipt = wire.Receipt(index=7, attempt=1, metadata=metadata)
        del metadata[wire.BODY]
        assert wire.parse_receipt(receipt.to_text()) == wire.Receipt(
            index=7, attempt=1, metadata=metadata
        )


def test_the_signature_of_a_header_covers_its_note_which_is_optional() -> None:
    outcome = wire.Outcome(kind=wire.Kind.VALUE, note={"loss": 0.5})
    metadata = outcome.signed(b"key", "batches/g/", 7, 1)
    assert wire.Outcome.verified(metadata, b"key", "batches/g/", 7, 1) == outcome
    changed = {**metadata, "header": metadata["header"].replace("0.5", "0.9")}
    with pytest.raises(ValueError, match="forged"):
        wire.Outcome.verified(changed, b"key", "batches/g/", 7, 1)
    before = json.loads(metadata["header"])
    del before["note"]
    assert wire.Outcome.parse(json.dumps(before)).note is None
    partly_valid = wire.Outcome.parse(json.dumps({**before, "note": {"a": [1], "b": 2}}))
    assert partly_valid.note == {"b": 2}
