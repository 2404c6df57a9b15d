"""Test how the project of a function is found: its root and its import path."""

from __future__ import annotations

import functools
import importlib.util
import json
import operator
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kinetic._packing.discover import Project, current_directory, find_project
from kinetic.errors import ConfigurationError

from .conftest import Make, Python, last_line

REPORT = """
import json, os, pathlib
from kinetic._packing import discover
def f(): pass
p = discover.find_project(f, environ=os.environ, cwd=pathlib.Path.cwd())
print(json.dumps([str(p.root), str(p.entry_dir), p.cwd, list(p.sys_path)]))
"""


Load = Callable[[Path], ModuleType]


@pytest.fixture
def load() -> Iterator[Load]:
    """Return a function that imports a file under a new name."""
    loaded: list[str] = []

    def load_module(path: Path) -> ModuleType:
        name = f"discover_{len(loaded)}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        loaded.append(name)
        spec.loader.exec_module(module)
        return module

    yield load_module
    for name in loaded:
        del sys.modules[name]


def find(function: Any, cwd: Path, **environ: str) -> Project:
    return find_project(function, environ={"HOME": "/nowhere", **environ}, cwd=cwd, path=())


@pytest.mark.parametrize(
    ("files", "module", "root"),
    [
        # the nearest marker
        *(
            (["pyproject.toml", f"inner/{marker}"], "inner/a/b/m.py", "inner")
            for marker in ("pyproject.toml", "requirements.txt", "setup.py", "setup.cfg")
        ),
        # a repository or a worktree
        ([".git/"], "src/m.py", "."),
        ([".git"], "src/m.py", "."),
        # the first marker outside the function's package
        (
            ["setup.cfg", "src/pkg/__init__.py", "src/pkg/setup.py", "src/pkg/sub/__init__.py"],
            "src/pkg/sub/m.py",
            ".",
        ),
        # without a marker, the directory that has the package
        (["x/pkg/__init__.py"], "x/pkg/m.py", "x"),
    ],
)
def test_the_nearest_marker_outside_the_package_makes_the_root(
    files: list[str], module: str, root: str, tmp_path: Path, make: Make, load: Load
) -> None:
    make(tmp_path, {**dict.fromkeys(files, ""), module: "def f(): ..."})
    found = find(load(tmp_path / module).f, tmp_path)
    assert found.root == tmp_path / root
    assert found.entry_dir == (tmp_path / module).parent


def test_wrapped_functions_belong_to_the_project_of_their_file(
    tmp_path: Path, make: Make, load: Load
) -> None:
    make(
        tmp_path / "project",
        {
            "pyproject.toml": "",
            "m.py": """
            import functools
            def f(x=1): ...
            class C:
                def method(self): ...
                @classmethod
                def made(cls): ...
                @staticmethod
                def plain(): ...
                def __call__(self): ...
            cached = functools.lru_cache(f)
            """,
        },
    )
    module = load(tmp_path / "project/m.py")
    instance = module.C()
    wrapped = [
        module.f,
        functools.partial(functools.partial(module.f, 1), x=2),
        instance.method,
        module.C.made,
        module.C.plain,
        instance,
        module.C,
        functools.partial(instance.method),
        module.cached,
        lambda: 0,
    ]
    roots = [find(function, tmp_path).root for function in wrapped]
    assert roots[:-1] == [tmp_path / "project"] * (len(wrapped) - 1)
    assert roots[-1] == Path(__file__).parents[2]


@pytest.mark.parametrize("function", [len, operator.add, json.dumps, pytest.skip, functools.reduce])
def test_library_functions_belong_to_the_project_of_the_working_directory(
    function: Any, tmp_path: Path, make: Make
) -> None:
    make(tmp_path, {"pyproject.toml": "", "work/": ""})
    assert find(function, tmp_path / "work").root == tmp_path
    assert find(function, tmp_path / "work").cwd == "work"


