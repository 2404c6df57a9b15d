"""A certificate authority for one test run, and a certificate for everything on loopback."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
ADDRESSES = ("127.0.0.1", "10.96.0.1")
"""Loopback, and what the service ``kubernetes`` has: containers ask the API server there."""

AUTHORITY = "kinetic tests"
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files: the authority, a server's certificate and key, one more key to sign."""

    ca: Path
    certificate: Path
    key: Path
    signing_key: Path


def make(folder: Path) -> Certificates:
    """Write them to *folder*; good for a day."""
    made = Certificates(
        folder / "ca.crt", folder / "server.crt", folder / "server.key", folder / "sa.key"
    )
    authority, key = ec.generate_private_key(ec.SECP256R1()), _key(made.key)
    _key(made.signing_key)
    ca = _authority(authority)
    server = _server(key.public_key(), authority)
    made.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    made.certificate.write_bytes(server.public_bytes(serialization.Encoding.PEM))
    return made


def _key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP256R1())
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    return key


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(name: str, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    """All but who vouches for it, and what for."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(AUTHORITY))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    builder = _builder(AUTHORITY, key.public_key())
    signs = {"key_cert_sign": True, "crl_sign": True, "digital_signature": True}
    builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
    return builder.add_extension(_usage(**signs), critical=True).sign(key, hashes.SHA256())


def _server(
    public: ec.EllipticCurvePublicKey, authority: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    names: list[x509.GeneralName] = [x509.DNSName(name) for name in NAMES]
    names += [x509.IPAddress(ipaddress.ip_address(address)) for address in ADDRESSES]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    return (
        _builder("127.0.0.1", public)
        .add_extension(x509.BasicConstraints(False, None), critical=True)
        .add_extension(issuer, critical=False)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(authority, hashes.SHA256())
    )


def _usage(**allowed: bool) -> x509.KeyUsage:
    none = dict.fromkeys(
        (
            "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
            "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
        ),
        False,
    )  # fmt: skip
    return x509.KeyUsage(**(none | allowed))
