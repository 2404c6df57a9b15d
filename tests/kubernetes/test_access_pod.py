"""Access from a pod to its own cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinetic import configuration
from kinetic.aio.kubernetes.access import open_access, open_pod
from kinetic.errors import ConfigurationError
from tests.cluster import certificates

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def environ(account: Path) -> dict[str, str]:
    for_new_pods = {"KINETIC_SERVICE_ACCOUNT": "trainer"}
    return POD | for_new_pods | {"KINETIC_POD_ACCOUNT_FOLDER": str(account)}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    certificates.make(tmp_path)
    (tmp_path / "token").write_text("one\n")
    return tmp_path


async def test_a_pod_gets_access_from_its_mounted_service_account(account: Path) -> None:
    access = await open_pod(environ(account))
    assert access.server == "https://10.96.0.1:443"
    first = await access.credentials.get()
    assert first.authorization == "Bearer one"
    assert first.tls is not None and len(first.tls.get_ca_certs()) == 1
    (account / "token").write_text("two")
    access.credentials.forget(first)
    second = await access.credentials.get()
    assert second.authorization == "Bearer two"
    assert second.tls is first.tls
    await access.credentials.aclose()


async def test_the_ca_of_a_pod_may_have_comments(account: Path) -> None:
    ca = account / "ca.crt"
    ca.write_bytes("# Főtanúsítvány\n".encode() + ca.read_bytes())
    access = await open_pod(environ(account))
    assert (await access.credentials.get()).authorization == "Bearer one"
    await access.credentials.aclose()


async def test_the_address_may_be_ipv6(account: Path) -> None:
    access = await open_pod(environ(account) | {"KUBERNETES_SERVICE_HOST": "fd00::1"})
    assert access.server == "https://[fd00::1]:443"


@pytest.mark.parametrize("missing", ["token", "ca.crt", "variables"])
async def test_the_error_says_what_a_pod_lacks(account: Path, missing: str) -> None:
    if missing != "variables":
        (account / missing).unlink()
    with pytest.raises(ConfigurationError, match=r"can.t read it in /.*mounts the token"):
        await open_pod({} if missing == "variables" else environ(account))


async def test_a_context_named_in_cluster_means_the_pods_own_access() -> None:
    target = configuration.resolve(environ={"KINETIC_KUBE_CONTEXT": "in-cluster"})
    with pytest.raises(ConfigurationError, match="KINETIC_KUBE_CONTEXT=in-cluster means"):
        await open_access(target, {})
