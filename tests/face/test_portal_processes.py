"""Test the portal in separate processes: signals, forks, and the end of the interpreter."""

from __future__ import annotations

import pytest

from tests.scripts import Program

COMMON = """
import asyncio, atexit, os, signal, sys, threading, time
from kinetic._sync.portal import PORTAL, Portal

async def double(number):
    return 2 * number

async def run_forever(cleaned="cleaned"):
    print("running")
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        print(cleaned)

async def start_task(coroutine):
    start_task.task = asyncio.create_task(coroutine)
    await asyncio.sleep(0)
"""
FORKS = "-Wignore::DeprecationWarning"  # Python 3.12 warns about forks with threads


def child(code: str, *options: str) -> Program:
    return Program(*options, "-c", COMMON + code)


# --- Ctrl-C ---


def test_ctrl_c_that_does_not_interrupt_the_wait_still_works() -> None:
    """A signal just before the main thread waits for a lock sets only its flag.

    The test simulates this: `signal.raise_signal` delivers the signal to the thread that calls
    it, so it doesn't interrupt the wait of the main thread.
    """
    code = """
def press():
    sys.stdin.readline()
    signal.raise_signal(signal.SIGINT)

threading.Thread(target=press, daemon=True).start()
try:
    PORTAL.call(run_forever)
except KeyboardInterrupt:
    print("interrupted")
"""
    with child(code) as process:
        process.expect("running")
        process.write_line("now")
        process.expect("cleaned", "interrupted")
        assert process.end() == (0, "", "")


def test_a_second_ctrl_c_ends_the_wait_at_once() -> None:
    """Neither the call nor the end of the interpreter waits for a cleanup that never ends."""
    code = """
async def stubborn():
    print("running")
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaning")
        await asyncio.Event().wait()

try:
    PORTAL.call(stubborn)
except KeyboardInterrupt:
    print("interrupted twice")
"""
    with child(code) as process:
        process.expect("running")
        process.interrupt()
        process.expect("cleaning")
        process.interrupt()
        process.expect("interrupted twice")
        status, out, err = process.end()
        assert (status, out) == (0, "")
        assert "interrupted again" in err and len(err.splitlines()) == 1


def test_a_cleanup_longer_than_the_grace_period_is_abandoned() -> None:
    code = """
async def stubborn():
    print("running")
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.Event().wait()

portal = Portal(grace=1.5)
try:
    portal.call(stubborn)
except KeyboardInterrupt:
    print("interrupted")
"""
    with child(code) as process:
        process.expect("running")
        process.interrupt()
        process.expect("interrupted")
        status, _, err = process.end()
        assert status == 0
        assert "did not clean up within 1.5 s" in err and len(err.splitlines()) == 1


def test_ctrl_c_during_an_iteration_leaves_a_loop_that_works() -> None:
    code = """
async def numbers():
    try:
        yield 1
        print("waiting")
        await asyncio.Event().wait()
    finally:
        print("closed")

items = PORTAL.iterate(numbers, int)
try:
    for item in items:
        print(item)
except KeyboardInterrupt:
    print("interrupted")
print(PORTAL.call(double, 1), list(items))
"""
    with child(code) as process:
        process.expect("1", "waiting")
        process.interrupt()
        process.expect("closed", "interrupted", "2 []")
        assert process.end() == (0, "", "")


def test_ctrl_c_at_any_moment_of_starting_leaves_a_portal_that_works() -> None:
    """An alarm raises at 400 moments, from before the first step to after the call.

    If the alarm raises in a callback of a weak reference, the interpreter drops the exception
    and calls `sys.unraisablehook`.
    """
    code = """
class Alarm(BaseException):
    pass

def ring(*_):
    raise Alarm

def count_dropped(unraisable):
    global rung
    if unraisable.exc_type is Alarm:
        rung += 1
    else:
        sys.__unraisablehook__(unraisable)

signal.signal(signal.SIGALRM, ring)
sys.unraisablehook = count_dropped
rung = 0
for moment in range(1, 401):
    portal = Portal(grace=60)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, moment * 2e-6)
            portal.call(double, 1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [])  # runs the handler of a pending signal
    except Alarm:
        rung += 1
    assert portal.call(double, 2) == 4
    portal.close()
print("rung" if rung > 20 else f"only {rung}")
deadline = time.monotonic() + 60
while threading.active_count() > 1 and time.monotonic() < deadline:
    time.sleep(0.01)
print(threading.active_count())
"""
    child(code).prints("rung", "1")


def test_ctrl_c_while_closing_at_exit_ends_the_wait() -> None:
    code = """
async def hook():
    print("finishing")
    await asyncio.Event().wait()

PORTAL.on_close(hook, patient=True)
PORTAL.call(double, 1)
"""
    with child(code) as process:
        process.expect("finishing")
        process.interrupt()
        status, out, err = process.end()
        assert (status, out) == (0, "")
        assert "did not finish closing" in err and "Traceback" not in err


# --- forks ---


