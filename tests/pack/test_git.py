"""With ``ship = "git"``, the scan leaves out what git ignores; git itself is the reference."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kinetic import configuration
from kinetic._packing import archive, ignore, tree
from kinetic.errors import ConfigurationError, PackError

from .conftest import REPOSITORY, Make, Python, last_line

Environ = dict[str, str]


def run_git(root: Path, environ: Environ, *command: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main"]
    identity += ["-c", "protocol.file.allow=always"]
    return subprocess.run(
        ["git", *identity, *command],
        cwd=root,
        env={**os.environ, "GIT_CONFIG_NOSYSTEM": "1", **environ},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def kept_by_git(root: Path, environ: Environ) -> list[str]:
    """Return the files that git tracks, and those that it would add."""
    command = ("ls-files", "--cached", "--others", "--exclude-standard", "-z")
    names = set(run_git(root, environ, *command).split("\0"))
    return sorted(name for name in names if name and (root / name).is_file())


def shipped(root: Path, environ: Environ, **variables: str) -> list[str]:
    environ = {"KINETIC_SHIP": "git", "KINETIC_NO_DEFAULT_EXCLUDES": "1", **environ, **variables}
    found = tree.scan(root, ignore.read_rules(root, environ))
    return [entry.name for entry in found.entries if not entry.is_directory]


@pytest.fixture
def environ(tmp_path: Path) -> Environ:
    (tmp_path / "home").mkdir()
    return {"HOME": str(tmp_path / "home"), "GIT_CONFIG_NOSYSTEM": "1"}


@pytest.fixture
def repository(tmp_path: Path, environ: Environ) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    run_git(root, environ, "init", "-q")
    return root


# --- git as the reference ---

NAME = st.sampled_from(["a", "b", "ab", "a.b", "c"])
PATTERN = st.builds(
    lambda negated, anchored, parts, directory: (
        f"{'!' * negated}{'/' * anchored}{'/'.join(parts)}{'/' * directory}"
    ),
    st.booleans(),
    st.booleans(),
    st.lists(
        st.sampled_from(["a", "b", "a*", "*.b", "?", "[ab]", "[[:alpha:].]", "*", "**", "c", "A"]),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
RULES = st.lists(PATTERN | st.sampled_from(["# a", "", "a ", "\\!a", "[[]*"]), max_size=4).map(
    "\n".join
)
FILE = st.lists(NAME, min_size=1, max_size=4).map("/".join)


@pytest.mark.full
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    files=st.sets(FILE, min_size=1, max_size=9),
    rules=st.dictionaries(st.sampled_from(["", "a/", "a/b/", "c/"]), RULES, max_size=4),
    exclude=RULES,
    everywhere=RULES,
    tracked=st.sets(st.integers(0, 8), max_size=3),
    below=st.booleans(),
    index=st.sampled_from(["--index-version=2", "--index-version=4", "--split-index"]),
    ignores_case=st.booleans(),
)
def test_what_ships_is_what_git_keeps(
    files: set[str],
    rules: dict[str, str],
    exclude: str,
    everywhere: str,
    tracked: set[int],
    below: bool,
    index: str,
    ignores_case: bool,
) -> None:
    with tempfile.TemporaryDirectory(prefix="kinetic-git-") as scratch:
        root, home = Path(scratch, "r"), Path(scratch, "home")
        environ = {"HOME": str(home), "GIT_CONFIG_NOSYSTEM": "1"}
        (home / ".config" / "git").mkdir(parents=True)
        (home / ".config" / "git" / "ignore").write_text(everywhere)
        root.mkdir()
        run_git(root, environ, "init", "-q")
        run_git(root, environ, "config", "core.ignoreCase", str(ignores_case).lower())
        (root / ".git" / "info" / "exclude").write_text(exclude)
        for name in sorted(files):
            try:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).touch()
            except OSError:  # a file is in the way
                continue
        for folder, text in rules.items():
            if (root / folder).is_dir():
                (root / folder / ".gitignore").write_text(text)
        names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        names = [name for name in names if not name.startswith(".git/")]
        added = [names[number] for number in tracked if number < len(names)]
        if added:
            run_git(root, environ, "add", "-f", "--", *added)
            run_git(root, environ, "update-index", index)
        assert shipped(root, environ) == kept_by_git(root, environ)
        if below and (root / "a").is_dir():
            # A project below the top of the work tree ships, even if git ignores all of it.
            inside = [name for name in kept_by_git(root, environ) if name.startswith("a/")]
            command = ["git", "check-ignore", "--no-index", "a/"]
            if subprocess.run(command, cwd=root, env={**os.environ, **environ}).returncode:
                assert [f"a/{name}" for name in shipped(root / "a", environ)] == inside


@pytest.mark.parametrize("kind", ["submodule", "repository", "work tree", "sha256"])
def test_other_kinds_of_repositories(
    kind: str, tmp_path: Path, environ: Environ, make: Make
) -> None:
    root = tmp_path / "root"
    inner = {".gitignore": "*.log\n!keep.log\n", "x.log": "", "keep.log": "", "m.py": ""}
    make(root, {".gitignore": "*.py\n", "n.py": "", "y.log": ""})
    run_git(root, environ, "init", "-q", *(["--object-format=sha256"] * (kind == "sha256")))
    run_git(root, environ, "add", "-f", "n.py", ".gitignore")
    run_git(root, environ, "commit", "-qm", "m")
    expected = [".gitignore", "n.py", "y.log"]
    if kind == "submodule":
        make(tmp_path / "other", inner)
        run_git(tmp_path / "other", environ, "init", "-q")
        run_git(tmp_path / "other", environ, "add", "-f", ".")
        run_git(tmp_path / "other", environ, "commit", "-qm", "m")
        run_git(root, environ, "submodule", "-q", "add", str(tmp_path / "other"), "inner")
        make(root / "inner", {"new.log": ""})
        expected = [".gitignore", ".gitmodules", *(f"inner/{name}" for name in sorted(inner))]
        expected += ["n.py", "y.log"]
    elif kind == "repository":
        run_git(make(root / "inner", inner), environ, "init", "-q")
        expected[1:1] = ["inner/.gitignore", "inner/keep.log", "inner/m.py"]
    elif kind == "work tree":
        (root / ".git" / "info" / "exclude").write_text("local\n")
        run_git(root, environ, "worktree", "add", "-q", str(tmp_path / "tree"))
        root = make(tmp_path / "tree", {"local": "", "ignored.py": ""})
        expected = [".gitignore", "n.py"]
    assert shipped(root, environ) == expected


def test_the_file_of_the_user_is_found_as_git_finds_it(
    repository: Path, environ: Environ, make: Make
) -> None:
    make(repository, dict.fromkeys(["a", "b", "c", "d"], ""))
    home = Path(environ["HOME"])
    make(home, {".config/git/ignore": "a\n", "b.txt": "b\n", "c.txt": "c\n", "x/git/ignore": "d\n"})

    def check(expected: str, **variables: str) -> None:
        assert shipped(repository, {**environ, **variables}) == [*expected]
        assert kept_by_git(repository, {**environ, **variables}) == [*expected]

    check("bcd")
    check("abc", XDG_CONFIG_HOME=str(home / "x"))
    make(home, {".gitconfig": '[user]\n\tname = n\n[CORE]\n\texcludesFile = "~/b.txt" # mine\n'})
    check("acd")
    make(home, {"more": "[core]\nexcludesfile = ~/c.txt\n"})
    make(home, {".gitconfig": "[core] excludesFile = ~/b.txt\n[include]\n\tpath = more\n"})
    check("abd")
    check("bcd", GIT_CONFIG_GLOBAL="/dev/null")
    run_git(repository, environ, "config", "core.excludesFile", str(home / "b.txt"))
    check("acd")


def test_a_project_without_a_repository(tmp_path: Path, environ: Environ, make: Make) -> None:
    root = make(
        tmp_path / "copy", {".gitignore": "*.log\n", "a.log": "", "m.py": "", "b/c.log": ""}
    )
    assert shipped(root, environ) == [".gitignore", "m.py"]


# --- beside .kineticignore ---


def test_kineticignore_adds_and_brings_back(repository: Path, environ: Environ, make: Make) -> None:
    make(repository, {".gitignore": "data/\n*.log\nnode_modules/\n", "m.py": "", "notes.txt": ""})
    make(repository, dict.fromkeys(["data/a.csv", "data/deep/b.csv", "x.log", "keep.log"], ""))
    make(repository, {"node_modules/x.js": "", "empty/ignored.log": ""})
    assert shipped(repository, environ) == [".gitignore", "m.py", "notes.txt"]
    rules = repository / ".kineticignore"
    rules.write_text("notes.txt\n.gitignore\n.kineticignore\n!data/deep/b.csv\n!keep.log\n")
    assert shipped(repository, environ) == ["data/deep/b.csv", "keep.log", "m.py"]
    found = tree.scan(repository, ignore.read_rules(repository, {**environ, "KINETIC_SHIP": "git"}))
    folders = [entry.name for entry in found.entries if entry.is_directory]
    assert folders == ["data/", "data/deep/", "empty/"]
    reasons = {out.name: out.reason for out in found.left_out}
    assert reasons["notes.txt"] == ".kineticignore leaves it out"
    assert reasons["x.log"] == "git ignores it (.gitignore:2: *.log)"
    assert "data/a.csv" in reasons and reasons[".git"] == "never ships"
    assert reasons["node_modules/"] == "kinetic leaves out node_modules by default"
    rules.write_text("!data/\n.kineticignore\n")
    names = [".gitignore", "data/a.csv", "data/deep/b.csv", "m.py", "notes.txt"]
    assert shipped(repository, environ) == names


def test_without_the_setting_everything_ships(
    repository: Path, environ: Environ, make: Make
) -> None:
    make(repository, {".gitignore": "*.log\n", "x.log": ""})
    assert shipped(repository, environ, KINETIC_SHIP="") == [".gitignore", "x.log"]
    assert shipped(repository, environ, KINETIC_SHIP="all") == [".gitignore", "x.log"]


def test_rules_of_git_that_cannot_be_read_are_an_error(
    repository: Path, environ: Environ, make: Make
) -> None:
    make(repository, {".gitignore/": ""})
    with pytest.raises(PackError, match="what git ignores is unknown"):
        shipped(repository, environ)


# --- the setting ---


def test_the_setting_comes_from_the_environment_the_profile_or_the_project(
    tmp_path: Path, environ: Environ
) -> None:
    def ship(**variables: str) -> str:
        return configuration.ship(tmp_path, {**environ, **variables})[0]

    assert ship() == "all"
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "x"\n[tool.kinetic]\nship = "git"\n'
    )
    assert ship() == "git"
    profiles = '{"current": "p", "profiles": {"p": {"ship": "all"}}}'
    (tmp_path / "profiles.json").write_text(profiles)
    file = str(tmp_path / "profiles.json")
    assert ship(KINETIC_PROFILES_FILE=file) == "all"
    assert ship(KINETIC_PROFILES_FILE=file, KINETIC_SHIP="git") == "git"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[tool.kinetic]\nship = "gti"', 'must be "all" or "git", not \'gti\''),
        ("[tool.kinetic]\nship = true", "not True"),
        ('[tool.kinetic]\nshipp = "git"', "no setting 'shipp'.*ship"),
        ('[tool]\nkinetic = "git"', "must be a table"),
        ("[tool.kinetic]\nship = git", "isn't valid TOML"),
    ],
)
def test_a_wrong_setting_is_an_error(
    text: str, message: str, tmp_path: Path, environ: Environ
) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        configuration.ship(tmp_path, environ)


def test_a_wrong_variable_is_an_error(tmp_path: Path, environ: Environ) -> None:
    with pytest.raises(ConfigurationError, match="ship from KINETIC_SHIP"):
        configuration.ship(tmp_path, {**environ, "KINETIC_SHIP": "some"})


# --- notices ---

SPARSE = 60_000_000


def test_the_setting_is_named_once_if_git_ignores_much(
    repository: Path, environ: Environ, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    make(repository, {".gitignore": "data/\n", "m.py": "", "data/x.bin": ""})
    os.truncate(repository / "data" / "x.bin", SPARSE)

    def pack(packer: archive.Packer, **variables: str) -> list[str]:
        caplog.clear()
        cache = repository.parent / f"cache-{len(list(repository.parent.iterdir()))}"
        packer.pack(repository, exclude=(), cache=cache, environ={**environ, **variables})
        return [text for record in caplog.records if "git" in (text := record.getMessage())]

    with contextlib.closing(archive.Packer()) as packer:
        (notice,) = pack(packer)
        assert "60.0 MB" in notice and "[tool.kinetic]" in notice and "KINETIC_SHIP" in notice
        make(repository, {"m.py": "changed", "data/y": "1"})
        assert pack(packer) == []
    for ship in ("all", "git"):
        with contextlib.closing(archive.Packer()) as packer:
            assert pack(packer, KINETIC_SHIP=ship) == []
    (repository / ".gitignore").unlink()
    with contextlib.closing(archive.Packer()) as packer:
        assert pack(packer) == []


def test_imported_modules_that_git_ignores_are_named_once(
    repository: Path, environ: Environ, make: Make, python: Python
) -> None:
    """A generated module, such as one with the version, is often ignored."""
    make(repository, {".gitignore": "_version.py\ngenerated/\n", "_version.py": "", "m.py": ""})
    make(repository, {"generated/tables.py": "", "generated/unused.py": ""})
    script = """
