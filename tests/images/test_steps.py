"""Builds whose steps are real processes: their words, their end, and ours."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kinetic.aio.ports import ImageRequest
from kinetic.errors import BuildError
from tests.images.conftest import Cloud
from tests.images.steps import run_steps


@pytest.fixture
def builder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """A program that stands for the builder: a shell script."""

    def make(body: str) -> list[str]:
        program = tmp_path_factory.mktemp("bin") / "builder"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        return [str(program)]

    return make


Requests = Callable[..., ImageRequest]
Builders = Callable[[str], list[str]]


async def test_a_step_finds_the_context_in_its_folder(
    cloud: Cloud, request_of: Requests, builder: Builders, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    program = builder(f'echo "$@" > {told}; cat Dockerfile install/requirements.txt >> {told}')
    cloud.builds.script = run_steps(program)
    image = await cloud.images().resolve(request_of())
    first, *rest = told.read_text().splitlines()
    assert first == f"build --tag {image.uri} ."
    assert rest[0] == "FROM python:3.12-slim" and rest[-1] == "numpy==2.0"


async def test_the_last_words_of_a_step_that_fails_are_told(
    cloud: Cloud, request_of: Requests, builder: Builders
) -> None:
    program = builder("for n in $(seq 50); do echo line $n; done; echo no such package >&2; exit 7")
    cloud.builds.script = run_steps(program)
    with pytest.raises(BuildError, match="step 0 ended with 7") as caught:
        await cloud.images().resolve(request_of())
    assert "  line 50\n  no such package\n" in str(caught.value)
    assert "Step #0" not in str(caught.value) and "line 20\n" not in str(caught.value)


async def test_cancelled_no_step_goes_on(
    cloud: Cloud, request_of: Requests, builder: Builders, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    program = builder(f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60")
    cloud.builds.script = run_steps(program)
    resolving = asyncio.create_task(cloud.images().resolve(request_of()))
    async with asyncio.timeout(60):
        while not pid.exists():
            await asyncio.sleep(0.01)
        resolving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resolving
        await cloud.builds.settled()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
