"""Jobs on this machine: their environment, limits, logs and deletion."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

from kinetic._supervisor.protocol import SupervisorPaths
from kinetic.accelerators import parse
from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.local.supervisor import connect
from kinetic.aio.ports import Image, Phase, Resources
from kinetic.errors import LaunchError
from kinetic.job_status import Reason
from tests.jobs import DEADLINE_S, eventually, gone, lines, until

from .conftest import end_supervisor, marked, run_job, spec

SLEEP = "import time; print('up', flush=True); time.sleep(60)"


async def test_the_job_gets_its_order_and_exactly_its_environment(
    cluster: LocalCluster, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_CLIENT", "not for the job")
    source = (
        "import json, os, sys\n"
        "print(json.dumps([dict(os.environ), os.getcwd(), key.hex(), executor, sys.argv,"
        " str(place.work), str(place.cache), order['more'], os.getsid(0) == os.getpid(),"
        " open('/dev/stdin').read(), gc()]))"
    )
    job = spec(
        "env",
        "gc = __import__('gc').isenabled\n" + source,
        facts={"more": [1, "ü"]},
        environment={"ÜBER": "grün\n", "TZ": "Asia/Tokyo", "HOME": "/nowhere"},
    )
    seen = await run_job(cluster, job)
    assert seen.exit_code == 0, await lines(cluster, "env")
    printed = json.loads((await lines(cluster, "env"))[0])
    mark = printed[0].pop("KINETIC_LOCAL_PROCESS")
    assert mark == f"{SupervisorPaths(home).state}:{seen.executor}"
    assert printed[0].pop("TMPDIR") == f"/tmp/kinetic-{seen.executor[:8]}"
    assert printed[0].pop("KINETIC_TMPDIR") == "/tmp"
    work = str(SupervisorPaths(home).work / "env")
    assert printed == [
        {**job.environment, **job.order.variables()}, work, "6b" * 32, seen.executor, [""],
        work, str(home / "cache"), [1, "ü"], True, "", True,
    ]  # fmt: skip
    assert not Path(work).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="links the socket in the temporary folder")
def test_the_paths_of_kinetic_and_of_temporary_files_may_be_long(
    home: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    connect(folder, environ).close()


async def test_gpus_are_handed_out(home: Path, environ: dict[str, str], runner: Path) -> None:
    environ |= {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,-1,GPU-c", "KINETIC_LOCAL_SLOTS": "4"}
    cluster = LocalCluster(home, environ, runner=runner)
    print_gpus = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES')); "
    gpu = Resources(accelerator=parse("gpu-l4"))
    await cluster.launch(spec("g1", print_gpus + SLEEP, resources=gpu))
    await cluster.launch(spec("g2", print_gpus + SLEEP, resources=gpu))
    await cluster.launch(spec("g3", print_gpus, resources=gpu))
    await run_job(cluster, spec("cpu", print_gpus))
    await until(cluster, "g2", Phase.RUNNING)
    assert (await cluster.find(names=["g3"]))[0].phase is Phase.PENDING
    assert await lines(cluster, "cpu") == [""]
    await cluster.delete(names=["g2"])
    await until(cluster, "g3")
    assert await lines(cluster, "g3") == ["GPU-b"]
    await cluster.delete(names=["g1"])
    await run_job(
        cluster, spec("tpu", print_gpus, resources=Resources(accelerator=parse("tpu-v5e-8")))
    )
    assert (await lines(cluster, "tpu"))[0] in ("GPU-a", "GPU-b")
    await cluster.aclose()


async def test_memory_is_limited_for_the_job_alone(cluster: LocalCluster) -> None:
    source = (
        "try:\n    bytearray(1 << 30)\n"
        "except MemoryError:\n    print('refused')\n"
        "bytearray(1 << 24)"
    )
    small = spec("small", source, resources=Resources(memory_bytes=256 << 20))
    assert (await run_job(cluster, small)).exit_code == 0
    assert await lines(cluster, "small") == ["refused"]
    source = "import resource; print(resource.getrlimit(resource.RLIMIT_DATA)[0])"
    await run_job(cluster, spec("free", source))
    assert await lines(cluster, "free") == ["-1"]


async def test_a_deadline_asks_first_and_then_kills(cluster: LocalCluster) -> None:
    handle = (
        "import signal, sys\nsignal.signal(signal.SIGXCPU, {})\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGXCPU])\n"
    )
    polite = handle.format("lambda *a: sys.exit(3)")
    stubborn = handle.format("signal.SIG_IGN")
    await cluster.launch(spec("polite", polite + SLEEP, timeout=0.3, grace=DEADLINE_S))
    await cluster.launch(spec("stubborn", stubborn + SLEEP, timeout=0.3))
    seen = await until(cluster, "polite")
    assert (seen.reason, seen.exit_code) == (Reason.DEADLINE, 70)
    assert seen.message == "ran longer than its timeout of 0.3 s"
    seen = await until(cluster, "stubborn")
    assert (seen.reason, seen.exit_code) == (Reason.DEADLINE, -9)


async def test_a_killed_job_reports_its_signal(cluster: LocalCluster) -> None:
    await cluster.launch(spec("k9", "import os; os.kill(os.getpid(), 9)"))
    await cluster.launch(spec("segv", "import os; os.kill(os.getpid(), 11)"))
    seen = await until(cluster, "k9")
    assert (seen.exit_code, seen.reason) == (-9, Reason.LOST)
    assert seen.message.startswith("its process was killed by SIGKILL (by the kernel")
    seen = await until(cluster, "segv")
    assert (seen.exit_code, seen.message) == (-11, "its process was killed by SIGSEGV")
    assert "Fatal Python error: Segmentation fault" in await lines(cluster, "segv")


SEND_A_SIGNAL = """
import subprocess
program = subprocess.Popen(["sleep", "60"])
program.send_signal({})
print(program.wait())
"""
CALL_AT_THE_END = """
import atexit, os
atexit.register(lambda: print(os.path.basename(os.getcwd())))
"""
THREAD_AND_FORK = """
import os, threading
assert threading.main_thread().native_id == threading.get_native_id() == os.getpid()
left = threading.Event()
threading.Thread(target=left.wait, daemon=True).start()
pid = os.fork()
if not pid:
    assert threading.enumerate() == [threading.main_thread()]
    os._exit(7)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
