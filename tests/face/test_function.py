"""Test decorated functions without submitting: attributes, local calls, errors, pickling."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import kinetic
from kinetic import RemoteFunction
from kinetic.errors import ConfigurationError, DataError
from kinetic.options import Options


@kinetic.run(accelerator="cpu")
def factorial(number: int, *, start: int = 1) -> int:
    """Multiply all numbers up to *number*."""
    return start if number == 0 else number * factorial.local(number - 1, start=start)


@kinetic.run
async def fetch(url: str) -> str:
    return url.upper()


class Model:
    def __init__(self, scale: int) -> None:
        self.scale = scale

    def __repr__(self) -> str:
        return f"Model({self.scale})"

    @kinetic.run(accelerator="cpu")
    def predict(self, value: int) -> int:
        return self.scale * value

    @classmethod
    @kinetic.run(accelerator="cpu")
    def name(cls, suffix: str) -> str:
        return cls.__name__ + suffix

    @staticmethod
    @kinetic.run(accelerator="cpu")
    def double(value: int) -> int:
        return 2 * value


class Adder:
    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, value: int) -> int:
        return value + self.by


# --- attributes ---


def test_a_decorated_function_looks_like_the_function() -> None:
    assert factorial.__name__ == factorial.__qualname__ == "factorial"
    assert factorial.__module__ == __name__
    assert factorial.__doc__ == "Multiply all numbers up to *number*."
    assert list(inspect.signature(factorial).parameters) == ["number", "start"]
    assert inspect.unwrap(factorial) is factorial.__wrapped__
    assert repr(factorial) == "<kinetic function factorial on cpu>"


def test_a_decorated_function_has_the_functions_annotations() -> None:
    hints = {"number": int, "start": int, "return": int}
    partial = kinetic.run(functools.partial(factorial.__wrapped__))
    for function in (factorial, factorial.options(timeout=3), partial):
        assert function.__annotations__ == factorial.__wrapped__.__annotations__
        assert typing.get_type_hints(function) == hints
    assert typing.get_type_hints(Model(2).predict) == {"value": int, "return": int}
    assert not hasattr(factorial, "anything")


@pytest.mark.skipif(sys.version_info < (3, 14), reason="computed on definition before 3.14")
def test_annotations_are_computed_on_access() -> None:
    namespace: dict[str, Any] = {}
    code = "def early(x: Late) -> Late: ..."
    exec(compile(code, "<cell>", "exec", dont_inherit=True), namespace)
    decorated = kinetic.run(namespace["early"])
    with pytest.raises(NameError):
        _ = decorated.__annotations__
    namespace["Late"] = int
    assert decorated.__annotations__ == {"x": int, "return": int}
    assert typing.get_type_hints(decorated) == {"x": int, "return": int}


def test_attributes_of_the_function_are_kept_and_hide_no_method() -> None:
    def plain() -> None: ...

    plain.mark = "marked"  # type: ignore[attr-defined]
    plain.options = "hidden"  # type: ignore[attr-defined]
    decorated = kinetic.run(plain)
    assert decorated.mark == "marked"  # type: ignore[attr-defined]
    assert callable(decorated.options)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="inspect has no marker before 3.12")
def test_inspect_recognizes_an_async_function() -> None:
    assert inspect.iscoroutinefunction(fetch)
    assert not inspect.iscoroutinefunction(factorial)


def test_options_returns_a_copy_with_other_settings() -> None:
    other = factorial.options(accelerator="l4", timeout=3)
    assert factorial.__kinetic__ == Options(accelerator="cpu")
    assert other.__kinetic__ == Options(accelerator="l4", timeout=3)
    assert other.local(3) == 6
    with pytest.raises(ConfigurationError):
        factorial.options(accelerator="abacus")


def test_all_settings_of_the_public_package_may_be_positional() -> None:
    data = {"/data": kinetic.Data("gs://bucket/x/")}
    decorated = kinetic.run(
        "l4", "prebuilt", "r", "z", "p", ["A_*"], "c", "gke", "ns", data, True, "gs://o/", False
    )(factorial.__wrapped__)
    assert decorated.__kinetic__ == Options(
        accelerator="l4",
        container_image="prebuilt",
        base_image_repo="r",
        zone="z",
        project="p",
        capture_env_vars=("A_*",),
        cluster="c",
        backend="gke",
        namespace="ns",
        volumes=data,
        spot=True,
        output_dir="gs://o/",
    )


# --- local calls ---


@pytest.mark.parametrize(
    ("function", "args", "value"),
    [
        (factorial, (4,), 24),
        (kinetic.run(lambda number: number + 1), (1,), 2),
        (kinetic.run(functools.partial(divmod, 7)), (2,), (3, 1)),
        (kinetic.run(Adder(3)), (4,), 7),
        (kinetic.run(len), ("abc",), 3),
        (Model(3).predict, (4,), 12),
        (Model.predict, (Model(3), 4), 12),
        (Model.double, (4,), 8),
        (Model(3).predict.options(cpu=2), (4,), 12),
    ],
    ids=str,
)
def test_local_calls_the_function_in_this_process(
    function: RemoteFunction[..., Any], args: tuple[Any, ...], value: Any
) -> None:
    assert function.local(*args) == value


async def test_local_of_an_async_function_is_its_coroutine() -> None:
    assert await fetch.local("abc") == "ABC"


def test_local_gets_the_path_of_data_as_a_job_does(tmp_path: Path) -> None:
    class Pair(typing.NamedTuple):
        folder: Any
        number: int

    data, path, plain = kinetic.Data(tmp_path), str(tmp_path), [1]
    plain.append(plain)  # type: ignore[arg-type]  # a list in itself

    @kinetic.run
    def given(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    args, kwargs = given.local(data, [data, (data,)], Pair(data, 2), plain, named={"key": data})
    assert args[:3] == (path, [path, (path,)], Pair(path, 2)) and args[3] is plain
    assert kwargs == {"named": {"key": path}}
    with pytest.raises(DataError, match="gs://bucket/words/: only a job downloads it"):
        given.local([kinetic.Data("gs://bucket/words/")])


def test_a_class_method_is_bound_to_its_class() -> None:
    bound = Model.name
    if sys.version_info < (3, 13):  # since 3.13, classmethod binds only calls
        assert bound.local("!") == "Model!"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (functools.partial(divmod, 7), "divmod"),
        (functools.partial(functools.partial(factorial.__wrapped__, 3)), "factorial"),
        (Adder(3), "Adder"),
        (lambda: None, "<lambda>"),
    ],
)
def test_a_callable_without_a_name_gets_one(function: Callable[..., Any], name: str) -> None:
    assert kinetic.run(function).__name__ == name


# --- errors ---


class WithProperty:
    @property
    def here(self) -> int:
        return 1


def generator() -> Any:
    yield 1


async def stream() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (classmethod(factorial.__wrapped__), "goes below @classmethod"),
        (staticmethod(factorial.__wrapped__), "goes below @staticmethod"),
        (functools.cache(factorial.__wrapped__), "below @cache"),
        (WithProperty.here, "not property"),
        (Model, "can't run the class Model"),
        (factorial, r"use factorial\.options"),
        (generator, "return a list"),
        (stream, "return a list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("bare", [True, False])
def test_a_callable_that_cannot_be_a_job_is_refused(
    function: Any, message: str, bare: bool
) -> None:
    with pytest.raises(TypeError, match=message):
        kinetic.run(function) if bare else kinetic.run()(function)


def test_the_error_about_another_argument_depends_on_its_place() -> None:
    with pytest.raises(TypeError, match="decorates functions, not int"):
        kinetic.run()(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="accelerator must be a name"):
        kinetic.run(3)  # type: ignore[call-overload]


def test_a_function_and_settings_in_one_call_are_refused() -> None:
    with pytest.raises(TypeError, match=r"write kinetic\.run\(\.\.\.\)\(function\)"):
        kinetic.run(factorial.__wrapped__, spot=True)  # type: ignore[call-overload]


# --- pickling ---

CALL = """
import pickle, sys
sys.modules["kinetic"] = None
function = pickle.load(sys.stdin.buffer)
print(type(function).__name__, function(*{args}))
"""


def call_without_kinetic(pickled: bytes, args: tuple[Any, ...], folder: Path) -> str:
    """Unpickle and call the function in an interpreter without kinetic; return its output."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", CALL.format(args=args)],
        cwd=folder,
        input=pickled,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode().strip()


