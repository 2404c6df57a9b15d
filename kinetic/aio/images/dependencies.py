"""Find a project's dependencies and filter them for an image.

The result is a requirements file whose lines stay as the project wrote them. The library
`packaging` parses each line only to find which package the line names, and where pip finds it.
"""

from __future__ import annotations

import codecs
import contextlib
import re
import tomllib
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from absl import logging

from kinetic._runner.protocol.wire import CONSTRAINTS
from kinetic.aio.ports import ImageRequest
from kinetic.errors import PackError

ACCELERATOR_PACKAGES = frozenset({"jax", "jaxlib", "libtpu", "libtpu-nightly"})
"""Packages that the image contains, in the version for its accelerator."""

FILES: Mapping[str, str] = {"-r": "requirements.txt", "-c": "constraints.txt"}
"""The names of the files that an installer reads, by option."""

KEEP = "kn:keep"
"""A line with one of `ACCELERATOR_PACKAGES` stays if its comment has this word."""

UNREAD_FILES: Mapping[str, str] = {
    **dict.fromkeys(
        ("req*.txt", "requirements/*.txt", "req*.in", "requirements*.lock"), r"^\s*[^#\s]"
    ),
    "pyproject.toml": (
        r"dependencies\s*=\s*\[(\s|#.*\n)*[\"']|^\[tool\.(poetry|pixi)\..*dependencies\]"
    ),
    "setup.py": r"install_requires",
    "setup.cfg": r"^install_requires",
    "Pipfile": r"^\[packages\]",
    "environment*.y*ml": r"^dependencies:",
    "conda*.y*ml": r"^dependencies:",
    "pixi.toml": r"dependencies\]",
    "pylock*.toml": r"^\[\[packages\]\]",
}
"""Files that list packages, and what a file contains that lists at least one."""

UNREAD_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "uv": (
        *("override-dependencies", "exclude-dependencies", "dependency-metadata", "exclude-newer"),
        *("prerelease", "resolution", "index-strategy", "no-index", "pip"),
    ),
    "poetry": ("source",),
    "pdm": ("source", "resolution"),
    "pixi": ("dependencies", "pypi-dependencies"),
}
"""Settings below ``[tool]`` that change what is installed, and that kinetic doesn't follow."""

EXPORT = (
    "write the packages that jobs need to a requirements.txt beside it, as `uv export`, `poetry "
    "export`, and `pip freeze` do"
)

_COMMENT = re.compile(r"(^|\s)#.*$")
_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@$]+@")
_SCRIPT_BLOCK = re.compile(r"^# /// script\s*$\s(?P<lines>(^#(| .*)$\s)+)^# ///\s*$", re.MULTILINE)
_ARCHIVES = (".whl", ".zip", ".tgz", ".tar", ".tar.gz", ".tar.bz2", ".tar.xz")
_REQUIREMENT_OPTIONS = frozenset({"-r", "--requirement"})
_CONSTRAINT_OPTIONS = frozenset({"-c", "--constraint"})
_INSTALL_OPTIONS = frozenset({"-e", "--editable"}) | _REQUIREMENT_OPTIONS
_LOCATION_OPTIONS = (
    *(_INSTALL_OPTIONS | _CONSTRAINT_OPTIONS),
    *("-f", "--find-links", "-i", "--index-url", "--extra-index-url"),
)
"""The options whose value is a file or a URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The packages to install: ``text`` is a requirements file, ``source`` the file it comes from.

    In ``text``, constraints follow the line `CONSTRAINTS`, because an image has one file only.
    ``notices`` has a sentence for the user about each line that was dropped or looks wrong.
    """

    source: Path | None = None
    text: str = ""
    notices: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, str]:
        """The requirements and the constraints in ``text``, by the option that installs a file."""
        requirements, _, constraints = self.text.partition(CONSTRAINTS)
        return {
            option: text for option, text in (("-r", requirements), ("-c", constraints)) if text
        }

    @property
    def has_packages(self) -> bool:
        """Whether pip installs anything for ``text``."""
        return any(line.installs for line in _parse_lines(self.parts.get("-r", "")))

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
    found = find_dependencies(
        request.entry_dir, request.root, request.scripts, keep_accelerator=keep_accelerator
    )
    for notice in found.notices:
        if notice not in logged:
            logged.add(notice)
            logging.warning("%s", notice)
    return found


