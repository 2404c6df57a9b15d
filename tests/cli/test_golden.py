"""Compare the exact output of commands, as text and as JSON, with the files in ``golden/``.

``KINETIC_GOLDEN=write pytest tests/cli/test_golden.py`` rewrites the files; check the difference
before you keep it. A word in capitals replaces text that differs from run to run.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.cli.changing import CHANGING
from tests.cli.conftest import FILE, Completed, Kinetic

GOLDEN = Path(__file__).parent / "golden"
WRITES = os.environ.get("KINETIC_GOLDEN") == "write"

OF_A_JOB = {
    "jobs-list": "jobs list",
    "jobs-status": "jobs status JOB",
    "jobs-result": "jobs result JOB",
    "jobs-result-unpickled": "jobs result JOB --unpickle",
    "jobs-logs": "jobs logs JOB",
    "outputs": "outputs ls JOB",
    "local-status": "local status",
}
OF_A_BATCH = {
    "batches-list": "batches list",
    "batches-status": "batches status BATCH",
    "batches-items": "batches status BATCH --items",
    "batches-results": "batches results BATCH",
    "batches-watch": "batches watch BATCH",
    "batches-logs": "batches logs BATCH",
    "batches-none": "batches list --name nobody",
}
OF_SETTINGS = {
    "config": "config show",
    "profiles": "profile ls",
    "profile": "profile show mine",
    "accelerators": "accelerators",
    "base-images": "build-image --dry-run",
    "image": f"image show {FILE}:double",
    "gc": "gc",
    "jobs-none": "jobs list",
    "job-absent": "jobs status job-local-000000000000",
    "job-wrong": "jobs status what",
    "help": "--help",
    "codes": "explain",
    "code": "explain kn204",
    "code-absent": "explain KN999",
}
WITHOUT_JSON = {"help"}


class GoldenFiles:
    """Compare the output of commands with the files, or write them."""

    def __init__(self, kinetic: Kinetic, home: Path) -> None:
        self._kinetic = kinetic
        self._home = home
        self.differences: list[str] = []

    def check(self, commands: dict[str, str], **ids: str) -> None:
        for name, command in commands.items():
            arguments = [ids.get(word, word) for word in command.split()]
            self._compare(f"{name}.txt", command, self._kinetic(*arguments))
            if name not in WITHOUT_JSON:
                self._compare(
                    f"{name}.json.txt", f"{command} --json", self._kinetic(*arguments, "--json")
                )

    def _compare(self, name: str, command: str, completed: Completed) -> None:
        printed = f"$ kinetic {self._plain(command)}{self._plain(completed.out)}"
        printed += "".join(f"! {line}\n" for line in self._plain(completed.err).splitlines())
        printed += f"= {completed.code}\n"
        file = GOLDEN / name
        if WRITES:
            GOLDEN.mkdir(exist_ok=True)
            file.write_text(printed)
        elif not file.exists() or file.read_text() != printed:
            self.differences.append(f"{name}:\n{printed}")

    def _plain(self, text: str) -> str:
        text = text.replace(str(self._home), "HOME").replace(str(Path(FILE).parent), "FOLDER")
        for pattern, word in CHANGING:
            text = re.sub(pattern, word, text)
        return "\n".join(line.rstrip() for line in text.splitlines()) + "\n" if text else ""


@pytest.fixture
def golden_files(
    kinetic: Kinetic, home: Path, small_project: Path, monkeypatch: pytest.MonkeyPatch
) -> GoldenFiles:
    monkeypatch.delenv("COLUMNS", raising=False)  # it would shorten the output
    return GoldenFiles(kinetic, home)


def test_settings_and_catalogues(
    golden_files: GoldenFiles, kinetic: Kinetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_BASE_IMAGE_REPO", "r.io/me")
    kinetic("profile", "create", "mine", "--zone", "europe-west4-b")
    golden_files.check(OF_SETTINGS)
    assert not golden_files.differences, "\n".join(golden_files.differences)


def test_a_job_and_a_batch(golden_files: GoldenFiles, kinetic: Kinetic, tmp_path: Path) -> None:
    ran = kinetic(
        "run", f"{FILE}:double", "-a", "x=4", "--detach", "--json", "--accelerator", "cpu"
    )
    job = ran.json["job_id"]
    kinetic("jobs", "result", job, "--timeout", "60")
    golden_files.check(OF_A_JOB, JOB=job)
    inputs = tmp_path / "in.jsonl"
    inputs.write_text('{"x": 1}\n{"x": 13}\n')
    kinetic(
        "run", f"{FILE}:double", "--map", str(inputs), "--name", "sweep", "--accelerator", "cpu"
    )
    (batch,) = kinetic("batches", "list", "--json").json["items"]
    golden_files.check(OF_A_BATCH, BATCH=batch["group_id"])
    assert not golden_files.differences, "\n".join(golden_files.differences)


def test_every_golden_file_is_used() -> None:
    wanted = {f"{name}.txt" for name in {**OF_A_JOB, **OF_A_BATCH, **OF_SETTINGS}}
    wanted |= {name.replace(".txt", ".json.txt") for name in wanted}
    wanted -= {f"{name}.json.txt" for name in WITHOUT_JSON}
    assert {file.name for file in GOLDEN.iterdir()} == wanted
