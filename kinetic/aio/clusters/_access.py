"""Where a cluster's API server is, and what shows it who asks."""

from __future__ import annotations

import ssl
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Access", "Pass", "Passes", "proxy_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one request shows: a header, and the certificates of its connection.

    ``tls`` is the same object as long as its certificates are the same, so
    that connections are used again; None for a server without TLS.
    """

    authorization: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None


class Passes(Protocol):
    """Gives out passes, and gets new ones in time."""

    async def get(self) -> Pass:
        """A pass that is valid now.

        Raises:
            AuthError: There is none to get.
            Unavailable: Whoever gives them does not answer.
        """
        ...

    def forget(self, shown: Pass) -> None:
        """The server has refused *shown*: do not hand it out again."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One cluster, as one client reaches it.

    ``server`` is its URL, without a slash at its end; it may have a path.
    ``name`` is how people call the cluster, for messages. ``namespace`` is
    what is meant when none is named. ``tls_name`` is the name in the server's
    certificate, where that is not the one in its URL. ``headers`` go with each
    request.
    """

    server: str
    name: str
    passes: Passes
    namespace: str = "default"
    tls_name: str | None = None
    proxy: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


def proxy_for(server: str) -> str | None:
    """The proxy that the environment names for *server*."""
    parts = urllib.parse.urlsplit(server)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    return urllib.request.getproxies().get(parts.scheme)