def find_dependencies(
    entry_dir: Path,
    root: Path | None,
    scripts: Iterable[Path] = (),
    *,
    keep_accelerator: bool = False,
) -> Dependencies:
    """Read the dependencies of a script, or the nearest file from *entry_dir* up to *root*.

    The first of *scripts* that lists dependencies in a comment (PEP 723) takes precedence. In each
    folder, requirements.txt takes precedence over a pyproject.toml, which must have a ``[project]``
    table.

    Raises:
        PackError: A file can't be read, has a line that isn't a requirement, or names a package
            that exists on this machine only; ``culprit`` is the file, or the file and the line.
    """
    found = _Reader(root, keep_accelerator)
    for script in scripts:
        if (block := _script_block(script)) is not None:
            with _of_known_types(script):
                found.read_project(script, {**block, "project": block})
            return found.dependencies(script)
    read: list[Path] = []
    source: Path | None = None
    for directory in _walk_up(entry_dir, root):
        requirements, pyproject = directory / "requirements.txt", directory / "pyproject.toml"
        if requirements.is_file():
            source = requirements
            found.read_lines(_read_text(source), source)
        elif pyproject.is_file():
            read.append(pyproject)
            content = _parse_toml(_read_text(pyproject), pyproject)
            with _of_known_types(pyproject):
                source = pyproject if found.read_pyproject(pyproject, content) else None
        if source is not None:
            break
        found.name_unread_files(directory, read, None)
    if source is not None and not found.lists_packages:
        for directory in _walk_up(source.parent, root):
            found.name_unread_files(directory, [*read, source], source)
    return found.dependencies(source)


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


