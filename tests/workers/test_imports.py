"""Imports that a worker makes once for all its items."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.protocol import wire

from .process import Batch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shares imports")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new folder of installed packages, which workers have in their ``sys.path``."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def package(folder: Path, name: str, source: str = "") -> Path:
    """Write a package that notes the process of each import; return the file of these notes."""
    marks = folder / f"{name}.marks"
    note = f"import os\nopen({str(marks)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(note + source)
    return marks


def imports_of(marks: Path) -> list[str]:
    return marks.read_text().split() if marks.exists() else []


def using() -> Callable[[str], Any]:
    """Return a function, pickled by value, that imports a module and returns its process."""

    def use(name: str) -> int:
        importlib.import_module(name)
        return os.getpid()

    return use


def written(source: str, names: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Return the function ``call`` of *source*, pickled by value, with *names* as globals."""
    namespace: dict[str, Any] = {"__name__": __name__, "os": os, **(names or {})}
    exec(source, namespace)
    return namespace["call"]


@pytest.fixture
def plain(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the notes of an installed package, which this process has under the same name."""
    source = "class Thing:\n    pass\n"
    marks = package(packages, "plain", source)
    (packages / "plain" / "part.py").touch()
    module = types.ModuleType("plain")
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, "plain", module)
    return marks


def thing() -> Any:
    return sys.modules["plain"].Thing


@pytest.mark.parametrize(
    ("source", "names", "value"),
    [
        ("def call(_):\n  'Doc.'\n  import os, plain\n  return os.getpid()", None, None),
        ("def call(_):\n  from plain import part as p, Thing\n  return os.getpid()", None, None),
        ("def call(_):\n  import plain.part as p\n  return [p] and os.getpid()", None, None),
        ("async def call(_):\n  import plain\n  return os.getpid()", None, None),
        ("def call(_):\n  return plain and os.getpid()", lambda: sys.modules["plain"], None),
        ("def call(_):\n  return plain and os.getpid()", thing, None),
        ("def call(_):\n  return plain and os.getpid()", lambda: thing()(), None),
        ("def call(_):\n  return os.getpid()", None, lambda: [thing()()]),
    ],
)  # fmt: skip
def test_a_package_that_a_call_imports_first_is_imported_before_it(
    plain: Path, tmp_path: Path, source: str, names: Any, value: Any
) -> None:
    call = written(source, names and {"plain": names()})
    batch = Batch(tmp_path / "b", call, [value and value()] * 3)
    batch.run()
    (shared,) = imports_of(plain)
    assert int(shared) not in [batch.value(index) for index in range(3)]


@pytest.mark.parametrize(
    "source",
    [
        "def call(_):\n  print()\n  import plain",
        "def call(wants):\n  if wants:\n    import plain",
        "def call(_):\n  import nowhere_else\n  import plain",
        "def call(_):\n  own\n  import plain",
        "def call(_):\n  return [*more()]\ndef more():\n  import plain\n  yield 1",
    ],
)
def test_a_package_is_not_imported_before_code_that_may_affect_it(
    plain: Path, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "own", types.ModuleType("own"))
    call = written(source, {"own": sys.modules["own"]} if "own" in source else None)
    project = {"own.py": b"import os\n", "nowhere_else.py": b"import os\n"}
    batch = Batch(tmp_path / "b", call, [True] * 3, project=project)
    batch.run()
    assert set(batch.states()) == {wire.ItemState.SUCCEEDED}
    assert len(imports_of(plain)) == 2  # the first item, and the interpreter


def test_an_argument_of_the_project_may_affect_imports(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = types.ModuleType("own")
    exec("class Own: pass", vars(own))
    monkeypatch.setitem(sys.modules, "own", own)
    project = {"own.py": b"import os\nos.environ['X'] = '1'\nclass Own: pass\n"}
    call = written("def call(_):\n  import plain")
    batch = Batch(tmp_path / "b", call, [vars(own)["Own"]()] * 3, project=project)
    batch.run()
    assert set(batch.states()) == {wire.ItemState.SUCCEEDED}
    assert len(imports_of(plain)) == 3


@pytest.mark.parametrize(
    ("files", "times"),
    [
        ({"own.py": "import plain\n"}, 1),
        ({"own.py": "import other\nimport plain\n", "other.py": "X = print()\n"}, 2),
        ({"own.py": "import other\n", "other.py": "import plain\n"}, 1),
        ({"own.py": "import os\nos.environ['X'] = '1'\nimport plain\n"}, 3),
        ({"own/__init__.py": "", "own/part.py": "import plain\n"}, 1),
        ({"own/__init__.py": "print()\n", "own/part.py": "import plain\n"}, 2),
        ({"own/__init__.py": "from . import part\n", "own/part.py": "import plain\n"}, 2),
    ],
)  # fmt: skip
def test_what_a_module_of_the_project_imports_first_is_imported_before_it(
    plain: Path,
    tmp_path: Path,
    files: Mapping[str, str],
    times: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks = tmp_path / "own.marks"
    note = f"import os\nopen({str(marks)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    last = [*files][-1]
    project = {name: (text + note if name == last else text) for name, text in files.items()}
    name = "own.part" if "own/part.py" in files else "own"
    for module in ("own", name):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    call = written("def call(_):\n  return own and os.getpid()", {"own": sys.modules[name]})
    encoded = {name: text.encode() for name, text in project.items()}
    batch = Batch(tmp_path / "b", call, range(3), project=encoded)
    batch.run()
    assert imports_of(marks) == [str(batch.value(index)) for index in range(3)]
    assert len(imports_of(plain)) == times


def test_items_import_an_installed_package_once(packages: Path, tmp_path: Path) -> None:
    marks = package(packages, "plain")
    batch = Batch(tmp_path / "b", using(), ["plain"] * 10)
    batch.run()
    pids = [batch.value(index) for index in range(10)]
    first, shared = imports_of(marks)
    assert first == str(pids[0])
    assert int(shared) not in pids


def test_the_first_item_of_each_new_package_imports_it(packages: Path, tmp_path: Path) -> None:
    one, two = package(packages, "one"), package(packages, "two", "import one\n")
    batch = Batch(tmp_path / "b", using(), ["one", "two", "one", "two"])
    batch.run()
    assert [len(imports_of(marks)) for marks in (one, two)] == [2, 2]


def test_a_package_that_depends_on_what_the_function_set_is_imported_anew(
    packages: Path, tmp_path: Path
) -> None:
    plain = package(packages, "plain")
    marks = package(packages, "backend", "VALUE = os.environ.get('BACKEND')\n")

    def choose(backend: str) -> Any:
        importlib.import_module("plain")

        os.environ["BACKEND"] = backend
        chosen: Any = importlib.import_module("backend")

        return chosen.VALUE

    batch = Batch(tmp_path / "b", choose, ["jax", "torch", "jax"])
    batch.run()
    assert [batch.value(index) for index in range(3)] == ["jax", "torch", "jax"]
    assert len(imports_of(marks)) == 3
    assert len(imports_of(plain)) == 2


@pytest.mark.parametrize("change", ["folder", "path", "filters"])
def test_other_states_that_imports_depend_on(packages: Path, tmp_path: Path, change: str) -> None:
    marks = package(packages, "plain")

    def change_and_import(number: int) -> None:
        import warnings

        if change == "folder":
            os.chdir("/")
        elif change == "path":
            sys.path.append("/nowhere")
        else:
            warnings.simplefilter("ignore")
        importlib.import_module("plain")

    batch = Batch(tmp_path / "b", change_and_import, range(3))
    batch.run()
    assert len(imports_of(marks)) == 3


def test_a_package_may_set_variables_itself(packages: Path, tmp_path: Path) -> None:
    setting = package(packages, "setting", "os.environ['SET_BY_PACKAGE'] = 'x'\n")
    plain = package(packages, "plain")

    def both(number: int) -> str:
        importlib.import_module("plain")
        importlib.import_module("setting")

        return os.environ["SET_BY_PACKAGE"]

    batch = Batch(tmp_path / "b", both, range(3))
    batch.run()
    assert [batch.value(index) for index in range(3)] == ["x"] * 3
    assert [len(imports_of(marks)) for marks in (setting, plain)] == [2, 2]


def test_nothing_outside_the_installed_packages_is_shared(packages: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    plain = package(packages, "plain")
    own = package(project, "own", "import plain\n")

    def use_both(folder: str) -> None:
        if folder not in sys.path:
            sys.path.insert(0, folder)
        importlib.import_module("own")

    os.environ["PYTHONPATH"] += f":{project}"  # the fixture restores it
    batch = Batch(tmp_path / "b", use_both, [str(project)] * 3)
    batch.run()
    assert len(imports_of(own)) == 3
    assert len(imports_of(plain)) == 2


def test_no_accelerator_runtime_is_shared(packages: Path, tmp_path: Path) -> None:
    jax = package(packages, "jax")
    above = package(packages, "above", "import jax\n")
    after = package(packages, "after")

    def use_all(number: int) -> None:
        importlib.import_module("above")
        importlib.import_module("after")

    batch = Batch(tmp_path / "b", use_all, range(3))
    batch.run()
    assert [len(imports_of(marks)) for marks in (jax, above, after)] == [3, 3, 3]


@pytest.mark.parametrize("kind", ["import", "caught", "module", "class"])
def test_no_accelerator_runtime_is_imported_before_the_first_item(
    packages: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax = package(packages, "jax", "class Thing: pass\n")
    caught = "try:\n    import jax\nexcept BaseException:\n    pass\n"
    package(packages, "above", "import jax\n" if kind == "import" else caught)
    module = types.ModuleType("jax")
    exec("class Thing: pass", vars(module))
    monkeypatch.setitem(sys.modules, "jax", module)
    used = {"module": module, "class": vars(module)["Thing"]}.get(kind)
    source = "def call(_):\n  import above\n  return used, os.getpid()"
    batch = Batch(tmp_path / "b", written(source, {"used": used}), range(3))
    batch.run()
    assert imports_of(jax) == [str(batch.value(index)[1]) for index in range(3)]
    assert "imports its packages itself" not in batch.output()


THREAD = """\
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (THREAD, "they start threads"),
        ("FILE = open('/dev/null')\n", "they open files"),
        ("import tempfile\ntempfile.mkdtemp()\n", "they write temporary files"),
        ("os.register_at_fork(before=lambda: sum(range(2_000_000)))\n", "forks become slower"),
        ("import random\nVALUE = random.Random()\n", "a generator of random numbers"),
        ("if 'KINETIC_INDEX' not in os.environ: raise ValueError('not here')\n", "not here"),
        ("if 'KINETIC_INDEX' not in os.environ: os._exit(9)\n", "status 9"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("foreseen", [pytest.param(False, marks=pytest.mark.full), True])
def test_imports_that_forks_cannot_share(
    packages: Path, tmp_path: Path, source: str, reason: str, foreseen: bool
) -> None:
    marks = package(packages, "bad", source)
    call = written("def call(_):\n  import bad") if foreseen else using()
    batch = Batch(tmp_path / "b", call, ["bad"] * 4)
    batch.run()
    assert set(batch.states()) == {wire.ItemState.SUCCEEDED}
    assert len(imports_of(marks)) == 5 + foreseen  # each item, and the trials
    assert batch.output().count("each job imports its packages itself") == 1
    assert reason in batch.output()


def test_a_new_interpreter_imports_the_same(packages: Path, tmp_path: Path) -> None:
    marks = package(packages, "plain")

    def crash_parent(number: int) -> int:
        import signal
        import time

        importlib.import_module("plain")

        if number == 1:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        return os.getpid()

    batch = Batch(tmp_path / "b", crash_parent, range(4))
    batch.run()
    assert [it == wire.ItemState.SUCCEEDED for it in batch.states()] == [True, False, True, True]
    assert len(imports_of(marks)) == 3  # the first item, and each interpreter


def test_callbacks_of_forks_run_in_each_item(packages: Path, tmp_path: Path) -> None:
    hook = "lambda: os.environ.__setitem__('HOOKED', str(os.getpid()))"
    source = f"import os\nos.register_at_fork(after_in_child={hook})\n"
    (packages / "sitecustomize.py").write_text(source)

    def hooked(number: int) -> bool:
        return os.environ["HOOKED"] == str(os.getpid())

    batch = Batch(tmp_path / "b", hooked, range(2))
    batch.run()
    assert [batch.value(index) for index in range(2)] == [True, True]


def test_random_numbers_differ(tmp_path: Path) -> None:
    import random

    def draw(number: int) -> float:
        return random.random()

    batch = Batch(tmp_path, draw, range(5))
    batch.run()
    assert len({batch.value(index) for index in range(5)}) == 5


@pytest.mark.full
def test_scientific_packages(tmp_path: Path) -> None:
    for name in ("numpy", "sklearn"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}: pip install scikit-learn")

    def fit(number: int) -> tuple[bool, float, float, float]:
        import random

        is_shared = "sklearn.linear_model" in sys.modules
        np: Any = importlib.import_module("numpy")
        linear_model: Any = importlib.import_module("sklearn.linear_model")
        x = np.arange(2000.0).reshape(-1, 2)
        score = (
            linear_model.LinearRegression().fit(x, x @ np.array([1.0, 2.0])).score(x, x.sum(axis=1))
        )
        assert np.allclose(np.ones((300, 300)) @ np.ones((300, 300)), 300)  # OpenBLAS's threads
        return is_shared, float(score), float(np.random.rand()), random.random()

    batch = Batch(tmp_path, fit, range(10))
    batch.run()
    found = [batch.value(index) for index in range(10)]
    assert [shared for shared, _, _, _ in found] == [False] + [True] * 9
    assert len({number for _, _, number, _ in found}) == 10
    assert len({number for _, _, _, number in found}) == 10
    assert "imports its packages itself" not in batch.output()
