"""Which files stay: the defaults, ``.kineticignore`` as git would read it, and what never ships."""

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


def shipped(root: Path, **environ: str) -> list[str]:
    found = tree.scan(root, ignore.read_rules(root, environ))
    return [one.name for one in found.entries if not one.is_directory]


def test_the_defaults_leave_out_what_tools_make(tmp_path: Path, make: Make) -> None:
    made = ["node_modules/x.js", ".venv/x", "deep/venv/x", ".tox/x", ".mypy_cache/x"]
    made += [".ruff_cache/x", ".pytest_cache/x", ".ipynb_checkpoints/x.ipynb", "a/.DS_Store"]
    never = [".git/HEAD", "a/.git", "a/__pycache__/m.pyc"]
    make(tmp_path, dict.fromkeys([*made, *never, "a/m.py", "venvs/x"], ""))
    assert shipped(tmp_path) == ["a/m.py", "venvs/x"]
    everything = shipped(tmp_path, KINETIC_NO_DEFAULT_EXCLUDES="1")
    assert everything == sorted([*made, "a/m.py", "venvs/x"])
    assert shipped(tmp_path, KINETIC_NO_DEFAULT_EXCLUDES="0") == ["a/m.py", "venvs/x"]


@pytest.mark.parametrize("name", [".venv", "venv", "env", "my environment", ".env", "py311"])
@pytest.mark.parametrize("mark", ["pyvenv.cfg", "conda-meta/history"])
def test_a_virtual_environment_never_ships_whatever_its_name(
    name: str, mark: str, tmp_path: Path, make: Make
) -> None:
    inside = {f"a/{name}/{mark}": "", f"a/{name}/lib/python3/site-packages/numpy.py": ""}
    make(tmp_path, {**inside, "a/m.py": "", ".kineticignore": f"!{name}\n!{name}/**\n"})
    (tmp_path / "link").symlink_to(f"a/{name}")
    (tmp_path / "packages").symlink_to(f"a/{name}/lib/python3/site-packages")
    for plain in ("", "1"):
        assert shipped(tmp_path, KINETIC_NO_DEFAULT_EXCLUDES=plain) == [".kineticignore", "a/m.py"]


@pytest.mark.parametrize(
    ("files", "ships"),
    [
        ("bin/python lib/python3.11/site-packages/x.py include/x.h m.py src/lib/y.py",
         ["m.py", "src/lib/y.py"]),
        ("Lib/site-packages/x.py lib/mine.py", ["lib/mine.py"]),  # a lib of the project's own
    ],
)  # fmt: skip
def test_an_environment_made_in_the_project_itself_is_left_out(
    files: str, ships: list[str], tmp_path: Path, make: Make
) -> None:
    make(tmp_path, dict.fromkeys(["pyvenv.cfg", *files.split()], ""))
    (tmp_path / "lib64").symlink_to("lib")
    assert shipped(tmp_path) == ships


def test_the_file_has_the_last_word_over_the_defaults(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {".kineticignore": "!node_modules\n*.bin\n!keep.bin\n/only/here\nlogs/\n"})
    files = ["node_modules/x.js", "a.bin", "keep.bin", "only/here", "deep/only/here"]
    make(tmp_path, dict.fromkeys([*files, "logs/x", "deep/logs/x", "deep/a/logs"], ""))
    assert shipped(tmp_path) == [
        ".kineticignore",
        "deep/a/logs",
        "deep/only/here",
        "keep.bin",
        "node_modules/x.js",
    ]


@pytest.mark.parametrize(
    ("rules", "files", "ships"),
    [
        ("*\n!*/\n!*.py\n", "a.c a.py deep/er/b.py deep/er/b.c", ["a.py", "deep/er/b.py"]),
        # what comes back brings nothing else back
        ("!vendor\n*.c\n!vendor\n", "vendor/venv/x vendor/y.c vendor/y.py",
         [".kineticignore", "vendor/y.py"]),
        # line ends and marks of other systems
        ("\ufeffa\r\nb \r\n# c\r\n\r\n", "a b c", [".kineticignore", "c"]),
    ],
)  # fmt: skip
def test_what_a_file_of_rules_lets_through(
    rules: str, files: str, ships: list[str], tmp_path: Path, make: Make
) -> None:
    make(tmp_path, {".kineticignore": rules, **dict.fromkeys(files.split(), "")})
    assert shipped(tmp_path) == ships


def test_only_the_file_at_the_root_counts(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"a/.kineticignore": "*\n", "a/x": ""})
    assert shipped(tmp_path) == ["a/.kineticignore", "a/x"]


def test_a_bad_pattern_is_named_with_its_line(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {".kineticignore": "fine\n!\n"})
    with pytest.raises(PackError, match="line 2: '!'") as caught:
        shipped(tmp_path)
    assert caught.value.culprit == ".kineticignore:2"


def test_a_file_of_rules_that_cannot_be_read_ships_nothing(tmp_path: Path) -> None:
    (tmp_path / ".kineticignore").mkdir()
    with pytest.raises(PackError, match="unknown"):
        shipped(tmp_path)


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


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    paths=st.sets(st.lists(WORD, min_size=1, max_size=3).map("/".join), min_size=1, max_size=7),
    patterns=st.lists(PATTERN | st.just("# a"), min_size=1, max_size=4),
)
def test_patterns_mean_what_they_mean_to_git(paths: set[str], patterns: list[str]) -> None:
    """git lists what it would add; the scan must ship the same files."""
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
        expected = sorted(one for one in listed.split("\0") if one and not one.startswith("."))
        assert [one for one in shipped(root) if not one.startswith(".")] == expected