def closures() -> tuple[Callable[..., Any], ...]:
    offset = 10

    @kinetic.run(accelerator="cpu")
    def even(number: int) -> bool:
        return number == 0 or odd(number - 1)

    @kinetic.run(accelerator="cpu")
    def odd(number: int) -> bool:
        return number != 0 and even(number - 1)

    @kinetic.run(accelerator="cpu")
    def countdown(number: int) -> int:
        return offset if number == 0 else countdown(number - 1)

    class Counter:
        step = 2

        @kinetic.run(accelerator="cpu")
        def add(self, number: int) -> int:
            return number if number > 6 else self.add(number + self.step)

    return even, countdown, Counter().add


@pytest.mark.parametrize(
    ("index", "args", "answer"), [(0, (7,), "False"), (1, (3,), "10"), (2, (1,), "7")]
)
@pytest.mark.parametrize("start", ["the decorated one", "the plain one"])
def test_a_decorated_function_is_pickled_as_the_plain_function(
    index: int, args: tuple[Any, ...], answer: str, start: str, tmp_path: Path
) -> None:
    """Each function calls itself or another one by its decorated name."""
    function: Any = closures()[index]
    pickled = cloudpickle.dumps(function if start == "the decorated one" else function.__wrapped__)
    kind = "method" if index == 2 else "function"
    assert call_without_kinetic(pickled, args, tmp_path) == f"{kind} {answer}"


def test_a_bound_method_is_pickled_with_its_object() -> None:
    method = pickle.loads(cloudpickle.dumps(Model(3).predict))
    assert method(4) == 12


@pytest.mark.parametrize("pickler", ["dumps", "_dumps"])  # in C, and in Python
def test_pickle_writes_the_name_of_a_decorated_function(pickler: str) -> None:
    """So pools of multiprocessing take it. Its name refers to what decorates the function."""
    values = [factorial, factorial.local, factorial.options(timeout=9), kinetic.run(closures)]
    same, local, changed, plain = pickle.loads(getattr(pickle, pickler)(values))
    assert same is factorial and local(3) == 6 and plain is closures
    assert changed.__kinetic__ == factorial.options(timeout=9).__kinetic__


def test_copies_are_the_decorated_function_itself() -> None:
    assert copy.copy(factorial) is factorial
    assert copy.deepcopy({"f": factorial})["f"] is factorial
