"""Where a cluster's API server is, and what shows it who asks."""

from __future__ import annotations

import asyncio
import math
import ssl
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from absl import logging

from kinetic._tasks import shared
from kinetic.errors import AuthError, ConfigurationError, Unavailable

__all__ = [
    "Access",
    "Certificates",
    "ClusterCredentials",
    "Contexts",
    "CredentialsProvider",
    "Fresh",
    "OtherCluster",
    "TokenCache",
    "proxy_for",
    "trusting",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """PEM: the CAs to trust (None for the system's), and one's own certificate and key."""

    ca: str | None = None
    verify: bool = True
    certificate: str | None = None
    key: str | None = field(default=None, repr=False)


class Contexts:
    """Makes contexts; the same certificates have the same one, so that connections stay."""

    def __init__(self) -> None:
        self._last: tuple[Certificates, ssl.SSLContext] | None = None

    def context(self, certificates: Certificates) -> ssl.SSLContext:
        """The context of *certificates*.

        Raises:
            ValueError: They are none, or the key is not that of the certificate.
        """
        last = self._last
        if last is None or last[0] != certificates:
            context = trusting(certificates.ca, verify=certificates.verify)
            _show(context, certificates)
            last = self._last = certificates, context
        return last[1]


def trusting(ca: str | None, *, verify: bool = True) -> ssl.SSLContext:
    """A context that trusts the certificates *ca* (PEM), or the system's if that is None.

    Takes some 30 ms of a processor for the system's.

    Raises:
        ValueError: These are no certificates.
    """
    if not verify:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    try:
        context = ssl.create_default_context(cadata=ca)
    except ssl.SSLError as exc:
        raise ValueError(f"the CA is not a certificate in PEM ({exc})") from exc
    if ca is not None:
        # Python 3.13 and later ask for extensions that the CAs of many clusters do not have.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _show(context: ssl.SSLContext, certificates: Certificates) -> None:
    if certificates.certificate is None:
        return
    # Python reads them from files only: these are there for a moment, for this user alone.
    with tempfile.TemporaryDirectory(prefix="kinetic-") as folder:
        chain, key = Path(folder, "certificate"), Path(folder, "key")
        chain.write_text(certificates.certificate)
        key.write_text(certificates.key or "")
        try:
            context.load_cert_chain(chain, key, password=_no_password)
        except ssl.SSLError as exc:
            raise ValueError(f"the client's certificate and key cannot be used ({exc})") from exc


def _no_password() -> str:
    """Without it the key of a password would be asked for on the terminal."""
    raise ValueError("the client's key has a password; give one without")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCredentials:
    """What one request shows: a header, and the certificates of its connection.

    ``tls`` is the same object as long as its certificates are the same, so
    that connections are used again; None for a server without TLS.
    """

    authorization: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None


class CredentialsProvider(Protocol):
    """Gives out passes, and gets new ones in time."""

    async def get(self) -> ClusterCredentials:
        """A pass that is valid now.

        Raises:
            AuthError: There is none to get.
            Unavailable: Whoever gives them does not answer.
        """
        ...

    def forget(self, shown: ClusterCredentials) -> None:
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
    passes: CredentialsProvider
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


PAUSE_S = 10.0
"""After a renewal beside a request has failed, the next is tried this much later."""


class OtherCluster(AuthError):
    """What gave the passes of one cluster is about another one now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """A new pass: when to look for a newer one, and until when it is good; in `time.time`."""

    shown: ClusterCredentials
    early: float = math.inf
    late: float = math.inf


class TokenCache:
    """Gives out what *renew* brings; cancelling one who waits for it leaves the others waiting.

    A pass that is still good is renewed beside the requests; one that is not
    holds them up.
    """

    def __init__(
        self,
        renew: Callable[[], Awaitable[Fresh]],
        name: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._renew = renew
        self._name = name
        self._clock = clock
        self._fresh: Fresh | None = None
        self._had = False
        self._pause_until = -math.inf
        self._renewing: asyncio.Task[ClusterCredentials] | None = None

    async def first(self) -> None:
        """Get one now; nothing is left behind if that fails, or is cancelled."""
        try:
            await self.get()
        except BaseException:
            await self.aclose()
            raise

    async def get(self) -> ClusterCredentials:
        """A pass that is valid now, or the error of *renew*."""
        now, fresh = self._clock(), self._fresh
        if fresh is not None and now < fresh.late:
            if now >= max(fresh.early, self._pause_until):
                self._start()
            return fresh.shown
        return await shared(self._start(), f"the client of {self._name}")

    def forget(self, shown: ClusterCredentials) -> None:
        """The server has refused *shown*: get another one before the next request."""
        if self._fresh is not None and self._fresh.shown is shown:
            self._fresh = None

    async def aclose(self) -> None:
        """End a renewal under way."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})

    def _start(self) -> asyncio.Task[ClusterCredentials]:
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._once(), name=f"kinetic pass of {self._name}")
            self._renewing.add_done_callback(self._ended)
        return self._renewing

    async def _once(self) -> ClusterCredentials:
        try:
            fresh = self._fresh = await self._renew()
        except (AuthError, ConfigurationError) as exc:
            if not self._had or isinstance(exc, OtherCluster):
                raise
            # What worked before may work again: without a network, plugins fail as well.
            raise Unavailable(f"{exc} (they were there before)", retryable=True) from exc
        self._had = True
        return fresh.shown

    def _ended(self, task: asyncio.Task[ClusterCredentials]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None and self._fresh:
            self._pause_until = self._clock() + PAUSE_S
            logging.info("the credentials of %s were not renewed yet: %s", self._name, failure)