import json, logging, os, pathlib, sys
import _version, generated.tables, m
from kinetic._packing import archive
messages = []
class Keep(logging.Handler):
    def emit(self, record): messages.append(record.getMessage())
logging.getLogger().addHandler(Keep())
packer = archive.Packer()
for number in range(2):
    pathlib.Path("m.py").write_text(str(number))
    packer.pack(pathlib.Path.cwd(), exclude=(), cache=pathlib.Path("../c"), environ=os.environ)
packer.close()
print(json.dumps(messages))
"""
    path = f"{REPOSITORY}{os.pathsep}{repository}"
    printed = python("-c", script, cwd=repository, **environ, KINETIC_SHIP="git", PYTHONPATH=path)
    (message,) = last_line(printed)
    assert "jobs can't import them: _version.py, generated/tables.py." in message
    assert ".kineticignore" in message


def test_all_files_are_listed_with_the_reason(
    repository: Path, environ: Environ, make: Make
) -> None:
    make(repository, {".gitignore": "*.log\n", "x.log": "", "m.py": "12", "node_modules/x": ""})
    make(
        repository, {"tls.pem": "-----BEGIN RSA " + "PRIVATE KEY-----\n", ".env": "", "b.json": ""}
    )
    make(repository, {"environment/pyvenv.cfg": "", "secret.txt": "", ".kineticignore": "*.txt\n"})
    (repository / "out").symlink_to("/etc")
    found = archive.list_project(repository, {**environ, "KINETIC_SHIP": "git"})
    names = [entry.name for entry in found.entries]
    assert names == [".gitignore", ".kineticignore", "b.json", "m.py"]
    reasons = {out.name: out.reason for out in found.left_out}
    assert reasons.pop("out").startswith("is a link out of the project")
    assert reasons == {
        ".env": "is a credential",
        ".git": "never ships",
        "environment/": "is a virtual environment",
        "node_modules/": "kinetic leaves out node_modules by default",
        "secret.txt": ".kineticignore leaves it out",
        "tls.pem": "is a credential",
        "x.log": "git ignores it (.gitignore:1: *.log)",
    }
