"""Kubeconfigs for tests, clients that use them, and servers with certificates."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.kubernetes.access import Access, open_context
from kinetic.aio.kubernetes.api import Api, Limits
from tests.cluster import certificates
from tests.kubernetes.faults import FaultServer

PODS = "/api/v1/namespaces/default/pods"
QUICK = Limits(connect_s=30.0, idle_s=30.0, retry=RetryPolicy(total_s=0.2))
LOOPBACK = ipaddress.ip_address("127.0.0.1")
API_VERSION = "client.authentication.k8s.io/v1"


class Config:
    """A kubeconfig with the single context ``c``, which tests change and write again."""

    def __init__(self, folder: Path, server: str) -> None:
        self.path = folder / "config"
        self.cluster: dict[str, Any] = {"server": server}
        self.user: dict[str, Any] = {"token": "first"}
        self.context: dict[str, Any] = {"cluster": "here", "user": "me"}
        self.environ = {"KUBECONFIG": str(self.path), "PATH": os.environ["PATH"]}
        self.write()

    def write(self) -> None:
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": self.cluster}],
            "users": [{"name": "me", "user": self.user}],
            "contexts": [{"name": "c", "context": self.context}],
            "current-context": "another",
        }
        self.path.write_text(json.dumps(document))  # JSON is YAML

    def plugin(self, text: str, **section: Any) -> None:
        """Make *text*, a Python program, the plugin that returns the credentials."""
        program = self.path.parent / "plugin"
        program.write_text(f"#!{sys.executable} -I\n{text}")
        program.chmod(0o700)
        self.user = {"exec": {"apiVersion": API_VERSION, "command": "./plugin", **section}}
        self.write()

    async def open(self) -> Access:
        return await open_context("c", self.environ)


@asynccontextmanager
async def opened(config: Config) -> AsyncIterator[Api]:
    api = Api(await config.open(), QUICK)
    try:
        yield api
    finally:
        await api.aclose()


async def connect(config: Config) -> None:
    """Write *config* and send a request with it."""
    config.write()
    async with opened(config) as api:
        await api.call("GET", PODS)


def authorizations(server: FaultServer) -> list[str | None]:
    return [request.headers.get("Authorization") for request in server.seen]


def make_client_certificate(folder: Path) -> Path:
    """Write ``me.key`` and ``me.crt``, a self-signed certificate that names only its address."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "me")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(LOOPBACK)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "me.key").write_bytes(key.private_bytes(pem, *plain))
    (folder / "me.crt").write_bytes(certificate.public_bytes(pem))
    return folder / "me.crt"


@asynccontextmanager
async def secured(folder: Path, ask: bool = False) -> AsyncIterator[FaultServer]:
    """Start a server with TLS and its own CA; with *ask*, it requires a client certificate."""
    files = certificates.make(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.ca))
    context.load_cert_chain(files.certificate, files.key)
    if ask:
        context.load_verify_locations(make_client_certificate(folder))
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    async with FaultServer(context) as server:
        yield server
