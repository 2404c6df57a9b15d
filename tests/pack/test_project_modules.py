"""Test that a job imports the project's modules, and sees what the program changed in them."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kinetic._packing import changes, discover, payload, source_text
from kinetic._packing.modules import Modules, PicklingMode
from kinetic._runner.protocol import pickles, stand_ins
from kinetic.errors import PackError

from .conftest import Make

Write = Callable[..., Any]


@pytest.fixture
def write(tmp_path: Path, make: Make) -> Iterator[Write]:
    """Return a function that writes a project, and imports modules of it by their names."""
    before = set(sys.modules)

    def write_project(*names: str, **files: str) -> list[ModuleType]:
        root = tmp_path / "project"
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
        texts = {f"{stem.replace('__in__', '/')}.py": text for stem, text in files.items()}
        make(root, {"pyproject.toml": "", **texts})
        importlib.invalidate_caches()
        return [importlib.import_module(name) for name in names]

    yield write_project
    sys.path[:] = [entry for entry in sys.path if not entry.startswith(str(tmp_path))]
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def needed(function: Any) -> changes.Changes:
    """Return what a call of *function* needs."""
    project = discover.find_project(function, environ=dict(os.environ), cwd=Path.cwd())
    return changes.find([function], Modules(project))


def found(function: Any) -> dict[str, dict[str, Any]]:
    """Return the changed values that a call of *function* needs."""
    return needed(function).values


VALUES = """
    import os
    RATE = 1
    NAME: str = "a"
    FLAG = False
    TABLE = {}
    NESTED = [1, (2, None)]
    HERE = os.path.dirname(__file__)
    TWICE = RATE * 2
    try:
        import no_such_module
        FAST = True
    except ImportError:
        FAST = False
    NAMES = []
    NAMES.append(__file__)
    class Config:
        lr = 0.1
        class Inner:
            depth = 3
    def use(): return RATE
    def count():
        global RATE
        RATE += 1
    """


def test_an_unchanged_module_has_no_changes(write: Write, caplog: Any) -> None:
    (module,) = write("plain_values", plain_values=VALUES)
    assert found(module.use) == {}
    assert not caplog.records


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("RATE = 2", {"RATE": 2}),
        ("RATE = True", {"RATE": True}),  # True == 1
        ("NAME = None", {"NAME": None}),
        ("TABLE['a'] = (1, {'b': [2]})", {"TABLE": {"a": (1, {"b": [2]})}}),
        ("NESTED.append(3)", {"NESTED": [1, (2, None), 3]}),
        ("Config.lr = 0.5", {"Config.lr": 0.5}),
        ("Config.Inner.depth = 4", {"Config.Inner.depth": 4}),
        ("NEW = 'new'", {"NEW": "new"}),
        ("count()", {"RATE": 2}),
        # The job computes these values itself.
        ("HERE = '/else'", {}),
        ("TWICE = 5", {}),
        ("FAST = True", {}),
        ("NAMES.append('x')", {}),
    ],
)
def test_plain_values_that_differ_from_the_file_are_changes(
    change: str, expected: dict[str, Any], write: Write
) -> None:
    (module,) = write("plain_values", plain_values=VALUES)
    exec(change, vars(module))
    vars(module).pop("__builtins__")
    assert found(module.use) == ({"plain_values": expected} if expected else {})


def test_the_type_of_a_changed_value_counts(write: Write) -> None:
    (module,) = write("typed_value", typed_value="ONE = 1\ndef use(): return ONE\n")
    module.ONE = 1.0
    assert found(module.use) == {"typed_value": {"ONE": 1.0}}


def test_a_value_imported_by_name_is_compared_with_its_origin(write: Write) -> None:
    """A program may change the origin before or after another module imports the name."""
    first, second = write(
        "early_user",
        "name_origin",
        name_origin="RATE = 1\nTABLE = {}\n",
        early_user="from name_origin import RATE, TABLE as table\ndef use(): return RATE, table\n",
        late_user="from name_origin import RATE\ndef use(): return RATE\n",
    )
    second.RATE = 2
    second.TABLE["a"] = 1
    (late,) = write("late_user")
    assert found(late.use) == {"late_user": {"RATE": 2}}
    early = found(first.use)
    assert early == {"early_user": {"table": {"a": 1}}}
    assert early["early_user"]["table"] is second.TABLE


def test_modules_that_the_call_uses_are_searched(write: Write) -> None:
    files = {
        "search__in____init__": "",
        "search__in__deep": "import search.settings\nclass Tool:\n    def go(self): return 1\n",
        "search__in__settings": "RATE = 1\n",
        "search__in__lazy": "RATE = 1\n",
        "search__in__unused": "RATE = 1\n",
        "search__in__start": """
            from search.deep import Tool
            def deep():
                import search.settings
                return Tool().go(), search.settings.RATE
            def lazily():
                from . import lazy
                return lazy.RATE
            def beside():
                import search.deep
                return search.lazy.RATE
            """,
    }
    start, settings, lazy, unused = write(
        *(f"search.{name}" for name in ("start", "settings", "lazy", "unused")), **files
    )
    settings.RATE = lazy.RATE = unused.RATE = 2
    assert found(start.deep) == {"search.settings": {"RATE": 2}}
    assert found(start.lazily) == found(start.beside) == {"search.lazy": {"RATE": 2}}
    assert "search.lazy" in needed(start.beside).imports


REPLACED = """
    import functools
    def load(): return 1
    class Model:
        rate = 1
        def __new__(cls): return super().__new__(cls)
        def __init_subclass__(cls): pass
        def __class_getitem__(cls, key): return cls
        def fit(self): return 1
        class Inner: pass
    @functools.cache
    def cached(): return 1
    client = None
    lazy = None
    registry = {}
    def connect():
        global lazy
        lazy = object()
    @functools.singledispatch
    def area(shape): return 0
    from origin_of_fetch import fetch
    from json import dumps
    def use(): return load(), Model, client, lazy, registry, cached, area(1), fetch, dumps
    """


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("load = lambda: 2", "load"),
        ("load = len", "load"),
        ("Model = type('Model', (), {'__module__': '__main__'})", "Model"),
        ("client = object()", "client"),
        ("cached = __import__('unittest.mock').mock.Mock()", "cached"),
        ("registry['mine'] = type('Mine', (), {'__module__': '__main__'})", "registry"),
        ("Model.rate = type('Mine', (), {'__module__': '__main__'})()", "Model.rate"),
        ("Model.fit = lambda self: 2", "Model.fit"),
        ("fetch = __import__('textwrap').dedent", "fetch"),
        ("Model.Inner = dict", "Model.Inner"),
        ("Model = __import__('collections').OrderedDict", "Model"),
        ("load = __import__('functools').partial(len, 'a')", "load"),
        ("load = __import__('textwrap').dedent", "load"),
        ("Model.fit = __import__('textwrap').dedent", "Model.fit"),
        ("load = __import__('unittest.mock').mock.create_autospec(load)", "load"),
        ("area.register(bytes, eval('lambda shape: 1', {'__name__': '__main__'}))", "area"),
        ("load = __import__('functools').cache(load)", ""),
        ("connect()", ""),
        ("registry['x'] = object()", ""),
        ("cached()", ""),
    ],
)
def test_a_replacement_is_named_once(
    change: str, named: str, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"replaced_{abs(hash(change))}"
    files = {name: REPLACED, "origin_of_fetch": "def fetch(): return 1\n"}
    (module,) = write(name, **files)
    exec(change, vars(module))
    vars(module).pop("__builtins__")
    for _ in range(2):
        found(module.use)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(named)
    if named:
        assert f"{name}.{named}" in messages[0] and f"KINETIC_BY_VALUE={name}" in messages[0]


GENERATED = """
    import abc, dataclasses, enum, functools, typing
    import hooks
    class Clip(hooks.Wrapping):
        def transform(self, x): return x
    class Loose(hooks.Replacing):
        def transform(self, x): return x
    class Meta(metaclass=hooks.Meta):
        def transform(self, x): return x
    @hooks.decorated
    class Decorated:
        def transform(self, x): return x
        class Inner:
            def transform(self, x): return x
    @dataclasses.dataclass(order=True)
    class Point:
        x: int = 1
    class Pair(typing.NamedTuple):
        x: int
        def total(self): return self.x
    class Color(enum.Enum):
        RED = 1
        def label(self): return self.name
    class Error(Exception): pass
    Error.__module__ = "builtins"
    class Renamed(Exception):
        __module__ = "builtins"
    class Generic(typing.Generic[typing.TypeVar("T")]):
        @property
        def rate(self): return 1
        def get(self): return self.rate
    if typing.TYPE_CHECKING:
        def load(): return 1
    else:
        load = functools.partial(int, 1)
    def slow(): return 1
    engine = None
    hooks.wrap_all(globals())
    def use():
        return Clip, Loose, Meta, Decorated, Point, Pair, Color, Error, Renamed, Generic, load, slow
    """

HOOKS = """
    import functools
    import generated
    def wrap(function):
        @functools.wraps(function)
        def inner(*args): return function(*args)
        return inner
    class Wrapping:
        def __init_subclass__(cls): cls.transform = wrap(cls.transform)
    class Replacing:
        def __init_subclass__(cls): cls.transform = lambda self, x: x
    class Meta(type):
        def __init__(cls, *args): cls.transform = lambda self, x: x
    def decorated(cls):
        cls.Inner.transform = cls.transform = lambda self, x: x
        return cls
    def wrap_all(space):
        space["slow"] = wrap(space["slow"])
    def start():
        generated.engine = object()
    """


def test_what_decorators_and_hooks_make_is_no_replacement(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    module, hooks = write("generated", "hooks", generated=GENERATED, hooks=HOOKS)
    assert found(module.use) == {}
    hooks.start()
    assert found(module.use) == {}
    assert not caplog.records


def test_modules_that_only_the_program_imports_are_imports_of_the_job(write: Write) -> None:
    """They register functions, subclasses, and handlers in a module that the call uses."""
    files = {
        "base_registry": """
            import abc, functools
            TABLE = {}
            class Holder:
                def __init__(self): self.found = []
            holder = Holder()
            class Base(abc.ABC): pass
            @functools.singledispatch
            def area(shape): return 0
            def by_table(): return TABLE
            def by_holder(): return holder.found
            def by_instance(value): return isinstance(value, Base)
            def by_subclass(): return Base.__subclasses__()
            def by_type(shape): return area(shape)
            def plain(): return len
            """,
        "reg_table": "import base_registry\nbase_registry.TABLE['a'] = lambda: 1\n",
        "reg_holder": "import base_registry as b\nclass Own: pass\nb.holder.found += [Own()]\n",
        "reg_virtual": "import base_registry\n@base_registry.Base.register\nclass Own: pass\n",
        "reg_subclass": "import base_registry\nclass Own(base_registry.Base): pass\n",
        "reg_type": "import base_registry\n@base_registry.area.register\ndef _(x: int): return 1\n",
        "reg_nothing": "import base_registry\n",
    }
    base, *_ = write("base_registry", *(name for name in files if name[:4] == "reg_"), **files)
    cases = {
        base.by_table: ["reg_table"],
        base.by_holder: ["reg_holder"],
        base.by_instance: ["reg_virtual"],
        base.by_subclass: ["reg_virtual", "reg_subclass"],
        base.by_type: ["reg_type"],
    }
    for function, expected in cases.items():
        assert list(needed(function).imports) == ["base_registry", *expected]
    assert needed(base.plain) == ((), {})


def test_a_job_names_a_module_that_it_cannot_import(capsys: pytest.CaptureFixture[str]) -> None:
    stand_ins.import_all([("no_such_module", None), ("no_such_file", "/no/such/file.py")])
    assert stand_ins.with_changes(None, 1, {"no_such_module": {"RATE": 1}}) == 1
    printed = capsys.readouterr().err.splitlines()
    assert ["no_such_module" in printed[0], "no_such_file" in printed[1]] == [True, True]


def test_a_changed_value_is_set_after_all_imports(write: Write) -> None:
    """A module that a job imports later would compute with the changed value."""
    _, rates, user = write(
        "later_user",
        "late_rates",
        "uses_later",
        late_rates="RATE = 1\n",
        later_user="import late_rates\nTWICE = 2 * late_rates.RATE\n",
        uses_later="""
            import late_rates
            def use():
                import later_user
                return later_user.TWICE, late_rates.RATE
            """,
    )
    assert needed(user.use).imports == ("late_rates", "later_user", "uses_later")
    rates.RATE = 3
    assert needed(user.use) == (
        *(("late_rates", "later_user", "uses_later"), {"late_rates": {"RATE": 3}}),
    )


INSTANCES = """
    import dataclasses, os
    @dataclasses.dataclass
    class Settings:
        rate: float = 0.1
        place: str = ""
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        rate: float = 0.1
    frozen = Frozen(0.2)
    class Own:
        def __init__(self, size=1):
            self.depth, self.path = 1, os.getcwd()
            self.count = 0
            self.size = size
            self.is_open = False
            self.file = None
        def open(self, file):
            self.file = file
            self.is_open = True
    settings = Settings()
    named = Settings(place="here")
    found = Settings(place=os.getcwd())
    own = Own()
    cached = None
    is_cached = False
    def load():
        global cached, is_cached
        cached, is_cached = object(), True
    def use(): return settings, named, found, own, cached, is_cached
    """


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("settings.rate = 0.5", {"settings.rate": 0.5}),
        ("named.rate = 0.5", {"named.rate": 0.5}),
        ("found.rate = 0.5", {}),
        ("own.count += 1", {"own.count": 1}),
        ("own.path = own.size = own.depth = 2", {}),  # the job's own may differ
        ("own.is_open = True", {"own.is_open": True}),
        ("own.open(object())", {}),
        # One without the other would be wrong.
        ("load()", {}),
        ("is_cached = True", {"is_cached": True}),
    ],
)
def test_attributes_of_instances_that_differ_from_the_file_are_changes(
    change: str, expected: dict[str, Any], write: Write
) -> None:
    name = f"instances_{abs(hash(change))}"
    (module,) = write(name, **{name: INSTANCES})
    exec(change, vars(module))
    vars(module).pop("__builtins__")
    assert found(module.use).get(name, {}) == {
        "named.place": "here",
        "frozen.rate": 0.2,
        **expected,
    }


def test_a_later_call_sees_later_changes(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    base, user = write(
        "often_changed",
        "often_user",
        often_changed="RATE = 1\nTABLE = {}\ndef load(): return 1\n",
        often_user="import often_changed as c\ndef use(): return c.RATE, c.TABLE, c.load()\n",
    )
    assert needed(user.use) == ((), {})
    for value in (2, 3):
        base.RATE = value
        assert found(user.use) == {"often_changed": {"RATE": value}}
    base.RATE = 1
    base.TABLE["a"] = 1
    assert found(user.use) == {"often_changed": {"TABLE": {"a": 1}}}
    (plugin,) = write("late_plugin", late_plugin="def f(): return 1\n")
    base.TABLE["a"] = plugin.f
    assert needed(user.use).imports == ("often_changed", "often_user", "late_plugin")
    assert not caplog.records
    base.load = plugin.f
    found(user.use)
    assert "often_changed.load" in caplog.text


def test_a_search_keeps_no_closure_alive(write: Write) -> None:
    text = "RATE = 1\ndef make(held):\n    def use(): return RATE, held\n    return use\n"
    (module,) = write("makes_closures", makes_closures=text)

    class Held:
        pass

    held = Held()
    use, alive = module.make(held), weakref.ref(held)
    module.RATE = 2
    assert found(use) == {"makes_closures": {"RATE": 2}}
    del use, held
    gc.collect()
    assert alive() is None


def test_containers_with_own_methods_are_searched(write: Write) -> None:
    text = """
        class Lazy(dict):
            def __iter__(self): raise NotImplementedError
            values = __len__ = __iter__
        TABLE = Lazy(a=1)
        def use(): return TABLE
        """
    (module,) = write("lazy_dict", lazy_dict=text)
    assert found(module.use) == {}


def test_an_edit_after_the_import_is_named_once(
    write: Write, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    text = "def use(): return 1\ndef other(): return 1\n"
    (module,) = write("edited_later", edited_later=text)
    found(module.use)
    assert not caplog.records
    (tmp_path / "project/edited_later.py").write_text(text.replace("1", "2"))
    future = 2**33
    os.utime(tmp_path / "project/edited_later.py", (future, future))
    for _ in range(2):
        found(module.use)
    (record,) = caplog.records
    assert "edited_later.py was changed on disk" in record.getMessage()
    importlib.reload(module)
    assert found(module.use) == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("X = 1\nX = 2\n", [2]),
        ("X = 1\nif len('a'):\n    X = 2\n", [1, 2]),
        ("X = 1\nX = abs(2)\n", None),
        ("X = 1\nX += 1\n", None),
        ("X = 1\ndef X(): pass\n", None),
        ("X = Y = 1\n", None),
        ("X, Y = 1, 2\n", None),
        ("for X in range(2): pass\nX = 1\n", None),
        ("X: int = -1\n", [-1]),
        ("X: int\n", None),
        ("X = [1]\nprint(X)\n", None),
        ("X = [1]\ndef f(): return X\n", [[1]]),
        ("def f():\n    X = 2\nX = 1\n", [1]),
        ("import os as X\nX = 1\n", None),
    ],
)
def test_which_names_have_literals(text: str, expected: list[Any] | None, tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text(text)
    assert source_text.parse(str(file), 0, 0, "").scopes[""].literals("X") == expected


def test_all_items_of_a_batch_see_the_same_values(write: Write, tmp_path: Path) -> None:
    (module,) = write(
        "item_class",
        item_class="RATE = 1\nclass Item:\n    def rate(self): return RATE\n",
    )
    module.RATE = 2
    project = discover.find_project(module.Item.rate, environ=os.environ, cwd=Path.cwd())

    def sent(project: discover.Project) -> int:
        args = ([module.Item()],)
        stored = payload.dump_arguments(
            args, {}, project, payload.DataTable(), lambda: tmp_path, "f"
        ).content
        module.RATE = 1  # the value of the file
        assert isinstance(stored, bytes)
        pickles.load(stored)
        found: int = module.RATE
        module.RATE = 3
        return found

    assert [sent(project), sent(project), sent(dataclasses.replace(project, changes={}))] == [
        *(2, 2, 3)
    ]


# --- which modules ------------------------------------------------------------------------


def test_how_modules_get_to_the_job(
    tmp_path: Path, make: Make, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "else", {"outside_one.py": "def f(): pass\n"})
    packages = tmp_path / "project/any name/lib/python3/site-packages"
    make(packages, {"venv_one.py": ""})
    make(tmp_path / "project/any name", {"pyvenv.cfg": "", "src/editable_one.py": ""})
    sys.path += [str(tmp_path / "else"), str(packages), str(packages.parents[2] / "src")]
    make(tmp_path / "project/vendor/linked-1.0", {"__init__.py": "", "sub.py": ""})
    (tmp_path / "project/mode_linked").symlink_to("vendor/linked-1.0")
    first, *_ = write(
        "mode_first",
        "mode_space.inner",
        "mode_pkg.sub",
        "mode_linked.sub",
        mode_first="def f(): pass\n",
        mode_space__in__inner="",
        mode_pkg__in____init__="",
        mode_pkg__in__sub="",
        elsewhere__in__plugin="def g(): pass\n",
    )
    spec = importlib.util.spec_from_file_location(
        "a_plugin", tmp_path / "project/elsewhere/plugin.py"
    )
    assert spec is not None and spec.loader is not None
    plugin = sys.modules["a_plugin"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    for name in ("outside_one", "venv_one", "editable_one"):
        importlib.import_module(name)
    monkeypatch.setitem(sys.modules, "made_here", ModuleType("made_here"))
    monkeypatch.setitem(sys.modules, "<run_path>", ModuleType("<run_path>"))
    sys.modules["<run_path>"].__file__ = plugin.__file__
    environ = {**os.environ, "KINETIC_BY_VALUE": "mode_pkg, else"}
    project = discover.find_project(first.f, environ=environ, cwd=Path.cwd())
    modules = Modules(project)
    modes = {
        "mode_first": PicklingMode.REFERENCE,
        "mode_space.inner": PicklingMode.REFERENCE,
        "mode_space": PicklingMode.REFERENCE,
        "mode_linked": PicklingMode.REFERENCE,
        "mode_linked.sub": PicklingMode.REFERENCE,
        "mode_pkg": PicklingMode.VALUE,
        "mode_pkg.sub": PicklingMode.VALUE,
        "a_plugin": PicklingMode.REFERENCE,
        "outside_one": PicklingMode.DEFAULT,
        "venv_one": PicklingMode.DEFAULT,
        "editable_one": PicklingMode.DEFAULT,
        "made_here": PicklingMode.VALUE,
        "<run_path>": PicklingMode.VALUE,
        "json": PicklingMode.DEFAULT,
        "sys": PicklingMode.DEFAULT,
        "numpy": PicklingMode.DEFAULT,
    }
    assert {name: modules.mode_of(name) for name in modes} == modes
    assert modules.files == {"a_plugin": plugin.__file__}


def test_a_module_outside_the_project_is_refused_before_submission(
    tmp_path: Path, make: Make, write: Write
) -> None:
    make(tmp_path / "else", {"outside_two.py": "def f(): pass\n"})
    sys.path.append(str(tmp_path / "else"))
    (first,) = write(
        "uses_outside", uses_outside="import outside_two\nuse = lambda: outside_two.f()\n"
    )
    project = discover.find_project(first.use, environ=os.environ, cwd=Path.cwd())
    for value in (first.outside_two.f, first.outside_two):
        with pytest.raises(PackError, match=r"outside_two.*KINETIC_PACKAGE_ROOT") as caught:
            payload.dump_function(lambda value=value: value, project, payload.DataTable())
        assert caught.value.culprit == "outside_two"
    chosen = dataclasses.replace(project, by_value=frozenset({"outside_two"}))
    payload.dump_function(first.outside_two.f, chosen, payload.DataTable())
