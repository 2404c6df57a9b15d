"""Which variables a job gets."""

from __future__ import annotations

import pytest

from kinetic.environment import base_environment, capture

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
    """A star elsewhere than at the end is a star; a prefix never takes what is this process's."""
    assert capture(patterns, ENVIRON) == {name: ENVIRON[name] for name in names}


def test_what_looks_like_a_secret_is_named_once_and_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ = {"api_token": "hush", "DB_PASSWORD": "hush", "MODE": "x"}
    capture(["*", "api_token"], environ)
    assert len(caplog.records) == 1
    assert "DB_PASSWORD, api_token" in caplog.text
    assert "hush" not in caplog.text


def test_nothing_is_said_when_nothing_looks_like_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    capture(["WANDB_MODE"], ENVIRON)
    assert not caplog.records


def test_the_base_is_small_and_has_what_every_program_needs() -> None:
    assert set(base_environment(ENVIRON)) == {"PATH", "HOME", "LC_ALL", "LANG", "https_proxy"}


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


def test_to_pack_a_project_is_a_coroutine_of_aio(script) -> None:
    with script(PACKING) as process:
        process.expect("2 ['pyproject.toml', 'script.py']", "True")
        assert process.end()[0] == 0
