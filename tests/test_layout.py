"""The rules of CONTRIBUTING.md that a machine can check: names, exports, mentions."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
VAGUE_NAMES = {"base", "common", "core", "helpers", "manager", "misc", "shared", "tools", "utils"}

# Written apart, so that this file may contain them.
UNSPEAKABLE = re.compile(
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
    """Every text file that is, or is about to be, part of the repository."""
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
    assert [one for one in map(relative, LIBRARY) if Path(one).stem.strip("_") in VAGUE_NAMES] == []


def test_a_module_says_what_it_is_for() -> None:
    silent = [path for path in LIBRARY if not ast.get_docstring(parsed(path))]
    assert not silent, "a sentence, please"


def test_nothing_of_the_workshop_is_mentioned() -> None:
    mentions = [
        f"{relative(path)}:{number}"
        for path in project_files()
        if path != ROOT / ".ci" / "run"  # the one place that knows what its machine has
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if UNSPEAKABLE.search(line)
    ]
    assert not mentions


def test_no_test_patches_a_module_of_ours() -> None:
    """Use a fake of the port, or a real part: patches hold the inside in place, not the promise."""
    patched = [
        f"{relative(path)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != Path(__file__)
        for text in [path.read_text()]
        for match in PATCHES.finditer(text)
    ]
    assert not patched


def test_no_test_imports_a_file_of_tests() -> None:
    """What two of them share is in a conftest or in a module that says what it is."""
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
    """Also not for its types alone: what belongs together in a circle cannot be read apart."""
    files = {_module(path): path for path in LIBRARY}
    graph = {name: {*_imports(path, files)} - {name} for name, path in files.items()}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the files


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    """The files that one imports, wherever in it."""
    package = _module(path.parent / "__init__.py")
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in files)
        elif isinstance(node, ast.ImportFrom):
            near = package.rsplit(".", node.level - 1)[0] if node.level else ""
            home = ".".join(filter(None, (near, node.module)))
            inside = {name for one in node.names if (name := f"{home}.{one.name}") in files}
            yield from inside
            if home in files and len(inside) < len(node.names):
                yield home
