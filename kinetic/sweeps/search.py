"""Random search, grid search, and a pruner, which need no other package."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import re
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from kinetic._messages import one_line
from kinetic._tracebacks import own_frames_left_out
from kinetic.errors import ConfigurationError
from kinetic.sweeps.protocol import Direction, Proposal, State

__all__ = ["ASHA", "Choice", "Domain", "Float", "GridSearch", "Int", "RandomSearch"]

MAX_SHUFFLED = 100_000
"""Maximum number of points of a discrete space that random search shuffles, to repeat none."""


@own_frames_left_out.in_methods
@dataclass(frozen=True, slots=True)
class Choice:
    """One of some values."""

    options: Sequence[Any]

    def __post_init__(self) -> None:
        # The order of a set differs from process to process.
        is_list = hasattr(self.options, "__getitem__") and not isinstance(
            self.options, str | Mapping
        )
        if not is_list or not len(self.options):
            raise ConfigurationError(f"Choice needs a list of values, not {self.options!r}")

    def values(self) -> Sequence[Any] | None:
        """Return all values."""
        return _Options(self.options)

    def sample(self, source: random.Random) -> Any:
        """Return a random value."""
        return source.choice(_Options(self.options))


@own_frames_left_out.in_methods
@dataclass(frozen=True, slots=True)
class Float:
    """A number from ``low`` to ``high``.

    ``log`` draws its logarithm uniformly. With ``step``, the number is ``low`` plus a multiple of
    it.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        _check_range(self)

    def values(self) -> Sequence[float] | None:
        """Return all values; None if there are infinitely many."""
        if self.step is None:
            return [self.low] if self.low == self.high else None
        return _Steps(self.low, self.high, self.step)

    def sample(self, source: random.Random) -> float:
        """Return a random value."""
        if (values := self.values()) is not None:
            return source.choice(values)
        if not self.log:
            return source.uniform(self.low, self.high)
        sample = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        return min(max(sample, self.low), self.high)  # the logarithm rounds


@own_frames_left_out.in_methods
@dataclass(frozen=True, slots=True)
class Int:
    """An int from ``low`` to ``high``, both included.

    ``log`` draws its logarithm uniformly. Otherwise, the int is ``low`` plus a multiple of
    ``step``.
    """

    low: int
    high: int
    log: bool = False
    step: int = 1

    def __post_init__(self) -> None:
        _check_range(self)

    def values(self) -> Sequence[int] | None:
        """Return all values."""
        return range(self.low, self.high + 1, self.step)

    def sample(self, source: random.Random) -> int:
        """Return a random value."""
        if not self.log:
            return source.randrange(self.low, self.high + 1, self.step)
        sample = math.exp(source.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5)))
        return min(max(round(sample), self.low), self.high)


def _check_range(space: Float | Int) -> None:
    kinds, kind = (int, "an int") if isinstance(space, Int) else ((int, float), "a finite number")
    step = 1 if space.step is None else space.step
    numbers: tuple[Any, ...] = space.low, space.high, step
    if type(space.log) is not bool:
        raise ConfigurationError(f"{space}: log must be True or False; give a step by its name")
    for number in numbers:
        if not (isinstance(number, kinds) and math.isfinite(number)):
            raise ConfigurationError(f"{space}: {number!r} isn't {kind}")
    if space.low > space.high or step <= 0:
        raise ConfigurationError(f"{space}: low must not exceed high, and step must exceed 0")
    if space.log and (space.low <= 0 or step != 1):
        raise ConfigurationError(f"{space}: log=True needs a low greater than 0, and no step")


class _Values(Sequence[Any]):
    """A sequence that contains what its `index` finds."""

    def __contains__(self, value: object) -> bool:
        try:
            return self.index(value) >= 0
        except (TypeError, ValueError, OverflowError):
            return False


