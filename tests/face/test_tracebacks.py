"""Test the traceback of a script that ends by an exception: the user's lines, each once."""

from __future__ import annotations

import queue
import textwrap
from pathlib import Path
from typing import Any

import pytest

from kinetic import errors
from kinetic._tracebacks import own_frames_left_out
from tests.scripts import ROOT, Program, until

KINETIC_FRAME = f'File "{ROOT}/kinetic'


def tracebacks_of(script, *calls: str) -> list[str]:
    """Return what each of *calls* shows; all run in one script."""
    shows = "\nexcept Exception:\n    traceback.print_exc()\n    sys.stderr.write('END')\n"
    with script("import traceback\n" + "".join(f"try:\n    {call}{shows}" for call in calls)) as it:
        status, _, err = it.end()
    *shown, rest = err.split("END")
    assert status == 0 and len(shown) == len(calls) and "Traceback" not in rest, err
    return shown


DEFINITIONS = """
def rebuild():
    raise ValueError("only on the caller's machine")

class Local:
    def __reduce__(self):
        return rebuild, ()

class Unpicklable:
    def __reduce__(self):
        raise ValueError("no copy of this")

@remote
def fails():
    import late
    late.fail()

"""


def test_an_error_shows_the_frames_of_the_script_and_its_modules(script, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("def fail():\n    raise ValueError('late')\n")
    rebuilt, refused, imported, batch = tracebacks_of(
        lambda code: script(DEFINITIONS + code),
        "inverse(Local())",
        "inverse(Unpicklable())",
        "fails.run_async().result()",
        "inverse.run_async_map([1, 0, 0]).results()",
    )
    assert "in rebuild\n" in rebuilt and f'File "{ROOT}/runner' not in rebuilt, rebuilt
    assert "kinetic.errors.PackError" in refused, refused
    assert 'in __reduce__\n    raise ValueError("no copy of this")' in refused, refused
    assert f'File "{tmp_path}/late.py", line 2, in fail\n    raise ValueError' in imported, imported
    assert "BatchError: " in batch and batch.count("Remote traceback of grp-") == 1, batch
    assert "in inverse\n    return 1 / value\n" in batch, batch


def test_an_error_of_kinetic_shows_only_the_line_of_the_script(script) -> None:
    lines = {
        "inverse(sys.stdin)": "PackError: argument 'value'",
        "inverse.run_async_map([0]).results()": "BatchError: ",
        "next(iter(waits_for.run_async_map(['never']).outcomes(timeout=0.1)))": "ResultTimeout: ",
        "kinetic.attach('job-none')": "NotFound: ",
    }
    for (call, line), err in zip(lines.items(), tracebacks_of(script, *lines), strict=True):
        assert KINETIC_FRAME not in err and call in err, err
        assert [row for row in err.splitlines() if row.startswith(f"kinetic.errors.{line}")], err
        remote = err.count("Remote traceback")
        assert err.count("Traceback (most recent call last)") - remote == 1, err


def test_a_mistake_of_the_script_shows_no_frames_of_kinetic(script) -> None:
    lines = {
        "inverse(1, z=3)": "TypeError: ",
        "inverse.run_async_map([1], max_concurency=3)": "TypeError: ",
        "inverse.options(tmeout=3)": "TypeError: ",
        "kinetic.run(acelerator='cpu')": "TypeError: ",
        "remote(type('Model', (), {}))": "TypeError: ",
        "inverse.run_async_map(one / 0 for one in [1]).results()": "ZeroDivisionError: ",
        "Failed(kinetic.errors.KineticError('x')).unwrap()": "kinetic.errors.KineticError: x",
        "inverse.options(accelerator='tpu-v99')": "kinetic.errors.ConfigurationError: ",
        "kinetic.sweeps.Float(1, 0)": "kinetic.errors.ConfigurationError: ",
        "kinetic.sweeps.RandomSearch({})": "kinetic.errors.ConfigurationError: ",
        "kinetic.Data('nowhere')": "FileNotFoundError: ",
        "kinetic.jobs.load_result('nowhere')": "FileNotFoundError: ",
        "kinetic.collections.map(inverse, 1)": "kinetic.errors.ConfigurationError: ",
    }
    for (call, line), err in zip(lines.items(), tracebacks_of(script, *lines), strict=True):
        assert KINETIC_FRAME not in err and "anyio" not in err and call in err, err
        assert [row for row in err.splitlines() if row.startswith(line)], err


def test_an_error_of_kinetic_hides_the_exception_of_a_library_that_caused_it(
    script, tmp_path: Path
) -> None:
    key = tmp_path / "key.json"
    key.write_text('{"type": "service_account"}')  # the library raises KeyError('client_email')
    code = f"""
os.environ["GOOGLE_APPLICATION_CREDENTIALS"] = {str(key)!r}
try:
    kinetic.run(backend="gke", project="some-project")(abs)(1)
except kinetic.errors.AuthError as error:
    assert isinstance(error.__context__, KeyError), error.__context__
    raise
"""
    with script(code) as process:
        _, _, err = process.end()
    assert "\nkinetic.errors.AuthError: " in err and "client_email" in err, err
    assert err.count("Traceback (most recent call last)") == 1, err


@pytest.mark.parametrize(
    ("wait", "line", "consequence"),
    [
        ("waits(here)", "waits(here)", "was cancelled and removed"),
        ("waits(Interrupts())", "waits(Interrupts())", "was cancelled and removed"),
        ("start().results()", "start().results()", "continues"),
        ("for item in start().outcomes(): pass", "for item in start()", "continues"),
        ("batch = start(); until(lambda: False)", "until(lambda: False)", "continues"),
    ],
    ids=["call", "submission", "results", "outcomes", "elsewhere"],
)
def test_ctrl_c_shows_the_line_of_the_script_and_what_happens_to_its_jobs(
    script, tmp_path: Path, wait: str, line: str, consequence: str
) -> None:
    code = f"""
@remote
def waits(folder):
    pathlib.Path(folder, "started").touch()
    until(lambda: False)

class Interrupts:  # interrupts the call while it pickles its arguments
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGINT)
        return str, (here,)

def start():
    batch = waits_for.run_async_map(["never"])
    pathlib.Path("started").touch()  # Ctrl-C no longer cancels the batch
    return batch

{wait}
"""
    with script(code) as process:
        if "Interrupts" not in wait:
            until((tmp_path / "started").exists)
            process.interrupt()
        _, _, err = process.end()
    assert KINETIC_FRAME not in err, err
    assert line in err and "\nKeyboardInterrupt\n" in err, err
    assert err.count(consequence) == 1, err


@pytest.mark.parametrize(
    ("start", "wait"),
    [
        ("run(waits)", "pass"),
        ("submit(waits)", "await work.result()"),
        ("submit(waits)", "async for line in work.logs(follow=True): pass"),
        ("run_async_map(waits, [here])", "await work.results()"),
        ("run_async_map(waits, [here])", "async for item in work.outcomes(): pass"),
    ],
    ids=["run", "result", "logs", "results", "outcomes"],
)
def test_ctrl_c_of_an_asyncio_program_shows_the_line_of_the_script(
    script, tmp_path: Path, start: str, wait: str
) -> None:
    code = f"""
import asyncio
import kinetic.aio

def waits(folder=here):
    pathlib.Path(folder, "started").touch()
    until(lambda: False)

async def main():
    work = await kinetic.aio.{start}
    {wait}

asyncio.run(main())
"""
    with script(code) as process:
        until((tmp_path / "started").exists)
        process.interrupt()
        _, _, err = process.end()
    assert "in main\n" in err and "\nKeyboardInterrupt\n" in err, err
    assert KINETIC_FRAME not in err, err


def test_ctrl_c_during_imports_of_a_call_shows_the_line_of_the_script(script) -> None:
    code = """
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "kinetic.jobs":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
inverse.run_async(1)
"""
    with script(code) as process:
        _, _, err = process.end()
    assert "inverse.run_async(1)" in err and KINETIC_FRAME not in err, err


def test_ctrl_c_shows_no_exception_that_kinetic_was_handling() -> None:
    module: dict[str, Any] = {"__name__": "kinetic.waiting", "queue": queue}
    exec(
        "def wait(mail):\n"
        "    try:\n"
        "        mail.get(timeout=0)\n"
        "    except queue.Empty:\n"
        "        raise KeyboardInterrupt",
        module,
    )
    with pytest.raises(KeyboardInterrupt) as caught:
        try:
            raise ValueError("the user's")
        except ValueError:
            own_frames_left_out(module["wait"])(queue.SimpleQueue())
    assert isinstance(caught.value.__context__, ValueError)


def test_ctrl_c_during_the_imports_of_the_first_call_is_a_keyboard_interrupt() -> None:
    code = """
    import sys
    import kinetic

    class Interrupt:
        def find_spec(self, name, path=None, target=None):
            if name == "asyncio.tasks":
                sys.meta_path.remove(self)
                raise KeyboardInterrupt

    assert "asyncio" not in sys.modules
    sys.meta_path.insert(0, Interrupt())
    try:
        kinetic.run(backend="local", accelerator="cpu")(len)("abc")
    except KeyboardInterrupt:
        print("interrupted")
    """
    with Program("-c", textwrap.dedent(code)) as process:
        assert process.end() == (0, "interrupted\n", "")


def test_a_circle_of_causes_ends() -> None:
    """Code that sets contexts, as `contextlib` does, can make an exception its own cause."""
    cause, context = OSError("not there"), ValueError("closed")
    cause.__context__, context.__context__ = context, cause
    with pytest.raises(errors.NotFound, match="no such job"), own_frames_left_out:
        raise errors.NotFound("no such job") from cause
