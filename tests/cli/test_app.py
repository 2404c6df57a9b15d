"""Behavior that all commands share: exit codes, usage errors, settings, profiles, and help."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kinetic import errors
from kinetic.cli.app import cli, exit_code
from kinetic.cli.client import run_async
from tests import programs
from tests.cli.conftest import Kinetic


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.JobFailed("it failed", job_id="j"), 1),
        (errors.BackendError("no answer"), 1),
        (errors.ConfigurationError("wrong"), 2),
        (errors.ProfileError("wrong"), 2),
        (errors.NotFound("nothing"), 3),
        (errors.NoLog("no log"), 3),
        (errors.AuthError("no"), 4),
        (errors.ResultTimeout("late"), 5),
        (TimeoutError(), 5),
        (OSError("disk"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_each_kind_of_failure_has_an_exit_code(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def test_python_m_kinetic_runs_the_command(kinetic: Kinetic) -> None:
    completed = kinetic("--version")
    assert completed.code == 0
    assert completed.out == programs.python("-m", "kinetic", "--version") != ""


def test_a_closed_pipe_ends_a_command_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "kinetic", "accelerators"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (process.returncode, process.stderr) == (1, "")


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_output_is_no_error(redirection: str) -> None:
    command = f"{sys.executable} -m kinetic config show {redirection}"
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")


def test_ctrl_c_during_the_imports_ends_the_command_quietly() -> None:
    code = """
import sys

class Interrupted:
    def find_spec(self, name, *rest):
        if name == "kinetic.cli.app":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from kinetic.__main__ import main
main()
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (130, "")


def test_ctrl_c_before_the_event_loop_closes_the_coroutine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    async def command() -> None:
        """Never starts."""

    monkeypatch.setattr(asyncio, "run", interrupted)
    coroutine = command()
    with pytest.raises(KeyboardInterrupt):
        run_async(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


@pytest.mark.parametrize(
    ("encoding", "errors", "name", "shown"),
    [
        ("latin-1", "strict", "漢é", "\\u6f22é"),  # LANG=en_US, as on many clusters
        ("latin-1", "strict", "😀", "\\U0001f600"),
        ("utf-8", "surrogateescape", os.fsdecode(b"\xff"), "\\udcff"),  # LANG=C.UTF-8
    ],
)
def test_a_character_that_standard_output_lacks_is_escaped(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    encoding: str,
    errors: str,
    name: str,
    shown: str,
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", f"{encoding}:{errors}")
    command = [sys.executable, "-m", "kinetic", "config", "show", "--cluster", name]
    process = subprocess.run(command, capture_output=True)
    assert (process.returncode, process.stderr) == (0, b"")
    assert shown.encode(encoding) in process.stdout
    process = subprocess.run([*command, "--json"], capture_output=True)
    items = json.loads(process.stdout.decode(encoding))["items"]
    assert name in [item["value"] for item in items]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["jobs", "status"],
        ["jobs", "list", "--wrong"],
        ["run", "x"],
        ["--profile", "x", "profile", "ls"],
        ["build-image", "--print", "--json"],
        ["init", "--kube-context", "kind", "--print", "--json"],
        ["doctor", "--manifest", "--json"],
        ["doctor", "--image", "python:3.12"],
        ["init", "--kube-context", "kind", "--image", "python:3.12"],
        ["init", "--kube-context", "kind", "--zone", "us-central1-a"],
        ["status", "--kube-context", "kind", "--cluster", "lab"],
        ["up", "--project", "acme-1", "--min-nodes", "1"],
        ["up", "--project", "acme-1", "--node-zone", "us-central1-b"],
    ],
)
def test_a_wrong_command_line_is_a_usage_error(kinetic: Kinetic, arguments: list[str]) -> None:
    completed = kinetic(*arguments)
    assert completed.code == 2
    assert "Usage: kinetic" in completed.err and completed.out == ""


