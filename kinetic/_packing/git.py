"""Find what git ignores, without git.

As in git, these rules decide, the first one that matches: the ``.gitignore`` of the file's
directory, those of the directories above up to the top of the work tree, ``.git/info/exclude``, and
the file that ``core.excludesFile`` names. Of one file, the last matching line decides. git ignores
no file that it tracks. A directory with its own ``.git``, such as a submodule, has its own rules.

Without a repository, only the ``.gitignore`` files below the project's root and the file of
``core.excludesFile`` count.
"""

from __future__ import annotations

import functools
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pathspec

from kinetic.errors import PackError

IGNORE_FILE = ".gitignore"

MAX_KEPT = 1 << 16
"""How many verdicts to keep for the patterns of one file, because a client scans repeatedly."""


class Pattern(NamedTuple):
    """One line of a file with patterns, compiled for files and for directories.

    *is_negative* says that the line begins with ``!``.
    """

    line: int
    text: str
    is_negative: bool
    for_files: pathspec.GitIgnoreSpec | None
    for_directories: pathspec.GitIgnoreSpec | None

    def matches(self, path: str, *, is_directory: bool) -> bool:
        """Return whether the line matches *path* itself; matching a directory above isn't enough.

        Below a directory that matches, nothing is looked for, or another line has allowed it.
        """
        spec = self.for_directories if is_directory else self.for_files
        for pattern in spec.patterns if spec is not None else ():
            found: Any = pattern.match_file(path)  # its class has no complete types
            if found is not None and found.match.groupdict().get("ps_d") is None:
                return True
        return False


class Patterns:
    """The patterns of one file, the last line first; *ignores_case* is ``core.ignoreCase``."""

    def __init__(self, name: str, lines: list[str], *, ignores_case: bool) -> None:
        self._name = name
        self._ignores_case = ignores_case
        self._patterns = tuple(_compile(lines, ignores_case))[::-1]
        self._verdicts: dict[tuple[str, bool], tuple[bool, str] | None] = {}

    def verdict(self, path: str, *, is_directory: bool) -> tuple[bool, str] | None:
        """Return whether git ignores *path*, and the line that says so; None if no line matches."""
        key = path, is_directory
        if key not in self._verdicts:
            if len(self._verdicts) >= MAX_KEPT:
                self._verdicts.clear()
            text = path.lower() if self._ignores_case else path
            self._verdicts[key] = next(
                (
                    (not pattern.is_negative, f"{self._name}:{pattern.line}: {pattern.text}")
                    for pattern in self._patterns
                    if pattern.matches(text, is_directory=is_directory)
                ),
                None,
            )
        return self._verdicts[key]


def _compile(lines: list[str], ignores_case: bool) -> Iterator[Pattern]:
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        line = line.lower() if ignores_case else line
        for_files = None if text.endswith("/") else _spec(line)
        for_directories = _spec(line.rstrip().removesuffix("/") if text.endswith("/") else line)
        yield Pattern(number, text, text.startswith("!"), for_files, for_directories)


_CHARACTER_CLASSES = {
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "alnum": "a-zA-Z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "xdigit": "0-9a-fA-F",
    "space": r"\s",
    "punct": "!-.:-@^-`{-~",
}


def with_ranges(line: str) -> str:
    """Return a pattern with ranges in place of classes such as ``[:digit:]``.

    pathspec doesn't know the classes, and a ``[`` inside brackets makes `re` warn.
    """
    line = re.sub(r"\[:(\w+):\]", lambda found: _CHARACTER_CLASSES.get(found[1], found[0]), line)
    return line.replace("[[", r"[\[")


def _spec(line: str) -> pathspec.GitIgnoreSpec | None:
    try:
        return pathspec.GitIgnoreSpec.from_lines([with_ranges(line)])
    except ValueError:  # git skips such a line, too
        return None


def _read_patterns(path: str, name: str, *, ignores_case: bool) -> Patterns | None:
    """Return the patterns in the file *path*, which reasons call *name*; None if there is none.

    Raises:
        PackError: The file can't be read.
    """
    try:
        status = os.stat(path)
        stamp = status.st_mtime_ns, status.st_ctime_ns, status.st_size
        return _patterns_of(path, name, ignores_case, *stamp)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise PackError(
            f"{path} cannot be read ({exc.strerror}), so what git ignores is unknown. Make it "
            "readable, or set KINETIC_SHIP=all.",
            culprit=path,
        ) from exc


@functools.lru_cache(1024)
def _patterns_of(path: str, name: str, ignores_case: bool, *stamp: int) -> Patterns:
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        return Patterns(name, file.read().split("\n"), ignores_case=ignores_case)


