"""Decide which files of a project don't ship, that is, aren't sent to its jobs.

The first of these layers that applies decides:

1. ``.git``, ``__pycache__``, and virtual environments never ship. The scan recognizes virtual
   environments by their content.
2. ``.kineticignore`` at the project's root has the syntax of ``.gitignore``. A ``!pattern``
   includes files that the layers below leave out.
3. Files that match the built-in patterns don't ship, unless `KINETIC_NO_DEFAULT_EXCLUDES` is
   set.
4. With ``ship = "git"``, what git ignores doesn't ship (see `git`).
5. Credentials don't ship. The scan recognizes them by name, the packer by content.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kinetic import configuration
from kinetic.errors import PackError

if TYPE_CHECKING:
    import pathspec

    from kinetic._packing.git import Folder

HEAD_BYTES = 64 * 1024
"""How many bytes of a file are searched for a key."""

_PRIVATE_NAMES = frozenset({".aws", ".env", ".netrc", ".ssh"})
_PRIVATE_PREFIXES = ("id_dsa", "id_ecdsa", "id_ed25519", "id_rsa")

_PEM = re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----")
_SERVICE_ACCOUNT = re.compile(rb'"type"\s*:\s*"service_account"')

_LOOKALIKES = (
    ".env.*",
    ".envrc",
    ".git-credentials",
    ".pgpass",
    ".pypirc",
    "*.key",
    "*.keystore",
    "*.p12",
    "*.pem",
    "*.pfx",
    "application_default_credentials.json",
    "client_secret*.json",
    "credentials.json",
    "service-account*.json",
    "service_account*.json",
)
_HARMLESS = ("*.pub", "*.py", "*.example", "*.sample", "*.template", "*.dist")


def is_private(name: str) -> bool:
    """Return whether *name* (without a folder) is that of a file or directory of credentials."""
    if name in _PRIVATE_NAMES:
        return True
    return name.startswith(_PRIVATE_PREFIXES) and not _matches_any(name, _HARMLESS)


def may_have_key(name: str) -> bool:
    """Return whether `has_key` looks for a key in a file of this *name*."""
    return name.lower().endswith((".pem", ".key", ".json"))


def has_key(name: str, head: bytes) -> bool:
    """Return whether *head*, the first bytes of the file *name*, contains a private key."""
    name = name.lower()
    if name.endswith((".pem", ".key")):
        return _PEM.search(head) is not None
    is_candidate = name.endswith(".json") and b'"private_key"' in head
    return is_candidate and _SERVICE_ACCOUNT.search(head) is not None


def looks_private(name: str) -> bool:
    """Return whether a file of this *name* (without a folder) may contain credentials."""
    lower = name.lower()
    return is_private(lower) or (
        _matches_any(lower, _LOOKALIKES) and not _matches_any(lower, _HARMLESS)
    )


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


IGNORE_FILE = ".kineticignore"

NEVER_SHIPPED = frozenset({".git", "__pycache__"})

DEFAULT_EXCLUDES = frozenset(
    {
        ".DS_Store",
        ".hg",
        ".hypothesis",
        ".ipynb_checkpoints",
        ".mypy_cache",
        ".nox",
        ".pytest_cache",
        ".ruff_cache",
        ".svn",
        ".tox",
        ".venv",
        "node_modules",
        "venv",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules that decide which names to leave out; they do no I/O.

    pathspec matches files only, so ``directories`` has the patterns without their final ``/``. The
    scan goes down from the root and checks directories first. So ``files`` lacks the patterns that
    leave out directories. ``lines`` has the lines of ``.kineticignore``; ``includes`` says that one
    begins with ``!``. ``git`` has git's rules for the root; None if they don't count.
    """

    defaults: frozenset[str] = DEFAULT_EXCLUDES
    files: pathspec.GitIgnoreSpec | None = None
    directories: pathspec.GitIgnoreSpec | None = None
    lines: tuple[str, ...] = ()
    includes: bool = False
    git: Folder | None = None

    def verdict(self, relative: str, name: str, *, is_directory: bool) -> tuple[bool | None, str]:
        """Return True and a reason to leave *relative* out, False if a ``!pattern`` ships it.

        Otherwise return None. *relative* is the path from the root, with ``/`` between its parts.
        The scan doesn't enter a directory that is left out, so no pattern can ship its content; git
        has the same rule.
        """
        if name in NEVER_SHIPPED:
            return True, "never ships"
        by_default = f"kinetic leaves out {name} by default"
        spec = self.directories if is_directory else self.files
        if spec is None:
            return (True, by_default) if name in self.defaults else (None, "")
        if not (excluded := spec.check_file(relative).include):
            return excluded, ""
        named = name in self.defaults and name not in self.lines
        return True, by_default if named else f"{IGNORE_FILE} leaves it out"


