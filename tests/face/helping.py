"""Use each helper of the standard library in a job, and print what differs from a direct call.

A test runs this file as a script, as a cell of a notebook, and as a module of a project; see
test_helpers.py. A kind is a function that makes a value, and one that describes it with plain data.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import contextvars
import dataclasses
import decimal
import enum
import functools
import operator
import pickle
import random
import re
import string
import sys
import threading
import types
import typing
import weakref
import wsgiref.headers
import wsgiref.util
from collections.abc import Callable
from typing import Any

import attrs
import pydantic
import pydantic.dataclasses
import sqlalchemy
from sqlalchemy import orm

KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {}


def kind(make: Callable[[], Any]) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def add(use: Callable[[Any], Any]) -> Callable[[Any], Any]:
        KINDS[use.__name__.removeprefix("use_")] = (make, use)
        return use

    return add


# functools


@functools.lru_cache(maxsize=None)  # noqa: UP033
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.lru_cache(maxsize=7, typed=True)
def limited(n: float) -> str:
    """Return a repr."""
    return repr(n)


@functools.cache
def cached(n: int) -> list[int]:
    return [n]


class Memoized:
    def __init__(self, scale: int) -> None:
        self.scale = scale

    @functools.lru_cache  # noqa: B019
    def times(self, n: int) -> int:
        return self.scale * n

    @staticmethod
    @functools.cache
    def double(n: int) -> int:
        return 2 * n

    @classmethod
    @functools.cache
    def name(cls) -> str:
        return cls.__name__


class Table:
    def __init__(self, size: int) -> None:
        self.size, self.reads = size, 0

    @functools.cached_property
    def rows(self) -> list[int]:
        self.reads += 1
        return [*range(self.size)]


@functools.singledispatch
def describe(value: Any) -> str:
    return "any"


@describe.register
def _(value: int) -> str:
    return "int"


@describe.register(list)
def _(value: list[Any]) -> str:
    return "list of " + ", ".join(describe(item) for item in value)


@describe.register
def describe_table(value: Table) -> str:
    return "table"


class Formatter:
    @functools.singledispatchmethod
    def text(self, value: Any) -> str:
        return "any"

    @text.register
    def _(self, value: int) -> str:
        return "int"

    @functools.singledispatchmethod
    @classmethod
    def named(cls, value: Any) -> str:
        return cls.__name__

    def put(self, key: str, value: int = 0) -> str:
        return f"{key}={value}"

    put_one = functools.partialmethod(put, value=1)


@functools.total_ordering
class Version:
    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self.number == other.number

    def __lt__(self, other: Version) -> bool:
        return self.number < other.number

    __hash__ = None  # type: ignore[assignment]


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return [function(*args), function(*args)]

    return call


@twice
def increment(n: int) -> int:
    """Add one."""
    return n + 1


@contextlib.contextmanager
def opened(events: list[str]) -> Any:
    events.append("in")
    yield events
    events.append("out")


@kind(lambda: fibonacci)
def use_lru_cache(x: Any) -> Any:
    return x(20), x.cache_parameters(), x.__wrapped__(1)


@kind(lambda: limited)
def use_lru_cache_with_a_limit(x: Any) -> Any:
    x.cache_clear()
    return x(1), x(1.0), x(1), x.cache_info(), x.cache_parameters(), x.__doc__, x.__name__


@kind(lambda: cached)
def use_cache(x: Any) -> Any:
    return x(3) is x(3), cached(4)


def memoized() -> Any:
    @functools.cache
    def square(n: int) -> int:
        return n * n

    return square


@kind(memoized)
def use_cache_in_a_function(x: Any) -> Any:
    return x(3), x.cache_info().misses


@kind(lambda: Memoized(3))
def use_memoized_methods(x: Any) -> Any:
    return x.times(4), x.double(5), x.name(), Memoized.double(3), type(x) is Memoized


@kind(lambda: Table(2))
def use_cached_property(x: Any) -> Any:
    return x.rows, x.rows is x.rows, x.reads, Table(3).rows, type(x) is Table


@kind(lambda: describe)
def use_singledispatch(x: Any) -> Any:
    kinds = sorted(kind.__name__ for kind in x.registry)
    return x(1), x([1, "a"]), x(Table(1)), kinds, x.dispatch(int)(1)


@kind(lambda: Formatter())
def use_methods(x: Any) -> Any:
    return x.text(1), x.text("a"), x.named(1), x.put_one("a"), Formatter().text(1)


@kind(lambda: Version(2))
def use_total_ordering(x: Any) -> Any:
    return x > Version(1), x >= Version(2), x <= Version(1), x == Version(2)


@kind(lambda: increment)
def use_wraps(x: Any) -> Any:
    return x(1), x.__wrapped__(1), x.__doc__, x.__qualname__


HANDLERS: list[str] = []
NOTED: list[str] = []


class Handler:
    count = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        HANDLERS.append(cls.__name__)
        Handler.count += 1


class Noting(type):
    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Noting:
        NOTED.append(name)
        return super().__new__(cls, name, bases, {**body, "place": len(NOTED)})

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> None:
        super().__init__(name, bases, body)
        NOTED.append(f"{name} again")


class First(Handler, metaclass=Noting):
    pass


class Second(First):
    pass


@kind(lambda: Second)
def use_class_hooks_that_fill_lists(x: Any) -> Any:
    found = [*HANDLERS], [*NOTED], First.__name__, x.count, x.place, type(x).__name__
    type(x)("Third", (x,), {})  # in a job, too, a new class calls the hooks
    added = HANDLERS.pop(), NOTED.pop(), NOTED.pop()
    Handler.count -= 1
    return found, added


def counter() -> Any:
    count = 0

    def add() -> int:
        nonlocal count
        count += 1
        return count

    def total() -> int:
        return count

    return add, total, lambda: add() + count


@kind(counter)
def use_a_variable_of_several_functions(x: Any) -> Any:
    before = x[1]()
    return x[0]() - before, x[1]() - before, x[2]() - 2 * before, x[1]() - before


@kind(lambda: 1)
def use_submodules_in_nested_functions(x: Any) -> Any:
    schemes = [wsgiref.util.guess_scheme({}) for _ in range(x)]
    return schemes, (lambda: wsgiref.headers.Headers().items())()


@kind(lambda: functools.partial(increment, 3))
def use_partial(x: Any) -> Any:
    return x(), x.args, x.func(4)


@kind(lambda: opened)
def use_contextmanager(x: Any) -> Any:
    events: list[str] = []
    with x(events):
        events.append("within")
    return events


# dataclasses


@dataclasses.dataclass
class Conf:
    rate: float
    steps: int = 3
    tags: list[str] = dataclasses.field(default_factory=list, repr=False)
    scale: dataclasses.InitVar[int] = 2
    _: dataclasses.KW_ONLY
    name: str = dataclasses.field(default="n", metadata={"unit": "none"})
    LIMIT: typing.ClassVar[int] = 5

    def __post_init__(self, scale: int) -> None:
        self.rate *= scale


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Place:
    x: int
    y: int = dataclasses.field(default=0, compare=False)


@kind(lambda: Conf(1.0, name="m"))
def use_dataclass(x: Any) -> Any:
    fields = [
        (
            field.name,
            field.default is dataclasses.MISSING,
            field.default_factory is dataclasses.MISSING,
            field.kw_only,
            field.repr,
            dict(field.metadata),
        )
        for field in dataclasses.fields(x)
    ]
    changed = dataclasses.replace(x, scale=1, steps=4)
    return fields, repr(x), repr(changed), dataclasses.asdict(x), Conf.LIMIT, type(x) is Conf


@kind(lambda: Place(1, 2))
def use_frozen_dataclass(x: Any) -> Any:
    try:
        x.x = 3
    except dataclasses.FrozenInstanceError:
        refused = True
    return x == Place(1), x < Place(2), hash(x) == hash(Place(1)), refused, Place.__slots__, {x: 1}


@kind(lambda: dataclasses.make_dataclass("Made", [("x", int), ("y", int, 5)])(1))
def use_made_dataclass(x: Any) -> Any:
    required = [f.name for f in dataclasses.fields(x) if f.default is dataclasses.MISSING]
    return required, x.x, x.y, type(x).__name__


@kind(lambda: dataclasses.MISSING)
def use_missing(x: Any) -> Any:
    return x is dataclasses.MISSING


# enums


class Color(enum.Enum):
    RED = 1
    GREEN = enum.auto()
    CRIMSON = 1  # noqa: PIE796

    @property
    def shout(self) -> str:
        return self.name + "!"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 5


class Mode(enum.StrEnum):
    READ = enum.auto()


class Flags(enum.Flag):
    A = enum.auto()
    B = enum.auto()


class Planet(enum.Enum):
    EARTH = (1.0, 2.0)

    def __init__(self, mass: float, radius: float) -> None:
        self.mass, self.radius = mass, radius

    @classmethod
    def _missing_(cls, value: object) -> Planet:
        return cls.EARTH


class Status(enum.IntEnum):
    FINE = (200, "fine")
    GOOD = (200, "good")

    def __new__(cls, value: int, phrase: str) -> typing.Self:
        member = int.__new__(cls, value)
        member._value_, member.phrase = value, phrase
        return member


class Amount(decimal.Decimal):
    def __new__(cls, value: int, _unit: str) -> typing.Self:
        return super().__new__(cls, value)


class Price(Amount, enum.Enum):
    LOW = (2, "EUR")

    def __init__(self, value: int, _unit: str) -> None:
        self._value_ = value


class Code(str, enum.Enum):  # noqa: UP042 - its members have values of their own
    BUSY = ("c7", "busy")

    def __new__(cls, code: str, phrase: str) -> typing.Self:
        member = str.__new__(cls, code)
        member._value_ = phrase
        return member


class Step(enum.Enum):
    FIRST = enum.member(functools.partial(max))
    LAST = enum.member(lambda: "last")


@kind(lambda: [Status.FINE, Price.LOW, Code.BUSY])
def use_enum_with_its_own_new(x: Any) -> Any:
    status, price, code = x
    is_same = status is Status.FINE, status is Status["GOOD"], Status(200) is status
    is_same += price is Price.LOW, code is Code("busy")
    return *is_same, status.phrase, status + 1, price + 1, code.upper()


@kind(lambda: [Step.FIRST, Step.LAST])
def use_enum_of_functions(x: Any) -> Any:
    first, last = x
    return first is Step.FIRST, first.value(1, 2), last is Step.LAST, last.value(), len(Step)


@kind(lambda: [Color.RED, Level.HIGH, Mode.READ, Flags.A | Flags.B, Planet.EARTH])
def use_enums(x: Any) -> Any:
    match x[0]:
        case Color.RED:
            matched = "red"
        case _:
            matched = "other"
    identical = [x[0] is Color.RED, x[0] is Color["CRIMSON"], x[1] is Level.HIGH, x[2] is Mode.READ]
    identical += [x[3] == Flags.A | Flags.B, x[4] is Planet.EARTH, Planet(3) is x[4]]
    return matched, identical, x[0].shout, x[1] + 1, x[2].upper(), Flags.A in x[3], x[4].mass


# typing

T = typing.TypeVar("T", bound="Table")
P = typing.ParamSpec("P")
UserId = typing.NewType("UserId", int)
Names = list[str]


class Stack(typing.Generic[T]):
    def __init__(self) -> None:
        self.items: list[T] = []


class Pair(typing.NamedTuple):
    left: int
    right: str = "r"


class Movie(typing.TypedDict, total=False):
    title: typing.Required[str]
    year: int


@typing.runtime_checkable
class HasRows(typing.Protocol):
    @property
    def rows(self) -> list[int]: ...


@typing.overload
def over(x: int) -> int: ...
@typing.overload
def over(x: str) -> str: ...
def over(x: Any) -> Any:
    return x


@kind(
    lambda: [Stack[Table], T, P, UserId, Pair(1), Movie, HasRows, Names, typing.Literal["a"], over]
)
def use_typing(x: Any) -> Any:
    stack, variable, parameters, new, pair, movie, has_rows, names, literal, overloaded = x
    return (
        *(typing.get_origin(stack) is Stack, typing.get_args(stack) == (Table,)),
        *(variable is T, parameters is P, new is UserId, new(3), pair._asdict()),
        *(type(pair) is Pair, movie(title="a"), sorted(movie.__required_keys__)),
        *(isinstance(Table(1), has_rows), names == list[str], typing.get_args(literal)),
        *(overloaded(3), sorted(typing.get_type_hints(Conf))),
    )


# sentinels, registries, contexts

MISSING = object()


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET = _Unset()


def get(mapping: dict[str, int], key: str, default: Any = MISSING, other: Any = UNSET) -> Any:
    if default is MISSING and other is UNSET:
        return "required"
    return mapping.get(key, default)


@kind(lambda: get)
def use_sentinels_in_defaults(x: Any) -> Any:
    return x({}, "a"), x({}, "a", 3), x({}, "a", other=4) is MISSING


@kind(lambda: [MISSING, UNSET])
def use_sentinels(x: Any) -> Any:
    return x[0] is MISSING, x[1] is UNSET


level: contextvars.ContextVar[int] = contextvars.ContextVar("level", default=1)


@kind(lambda: level)
def use_context_variable(x: Any) -> Any:
    token = x.set(2)
    found = level.get()
    x.reset(token)
    return x.name, found, level.get(), x is level


LIVE: weakref.WeakValueDictionary[str, Table] = weakref.WeakValueDictionary()
KEPT = [Table(1)]
LIVE["one"] = KEPT[0]
SEEN: weakref.WeakSet[Table] = weakref.WeakSet(KEPT)
SIZES: weakref.WeakKeyDictionary[Table, int] = weakref.WeakKeyDictionary({KEPT[0]: 1})


@kind(lambda: [LIVE, SEEN, SIZES, KEPT])
def use_weak_registries(x: Any) -> Any:
    live, seen, sizes, kept = x
    added = Table(2)
    live["two"] = added
    seen.add(added)
    return sorted(live), len(seen), [*sizes.values()], live["one"] is kept[0]


REGISTRY: dict[str, type] = {}


class Plugin:
    def __init_subclass__(cls, *, key: str, **more: Any) -> None:
        super().__init_subclass__(**more)
        REGISTRY[key] = cls


class Csv(Plugin, key="csv"):
    def go(self) -> str:
        return super().__repr__()[:1]


class Checked(type):
    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Checked:
        if bases and "required" not in body:
            raise TypeError(f"{name} needs 'required'")
        return super().__new__(cls, name, bases, body)


class Root(metaclass=Checked):
    pass


class Leaf(Root):
    required = 1


class Field:
    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self.name


class Record:
    first = Field()


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self) -> int: ...


class Square(Shape):
    def area(self) -> int:
        return 4


@Shape.register
class Virtual:
    pass


class Greeting(string.Template):
    delimiter = "%"


@kind(lambda: Csv())
def use_init_subclass(x: Any) -> Any:
    return x.go(), REGISTRY["csv"] is Csv, [*REGISTRY], type(x) is Csv


@kind(lambda: Leaf())
def use_checking_metaclass(x: Any) -> Any:
    return x.required, type(type(x)).__name__


@kind(lambda: [Record(), Square(), Virtual(), Greeting("%a")])
def use_class_hooks(x: Any) -> Any:
    record, square, virtual, greeting = x
    return record.first, square.area(), isinstance(virtual, Shape), greeting.substitute(a=1)


class Counter:
    made: typing.ClassVar[int] = 0
    __slots__ = ("__weakref__", "n")

    def __init__(self, n: int) -> None:
        self.n = n
        Counter.made += 1

    def __class_getitem__(cls, item: Any) -> str:
        return f"Counter[{item}]"

    class Inner:
        pass


@kind(lambda: Counter(3))
def use_class_state(x: Any) -> Any:
    before = Counter.made
    Counter(1)
    return x.n, Counter.made - before, Counter[3], Counter.Inner.__qualname__


# values

Point = collections.namedtuple("Point", "x y", defaults=[2])  # noqa: PYI024
OPTIONS = types.MappingProxyType({"a": 1})
WORD = re.compile(r"\w+")
GENERATOR = random.Random(3)
STORAGE = threading.local()
LOCK = threading.Lock()


@kind(lambda: [Point(1), OPTIONS, WORD, GENERATOR, operator.attrgetter("x")])
def use_values(x: Any) -> Any:
    point, options, word, generator, getter = x
    generator.seed(1)
    return point._asdict(), dict(options), word.findall("a b"), generator.random(), getter(point)


@kind(lambda: collections.defaultdict(lambda: Table(1), a=Table(2)))
def use_defaultdict(x: Any) -> Any:
    return x["a"].size, x["b"].size, collections.ChainMap({}, x)["a"].size


# Other libraries


class Model(pydantic.BaseModel):
    rate: float = pydantic.Field(gt=0)
    tags: list[str] = []

    @pydantic.field_validator("tags")
    @classmethod
    def lower(cls, tags: list[str]) -> list[str]:
        return [tag.lower() for tag in tags]


@pydantic.dataclasses.dataclass
class Checkpoint:
    step: int


@pydantic.validate_call
def scaled(x: int, by: float = 2) -> float:
    return x * by


@attrs.frozen
class Attributes:
    x: int
    y: list[int] = attrs.Factory(list)


class Base(orm.DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "user"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    name: orm.Mapped[str]


@kind(lambda: Model(rate="2", tags=["A"]))
def use_pydantic(x: Any) -> Any:
    try:
        Model(rate=-1)
    except pydantic.ValidationError as exc:
        count = exc.error_count()
    return x.model_dump(), type(x) is Model, count, Checkpoint("3").step


@kind(lambda: scaled)
def use_validate_call(x: Any) -> Any:
    try:
        x("a")
    except pydantic.ValidationError as exc:
        count = exc.error_count()
    return x("3"), x(2, by="1.5"), count


@kind(lambda: Attributes(1))
def use_attrs(x: Any) -> Any:
    return x.x, x.y, attrs.asdict(x), [f.default is attrs.NOTHING for f in attrs.fields(Attributes)]


@kind(lambda: "a")
def use_orm_models(x: Any) -> Any:
    engine = sqlalchemy.create_engine("sqlite://")
    Base.metadata.create_all(engine)
    with orm.Session(engine) as session:
        session.add(User(name=x))
        session.commit()
        names = [user.name for user in session.scalars(sqlalchemy.select(User))]
    engine.dispose()
    return names


@kind(lambda: [Table(2), Conf(1.0), Color.RED, Point(1), Counter(1)])
def use_pickle_by_name(x: Any) -> Any:
    table, conf, color, point, counter = pickle.loads(pickle.dumps(x))
    function = pickle.loads(pickle.dumps(describe_table))
    classes = [type(value).__name__ for value in (table, conf, color, point, counter)]
    return classes, type(table) is Table, type(conf) is Conf, color is Color.RED, function(table)


def every_way(names: list[str]) -> Callable[[list[Any]], Any]:
    """Return a function that uses values that it makes, captures, and gets, and returns some."""
    kinds = [KINDS[name] for name in names]
    captured = [make() for make, _ in kinds]

    def call(passed: list[Any]) -> Any:
        used = [
            [use(make()), use(first), use(second)]
            for (make, use), first, second in zip(kinds, captured, passed, strict=True)
        ]
        return used, [make() for make, _ in kinds]

    return call


def compare(names: list[str]) -> None:
    """Compare a job with direct calls, or say that kinetic refuses to submit it."""
    import kinetic
    from kinetic.errors import PackError

    remote = kinetic.run(backend="local", accelerator="cpu")
    try:
        used, returned = remote(every_way(names))([KINDS[name][0]() for name in names])
    except PackError as exc:
        if len(names) > 1:
            for name in names:
                compare([name])
            return
        is_helpful = "a module of the project" in str(exc)
        print(f"{names[0]}: {'refused' if is_helpful else exc}")
        return
    for name, found, last in zip(names, used, returned, strict=True):
        make, use = KINDS[name]
        direct, values = use(make()), [*found, use(last)]
        for way, value in zip(("called", "captured", "passed", "returned"), values, strict=True):
            if value != direct:
                print(f"{name}, {way}: {value} instead of {direct}")


def main(chosen: list[str]) -> None:
    names = chosen or [*KINDS]
    for start in range(0, len(names), 32):  # few jobs, because each imports SQLAlchemy and pydantic
        compare(names[start : start + 32])
    print(len(names), "kinds")


if __name__ == "__main__":
    main(sys.argv[1:])