@dataclass(frozen=True, slots=True)
class _Repository:
    """The work tree at *top*: the paths that git tracks, and the directories that have some."""

    top: str
    tracked: frozenset[str] = frozenset()
    directories: frozenset[str] = frozenset()
    ignores_case: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A directory of a work tree, with the rules that apply in it.

    ``path`` is relative to the top of the work tree, and ends with ``/`` unless it is empty. Each
    level has the length of its own directory's ``path``, and patterns; the deepest comes first.
    """

    repository: _Repository
    path: str = ""
    levels: tuple[tuple[int, Patterns], ...] = ()
    is_ignored: bool = False
    environ: Mapping[str, str] = field(repr=False)

    def opened(self, directory: str, names: set[str]) -> Folder:
        """Return this folder with the rules in it; *directory* is its path, *names* its entries.

        Raises:
            PackError: A file with rules can't be read.
        """
        folder = self
        if ".git" in names and directory != self.repository.top and not self.is_ignored:
            folder = _top_folder(directory, self.environ)
        if folder.is_ignored or IGNORE_FILE not in names:
            return folder
        patterns = _read_patterns(
            f"{directory}/{IGNORE_FILE}",
            f"{folder.path}{IGNORE_FILE}",
            ignores_case=folder.repository.ignores_case,
        )
        if patterns is None:
            return folder
        return replace(folder, levels=((len(folder.path), patterns), *folder.levels))

    def why_ignored(self, name: str, *, is_directory: bool) -> str | None:
        """Return the line by which git ignores the entry *name*; None if git doesn't ignore it."""
        path = self.path + name
        if path in self.repository.tracked:
            return None
        if self.is_ignored:
            return "its directory is ignored"
        for length, patterns in self.levels:
            verdict = patterns.verdict(path[length:], is_directory=is_directory)
            if verdict is not None:
                is_ignored, reason = verdict
                return reason if is_ignored else None
        return None

    def has_tracked(self, name: str) -> bool:
        """Return whether git tracks something in the directory *name*."""
        return f"{self.path}{name}/" in self.repository.directories

    def child(self, name: str, *, is_ignored: bool) -> Folder:
        """Return the directory *name* in this one."""
        return replace(self, path=f"{self.path}{name}/", is_ignored=is_ignored)


def folder_of(root: str, environ: Mapping[str, str]) -> Folder:
    """Return the directory *root*, whose own ``.gitignore`` `Folder.opened` adds.

    Raises:
        PackError: A file with rules can't be read.
    """
    top = root
    while not os.path.lexists(f"{top}/.git"):
        parent = os.path.dirname(top)
        if parent == top:
            top = root
            break
        top = parent
    folder = _top_folder(top, environ)
    directory = top
    for name in os.path.relpath(root, top).split(os.sep) if root != top else ():
        folder = folder.opened(directory, {IGNORE_FILE}).child(name, is_ignored=False)
        directory = f"{directory}/{name}"
    return folder


def _top_folder(top: str, environ: Mapping[str, str]) -> Folder:
    """Return the top of a work tree with the rules that apply everywhere in it."""
    git_directory = _git_directory(top)
    common = _common_directory(git_directory)
    settings = _settings(common, environ)
    excludes = settings.get("core.excludesfile")
    if excludes is None:
        excludes = os.path.join(_configuration_home(environ), "git", "ignore")
    ignores_case = settings.get("core.ignorecase", "").lower() in ("true", "yes", "on", "1")
    levels: list[tuple[int, Patterns]] = []
    for path, name in (
        (f"{common}/info/exclude", ".git/info/exclude"),
        (os.path.join(top, _expand(excludes, environ)) if excludes else "", excludes),
    ):
        patterns = _read_patterns(path, name, ignores_case=ignores_case) if path else None
        if patterns is not None:
            levels.append((0, patterns))
    hash_bytes = 32 if settings.get("extensions.objectformat") == "sha256" else 20
    tracked = _read_index(f"{git_directory}/index", hash_bytes)
    return Folder(
        repository=_Repository(top, tracked, _directories_of(tracked), ignores_case),
        levels=tuple(levels),
        environ=environ,
    )


def _git_directory(top: str) -> str:
    """Return the directory of the repository; in a submodule or a work tree, a file names it."""
    path = f"{top}/.git"
    if not os.path.isfile(path):
        return path
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return os.path.join(top, file.read().removeprefix("gitdir:").strip())


def _common_directory(git_directory: str) -> str:
    """Return the directory that all work trees of a repository share."""
    try:
        with open(f"{git_directory}/commondir", encoding="utf-8") as file:
            return os.path.join(git_directory, file.read().strip())
    except OSError:
        return git_directory


