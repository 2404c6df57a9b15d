"""Test pickled calls: contents, data, errors, warnings, and threads."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import importlib
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest

from kinetic._packing import culprit, payload
from kinetic._packing.discover import Project, find_project
from kinetic._runner.protocol import pickles
from kinetic._runner.protocol.spool import Spooled
from kinetic.data import Data
from kinetic.errors import DataError, PackError

from .conftest import Make, Python, last_line

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def project() -> Project:
    return Project(
        root=REPOSITORY,
        entry_dir=REPOSITORY / "tests/pack",
        cwd="",
        sys_path=("",),
        by_value=frozenset({"tests.pack"}),
    )


Dump = Callable[..., Spooled]


@pytest.fixture
def dump(project: Project, tmp_path: Path) -> Dump:
    """Return a function that pickles arguments of the call ``f(x, y, ...)``."""

    def dump_arguments(*args: Any, table: payload.DataTable | None = None, **kwargs: Any) -> Any:
        table = payload.DataTable() if table is None else table
        return payload.dump_arguments(
            args, kwargs, project, table, lambda: tmp_path, "f", function=f
        )

    return dump_arguments


def f(x: Any, y: Any = None, *rest: Any, **more: Any) -> Any:
    return x


def project_of(function: Any) -> Project:
    return find_project(function, environ=dict(os.environ), cwd=Path.cwd())


@pytest.fixture
def imported(tmp_path: Path, make: Make) -> Iterator[Callable[..., ModuleType]]:
    """Return a function that writes modules of a project and imports one of them."""
    root, before = tmp_path / "project", set(sys.modules)
    sys.path.insert(0, str(root))

    def import_module(name: str, /, **files: str) -> ModuleType:
        make(root, {"pyproject.toml": "", **{f"{stem}.py": text for stem, text in files.items()}})
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield import_module
    sys.path.remove(str(root))
    for name in set(sys.modules) - before:
        if str(root) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def loaded(pickled: Spooled) -> Any:
    content = pickled.content
    return pickles.load(content) if isinstance(content, bytes) else pickles.load_file(content)


def test_arguments_unpickle_unchanged(dump: Dump) -> None:
    shared = [1]
    args, kwargs = loaded(dump(shared, shared, z={"a": shared}))
    assert args == ([1], [1])
    assert kwargs == {"z": {"a": [1]}}
    assert args[0] is args[1] is kwargs["z"]["a"]


@pytest.mark.parametrize("size", [10, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_large_content_is_in_a_private_file(size: int, dump: Dump, tmp_path: Path) -> None:
    pickled = dump(b"x" * size)
    content = pickled.content
    if isinstance(content, Path):
        assert pickled.size > payload.MEMORY_BYTES
        assert content.parent == tmp_path
        assert content.stat().st_mode & 0o777 == 0o600
        content = content.read_bytes()
    else:
        assert pickled.size <= payload.MEMORY_BYTES
    assert len(content) == pickled.size
    assert hashlib.sha256(content).hexdigest() == pickled.digest
    assert loaded(pickled) == ((b"x" * size,), {})


def test_arrays_unpickle_equal_and_writable(dump: Dump) -> None:
    array = np.arange(500_000.0)
    views = [array, array[::2], np.asfortranarray(array.reshape(1000, 500))]
    (first, second, third), _ = loaded(dump(*views))
    assert all(np.array_equal(a, b) for a, b in zip(views, (first, second, third), strict=True))
    first[0] = 7  # must not raise


@pytest.mark.parametrize("text", ["", "a", "abc", "abcdefg"])
def test_arrays_unpickle_aligned(dump: Dump, text: str) -> None:
    odd = np.ones(70_001, np.uint8)
    arrays = [odd, np.arange(50_000.0), odd, np.ones(9_999, complex), np.ones((300, 100))]
    copies, _ = loaded(dump(text, *arrays, odd.tobytes()))
    assert copies[0] == text and copies[-1] == odd.tobytes()
    for array, copy in zip(arrays, copies[1:], strict=False):
        assert copy.flags.aligned and np.array_equal(copy, array)


# --- Data -------------------------------------------------------------------------------


class Pair(NamedTuple):
    a: Any
    b: Any


class Slotted:
    __slots__ = ("data",)


def test_data_in_any_container_is_added_to_the_table(dump: Dump, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    first, second, same = Data(str(tmp_path)), Data(str(tmp_path / "d")), Data(str(tmp_path))
    held = Slotted()
    held.data = second
    by_name = collections.defaultdict(list, {"k": [first]})
    table = payload.DataTable([second])
    dump([first, {"k": (same,)}], Pair(second, by_name), held, k=first, table=table)
    assert [first is item for item in table.items] == [False, True, False]
    assert table.items[0] is second
    assert table.items[2] is same


def test_one_data_in_two_volumes_has_two_entries(tmp_path: Path) -> None:
    data = Data(str(tmp_path))
    table = payload.DataTable([data, data])
    assert table.items == (data, data)
    assert table.index(data) == 0


def test_an_alias_stays_one_object(dump: Dump, tmp_path: Path) -> None:
    """The job computes the path once, however often the data occurs."""
    data = Data(str(tmp_path))
    content = dump([data, data, {"k": data}]).content
    assert isinstance(content, bytes)
    assert content.count(b"data_path") == 1


def test_data_that_the_function_captures_is_found(project: Project, tmp_path: Path) -> None:
    data = Data(str(tmp_path))
    table = payload.DataTable()
    payload.dump_function(lambda: data, project, table)
    assert table.items == (data,)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda data: {data}, "argument 'x' has a Data in a set"),
        (lambda data: [1, 2, frozenset({data})], r"argument 'x'\[2\] has a Data in a set"),
        (lambda data: {"k": [{data: 1}]}, r"argument 'x'\['k'\]\[0\] has a Data as a key"),
        (lambda data: [({"a": data}, {data})], r"argument 'x'\[0\]\[1\] has a Data in a set"),
        (lambda data: functools.partial(f, {data}), "argument 'x'.* has a Data in a set"),
    ],
)
def test_data_cannot_be_in_a_set_or_a_key(
    wrap: Callable[[Data], Any], message: str, dump: Dump, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        dump(wrap(Data(str(tmp_path))))
    assert isinstance(caught.value, ValueError)
    assert caught.value.path == str(tmp_path)
    assert not list(tmp_path.glob("*.pkl"))


def test_containers_that_contain_themselves_may_hold_data(dump: Dump, tmp_path: Path) -> None:
    value: list[Any] = [Data(str(tmp_path))]
    value.append((value, {"self": value}))
    dump(value)


# --- errors -----------------------------------------------------------------------------


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("not picklable")


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("args", "kwargs", "culprit"),
    [
        ((1, LOCK), {}, "argument 'y'"),
        ((1, 2, 3, LOCK), {}, "argument 'rest'[1]"),
        ((1,), {"key": LOCK}, "argument 'key'"),
        (([1, {"a": [0, LOCK]}],), {}, "argument 'x'[1]['a'][1]"),
        ((Holder(model=Holder(lock=LOCK)),), {}, "argument 'x'.model.lock"),
        (({1: Stubborn()},), {}, "argument 'x'[1]"),
        ((functools.partial(f, 1, y=LOCK),), {}, "argument 'x'.keywords['y']"),
        ((Holder(lock=LOCK).__init__,), {}, "argument 'x'.__self__.lock"),
        (([*range(50_000), LOCK],), {}, "argument 'x'[50000]"),
        ((collections.OrderedDict(a=LOCK),), {}, "argument 'x'['a']"),
        ((collections.deque([1, LOCK]),), {}, "argument 'x'[1]"),
        ((open,), {"y": (i for i in [1])}, "argument 'y'"),
    ],
)
def test_the_argument_that_does_not_pickle_is_named(
    args: tuple[Any, ...], kwargs: dict[str, Any], culprit: str, dump: Dump, tmp_path: Path
) -> None:
    with pytest.raises(PackError) as caught:
        dump(*args, **kwargs)
    assert caught.value.culprit == culprit
    assert str(caught.value).startswith(culprit)  # the cause comes first
    assert not list(tmp_path.glob("*.pkl"))
    assert not cloudpickle.list_registry_pickle_by_value()


@pytest.mark.skipif(sys.version_info < (3, 14), reason="fails before 3.14 on definition")
def test_an_argument_is_named_although_annotations_cannot_be_computed(project: Project) -> None:
    namespace: dict[str, Any] = {}
    code = "def annotated(first: missing.Name, second: missing.Name): ..."
    exec(compile(code, "<cell>", "exec", dont_inherit=True), namespace)
    with pytest.raises(PackError) as caught:
        payload.dump_arguments(
            (1, LOCK),
            {},
            project,
            payload.DataTable(),
            lambda: REPOSITORY,
            "f",
            function=namespace["annotated"],
        )
    assert caught.value.culprit == "argument 'second'"


def helper_with_lock() -> Any:
    return LOCK


def calls_helper() -> Any:
    return helper_with_lock()


def closes_over(value: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return value

    return inner


def recursive(n: int) -> Any:
    return recursive(n - 1) if n else LOCK


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (helper_with_lock, "global 'LOCK'"),
        (calls_helper, "global 'helper_with_lock', global 'LOCK'"),
        (closes_over(LOCK), "captured variable 'value'"),
        (closes_over({"deep": [LOCK]}), "captured variable 'value'['deep'][0]"),
        (closes_over(helper_with_lock), "captured variable 'value', global 'LOCK'"),
        (lambda x=LOCK: x, "default of 'x'"),
        (lambda *, x=LOCK: x, "default of 'x'"),
        (recursive, "global 'LOCK'"),
        (functools.partial(f, LOCK), "function 'functools.partial(...)'.args[0]"),
        (Holder(lock=LOCK).__init__, "function 'Holder.__init__'.__self__.lock"),
    ],
)
def test_the_captured_variable_that_does_not_pickle_is_named(
    function: Any, expected: str, project: Project
) -> None:
    with pytest.raises(PackError, match="cannot be shipped") as caught:
        payload.dump_function(function, project, payload.DataTable())
    found = caught.value.culprit
    if isinstance(function, functools.partial):
        assert found.endswith(".args[0]")
    else:
        assert found == expected


def test_too_deep_a_structure_is_an_error_not_a_crash(dump: Dump) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(PackError, match="recursion") as caught:
        dump(deep)
    assert caught.value.culprit.startswith("argument 'x'")
    while deep:  # otherwise freeing it would recurse as deep
        deep = deep[0]


def test_the_search_for_the_culprit_has_a_time_limit() -> None:
    tried: list[Any] = []

    def failure(_: object, value: Any) -> Exception | None:
        tried.append(value)
        if len(tried) == 4:  # this attempt exceeds the limit
            threading.Event().wait(1.1)
        return ValueError("no")

    found = culprit.find([culprit.Part("x", [[[[[[[[[[0]]]]]]]]]])], failure, bool, seconds=1.0)
    assert found is not None
    assert found.location.startswith("x[0]")
    assert len(tried) < 10


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path: Path, python: Python) -> None:
    script = """