def _read_if_possible(file: Path) -> str:
    """Return the text of a file that kinetic can do without; empty if it can't be read."""
    try:
        return file.read_text("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _parse_toml(text: str, file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise PackError(f"{file} is not valid TOML: {exc}", culprit=str(file)) from exc


@contextlib.contextmanager
def _of_known_types(file: Path) -> Generator[None]:
    """Raise a `PackError` if a value in *file* hasn't the type that its tool defines for it."""
    try:
        yield
    except PackError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as exc:
        reason = str(exc).splitlines()[0]
        raise PackError(
            f"{file}: a table or a setting has another form than its tool defines ({reason}): "
            "compare the tables [project] and [tool] with the documentation of your tools",
            culprit=str(file),
        ) from exc


def _script_block(script: Path) -> dict[str, Any] | None:
    """Return the comment of *script* that lists its dependencies (PEP 723); None without one."""
    # A notebook's cell has no file, and a script may have been removed since it started.
    if (block := _SCRIPT_BLOCK.search(_read_if_possible(script))) is None:
        return None
    lines = (line.removeprefix("# ").removeprefix("#") for line in block["lines"].splitlines())
    content = _parse_toml("\n".join(lines), script)
    return content if "dependencies" in content else None


@dataclass(slots=True)
class _Reader:
    """Collect the lines of a project's files that go into an image.

    ``root`` limits which files a line may include; None means none. ``lists_packages`` says whether
    a file requested a package, even if the image has it already.
    """

    root: Path | None
    keep_accelerator: bool
    lists_packages: bool = False
    _requirements: list[str] = field(default_factory=list[str])
    _constraints: list[str] = field(default_factory=list[str])
    _notices: list[str] = field(default_factory=list[str])
    _included: set[tuple[Path, bool]] = field(default_factory=set[tuple[Path, bool]])

    def dependencies(self, source: Path | None) -> Dependencies:
        lines = self._requirements
        if self._constraints:
            lines = [*lines, CONSTRAINTS.strip(), *self._constraints]
        text = "".join(f"{line}\n" for line in lines)
        return Dependencies(source=source, text=text, notices=tuple(self._notices))

    def name_unread_files(self, directory: Path, read: list[Path], source: Path | None) -> None:
        """Add a notice about files in *directory* that list packages; the files *read* are read.

        *source* is the file that counts instead.
        """
        unread = [
            file.relative_to(directory).as_posix()
            for pattern, content in UNREAD_FILES.items()
            for file in sorted(directory.glob(pattern))
            if file not in read and re.search(content, _read_if_possible(file), re.MULTILINE)
        ]
        if unread:
            instead = f", because {source} takes precedence" if source is not None else ""
            target = (source.parent if source is not None else directory) / "requirements.txt"
            self._notices.append(
                f"The packages in {', '.join(unread)} of {directory} are not installed for jobs"
                f"{instead}: list what jobs need in {target}."
            )

    def read_pyproject(self, file: Path, content: dict[str, Any]) -> bool:
        """Read a pyproject.toml; return False, after notices, if it has no ``[project]`` table."""
        tool: dict[str, Any] = content.get("tool", {})
        poetry: dict[str, Any] = tool.get("poetry", {})
        is_project = "project" in content
        project: dict[str, Any] = content.get("project", {})
        dynamic: list[str] = project.get("dynamic", [])
        if not is_project and not poetry.keys().isdisjoint(("dependencies", "group")):
            self._notices.append(
                f"The dependencies in [tool.poetry] of {file} are not read: {EXPORT}."
            )
        # Tools install these groups unless you exclude them; those for development needn't travel.
        defaults = tool.get("uv", {}).get("default-groups", ())
        groups: dict[str, Any] = content.get("dependency-groups", {})
        extras: dict[str, Any] = project.get("optional-dependencies", {})
        is_listed = bool(project.get("dependencies")) or "dependencies" in dynamic
        unread: dict[str, list[str]] = {
            "dependency-groups": [
                name
                for name in groups
                if (not is_listed or name in defaults)
                and (name != "dev" or "dependencies" not in project)
            ],
            "project.optional-dependencies": [] if is_listed else [*extras],
            "tool.poetry.group": [
                name
                for name, group in poetry.get("group", {}).items()
                if is_project and name != "dev" and not group.get("optional")
            ],
        }
        self._notices += [
            f"The [{table}] of {file} ({', '.join(names)}) are not installed for jobs: list what "
            "jobs need in [project.dependencies], or in a requirements.txt beside it."
            for table, names in unread.items()
            if names
        ]
        if "dependencies" in dynamic:
            self._notices.append(
                f"The dependencies of {file} are dynamic and are not read: {EXPORT}."
            )
        if is_project:
            uv = self._with_workspace(file, tool.get("uv", {}))
            self.read_project(file, {"project": project, "tool": {**tool, "uv": uv}})
        return is_project

    def read_project(self, file: Path, content: dict[str, Any]) -> None:
        """Read ``[project.dependencies]``, with the settings of uv and Poetry for them."""
        lines: list[Any] = content["project"].get("dependencies", [])
        if type(lines) is not list or not all(isinstance(line, str) for line in lines):
            raise PackError(
                f"{file}: [project.dependencies] is not a list of strings", culprit=str(file)
            )
        tool: dict[str, Any] = content.get("tool", {})
        uv: dict[str, Any] = tool.get("uv", {})
        for name, settings in UNREAD_SETTINGS.items():
            table = tool.get(name, {})
            if found := [setting for setting in settings if table.get(setting)]:
                self._notices.append(
                    f"The settings {', '.join(found)} in [tool.{name}] of {file} have no effect on "
                    f"jobs: {EXPORT}."
                )
        self.read_lines("\n".join(_index_options(uv)), file, "index")
        sources = {**tool.get("poetry", {}).get("dependencies", {}), **uv.get("sources", {})}
        lines = [self._with_source(line, sources, file) for line in lines]
        self.read_lines("\n".join(lines), file, "dependency")
        constraints: list[str] = uv.get("constraint-dependencies", [])
        self.read_lines("\n".join(constraints), file, "constraint", constrains=True)

    def _with_workspace(self, file: Path, uv: dict[str, Any]) -> dict[str, Any]:
        """Return *uv*, the settings in *file*, with those of the workspace that has the file."""
        for directory in _walk_up(file.parent, self.root):
            settings = directory / "uv.toml"
            if settings.is_file():  # uv ignores the settings in pyproject.toml beside it
                content = _parse_toml(_read_text(settings), settings)
                return {**content, "sources": uv.get("sources", {})}
            pyproject = directory / "pyproject.toml"
            if pyproject != file and pyproject.is_file():
                content = _parse_toml(_read_text(pyproject), pyproject)
                shared = content.get("tool", {}).get("uv", {})
                if "workspace" in shared:
                    sources = {**shared.get("sources", {}), **uv.get("sources", {})}
                    return {**shared, "sources": sources}
        return uv

    def _with_source(self, line: str, sources: Mapping[str, Any], file: Path) -> str:
        """Return the requirement *line* with its URL from *sources*, which uv or Poetry read.

        Raises:
            PackError: The source is a path or an index: the package of that name in the default
                index may be another.
        """
        from packaging.markers import Marker
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.specifiers import SpecifierSet
        from packaging.utils import canonicalize_name

        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            return line  # `read_lines` refuses it
        named = {canonicalize_name(name): found for name, found in sources.items()}
        found: Any = named.get(canonicalize_name(requirement.name))
        # A job runs on Linux, or with *keep_accelerator* on this machine.
        linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
        environment = {} if self.keep_accelerator else linux
        tables = cast("list[object]", found if isinstance(found, list) else [found])
        for source in tables:
            if not isinstance(source, dict) or requirement.url is not None:
                continue  # a version, in Poetry
            table = cast("dict[str, Any]", source)
            marker = table.get("marker") or table.get("markers")
            if {"extra", "group"} & table.keys() or (
                marker and not Marker(marker).evaluate(environment)
            ):
                continue
            if url := _source_url(table):
                self._notices.append(
                    f"{requirement.name} is installed from {url}, its source in {file}."
                )
                requirement.url, requirement.specifier = url, SpecifierSet()
                return str(requirement)
            kinds = ("path", "workspace", "index", "source", "git", "url")
            if kind := next((kind for kind in kinds if table.get(kind)), None):
                beside = "" if file.suffix == ".py" else f"; or {EXPORT}, which takes precedence"
                raise PackError(
                    f"{file}: {requirement.name} comes from {kind} = {table[kind]!r}, from where a "
                    "job can't install it, and the default index may have another package of that "
                    f"name. Request it by a URL ({requirement.name} @ https://…){beside}",
                    culprit=str(file),
                )
        return line

    def read_lines(
        self, text: str, source: Path, unit: str = "line", *, constrains: bool = False
    ) -> None:
        """Read requirements, or constraints; *unit* names one of them in messages.

        Raises:
            PackError: A line isn't a requirement, or names a package that exists on this machine
                only.
        """
        for line in _parse_lines(text):
            position = f"{source}, {unit} {line.number}"
            self.lists_packages |= line.installs and not constrains
            if line.package == "keras-kinetic":
                self._notices.append(
                    f"{position}: keras-kinetic is not installed in the job, because it would "
                    "overwrite this package."
                )
            elif line.package == "kinetic-aio":
                pass  # the job gets the version of kinetic that submits it
            elif line.package in ACCELERATOR_PACKAGES and not (
                self.keep_accelerator
                or any(KEEP in raw_line.partition("#")[2] for raw_line in line.raw_lines)
            ):
                self._notices.append(
                    f"{position}: {line.text!r} is not installed, because the image has the "
                    f"{line.package} for its accelerator; to install yours, write '# {KEEP}' at "
                    "the end of the line."
                )
            elif file := self._included_file(line, source):
                is_constraint = constrains or line.option in _CONSTRAINT_OPTIONS
                if (file, is_constraint) not in self._included:
                    self._included.add((file, is_constraint))
                    self.read_lines(_read_text(file), file, constrains=is_constraint)
            elif line.error:
                raise PackError(
                    f"{position}: {line.text!r} is not a requirement: {line.error}; write a name "
                    "with a version, such as numpy>=2, or a URL",
                    culprit=f"{source}:{line.number}",
                )
            elif line.location is not None and not _is_remote(line.location):
                raise PackError(
                    f"{position}: {line.text!r} is neither a file of requirements in the project "
                    "nor a URL. A job cannot install what exists on this machine only. kinetic "
                    "sends the project's own code; request other packages by their name in an "
                    "index, or by a URL.",
                    culprit=f"{source}:{line.number}",
                )
            else:
                # Installers read options in a requirements file only.
                to_constraints = constrains and not line.option
                (self._constraints if to_constraints else self._requirements).extend(line.raw_lines)
                if _PASSWORD.search(line.text):
                    self._notices.append(
                        f"{position} contains a password, which ends up in the image and its build "
                        "log."
                    )

    def _included_file(self, line: _Line, source: Path) -> Path | None:
        """Return the file of the project that *line* includes with ``-r`` or ``-c``."""
        includes = line.option in _REQUIREMENT_OPTIONS | _CONSTRAINT_OPTIONS
        if not includes or line.location is None or self.root is None:
            return None
        file = (source.parent / line.location.strip("'\"")).resolve()
        return file if file.is_relative_to(self.root.resolve()) and file.is_file() else None


def _index_options(uv: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of a requirements file for the indexes of *uv*, in order of priority."""
    for index in uv.get("index", ()):
        if not index.get("explicit"):  # only packages whose source names it come from it
            option = "--index-url" if index.get("default") else "--extra-index-url"
            yield f"{'--find-links' if index.get('format') == 'flat' else option} {index['url']}"
    for name, urls in (
        ("--index-url", [uv["index-url"]] if "index-url" in uv else []),
        ("--extra-index-url", uv.get("extra-index-url", [])),
        ("--find-links", uv.get("find-links", [])),
    ):
        yield from (f"{name} {url}" for url in urls)


def _source_url(source: Mapping[str, Any]) -> str | None:
    """Return the URL of a source of uv or Poetry, in the form of a requirement, if it is remote."""
    url = source.get("url")
    if git := source.get("git"):
        revision = next((source[key] for key in ("rev", "tag", "branch") if source.get(key)), None)
        url = f"git+{str(git).removeprefix('git+')}" + (f"@{revision}" if revision else "")
    if url is None or not _is_remote(url):
        return None
    return f"{url}#subdirectory={source['subdirectory']}" if source.get("subdirectory") else url


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line of a requirements file, with the following lines that backslashes join to it.

    ``text`` has no comments. ``package`` is the normalized name of the package that the line
    requests, if any. ``option`` is the option that the line begins with, if any. ``location`` is
    the file or URL that the line names; None if it names none. ``error`` says why the line is no
    requirement. ``installs`` says whether the line makes pip install something.
    """

    number: int
    raw_lines: tuple[str, ...]
    text: str
    package: str = ""
    option: str = ""
    location: str | None = None
    error: str = ""
    installs: bool = False


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
    line = replace(line, option=option)
    if not value or (option and option not in _LOCATION_OPTIONS):
        return line
    line = replace(line, installs=not option or option in _INSTALL_OPTIONS)
    try:
        requirement = Requirement(re.split(r"\s--", value)[0])  # without options such as --hash
    except InvalidRequirement as exc:
        is_location = option or re.search(r"^[.~]|[/\\]", value) or value.endswith(_ARCHIVES)
        if is_location:
            return replace(line, location=value)
        return replace(line, error=str(exc).splitlines()[0])
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