left.set()
"""
KEEP_FOR_THE_LOG = """
import atexit, logging, logging.handlers
keeps = logging.handlers.MemoryHandler(1000, target=logging.StreamHandler())
logging.getLogger().addHandler(keeps)
logging.warning("kept")
atexit.register(logging.warning, "said by a library at the end")
"""
ONE_JOB: dict[str, tuple[str, int, list[str]]] = {
    "interrupts-a-program": (SEND_A_SIGNAL.format(int(signal.SIGINT)), 0, ["-2"]),
    "hangs-up-on-a-program": (SEND_A_SIGNAL.format(int(signal.SIGHUP)), 0, ["-1"]),
    "calls-in-its-work-folder": (CALL_AT_THE_END, 0, ["calls-in-its-work-folder"]),
    "knows-itself": (THREAD_AND_FORK, 7, []),
    "writes-its-log-at-its-end": (KEEP_FOR_THE_LOG, 0, ["kept", "said by a library at the end"]),
}


async def test_what_jobs_print_and_how_they_end(cluster: LocalCluster) -> None:
    for name, (source, _, _) in ONE_JOB.items():
        await cluster.launch(spec(name, source))
    await cluster.launch(spec("fails-before-its-attempt", "raise KeyError('here')"))
    for name in ("r1", "r2"):
        await cluster.launch(spec(name, "import random; print(random.random())"))
    for name, (_, code, printed) in ONE_JOB.items():
        seen = await until(cluster, name)
        assert (seen.exit_code, await lines(cluster, name)) == (code, printed), name
    assert (await until(cluster, "fails-before-its-attempt")).exit_code == 70
    assert (await lines(cluster, "fails-before-its-attempt"))[-1] == "KeyError: 'here'"
    for name in ("r1", "r2"):
        await until(cluster, name)
    assert await lines(cluster, "r1") != await lines(cluster, "r2"), "random numbers differ"


async def test_work_folders_are_private_and_large_ones_go_too(
    cluster: LocalCluster, home: Path
) -> None:
    paths = SupervisorPaths(home)
    source = (
        "import os, stat\nprint(oct(stat.S_IMODE(os.stat('.').st_mode)), os.listdir())\n"
        "for i in range(260):\n    os.mkdir(f'd{i}')\n"
        "open('d0/f', 'w').close(); os.chmod('d0', 0)"
    )
    await run_job(cluster, spec("many", source))
    assert await lines(cluster, "many") == ["0o700 ['tmp']"]  # a link
    assert not (paths.work / "many").exists()
    await eventually(lambda: not [*paths.trash.iterdir()])
    for path in (paths.state, paths.logs, paths.work):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in (paths.log("many"), paths.socket, paths.own_log):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_what_a_helper_left_in_the_trash_goes_with_the_supervisor(
    cluster: LocalCluster, home: Path
) -> None:
    await run_job(cluster, spec("first"))
    trash = SupervisorPaths(home).trash
    (trash / "left").mkdir()
    await cluster.aclose()
    end_supervisor(home)
    await eventually(lambda: not [*trash.iterdir()])


@pytest.mark.parametrize(
    ("change", "environ_change"),
    [({"environment": {"PYTHONHASHSEED": "0", "PATH": os.environ["PATH"]}}, {}),
     ({}, {"KINETIC_LOCAL_FRESH": "1"})],
)  # fmt: skip
async def test_a_fresh_interpreter_when_it_must_be_one(
    home: Path,
    environ: dict[str, str],
    runner: Path,
    change: dict[str, object],
    environ_change: dict[str, str],
) -> None:
    cluster = LocalCluster(home, {**environ, **environ_change}, runner=runner)
    source = (
        "import os, sys\n"
        "print(sys.flags.hash_randomization, key.hex()[:4], 'KINETIC_ORDER_FD' in os.environ)\n"
        "print(open('/proc/self/cmdline').read().split(chr(0)))\n"
        "print('6b6b' in open('/proc/self/environ').read())\n"
        "print(os.getsid(0) == os.getpid(), os.path.basename(os.getcwd()))\n"
        "print(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[:3])\n"
        "code = 5"
    )
    seen = await run_job(cluster, spec("fresh", source, **change))
    printed = await lines(cluster, "fresh")
    assert seen.exit_code == 5, printed
    randomized = "0" if change else "1"
    assert printed[0] == f"{randomized} 6b6b False"
    assert printed[1] == str([sys.executable, "-u", str(runner / "remote_runner.py"), ""])
    assert printed[2:] == ["False", "True fresh", "[0, 1, 2]"]
    await run_job(cluster, spec("stuck", SLEEP, **change), Phase.RUNNING)
    await cluster.delete(names=["stuck"])
    await gone(cluster, "stuck")
    await eventually(lambda: len(marked(home)) == 1)  # the parent
    await cluster.aclose()


async def test_an_interpreter_that_does_not_work_says_so(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    image = Image(uri="", command=("/no/such/python",))
    seen = await run_job(cluster, spec("missing", image=image))
    assert (seen.reason, seen.executor != "") == (Reason.SETUP, True)
    assert "/no/such/python" in seen.message
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no module named cloudpickle' >&2; exit 1\n")
    broken.chmod(0o700)
    seen = await run_job(cluster, spec("broken", image=Image(uri="", command=(str(broken),))))
    assert seen.reason is Reason.SETUP
    assert "no module named cloudpickle" in seen.message


async def test_an_interpreter_that_hangs_can_be_given_up(
    cluster: LocalCluster, home: Path, tmp_path: Path
) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o700)
    image = Image(uri="", command=(str(hanging),))
    await run_job(cluster, spec("unwanted", image=image, timeout=0.1, grace=0.1), Phase.RUNNING)
    await cluster.delete(names=["unwanted"])
    await gone(cluster, "unwanted")
    await eventually(lambda: not marked(home))


async def test_unneeded_parents_exit(cluster: LocalCluster, home: Path) -> None:
    for i in range(6):
        image = Image(uri="", command=(sys.executable, "-X", f"number={i}"))
        await run_job(cluster, spec(f"p{i}", image=image))
    await eventually(lambda: len(marked(home)) <= 5)


async def test_a_bad_order_is_refused(cluster: LocalCluster) -> None:
    for name in ("../escape", ".hidden", "a/b", "", "x" * 300):
        with pytest.raises(LaunchError, match="name"):
            await cluster.launch(spec(name))
    with pytest.raises(LaunchError, match="timeout"):
        await cluster.launch(spec("t", timeout=-1.0))
    assert await cluster.find() == []


async def test_each_job_has_the_environment_and_key_of_its_batch(cluster: LocalCluster) -> None:
    """Many batches share one warm parent."""
    source = (
        "import os, time\nprint(order['batch'], order['item'], os.environ['BATCH'], key[0],"
        " *[name for name in os.environ if name.startswith('ONLY_')], -time.timezone // 3600)"
    )
    for item in range(2):
        for number in range(20):
            zone = {"TZ": f"ZON-{number}"} if number % 2 else {}
            job = spec(
                f"job-{number}-{item}",
                source,
                facts={"batch": number, "item": item},
                environment={"BATCH": f"of {number}", f"ONLY_{number}": "", **zone},
                labels={"batch": str(number), "test": "yes", "item": str(item)},
                key=bytes([number]) * 32,
            )
            await cluster.launch(job)
    zones = defaultdict[int, set[int]](set)
    for number in range(20):
        for item in range(2):
            seen = await until(cluster, f"job-{number}-{item}", labels={"batch": str(number)})
            assert seen.labels == {"batch": str(number), "test": "yes", "item": str(item)}
            [line] = await lines(cluster, seen.name)
            printed, _, zone = line.rpartition(" ")
            assert printed == f"{number} {item} of {number} {number} ONLY_{number}"
            zones[number % 2 * number].add(int(zone))
    assert [zones.pop(number) for number in range(1, 20, 2)] == [
        {number} for number in range(1, 20, 2)
    ]
    assert len(zones[0]) == 1, "a batch without a time zone gets the machine's"
