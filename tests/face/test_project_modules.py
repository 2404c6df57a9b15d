"""Test that a job of a project's function gives what a direct call gives."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from tests import programs
from tests.face.conftest import COMMON
from tests.scripts import ROOT, Script

FILES = {
    "errs.py": "class NotFound(Exception): pass\n",
    "shop.py": """
        import enum
        from errs import NotFound
        cache = {}
        class Kind(enum.Enum):
            BIG = 1
        class Thing:
            kinds = []
            def __init_subclass__(cls, *, key, **more):
                super().__init_subclass__(**more)
                Thing.kinds.append(key)
        class Leaf(Thing, key="leaf"):
            def __init__(self, n): self.n = n
            def __eq__(self, other): return type(other) is Leaf and other.n == self.n
            def twice(self): return Leaf(2 * self.n)
        def get(): raise NotFound
        def caught():
            from errs import NotFound
            try: get()
            except NotFound: return "caught"
        def one_module():
            import shop
            shop.cache["a"] = 1
            return cache, Kind.BIG is shop.Kind.BIG, Thing.kinds
        def saved():
            import pickle
            return pickle.loads(pickle.dumps(Leaf(3))).twice(), Leaf(1)
        def match(kind):
            match kind:
                case Kind.BIG: return "big"
        """,
    "settings.py": """
        import dataclasses, os, kinetic
        os.environ.setdefault("SET_AT_IMPORT", "set")
        RATE = 1
        TABLE = {}
        DATA = kinetic.Data("data")
        class Config:
            depth = 1
            file = kinetic.Data("data/a.txt")
        class Own:
            def __init__(self): self.rate = 1
        own = Own()
        @dataclasses.dataclass(frozen=True)
        class Frozen: rate: int = 1
        frozen = Frozen(rate=2)
        def values(): return RATE, TABLE, Config.depth, own.rate, os.environ["SET_AT_IMPORT"]
        def read(): return os.listdir(getattr(DATA, "path", DATA))
        def read_file():
            with open(getattr(Config.file, "path", Config.file)) as file: return file.read()
        """,
    "steps.py": """
        import functools, kinetic
        from settings import RATE
        import settings
        R = kinetic.run(backend="local", accelerator="cpu")
        def wrap(function):
            @functools.wraps(function)
            def inner(*args): return ["wrapped", function(*args)]
            return inner
        class Trainer:
            def __init__(self, n): self.n = n
            @R
            def fit(self, x): return [self.n, x, settings.RATE, RATE]
            @staticmethod
            @R
            def static(x): return x
        @R
        @wrap
        def inside(x): return x
        @wrap
        @R
        def outside(x): return x
        @R
        def nested(x): return [inside(x), square(x), Trainer(1).fit(2), wrap(abs)(-1)]
        square = R(lambda x: x * x)
        def closure(k):
            @R
            def inner(x): return [x + k, settings.RATE]
            return inner
        """,
    "registry.py": """
        import abc, functools
        TABLE = {}
        class Shape(abc.ABC): pass
        @functools.singledispatch
        def area(shape): return 0
        def named(name): return TABLE[name]()
        def kinds(): return sorted(kind.__name__ for kind in Shape.__subclasses__())
        """,
    "registers.py": """
        import registry, settings
        DOUBLE = 2 * settings.RATE
        class Square(registry.Shape): pass
        registry.TABLE["double"] = lambda: (DOUBLE, settings.RATE)
        @registry.area.register
        def _(shape: Square): return 4
        """,
    "ring_a.py": "import ring_b\ndef a(n): return ring_b.b(n - 1) if n else 'a'\n",
    "ring_b.py": "import ring_a\ndef b(n): return ring_a.a(n - 1) if n else 'b'\n",
    "space/inner.py": "from . import other\ndef f(): return other.VALUE, __name__\n",
    "space/other.py": "VALUE = 4\n",
    "src/layout/__init__.py": "",
    "src/layout/deep.py": "import layout\n",
    "makes.py": """
        import collections, dataclasses, enum, functools, typing, pydantic
        def wrap(cls):
            class Wrapped(cls): pass
            return Wrapped
        @wrap
        class Thing: pass
        Point = collections.namedtuple("Pair", "x y")
        Color = enum.Enum("Colour", "RED")
        Made = dataclasses.make_dataclass("Anything", ["x"])
        class Step(enum.Enum): FIRST = enum.member(functools.partial(max))
        T = typing.TypeVar("T")
        class Page(pydantic.BaseModel, typing.Generic[T]): items: list[T]
        def outer():
            def inner(x): return x is call
            return inner
        call = outer()
        def counter():
            count = 0
            def inner():
                nonlocal count
                count += 1
                return count
            return inner
        count = counter()
        MANY
        first = replaced = 0
        def known(thing, point, color, step, page):
            kinds = isinstance(thing, Thing), type(point) is Point, color is Color.RED
            return *kinds, step is Step.FIRST, type(page) is Page[int]
        def make(): return Made(1), Step.FIRST, Thing, Point(1, 2), Color.RED, Page[int](items=[1])
        """.replace("MANY", "; ".join(f"n{number} = 0" for number in range(256))),
    "plugins/by file.py": """
        count = 0
        class Plugin:
            def go(self):
                global count
                count += 1
                return count, type(self).__name__
        """,
    "data/a.txt": "text",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tmp_path


TABLE = """
import importlib.util, kinetic.aio
import makes, registers, registry, ring_a, settings, shop, space.inner, steps

