"""Run, inspect, and remove jobs and batches on this machine from the command line."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import kinetic as api
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic.aio import Client
from kinetic.cli.batches import batch_row, count_statuses, status_of
from kinetic.errors import JobError
from kinetic.jobs import load_result
from kinetic.testing import memory_platform
from kinetic.worker import Worker
from tests import programs
from tests.cli.conftest import FILE, Kinetic, submitted
from tests.scripts import Program, until
from tests.terminals import Terminal

pytestmark = pytest.mark.usefixtures("small_project")


def test_a_job_from_its_start_to_its_removal(kinetic: Kinetic, tmp_path: Path) -> None:
    started = kinetic("run", f"{FILE}:double", "-a", "x=4", "-a", "name=4x", "--detach", "--json")
    job = started.json["job_id"]
    result = kinetic("jobs", "result", job, "--timeout", "60", "--json")
    assert result.json["status"] == "SUCCEEDED"
    assert result.json["noted"] == {"twice": 8, "name": "4x"} and "value" not in result.json
    assert kinetic("jobs", "result", job, "--unpickle").out.endswith("{'twice': 8, 'name': '4x'}\n")
    assert kinetic("jobs", "logs", job).out == "doubling 4\n"
    assert kinetic("jobs", "logs", job, "-n", "1").out == "doubling 4\n"
    assert kinetic("jobs", "logs", job, "-f", "-n", "1").code == 2
    (row,) = kinetic("jobs", "list", "--json").json["items"]
    assert (row["job_id"], row["status"], row["reason"]) == (job, "SUCCEEDED", "")
    assert kinetic("jobs", "status", job[:-3], "--json").json["job_id"] == job
    assert kinetic("jobs", "status", "job-local-nothing").code == 3
    assert f"{job} had ended before: SUCCEEDED" in kinetic("jobs", "cancel", job).err
    assert kinetic("jobs", "status", job, "--json").json["status"] == "SUCCEEDED"
    assert "wrote no files" in kinetic("outputs", "get", job, str(tmp_path)).err
    assert kinetic("batches", "cleanup", job).code == 2
    assert kinetic("jobs", "cleanup", job).code == 0
    assert kinetic("jobs", "result", job).code == 3
    completed = kinetic("jobs", "list")
    assert (completed.code, completed.out) == (0, "") and "no single jobs found" in completed.err


def test_a_value_is_unpickled_only_on_request(kinetic: Kinetic, tmp_path: Path) -> None:
    mark, file = tmp_path / "mark", tmp_path / "value.pkl"
    started = kinetic("run", f"{FILE}:marked", "-a", f"path={mark}", "--detach", "--json")
    job = started.json["job_id"]
    completed = kinetic("jobs", "result", job, "-o", str(tmp_path / "nowhere" / "value.pkl"))
    assert completed.code == 2 and f"there is no folder {tmp_path / 'nowhere'}" in completed.err
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused = kinetic("jobs", "result", job, "-o", str(pipe))
    assert refused.code == 1 and "isn't a regular file" in refused.err and pipe.is_fifo()
    assert kinetic("jobs", "result", job, "-o", str(file)).code == 0
    assert kinetic("jobs", "result", job, "--cleanup").code == 2
    for command in (["jobs", "list"], ["jobs", "status", job], ["jobs", "result", job]):
        assert kinetic(*command).code == 0
    assert file.stat().st_size > 0 and not mark.exists()
    assert load_result(file) == str(mark) and mark.exists()
    mark.unlink()
    file.unlink()
    both = ("--unpickle", "-o", str(file), "--cleanup")
    assert kinetic("jobs", "result", job, *both).code == 0
    assert mark.exists() and file.exists()
    assert kinetic("jobs", "status", job).code == 3


def test_each_cause_of_a_missing_value_has_its_own_explanation(
    kinetic: Kinetic, tmp_path: Path
) -> None:
    calls = {
        "KN301": ["raises", "-a", "name=ValueError"],
        "KN303": ["dies", "-a", "x=1"],
        "KN312": ["raises", "-a", "name=MemoryError"],
        "KN313": ["overruns"],
    }
    for code, (name, *arguments) in calls.items():
        started = kinetic("run", f"{FILE}:{name}", *arguments, "--detach", "--json")
        job = started.json["job_id"]
        failed = kinetic("jobs", "result", job)
        assert failed.code == 1
        assert f"{code}: `kinetic explain {code}` shows the cause and the fix" in failed.err
        with pytest.raises(JobError) as caught:
            api.attach(job).save_result(tmp_path / "value.pkl")
        assert caught.value.code == code


def test_outputs_are_listed_and_fetched(kinetic: Kinetic, tmp_path: Path) -> None:
    started = kinetic("run", f"{FILE}:writes", "-a", "text=kept", "--detach", "--json")
    job = started.json["job_id"]
    assert kinetic("jobs", "result", job).code == 0
    assert kinetic("outputs", "ls", job, "--json").json["items"] == [{"file": "deep/file.txt"}]
    for _ in range(2):  # the second download replaces the files of the first
        assert kinetic("outputs", "get", job, str(tmp_path / "outputs")).code == 0
    assert (tmp_path / "outputs/deep/file.txt").read_text() == "kept"


@pytest.mark.full
def test_a_batch_from_its_start_to_its_removal(kinetic: Kinetic, tmp_path: Path) -> None:
    inputs = tmp_path / "in.jsonl"
    inputs.write_text('{"x": 1}\n\n{"x": 13}\n{"x": 3}\n')
    ran = kinetic("run", f"{FILE}:double", "--map", str(inputs), "--json", "--name", "sweep")
    assert ran.code == 1
    assert {line["index"]: line["ok"] for line in ran.lines} == {0: True, 1: False, 2: True}
    (row,) = kinetic("batches", "list", "--json").json["items"]
    assert (row["name"], row["status"], row["total"]) == ("sweep", "FAILED", 3)
    assert row["counts"] == {"SUCCEEDED": 2, "FAILED": 1}
    group = row["group_id"]
    shown = kinetic("batches", "status", group[:-2], "--items").out
    assert "[red]13[/red] brings bad luck" in shown
    assert "\x1b" not in shown and "\x07" not in shown
    assert kinetic("jobs", "status", f"{group}-1", "--json").json["status"] == "FAILED"
    ended = kinetic("batches", "results", group, "--json")
    assert ended.code == 1
    assert [line["status"] for line in ended.lines] == ["SUCCEEDED", "FAILED", "SUCCEEDED"]
    assert [line["noted"].get("twice") for line in ended.lines] == [2, None, 6]
    failed = kinetic("batches", "results", group, "--unpickle", "--failed")
    assert failed.out.startswith("1\tFAILED\tuser error: ValueError")
    page = kinetic("batches", "report", group, "-o", str(tmp_path / "page.html")).out.strip()
    assert Path(page).read_text().startswith("<!doctype html>")
    assert kinetic("batches", "report", group, "-o", "/nowhere/page.html").code == 2
    logs = kinetic("batches", "logs", group).out.splitlines()
    assert "[0] doubling 1" in logs and "[2] doubling 3" in logs
    absent = kinetic("batches", "logs", group, "--item", "3")
    assert absent.code == 3 and "has no item 3" in absent.err
    retried = kinetic("batches", "retry", group, "--timeout", "60")
    assert retried.code == 1
    assert "retried 1 item; now 1 failed, 2 succeeded" in retried.err
    resumed = kinetic("batches", "resume", group[:-2], "--seal")
    assert resumed.code == 1 and f"{group} has ended: 1 failed, 2 succeeded" in resumed.err
    assert f"kinetic batches retry {group}" in resumed.err
    assert kinetic("batches", "list", "--name", "other", "--json").json["items"] == []
    assert kinetic("batches", "list", "--tag", "oops").code == 2
    cancelled = kinetic("batches", "cancel", group, "-y")
    assert cancelled.code == 0 and "had ended before: 1 failed, 2 succeeded" in cancelled.err
    failure = kinetic("jobs", "result", f"{group}-1")
    assert failure.code == 1
    assert f"{group}-1 has no value: user error: ValueError: [red]13" in failure.err
    collect = f"import kinetic; kinetic.attach_batch({group!r}).results(return_exceptions=True)"
    programs.python("-c", collect)
    assert "[1] doubling 13" in kinetic("batches", "logs", group).out, "an item has failed"
    assert kinetic("batches", "cleanup", group, "-y").code == 0
    for command in ("status", "cleanup", "cancel"):
        assert kinetic("batches", command, group).code == 3


def test_a_batch_without_failures_has_no_logs_once_it_is_collected(
    kinetic: Kinetic, tmp_path: Path
) -> None:
    inputs = tmp_path / "in.jsonl"
    inputs.write_text('{"x": 1}\n')
    assert kinetic("run", f"{FILE}:double", "--map", str(inputs)).code == 0
    (row,) = kinetic("batches", "list", "--json").json["items"]
    group = row["group_id"]
    assert kinetic("batches", "logs", group).out == "[0] doubling 1\n"
    assert kinetic("batches", "watch", group).out == "1 of 1 ended: 1 succeeded\n"
    assert kinetic("batches", "cancel", group).code == 0
    (row,) = kinetic("batches", "list", "--json").json["items"]
    assert (row["status"], row["reason"]) == ("SUCCEEDED", "")
    programs.python("-c", f"import kinetic; kinetic.attach_batch({group!r}).results()")
    gone = kinetic("batches", "logs", group)
    assert (gone.code, gone.out) == (3, "")
    assert f"{group}-0 no longer has a log: results() or result() removed it" in gone.err


@pytest.mark.full
def test_commands_that_change_something_say_what_in_json(kinetic: Kinetic, tmp_path: Path) -> None:
    job = kinetic("run", f"{FILE}:double", "-a", "x=4", "--detach", "--json").json["job_id"]
    (line,) = kinetic("jobs", "logs", job, "-f", "--json").lines
    expected = {"schema": "kinetic.log/1", "job_id": job, "index": None, "line": "doubling 4"}
    assert line == expected
    assert kinetic("jobs", "logs", job, "-n", "1", "--json").lines == [expected]
    copied = kinetic("outputs", "get", job, str(tmp_path), "--json").json
    assert (copied["files"], copied["folder"]) == (0, str(tmp_path))
    assert kinetic("jobs", "cancel", job, "--json").json["status"] == "SUCCEEDED"
    assert kinetic("jobs", "cleanup", job, "--json").json["job_id"] == job
    inputs = tmp_path / "in.jsonl"
    inputs.write_text('{"x": 1}\n{"x": 13}\n')
    ran = kinetic("run", f"{FILE}:double", "--map", str(inputs), "--json").lines
    (group,) = {item["group_id"] for item in ran}
    assert {(item["index"], item["ok"]) for item in ran} == {(0, True), (1, False)}
    lines = kinetic("batches", "logs", group, "--json").lines
    assert [(line["index"], line["line"]) for line in lines if line["line"].startswith("dou")] == [
        (0, "doubling 1"),
        (1, "doubling 13"),
    ]
    (line,) = kinetic("batches", "logs", group, "--item", "0", "--json").lines
    assert (line["job_id"], line["index"]) == (f"{group}-0", 0)
    page = kinetic("batches", "report", group, "-o", str(tmp_path / "page.html"), "--json").json
    assert page["file"] == str(tmp_path / "page.html")
    counts = {"SUCCEEDED": 1, "FAILED": 1}
    retried = kinetic("batches", "retry", group, "--json")
    assert (retried.code, retried.json["retried"], retried.json["counts"]) == (1, 1, counts)
    assert kinetic("batches", "resume", group, "--json").json["counts"] == counts
    assert kinetic("batches", "cancel", group, "-y", "--json").json["counts"] == counts
    assert kinetic("batches", "cleanup", group, "-y", "--json").json["group_id"] == group
    stopped = kinetic("local", "stop", "-y", "--json").json
    assert (stopped["was_running"], stopped["jobs"]) == (True, 0)
    assert kinetic("local", "stop", "--json").json["was_running"] is False


@pytest.mark.full
def test_items_are_listed_by_number_after_newer_jobs(kinetic: Kinetic, tmp_path: Path) -> None:
    inputs = tmp_path / "in.jsonl"
    inputs.write_text("".join(f'{{"x": {number}}}\n' for number in range(12)))
    kinetic("run", f"{FILE}:double", "--map", str(inputs))
    (batch,) = kinetic("batches", "list", "--json").json["items"]
    alone = kinetic("run", f"{FILE}:double", "-a", "x=1", "--detach", "--json").json["job_id"]
    assert [row["job_id"] for row in kinetic("jobs", "list", "--json").json["items"]] == [alone]
    listed = [row["job_id"] for row in kinetic("jobs", "list", "--items", "--json").json["items"]]
    assert sorted(listed[:-12] or listed[12:]) == [alone]
    items = [job_id for job_id in listed if job_id != alone]
    assert items == [f"{batch['group_id']}-{number}" for number in range(12)]


def test_a_cancelled_item_is_called_cancelled(kinetic: Kinetic, tmp_path: Path) -> None:
    def listed() -> Any:
        (row,) = kinetic("batches", "list", "--json").json["items"]
        return row

    with submitted(tmp_path, "--max-concurrent", "1") as (group, _):
        until(lambda: listed()["status"] == "RUNNING")
        assert listed()["items"] == "1 pending, 1 running" and listed()["workers"]
        assert kinetic("batches", "cancel", group, "-y").code == 0
    status = kinetic("batches", "status", group, "--items", "--json").json
    assert (status["status"], status["counts"]) == ("CANCELLED", {"CANCELLED": 2})
    assert [item["status"] for item in status["each"]] == ["CANCELLED"] * 2
    assert (listed()["status"], listed()["items"]) == ("CANCELLED", "2 cancelled")
    assert kinetic("jobs", "status", f"{group}-1", "--json").json["status"] == "CANCELLED"
    assert kinetic("batches", "results", group).out.count("CANCELLED") == 2
    watched = kinetic("batches", "watch", group, "--json")
    assert watched.json["progress"]["cancelled"] == 2
    for command in ("status", "list", "results", "watch"):
        target = [] if command == "list" else [group]
        assert "NOT_FOUND" not in kinetic("batches", command, *target, "--json").out
    for words in (["jobs", "cleanup"], ["jobs", "result", "--cleanup"], ["batches", "cleanup"]):
        refused = kinetic(*words, f"{group}-1")
        assert refused.code == 2 and "one job of a batch" in refused.err
    log = kinetic("jobs", "logs", f"{group}-1")
    assert log.code == 3 and f"{group}-1 has no log: it was cancelled before it began" in log.err


def test_a_list_has_the_reason_of_a_lost_job_without_its_log(kinetic: Kinetic) -> None:
    job = kinetic("run", f"{FILE}:dies", "-a", "x=1", "--detach", "--json").json["job_id"]
    assert kinetic("jobs", "result", job, "--timeout", "60").code == 1
    (row,) = kinetic("jobs", "list", "--json").json["items"]
    assert row["reason"].startswith("lost: ") and job not in row["reason"]
    assert "last words" in row["reason"]
    table = kinetic("jobs", "list").out
    assert "lost: " in table and "last words" not in table


def test_a_local_job_without_an_accelerator_is_listed_without_one(kinetic: Kinetic) -> None:
    job = kinetic("run", f"{FILE}:plain", "-a", "x=1", "--detach", "--json").json["job_id"]
    assert kinetic("jobs", "status", job, "--json").json["accelerator"] is None
    assert "tpu" not in kinetic("jobs", "list").out
    assert "accelerator" not in kinetic("jobs", "status", job).out


def test_the_target_on_the_command_line_wins_over_the_decorator(kinetic: Kinetic) -> None:
    """Without a project, the backend gke fails before it sends anything."""
    completed = kinetic("run", f"{FILE}:plain", "-a", "x=1", "--backend", "gke")
    assert completed.code == 2 and "gke" in completed.err


@pytest.mark.parametrize(
    ("counts", "status"),
    [
        ({"PENDING": 3}, "PENDING"),
        ({"PENDING": 2, "RUNNING": 1}, "RUNNING"),
        ({"PENDING": 2, "SUCCEEDED": 1}, "RUNNING"),
        ({"PENDING": 2, "FAILED": 1}, "RUNNING"),
    ],
)
def test_a_batch_is_running_once_an_item_has_started(counts: dict[str, int], status: str) -> None:
    assert status_of(counts, finished=False) == status


async def fail_when_there_is(path: str) -> None:
    while not os.path.exists(path):
        await asyncio.sleep(0.01)
    raise ValueError(path)


async def test_the_status_of_a_batch_is_that_of_its_counts(tmp_path: Path) -> None:
    """The only item fails after kinetic has counted it: its batch hasn't succeeded."""
    mark = tmp_path / "mark"
    async with Client(platform=memory_platform()) as client:
        batch = await client.run_async_map(fail_when_there_is, [str(mark)])

        class Failing:
            def __getattr__(self, name: str) -> Any:
                return getattr(batch, name)

            async def workers(self) -> list[Worker]:
                mark.touch()
                await batch.wait()
                return []

        row = await batch_row(cast("Any", Failing()))
        assert row["status"] in row["counts"] and batch.finished
        assert (await batch_row(batch))["status"] == "FAILED"


