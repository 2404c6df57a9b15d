"""The project of a function: where its root is, and how it was imported."""

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

from kinetic._packing.discover import Project, find_project
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
    """Import a file under a new name."""
    loaded: list[str] = []

    def importing(path: Path) -> ModuleType:
        name = f"discover_{len(loaded)}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        loaded.append(name)
        spec.loader.exec_module(module)
        return module

    yield importing
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


def test_functions_are_found_behind_what_wraps_them(tmp_path: Path, make: Make, load: Load) -> None:
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
    made = module.C()
    wrapped = [
        module.f,
        functools.partial(functools.partial(module.f, 1), x=2),
        made.method,
        module.C.made,
        module.C.plain,
        made,
        module.C,
        functools.partial(made.method),
        module.cached,
        lambda: 0,
    ]
    roots = [find(one, tmp_path).root for one in wrapped]
    assert roots[:-1] == [tmp_path / "project"] * (len(wrapped) - 1)
    assert roots[-1] == Path(__file__).parents[2]


@pytest.mark.parametrize("function", [len, operator.add, json.dumps, pytest.skip, functools.reduce])
def test_code_of_others_belongs_to_the_working_directory(
    function: Any, tmp_path: Path, make: Make
) -> None:
    make(tmp_path, {"pyproject.toml": "", "work/": ""})
    assert find(function, tmp_path / "work").root == tmp_path
    assert find(function, tmp_path / "work").cwd == "work"


def test_home_and_what_is_above_it_are_never_roots(
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


@pytest.mark.parametrize("place", ["/", tempfile.gettempdir()])
def test_nothing_ships_from_the_top_of_the_machine(place: str) -> None:
    assert find(len, Path(place)).root is None


def test_a_root_can_be_named(tmp_path: Path, make: Make, load: Load) -> None:
    make(tmp_path, {"mono/one/pyproject.toml": "", "mono/one/m.py": "def f(): ..."})
    module = load(tmp_path / "mono/one/m.py")
    assert find(module.f, tmp_path).root == tmp_path / "mono/one"
    named = find(module.f, tmp_path, KINETIC_PACKAGE_ROOT=str(tmp_path / "mono"))
    assert named.root == tmp_path / "mono"
    # Home, too, when somebody says so; relative to the working directory.
    home = find(module.f, tmp_path, KINETIC_PACKAGE_ROOT="mono", HOME=str(tmp_path / "mono"))
    assert home.root == tmp_path / "mono"


@pytest.mark.parametrize(("root", "words"), [("other", "does not contain"), ("none", "not a dir")])
def test_a_named_root_must_exist_and_contain_the_function(
    root: str, words: str, tmp_path: Path, make: Make, load: Load
) -> None:
    make(tmp_path, {"other/": "", "mine/m.py": "def f(): ..."})
    function = load(tmp_path / "mine/m.py").f
    with pytest.raises(ConfigurationError, match=words):
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


def test_links_lead_to_where_things_are(tmp_path: Path, make: Make, load: Load) -> None:
    make(tmp_path, {"real/pyproject.toml": "", "shared/m.py": "def f(): ..."})
    (tmp_path / "alias").symlink_to("real")
    (tmp_path / "real/m.py").symlink_to("../shared/m.py")
    function = load(tmp_path / "alias/m.py").f
    assert find(function, tmp_path).root == tmp_path / "real"  # the link's place, not the target's
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


@pytest.mark.parametrize("way", ["command", "stdin", "interactive", "notebook"])
def test_code_without_a_file_is_in_the_project_of_the_working_directory(
    way: str, tmp_path: Path, make: Make, python: Python
) -> None:
    make(tmp_path, {"project/setup.py": "", "project/notes/": ""})
    commands = {
        "command": (("-c", REPORT), ""),
        "stdin": (("-",), REPORT),
        "interactive": (("-i", "-q"), REPORT.replace(": pass", ": pass\n") + "\n"),
        # A kernel compiles cells under names of files that are not there.
        "notebook": (
            ("-c", f"exec(compile({REPORT!r}, '/tmp/ipykernel_1/2.py', 'exec'), globals())"),
            "",
        ),
    }
    command, stdin = commands[way]
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


def test_the_interpreters_own_home_is_not_needed(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "HOME"}
    project = find_project(len, environ=environ, cwd=tmp_path)
    assert project.root == tmp_path
