"""Test `pickle_plain_call`, the fast path for calls with plain arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic import Data
from kinetic._packing.payload import pickle_plain_call
from kinetic._runner.protocol import pickles

leaf = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None, exclude_categories=()), max_size=20)
    | st.binary(max_size=20)
)
keys = st.text(max_size=3) | st.integers(0, 9) | st.tuples(st.integers(0, 9))
value = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(deadline=None)
@given(
    st.lists(value, max_size=3).map(tuple), st.dictionaries(st.text(max_size=3), value, max_size=3)
)
def test_a_plain_call_unpickles_unchanged(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    content = pickle_plain_call(args, kwargs)
    if content is not None:
        assert pickles.load(content) == (args, kwargs)
        assert repr(pickles.load(content)) == repr((args, kwargs))


def test_calls_of_sweeps_are_plain() -> None:
    for args, kwargs in [
        ((1,), {}),
        (("a", 0.5), {}),
        ((), {"lr": 1e-3, "layers": [64, 64]}),
        (({},), {}),
    ]:
        assert pickle_plain_call(args, kwargs) is not None


class Number(int):
    """A subclass of a plain type."""


class Liar:
    """It claims to be an ``int``."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return int

    def __str__(self) -> str:
        return "liar"


LONG = 70_000
"""More characters or numbers than fit into what the pickler writes at once."""

deep: list[Any] = []
for _ in range(50_000):
    deep = [deep]


@pytest.mark.parametrize(
    "value",
    [
        Number(3), Liar(), "x" * LONG, b"x" * LONG, [0] * LONG, deep, lambda: 1, Path(),
        {"a": [{"b": object()}]}, Data("."),
    ],
)  # fmt: skip
def test_other_calls_are_not_plain(value: Any) -> None:
    assert pickle_plain_call((value,), {}) is None
    assert pickle_plain_call((), {"name": value}) is None
    assert pickle_plain_call(([value],), {}) is None


def test_a_shared_argument_stays_shared() -> None:
    inner = [1]
    content = pickle_plain_call((inner, inner), {})
    assert content is not None
    first, second = pickles.load(content)[0]
    assert first is second