import json, os, pathlib, resource, signal
from kinetic._packing import discover
from kinetic._packing import payload
from kinetic.errors import PackError
project = discover.find_project(len, environ=os.environ, cwd=pathlib.Path.cwd())
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
pathlib.Path("spool").mkdir()
try:
    payload.dump_arguments((bytes(5_000_000),), {}, project, payload.DataTable(),
                           lambda: pathlib.Path("spool"), "f")
except PackError as exc:
    print(json.dumps([str(exc), os.listdir("spool")]))
"""
    message, left = last_line(python("-c", script, cwd=tmp_path))
    assert "space" in message
    assert left == []


# --- warnings ---------------------------------------------------------------------------


def test_the_warning_of_a_large_function_names_its_captured_variables(
    project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    weights, small = b"w" * 2_000_000, 1

    def train() -> Any:
        return weights, small

    payload.dump_function(train, project, payload.DataTable())
    (record,) = caplog.records
    assert "captured variable 'weights' (2.0 MB)" in record.getMessage()
    assert "small" not in record.getMessage()


def test_the_warning_of_large_arguments_names_them(
    dump: Dump, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_PAYLOAD_SIZE_WARN_MB", "1.5")
    dump(b"x" * 1_400_000)
    assert not caplog.records
    dump(b"x" * 1_400_000, y=np.zeros(100_000))
    (record,) = caplog.records
    assert "argument 'x' (1.4 MB), argument 'y' (800 kB)" in record.getMessage()


# --- concurrent pickling -----------------------------------------------------------------


def test_threads_may_pickle_functions_of_the_same_modules(
    imported: Callable[..., ModuleType], tmp_path: Path
) -> None:
    """Every pickle has the functions and classes of these modules by value."""
    module = imported(
        "threads_main",
        threads_main="import threads_helper\ndef train(): return threads_helper.value()\n",
        threads_helper="def value(): return 7\nclass Config:\n    def x(self): return 1\n",
    )
    by_value = frozenset({"threads_main", "threads_helper"})
    project = dataclasses.replace(project_of(module.train), by_value=by_value)
    wrong: list[object] = []

    def submit() -> None:
        for _ in range(30):
            table = payload.DataTable()
            function = payload.dump_function(module.train, project, table)
            config = module.threads_helper.Config()
            args = payload.dump_arguments((config,), {}, project, table, lambda: tmp_path, "train")
            for stored in (function, args):
                assert isinstance(stored.content, bytes)
                if b"_make_function" not in stored.content or b"subimport" in stored.content:
                    wrong.append(stored.content)

    threads = [threading.Thread(target=submit) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not cloudpickle.list_registry_pickle_by_value()


def test_modules_registered_by_the_user_stay_registered(
    imported: Callable[..., ModuleType],
) -> None:
    module = imported("registered_main", registered_main="def train(): return 1\n")
    project = project_of(module.train)
    cloudpickle.register_pickle_by_value(module)
    try:
        payload.dump_function(module.train, project, payload.DataTable())
        assert cloudpickle.list_registry_pickle_by_value() == {"registered_main"}
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.skipif(sys.platform == "darwin", reason="fork is not safe there")
def test_a_process_forked_in_the_middle_of_a_dump_can_dump(
    tmp_path: Path, make: Make, python: Python
) -> None:
    make(
        tmp_path / "project",
        {
            "setup.py": "",
            "mid.py": "def value(): return 1\n",
            "run.py": """
            import os, pathlib, sys, mid, cloudpickle
            from kinetic._packing import discover
            from kinetic._packing import payload
            class Forks:
                def __reduce__(self):
                    if os.fork() == 0:
                        assert not cloudpickle.list_registry_pickle_by_value()
                        dump(mid.value)
                        os._exit(0)
                    assert os.wait()[1] == 0
                    return int, ()
            def train(): return mid.value(), forks
            forks = Forks()
            def dump(function): payload.dump_function(function, project, payload.DataTable())
            project = discover.find_project(mid.value, environ=os.environ, cwd=pathlib.Path.cwd())
            dump(train)
            """,
        },
    )
    python("run.py", cwd=tmp_path / "project")


@dataclasses.dataclass
class Point:
    x: float


def test_pickles_of_the_same_arguments_are_the_same(dump: Dump) -> None:
    values = [1, "a", {"k": [1.5]}, (None, True), Point(1.0)]
    assert dump(values).digest == dump(values).digest
    assert json.dumps(dump(random.Random(0).random()).size)


SCRIPT = """
import dataclasses, enum
import cloudpickle
from kinetic._runner.protocol import pickles

