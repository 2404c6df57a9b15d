"""Test that a function runs in another interpreter, which has only the packed files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from .conftest import REPOSITORY, Make, Python, last_line

Travel = Callable[..., Any]

CLIENT = """
import json, os, pathlib, sys
from kinetic._packing import archive
from kinetic._packing import discover
from kinetic._packing import payload
setup, call, out = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
sys.path.insert(0, os.getcwd())
exec(compile(setup, "<cell>", "exec"), globals())
function, args = eval(call)
project = discover.find_project(function, environ=os.environ, cwd=pathlib.Path.cwd())
table = payload.DataTable()
pickled = payload.dump_function(function, project, table)
(out / "function").write_bytes(pickled.content)
pickled = payload.dump_arguments(args, {}, project, table, out, "f", function=function)
(out / "arguments").write_bytes(pickled.content)
facts = {"cwd": project.cwd, "sys_path": project.sys_path, "size": pickled.size}
if project.root is not None:
    packed = archive.pack(project.root, exclude=(), cache=out / "cache", environ=os.environ)
    facts["code"] = str(packed.path)
import cloudpickle
assert not cloudpickle.list_registry_pickle_by_value()
print(json.dumps(facts))
"""

JOB = """
import json, os, pathlib, sys, zipfile
from kinetic_runner.protocol import pickles, stand_ins
class Hidden:  # a job may lack kinetic
    def find_spec(self, name, path=None, target=None):
        return stand_ins.MissingKinetic.find_spec(name)
sys.meta_path.insert(0, Hidden())
out, facts = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
workspace = out / "workspace"
workspace.mkdir()
if "code" in facts:
    zipfile.ZipFile(facts["code"]).extractall(workspace)
sys.path[:0] = [str(workspace / entry) for entry in facts["sys_path"]]
os.chdir(workspace / (facts["cwd"] or ""))
before = set(sys.modules)
function = pickles.load((out / "function").read_bytes())
args, kwargs = pickles.load((out / "arguments").read_bytes())
value = function(*args, **kwargs)
print(json.dumps([value, sorted(set(sys.modules) - before)]))
"""


@pytest.fixture
def travel(tmp_path: Path, make: Make, python: Python) -> Travel:
    """Pack a project in one process, hide it, and call its function in another process.

    Return the value, the names of the modules that the job imported, and its workspace.
    """

    def pack_and_call(
        files: Mapping[str, str | bytes], call: str, setup: str = "import train", cwd: str = "."
    ) -> Any:
        project = make(tmp_path / "project", {"setup.py": "", **files})
        out = tmp_path / "out"
        out.mkdir()
        facts = last_line(python("-c", CLIENT, setup, call, str(out), cwd=project / cwd))
        project.rename(tmp_path / "hidden")
        (tmp_path / "job").mkdir()
        (tmp_path / "job/kinetic_runner").symlink_to(REPOSITORY / "runner")
        command = ("-c", JOB, str(out), json.dumps(facts))
        printed = python(*command, cwd=tmp_path, PYTHONPATH=str(tmp_path / "job"))
        value, imported = last_line(printed)
        return value, imported, out / "workspace"

    return pack_and_call


def test_the_job_imports_the_functions_and_classes_of_the_project(travel: Travel) -> None:
    files = {
        "pkg/__init__.py": "",
        "pkg/shapes.py": """
        import dataclasses, enum, functools, typing
        T = typing.TypeVar("T")
        P = typing.ParamSpec("P")
        Name = typing.NewType("Name", str)
        class Mode(enum.Enum):
            TRAIN = 1
        @dataclasses.dataclass(frozen=True)
        class Config:
            lr: float
            mode: Mode = Mode.TRAIN
        def scaled(x: T, by: Name = Name("1")) -> T:
            return x * 2
        """,
        "train.py": """
        from pkg.shapes import Config, Mode, P, scaled
        import pkg.shapes
        def train(config: Config, *rest, f: P = None):
            return [scaled(config.lr), config.mode is Mode.TRAIN,
                    isinstance(config, pkg.shapes.Config), list(rest)]
        """,
    }
    call = "train.train, (train.Config(0.5), 1, 2)"
    value, imported, _ = travel(files, call)
    assert value == [1.0, True, True, [1, 2]]
    assert {"pkg.shapes", "train"} <= set(imported)


def test_the_annotations_of_a_class_are_kept(travel: Travel) -> None:
    files = {
        "train.py": """
        import dataclasses, enum, typing
        class Plain:
            rate: float
        class Named(typing.NamedTuple):
            rate: float
        class Entries(typing.TypedDict):
            rate: float
        class Mode(enum.Enum):
            rate: float
            TRAIN = 1
        @dataclasses.dataclass
        class Whole:
            rate: float
        def train():
            known = [kind.__annotations__ == {"rate": float}
                     for kind in (Plain, Named, Entries, Mode, Whole)]
            return [known, dataclasses.dataclass(Plain)(2).rate, Whole(3).rate, Mode(1).name]
        """,
    }
    value, _, _ = travel(files, "train.train, ()")
    assert value == [[True] * 5, 2, 3, "TRAIN"]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="fails before 3.14 on definition")
def test_annotations_that_only_type_checkers_resolve_are_kept_as_text(travel: Travel) -> None:
    files = {
        "train.py": """
        import dataclasses, functools, threading, typing
        if typing.TYPE_CHECKING:
            import numpy as np
        lock = threading.Lock()  # unused, and cannot be pickled
        class Plain:
            rate: np.ndarray
            def plus(self, other: np.ndarray, *, by: int = 2) -> "Plain":
                "Adds."
                return other + by
        @dataclasses.dataclass
        class Whole:
            rate: np.ndarray
        def counted(number: np.ndarray) -> list[np.ndarray]:
            return counted(number - 1) + [number] if number else []
        counted.mark = "marked"
        def train(config: Whole, *rest: np.ndarray, scale: np.ndarray = 1):
            def inner(x: np.ndarray):
                return x * scale + config.rate
            return [inner(2), counted(2), counted.mark, Plain().plus(1), Plain.plus.__doc__,
                    Plain.__annotations__, counted.__annotations__, Plain.plus.__qualname__,
                    Whole.__init__.__annotations__, Whole.__annotations__,
                    train.__kwdefaults__, train.__module__,
                    dataclasses.fields(Whole)[0].type.__forward_arg__]
        """,
    }
    value, _, _ = travel(files, "train.train, (train.Whole(3), 1)")
    assert value[:5] == [5, [1, 2], "marked", 3, "Adds."]
    assert value[5:8] == [
        {"rate": "np.ndarray"},
        {"number": "np.ndarray", "return": "list[np.ndarray]"},
        "Plain.plus",
    ]
    assert value[8:10] == [{"rate": "np.ndarray", "return": "None"}, {"rate": "np.ndarray"}]
    assert value[10:] == [{"scale": 1}, "train", "np.ndarray"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="new in 3.12")
def test_type_aliases_are_kept(travel: Travel) -> None:
    setup = """