# --- git's configuration ---


def _configuration_home(environ: Mapping[str, str]) -> str:
    return environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", ""), ".config")


def _expand(path: str, environ: Mapping[str, str]) -> str:
    if path.startswith("~/"):
        return os.path.join(environ.get("HOME", ""), path[2:])
    return os.path.expanduser(path)  # ~user/


def _settings(common: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in effect, by names such as ``core.excludesfile``."""
    home, shared = environ.get("HOME", ""), _configuration_home(environ)
    files: list[str] = []
    if not environ.get("GIT_CONFIG_NOSYSTEM"):
        files.append(environ.get("GIT_CONFIG_SYSTEM") or "/etc/gitconfig")
    if chosen := environ.get("GIT_CONFIG_GLOBAL"):
        files.append(chosen)
    else:
        files += [os.path.join(shared, "git", "config"), os.path.join(home, ".gitconfig")]
    settings: dict[str, str] = {}
    for path in (*files, f"{common}/config"):
        _add_settings(path, settings, environ, depth=0)
    return settings


def _add_settings(
    path: str, settings: dict[str, str], environ: Mapping[str, str], depth: int
) -> None:
    """Add the settings of one file, and of the files that it includes, to *settings*."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().replace("\\\n", "").split("\n")
    except OSError:
        return
    section = ""
    for line in lines:
        text = line.strip()
        if text.startswith("["):
            section, _, text = text[1:].partition("]")
            section = section.strip().lower()
            text = text.strip()
        key, separator, value = text.partition("=")
        if not separator or text.startswith(("#", ";")):
            continue
        value = _unquote(value.strip())
        key = f"{section}.{key.strip().lower()}"
        if key == "include.path" and depth < 10:
            included = os.path.join(os.path.dirname(path), _expand(value, environ))
            _add_settings(included, settings, environ, depth + 1)
        else:
            settings[key] = value


def _unquote(value: str) -> str:
    """Return a value without quotation marks, escapes, and the comment after it."""
    found, is_quoted, characters = "", False, iter(value)
    for character in characters:
        if character == "\\":
            found += next(characters, "")
        elif character == '"':
            is_quoted = not is_quoted
        elif character in "#;" and not is_quoted:
            return found.rstrip()
        else:
            found += character
    return found


# --- the index ---


def _read_index(path: str, hash_bytes: int) -> frozenset[str]:
    """Return the paths that git tracks."""
    try:
        status = os.stat(path)
        return _tracked_paths(path, hash_bytes, status.st_mtime_ns, status.st_ino, status.st_size)
    except (OSError, ValueError, IndexError, struct.error):  # no repository, or a damaged index
        return frozenset()


@functools.lru_cache(16)
def _tracked_paths(path: str, hash_bytes: int, *stamp: int) -> frozenset[str]:
    """Parse an index; git's documentation (gitformat-index) describes the format."""
    with open(path, "rb") as file:
        data = file.read()
    signature, version, count = struct.unpack_from(">4sII", data)
    if signature != b"DIRC" or version not in (2, 3, 4):
        return frozenset()
    found: list[str] = []
    name, start = b"", 12
    for _ in range(count):
        at = start + 40 + hash_bytes
        (flags,) = struct.unpack_from(">H", data, at)
        at += 4 if flags & 0x4000 else 2  # the flag of an extended entry
        kept = 0
        if version == 4:
            removed, at = _variable_integer(data, at)
            kept = len(name) - removed
        end = data.index(b"\0", at)
        name = name[:kept] + data[at:end]
        # Without compressed names, an entry ends at a multiple of eight bytes, after a zero.
        start = end + 1 if version == 4 else start + (end - start + 8) // 8 * 8
        found.append(os.fsdecode(name))
    if data[start : start + 4] == b"link":  # a split index: another file has the other entries
        shared = data[start + 8 : start + 8 + hash_bytes].hex()
        folder = os.path.dirname(path)
        found += _tracked_paths(os.path.join(folder, f"sharedindex.{shared}"), hash_bytes)
    return frozenset(found)


def _variable_integer(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer at *at*, and the position after it."""
    byte = data[at]
    value = byte & 127
    while byte & 128:
        at += 1
        byte = data[at]
        value = ((value + 1) << 7) + (byte & 127)
    return value, at + 1


@functools.lru_cache(16)
def _directories_of(tracked: frozenset[str]) -> frozenset[str]:
    """Return the directories that have tracked files, each with a final ``/``."""
    found: set[str] = set()
    for path in tracked:
        while (slash := path.rfind("/")) >= 0:
            path = path[:slash]
            if f"{path}/" in found:
                break
            found.add(f"{path}/")
    return frozenset(found)
