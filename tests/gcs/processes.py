"""Run fake-gcs-server as a separate process, if this machine has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import children

VARIABLE = "KINETIC_TEST_GCS_SERVER"
BINARY = os.environ.get(VARIABLE) or shutil.which("fake-gcs-server") or ""
"""Read at import, because tests run without kinetic's environment variables."""

MISSING = (
    "fake-gcs-server is missing: `go install github.com/fsouza/fake-gcs-server@v1.56.1` puts it "
    f"into ~/go/bin; add that to PATH, or set {VARIABLE} to the file"
)
START_S = 60.0


@contextmanager
def running(log: Path, host: str = "127.0.0.1") -> Iterator[str]:
    """Start the server with the bucket ``kn-test`` on *host*, and yield its URL."""
    port = str(children.free_port(host))  # no client connection gets it before the server
    address = f"{host}:{port}"
    command = [BINARY, "-backend", "memory", "-scheme", "http", "-host", host, "-port", port]
    command += ["-external-url", f"http://{address}", "-public-host", address]
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [*command, "-log-level", "error"],
            stdout=file,
            stderr=file,
            env={"HOME": str(log.parent)},
        ) as process,
    ):
        try:
            url = f"http://{address}"
            _await_ready(url, process, log)
            yield url
        finally:
            process.terminate()


def _await_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    request = urllib.request.Request(
        f"{url}/storage/v1/b?project=p",
        data=b'{"name": "kn-test"}',
        headers={"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=START_S):
                return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a fake-gcs-server, whose bucket all tests share, and return its URL."""
    if not BINARY:
        pytest.skip(MISSING)
    with running(tmp_path_factory.mktemp("gcs") / "log") as url:
        yield url