import typing
if typing.TYPE_CHECKING:
    import numpy as np
type Number = int | float
type Tree[T] = T | list[Tree[T]]
type Even = list[Odd]
type Odd = list[Even]
type Array = np.ndarray
class Box[T]:
    def __init__(self, value: T): self.value = value
def train[T](box: Box[T], *more: Number, tree: Tree[int] | None = None,
             even: Even | None = None, array: Array | None = None) -> T:
    found = typing.get_type_hints(train)["more"]
    return [box.value, found.__name__, found is Number, str(Number.__value__),
            [parameter.__name__ for parameter in Tree.__type_params__], Array.__name__]
"""
    value, _, _ = travel({}, "train, (Box(1), 2)", setup)
    assert value == [1, "Number", True, "int | float", ["T"], "Array"]


@pytest.mark.parametrize(
    "kind",
    [
        'Name = typing.NewType("Name", str)',
        pytest.param(
            "type Name = str",
            marks=pytest.mark.skipif(sys.version_info < (3, 12), reason="new in 3.12"),
        ),
    ],
)
def test_an_unpickled_class_can_be_pickled_again(kind: str, travel: Travel) -> None:
    setup = f"""
import dataclasses, typing
{kind}
@dataclasses.dataclass
class Result:
    name: Name
def train():
    from kinetic_runner.protocol import pickles
    again = pickles.load(pickles.dumps(Result("a")))
    return [again.name, typing.get_type_hints(type(again))["name"].__name__]
