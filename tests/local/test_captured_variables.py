"""No file contains values of captured variables, neither while a batch runs nor afterwards."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kinetic import aio, errors
from tests.jobs import eventually
from tests.scripts import Script, prelude

from .conftest import signal_supervisor

SECRET = "sesame-4711-open"
DIGESTS = [hashlib.sha256(f"{SECRET}{number}".encode()).hexdigest() for number in range(4)]
BATCH = """
import hashlib

@remote
def digest(folder, number):
    pathlib.Path(folder, f"{number}.started").touch()
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.02)
    assert os.path.exists(os.path.join(folder, "well")) or number
    return hashlib.sha256((os.environ["MY_TOKEN"] + str(number)).encode()).hexdigest()

batch = digest.run_async_map([(here, number) for number in range(4)], max_concurrent=3)
print(batch.group_id)
batch.wait()
print("over", flush=True)
"""
COMMON = prelude(backend="local", accelerator="cpu", capture_env_vars=["MY_TOKEN"])


@pytest.fixture
def submitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Start a batch of four: two run, one waits for a slot, and one isn't sent yet."""
    monkeypatch.setenv("KINETIC_LOCAL_SLOTS", "2")
    monkeypatch.setenv("MY_TOKEN", SECRET)
    with Script(COMMON + BATCH, folder=tmp_path) as script:
        yield script


async def until_started(folder: Path, count: int) -> None:
    await eventually(lambda: len([*folder.glob("*.started")]) >= count)


def files_with_the_secret(home: Path) -> list[Path]:
    files = [Path(at, name) for at, _, names in os.walk(home) for name in names]
    return [path for path in files if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.full
async def test_no_file_has_a_captured_value_whoever_is_killed(
    submitter: Script, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers go on; if they die, a process that has the variables starts others."""
    group = submitter.line()
    await until_started(tmp_path, 2)
    assert files_with_the_secret(home) == [], "while jobs run, and wait for a slot"
    submitter.kill()
    assert files_with_the_secret(home) == [], "after the submitter's death"
    signal_supervisor(home, signal.SIGKILL)
    monkeypatch.delenv("MY_TOKEN")
    async with aio.Client(backend="local") as client:
        batch = await client.attach_batch(group)
        with pytest.raises(errors.ConfigurationError, match="MY_TOKEN"):
            await batch.resume()
        assert files_with_the_secret(home) == [], "under another supervisor"
        monkeypatch.setenv("MY_TOKEN", SECRET)
        for name in ("well", "go"):
            (tmp_path / name).touch()
        await batch.resume()
        await batch.wait()
        # Both items that ran have ended with the supervisor. If a worker had the time to end its
        # item, that one was preempted, and runs again by itself.
        await batch.retry_failed()
        assert await batch.results(cleanup=False) == DIGESTS
        assert files_with_the_secret(home) == [], "after the batch"


@pytest.mark.full
def test_a_process_that_submits_a_batch_captures_once(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retries use the captured value even after the variable has changed."""
    code = BATCH.replace('print("over", flush=True)', "").strip() + (
        "\nos.environ['MY_TOKEN'] = 'another'\n"
        "pathlib.Path(here, 'well').touch()\n"
        "print(batch.retry_failed())\n"
        "print(*batch.results())\n"
    )
    monkeypatch.setenv("MY_TOKEN", SECRET)
    (tmp_path / "go").touch()
    with Script(COMMON + code, folder=tmp_path) as script:
        script.line()
        script.expect("1", " ".join(DIGESTS))
        script.end()
