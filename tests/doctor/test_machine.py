"""Examine the local platform: a healthy one, and ones with a single fault."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kinetic import aio
from kinetic._runner.protocol.messages import Decoder, encode
from kinetic._supervisor.protocol import VERSION, SupervisorPaths
from kinetic.doctor.checks import State
from kinetic.doctor.examination import examine

NAMES = ["home", "disk", "memory", "processors", "kernel", "supervisor"]


@pytest.fixture(autouse=True)
def project(small_project: Path) -> Path:
    return small_project


async def test_a_healthy_machine_runs_a_job_and_says_how_long_its_steps_took() -> None:
    report = await examine(run=True)
    assert report.healthy, report.to_dict()
    assert [result.name for result in report.results if result.group == "this machine"] == NAMES
    assert report["supervisor"].evidence == "not running; the first job starts it"
    assert "submitted in" in report["job"].evidence and "it ran Python" in report["job"].evidence
    assert await aio.list_jobs() == []  # the doctor has removed its job
    again = await examine()
    assert again["supervisor"].evidence.endswith(", of this version, runs 0 jobs")


async def test_a_home_that_others_may_write_to_fails_and_skips_dependent_checks(home: Path) -> None:
    home.chmod(0o777)
    report = await examine(run=True)
    assert report["home"].state is State.FAILED
    assert "mode 0777" in report["home"].evidence
    assert report["home"].advice == f"`chmod go-w {home}`"
    assert report["supervisor"].because == report["disk"].because == "home"
    assert report["job"].because == "home"
    home.chmod(0o700)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_full_disk_fails(small_disk: Path) -> None:
    environ = {**os.environ, "KINETIC_HOME": str(small_disk / "home")}
    report = await examine(environ=environ)
    assert report["disk"].state is State.FAILED
    assert "0 MiB free" in report["disk"].evidence
    assert "KINETIC_HOME" in report["disk"].advice
    (small_disk / "filler").write_bytes(b"\0" * (512 * 1024 - 4096 * 2))
    with (small_disk / "more").open("wb", buffering=0) as more:
        with pytest.raises(OSError, match="No space left"):
            while True:
                more.write(b"\0" * 512)
    report = await examine(environ=environ)
    assert report["home"].state is State.FAILED
    assert "No space left" in report["home"].evidence


async def test_a_supervisor_of_another_version_fails(home: Path) -> None:
    paths = SupervisorPaths(home)
    paths.state.mkdir(0o700, parents=True)

    async def serve_earlier_version(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        [(hello, _)] = Decoder().feed(await reader.read(65536))
        version = (VERSION[0], VERSION[1] - 1)
        writer.write(encode({"id": hello["id"], "protocol": version, "pid": 4711}))
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(serve_earlier_version, str(paths.socket)):
        report = await examine()
    assert report["supervisor"].state is State.FAILED
    assert report["supervisor"].advice.startswith("run `kill 4711`")


async def test_a_wrong_setting_fails_before_any_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETIC_BACKEND", "loca")
    report = await examine()
    assert report["configuration"].state is State.FAILED
    assert report["configuration"].advice == "did you mean 'local'?"
    assert not report.healthy
    assert [result.name for result in report.results][-1] == "configuration"


async def test_a_missing_project_is_shown_with_its_whole_fix() -> None:
    result = (await examine(backend="gke", environ={}))["configuration"]
    assert result.evidence.startswith("No GCP project configured for the backend 'gke' (")
    assert result.advice.startswith("pass project=") and "KINETIC_KUBE_CONTEXT" in result.advice


async def test_a_job_of_a_cancelled_examination_is_gone(
    home: Path, small_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancel the examination as soon as the job is in the store."""
    examining = asyncio.create_task(examine(backend="local", run=True))
    jobs = home / "store" / "jobs"
    async with asyncio.timeout(60):
        while not (jobs.is_dir() and any(jobs.iterdir())):
            await asyncio.sleep(0.005)
        examining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await examining
        async with aio.Client(backend="local") as client:
            assert await client.list_jobs() == []