"""
    assert travel({}, "train, ()", setup)[0] == ["a", "Name"]


def test_values_changed_in_memory_are_kept(travel: Travel) -> None:
    files = {
        "settings.py": "RATE = 1\nTABLE = {}\n",
        "train.py": """
        import settings
        from settings import TABLE
        def train():
            return settings.RATE, settings.TABLE, settings.TABLE is TABLE
        """,
    }
    setup = "import train, settings; settings.RATE = 7; settings.TABLE['a'] = 1"
    assert travel(files, "train.train, ()", setup)[0] == [7, {"a": 1}, True]


def test_a_module_and_its_functions_share_their_globals(travel: Travel) -> None:
    files = {
        "pkg/__init__.py": "from pkg import counter, other",
        "pkg/counter.py": """
        import pkg
        from pkg import other
        count = 0
        def up():
            global count
            count += 1
            return other.peek()
        """,
        "pkg/other.py": "from pkg import counter\ndef peek():\n    return counter.count\n",
        "train.py": """
        import pkg.counter
        from pkg.counter import up
        def train():
            return [up(), pkg.counter.up(), pkg.counter.count, pkg.counter.other.peek(),
                    pkg.counter.pkg is pkg]
        """,
    }
    assert travel(files, "train.train, ()")[0] == [1, 2, 2, 2, True]


def test_files_beside_the_code_are_found(travel: Travel) -> None:
    files = {
        "notes/here.txt": "here",
        "pkg/__init__.py": "",
        "pkg/table.csv": "1,2",
        "pkg/reader.py": """
        import pathlib
        def read():
            return pathlib.Path(__file__).with_name("table.csv").read_text()
        """,
        "train.py": """
        import pkg.reader
        from pkg.reader import read
        HERE = __file__
        def train():
            import pathlib
            return [read(), pkg.reader.read(), pathlib.Path("here.txt").read_text(), __file__,
                    pkg.__path__[0], pkg.reader.__name__]
        """,
    }
    setup = "sys.path.insert(0, '..'); import train"
    value, _, workspace = travel(files, "train.train, ()", setup, cwd="notes")
    assert value[:3] == ["1,2", "1,2", "here"]
    assert value[3:] == [str(workspace / "train.py"), str(workspace / "pkg"), "pkg.reader"]


def test_a_function_keeps_the_file_line_and_source_of_its_code(
    travel: Travel,
) -> None:
    files = {
        "train.py": """
        import traceback
        class Model:
            def fit(self):
                def step(x): return 1 / x
                return step(0)
        def train():
            try:
                Model().fit()
            except ZeroDivisionError as error:
                return [[frame.filename, frame.lineno, frame.line]
                        for frame in traceback.extract_tb(error.__traceback__)]
        """,
    }
    value, _, workspace = travel(files, "train.train, ()")
    lines = (9, "Model().fit()"), (6, "return step(0)"), (5, "def step(x): return 1 / x")
    assert value == [[str(workspace / "train.py"), *line] for line in lines]


@pytest.mark.parametrize("name", ["<python-input-1>", "/tmp/ipykernel_1/1.py"])
def test_the_source_of_a_notebook_cell_is_kept(travel: Travel, name: str) -> None:
    setup = f"""
import linecache
cell = '''
import warnings
def train():
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("look")
    [one] = caught
    return warnings.formatwarning(one.message, one.category, one.filename, one.lineno)
'''
linecache.cache[{name!r}] = (len(cell), None, cell.splitlines(True), {name!r})
exec(compile(cell, {name!r}, "exec"), globals())
"""
    value, *_ = travel({}, "train, ()", setup)
    assert value == f'{name}:5: UserWarning: look\n  warnings.warn("look")\n'


def test_functions_of_notebook_cells_run(travel: Travel) -> None:
    files = {"helper.py": "def twice(x): return 2 * x\n"}
    setup = """
import functools, helper
class Model:
    def fit(self, x): return helper.twice(x) + bias
bias = 1
def outer(k):
    def inner(x): return Model().fit(x) + k + recursive(3)
    return inner
def recursive(n): return n and 1 + recursive(n - 1)
async def later(x): return x
"""
    call = "functools.partial(outer(10), 5), ()"
    assert travel(files, call, setup)[0] == 2 * 5 + 1 + 10 + 3


def test_decorated_functions_are_plain_functions_in_the_job(travel: Travel) -> None:
    files = {
        "steps.py": """
        import kinetic
        from kinetic import Data
        @kinetic.run(accelerator="cpu")
        def double(x): return 2 * x
        """,
        "train.py": """
        import kinetic, steps
        from steps import double
        @kinetic.run(accelerator="cpu")
        def count(n): return 1 + count(n - 1) if n else 0
        def train(n): return [count(n), double(n), steps.double(n), count is count]
        """,
    }
    value, imported, _ = travel(files, "train.train, (3,)")
    assert value == [3, 6, 6, True]
    assert {"kinetic", "steps", "train"} <= set(imported)


def test_modules_with_values_that_cannot_be_pickled_work(travel: Travel) -> None:
    files = {
        "pkg/__init__.py": "",
        "pkg/guarded.py": """
        import threading
        lock = threading.Lock()
        def safe(x):
            with lock:
                return x + 1
        class Guard:
            def __call__(self):
                return safe(1)
        """,
        "pkg/plain.py": "from pkg import guarded\ndef call(x): return guarded.safe(x)\n",
        "train.py": """
        from pkg import guarded, plain
        from pkg.guarded import safe, Guard
        def train(guard):
            import pkg.guarded
            return [safe(1), guarded.safe(2), plain.call(3), guard(),
                    pkg.guarded.lock is guarded.lock, isinstance(guard, Guard)]
        """,
    }
    value, imported, _ = travel(files, "train.train, (train.Guard(),)")
    assert value == [2, 3, 4, 2, True, True]
    assert {"pkg.guarded", "train", "pkg.plain"} <= set(imported)


def test_a_virtual_environment_in_the_project_is_not_packed(
    tmp_path: Path, make: Make, python: Python
) -> None:
    """Its packages are neither files of the archive nor pickled by value; the job imports them."""
    packages = "any name/lib/python3/site-packages"
    root = make(
        tmp_path / "project",
        {
            "pyproject.toml": "",
            "any name/pyvenv.cfg": "",
            f"{packages}/third/__init__.py": """
            import threading
            lock = threading.Lock()
            def add(a, b): return a + b
            class Thing: pass
            """,
            "any name/src/editable.py": "def f(): pass",
            "train.py": """
            import third, editable
            from third import add, Thing
            from editable import f
            def train(a, b): return third.add(a, b), add(a, b), Thing, f, editable
            """,
        },
    )
    script = f"""
