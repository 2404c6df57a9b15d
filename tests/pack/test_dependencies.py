"""Test which dependencies of a project an image installs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinetic.aio.images import dependencies
from kinetic.aio.images.dependencies import find_dependencies
from kinetic.errors import PackError

from .conftest import Make

SOURCE = Path("requirements.txt")


def filter_text(text: str) -> dependencies.Dependencies:
    """Return what goes into an image of a file with this text."""
    found = dependencies._Reader(None, keep_accelerator=False)
    found.read_lines(text, SOURCE)
    return found.dependencies(SOURCE)


def filter_lines(*lines: str) -> str:
    return filter_text("\n".join(lines)).text


def test_the_nearest_file_counts_and_requirements_come_before_pyproject(
    tmp_path: Path, make: Make
) -> None:
    make(
        tmp_path,
        {
            "requirements.txt": "far\n",
            "a/pyproject.toml": "[project]\ndependencies = ['middle>=1', 'jax']\n",
            "a/b/requirements.txt": "near\n",
            "a/b/pyproject.toml": "[project]\ndependencies = ['other']\n",
            "a/b/c/m.py": "",
            "a/d/pyproject.toml": "[tool.ruff]\nline-length = 100\n",
        },
    )
    assert find_dependencies(tmp_path / "a/b/c", tmp_path).text == "near\n"
    assert find_dependencies(tmp_path / "a/d", tmp_path).text == "middle>=1\n"
    assert find_dependencies(tmp_path / "a/d", tmp_path).source == tmp_path / "a/pyproject.toml"
    assert find_dependencies(tmp_path, tmp_path).text == "far\n"


def test_the_search_ends_at_the_root(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"requirements.txt": "far\n", "root/a/m.py": ""})
    dependencies = find_dependencies(tmp_path / "root/a", tmp_path / "root")
    assert (dependencies.source, dependencies.text) == (None, "")
    assert find_dependencies(tmp_path, None).text == "far\n"
    assert find_dependencies(tmp_path / "root", None).text == ""


def test_a_project_without_dependencies_has_none(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"requirements.txt": "far\n", "a/pyproject.toml": "[project]\nname = 'a'\n"})
    found = find_dependencies(tmp_path / "a", tmp_path)
    assert (found.text, found.source) == ("", tmp_path / "a/pyproject.toml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[tool.poetry.dependencies]\nnumpy = '1'\n", "tool.poetry"),
        ("[project]\nname = 'a'\ndynamic = ['dependencies']\n", "dynamic"),
        ("[dependency-groups]\nml = ['numpy']\n", r"[dependency-groups]"),
        ("[project]\nname = 'a'\n[dependency-groups]\nml = ['numpy']\n", "(ml)"),
    ],
)
def test_a_notice_names_dependencies_that_are_not_read(
    content: str, message: str, tmp_path: Path, make: Make
) -> None:
    make(tmp_path, {"pyproject.toml": content})
    (notice,) = find_dependencies(tmp_path, tmp_path).notices
    assert message in notice


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"setup.py": "setup(install_requires=['a'])"}, ["setup.py"]),
        ({"setup.cfg": "[options]\ninstall_requires =\n  a\n"}, ["setup.cfg"]),
        ({"setup.cfg": "[flake8]\n", "setup.py": "setup()"}, []),
        ({"Pipfile": "[packages]\na = '*'\n"}, ["Pipfile"]),
        ({"environment.yml": "name: x\ndependencies:\n- a\n"}, ["environment.yml"]),
        ({"requirements.in": "a\n", "requirements-gpu.txt": "# none\n"}, ["requirements.in"]),
        ({"requirements/base.txt": "a\n"}, ["requirements/base.txt"]),
        ({"requirement.txt": "a\n", "req.in": "b\n"}, ["requirement.txt", "req.in"]),
        ({"requirements.in": "a\n", "requirements.txt": "a==1\n"}, []),
        ({"requirements.txt": "\n", "pyproject.toml": "[project]\ndependencies = []\n"}, []),
        (
            {"requirements.txt": "# jobs\n", "pyproject.toml": "[project]\ndependencies = ['a']\n"},
            ["pyproject.toml", "takes precedence"],
        ),
        (
            {"requirements.txt": "", "pyproject.toml": "[project]\ndependencies = [\n# x\n'a']\n"},
            ["pyproject.toml", "takes precedence"],
        ),
        (
            {
                "pyproject.toml": "[project]\n[project.optional-dependencies]\ngpu = []\n",
                "setup.py": "setup(install_requires=['a'])",
            },
            ["(gpu)", "setup.py"],
        ),
    ],
)  # fmt: skip
def test_a_notice_names_files_that_list_packages_if_the_files_that_are_read_list_none(
    files: dict[str, str], names: list[str], tmp_path: Path, make: Make
) -> None:
    make(tmp_path, files)
    notices = "\n".join(find_dependencies(tmp_path, tmp_path).notices)
    assert bool(notices) == bool(names)
    assert all(name in notices for name in names)


def test_a_notice_names_a_farther_file_if_the_nearest_lists_no_package(
    tmp_path: Path, make: Make
) -> None:
    make(tmp_path, {"requirements.txt": "a\n", "b/pyproject.toml": "[project]\nname = 'b'\n"})
    (notice,) = find_dependencies(tmp_path / "b", tmp_path).notices
    assert f"requirements.txt of {tmp_path}" in notice
    assert f"{tmp_path}/b/pyproject.toml takes precedence" in notice


@pytest.mark.parametrize(
    ("table", "notice"),
    [
        ("[tool.uv]\noverride-dependencies = ['b==1']", "override-dependencies in [tool.uv]"),
        ("[tool.uv]\nprerelease = 'allow'", "prerelease in [tool.uv]"),
        ("[[tool.poetry.source]]\nname = 'mine'\nurl = 'https://x.example'", "source in [tool.po"),
        ("[tool.poetry.group.ml.dependencies]\nb = '1'", "[tool.poetry.group]"),
        ("[tool.poetry.group.dev.dependencies]\nb = '1'", ""),
        ("[tool.poetry.group.ml]\noptional = true", ""),
        ("[dependency-groups]\nml = ['b']\n[tool.uv]\ndefault-groups = ['ml']", "(ml)"),
        ("[dependency-groups]\nml = ['b']", ""),
        ("[tool.uv]\nmanaged = true", ""),
    ],
)
def test_a_notice_names_settings_that_change_what_is_installed(
    table: str, notice: str, tmp_path: Path, make: Make
) -> None:
    make(tmp_path, {"pyproject.toml": f"[project]\ndependencies = ['a']\n{table}\n"})
    found = find_dependencies(tmp_path, tmp_path)
    assert found.text == "a\n"
    assert len(found.notices) == bool(notice)
    assert notice in "".join(found.notices)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{ git = 'https://x.example/m' }", "My.Lib[x]@ git+https://x.example/m"),
        (
            "{ git = 'ssh://git@x.example/m', tag = 'v1', subdirectory = 'p' }",
            "My.Lib[x]@ git+ssh://git@x.example/m@v1#subdirectory=p",
        ),
        ("{ url = 'https://x.example/m-1.whl' }", "My.Lib[x]@ https://x.example/m-1.whl"),
        ("[{ path = '../m', marker = \"sys_platform == 'win32'\" }]", "My.Lib[x]>=1"),
        ("[{ path = '../m', group = 'dev' }]", "My.Lib[x]>=1"),
        ("{ path = '../m' }", PackError),
        ("{ workspace = true }", PackError),
        ("{ index = 'mine' }", PackError),
        ("{ git = '../m' }", PackError),
        ("[{ index = 'mine', marker = \"sys_platform == 'linux'\" }]", PackError),
    ],
)
@pytest.mark.parametrize("where", ["pyproject.toml", "workspace", "script"])
def test_the_source_of_a_package_is_followed_or_refused(
    where: str, source: str, expected: str | type[PackError], tmp_path: Path, make: Make
) -> None:
    package = "dependencies = ['My.Lib[x]>=1', 'b']\n"
    sources = f"[tool.uv.sources]\nmy_lib = {source}\n"
    if where == "script":
        lines = f"/// script\n{package}{sources}///\n"
        make(tmp_path, {"a/main.py": "".join(f"# {line}\n" for line in lines.splitlines())})
    elif where == "workspace":
        root = f"{sources}[tool.uv.workspace]\nmembers = ['a']\n"
        make(tmp_path, {"pyproject.toml": root, "a/pyproject.toml": f"[project]\n{package}"})
    else:
        make(tmp_path, {"a/pyproject.toml": f"[project]\n{package}{sources}"})
    scripts = [tmp_path / "gone.py", tmp_path / "a/main.py"]
    if isinstance(expected, str):
        text = find_dependencies(tmp_path / "a", tmp_path, scripts).text
        assert text.replace(" @", "@") == f"{expected}\nb\n"  # releases of packaging differ
    else:
        with pytest.raises(expected, match=r"My\.Lib") as caught:
            find_dependencies(tmp_path / "a", tmp_path, scripts)
        name = "main.py" if where == "script" else "pyproject.toml"
        assert str(caught.value.culprit) == str(tmp_path / "a" / name)


def test_poetry_says_where_a_package_comes_from(tmp_path: Path, make: Make) -> None:
    poetry = "[tool.poetry.dependencies]\na = '^1'\nb = { source = 'mine' }\n"
    make(tmp_path, {"pyproject.toml": f"[project]\ndependencies = ['a']\n{poetry}"})
    assert find_dependencies(tmp_path, tmp_path).text == "a\n"
    make(tmp_path, {"pyproject.toml": f"[project]\ndependencies = ['a', 'b']\n{poetry}"})
    with pytest.raises(PackError, match="'mine'"):
        find_dependencies(tmp_path, tmp_path)


def test_indexes_and_constraints_of_uv_are_followed(tmp_path: Path, make: Make) -> None:
    uv = (
        "[tool.uv]\nconstraint-dependencies = ['c<2']\n"
        "[[tool.uv.index]]\nname = 'one'\nurl = 'https://one.example'\n"
        "[[tool.uv.index]]\nname = 'two'\nurl = 'https://two.example'\ndefault = true\n"
        "[[tool.uv.index]]\nname = 'three'\nurl = 'https://three.example'\nexplicit = true\n"
    )
    make(tmp_path, {"pyproject.toml": f"[project]\ndependencies = ['a']\n{uv}"})
    found = find_dependencies(tmp_path, tmp_path)
    assert found.parts == {
        "-r": "--extra-index-url https://one.example\n--index-url https://two.example\na\n",
        "-c": "c<2\n",
    }


def test_the_comment_of_a_script_comes_before_the_files(tmp_path: Path, make: Make) -> None:
    block = "# /// script\n# requires-python = '>=3.11'\n# dependencies = ['near']\n# ///\n"
    make(
        tmp_path,
        {
            "requirements.txt": "far\n",
            "main.py": f"#!/usr/bin/env python\n{block}import os\n",
            "without.py": "# /// script\n# requires-python = '>=3.11'\n# ///\n",
            "wrong.py": "# /// script\n# dependencies = [\n# ///\n",
        },
    )
    found = find_dependencies(tmp_path, tmp_path, [tmp_path / "main.py"])
    assert (found.text, found.source) == ("near\n", tmp_path / "main.py")
    assert find_dependencies(tmp_path, tmp_path, [tmp_path / "without.py"]).text == "far\n"
    with pytest.raises(PackError, match=r"wrong\.py"):
        find_dependencies(tmp_path, tmp_path, [tmp_path / "wrong.py"])


def test_files_of_the_project_that_a_line_includes_are_read(tmp_path: Path, make: Make) -> None:
    make(
        tmp_path / "root",
        {
            "requirements.txt": "-r more/base.txt\nx\n--constraint=pins.txt\n",
            "more/base.txt": "--index-url https://x.example\nbase\n-r ../requirements.txt\n"
            "-c pins.txt",
            "more/pins.txt": "base==1 \\\n  --hash=sha256:aa\njax==1\n",
            "pins.txt": "deep==3\n",
            "wrong/requirements.txt": "-c pins.txt\n",
            "wrong/pins.txt": "a\nnumpy=1.0\n",
            "outside/requirements.txt": "-c ../../pins.txt\n",
        },
    )
    make(tmp_path, {"pins.txt": "a\n"})
    found = find_dependencies(tmp_path / "root", tmp_path / "root")
    assert found.parts == {
        "-r": "--index-url https://x.example\nbase\nx\nx\n",
        "-c": "deep==3\nbase==1 \\\n  --hash=sha256:aa\n",
    }
    (notice,) = found.notices
    assert "pins.txt, line 3" in notice
    with pytest.raises(PackError, match=r"pins\.txt, line 2.*numpy=1\.0"):
        find_dependencies(tmp_path / "root/wrong", tmp_path / "root")
    with pytest.raises(PackError, match="line 1"):
        find_dependencies(tmp_path / "root/outside", tmp_path / "root")


@pytest.mark.parametrize("line", ["numpy=1.0", "pip install numpy", "<<<<<<< HEAD", "numpy, scipy"])
def test_a_line_that_is_no_requirement_is_refused_with_the_reason(line: str) -> None:
    with pytest.raises(PackError, match="line 2") as caught:
        filter_lines("numpy", line)
    assert line in str(caught.value) and "Expected" in str(caught.value)


def test_groups_beside_dependencies_give_no_notice(tmp_path: Path, make: Make) -> None:
    groups = "[project]\nname = 'a'\ndependencies = []\n[dependency-groups]\ndev = ['pytest']\n"
    make(tmp_path, {"pyproject.toml": groups})
    assert find_dependencies(tmp_path, tmp_path).notices == ()


@pytest.mark.parametrize(
    "content",
    [
        "[project",
        "project = ['a']\n",
        "[project]\ndependencies = [1]\n",
        "[project]\ndependencies = ['a']\n[tool.uv]\nsources = ['a']\n",
        "[project]\ndependencies = ['a']\n[tool.uv.sources]\na = [{ url = 'u', marker = 'x' }]\n",
        "[project]\ndependencies = ['a']\n[[tool.uv.index]]\nname = 'x'\n",
        "[project]\ndependencies = ['a']\n[tool.poetry]\ngroup = ['x']\n",
        "[project]\n[tool]\nuv = 'x'\n",
        b"\xff\xfe\xfa",
    ],
)
def test_the_error_names_an_invalid_file(content: str | bytes, tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"pyproject.toml": content})
    with pytest.raises(PackError, match=r"pyproject\.toml"):
        find_dependencies(tmp_path, tmp_path)


def test_files_in_utf_16_with_windows_line_ends_are_read(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_bytes("numpy\r\nscipy\r\n".encode("utf-16"))
    assert find_dependencies(tmp_path, tmp_path).text == "numpy\nscipy\n"


@pytest.mark.parametrize(
    "line",
    ["jax", "JAX==0.4", "jax[tpu]>=0.4 ; python_version > '3'", "jaxlib", "libtpu",
     "libtpu_nightly", "jax @ https://example.com/jax.whl", "jax  # pinned elsewhere",
     "keras-kinetic", "Keras.Kinetic==1"],
)  # fmt: skip
def test_packages_that_the_image_has_are_dropped_with_a_notice(line: str) -> None:
    found = filter_text(f"numpy\n{line}\n# end\n")
    assert found.text == "numpy\n# end\n"
    (notice,) = found.notices
    assert "line 2" in notice


@pytest.mark.parametrize(
    "line",
    ["jax==0.4 # kn:keep", "jaxlib # kn:keep", "jax-md", "jaxtyping", "my.jax", "# jax", "",
     "  # kn:keep", "--index-url https://example.com/simple", "-i https://example.com/simple",
     "--extra-index-url=https://example.com", "--pre", "--no-binary :all:", "--require-hashes",
     "-f https://storage.googleapis.com/jax-releases/libtpu_releases.html",
     "numpy>=1,<3 ; python_version < '4'  # why", "requests [security] >= 2.8.1, == 2.8.*",
     "pkg @ https://example.com/pkg.whl", "pkg[a,b] @ git+ssh://git@example.com/a/b@main",
     "git+https://example.com/a/b@main#egg=c", "-e git+https://example.com/a/b#egg=c",
     "https://example.com/pkg-1.0.tar.gz", "-r https://example.com/r.txt"],
)  # fmt: skip
def test_other_lines_are_kept_unchanged(line: str) -> None:
    assert filter_lines(line, "x").removesuffix("x\n") == f"{line}\n"


def test_continued_lines_are_kept_or_dropped_together() -> None:
    hashes = ["    --hash=sha256:aa \\", "    --hash=sha256:bb"]
    assert filter_lines("numpy==2 \\", *hashes, "x") == "\n".join(["numpy==2 \\", *hashes, "x", ""])
    assert filter_lines("jax==2 \\", *hashes, "x") == "x\n"
    kept = filter_lines("jax==2 \\", *hashes[:-1], "    --hash=sha256:bb  # kn:keep", "x")
    assert kept.startswith("jax==2")
    assert filter_lines("# a comment ends with its line \\", "jax", "x \\") == (
        "# a comment ends with its line \\\nx \\\n"
    )


@pytest.mark.parametrize(
    "line",
    ["-e .", "-e ./pkg", "--editable=../pkg", "-e.", "-r other.txt", "--requirement other.txt",
     "-c constraints.txt", "./pkg", "../pkg", "/opt/pkg.whl", "~/pkg", ".", "pkg.whl", "sub/pkg",
     "pkg-1.0.tar.gz", "pkg @ file:///opt/pkg", "pkg@../pkg", "pkg[extra] @ ./pkg", "file:///opt/pkg",
     "git+file:///opt/pkg", "-f ./wheels", "--find-links=/wheels", "C:\\pkg"],
)  # fmt: skip
def test_paths_of_this_machine_are_refused_with_their_line(line: str) -> None:
    with pytest.raises(PackError, match="line 2") as caught:
        filter_lines("numpy", line)
    assert caught.value.culprit == "requirements.txt:2"


def test_a_notice_about_a_password_does_not_repeat_it() -> None:
    found = filter_text("--index-url https://me:secret@example.com/simple\n")
    (notice,) = found.notices
    assert "password" in notice
    assert "secret" not in notice
    with_variables = "--index-url https://${USER}:${TOKEN}@example.com/simple\n"
    assert filter_text(with_variables).notices == ()
