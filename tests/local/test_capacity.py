"""Requests for what this machine lacks are refused, or a warning says what it does instead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import kinetic
from kinetic import aio, errors
from tests.gcs.server import GcsServer


def write_here(number: int = 0) -> str:
    folder = os.environ["KINETIC_OUTPUT_DIR"]
    Path(folder, "x").write_text("x")
    return folder


def stored_files(home: Path) -> list[Path]:
    return [path for path in (home / "store").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cpu": 1000},
            r"cpu=1000 is more than the \d+ CPUs that local jobs may use; .*KINETIC_LOCAL_SLOTS",
        ),
        ({"memory": "900Ti"}, r"memory='900Ti' is more than this machine has, \d+Mi; ask for less"),
        ({"output_dir": "s3://b/o"}, "local jobs can't write to output_dir='s3://b/o'"),
    ],
)
async def test_what_this_machine_does_not_have_is_refused_before_anything_is_sent(
    home: Path, options: dict[str, Any], message: str
) -> None:
    function = kinetic.run(backend="local", accelerator="cpu", **options)(write_here)
    async with aio.Client() as client:
        with pytest.raises(errors.ConfigurationError, match=message):
            await client.submit(function)
        with pytest.raises(errors.ConfigurationError, match=message):
            await client.run_async_map(function, [1])
    assert stored_files(home) == []


async def test_an_output_directory_of_the_configuration_is_refused_as_well(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_OUTPUT_DIR", "s3://b/o")
    async with aio.Client(backend="local") as client:
        with pytest.raises(errors.ConfigurationError, match="local jobs can't write to"):
            await client.submit(kinetic.run(accelerator="cpu")(write_here))
    assert stored_files(home) == []


async def test_a_tilde_in_an_output_directory_is_the_home_directory(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    function = kinetic.run(backend="local", accelerator="cpu", output_dir="~/kept")(write_here)
    async with aio.Client() as client:
        job = await client.submit(function)
        assert await job.result() == job.output_dir == str(tmp_path / "kept")
    assert (tmp_path / "kept" / "x").read_text() == "x"


async def test_an_accelerator_that_becomes_processors_is_said_once(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("KINETIC_LOCAL_SLOTS", "3")
    for _ in range(2):
        async with aio.Client(backend="local") as client:
            for accelerator in ("tpu-v6e-8", "gpu-t4", "cpu", "tpu-v5e-4"):
                await client.run(kinetic.run(accelerator=accelerator)(os.getpid))
            await client.run(os.getpid)  # no warning without a requested accelerator
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        f'backend="local": {requested} becomes this machine\'s own processors (3); backend="gke" '
        f"runs on a cluster with {requested}"
        for requested in ("tpu-v6e-8", "gpu-t4", "tpu-v5e-4")
    ]


def write_output() -> str:
    Path(os.environ["KINETIC_OUTPUT_PATH"], "model").write_text("weights")
    return os.environ["KINETIC_OUTPUT_DIR"]


async def test_outputs_of_a_local_job_may_lie_in_a_bucket(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = "gs://kn-test/mine"
    async with GcsServer() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        async with aio.Client(backend="local") as client:
            assert await client.run(kinetic.run(output_dir=folder)(write_output)) == folder
        assert server.objects["mine/model"].body == b"weights"
    work = home / "local" / "work"
    assert not [path for path in work.rglob("*") if path.name == "model"]