spec = importlib.util.spec_from_file_location("odd.name".replace(".", "_"), "plugins/by file.py")
plugin = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plugin)
spec = importlib.util.spec_from_file_location("unregistered", "plugins/by file.py")
unregistered = importlib.util.module_from_spec(spec)
spec.loader.exec_module(unregistered)
forgotten = ring_a.a

settings.RATE, settings.TABLE["a"], settings.Config.depth = 5, [1, None], 7
settings.own.rate = 8

page = makes.Page[int](items=[1])
found_count = [makes.count(), makes.count(), remote(makes.count)()]
makes.replaced = makes.outer()  # the job's import gives 0
def in_script(leaf): return leaf.twice(), settings.RATE, type(leaf) is shop.Leaf

calls = [
    (shop.caught,), (shop.one_module,), (shop.saved,), (shop.match, shop.Kind.BIG),
    (shop.Leaf(4).twice,), (in_script, shop.Leaf(5)),
    (settings.values,), (settings.read,), (settings.read_file,),
    (steps.Trainer(3).fit, 4), (steps.Trainer.static, 5), (steps.inside, 6), (steps.nested, 7),
    (steps.closure(8), 9), (ring_a.a, 3), (space.inner.f,),
    (makes.call, makes.call), (makes.make,), (lambda function: function(2), makes.replaced),
    (makes.known, makes.Thing(), makes.Point(1, 2), makes.Color.RED, makes.Step.FIRST, page),
    (registry.named, "double"), (registry.kinds,), (registry.area, registers.Square()),
    (plugin.Plugin().go,), (unregistered.Plugin().go,),
]

async def main():
    jobs = [
        kinetic.aio.run(f if hasattr(type(f), "__kinetic__") else remote(f), *args)
        for f, *args in calls
    ]
    return await asyncio.gather(*jobs)

found = asyncio.run(main())
for name in ("ring_a", "ring_b"):
    del sys.modules[name]
found.append(remote(forgotten)(4))
calls.append((forgotten, 4))
for (function, *args), value in zip(calls, found):
    direct = getattr(function, "local", function)(*args)
    if value != direct:
        print(function, value, direct)
print(len(found), steps.outside(1), found_count)
"""


def test_a_job_gives_what_a_direct_call_gives(script, project: Path) -> None:
    """Exceptions, enums, caches, pickle, class hooks, decorators, circles, changed values, Data.

    And registries, and definitions that their module has under another name.
    """
    script(TABLE).prints("26 ['wrapped', 1] [1, 2, 3]")


RUN = """
from . import other
import layout.deep, pathlib, kinetic
@kinetic.run(backend="local", accelerator="cpu")
def where():
    from . import other as again
    place = pathlib.Path(layout.deep.__file__)
    same = layout.deep.layout is layout and again is other
    return place.parts[-3:], place.is_relative_to("HERE"), same
