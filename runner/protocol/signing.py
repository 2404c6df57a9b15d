"""Sign objects: creating, changing, or moving a valid object needs the submission's key."""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
from collections.abc import Mapping

_SIGNED = re.compile(rb', "mac": "([0-9a-f]{64})"\}\Z')


def submission_key(root: bytes, scope: str) -> bytes:
    """Return the key of one submission; a pod never sees the root key."""
    return hmac.new(root, b"kinetic submission " + scope.encode(), hashlib.sha256).digest()


def sign(key: bytes, scope: str, name: str, content: bytes) -> str:
    """Sign an object's content and name; return hex."""
    digest = hashlib.sha256(content).hexdigest()
    # A forger may choose a name with lone surrogates, which fail without surrogatepass.
    signed = f"{scope}\n{name}\n{digest}".encode(errors="surrogatepass")
    return hmac.new(key, signed, hashlib.sha256).hexdigest()


def is_signed(
    metadata: Mapping[str, str], key: bytes, scope: str, name: str, content: bytes
) -> bool:
    """Return whether ``mac`` in *metadata* signs *content* under *name* with *key*.

    kinetic uses an object only after this check, or if a signed object contains its digest.
    """
    mac = str(metadata.get("mac", "")).encode(errors="replace")
    return hmac.compare_digest(mac, sign(key, scope, name, content).encode())


def signed_json(key: bytes, scope: str, name: str, content: bytes) -> bytes:
    """Return a JSON object with its signature in an additional field."""
    mac = sign(key, scope, name, content).encode()
    return content[:-1] + b', "mac": "%b"}' % mac


def verified_json(key: bytes, scope: str, name: str, content: bytes) -> bytes:
    """Verify the signature; return the JSON without the signature, unparsed (see `signed_json`).

    Raises:
        KeyError: *content* isn't signed.
        ValueError: *content* was signed with another key or for another name, or was changed.
    """
    if (match := _SIGNED.search(content)) is None:
        raise KeyError(name)
    unsigned = content[: match.start()] + b"}"
    if not is_signed({"mac": match[1].decode()}, key, scope, name, unsigned):
        raise ValueError(name)
    return unsigned


def seal_of(key: bytes, scope: str, index: int, attempt: int, header: str) -> str:
    """Sign an outcome's header and the attempt that it belongs to; return hex."""
    seal = _seal_start(key, scope).copy()
    seal.update(f"{index}\n{attempt}\n{header}".encode())
    return seal.hexdigest()


@functools.lru_cache(64)
def _seal_start(key: bytes, scope: str) -> hmac.HMAC:
    """Return the HMAC that all seals of a submission start from; computing it is the slow part."""
    return hmac.new(key, f"{scope}\n".encode(), hashlib.sha256)
