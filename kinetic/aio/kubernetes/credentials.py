"""A cluster's API server: its address, and the credentials for it."""

from __future__ import annotations

import ssl
import tempfile
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from kinetic.aio._net.tokens import TokenSource


@lru_cache(4)
def tls_context(
    ca: bytes | None,
    *,
    verify: bool = True,
    certificate: bytes | None = None,
    key: bytes | None = None,
) -> ssl.SSLContext:
    """Return a TLS context that trusts the certificates *ca* (PEM); if None, those of the system.

    *certificate* and *key* are the client's, as PEM. Comments in PEM may have any encoding. Equal
    arguments give the same context, so that aiohttp can reuse connections. Loading the system's
    certificates takes 30 ms of CPU.

    Raises:
        ValueError: The bytes aren't certificates, or the key belongs to another certificate.
    """
    # Python reads a client's certificate, and comments that aren't ASCII, from files only. These
    # files exist briefly, private to the user.
    with tempfile.TemporaryDirectory(prefix="kinetic-") as folder:
        ca_file, chain_file, key_file = (Path(folder, name) for name in ("ca", "chain", "key"))
        ca_file.write_bytes(ca or b"")
        try:
            context = ssl.create_default_context(cafile=None if ca is None else str(ca_file))
        except ssl.SSLError as exc:
            message = f"certificate-authority is not a certificate in PEM ({exc})"
            raise ValueError(message) from exc
        if certificate is not None:
            chain_file.write_bytes(certificate)
            key_file.write_bytes(key or b"")
            try:
                context.load_cert_chain(chain_file, key_file, password=_no_password)
            except ssl.SSLError as exc:
                raise ValueError(
                    f"client-certificate and client-key cannot be used ({exc})"
                ) from exc
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if ca is not None:
        # Python 3.13 and later require extensions that the CAs of many clusters lack.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _no_password() -> str:
    """Keep OpenSSL from asking for a key's password on the terminal."""
    raise ValueError("client-key has a password; use a key without one")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterCredentials:
    """The credentials of one request: a header, and the certificates of its connection.

    Credentials of two renewals are never equal, even with the same content: a
    refusal of the older credentials says nothing about the newer. ``tls`` is None for a
    server without TLS.
    """

    authorization: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How one client reaches one cluster.

    ``server`` is the API server's URL, without a slash at the end; a URL may have a path.
    ``name`` describes the cluster in messages. ``namespace`` is the default namespace.
    ``tls_name`` is the name in the server's certificate, if it differs from the URL's.
    Each request carries ``headers``. ``pools`` has the machine type and TPU topology of each
    node pool that Google's API named when the access was opened; a machine that is a slice by
    itself has the topology "". ``group_kill_pools`` names those where the kernel kills a whole
    container that runs out of memory. ``gke`` says whether this is GKE, which may have
    ComputeClasses.
    """

    server: str
    name: str
    credentials: TokenSource[ClusterCredentials]
    namespace: str = "default"
    tls_name: str | None = None
    proxy: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    pools: tuple[tuple[str, str], ...] = ()
    group_kill_pools: tuple[str, ...] = ()
    gke: bool = False
