"""Where a cluster's API server is, and what shows it who asks."""

from __future__ import annotations

import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from kinetic.aio._net.tokens import TokenSource


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterCredentials:
    """What one request shows: a header, and the certificates of its connection.

    Those of two renewals are not equal, even if they say the same: who was
    refused with the older ones shall not take the newer ones for refused.
    ``tls`` is the same object as long as its certificates are the same, so
    that connections are used again; None for a server without TLS.
    """

    authorization: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A node pool of GKE; ``topology`` is empty where each machine is a slice."""

    machine: str
    topology: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One cluster, as one client reaches it.

    ``server`` is its URL, without a slash at its end; it may have a path.
    ``name`` is how people call the cluster, for messages. ``namespace`` is
    what is meant when none is named. ``tls_name`` is the name in the server's
    certificate, where that is not the one in its URL. ``headers`` go with each
    request. ``pools`` are those that GKE named when this was opened.
    """

    server: str
    name: str
    passes: TokenSource[ClusterCredentials]
    namespace: str = "default"
    tls_name: str | None = None
    proxy: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    pools: tuple[Pool, ...] = ()
