"""Test which dependencies of a project an image installs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinetic.aio.images.dependencies import filter_requirements, find_dependencies
from kinetic.errors import PackError

from .conftest import Make

SOURCE = Path("requirements.txt")


def filter_lines(*lines: str) -> str:
    return filter_requirements("\n".join(lines), SOURCE).text


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


def test_groups_beside_dependencies_give_no_notice(tmp_path: Path, make: Make) -> None:
    groups = "[project]\nname = 'a'\ndependencies = []\n[dependency-groups]\ndev = ['pytest']\n"
    make(tmp_path, {"pyproject.toml": groups})
    assert find_dependencies(tmp_path, tmp_path).notices == ()


@pytest.mark.parametrize(
    "content", ["[project", "[project]\ndependencies = [1]\n", b"\xff\xfe\xfa"]
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
    found = filter_requirements(f"numpy\n{line}\n# end\n", SOURCE)
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
    found = filter_requirements("--index-url https://me:secret@example.com/simple\n", SOURCE)
    (notice,) = found.notices
    assert "password" in notice
    assert "secret" not in notice
    with_variables = "--index-url https://${USER}:${TOKEN}@example.com/simple\n"
    assert filter_requirements(with_variables, SOURCE).notices == ()
