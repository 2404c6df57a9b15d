"""Check rules of CONTRIBUTING.md: module names, docstrings, forbidden mentions, and imports."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("layout")  # one process parses all files, once

ROOT = Path(__file__).parents[1]
VAGUE_NAMES = {"base", "common", "core", "helpers", "manager", "misc", "shared", "tools", "utils"}

# Each pattern is written in two parts, so that it doesn't match this file.
FORBIDDEN = re.compile(
    "|".join(
        [
            r"(?<!\w)/work/" + r"(main|shared|\.)",
            r"\bshared/" + r"(design|seeds|reference|cluster|hooks)",
            r"\bissue" + r" #?\d+",
        ]
    )
)
PATCHES = re.compile(
    r"mock\.patch|patch\(\s*[\"']kinetic|monkeypatch\.setattr\(\s*[\"']?(kinetic|runner)\b"
)
LIBRARY = sorted(
    path
    for package in ("kinetic", "runner")
    for path in (ROOT / package).rglob("*.py")
    if "_runner" not in path.relative_to(ROOT).parts  # the link to runner/
)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def project_files() -> Iterator[Path]:
    """Yield every text file that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in path.read_bytes()[:1024]:
            yield path


def test_modules_are_named_after_their_concepts() -> None:
    vague = [relative(path) for path in LIBRARY if path.stem.strip("_") in VAGUE_NAMES]
    assert vague == []


def test_every_module_has_a_docstring() -> None:
    assert [relative(path) for path in LIBRARY if not ast.get_docstring(parsed(path))] == []


def test_no_file_mentions_paths_outside_the_project_or_issue_numbers() -> None:
    mentions = [
        f"{relative(path)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path in project_files()
        if path != ROOT / ".ci" / "run"  # only this file may use paths of its machine
        for text in [path.read_text(errors="replace")]
        for match in FORBIDDEN.finditer(text)
    ]
    assert not mentions


def test_no_test_patches_a_module_of_kinetic() -> None:
    """Use a fake of the port or a real part, because a patch fixes internals, not behavior."""
    patched = [
        f"{relative(path)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != Path(__file__)
        for text in [path.read_text()]
        for match in PATCHES.finditer(text)
    ]
    assert not patched


def test_no_test_imports_a_file_of_tests() -> None:
    """Code that two of them share belongs in a conftest or in a module with a telling name."""
    imports = re.compile(r"^\s*(from\s+\S*\btest_\w+\s+import|(from|import)\s.*\btest_\w+)", re.M)
    found = [
        f"{relative(path)}: {match[0].strip()}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for match in imports.finditer(path.read_text())
    ]
    assert not found


def test_the_runner_in_the_package_is_the_runner() -> None:
    link = ROOT / "kinetic" / "_runner"
    assert link.resolve() == (ROOT / "runner").resolve()


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports for types count, too: nobody can read the files of a cycle separately."""
    files = {_module(path): path for path in LIBRARY}
    graph = {name: {*_imports(path, files)} - {name} for name, path in files.items()}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the files


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules that *path* imports anywhere in it."""
    package = _module(path.parent / "__init__.py")
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            parent = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, (parent, node.module)))
            submodules = {
                name for alias in node.names if (name := f"{module}.{alias.name}") in files
            }
            yield from submodules
            if module in files and len(submodules) < len(node.names):
                yield module