def read_rules(root: Path, environ: Mapping[str, str]) -> Rules:
    """Read the rules of the project at *root*.

    Raises:
        ConfigurationError: ``ship`` has a wrong value.
        PackError: ``.kineticignore`` or a ``.gitignore`` cannot be read, or ``.kineticignore`` has
            an invalid pattern.
    """
    folder = None
    if configuration.ship(root, environ)[0] == "git":
        from kinetic._packing import git

        folder = git.folder_of(os.path.realpath(root), environ)
    setting = environ.get("KINETIC_NO_DEFAULT_EXCLUDES", "").strip().lower()
    defaults = DEFAULT_EXCLUDES if setting in ("", "0", "false", "no") else frozenset[str]()
    ignore_file = root / IGNORE_FILE
    try:
        text = ignore_file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except FileNotFoundError:
        return Rules(defaults=defaults, git=folder)
    except OSError as exc:
        raise PackError(
            f"{ignore_file} cannot be read ({exc.strerror}), so what it leaves out is unknown. "
            "Make it readable or remove it.",
            culprit=IGNORE_FILE,
        ) from exc
    return replace(_compile_rules(ignore_file, text.split("\n"), defaults), git=folder)


def _compile_rules(ignore_file: Path, lines: list[str], defaults: frozenset[str]) -> Rules:
    import pathspec

    from kinetic._packing.git import with_ranges

    # Compile line by line, so that an error can name the line.
    own_lines, lines = lines, [with_ranges(line) for line in lines]
    for number, (line, own_line) in enumerate(zip(lines, own_lines, strict=True), 1):
        try:
            pathspec.GitIgnoreSpec.from_lines([line])
        except ValueError as exc:
            raise PackError(
                f"{ignore_file}, line {number}: {own_line.strip()!r} is not a pattern of "
                ".gitignore's syntax",
                culprit=f"{IGNORE_FILE}:{number}",
            ) from exc
    # The defaults come first, so that the project's own patterns override them.
    lines = [*sorted(defaults), *lines]
    file_patterns = [
        line for line in lines if line.startswith("!") or not line.rstrip().endswith("/")
    ]
    directory_patterns = [_directory_pattern(line) for line in lines]
    return Rules(
        defaults=defaults,
        lines=tuple(line.strip().strip("/") for line in own_lines),
        includes=any(line.startswith("!") for line in own_lines),
        files=pathspec.GitIgnoreSpec.from_lines(file_patterns),
        directories=pathspec.GitIgnoreSpec.from_lines(directory_patterns),
    )


def _directory_pattern(line: str) -> str:
    """Return an ignore line without its final ``/``; if no pattern is left, an empty line."""
    stripped = line.rstrip()
    # The matcher gets a directory's path without a final ``/``, as if it were a file.
    if not stripped.endswith("/") or stripped.startswith("#"):
        return line
    pattern = stripped.removesuffix("/")
    return "" if pattern in ("", "!") else pattern
