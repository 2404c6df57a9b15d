"""Which packages a project asks for, as a requirements file that an image can install.

From the function's directory up to the project's root, the first of these
counts: ``requirements.txt``, or a ``pyproject.toml`` with a ``[project]``
table. A ``pyproject.toml`` that only configures tools is passed by.

Of what is found:

- ``jax``, ``jaxlib``, ``libtpu`` and ``libtpu-nightly`` are dropped, because
  the image has those that fit its accelerator; ``# kn:keep`` on the line keeps it.
- ``keras-kinetic`` is dropped: it would overwrite this package.
- ``kinetic-aio`` is dropped: the job has the very version that submits it.
- What lies on this machine only is refused.
- Everything else stays as it is: options, hashes, markers, comments.
"""

from __future__ import annotations

import codecs
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinetic.errors import PackError

__all__ = ["Dependencies", "filtered", "find_dependencies"]

ACCELERATOR_PACKAGES = frozenset({"jax", "jaxlib", "libtpu", "libtpu-nightly"})
KEEP = "kn:keep"

_NAME = re.compile(r"\s*([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)")
_COMMENT = re.compile(r"(^|\s)#.*$")
_REMOTE = re.compile(r"(?:git|hg|svn|bzr)\+(?!file:)\w+:|https?:|ftps?:|gs:|\w+@[\w.]+:")
_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@$]+@")
_ARCHIVE = re.compile(r"\.(?:whl|zip|tar(?:\.\w+)?|tgz)$")
_FILE_OPTIONS = frozenset({"-e", "--editable", "-r", "--requirement", "-c", "--constraint"})
_NAMING_OPTIONS = frozenset({"-e", "--editable", "-r", "--requirement"})
_PLACE_OPTIONS = frozenset({"-f", "--find-links", "-i", "--index-url", "--extra-index-url"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """What to install: ``text`` is a requirements file, ``source`` where it comes from.

    ``notices`` are sentences for the user, one for each thing that was dropped
    or looks wrong.
    """

    source: Path | None = None
    text: str = ""
    notices: tuple[str, ...] = ()

    @property
    def wanted(self) -> bool:
        """Whether there is anything to install."""
        bare = (_bare(lines) for _, lines in _logical_lines(self.text))
        return any(line and _installs(line) for line in bare)


def find_dependencies(
    entry_dir: Path, root: Path | None, *, own_accelerator: bool = False
) -> Dependencies:
    """Read what the project of a function in *entry_dir* asks for.

    *own_accelerator* keeps what is else left to the image, for where there is none.

    Raises:
        PackError: The file cannot be read, or asks for what lies on this
            machine only; ``culprit`` is the file and the line.
    """
    notices: list[str] = []
    for directory in _upwards(entry_dir, root):
        requirements, pyproject = directory / "requirements.txt", directory / "pyproject.toml"
        if requirements.is_file():
            found = filtered(_decoded(requirements), requirements, own_accelerator)
        elif pyproject.is_file() and (lines := _of_pyproject(pyproject, notices)) is not None:
            text = "".join(f"{line}\n" for line in lines)
            found = filtered(text, pyproject, own_accelerator)
        else:
            continue
        return Dependencies(
            source=found.source, text=found.text, notices=(*notices, *found.notices)
        )
    return Dependencies(notices=tuple(notices))


def _upwards(entry_dir: Path, root: Path | None) -> Iterator[Path]:
    yield entry_dir
    if root is not None and entry_dir.is_relative_to(root):
        yield from (one for one in entry_dir.parents if one.is_relative_to(root))


def _decoded(file: Path) -> str:
    """The text of a file; PowerShell writes requirements as UTF-16."""
    try:
        content = file.read_bytes()
        wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return content.decode("utf-16" if wide else "utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise PackError(f"{file} cannot be read: {exc}", culprit=str(file)) from exc


def _of_pyproject(file: Path, notices: list[str]) -> list[str] | None:
    """``[project.dependencies]``; None when there is no ``[project]``."""
    try:
        content = tomllib.loads(_decoded(file))
    except tomllib.TOMLDecodeError as exc:
        raise PackError(f"{file} is not valid TOML: {exc}", culprit=str(file)) from exc
    tool: Any = content.get("tool", {})
    project: Any = content.get("project")
    if project is None:
        if "poetry" in tool and "dependencies" in tool["poetry"]:
            notices.append(
                f"The dependencies in [tool.poetry] of {file} are not read: export them to a "
                "requirements.txt beside it, or list them in [project.dependencies]."
            )
        return None
    lines: list[Any] = project.get("dependencies", [])
    if type(lines) is not list or not all(isinstance(line, str) for line in lines):
        raise PackError(f"{file}: [project.dependencies] is no list of strings", culprit=str(file))
    if not lines and "dependencies" in project.get("dynamic", []):
        notices.append(
            f"The dependencies of {file} are dynamic and are not read: export them to a "
            "requirements.txt beside it."
        )
    return lines


def filtered(text: str, source: Path, own_accelerator: bool = False) -> Dependencies:
    """What of *text*, in the format of a requirements file, goes into an image; pure.

    Raises:
        PackError: It asks for what lies on this machine only.
    """
    kept: list[str] = []
    notices: list[str] = []
    for number, lines in _logical_lines(text):
        bare = _bare(lines)
        name = "" if bare.startswith("-") else _normal_name(bare)
        keeps = own_accelerator or any(KEEP in line.partition("#")[2] for line in lines)
        if name == "keras-kinetic":
            notices.append(
                f"{source}, line {number}: keras-kinetic is not installed in the job: it would "
                "overwrite this package, which is there already."
            )
        elif name == "kinetic-aio":
            pass
        elif name in ACCELERATOR_PACKAGES and not keeps:
            notices.append(
                f"{source}, line {number}: {bare!r} is left to the image, which has the {name} "
                f"of its accelerator; write '# {KEEP}' behind it to install yours."
            )
        else:
            _refuse_local(bare, source, number)
            if _PASSWORD.search(bare):
                notices.append(
                    f"{source}, line {number} has a password in it, which ends up in the image "
                    "and its build log."
                )
            kept += lines
    return Dependencies(
        source=source, text="".join(f"{line}\n" for line in kept), notices=tuple(notices)
    )


def _logical_lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """The number of the first line, and the lines that backslashes make one of."""
    joined: list[str] = []
    first = 1
    for number, line in enumerate(text.splitlines(), 1):
        if not joined:
            first = number
        joined.append(line.rstrip())
        # A comment goes to the end of its line, whatever that is.
        if not line.rstrip().endswith("\\") or line.lstrip().startswith("#"):
            yield first, joined
            joined = []
    if joined:
        yield first, joined


def _bare(lines: list[str]) -> str:
    """One requirement or option on one line, without comments."""
    pieces = (_COMMENT.sub("", line) for line in lines)
    return " ".join(piece.removesuffix("\\").strip() for piece in pieces).strip()


def _installs(bare: str) -> bool:
    """Whether a line asks for something, and not only says how to install it."""
    return not bare.startswith("-") or _option(bare)[0] in _NAMING_OPTIONS


def _normal_name(bare: str) -> str:
    """The name of the package as indexes compare it; empty for anything else."""
    match = _NAME.match(bare)
    if match is None or bare[match.end() :].lstrip().startswith((":", "/", "\\")):
        return ""
    return re.sub(r"[-_.]+", "-", match[1]).lower()


def _refuse_local(bare: str, source: Path, number: int) -> None:
    option, value = "", bare
    if bare.startswith("-"):
        option, value = _option(bare)
        if option not in _FILE_OPTIONS | _PLACE_OPTIONS:
            return
    if not _is_local(value, must_be_a_place=bool(option)):
        return
    raise PackError(
        f"{source}, line {number}: {bare!r} lies on this machine only, so a job cannot install "
        "it. Code of the project ships by itself; name packages by an index or a URL.",
        culprit=f"{source}:{number}",
    )


def _option(bare: str) -> tuple[str, str]:
    """``--name=value``, ``--name value`` and ``-nvalue``."""
    if not bare.startswith("--"):
        return bare[:2], bare[2:].lstrip(" =")
    name, _, value = re.sub(r"[=\s]", " ", bare, count=1).partition(" ")
    return name, value.strip()


def _is_local(value: str, *, must_be_a_place: bool) -> bool:
    """Whether a requirement, or the value of an option, names something on this machine."""
    _, at, url = value.partition("@")
    place = url.strip() if at and not _REMOTE.match(value) else value
    place = place.split(" ")[0].split(";")[0].strip("'\"")
    if _REMOTE.match(place):
        return False
    if must_be_a_place or at or place.startswith(("file:", ".", "/", "\\", "~", "git+file:")):
        return bool(place)
    without_extras = place.partition("[")[0]
    return bool("/" in without_extras or "\\" in place or _ARCHIVE.search(without_extras))