def test_home_and_its_parents_are_never_roots(
    tmp_path: Path,
    make: Make,
    load: Load,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make(tmp_path, {"home/me/.git/": "", "home/.git/": "", "home/me/m.py": "def f(): ..."})
    make(tmp_path, {"home/me/work/m.py": "def f(): ..."})
    home = str(tmp_path / "home/me")
    inside = find(load(tmp_path / "home/me/work/m.py").f, tmp_path, HOME=home)
    assert inside.root == tmp_path / "home/me/work"
    assert not caplog.records
    project = find(load(tmp_path / "home/me/m.py").f, tmp_path / "home/me", HOME=home)
    assert project.root is None
    assert project.sys_path == ()
    assert "KINETIC_PACKAGE_ROOT" in caplog.text


@pytest.mark.parametrize("folder", ["/", tempfile.gettempdir()])
def test_the_root_folder_and_the_temporary_folder_are_never_roots(folder: str) -> None:
    assert find(len, Path(folder)).root is None


def test_a_variable_may_set_the_root(tmp_path: Path, make: Make, load: Load) -> None:
    make(tmp_path, {"mono/one/pyproject.toml": "", "mono/one/m.py": "def f(): ..."})
    module = load(tmp_path / "mono/one/m.py")
    assert find(module.f, tmp_path).root == tmp_path / "mono/one"
    named = find(module.f, tmp_path, KINETIC_PACKAGE_ROOT=str(tmp_path / "mono"))
    assert named.root == tmp_path / "mono"
    # The variable may also name the home directory, and be relative to the working directory.
    home = find(module.f, tmp_path, KINETIC_PACKAGE_ROOT="mono", HOME=str(tmp_path / "mono"))
    assert home.root == tmp_path / "mono"


@pytest.mark.parametrize(
    ("root", "message"), [("other", "does not contain"), ("none", "not a dir")]
)
def test_the_root_in_the_variable_must_exist_and_contain_the_function(
    root: str, message: str, tmp_path: Path, make: Make, load: Load
) -> None:
    make(tmp_path, {"other/": "", "project/m.py": "def f(): ..."})
    function = load(tmp_path / "project/m.py").f
    with pytest.raises(ConfigurationError, match=message):
        find(function, tmp_path, KINETIC_PACKAGE_ROOT=str(tmp_path / root))
    with pytest.raises(ConfigurationError, match="root of the file system"):
        find(function, tmp_path, KINETIC_PACKAGE_ROOT="/")


def test_the_import_path_is_the_callers_within_the_root(tmp_path: Path, make: Make) -> None:
    root = make(
        tmp_path / "project",
        {
            "pyproject.toml": "",
            "src/": "",
            "scripts/": "",
            "env/pyvenv.cfg": "",
            "env/lib/python3/site-packages/": "",
            "env/src/editable/": "",
            "vendored/site-packages/": "",
            "lib.zip": b"",
        },
    )
    path = [
        str(root / "scripts"),
        "/usr/lib/python3",
        str(root / "env/lib/python3/site-packages"),
        str(root / "env/src/editable"),
        str(root / "vendored/site-packages"),
        str(root / "missing"),
        str(root / "src"),
        str(root / "lib.zip"),
        str(root / "src") + "/",
    ]
    project = find_project(len, environ={"HOME": "/nowhere"}, cwd=root, path=path)
    assert project.sys_path == ("scripts", "src", "lib.zip", "")
    first = find_project(len, environ={"HOME": "/nowhere"}, cwd=root / "src", path=["", *path])
    assert first.sys_path[0] == "src"
    assert first.cwd == "src"
    assert find_project(len, environ={}, cwd=root, path=[""]).sys_path == ("",)


def test_a_linked_folder_is_resolved_and_a_linked_file_is_not(
    tmp_path: Path, make: Make, load: Load
) -> None:
    make(tmp_path, {"real/pyproject.toml": "", "shared/m.py": "def f(): ..."})
    (tmp_path / "alias").symlink_to("real")
    (tmp_path / "real/m.py").symlink_to("../shared/m.py")
    function = load(tmp_path / "alias/m.py").f
    assert (
        find(function, tmp_path).root == tmp_path / "real"
    )  # the folder of the link, not of its target
    assert find(len, tmp_path / "alias").cwd == ""


def test_a_script_is_in_its_own_project(tmp_path: Path, make: Make, python: Python) -> None:
    make(tmp_path, {"project/setup.py": "", "project/bin/run.py": REPORT, "elsewhere/": ""})
    root, project_bin = str(tmp_path / "project"), str(tmp_path / "project/bin")
    script = project_bin + "/run.py"
    assert last_line(python(script, cwd=tmp_path / "elsewhere")) == [
        root,
        project_bin,
        None,
        ["bin", ""],
    ]
    assert last_line(python(script, cwd=tmp_path / "project"))[2] == ""
    assert last_line(python("-m", "bin.run", cwd=tmp_path / "project"))[:2] == [root, project_bin]


@pytest.mark.parametrize("kind", ["command", "stdin", "interactive", "notebook"])
def test_code_without_a_file_is_in_the_project_of_the_working_directory(
    kind: str, tmp_path: Path, make: Make, python: Python
) -> None:
    make(tmp_path, {"project/setup.py": "", "project/notes/": ""})
    commands = {
        "command": (("-c", REPORT), ""),
        "stdin": (("-",), REPORT),
        "interactive": (("-i", "-q"), REPORT.replace(": pass", ": pass\n") + "\n"),
        # A kernel compiles cells under names of files that don't exist.
        "notebook": (
            ("-c", f"exec(compile({REPORT!r}, '/tmp/ipykernel_1/2.py', 'exec'), globals())"),
            "",
        ),
    }
    command, stdin = commands[kind]
    printed = python(*command, cwd=tmp_path / "project/notes", stdin=stdin)
    root, notes = str(tmp_path / "project"), str(tmp_path / "project/notes")
    assert last_line(printed) == [root, notes, "notes", ["notes", ""]]


def test_the_code_in_a_zip_file_is_in_the_project_around_it(
    tmp_path: Path, make: Make, python: Python
) -> None:
    make(tmp_path, {"project/setup.py": "", "app/__main__.py": REPORT})
    target = tmp_path / "project/app.pyz"
    python("-m", "zipapp", str(tmp_path / "app"), "-o", str(target), cwd=tmp_path)
    assert last_line(python(str(target), cwd=tmp_path))[0] == str(tmp_path / "project")


def test_a_deleted_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(ConfigurationError, match="the current directory"):
        current_directory()


def test_an_environment_without_home_is_enough(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "HOME"}
    project = find_project(len, environ=environ, cwd=tmp_path)
    assert project.root == tmp_path
