"""Test which files are left out: by default, by ``.kineticignore``, and always."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kinetic._packing import ignore, tree
from kinetic.errors import PackError

from .conftest import Make


def packed_names(root: Path, **environ: str) -> list[str]:
    found = tree.scan(root, ignore.read_rules(root, environ))
    return [entry.name for entry in found.entries if not entry.is_directory]


def test_files_that_tools_create_are_left_out_by_default(tmp_path: Path, make: Make) -> None:
    by_tools = ["node_modules/x.js", ".venv/x", "deep/venv/x", ".tox/x", ".mypy_cache/x"]
    by_tools += [".ruff_cache/x", ".pytest_cache/x", ".ipynb_checkpoints/x.ipynb", "a/.DS_Store"]
    never = [".git/HEAD", "a/.git", "a/__pycache__/m.pyc"]
    make(tmp_path, dict.fromkeys([*by_tools, *never, "a/m.py", "venvs/x"], ""))
    assert packed_names(tmp_path) == ["a/m.py", "venvs/x"]
    everything = packed_names(tmp_path, KINETIC_NO_DEFAULT_EXCLUDES="1")
    assert everything == sorted([*by_tools, "a/m.py", "venvs/x"])
    assert packed_names(tmp_path, KINETIC_NO_DEFAULT_EXCLUDES="0") == ["a/m.py", "venvs/x"]


@pytest.mark.parametrize("name", [".venv", "venv", "env", "my environment", ".env", "py311"])
@pytest.mark.parametrize("marker", ["pyvenv.cfg", "conda-meta/history"])
def test_a_virtual_environment_of_any_name_is_never_packed(
    name: str, marker: str, tmp_path: Path, make: Make
) -> None:
    inside = {f"a/{name}/{marker}": "", f"a/{name}/lib/python3/site-packages/numpy.py": ""}
    make(tmp_path, {**inside, "a/m.py": "", ".kineticignore": f"!{name}\n!{name}/**\n"})
    (tmp_path / "link").symlink_to(f"a/{name}")
    (tmp_path / "packages").symlink_to(f"a/{name}/lib/python3/site-packages")
    for no_defaults in ("", "1"):
        assert packed_names(tmp_path, KINETIC_NO_DEFAULT_EXCLUDES=no_defaults) == [
            ".kineticignore",
            "a/m.py",
        ]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("bin/python lib/python3.11/site-packages/x.py include/x.h m.py src/lib/y.py",
         ["m.py", "src/lib/y.py"]),
        ("Lib/site-packages/x.py lib/own.py", ["lib/own.py"]),  # the project has a lib, too
    ],
)  # fmt: skip
def test_an_environment_at_the_root_of_the_project_is_left_out(
    files: str, expected: list[str], tmp_path: Path, make: Make
) -> None:
    make(tmp_path, dict.fromkeys(["pyvenv.cfg", *files.split()], ""))
    (tmp_path / "lib64").symlink_to("lib")
    assert packed_names(tmp_path) == expected


def test_rules_of_the_file_override_the_defaults(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {".kineticignore": "!node_modules\n*.bin\n!keep.bin\n/only/here\nlogs/\n"})
    files = ["node_modules/x.js", "a.bin", "keep.bin", "only/here", "deep/only/here"]
    make(tmp_path, dict.fromkeys([*files, "logs/x", "deep/logs/x", "deep/a/logs"], ""))
    assert packed_names(tmp_path) == [
        ".kineticignore",
        "deep/a/logs",
        "deep/only/here",
        "keep.bin",
        "node_modules/x.js",
    ]


@pytest.mark.parametrize(
    ("rules", "files", "expected"),
    [
        ("*\n!*/\n!*.py\n", "a.c a.py deep/er/b.py deep/er/b.c", ["a.py", "deep/er/b.py"]),
        # including one folder again includes nothing else
        ("!vendor\n*.c\n!vendor\n", "vendor/venv/x vendor/y.c vendor/y.py",
         [".kineticignore", "vendor/y.py"]),
        # a byte order mark and Windows line ends
        ("\ufeffa\r\nb \r\n# c\r\n\r\n", "a b c", [".kineticignore", "c"]),
    ],
)  # fmt: skip
def test_rules_may_include_files_again(
    rules: str, files: str, expected: list[str], tmp_path: Path, make: Make
) -> None:
    make(tmp_path, {".kineticignore": rules, **dict.fromkeys(files.split(), "")})
    assert packed_names(tmp_path) == expected


def test_only_the_rules_at_the_root_are_read(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"a/.kineticignore": "*\n", "a/x": ""})
    assert packed_names(tmp_path) == ["a/.kineticignore", "a/x"]


def test_a_bad_pattern_is_named_with_its_line(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {".kineticignore": "fine\n!\n"})
    with pytest.raises(PackError, match="line 2: '!'") as caught:
        packed_names(tmp_path)
    assert caught.value.culprit == ".kineticignore:2"


def test_rules_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    (tmp_path / ".kineticignore").mkdir()
    with pytest.raises(PackError, match="unknown"):
        packed_names(tmp_path)


WORD = st.sampled_from(["a", "b", "ab", "a.b", "a b"])
PATTERN = st.builds(
    lambda negated, anchored, parts, directory: (
        f"{'!' * negated}{'/' * anchored}{'/'.join(parts)}{'/' * directory}"
    ),
    st.booleans(),
    st.booleans(),
    st.lists(
        st.sampled_from(["a", "b", "a*", "*.b", "?", "[ab]", "*", "**", "a?b"]),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)


@pytest.mark.full
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    paths=st.sets(st.lists(WORD, min_size=1, max_size=3).map("/".join), min_size=1, max_size=7),
    patterns=st.lists(PATTERN | st.just("# a"), min_size=1, max_size=4),
)
def test_patterns_mean_the_same_as_in_git(paths: set[str], patterns: list[str]) -> None:
    """The scan must keep the files that ``git add`` would add."""
    with tempfile.TemporaryDirectory(prefix="kinetic-git-") as scratch:
        root = Path(scratch)
        for path in sorted(paths):
            try:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).touch()
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                assume(False)
        (root / ".kineticignore").write_text("\n".join(patterns))
        (root / ".gitignore").write_text("\n".join(patterns))
        environ = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
        for command in (
            ["init", "-q"],
            ["ls-files", "-o", "-z", "--exclude-per-directory=.gitignore"],
        ):
            listed = subprocess.run(
                ["git", *command], cwd=root, env=environ, check=True, capture_output=True
            ).stdout.decode()
        (root / ".gitignore").unlink()
        expected = sorted(name for name in listed.split("\0") if name and not name.startswith("."))
        assert [name for name in packed_names(root) if not name.startswith(".")] == expected
