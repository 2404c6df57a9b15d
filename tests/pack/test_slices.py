"""Large plain values, which are pickled in slices: they come back as from one pickle."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic._runner.protocol import frames, pickles

N = pickles.MANY


def there_and_back(value: Any) -> Any:
    return pickles.load(pickles.dumps(value))


def is_cut(value: Any) -> bool:
    return b"Gathered" in pickles.dumps(value)


class Odd:
    """Nothing plain."""


VALUES: dict[str, Callable[[], Any]] = {
    "words": lambda: [f"word {n}" for n in range(3 * N)],
    "a tuple": lambda: tuple(f"word {n}" for n in range(N)),
    "a set": lambda: {f"word {n}" for n in range(N)},
    "a frozen set": lambda: frozenset(range(N)),
    "a dict": lambda: {f"key {n}": [f"value {n}"] for n in range(N)},
    "numbers": lambda: [float(n) for n in range(3 * N)],
    "rows": lambda: [{"id": n, "tags": ["a", f"b{n}"], "at": (n, None)} for n in range(N)],
    "tuples as keys": lambda: {(n, "k"): {n, n + 1} for n in range(N)},
    "texts of different sizes": lambda: [b"x" * (n % 97 * 1000) for n in range(N)],
    "a string": lambda: "x" * 3 * pickles.LONG,
    "a string that gets wider": lambda: "x" * pickles.LONG + "é€" * pickles.LONG + "\U0001f600" * 9,
    "half of a surrogate pair": lambda: "\ud800x" * pickles.LONG,
    "a long string among words": lambda: [*map(str, range(N)), "y" * 2 * pickles.LONG],
    "long rows": lambda: [[f"{a} {b}" for b in range(1500)] for a in range(N // 100)],
    "many containers of a hundred": lambda: [[f"{a} {b}" for b in range(99)] for a in range(3000)],
}


@pytest.mark.parametrize("case", VALUES)
def test_it_comes_back_and_is_cut(case: str) -> None:
    value = VALUES[case]()
    assert is_cut(value)
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)
    if isinstance(value, dict):
        assert list(back) == list(value)


def test_one_object_stays_one() -> None:
    words = [f"word {n}" for n in range(N)]
    text = "x" * pickles.LONG
    first, again, (inside, *texts) = there_and_back((words, {"again": words}, [words, text, text]))
    assert first is again["again"] is inside
    assert texts[0] is texts[1]
    first.append(1)
    assert len(inside) == N + 1


SHARED: dict[str, Callable[[Any], Any]] = {
    "a list": lambda row: [*([n] for n in range(N)), row, row],
    "a list and its neighbour": lambda row: ([[1] for _ in range(N)] + [row], row),
    "what a key has": lambda row: {n: [row] for n in range(N)},
    "what a tuple has": lambda row: [(n, row) for n in range(N)],
    "deep down": lambda row: [[[{"k": row}]] for _ in range(N)],
}


@pytest.mark.parametrize("case", SHARED)
def test_what_others_refer_to_is_not_cut_off(case: str) -> None:
    row = ["shared"]
    value = SHARED[case](row)
    del row
    assert there_and_back(value) == value
    assert references(there_and_back(value)) == references(pickle.loads(pickle.dumps(value)))


def references(value: Any) -> int:
    """How many distinct lists there are in it."""
    found, stack = dict[int, Any](), [value]
    while stack:
        one = stack.pop()
        if isinstance(one, list):
            found[id(one)] = one
        if isinstance(one, dict):
            stack.extend(one.values())
        elif isinstance(one, (list, tuple)):
            stack.extend(one)
    return len(found)


def test_a_few_elements_of_another_kind_go_with_the_rest() -> None:
    for row in (rows := [[n] for n in range(N)]):
        row.append("x")
    rows[7:9] = [Odd(), rows[100]]
    value = {
        "last": row,
        "rows": rows,
        "named": {n: rows[n] if n % 1000 == 1 else [n] for n in range(N)},
    }
    size = len(pickles.dumps(value))
    assert is_cut(rows)
    assert is_cut(value["named"])
    assert size < 1.2 * len(pickle.dumps(value, 5))
    back = there_and_back(value)
    assert back["rows"][-1] is back["last"]
    assert back["rows"][8] is back["rows"][100]
    assert back["named"][2001] is back["rows"][2001]
    assert isinstance(back["rows"][7], Odd)
    assert [one[0] for one in back["rows"][9:]] == [*range(9, N)]
    assert list(back["named"]) == [*range(N)]


def test_constant_tuples_may_be_shared() -> None:
    place = (1.0, "there")
    assert is_cut([[n, place] for n in range(N)])


@pytest.mark.parametrize("size", [2000, 200_000, 2 * pickles.LONG])
def test_a_shared_text_is_there_once(size: int) -> None:
    text = "x" * size
    rows = [[n, text] for n in range(N)]
    assert len(pickles.dumps(rows)) < 2 * size + 40 * N


def test_what_contains_itself_comes_back() -> None:
    value: list[Any] = [[n] for n in range(N)]
    value.append(value)
    back = there_and_back(value)
    assert back[-1] is back
    named: dict[Any, Any] = {n: [n] for n in range(N)}
    named["self"] = [named]
    back = there_and_back(named)
    assert back["self"][0] is back


class Words(list[str]):
    """A list, and not quite."""


@pytest.mark.parametrize("odd", [Odd, lambda: 1j, lambda: Words("x"), lambda: tuple([[1]] * 2)])
def test_only_plain_values_are_cut(odd: Callable[[], Any]) -> None:
    for value in ((*map(str, range(N)), odd()), {n: [odd()] for n in range(N)}):
        assert not is_cut(value)
        assert len(there_and_back(value)) == len(value)


def test_small_values_are_not_cut() -> None:
    assert not is_cut([{"k": list(map(str, range(1000)))}, "x" * 1000])


def test_slices_are_not_kept_while_the_next_are_made() -> None:
    class Nowhere:
        def write(self, data: Any, /) -> int:
            return len(data)

    words = [f"{n:0100}" for n in range(200_000)]
    tracemalloc.start()
    size = pickles.dump(words, Nowhere())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 20_000_000
    assert peak < 8_000_000


def test_a_stranger_s_persistent_id_is_refused() -> None:
    class Stranger(pickles.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return "x" if obj == 7 else None

    with pytest.raises(pickle.UnpicklingError, match="persistent id"):
        pickles.load(pickles.dumps([7], pickler=Stranger))


ATOMS = st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
PLAIN = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=30, deadline=None)
@given(PLAIN, st.integers(0, 2**32))
def test_any_plain_value_comes_back_with_its_aliases(value: Any, seed: int) -> None:
    chance = random.Random(seed)
    pool = [value, [value], {"k": value}]
    rows = [chance.choice(pool) if chance.random() < 0.01 else [n, "x"] for n in range(N)]
    whole = [rows, pool, rows]
    back, expected = there_and_back(whole), pickle.loads(pickle.dumps(whole))
    assert back == whole
    assert back[0] is back[2]
    assert references(back) == references(expected)
    assert frames.unpack(pickles.dumps(whole)).frames