import os, pathlib, sys, zipfile
sys.path[:0] = [os.getcwd(), {str(root / packages)!r}, {str(root / "any name/src")!r}]
import train
from kinetic._packing import archive
from kinetic._packing import discover
from kinetic._packing import payload
project = discover.find_project(train.train, environ=os.environ, cwd=pathlib.Path.cwd())
pickled = payload.dump_function(train.train, project, payload.DataTable())
packed = archive.pack(project.root, exclude=(), cache=pathlib.Path("../cache"), environ=os.environ)
import json, pickletools
print(json.dumps([project.sys_path, pickled.size, zipfile.ZipFile(packed.path).namelist()]))
"""
    path, size, files = last_line(python("-c", script, cwd=root))
    assert path == [""]
    assert size < 2000
    assert files == ["pyproject.toml", "train.py"]


def test_a_compiled_module_of_the_project_is_imported_by_the_job(travel: Travel) -> None:
    import _csv  # any extension module that has a file

    file = getattr(_csv, "__file__", None)
    if file is None:
        pytest.skip("this interpreter has its extensions built in")
    name = Path(file).name
    files = {
        f"native/{name}": Path(file).read_bytes(),
        "native/__init__.py": "",
        "train.py": "from native import _csv\ndef train(): return _csv.__name__\n",
    }
    value, imported, _ = travel(files, "train.train, ()")
    assert value == "native._csv"
    assert "native._csv" in imported


def test_namespace_packages_are_pickled(travel: Travel) -> None:
    files = {
        "space/inner/m.py": "def f(): return 1\n",
        "train.py": "import space.inner.m\ndef train(): return space.inner.m.f()\n",
    }
    assert travel(files, "train.train, ()")[0] == 1


def test_kinetic_itself_is_imported_by_the_job(python: Python, tmp_path: Path) -> None:
    """This holds although the project is kinetic's own checkout."""
    script = """
import os, pathlib
from kinetic import errors
from kinetic._packing import discover
from kinetic._packing import payload
here = pathlib.Path(errors.__file__).parents[1]
def f(): return errors.PackError, errors
project = discover.find_project(f, environ=os.environ, cwd=here)
assert project.root == here
print(payload.dump_function(f, project, payload.DataTable()).size)
"""
    assert int(python("-c", script, cwd=tmp_path)) < 1500


def test_a_script_without_a_project_has_only_its_pickle(
    tmp_path: Path, make: Make, python: Python
) -> None:
    """No files of the home directory are packed; modules beside the script go by value."""
    home = make(
        tmp_path / "home",
        {
            "helper.py": "def twice(x): return 2 * x\n",
            "run.py": """
            import json, os, pathlib, helper
            from kinetic._packing import discover
            from kinetic._packing import payload
            def f(x): return helper.twice(x)
            project = discover.find_project(f, environ=os.environ, cwd=pathlib.Path.cwd())
            assert project.root is None
            pickled = payload.dump_function(f, project, payload.DataTable())
            pathlib.Path("../function").write_bytes(pickled.content)
            """,
        },
    )
    python("run.py", cwd=home, HOME=str(home))
    script = """
import pathlib
from kinetic._runner.protocol import pickles
print(pickles.load(pathlib.Path("function").read_bytes())(4))
"""
    assert python("-c", script, cwd=tmp_path) == "8\n"
