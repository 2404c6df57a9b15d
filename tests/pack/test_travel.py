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
pickled = payload.dump_arguments(args, {}, project, table, lambda: out, "f", function=function)
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


def test_the_methods_of_a_decorated_function_travel_as_those_of_the_jobs_function(
    travel: Travel,
) -> None:
    files = {
        "train.py": """
        import kinetic
        @kinetic.run(accelerator="cpu")
        def double(number):
            return 2 * number
        def call(*functions):
            return [function(3) for function in functions]
        """
    }
    setup = "import train, kinetic, functools\nown = kinetic.run(lambda number: -number)"
    functions = "train.double.local, functools.partial(train.double.local), own.local"
    value, _, _ = travel(files, f"train.call, ({functions})", setup)
    assert value == [6, 6, -3]
