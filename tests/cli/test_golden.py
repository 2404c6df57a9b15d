"""What commands print, word for word, as people see it and as JSON: ``golden/``.

``KINETIC_GOLDEN=write pytest tests/cli/test_golden.py`` writes the files anew: read the
difference before you keep it. What differs from run to run stands there as a word in capitals.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.cli.changing import CHANGING
from tests.cli.conftest import FILE, Kinetic, Said

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
WITHOUT_JSON = {"jobs-logs", "batches-logs", "help"}


class Book:
    """Compares what is printed with the files, or writes them."""

    def __init__(self, kinetic: Kinetic, home: Path) -> None:
        self._kinetic = kinetic
        self._home = home
        self.wrong: list[str] = []

    def look(self, commands: dict[str, str], **ids: str) -> None:
        for name, words in commands.items():
            order = [ids.get(word, word) for word in words.split()]
            self._compare(f"{name}.txt", words, self._kinetic(*order))
            if name not in WITHOUT_JSON:
                self._compare(
                    f"{name}.json.txt", f"{words} --json", self._kinetic(*order, "--json")
                )

    def _compare(self, name: str, words: str, said: Said) -> None:
        printed = f"$ kinetic {self._plain(words)}{self._plain(said.out)}"
        printed += "".join(f"! {line}\n" for line in self._plain(said.err).splitlines())
        printed += f"= {said.code}\n"
        file = GOLDEN / name
        if WRITES:
            GOLDEN.mkdir(exist_ok=True)
            file.write_text(printed)
        elif not file.exists() or file.read_text() != printed:
            self.wrong.append(f"{name}:\n{printed}")

    def _plain(self, text: str) -> str:
        text = text.replace(str(self._home), "HOME").replace(str(Path(FILE).parent), "FOLDER")
        for pattern, word in CHANGING:
            text = re.sub(pattern, word, text)
        return "\n".join(line.rstrip() for line in text.splitlines()) + "\n" if text else ""


@pytest.fixture
def book(
    kinetic: Kinetic, home: Path, small_project: Path, monkeypatch: pytest.MonkeyPatch
) -> Book:
    monkeypatch.delenv("COLUMNS", raising=False)  # which would cut what is printed
    return Book(kinetic, home)


def test_settings_and_catalogues(
    book: Book, kinetic: Kinetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_BASE_IMAGE_REPO", "r.io/me")
    kinetic("profile", "create", "mine", "--zone", "europe-west4-b")
    book.look(OF_SETTINGS)
    assert not book.wrong, "\n".join(book.wrong)


def test_a_job_and_a_batch(book: Book, kinetic: Kinetic, tmp_path: Path) -> None:
    ran = kinetic(
        "run", f"{FILE}:double", "-a", "x=4", "--detach", "--json", "--accelerator", "cpu"
    )
    job = ran.json["job_id"]
    kinetic("jobs", "result", job, "--timeout", "60")
    book.look(OF_A_JOB, JOB=job)
    inputs = tmp_path / "in.jsonl"
    inputs.write_text('{"x": 1}\n{"x": 13}\n')
    kinetic(
        "run", f"{FILE}:double", "--map", str(inputs), "--name", "sweep", "--accelerator", "cpu"
    )
    (batch,) = kinetic("batches", "list", "--json").json["items"]
    book.look(OF_A_BATCH, BATCH=batch["group_id"])
    assert not book.wrong, "\n".join(book.wrong)


def test_no_file_is_left_over() -> None:
    wanted = {f"{name}.txt" for name in {**OF_A_JOB, **OF_A_BATCH, **OF_SETTINGS}}
    wanted |= {name.replace(".txt", ".json.txt") for name in wanted}
    wanted -= {f"{name}.json.txt" for name in WITHOUT_JSON}
    assert {file.name for file in GOLDEN.iterdir()} == wanted