class _Options(_Values):
    """The options of a `Choice`.

    An option that isn't equal to a copy of it, such as NaN, an array, or a closure, is found by its
    text, unless several options have this text.
    """

    def __init__(self, options: Sequence[Any]) -> None:
        given: Any = options  # an array of NumPy isn't a Sequence
        self._options: Sequence[Any] = given if isinstance(given, Sequence) else [*given]

    def __len__(self) -> int:
        return len(self._options)

    def __getitem__(self, position: int | slice) -> Any:
        return self._options[position]

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        with contextlib.suppress(Exception):  # whatever the comparison raises
            return self._options.index(value)
        texts = [_text_of(option) for option in self._options]
        if texts.count(text := _text_of(value)) == 1:
            return texts.index(text)
        raise ValueError(f"{text} isn't one of these options")


def _text_of(value: object) -> str:
    return re.sub(" at 0x[0-9a-fA-F]+", "", repr(value))


class _Steps(_Values):
    """The numbers of a `Float` with a step, without a list of them: there may be billions."""

    def __init__(self, low: float, high: float, step: float) -> None:
        self._low, self._high, self._step = low, high, step
        self._positions = range(math.floor((high - low) / step + 1e-9) + 1)

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, position: int | slice) -> Any:
        if isinstance(position, slice):
            return [self[each] for each in self._positions[position]]
        number = self._low + self._step * self._positions[position]
        return min(number, self._high)  # the sum rounds

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        position: int = round((value - self._low) / self._step)
        if position in self._positions and self[position] == value:
            return position
        raise ValueError(f"{value!r} isn't one of these numbers")


Domain: TypeAlias = Float | Int | Choice
"""The values that a parameter can have."""


