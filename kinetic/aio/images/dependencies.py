"""Find a project's dependencies and filter them for an image.

The result is a requirements file whose lines stay as the project wrote them. The library
`packaging` parses each line only to find which package the line names, and where pip finds it.
"""

from __future__ import annotations

import codecs
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from absl import logging

from kinetic.aio.ports import ImageRequest
from kinetic.errors import PackError

ACCELERATOR_PACKAGES = frozenset({"jax", "jaxlib", "libtpu", "libtpu-nightly"})
"""Packages that the image contains, in the version for its accelerator."""

KEEP = "kn:keep"
"""A line with one of `ACCELERATOR_PACKAGES` stays if its comment has this word."""

_COMMENT = re.compile(r"(^|\s)#.*$")
_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@$]+@")
_ARCHIVES = (".whl", ".zip", ".tgz", ".tar", ".tar.gz", ".tar.bz2", ".tar.xz")
_INSTALL_OPTIONS = frozenset({"-e", "--editable", "-r", "--requirement"})
_LOCATION_OPTIONS = _INSTALL_OPTIONS | {
    *("-c", "--constraint", "-f", "--find-links"),
    *("-i", "--index-url", "--extra-index-url"),
}
"""The options whose value is a file or a URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The packages to install: ``text`` is a requirements file, ``source`` the file it comes from.

    ``notices`` has a sentence for the user about each line that was dropped or looks wrong.
    """

    source: Path | None = None
    text: str = ""
    notices: tuple[str, ...] = ()

    @property
    def has_packages(self) -> bool:
        """Whether pip installs anything for ``text``."""
        return any(line.installs for line in _parse_lines(self.text))

    @property
    def brings_jax(self) -> bool:
        """Whether ``text`` requests one of `ACCELERATOR_PACKAGES`."""
        return any(line.package in ACCELERATOR_PACKAGES for line in _parse_lines(self.text))


def dependencies_of(
    request: ImageRequest, logged: set[str], *, keep_accelerator: bool = False
) -> Dependencies:
    """Return the dependencies of the project of *request*; log each notice that isn't in *logged*.

    With *keep_accelerator*, which is for a job without an image, `ACCELERATOR_PACKAGES` stay. This
    function reads files.

    Raises:
        PackError: A file can't be read, or names a package that exists on this machine only.
    """
    if request.entry_dir is None:
        return Dependencies()
    found = find_dependencies(request.entry_dir, request.root, keep_accelerator=keep_accelerator)
    for notice in found.notices:
        if notice not in logged:
            logged.add(notice)
            logging.warning("%s", notice)
    return found


def find_dependencies(
    entry_dir: Path, root: Path | None, *, keep_accelerator: bool = False
) -> Dependencies:
    """Read the nearest dependency file from *entry_dir* up to *root*.

    In each folder, requirements.txt takes precedence over a pyproject.toml, which must have a
    ``[project]`` table.

    Raises:
        PackError: A file can't be read, or names a package that exists on this machine only;
            ``culprit`` is the file, or the file and the line.
    """
    notices: list[str] = []
    for directory in _walk_up(entry_dir, root):
        requirements, pyproject = directory / "requirements.txt", directory / "pyproject.toml"
        if requirements.is_file():
            found = filter_requirements(_read_text(requirements), requirements, keep_accelerator)
        elif pyproject.is_file() and (lines := _read_pyproject(pyproject, notices)) is not None:
            text = "".join(f"{line}\n" for line in lines)
            found = filter_requirements(text, pyproject, keep_accelerator)
        else:
            continue
        return replace(found, notices=(*notices, *found.notices))
    return Dependencies(notices=tuple(notices))


def _walk_up(entry_dir: Path, root: Path | None) -> Iterator[Path]:
    """Yield *entry_dir* and, if it is in *root*, its parents up to *root*."""
    yield entry_dir
    if root is not None and entry_dir.is_relative_to(root):
        yield from (parent for parent in entry_dir.parents if parent.is_relative_to(root))


def _read_text(file: Path) -> str:
    """Return the text of a file in UTF-8, or in UTF-16, which PowerShell writes."""
    try:
        content = file.read_bytes()
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise PackError(f"{file} cannot be read: {exc}", culprit=str(file)) from exc


def _read_pyproject(file: Path, notices: list[str]) -> list[str] | None:
    """Return ``[project.dependencies]``; None without ``[project]``. Add warnings to *notices*."""
    try:
        content = tomllib.loads(_read_text(file))
    except tomllib.TOMLDecodeError as exc:
        raise PackError(f"{file} is not valid TOML: {exc}", culprit=str(file)) from exc
    project: Any = content.get("project")
    dynamic: Any = () if project is None else project.get("dynamic", ())
    if project is None and "dependencies" in content.get("tool", {}).get("poetry", {}):
        notices.append(
            f"The dependencies in [tool.poetry] of {file} are not read: export them to a "
            "requirements.txt beside it, or list them in [project.dependencies]."
        )
    groups = ", ".join(content.get("dependency-groups", ()))
    if groups and "dependencies" not in {*(project or ()), *dynamic}:
        notices.append(
            f"The [dependency-groups] of {file} ({groups}) are not installed for jobs: list what "
            "jobs need in [project.dependencies], or in a requirements.txt beside it."
        )
    if project is None:
        return None
    lines: list[Any] = project.get("dependencies", [])
    if type(lines) is not list or not all(isinstance(line, str) for line in lines):
        raise PackError(
            f"{file}: [project.dependencies] is not a list of strings", culprit=str(file)
        )
    if not lines and "dependencies" in dynamic:
        notices.append(
            f"The dependencies of {file} are dynamic and are not read: export them to a "
            "requirements.txt beside it."
        )
    return lines


