"""Which files of a project stay here.

The first of these layers that has a word decides:

1. Never shipped, whatever anybody says: ``.git``, ``__pycache__``, and virtual
   environments, which the scan recognises by what is in them.
2. ``.kineticignore`` at the project's root, in the syntax of ``.gitignore``.
   A ``!pattern`` brings back what the layers below leave out.
3. The defaults, unless `KINETIC_NO_DEFAULT_EXCLUDES` is set.
4. Credentials, by name in the scan and by content while files are packed.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kinetic.errors import PackError

if TYPE_CHECKING:
    import pathspec

HEAD_BYTES = 64 * 1024
"""How much of a file is searched for a key."""

_PRIVATE = frozenset({".aws", ".env", ".netrc", ".ssh"})
_PRIVATE_BEGINNINGS = ("id_dsa", "id_ecdsa", "id_ed25519", "id_rsa")

_PEM = re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----")
_SERVICE_ACCOUNT = re.compile(rb'"type"\s*:\s*"service_account"')

_ALIKE = (
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
    """Whether a file or directory of this *name*, without its folder, is one of credentials."""
    if name in _PRIVATE:
        return True
    return name.startswith(_PRIVATE_BEGINNINGS) and not _matches(name, _HARMLESS)


def has_key(name: str, head: bytes) -> bool:
    """Whether *head*, the first bytes of the file *name*, has a private key in it."""
    name = name.lower()
    if name.endswith((".pem", ".key")):
        return _PEM.search(head) is not None
    if name.endswith(".json") and b'"private_key"' in head:
        return _SERVICE_ACCOUNT.search(head) is not None
    return False


def look_private(name: str) -> bool:
    """Whether a file of this *name*, without its folder, may be one of credentials."""
    lower = name.lower()
    return is_private(lower) or (_matches(lower, _ALIKE) and not _matches(lower, _HARMLESS))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


IGNORE_FILE = ".kineticignore"

NEVER = frozenset({".git", "__pycache__"})

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
    """What to leave out by name; pure.

    A file of rules has two readings, because the library answers for files
    only. ``directories`` has the patterns without their last ``/`` and is asked
    as if a directory were a file. The scan comes from above and asks it first,
    so what leaves directories out is not in ``files``.
    """

    defaults: frozenset[str] = DEFAULT_EXCLUDES
    files: pathspec.GitIgnoreSpec | None = None
    directories: pathspec.GitIgnoreSpec | None = None

    def leave_out(self, relative: str, name: str, *, is_directory: bool) -> bool | None:
        """Whether *relative* (with ``/``, no leading one) does not ship.

        False when a ``!pattern`` brings it back, None when nothing has a word.
        A directory that is left out is not looked into, so nothing in it can
        be brought back: git's own rule.
        """
        if name in NEVER:
            return True
        spec = self.directories if is_directory else self.files
        if spec is None:
            return True if name in self.defaults else None
        return spec.check_file(relative).include


def read_rules(root: Path, environ: Mapping[str, str]) -> Rules:
    """The rules of the project at *root*.

    Raises:
        PackError: ``.kineticignore`` cannot be read, or has an invalid pattern.
    """
    plain = environ.get("KINETIC_NO_DEFAULT_EXCLUDES", "").strip().lower()
    defaults = DEFAULT_EXCLUDES if plain in ("", "0", "false", "no") else frozenset[str]()
    file = root / IGNORE_FILE
    try:
        text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except FileNotFoundError:
        return Rules(defaults=defaults)
    except OSError as exc:
        raise PackError(
            f"{file} cannot be read ({exc.strerror}), so what it leaves out is unknown. "
            "Make it readable or remove it.",
            culprit=IGNORE_FILE,
        ) from exc
    return _compiled(file, text.split("\n"), defaults)


def _compiled(file: Path, lines: list[str], defaults: frozenset[str]) -> Rules:
    import pathspec

    # Compiled one by one only to name the line.
    for number, line in enumerate(lines, 1):
        try:
            pathspec.GitIgnoreSpec.from_lines([line])
        except ValueError as exc:
            raise PackError(
                f"{file}, line {number}: {line.strip()!r} is not a pattern of .gitignore's syntax",
                culprit=f"{IGNORE_FILE}:{number}",
            ) from exc
    # First, so that the project's own patterns have the last word.
    lines = [*sorted(defaults), *lines]
    plain = [line for line in lines if line.startswith("!") or not line.rstrip().endswith("/")]
    both = [_for_directories(line) for line in lines]
    return Rules(
        defaults=defaults,
        files=pathspec.GitIgnoreSpec.from_lines(plain),
        directories=pathspec.GitIgnoreSpec.from_lines(both),
    )


def _for_directories(line: str) -> str:
    """The pattern without the ``/`` that says what a directory is anyway."""
    stripped = line.rstrip()
    if not stripped.endswith("/") or stripped.startswith("#"):
        return line
    bare = stripped.removesuffix("/")
    return "" if bare in ("", "!") else bare
