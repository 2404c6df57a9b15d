"""Test the runner's storage client: compatibility with kinetic's client, faults, tokens, memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic._runner.protocol.gcs_names import BucketFolder
from kinetic._runner.stores.gcs import EMULATOR, NONCE, GcsObjects, Limits, StorageError
from kinetic.aio.gcs.http import NONCE as CLIENTS_NONCE
from kinetic.aio.gcs.http import Location
from kinetic.aio.gcs.store import GcsStore
from tests import programs
from tests.contract.names import HOSTILE
from tests.gcs.server import GcsServer, Stored

MIB = 1024 * 1024
QUICK = Limits(total_s=60.0, first_s=0.005, longest_s=0.02, connect_s=30.0, idle_s=30.0)
"""Retry soon, but treat no slow connection as a silent one."""

BODY = os.urandom(MIB) * 36  # more than one part of a download and two of an upload


@pytest.fixture
def objects(server: GcsServer) -> GcsObjects:
    return GcsObjects("gs://kn-test/jobs", {EMULATOR: server.url}, QUICK)


@pytest.fixture
def anywhere(any_server: str) -> GcsObjects:
    """Return a store in a new folder of each storage server."""
    return GcsObjects(f"gs://kn-test/{uuid.uuid4()}", {EMULATOR: any_server}, QUICK)


@settings(deadline=None)
@given(st.text(max_size=60), st.sampled_from(["", "/folder"]))
def test_runner_and_client_name_objects_alike(name: str, folder: str) -> None:
    runners, clients = (
        BucketFolder.from_url(f"gs://bucket{folder}"),
        Location.from_url(f"gs://bucket{folder}"),
    )
    assert runners.object_name(name) == clients.object_name(name)
    assert runners.name(runners.object_name(name)) == name
    assert runners.name(name) == clients.name(name)
    assert (runners.url, NONCE) == (clients.url, CLIENTS_NONCE)


@pytest.mark.parametrize("url", ["gs://", "gs:///x", "gs://Upper", "s3://bucket", "bucket"])
def test_a_url_without_a_valid_bucket_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="gs://BUCKET"):
        BucketFolder.from_url(url)


def test_runner_and_client_see_the_same_objects(any_server: str, tmp_path: Path) -> None:
    url, environ = f"gs://kn-test/{uuid.uuid4()}", {EMULATOR: any_server}
    objects = GcsObjects(url, environ, QUICK)

    async def as_client() -> None:
        store = GcsStore(url, environ)
        try:
            assert await store.create("from the client", b"c", {"k": "é"})
            assert not await store.create("from the runner", b"other")
            found = await store.get("from the runner")
            assert (found.body, dict(found.metadata)) == (b"r", {"k": "v"})
            for name in HOSTILE:
                assert (await store.get(name)).body == name.encode()
            listed = await store.list("")
            assert [(info.name, info.size, dict(info.metadata)) for info in listed] == [
                (info.name, info.size, dict(info.metadata)) for info in objects.list("")
            ]
        finally:
            await store.aclose()

    assert objects.create("from the runner", b"r", {"k": "v"})
    for name in HOSTILE:
        assert objects.create(name, name.encode())
    asyncio.run(as_client())
    assert not objects.create("from the client", b"other")
    assert objects.get("from the client")[0] == b"c"
    assert dict(objects.stat("from the client").metadata) == {"k": "é"}


def test_a_bucket_supports_the_calls_of_a_directory_store(
    anywhere: GcsObjects, tmp_path: Path
) -> None:
    for name in ("a/1.claim", "a/1.outcome", "a/10.claim", "b"):
        assert anywhere.create(name, name.encode(), {"n": name})
    names = [info.name for info in anywhere.list("a/")]
    assert names == ["a/1.claim", "a/1.outcome", "a/10.claim"]
    found = anywhere.look_up(["a/1.claim", "a/1.outcome", "a/2.claim"])
    assert [(info.name, info.metadata["n"]) for info in found] == [
        ("a/1.claim", "a/1.claim"),
        ("a/1.outcome", "a/1.outcome"),
    ]
    assert anywhere.look_up([]) == []
    assert (anywhere.exists("b"), anywhere.exists("c")) == (True, False)
    assert anywhere.get("b", 0, 1)[0] == b"b" and anywhere.get("b", 0, 0)[0] == b""
    assert anywhere.get("a/1.claim", 2, 9)[0] == b"1.claim"
    assert anywhere.get("a/1.claim", 4)[0] == b"claim"
    assert anywhere.path("b") is None
    anywhere.delete(["b", "b", "never there"])
    for read in (anywhere.get, anywhere.stat):
        with pytest.raises(KeyError, match="b"):
            read("b")
    with pytest.raises(KeyError):
        anywhere.fetch("b", tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 1, 9 * MIB, 36 * MIB])
def test_files_are_uploaded_and_fetched_whole(
    anywhere: GcsObjects, tmp_path: Path, size: int
) -> None:
    (tmp_path / "source").write_bytes(BODY[:size])
    assert anywhere.create("x", tmp_path / "source", consume=True)
    assert anywhere.stat("x").size == size
    anywhere.fetch("x", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == BODY[:size]
    with pytest.raises(FileExistsError):
        anywhere.fetch("x", tmp_path / "copy")


def test_of_many_creators_one_wins(anywhere: GcsObjects) -> None:
    with ThreadPoolExecutor(20) as pool:
        won = list(pool.map(lambda n: anywhere.create("race", bytes([n])), range(20)))
    assert won.count(True) == 1
    assert anywhere.get("race")[0] == bytes([won.index(True)])


OPERATIONS: dict[str, Any] = {
    "create": lambda objects, path: objects.create("new", b"x"),
    "create large": lambda objects, path: objects.create("new", path / "large"),
    "get": lambda objects, path: objects.get("there"),
    "get a range": lambda objects, path: objects.get("there", 2, 4),
    "fetch": lambda objects, path: objects.fetch("there", path / "copy"),
    "list": lambda objects, path: objects.list(""),
    "stat": lambda objects, path: objects.stat("there"),
    "delete": lambda objects, path: objects.delete(["there"]),
}


@pytest.fixture(params=OPERATIONS)
def operation(request: pytest.FixtureRequest, objects: GcsObjects, tmp_path: Path) -> Any:
    if request.param == "create large":
        (tmp_path / "large").write_bytes(BODY[: 9 * MIB])
    objects.create("there", b"content")
    return OPERATIONS[request.param]


@pytest.mark.parametrize(
    "fault",
    [
        {"times": 8, "status": 503},
        {"times": 3, "status": 429},
        {"times": 3},
        {"times": 3, "late": True},
        {"times": 1, "stall": True},
    ],
    ids=["503", "429", "cut before", "cut after", "silence"],
)
def test_a_temporary_fault_is_retried(
    server: GcsServer, objects: GcsObjects, tmp_path: Path, operation: Any, fault: dict[str, Any]
) -> None:
    if "stall" in fault:
        short = replace(QUICK, idle_s=0.5)
        objects = GcsObjects("gs://kn-test/jobs", {EMULATOR: server.url}, short)
    injected = server.fail("*", **fault)
    operation(objects, tmp_path)
    # A late fault may cut the connection after the whole content.
    assert injected.seen == fault["times"] or "late" in fault


def test_create_succeeds_although_the_reply_is_lost(server: GcsServer, objects: GcsObjects) -> None:
    server.fail("create", late=True)
    assert objects.create("x", b"first", {"k": "v"})
    assert not objects.create("x", b"other")
    assert dict(objects.stat("x").metadata) == {"k": "v"}


def test_create_of_an_existing_object_fails_although_requests_are_lost(
    server: GcsServer, objects: GcsObjects
) -> None:
    assert objects.create("x", b"first")
    server.fail("create", times=3)
    assert not objects.create("x", b"second")
    assert objects.get("x")[0] == b"first"


def test_an_upload_resumes_after_a_cut(
    server: GcsServer, objects: GcsObjects, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(BODY)
    server.fail("put", times=2, at=5 * MIB)
    assert objects.create("x", tmp_path / "large")
    assert server.objects["jobs/x"].body == BODY
    starts = [int(sent.removeprefix("bytes ").split("-")[0]) for sent in server.ranges]
    assert server.requests["begin"] == 1
    assert starts == [0, 0, 0, 16 * MIB, 32 * MIB], "only the piece that was cut is sent again"


@pytest.mark.parametrize("status", [404, 410])
def test_an_upload_that_the_service_lost_starts_again(
    server: GcsServer, objects: GcsObjects, tmp_path: Path, status: int
) -> None:
    (tmp_path / "large").write_bytes(BODY[: 20 * MIB])
    server.fail("put", times=2, status=status)
    assert objects.create("x", tmp_path / "large")
    assert server.objects["jobs/x"].body == BODY[: 20 * MIB]


def test_a_large_upload_whose_last_reply_is_lost_is_found_complete(
    server: GcsServer, objects: GcsObjects, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(BODY[: 9 * MIB])
    server.fail("put", late=True)
    assert objects.create("x", tmp_path / "large")
    assert server.objects["jobs/x"].body == BODY[: 9 * MIB]
    assert server.requests["begin"] == 1


def test_a_download_resumes_after_a_cut(
    server: GcsServer, objects: GcsObjects, tmp_path: Path
) -> None:
    server.objects["jobs/x"] = Stored(BODY, {}, 7)
    server.fail("media", times=5, at=3 * MIB)
    objects.fetch("x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == BODY
    starts = [int(sent.removeprefix("bytes=").split("-")[0]) for sent in server.ranges]
    # The last few bytes before the cut may be lost with the connection.
    assert starts == sorted(starts) and 2 * MIB <= starts[0] <= 3 * MIB


def test_each_part_of_a_large_object_is_a_request(
    server: GcsServer, objects: GcsObjects, tmp_path: Path
) -> None:
    server.objects["jobs/x"] = Stored(BODY, {}, 7)
    objects.fetch("x", tmp_path / "x", len(BODY))
    assert (tmp_path / "x").read_bytes() == BODY
    assert server.requests["media"] == 2


@pytest.mark.parametrize("operation", ["get", "fetch"])
def test_content_damaged_in_a_download_is_read_again(
    server: GcsServer, objects: GcsObjects, tmp_path: Path, operation: str
) -> None:
    objects.create("there", b"content")
    fault = server.fail("media", body=lambda body: b"C" + body[1:])
    OPERATIONS[operation](objects, tmp_path)
    assert fault.seen == 1


@pytest.mark.parametrize("large", [False, True])
def test_content_damaged_in_an_upload_is_sent_again(
    server: GcsServer, objects: GcsObjects, tmp_path: Path, large: bool
) -> None:
    body = BODY[: 9 * MIB] if large else b"right"
    (tmp_path / "file").write_bytes(body)
    server.fail("put" if large else "create", crc32c="AAAAAA==")
    if not large:
        server.fail("create", status=400, body=lambda sent: sent + b"!")
    assert objects.create("x", tmp_path / "file")
    assert server.objects["jobs/x"].body == body


def test_a_missing_permission_is_reported_at_once_with_the_role(
    server: GcsServer, objects: GcsObjects
) -> None:
    """The error says that it may pass, so a finished job tries again to store its outcome."""
    denied = json.dumps({"error": {"message": "pod does not have storage.objects.create access"}})
    fault = server.fail("*", times=99, status=403, text=denied)
    with pytest.raises(
        TimeoutError, match=r"gs://kn-test/jobs/x: .*lacks storage.objects.create.*objectUser"
    ):
        objects.create("x", b"")
    assert fault.seen == 1


def test_a_missing_bucket_is_an_error_and_not_an_empty_listing(
    server: GcsServer, objects: GcsObjects
) -> None:
    server.buckets.clear()
    with pytest.raises(StorageError, match="bucket") as caught:
        objects.list("a")
    assert not isinstance(caught.value, TimeoutError), "it won't pass"


def test_retries_end(server: GcsServer) -> None:
    limits = Limits(total_s=1.0, first_s=0.01, longest_s=0.05)
    objects = GcsObjects("gs://kn-test", {EMULATOR: server.url}, limits)
    fault = server.fail("*", times=10**6, status=503, text="Backend Error")
    with pytest.raises(TimeoutError, match=r"503.*Backend Error"):
        objects.list("")
    assert fault.seen > 3


def test_a_handshake_that_is_cut_off_is_tried_again() -> None:
    accepted: list[int] = []

    def cut_off() -> None:
        with contextlib.suppress(OSError):  # the end of the test
            while True:
                connection, _ = listener.accept()
                with connection:
                    accepted.append(len(connection.recv(4096)))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=cut_off)
        thread.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        limits = Limits(total_s=1.0, first_s=0.01, longest_s=0.05)
        with pytest.raises(TimeoutError, match="EOF occurred"):
            GcsObjects("gs://kn-test", {EMULATOR: url}, limits).exists("a")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert len(accepted) > 3


TOKENS = """
import json, sys
sys.path.insert(0, {root!r})
from kinetic._runner.stores import gcs as gcs_http
from kinetic._runner.stores.gcs import GcsObjects
limits = gcs_http.Limits(total_s=60.0, first_s=0.01)
objects = GcsObjects("gs://kn-test", {{gcs_http.OVERRIDE: {url!r}}}, limits)
print(objects.create("x", b"1"), objects.get("x")[0])
input()
print(objects.create("y", b"2"))
"""


class Metadata(BaseHTTPRequestHandler):
    """The metadata server of a node: the service account of a pod and its tokens."""

    gcs: GcsServer
    tokens = 0
    refusals = 0

    def do_GET(self) -> None:
        if Metadata.refusals:
            Metadata.refusals -= 1
            self.send_error(503)
            return
        answer = b"{}"
        if self.path.partition("?")[0].endswith("/token"):
            Metadata.tokens += 1
            token = f"token-{Metadata.tokens}"
            assert self.gcs.tokens is not None
            self.gcs.tokens.add(token)
            answer = json.dumps({"access_token": token, "expires_in": 3600}).encode()
        elif "service-accounts" in self.path:
            answer = b'{"email": "pod@example.com", "scopes": []}'
        elif self.path.endswith("project-id"):
            answer = b"project"
        self.send_response(200)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header(
            "Content-Type", "text/plain" if answer == b"project" else "application/json"
        )
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


def test_a_refused_token_is_replaced_by_a_new_one_from_the_node(
    server: GcsServer, tmp_path: Path
) -> None:
    Metadata.gcs, Metadata.tokens, server.tokens = server, 0, set()
    Metadata.refusals = 4  # as long as the node doesn't know the pod
    code = TOKENS.format(root=str(Path(__file__).parents[2]), url=server.url)
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as metadata:
        thread = threading.Thread(target=metadata.serve_forever)
        thread.start()
        host = f"127.0.0.1:{metadata.server_port}"
        try:
            with subprocess.Popen(
                [sys.executable, "-c", code],
                env={
                    "GCE_METADATA_HOST": host,
                    "GCE_METADATA_IP": host,
                    "GCE_METADATA_TIMEOUT": "30",
                    "HOME": str(tmp_path),
                    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as process:
                assert process.stdout is not None and process.stdin is not None
                assert process.stdout.readline() == "True b'1'\n"
                assert Metadata.tokens == 1
                server.tokens.clear()  # the token expires early
                print(file=process.stdin, flush=True)
                assert process.stdout.readline() == "True\n"
                assert Metadata.tokens == 2
        finally:
            metadata.shutdown()
            thread.join()


FORKING = """
import os, sys
sys.path.insert(0, {root!r})
from kinetic._runner.stores.gcs import GcsObjects
objects = GcsObjects("gs://kn-test/jobs", {{"STORAGE_EMULATOR_HOST": {url!r}}})
print(objects.create("a", b""), flush=True)
if (pid := os.fork()) == 0:
    print(objects.exists("a"), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(objects.exists("a"))
"""


def test_a_fork_uses_connections_of_its_own(server: GcsServer) -> None:
    code = FORKING.format(root=str(Path(__file__).parents[2]), url=server.url)
    assert programs.python("-c", code, timeout=50) == "True\n" * 3
    assert len(server.peers) == 2, "the parent's connection stays, and the fork has another"


NO_CREDENTIALS = """
import sys
sys.path.insert(0, {root!r})
from kinetic._runner.stores.gcs import GcsObjects
try:
    GcsObjects("gs://kn-test", {{}}).exists("x")
except OSError as exc:
    print(exc)
"""


@pytest.mark.parametrize(
    "variables",
    [{}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KINETIC_POD_BEGAN": str(time.monotonic() - 60)}],
    ids=["anywhere", "in a pod that another process has waited in"],
)
def test_the_error_about_missing_credentials_says_how_to_get_them(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    code = NO_CREDENTIALS.format(root=str(Path(__file__).parents[2]))
    environ = {"HOME": str(tmp_path), "NO_GCE_CHECK": "true", **variables}
    assert "Workload Identity" in programs.python("-c", code, env=environ, timeout=40)


PEAK_MEMORY = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from kinetic._runner.stores.gcs import GcsObjects
objects = GcsObjects("gs://kn-test/{folder}", {{"STORAGE_EMULATOR_HOST": {url!r}}})
def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    # ru_maxrss would include the peak of the parent process.
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
objects.get("small")
before = peak()
assert objects.create("large", Path({source!r}))
objects.fetch("large", Path({source!r} + ".copy"))
print(peak() - before)
"""


@pytest.mark.full
def test_large_contents_take_little_memory(fake_gcs: str, tmp_path: Path) -> None:
    source, folder = tmp_path / "source", str(uuid.uuid4())
    with source.open("wb") as file:
        for _ in range(2):
            file.write(BODY)
    GcsObjects(f"gs://kn-test/{folder}", {EMULATOR: fake_gcs}).create("small", b"")
    root = str(Path(__file__).parents[2])
    code = PEAK_MEMORY.format(root=root, url=fake_gcs, source=str(source), folder=folder)
    growth = int(programs.python("-c", code, timeout=50))
    assert growth < 56 * 1024, "KiB, of 72 MiB sent and fetched"
    assert (tmp_path / "source.copy").stat().st_size == source.stat().st_size