print(where(), __package__)
"""


def test_a_source_layout_and_a_module_run_by_its_name(project: Path) -> None:
    """A variable puts the layout on ``sys.path``, as an editable install does."""
    (project / "pyproject.toml").touch()
    (project / "space/run.py").write_text(RUN.replace("HERE", str(project)))
    path = os.pathsep.join((str(ROOT), str(project / "src")))
    printed = programs.python(
        "-m", "space.run", cwd=project, env={**os.environ, "PYTHONPATH": path}
    )
    assert printed == "(('src', 'layout', 'deep.py'), False, True) space\n"


ERRORS = """
def failure(call):
    try:
        return call()
    except Exception as exc:
        return str(exc)

pathlib.Path(here, "machine.txt").touch()
import machine
found = failure(remote(machine.value))
print("machine.py, line 3" in found, "KINETIC_BY_VALUE" in found)
os.environ["KINETIC_BY_VALUE"] = "other, machine"
print(remote(machine.value)())
del os.environ["KINETIC_BY_VALUE"]

def imports(name):
    found = failure(lambda: __import__(name))
    return [name in found, "line" in found or ":4:" in found, 'if __name__ == "__main__"' in found]

print(imports("calls"), imports("submits"))

import guarded
print(failure(remote(guarded.uses_script)).count("script_like.py:4: train()") > 0)
print(failure(remote(guarded.uses_submits)).count("submits.py:4: train is called") > 0)
"""


def test_a_module_that_only_pythonpath_names_needs_that_variable(
    script, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "elsewhere.py").write_text("VALUE = 7\n")
    code = f"""
os.environ["PYTHONPATH"] = {str(folder)!r}

@remote
def reads():
    import elsewhere
    return elsewhere.VALUE

try:
    reads()
except ModuleNotFoundError as error:
    print("capture_env_vars=['PYTHONPATH']" in error.__notes__[0])
print(reads.options(capture_env_vars=["PYTHONPATH"])())
"""
    with script(code) as process:
        process.expect("True", "7")
        assert process.end()[0] == 0


def test_a_module_that_the_job_cannot_import_is_named(script, tmp_path: Path) -> None:
    """Such a module reads a file of this machine, or calls kinetic at its top level."""
    decorated = "import kinetic\n@kinetic.run(backend='local', accelerator='cpu')\n"
    files = {
        "machine.py": "import os\n\nos.stat(__file__.replace('machine.py', '../machine.txt'))\n"
        "def value(): return 'value'\n",
        "calls.py": decorated + "def train(x): return x\ntrain(3)\n",
        "submits.py": decorated + "def train(x): return x\ntrain.run_async(3)\n",
        "script_like.py": decorated + "def train(x): return x\nprint(train(3))\n",
        "guarded.py": "def uses_script():\n    import script_like\n"
        "def uses_submits():\n    import submits\n",
    }
    project = tmp_path / "project"
    project.mkdir()
    for name, text in files.items():
        (project / name).write_text(text)
    code = ERRORS.replace('"machine.txt"', '"../machine.txt"')
    Script(COMMON + code, folder=project).prints(
        "True True", "value", "[True, True, True] [True, True, True]", "True", "True"
    )


TESTS = """
import kinetic, pytest
remote = kinetic.run(backend="local", accelerator="cpu")
class Own:
    pass
def own(): return Own()
def test_class():
    assert type(remote(own)()) is Own
def test_assert(tmp_path):
    @remote
    def nested(x): assert x == 1, "the message"
    nested(1)
    with pytest.raises(AssertionError, match="the message"): nested(2)
"""


def test_functions_inside_of_tests_assert_in_their_jobs(tmp_path: Path) -> None:
    """pytest gives them globals that the job's import of the file doesn't make."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "test_own.py").write_text(TESTS)
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_own.py")
    assert "2 passed" in programs.python(*command, cwd=tmp_path)


SPAWNED = """
import multiprocessing, kinetic
remote = kinetic.run(backend="local", accelerator="cpu")
class Own:
    pass
@remote
def same(own): return type(own) is Own
def call(_): return same(Own())
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(call, [1]))
"""


def test_a_spawned_process_sends_the_definitions_of_its_script(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "main.py").write_text(SPAWNED)
    assert programs.python("main.py", cwd=tmp_path) == "[True]\n"