class State(enum.Enum):
    NEW = 1

class Shape:
    def check(self, kind):
        return kind in {"square", "circle", "line", "point"}

    @dataclasses.dataclass(slots=True)
    class Part(dict[str, int]):
        x: int

        @property
        def pair(self):
            return [x for x in (1, 2)]

class Opaque:
    def __getattr__(self, name):
        raise RuntimeError(name)

class Holder:
    held = Opaque()

pickles.dumps(Holder)
classes = State, Shape, Shape.Part
pickles.dumps(classes)
print(*map(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get, classes))
"""


def test_each_process_of_a_script_gives_its_classes_the_same_ids(
    tmp_path: Path, python: Python
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    seeds = ("1", "2", "3")  # of the order of sets
    ids = {python("script.py", cwd=tmp_path, PYTHONHASHSEED=seed) for seed in seeds}
    assert [it.rpartition(":")[0] for it in ids.pop().split()] == [
        "__main__:State",
        "__main__:Shape",
        "__main__:Shape.Part",
    ]
    assert not ids, "they differ"


def test_a_cell_that_runs_again_makes_another_class() -> None:
    module = sys.modules["cells"] = ModuleType("cells")
    cloudpickle.register_pickle_by_value(module)
    try:
        cell = compile("class Point:\n    pass\n", "<cell>", "exec", dont_inherit=True)
        exec(cell, vars(module))
        old = module.Point()
        sent = pickles.dumps(old)
        exec(cell, vars(module))
        new = module.Point()
        first, second = pickles.load(pickles.dumps((old, new)))
        assert type(first) is type(old)
        assert type(second) is type(new) is not type(old)
        assert type(pickles.load(sent)) is module.Point, "the program names this class now"
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules["cells"]


def test_reading_the_annotations_of_a_class_does_not_change_its_pickle(dump: Dump) -> None:
    namespace: dict[str, Any] = {}
    code = "class Here:\n    x: int\n    y: str\n"
    exec(compile(code, "<cell>", "exec", dont_inherit=True), namespace)
    before = dump(namespace["Here"]).digest
    assert list(namespace["Here"].__annotations__) == ["x", "y"]
    assert dump(namespace["Here"]).digest == before
