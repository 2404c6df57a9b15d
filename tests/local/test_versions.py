"""Clients and supervisors of different versions refuse to work together."""

from __future__ import annotations

import asyncio
import os
import shutil
import site
import socket
import venv
from pathlib import Path

import pytest

from kinetic._runner.protocol.messages import Decoder, encode
from kinetic._supervisor.protocol import VERSION, SupervisorPaths
from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.local.supervisor import open_connection
from kinetic.errors import Unavailable
from tests import programs

from .conftest import run_job, spec

EARLIER = (VERSION[0], VERSION[1] - 1)


async def test_a_supervisor_of_another_version_is_refused_with_its_process_id(home: Path) -> None:
    paths = SupervisorPaths(home)
    paths.state.mkdir(0o700, parents=True)
    hung_up = asyncio.Event()

    async def earlier(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = Decoder()
        [(hello, _)] = decoder.feed(await reader.read(65536))
        writer.write(encode({"id": hello["id"], "protocol": EARLIER, "pid": 4711}))
        await reader.read()  # until the client hangs up
        writer.close()
        await writer.wait_closed()
        hung_up.set()

    async with await asyncio.start_unix_server(earlier, str(paths.socket)):
        with pytest.raises(
            Unavailable, match=r"4711.* another version of kinetic.*`kinetic local stop`"
        ):
            await open_connection(home, os.environ)
        await hung_up.wait()


async def test_a_client_of_another_version_gets_an_error(cluster: LocalCluster, home: Path) -> None:
    await cluster.launch(spec("one", "pass"))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(SupervisorPaths(home).socket))
        sock.sendall(encode({"op": "hello", "id": 1, "protocol": EARLIER}))
        replies: list[dict[str, object]] = []
        decoder = Decoder()
        while not replies:
            replies += [header for header, _ in decoder.feed(sock.recv(65536))]
    assert replies[0]["kind"] == "protocol"


CONNECT = """
import os, sys
from pathlib import Path
sys.path[:] = [*(path for path in sys.path if path != sys.argv[1]), sys.argv[2]]
from kinetic.aio.local.supervisor import connect
connect(Path(os.environ["KINETIC_HOME"]), os.environ).close()
"""


@pytest.mark.usefixtures("home")
def test_an_old_copy_of_a_standard_module_beside_kinetic_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "kinetic").symlink_to(programs.ROOT / "kinetic")
    (tmp_path / "pathlib.py").write_text("from collections import Sequence")
    programs.python("-P", "-c", CONNECT, programs.ROOT, tmp_path)


def make_environment(folder: Path) -> Path:
    """Make a virtual environment that has the packages of this one."""
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    outer = [str(programs.ROOT), *site.getsitepackages()]
    (packages / "outer.pth").write_text("\n".join(outer))
    return folder


FIND = """
import importlib.util
import kinetic

@kinetic.run(backend="local", accelerator="cpu")
def is_found() -> bool:
    return importlib.util.find_spec("editable") is not None

print(is_found())
"""


@pytest.mark.full
def test_a_job_finds_an_editable_package_that_was_installed_after_another_job(
    tmp_path: Path,
) -> None:
    for name in ("project", "library"):
        (tmp_path / name).mkdir()
    (tmp_path / "project" / "find.py").write_text(FIND)
    (tmp_path / "library" / "editable.py").touch()
    environment = make_environment(tmp_path / "venv")
    [packages] = environment.glob("lib/python*/site-packages")

    def is_found() -> str:
        environ = {**os.environ, "KINETIC_PACKAGE_ROOT": str(tmp_path / "project")}
        command = (environment / "bin" / "python", tmp_path / "project" / "find.py")
        return programs.output(*command, env=environ, cwd=tmp_path).strip()

    assert is_found() == "False"
    (packages / "library.pth").write_text(str(tmp_path / "library"))
    assert is_found() == "True"


async def test_a_fresh_job_needs_no_environment_but_its_own(
    home: Path, environ: dict[str, str], runner: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv")
    programs.output(environment / "bin" / "python", "-c", CONNECT, "", programs.ROOT)
    shutil.rmtree(environment)  # the supervisor, which runs in it, goes on
    cluster = LocalCluster(home, {**environ, "KINETIC_LOCAL_FRESH": "1"}, runner=runner)
    seen = await run_job(cluster, spec("fresh", "code = 5"))
    assert seen.exit_code == 5, seen.message
    await cluster.aclose()
