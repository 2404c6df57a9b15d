"""Test that a job imports the project's modules, and sees what the program changed in them."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kinetic._packing import changes, discover, payload
from kinetic._packing.modules import Modules, PicklingMode
from kinetic._runner.protocol import pickles
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


def found(function: Any) -> dict[str, dict[str, Any]]:
    """Return the changes that a call of *function* needs."""
    project = discover.find_project(function, environ=dict(os.environ), cwd=Path.cwd())
    return changes.find([function], Modules(project))


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
            """,
    }
    start, settings, lazy, unused = write(
        *(f"search.{name}" for name in ("start", "settings", "lazy", "unused")), **files
    )
    settings.RATE = lazy.RATE = unused.RATE = 2
    assert found(start.deep) == {"search.settings": {"RATE": 2}}
    assert found(start.lazily) == {"search.lazy": {"RATE": 2}}


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
    def use(): return load(), Model, client, lazy, registry, cached
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
        ("Model.Inner = dict", "Model.Inner"),
        ("connect()", ""),
        ("registry['x'] = object()", ""),
        ("cached()", ""),
    ],
)
def test_a_replacement_is_named_once(
    change: str, named: str, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"replaced_{abs(hash(change))}"
    (module,) = write(name, **{name: REPLACED})
    exec(change, vars(module))
    vars(module).pop("__builtins__")
    for _ in range(2):
        found(module.use)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(named)
    if named:
        assert f"{name}.{named}" in messages[0] and f"KINETIC_BY_VALUE={name}" in messages[0]


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
    assert changes.parse(str(file), 0, 0, "")[""].literals("X") == expected


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
            args, {}, project, payload.DataTable(), tmp_path, "f"
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
    sys.path.append(str(tmp_path / "else"))
    first, *_ = write(
        "mode_first",
        "mode_space.inner",
        "mode_pkg.sub",
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
    importlib.import_module("outside_one")
    monkeypatch.setitem(sys.modules, "made_here", ModuleType("made_here"))
    environ = {**os.environ, "KINETIC_BY_VALUE": "mode_pkg, else"}
    project = discover.find_project(first.f, environ=environ, cwd=Path.cwd())
    modules = Modules(project)
    modes = {
        "mode_first": PicklingMode.REFERENCE,
        "mode_space.inner": PicklingMode.REFERENCE,
        "mode_space": PicklingMode.REFERENCE,
        "mode_pkg": PicklingMode.VALUE,
        "mode_pkg.sub": PicklingMode.VALUE,
        "a_plugin": PicklingMode.REFERENCE,
        "outside_one": PicklingMode.DEFAULT,
        "made_here": PicklingMode.VALUE,
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
