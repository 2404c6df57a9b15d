"""Test which environment variables a job gets, and the packing of a project."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio
from kinetic.environment import base_environment, capture
from kinetic.errors import ConfigurationError
from tests.jobs import eventually

ENVIRON = {
    "PATH": "/bin",
    "HOME": "/home/me",
    "LC_ALL": "C",
    "LANG": "de_DE.UTF-8",
    "WANDB_MODE": "offline",
    "WANDB_API_KEY": "hush",
    "PYTHONPATH": "/src",
    "PWD": "/here",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "CUDA_VISIBLE_DEVICES": "1",
    "https_proxy": "http://proxy",
}


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ([], set()),
        (["WANDB_MODE", "ABSENT"], {"WANDB_MODE"}),
        (["WANDB_M*"], {"WANDB_MODE"}),
        (["P*"], set()),
        (["P*", "PATH"], {"PATH"}),
        (["K*"], set()),
        (["*MODE", "WANDB_*DE", "?ANDB_MODE"], set()),
        (
            ["*"],
            {
                "LC_ALL",
                "LANG",
                "WANDB_MODE",
                "WANDB_API_KEY",
                "CUDA_VISIBLE_DEVICES",
                "https_proxy",
            },
        ),
    ],
)
def test_names_and_prefixes_are_captured(patterns: list[str], names: set[str]) -> None:
    """Only a final star is a wildcard, and wildcards skip variables of this process."""
    assert capture(patterns, ENVIRON) == {name: ENVIRON[name] for name in names}


def test_variables_that_look_like_secrets_are_named_once_without_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ = {"api_token": "hush", "DB_PASSWORD": "hush", "MODE": "x"}
    capture(["*", "api_token"], environ)
    assert len(caplog.records) == 1
    assert "DB_PASSWORD, api_token" in caplog.text
    assert "hush" not in caplog.text


def test_other_variables_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    capture(["WANDB_MODE"], ENVIRON)
    assert not caplog.records


def test_the_base_environment_is_small() -> None:
    assert set(base_environment(ENVIRON)) == {"PATH", "HOME", "LC_ALL", "LANG", "https_proxy"}


@pytest.mark.parametrize(
    ("environ", "shared"),
    [
        ({"TMPDIR": "/scratch"}, "/scratch"),
        ({"TMPDIR": "here"}, f"{os.getcwd()}/here"),
        ({"TMPDIR": "/tmp/kinetic-0123abcd", "KINETIC_TMPDIR": "/tmp"}, "/tmp"),
    ],
    ids=["absolute", "relative", "in a job"],
)
def test_jobs_share_the_folder_for_temporary_files(environ: dict[str, str], shared: str) -> None:
    assert base_environment(environ) == {"KINETIC_TMPDIR": shared}


PACKING = """
import asyncio, zipfile, kinetic.aio

@kinetic.run(backend="local", accelerator="cpu")
def f():
    pass

async def main():
    archive = await kinetic.aio.pack(f)
    print(archive.files, sorted(zipfile.ZipFile(archive.path).namelist()))
    print(archive == await kinetic.aio.pack(f))

asyncio.run(main())
"""


def test_aio_pack_packs_a_project(script) -> None:
    with script(PACKING) as process:
        process.expect("2 ['pyproject.toml', 'script.py']", "True")
        assert process.end()[0] == 0


@pytest.mark.parametrize("start", [aio.pack, lambda function: aio.run(function, 1)])
async def test_a_cancelled_packing_stops(
    start: Callable[[Callable[..., object]], Coroutine[Any, Any, object]],
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "pyproject.toml").touch()
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 30)
    monkeypatch.chdir(tmp_path)
    cache = home / "cache" / "pack"
    packing = asyncio.create_task(start(abs))
    await eventually(lambda: any(path.stat().st_size for path in cache.glob("*")))
    packing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await packing
    assert [*cache.iterdir()] == []


def test_a_variable_with_which_no_program_starts_is_refused_by_name() -> None:
    environ = {"FITS": "x" * 131_066, "SMALL": "1", "BIG": "é" * 65_534}
    assert capture(["FITS", "S*"], environ) == {"FITS": environ["FITS"], "SMALL": "1"}
    subprocess.run(["true"], env={"FITS": environ["FITS"]}, check=True)
    for patterns in (["BIG"], ["*"]):
        with pytest.raises(ConfigurationError, match=r"BIG, which has 131,073 bytes"):
            capture(patterns, environ)