def test_an_item_that_a_worker_runs_does_not_count_as_pending() -> None:
    statuses = [(0, "SUCCEEDED"), (1, "PENDING"), (2, "PENDING")]
    counts = count_statuses(statuses, {0, 1, None})
    assert counts == {"SUCCEEDED": 1, "RUNNING": 1, "PENDING": 1}


@pytest.mark.full
def test_the_items_of_a_collected_batch_keep_their_status(kinetic: Kinetic) -> None:
    batch = api.run("cpu")(abs).run_async_map([-1, -2], progress=False)
    assert batch.results() == [1, 2]
    status = kinetic("batches", "status", batch.group_id, "--items", "--json").json
    assert [(it["status"], it["reason"]) for it in status["each"]] == [("SUCCEEDED", "")] * 2
    scaled = kinetic("batches", "scale", batch.group_id, "3")
    assert "has 3 workers when items run again, as it has ended" in scaled.err


@pytest.mark.full
def test_a_cancelled_batch_without_its_program_is_not_to_be_resumed(kinetic: Kinetic) -> None:
    code = """
import itertools, os, signal, time, kinetic
inputs = map(lambda n: n if n < 3 else time.sleep(1000), itertools.count())
batch = kinetic.run("cpu")(abs).run_async_map(inputs, progress=False)
outcomes = batch.outcomes()
_ = [next(outcomes) for _ in range(3)]
print(batch.group_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with Program("-c", code) as killed:
        group = killed.line()
        killed.end()
    cancelled = kinetic("batches", "cancel", group, "-y")
    assert f"{group} is cancelled: 3 succeeded" in cancelled.err
    shown = kinetic("batches", "status", group, "--json").json
    assert (shown["status"], shown["reason"][:19]) == ("CANCELLED", "3 inputs were taken")
    assert "resume" not in shown["reason"]


def test_the_cells_of_a_table_are_converted_to_the_types_of_the_parameters(
    kinetic: Kinetic, tmp_path: Path
) -> None:
    inputs = tmp_path / "in.csv"
    inputs.write_text("x ,name\n1,007\n2, true\n")
    ran = kinetic("run", f"{FILE}:double", "--map", str(inputs), "--json")
    values = {line["index"]: line["value"] for line in ran.lines}
    assert values == {0: "{'twice': 2, 'name': '007'}", 1: "{'twice': 4, 'name': ' true'}"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "in.csv",
            b"x,name\n1\n",
            "in.csv must have one cell for each column of the header: x, name",
        ),
        ("in.csv", b"x\n1,2\n", "in.csv must have one cell for each column of the header: x"),
        ("in.csv", b'x\n"1\n', "can't be read as .csv"),
        ("in.csv", b"x\n1\nmany\n", "in.csv, column 'x' must be int, not 'many'"),
        ("in.csv", b"x,x\n1,2\n", "in.csv has the column 'x' more than once"),
        ("in.csv", b"x;name\n1;n\n", "takes no argument 'x;name'"),
        ("in.csv", b"x\n\xff\n", "can't be read as .csv"),
        ("in.jsonl", b'{"x": 1}\n{"x" 2}\n', "isn't JSON (column 6): Expecting ':' delimiter"),
        ("in.jsonl", b"[1]\n", "must be an object"),
        ("in.jsonl", b'{"x": 1}\n\n{"name": ""}\n', "in.jsonl: double("),
        ("in.jsonl", b'{"name": "y"}\n', "missing a required argument: 'x'"),
        ("in.jsonl", b'{"y": 1}\n', "takes no argument 'y'"),
    ],
)
def test_a_wrong_file_of_inputs_is_refused_before_any_submission(
    kinetic: Kinetic, home: Path, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    completed = kinetic("run", f"{FILE}:double", "--map", str(tmp_path / name))
    assert completed.code == 2 and message in completed.err
    assert not (home / "store").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [("in.csv", 'x,name\n1,"two\nlines"\nno,\n'), ("in.jsonl", '{"x": 1}\n\n\n{"y": 1}\n')],
)
def test_a_wrong_input_is_found_by_its_line(
    kinetic: Kinetic, tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    completed = kinetic("run", f"{FILE}:double", "--map", str(tmp_path / name))
    assert completed.code == 2 and "Error: line 4 of " in completed.err


@pytest.mark.parametrize(
    ("command", "submission", "message"),
    [
        ("jobs", "grp-local-000000000000", "or `kinetic batches`"),
        ("batches", "job-local-000000000000", "`kinetic jobs` take it"),
        ("batches", "grp-local-000000000000-3", "`kinetic jobs` take it"),
    ],
)
def test_an_id_of_another_kind_is_an_error_that_names_its_command(
    kinetic: Kinetic, command: str, submission: str, message: str
) -> None:
    completed = kinetic(command, "status", submission)
    assert completed.code == 2 and message in completed.err


def test_an_ambiguous_prefix_of_an_id_is_refused(kinetic: Kinetic) -> None:
    for _ in range(2):
        kinetic("run", f"{FILE}:double", "-a", "x=1", "--detach")
    completed = kinetic("jobs", "status", "job-local-")
    assert completed.code == 2 and "2 IDs begin with 'job-local-'" in completed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([f"{FILE}:nothing"], "there is no function 'nothing'"),
        ([f"{FILE}:not_a_function"], "there is no function 'not_a_function'"),
        (["nowhere.py:double"], "there is no file"),
        ([FILE], "names no function"),
        ([f"{FILE}:double", "-a", "x"], "isn't NAME=VALUE"),
        ([f"{FILE}:double", "--name", "n"], "require --map"),
        ([f"{FILE}:double", "-a", "x=1", "--budget", "1"], "require --map"),
        ([f"{FILE}:double", "-a", "y=1"], "takes no argument 'y'"),
        ([f"{FILE}:double", "-a", "name=y"], "missing a required argument: 'x'"),
        ([f"{FILE}:double", "-a", "x=1", "-a", "x=2"], "'x' is given more than once"),
        ([f"{FILE}:double", "--map", FILE], "takes a .jsonl or a .csv"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_call_is_refused_before_any_submission(
    kinetic: Kinetic, home: Path, arguments: list[str], message: str
) -> None:
    completed = kinetic("run", *arguments)
    assert completed.code == 2 and message in completed.err
    assert not (home / "store").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("import there_is_no_such_package\n", "line 1, in <module>"),
        ("import there_is_no_such_package\n", f"runs in {sys.executable}, which has no module"),
        ("def f():\n    1 / 0\nf()\n", "line 2, in f"),
        ("raise SystemExit(7)\n", "SystemExit: 7"),
    ],
)
def test_the_error_of_a_file_has_no_frames_of_kinetic(
    kinetic: Kinetic, home: Path, tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "mine_that_fails.py"
    file.write_text(content)
    completed = kinetic("run", f"{file}:f")
    assert completed.code == 1 and completed.err.startswith(
        "kinetic: mine_that_fails.py can't be imported:\n"
    )
    assert message in completed.err and "kinetic/cli" not in completed.err
    assert not (home / "store").exists()


def test_a_file_named_as_a_module_in_use_is_refused(kinetic: Kinetic, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def f(): pass\n")
    completed = kinetic("run", f"{tmp_path / 'json.py'}:f")
    assert completed.code == 2 and "json.py has the name of a module in use" in completed.err


def test_the_error_of_a_job_is_not_an_error_of_the_command(kinetic: Kinetic) -> None:
    for name in ("EOFError", "TimeoutError", "BrokenPipeError", "StopIteration", "SystemExit"):
        completed = kinetic("run", f"{FILE}:raises", "-a", f"name={name}")
        assert completed.code == 1
        assert f"{name}: by the job" in completed.err and "Traceback" not in completed.err
    completed = kinetic("run", f"{FILE}:uses_click")
    assert completed.code == 1
    assert "UsageError: by the job" in completed.err and "Usage:" not in completed.err
    completed = kinetic("run", f"{FILE}:double", "-a", "x=13")
    assert completed.code == 1
    assert "brings bad luck" in completed.err and "\x07" not in completed.err


@pytest.mark.full
def test_the_supervisor_is_shown_and_stopped(kinetic: Kinetic) -> None:
    assert kinetic("local", "status", "--json").json["running"] is False
    assert kinetic("local", "stop").code == 0
    assert kinetic("run", f"{FILE}:double", "-a", "x=1").code == 0
    status = kinetic("local", "status", "--json").json
    assert status["running"] is True and status["pid"] > 0
    assert kinetic("local", "stop", "-y").code == 0
    assert kinetic("local", "status", "--json").json["running"] is False
    assert kinetic("gc", "--json").code == 0


@pytest.mark.full
def test_ctrl_c_cancels_the_job_of_a_run(kinetic: Kinetic) -> None:
    with Program("-m", "kinetic", "run", f"{FILE}:waits", "-a", "x=1") as running:
        running.expect("waiting 1")
        running.interrupt()
        code, _, err = running.end()
    assert code == 130 and "interrupted" in err and "Traceback" not in err
    assert "was cancelled and removed" in err
    assert kinetic("jobs", "list", "--json").json["items"] == []


@pytest.mark.full
def test_a_debugged_job_prints_the_command_to_attach(tmp_path: Path) -> None:
    with Program("-m", "kinetic", "run", f"{FILE}:debugged", cwd=tmp_path) as running:
        job = until(lambda: re.search(r"kinetic jobs debug (job-local-\S+)\n", running.errors))[1]
        command = ("jobs", "debug", job, "--port", "0", "--json", "--vscode")
        with Program("-m", "kinetic", *command, cwd=tmp_path) as debugging:
            answer = json.loads(debugging.line())
            launch = answer["launch"]
            assert launch["request"] == "attach" and launch["connect"]["port"] > 0
            assert answer["file"] == str(tmp_path / ".vscode" / "launch.json")
            saved = json.loads(Path(answer["file"]).read_text())
            assert saved["configurations"] == [{**launch, "name": "Attach to a kinetic job"}]
            debugging.interrupt()
            debugging.end()
        running.interrupt()
        assert running.end()[0] == 130


@pytest.mark.full
def test_a_removal_asks_for_confirmation_with_the_full_id(
    kinetic: Kinetic, tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    inputs = tmp_path / "in.jsonl"
    inputs.write_text('{"x": 1}\n')
    kinetic("run", f"{FILE}:double", "--map", str(inputs))
    (batch,) = kinetic("batches", "list", "--json").json["items"]
    group = batch["group_id"]
    for answer, code in ((b"n\n", 1), (b"y\n", 0)):
        screen = terminal(columns=200)
        asking = screen.start("-m", "kinetic", "batches", "cleanup", group[:-2])
        screen.shows(b"[y/N]")
        assert f"Remove {group} with all its results?".encode() in screen.raw
        screen.type(answer)
        screen.rest()
        assert asking.wait(60) == code
        assert (b"nothing was done" in screen.raw) is (code == 1)
        assert kinetic("batches", "status", group).code == (0 if code else 3)


def test_the_beginning_of_an_id_may_look_like_the_id_of_an_item(
    kinetic: Kinetic, tmp_path: Path
) -> None:
    objects = DirectoryObjects(str(tmp_path / "store"))
    objects.create("groups/grp-local-123456789012", b"{}")
    store = ("--store", str(tmp_path / "store"))
    item = kinetic("batches", "cleanup", "grp-local-123456789012-0", "-y", *store)
    assert item.code == 2 and "is the ID of one job of a batch" in item.err
    cleaned = kinetic("batches", "cleanup", "grp-local-1234", "-y", *store)
    assert (cleaned.code, objects.list("groups/")) == (0, []), cleaned.err


@pytest.mark.full
def test_ctrl_c_while_following_a_log_leaves_the_job_running(kinetic: Kinetic) -> None:
    job = kinetic("run", f"{FILE}:waits", "-a", "x=1", "--detach", "--json").json["job_id"]
    with Program("-m", "kinetic", "jobs", "logs", job, "-f") as following:
        following.expect("waiting 1")
        following.interrupt()
        assert following.end()[0] == 130
    assert kinetic("jobs", "status", job, "--json").json["status"] == "RUNNING"
    assert kinetic("jobs", "result", job, "--timeout", "0.1").code == 5
    assert f"{job} is cancelled" in kinetic("jobs", "cancel", job).err
    ended = kinetic("jobs", "result", job, "--json")
    assert ended.code == 1 and "cancelled" in ended.err and "KN304" in ended.err
    assert ended.json["status"] == "CANCELLED" and "cancelled" in ended.json["reason"]


def test_a_failed_trial_has_its_error_in_json(kinetic: Kinetic) -> None:
    space = ("-s", "x=13,1", "--grid", "--metric", "twice")
    *trials, best = kinetic("sweep", f"{FILE}:double", *space, "--json").lines
    errors = {trial["params"]["x"]: trial["error"] for trial in trials}
    assert errors[13].startswith("ValueError: ") and errors[1] is best["error"] is None


def test_reading_does_not_create_a_missing_store(kinetic: Kinetic, home: Path) -> None:
    absent = home / "mistyped"
    completed = kinetic("jobs", "list", "--store", str(absent))
    assert completed.code == 2 and f"there is no store at {absent}" in completed.err
    assert not absent.exists()


def test_what_ships_is_listed(
    kinetic: Kinetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("pyproject.toml", 0), ("big.bin", 3000), ("m.py", 10), (".env", 1)):
        (tmp_path / name).write_bytes(b"x" * size)
    monkeypatch.delenv("KINETIC_PACKAGE_ROOT", raising=False)
    completed = kinetic("package", str(tmp_path / "m.py"))
    assert completed.code == 0, completed.err
    lines = [line.split(maxsplit=1) for line in completed.out.splitlines() if line]
    assert lines == [
        ["FILE", "SIZE"],
        ["big.bin", "3.0 kB"],
        ["m.py", "10 bytes"],
        ["pyproject.toml", "0 bytes"],
        ["NOT", "SHIPPED  WHY"],
        [".env", "is a credential"],
    ]
    assert "3 files ship, 3.0 kB (ship=all, the default)" in completed.err
    listed = json.loads(kinetic("package", str(tmp_path), "--json").out)
    assert listed["root"] == str(tmp_path) and listed["bytes"] == 3010
    assert listed["files"][0] == {"file": "big.bin", "bytes": 3000}
    assert listed["left_out"] == [{"file": ".env", "reason": "is a credential"}]
    wrong = kinetic("package", "/")
    assert wrong.code == 2 and "can't be a project" in wrong.err