def test_an_argument_without_its_option_names_the_option(kinetic: Kinetic) -> None:
    completed = kinetic("run", "x.py:f", "rate=0.1")
    assert completed.code == 2 and "'rate=0.1'" in completed.err and "-a NAME" in completed.err


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        ("logs job-x", ["kinetic jobs logs", "kinetic batches logs"]),
        ("job list", ["kinetic jobs"]),
        ("jobs watch", ["kinetic batches watch"]),
        ("jobs lst", ["kinetic jobs list"]),
        ("statsu", ["kinetic status"]),
        ("ps", ["kinetic jobs list", "kinetic batches list"]),
        ("login", ["kinetic doctor", "kinetic init"]),
        ("qqqq", ["kinetic --help"]),
        ("pool qqqq", ["kinetic pool --help"]),
    ],
)
def test_an_unknown_command_suggests_commands(
    kinetic: Kinetic, words: str, suggested: list[str]
) -> None:
    completed = kinetic(*words.split())
    assert completed.code == 2 and "No such command" in completed.err
    assert all(command in completed.err for command in suggested)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_a_shell_is_printed(kinetic: Kinetic, shell: str) -> None:
    completed = kinetic("completion", shell)
    assert completed.code == 0 and "_KINETIC_COMPLETE" in completed.out