def filter_requirements(text: str, source: Path, keep_accelerator: bool = False) -> Dependencies:
    """Return the part of the requirements *text* that goes into an image. No I/O.

    Raises:
        PackError: A line names a package that exists on this machine only.
    """
    kept: list[str] = []
    notices: list[str] = []
    for line in _parse_lines(text):
        position = f"{source}, line {line.number}"
        if line.package == "keras-kinetic":
            notices.append(
                f"{position}: keras-kinetic is not installed in the job, because it would "
                "overwrite this package."
            )
        elif line.package == "kinetic-aio":
            pass  # the job gets the version of kinetic that submits it
        elif line.package in ACCELERATOR_PACKAGES and not (
            keep_accelerator or line.has_keep_comment
        ):
            notices.append(
                f"{position}: {line.text!r} is not installed, because the image has the "
                f"{line.package} for its accelerator; to install yours, write '# {KEEP}' at the "
                "end of the line."
            )
        elif line.location is not None and not _is_remote(line.location):
            raise PackError(
                f"{position}: {line.text!r} is neither a requirement nor a URL. A job cannot "
                "install what exists on this machine only. kinetic sends the project's own code; "
                "request other packages by their name in an index, or by a URL.",
                culprit=f"{source}:{line.number}",
            )
        else:
            kept += line.raw_lines
            if _PASSWORD.search(line.text):
                notices.append(
                    f"{position} contains a password, which ends up in the image and its build log."
                )
    return Dependencies(
        source=source, text="".join(f"{line}\n" for line in kept), notices=tuple(notices)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line of a requirements file, with the following lines that backslashes join to it.

    ``text`` has no comments. ``package`` is the normalized name of the package that the line
    requests, if any. ``location`` is the file or URL that the line names; None if it names none.
    ``installs`` says whether the line makes pip install something.
    """

    number: int
    raw_lines: tuple[str, ...]
    text: str
    package: str = ""
    location: str | None = None
    installs: bool = False

    @property
    def has_keep_comment(self) -> bool:
        """Whether a comment in the line has `KEEP`."""
        return any(KEEP in raw_line.partition("#")[2] for raw_line in self.raw_lines)


def _parse_lines(text: str) -> Iterator[_Line]:
    """Yield the lines of a requirements file, each joined with those that continue it."""
    joined: list[str] = []
    for number, raw_line in enumerate(text.splitlines(), 1):
        joined.append(raw_line.rstrip())
        # A backslash at the end joins the next line, unless the line is a comment.
        if raw_line.rstrip().endswith("\\") and not raw_line.lstrip().startswith("#"):
            continue
        yield _parse_line(number + 1 - len(joined), joined)
        joined = []
    if joined:
        yield _parse_line(len(text.splitlines()) + 1 - len(joined), joined)


def _parse_line(number: int, raw_lines: list[str]) -> _Line:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    pieces = (_COMMENT.sub("", line).removesuffix("\\").strip() for line in raw_lines)
    line = _Line(number=number, raw_lines=tuple(raw_lines), text=" ".join(pieces).strip())
    option, value = _split_option(line.text)
    if not value or (option and option not in _LOCATION_OPTIONS):
        return line
    line = replace(line, installs=not option or option in _INSTALL_OPTIONS)
    try:
        requirement = Requirement(re.split(r"\s--", value)[0])  # without options such as --hash
    except InvalidRequirement:
        return replace(line, location=value)
    if option:
        return replace(line, location=requirement.url or value)
    archive = requirement.name if requirement.name.endswith(_ARCHIVES) else None
    return replace(
        line, package=canonicalize_name(requirement.name), location=requirement.url or archive
    )


def _split_option(text: str) -> tuple[str, str]:
    """Split ``--name=value``, ``--name value``, or ``-nvalue`` into option and value.

    For a requirement, the option is empty.
    """
    if not text.startswith("-"):
        return "", text
    if not text.startswith("--"):
        return text[:2], text[2:].lstrip(" =")
    name, _, value = re.sub(r"[=\s]", " ", text, count=1).partition(" ")
    return name, value.strip()


def _is_remote(location: str) -> bool:
    """Return whether *location* is a URL with a host, such as ``git+https://…``, and not a file."""
    url = urlsplit(location.strip("'\""))
    return bool(url.netloc) and not f"+{url.scheme}".endswith(("+", "+file"))