@own_frames_left_out.in_methods
class ASHA:
    """Asynchronous successive halving: prune a trial that isn't among the best at its rung.

    The rungs are the steps *first*, *first* times *reduction*, *first* times *reduction* squared,
    and so on. A trial that reports at a rung, or first beyond it, continues if its value is among
    the best 1/*reduction* of the trials that have reached this rung so far.

    Args:
        first: The step of the first rung, at least 1. Default: 1.
        reduction: How many trials reach a rung for each that continues; at least 2. Default: 3.

    Raises:
        ConfigurationError: An argument is too small.

    Example::

        search = RandomSearch(space, seed=1, pruner=ASHA(first=4))
    """

    def __init__(self, *, first: int = 1, reduction: int = 3) -> None:
        if first < 1 or reduction < 2:
            raise ConfigurationError("ASHA needs first >= 1 and reduction >= 2")
        self.rungs = (first, reduction)
        """The first rung, and the ratio of a rung to the one before."""
        self._begin()

    def _begin(self) -> None:
        self._rungs: dict[int, list[float]] = {}
        self._next: dict[int, int] = {}

    def begun(self) -> Self:
        """Return a pruner that knows no report; internal."""
        new = copy.copy(self)
        new._begin()
        return new

    def report(self, number: int, step: int, value: float) -> bool:
        """Take a value, of which lower is better; return whether to prune the trial."""
        first, reduction = self.rungs
        rung = self._next.get(number, first)
        if step < rung:
            return False
        while step >= rung * reduction:
            rung *= reduction
        self._next[number] = rung * reduction
        values = self._rungs.setdefault(rung, [])
        insort(values, value)
        return bisect_left(values, value) >= max(1, len(values) // reduction)

    def forget(self, number: int) -> None:
        """Note that a trial has ended."""
        self._next.pop(number, None)


class _Search:
    """A search whose proposals depend on no value."""

    def __init__(
        self, space: Mapping[str, Domain], direction: Direction, pruner: ASHA | None
    ) -> None:
        is_mapping = isinstance(space, Mapping)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_mapping or not space:
            raise ConfigurationError(
                f"a space is a dict such as {{'rate': Float(1e-5, 1e-1, log=True)}}, not {space!r}"
            )
        domains: list[tuple[str, object]] = [*space.items()]
        for name, domain in domains:
            if not isinstance(domain, Domain):
                values = domain if type(domain) in (list, tuple) else [0.1, 0.2]
                raise ConfigurationError(
                    f"the space of {name!r} must be a Float, an Int, or a Choice, such as "
                    f"Choice({one_line(repr(values), 80)}), not {one_line(repr(domain), 80)}"
                )
        if direction not in ("minimize", "maximize"):
            raise ConfigurationError(f"direction must be minimize or maximize, not {direction!r}")
        self.space = dict(space)
        self.direction: Direction = direction
        self._sign = 1 if direction == "minimize" else -1
        self._pruner = pruner
        self.prunes = pruner is not None
        self.rungs = pruner.rungs if pruner is not None else None
        self._begin()

    def _begin(self) -> None:
        self._count = 0

    def begun(self) -> Self:
        """Return a search of the same space that has proposed nothing; internal."""
        new = copy.copy(self)
        new._pruner = self._pruner and self._pruner.begun()
        new._begin()
        return new

    def ask(self) -> Proposal | None:
        """Implement `Optimizer`."""
        params = self._params()
        if params is None:
            return None
        self._count += 1
        return Proposal(self._count - 1, params)

    def tell(self, number: int, result: float | State) -> None:
        """Implement `Optimizer`."""
        if self._pruner is not None:
            self._pruner.forget(number)

    def report(self, number: int, step: int, value: float) -> bool:
        """Implement `Optimizer`."""
        return self._pruner is not None and self._pruner.report(number, step, self._sign * value)

    def adopt(self, params: Mapping[str, Any], memo: Any) -> Proposal | None:
        """Implement `Optimizer`: a trial with another seed is as random as one of this seed."""
        self._count += 1
        fits = params.keys() == self.space.keys() and all(
            _contains(domain, params[name]) for name, domain in self.space.items()
        )
        return Proposal(self._count - 1, params) if fits else None

    def _params(self) -> dict[str, Any] | None:
        raise NotImplementedError


@own_frames_left_out.in_methods
class RandomSearch(_Search):
    """Propose random points of a space.

    A discrete space of at most 100,000 points repeats none until each was proposed. A sweep that
    continues with another seed may repeat points of the earlier one.

    Args:
        space: The domain of each parameter: `Float`, `Int`, or `Choice`.
        seed: The same seed gives the same proposals. Default: 0.
        direction: Whether the lowest value is the best, or the highest. Default: ``minimize``.
        pruner: What ends weak trials early, by their reports. None: no trial is pruned.

    Raises:
        ConfigurationError: *space* isn't a dict of domains, or *direction* is wrong.

    Example::

        space = {"rate": Float(1e-5, 1e-1, log=True), "layers": Int(1, 4)}
        with train.sweep(RandomSearch(space, seed=1), trials=50) as sweep:
            for trial in sweep:
                print(trial.params, trial.value)
    """

    def __init__(
        self,
        space: Mapping[str, Domain],
        *,
        seed: int = 0,
        direction: Direction = "minimize",
        pruner: ASHA | None = None,
    ) -> None:
        super().__init__(space, direction, pruner)
        self._seed = seed
        # A shuffle would draw all points alike, so a logarithmic domain isn't shuffled.
        is_even = not any(getattr(domain, "log", False) for domain in self.space.values())
        self._values = _values_of(self.space, MAX_SHUFFLED) if is_even else None
        self._size = math.prod(map(_size_of, self._values.values())) if self._values else 0
        self._order: Sequence[int] = ()
        self._round = -1

    def _params(self) -> dict[str, Any]:
        number = self._count
        if self._values is None:
            source = random.Random(f"{self._seed} {number}")
            return {name: domain.sample(source) for name, domain in self.space.items()}
        if (this_round := number // self._size) != self._round:
            source = random.Random(f"{self._seed} round {this_round}")
            self._order, self._round = source.sample(range(self._size), self._size), this_round
        return _point(self._values, self._order[number % self._size])


@own_frames_left_out.in_methods
class GridSearch(_Search):
    """Propose every point of a discrete space once, the last parameter changing first.

    ``len()`` of the search is the number of points. A sweep that continues proposes the points that
    have no trial yet, or whose trial was cancelled.

    Args:
        space: The domain of each parameter: `Int`, `Choice`, or a `Float` with a step.
        direction: Whether the lowest value is the best, or the highest. Default: ``minimize``.
        pruner: What ends weak trials early, by their reports. None: no trial is pruned.

    Raises:
        ConfigurationError: *space* isn't a dict of domains, one of them is infinite, or
            *direction* is wrong.

    Example::

        search = GridSearch({"rate": Choice([0.1, 0.01]), "layers": Int(1, 4)})
        sweep = train.sweep(search, trials=len(search))
    """

    def __init__(
        self,
        space: Mapping[str, Domain],
        *,
        direction: Direction = "minimize",
        pruner: ASHA | None = None,
    ) -> None:
        super().__init__(space, direction, pruner)
        values = _values_of(self.space, math.inf)
        if values is None:
            raise ConfigurationError("GridSearch needs discrete domains: give each Float a step")
        self._values = values
        self._size = math.prod(map(_size_of, values.values()))

    def _begin(self) -> None:
        super()._begin()
        self._next = 0
        self._taken = set[int]()
        """The numbers of the points that have a trial."""

    def __len__(self) -> int:
        return self._size

    def adopt(self, params: Mapping[str, Any], memo: Any) -> Proposal | None:
        """Implement `Optimizer`: take the point from what is left, wherever it is in this grid."""
        if (proposal := super().adopt(params, memo)) is not None:
            number = self._number_of(params)
            following = self._following()
            # A domain may have equal options.
            is_next = following is not None and self._number_of(following) == number
            self._taken.add(self._next if is_next else number)
        return proposal

    def put_back(self, params: Mapping[str, Any]) -> None:
        """Propose this point again; internal."""
        number = self._number_of(params)
        self._taken.discard(number)
        self._next = min(self._next, number)

    def _params(self) -> dict[str, Any] | None:
        if (params := self._following()) is not None:
            self._taken.add(self._next)
        return params

    def _following(self) -> dict[str, Any] | None:
        """Return the first point without a trial, whose number is then `_next`."""
        while self._next in self._taken:
            self._next += 1
        return _point(self._values, self._next) if self._next < self._size else None

    def _number_of(self, params: Mapping[str, Any]) -> int:
        number = 0
        for name, values in self._values.items():
            number = number * _size_of(values) + values.index(params[name])
        return number


def _values_of(space: Mapping[str, Domain], limit: float) -> dict[str, Sequence[Any]] | None:
    """Return the values of each parameter; None if the space has more than *limit* points."""
    values: dict[str, Sequence[Any]] = {}
    for name, domain in space.items():
        found = domain.values()
        if found is None:
            return None
        values[name] = found
    return values if math.prod(map(_size_of, values.values())) <= limit else None


def _size_of(values: Sequence[Any]) -> int:
    if isinstance(values, range):  # may have more values than `len` returns
        return (values[-1] - values[0]) // values.step + 1
    return len(values)


def _point(values: Mapping[str, Sequence[Any]], number: int) -> dict[str, Any]:
    """Return the point of that number; the last parameter changes first."""
    point: dict[str, Any] = {}
    for name in reversed([*values]):
        number, position = divmod(number, _size_of(values[name]))
        point[name] = values[name][position]
    return {name: point[name] for name in values}


def _contains(domain: Domain, value: Any) -> bool:
    values = domain.values()
    if values is not None:
        return value in values
    return (
        isinstance(domain, Float)
        and isinstance(value, float)
        and (domain.low <= value <= domain.high)
    )