@pytest.mark.parametrize("command", ["run", "image show"])
def test_shells_complete_the_file_of_a_function(
    kinetic: Kinetic, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("_KINETIC_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"kinetic {command} tr")
    monkeypatch.setenv("COMP_CWORD", str(1 + len(command.split())))
    assert kinetic().out == "file,tr\n"


def test_piped_tables_are_not_cut_and_a_zone_without_prices_is_noted(kinetic: Kinetic) -> None:
    completed = kinetic("accelerators", "--zone", "us-centrl1-a")
    assert completed.code == 0 and "us-centrl1-a" in completed.err
    assert "\x1b" not in completed.out and "…" not in completed.out and "gpu-l4" in completed.out


def test_settings_are_shown_with_their_source(
    kinetic: Kinetic, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_ZONE", "europe-west4-a")
    assert kinetic("profile", "create", "work", "--cluster", "mine").code == 0
    shown = kinetic("config", "show", "--json", "--namespace", "team").json
    assert shown["schema"] == "kinetic.config/1"
    found = {item["setting"]: (item["value"], item["source"]) for item in shown["items"]}
    assert found["zone"] == ("europe-west4-a", "KINETIC_ZONE")
    assert found["cluster"] == ("mine", "the profile 'work'")
    assert found["namespace"] == ("team", "the argument namespace")
    assert found["backend"][0] == "local"
    assert found["project"] == (None, "not set")
    assert found["home"] == (str(home), "KINETIC_HOME")


def test_a_context_leaves_the_zone_and_the_cluster_of_gke_unused(kinetic: Kinetic) -> None:
    items = kinetic("config", "show", "--kube-context", "kind-kind", "--json").json["items"]
    shown = {item["setting"]: item for item in items}
    for name in ("zone", "cluster"):
        assert shown[name]["value"] is None and "kube_context" in shown[name]["source"]
    items = kinetic("config", "show", "--project", "p", "--kube-context", "c", "--json").json
    assert {item["setting"]: item["value"] for item in items["items"]}["zone"] == "us-central1-a"


def test_profiles_are_created_shown_used_and_removed(kinetic: Kinetic, home: Path) -> None:
    for name in ("one", "two"):
        assert kinetic("profile", "create", name, "--project", f"p-{name}").code == 0
    existing = kinetic("profile", "create", "one")
    assert existing.code == 2 and "--force replaces it" in existing.err
    wrong = kinetic("profile", "create", "three", "--backend", "moon")
    assert wrong.code == 2 and "gke, pathways, local" in wrong.err
    assert kinetic("profile", "show", "--json").json["name"] == "one"
    assert kinetic("profile", "use", "two").code == 0
    listed = kinetic("profile", "ls", "--json").json["items"]
    assert [(item["name"], item["current"]) for item in listed] == [("one", False), ("two", True)]
    unset = kinetic("profile", "unset", "--json").json
    assert (unset["action"], unset["name"]) == ("unset", None)
    assert kinetic("profile", "show").code == 2
    assert kinetic("profile", "rm", "two", "-y").code == 0
    assert "two" not in (home / "profiles.json").read_text()
    assert kinetic("profile", "rm", "two").code == 2


@pytest.mark.parametrize("command", ["accelerators", "jobs list", "profile create mine", "doctor"])
def test_an_invalid_zone_is_an_error(kinetic: Kinetic, command: str) -> None:
    completed = kinetic(*command.split(), "--zone", "mars")
    assert completed.code != 0 and "'mars'" in completed.err + completed.out


@pytest.mark.parametrize("command", ["accelerators", "jobs list", "profile ls", "gc"])
def test_an_invalid_log_level_is_an_error(
    kinetic: Kinetic, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("KINETIC_LOG_LEVEL", "warnign")
    completed = kinetic(*command.split())
    assert (
        completed.code == 2
        and "KINETIC_LOG_LEVEL" in completed.err
        and "'WARNING'" in completed.err
    )


def test_a_missing_profile_is_an_error_that_names_the_option(kinetic: Kinetic) -> None:
    completed = kinetic("--profile", "nobody", "config", "show")
    assert completed.code == 2 and "--profile: there is no profile 'nobody'" in completed.err


def test_a_home_that_cannot_be_created_is_an_error_that_names_its_setting(
    kinetic: Kinetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv("KINETIC_HOME", str(home))
    completed = kinetic("jobs", "list")
    assert completed.code == 1
    assert f"{home} cannot be made: File exists; set KINETIC_HOME to" in completed.err
    monkeypatch.setenv("KINETIC_HOME", "/sys/kinetic")  # where nobody may make a folder
    completed = kinetic("jobs", "list")
    assert completed.code == 4 and "/sys/kinetic cannot be made: " in completed.err


def test_two_processes_can_change_the_profiles_at_once(home: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom kinetic.profiles import Profile, update\n"
        "for n in range(10):\n"
        "    profile = Profile.checked(sys.argv[2] + str(n), {'zone': 'z'})\n"
        "    update(Path(sys.argv[1]), lambda profiles: profiles.create(profile))\n"
    )
    path = home / "profiles.json"
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in ("a", "b")
    ]
    assert [process.wait() for process in processes] == [0, 0]
    from kinetic import profiles

    assert len(profiles.load(path).profiles) == 20
    assert [file.stat().st_mode & 0o077 for file in home.glob(".profiles*")] == [0]


REFERENCE = (Path(__file__).parents[2] / "docs/cli.md").read_text()


def walk(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for child_name, child in getattr(command, "commands", {}).items():
        yield from walk(child, f"{name} {child_name}")


def test_each_command_has_a_help_that_its_group_lists_in_full(kinetic: Kinetic) -> None:
    for name, command in walk(cli, "kinetic"):
        assert command.help, name
        if hasattr(command, "commands"):
            listed = kinetic(*name.split()[1:], "--help").out.partition("Commands:")[2]
            assert listed and "...\n" not in listed, name


def test_each_option_has_a_help() -> None:
    for name, command in walk(cli, "kinetic"):
        options = [option for option in command.params if isinstance(option, click.Option)]
        for option in options:
            assert option.hidden or option.help, (name, option.name)


def test_every_command_prints_json_on_request() -> None:
    commands = [(name, one) for name, one in walk(cli, "kinetic") if not hasattr(one, "commands")]
    assert len(commands) > 40
    assert [name for name, one in commands if "as_json" not in {p.name for p in one.params}] == []


@pytest.mark.parametrize(
    ("command", "schema"),
    [
        ("explain KN204", "code"),
        ("config show", "config"),
        ("config", "config"),
        ("completion zsh", "completion"),
        ("profile ls", "profile.list"),
    ],
)
def test_the_option_for_json_may_stand_in_front(
    kinetic: Kinetic, command: str, schema: str
) -> None:
    before, after = kinetic("--json", *command.split()), kinetic(*command.split(), "--json")
    assert before.json["schema"] == f"kinetic.{schema}/1"
    assert before == after


def test_the_reference_has_every_command_and_every_json_schema() -> None:
    for name, command in walk(cli, "kinetic"):
        assert hasattr(command, "commands") or f"| `{name}" in REFERENCE, name
    sources = (Path(__file__).parents[2] / "kinetic/cli").glob("*.py")
    call = re.compile(r'(?:table|fields|json_line|done|_print_trial)\(\s*"([\w.]+)"')
    names = {name for path in sources for name in call.findall(path.read_text())}
    assert len(names) > 10
    assert {name for name in names if f"`kinetic.{name}/1`" not in REFERENCE} == {
        *("batches.items", "batches.workers"),  # tables only
    }
