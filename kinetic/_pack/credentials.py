"""Which files are credentials: held back by name or by content, or only looked at twice; pure.

What is held back ships when ``.kineticignore`` takes it in with a ``!``. What
only looks like a credential ships and is named to the user.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

__all__ = ["HEAD_BYTES", "has_key", "is_private", "look_private"]

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
