"""Test what proposes trials without another package: random search, grid search, and ASHA."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic.errors import ConfigurationError
from kinetic.sweeps import ASHA, Choice, Float, GridSearch, Int, RandomSearch
from tests.sweeps.jobs import GRID, SPACE


def asked(search: RandomSearch | GridSearch, count: int) -> list[dict]:
    proposals = itertools.takewhile(bool, (search.ask() for _ in range(count)))
    return [dict(proposal.params) for proposal in proposals]


def test_the_same_seed_gives_the_same_proposals() -> None:
    assert asked(RandomSearch(SPACE, seed=3), 20) == asked(RandomSearch(SPACE, seed=3), 20)
    assert asked(RandomSearch(SPACE, seed=3), 20) != asked(RandomSearch(SPACE, seed=4), 20)


@given(
    st.integers(), st.floats(1e-9, 1e6), st.floats(0, 1e6), st.integers(1, 99), st.integers(0, 99)
)
def test_random_search_stays_in_its_space(
    seed: int, low: float, width: float, first: int, count: int
) -> None:
    space = {
        "log": Float(low, low + width, log=True),
        "even": Float(-low, width),
        "logged int": Int(first, first + count, log=True),
        "stepped": Float(0, 1, step=0.25),
        "option": Choice(["a", None]),
    }
    for params in asked(RandomSearch(space, seed=seed), 10):
        assert low <= params["log"] <= low + width and -low <= params["even"] <= width
        assert params["logged int"] in range(first, first + count + 1)
        assert params["stepped"] in (0, 0.25, 0.5, 0.75, 1) and params["option"] in ("a", None)


def test_log_draws_small_numbers_as_often_as_large_ones() -> None:
    rates = [params["rate"] for params in asked(RandomSearch(SPACE), 1000)]
    assert 400 < sum(rate < 1e-3 for rate in rates) < 600


def test_a_discrete_space_repeats_no_point_until_it_is_exhausted() -> None:
    points = [tuple(params.values()) for params in asked(RandomSearch(GRID, seed=5), 18)]
    rounds = [points[start : start + 6] for start in (0, 6, 12)]
    assert all(len({*each}) == 6 for each in rounds)
    assert len({*map(tuple, rounds)}) > 1  # each round has an order of its own


def test_grid_search_proposes_every_point_once() -> None:
    search = GridSearch(GRID)
    points = [tuple(params.values()) for params in asked(search, 99)]
    assert points == [*itertools.product([0.1, 0.01], [1, 2, 3])] and len(search) == 6


def test_a_larger_grid_proposes_what_an_earlier_one_has_not() -> None:
    larger = {"rate": Choice([0.1, 0.05, 0.01]), "layers": Int(1, 4)}
    search, earlier = GridSearch(larger), asked(GridSearch(GRID), 99)
    assert all(search.adopt(params, None) for params in earlier)
    found = asked(search, 99)
    assert not any(params in earlier for params in found)
    assert sorted(map(repr, earlier + found)) == sorted(map(repr, asked(GridSearch(larger), 99)))


def test_equal_options_of_a_grid_are_adopted_one_by_one() -> None:
    search = GridSearch({"flag": Choice([0, False, None])})
    assert search.adopt({"flag": 0}, None) and search.adopt({"flag": False}, None)
    assert asked(search, 99) == [{"flag": None}]


class Plain:
    """A value that equals only itself."""


@pytest.mark.parametrize("kind", [RandomSearch, GridSearch])
@pytest.mark.parametrize(
    "options",
    [[math.nan, 1.0], [np.arange(2), np.arange(3)], [Plain(), len], np.array([3, 4])],
    ids=["nan", "arrays", "instance", "an array"],
)
def test_options_are_adopted_as_copies(kind: Any, options: Any) -> None:
    search, again = kind({"option": Choice(options)}), kind({"option": Choice(options)})
    for _ in options:
        assert again.adopt(pickle.loads(pickle.dumps(search.ask().params)), None)
    assert kind is RandomSearch or again.ask() is None


def test_options_with_the_same_text_are_not_taken_for_each_other() -> None:
    search = GridSearch({"option": Choice([Plain(), Plain()])})
    assert search.adopt({"option": Plain()}, None) is None


def test_steps_end_at_the_bound_and_need_no_list() -> None:
    steps = Float(0.1, 0.7, step=0.1).values()
    assert steps is not None and steps[-1] == 0.7 and len(steps) == len({*steps[:]}) == 7
    assert all(value in steps for value in [*steps]) and 0.15 not in steps and "a" not in steps
    space = {"fine": Float(0, 1000, step=1e-9), "seed": Int(0, 2**70)}
    search, random = GridSearch(space), RandomSearch(space)
    (first, second), drawn = asked(search, 2), asked(random, 9)
    assert (first["seed"], second["seed"]) == (0, 1) and len({*map(repr, drawn)}) == 9
    again = RandomSearch(space)
    assert all(again.adopt(params, None) for params in drawn)


def test_an_earlier_trial_is_adopted_only_if_it_is_in_the_space() -> None:
    search = RandomSearch(SPACE, seed=1)
    proposal = search.adopt({"rate": 0.01, "layers": 4}, None)
    assert proposal is not None and proposal.number == 0
    assert search.adopt({"rate": 0.01, "layers": 5}, None) is None
    assert search.adopt({"rate": 0.2, "layers": 4}, None) is None
    assert search.adopt({"rate": 0.01}, None) is None
    following = search.ask()
    assert following.params == asked(RandomSearch(SPACE, seed=1), 5)[4]


def test_asha_lets_the_best_third_of_a_rung_continue() -> None:
    pruner = ASHA(first=2, reduction=3)
    assert not any(pruner.report(number, 1, number) for number in range(9))  # before the rung
    pruned = {number for number in reversed(range(9)) if pruner.report(number, 2, number)}
    assert not pruned  # each was the best so far
    late = {number: pruner.report(number, 3, number) for number in range(9, 12)}
    assert all(late.values())
    assert not pruner.report(0, 5, 99) and not pruner.report(0, 6, 0)  # the second rung is 6
    assert pruner.report(1, 7, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Float(1, 0),
        lambda: Float(0, 1, log=True),
        lambda: Float(0, 1, step=0),
        lambda: Int(1, 9, log=True, step=2),
        lambda: Choice([]),
        lambda: Choice("ab"),
        lambda: Choice({"a", "b"}),  # type: ignore[arg-type]
        lambda: Choice({"a": 1}),  # type: ignore[arg-type]
        lambda: Choice(n for n in "ab"),  # type: ignore[arg-type]
        lambda: Float(0.1, 0.9, 0.1),  # type: ignore[arg-type]
        lambda: Int(1, 9, 2),  # type: ignore[arg-type]
        lambda: ASHA(first=0),
        lambda: ASHA(reduction=1),
        lambda: RandomSearch({}),
        lambda: RandomSearch({"rate": 0.1}),  # type: ignore[dict-item]
        lambda: RandomSearch(SPACE, direction="up"),  # type: ignore[arg-type]
        lambda: GridSearch(SPACE),
    ],
)
def test_a_wrong_space_is_refused(make) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_a_list_in_place_of_a_domain_is_named() -> None:
    space: Any = {"layers": Int(1, 2), "rate": (0.1, 0.2)}
    with pytest.raises(ConfigurationError, match=r"'rate' must be .* Choice\(\(0.1, 0.2\)\)"):
        RandomSearch(space)
    with pytest.raises(ConfigurationError, match="a space is a dict"):
        GridSearch([Int(1, 2)])  # type: ignore[arg-type]


def test_a_bound_that_is_no_number_of_its_kind_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r": 2\.5 isn't an int"):
        Int(1, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=": inf isn't a finite number"):
        Float(0, float("inf"))