def test_a_forked_child_gets_a_new_loop_and_the_parent_keeps_its_loop() -> None:
    """The fork happens with a pending task, a call of another thread, and the lock held."""
    code = """
async def pending():
    start_task.released = asyncio.Event()
    try:
        await start_task.released.wait()
        print("the parent's task continues")
    finally:
        print(f"cleaned in the {'parent' if os.getpid() == parent else 'child'}")

async def release():
    start_task.released.set()
    await start_task.task

parent = os.getpid()
def wait():
    try:
        PORTAL.call(run_forever)
    except RuntimeError:
        print("the other thread got an error")

PORTAL.call(start_task, pending())
waiting = threading.Thread(target=wait, daemon=True)
waiting.start()
sys.stdin.readline()
held, forked = threading.Event(), threading.Event()

def hold():
    with PORTAL._lock:
        held.set()
        forked.wait()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
pid = os.fork()
forked.set()
if pid == 0:
    print("child", PORTAL.call(double, 3))
    sys.exit(7)
holder.join()
print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print("parent", PORTAL.call(double, 4))
PORTAL.call(release)
PORTAL.close()
waiting.join()
"""
    with child(code, FORKS) as process:
        process.expect("running")
        process.write_line("go on")
        process.expect(
            "child 6",
            "status 7",
            "parent 8",
            "the parent's task continues",
            "cleaned in the parent",
            "cleaned",
            "the other thread got an error",
        )
        assert process.end() == (0, "", "")


def test_an_iteration_started_before_a_fork_is_an_error_in_the_child() -> None:
    code = """
async def numbers():
    yield 1
    yield 2

items = PORTAL.iterate(numbers, int)
print(next(items))
pid = os.fork()
if pid == 0:
    try:
        next(items)
    except RuntimeError as error:
        print(type(error).__name__, "start a new one" in str(error))
    del items
    sys.exit()
print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(next(items))
"""
    child(code, FORKS).prints("1", "PortalError True", "status 0", "2")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_multiprocessing_call_and_close_their_loop(method: str) -> None:
    code = f"""
import multiprocessing
from tests.face import children

if __name__ == "__main__":
    print("parent", PORTAL.call(double, 1))
    process = multiprocessing.get_context({method!r}).Process(target=children.work)
    process.start()
    process.join()
    print("status", process.exitcode)
"""
    child(code, FORKS).prints(
        "parent 2", "child 6", "hook in the child", "cleaned in the child", "status 0"
    )


# --- the end of the interpreter ---


def test_at_exit_hooks_run_and_tasks_and_iterations_clean_up() -> None:
    code = """
async def hook():
    await asyncio.sleep(0)
    print("hook")

async def numbers():
    try:
        yield 1
        yield 2
    finally:
        await asyncio.sleep(0)
        print("closed")

atexit.register(print, "registered before: runs after")
PORTAL.on_close(hook)
items = PORTAL.iterate(numbers, int)
print(next(items))
PORTAL.call(start_task, run_forever())
"""
    with child(code) as process:
        process.expect("1", "running", "hook")
        assert {process.line(), process.line()} == {"cleaned", "closed"}
        process.expect("registered before: runs after")
        assert process.end() == (0, "", "")


def test_other_exit_handlers_may_still_call() -> None:
    """A handler registered before the loop's first start runs after the loop is closed."""
    code = """
def late():
    try:
        print("late", PORTAL.call(double, 2))
    except RuntimeError as error:
        print("late", "can't" in str(error) and 4)

atexit.register(late)
PORTAL.call(double, 1)
atexit.register(lambda: print("early", PORTAL.call(double, 1)))
"""
    child(code).prints("early 2", "late 4")


def test_a_worker_thread_that_never_ends_does_not_delay_the_exit() -> None:
    code = """
import anyio.to_thread

async def stuck():
    await anyio.to_thread.run_sync(threading.Event().wait)

PORTAL.call(start_task, stuck())
PORTAL.call(asyncio.sleep, 0)
sys.exit(3)
"""
    with child(code) as process:
        assert process.end() == (3, "", "")


def test_an_idle_worker_thread_does_not_delay_the_exit() -> None:
    code = """
import anyio.to_thread
print(PORTAL.call(anyio.to_thread.run_sync, lambda: "from a worker"))

async def hook():
    print(await anyio.to_thread.run_sync(lambda: "at exit, too"))

PORTAL.on_close(hook)
"""
    child(code).prints("from a worker", "at exit, too")


def test_threads_that_outlive_the_main_thread_may_still_call() -> None:
    code = """
def work():
    threading.main_thread().join()
    for number in range(3):
        print(PORTAL.call(double, number))

PORTAL.call(double, 1)
threading.Thread(target=work).start()
"""
    child(code).prints("0", "2", "4")


def test_a_daemon_thread_in_a_call_does_not_delay_the_exit() -> None:
    code = """
def wait():
    try:
        PORTAL.call(run_forever)
    except RuntimeError:
        pass

threading.Thread(target=wait, daemon=True).start()
sys.stdin.readline()
"""
    with child(code) as process:
        process.expect("running")
        process.write_line("go on")
        process.expect("cleaned")
        assert process.end() == (0, "", "")


# --- notebooks ---


def test_calls_and_ctrl_c_work_in_a_notebook_cell() -> None:
    """Like Jupyter, a coroutine in the main thread's loop executes plain code."""
    code = """
import warnings
warnings.simplefilter("default")
cell = '''
try:
    PORTAL.call(run_forever)
except KeyboardInterrupt:
    print("interrupted")
print(PORTAL.call(double, 4))
'''

async def kernel():
    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # like a kernel before each cell
    exec(compile(cell, "<cell>", "exec"), globals())
    print(await PORTAL.acall(double, 5))

asyncio.run(kernel())
"""
    with child(code) as process:
        process.expect("running")
        process.interrupt()
        process.expect("cleaned", "interrupted", "8", "10")
        status, _, err = process.end()
        assert status == 0
        assert err.count("blocks the event loop") == 2 and err.count("<cell>") == 2
