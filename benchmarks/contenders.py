"""The contenders that run many calls: kinetic and other tools, each warm, with some slots."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import cloudpickle
import psutil

from benchmarks import setting

HERE = Path(__file__).parent
IN_FLIGHT = 64
"""How many calls a contender gets ahead of their results: kinetic's own default."""


@dataclass(frozen=True, slots=True)
class Session:
    """An open contender: ``run`` squares numbers; ``processes`` are its helpers, by role.

    ``settle`` waits until the processes of the jobs have ended, so that their use counts.
    """

    run: Callable[[Sequence[int]], list[int]]
    processes: dict[str, psutil.Process] = field(default_factory=dict)
    settle: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One tool; a slow tool runs a ``share`` of the jobs; ``needs`` is the module it requires."""

    name: str
    isolated: str
    durable: str
    open: Callable[[int, Path], AbstractContextManager[Session]]
    share: float = 1.0
    rounds: int = 100
    needs: str = "sys"

    @property
    def installed(self) -> bool:
        """Whether the tool is installed."""
        return find_spec(self.needs) is not None


@contextlib.contextmanager
def kinetic(
    slots: int, scratch: Path, isolation: Literal["process", "worker"] = "process"
) -> Iterator[Session]:
    """Run batches of kinetic on the local platform; all other options are the defaults."""
    import work

    import kinetic
    from kinetic import aio

    square = kinetic.run("cpu", backend="local", isolation=isolation)(work.square)

    async def batch(numbers: Sequence[int]) -> list[int]:
        handle = await client.run_async_map(square, numbers)
        return await handle.results()

    def settle() -> None:
        deadline = time.monotonic() + 5.0
        while parent.children() and time.monotonic() < deadline:
            time.sleep(0.01)

    with setting.home(scratch, slots) as home, asyncio.Runner() as loop:
        client = aio.Client(backend="local")
        loop.run(batch(range(10)))
        supervisor = setting.supervisor(home)
        parents = supervisor.children()
        parent = next(it for it in parents if "remote_runner.py" in " ".join(it.cmdline()))
        processes = {"supervisor": supervisor, "parent": parent}
        yield Session(lambda numbers: loop.run(batch(numbers)), processes, settle)
        loop.run(client.aclose())


class _Calls:
    """Writes calls to files, and reads results from files, for `one_job`."""

    def __init__(self, folder: Path) -> None:
        import work

        folder.mkdir()
        self._folder = os.fspath(folder)
        self._numbers = itertools.count()
        cloudpickle.register_pickle_by_value(work)
        self._function = cloudpickle.dumps(work.square)
        cloudpickle.unregister_pickle_by_value(work)

    def write(self, number: int) -> tuple[str, str]:
        """Write a new call; return the paths of its file and of its result's."""
        path = f"{self._folder}/{next(self._numbers)}"
        with open(path + ".call", "wb") as file:
            pickle.dump((self._function, (number,)), file)
        return path + ".call", path + ".result"

    @staticmethod
    def read(path: str) -> int:
        """Read a result."""
        with open(path, "rb") as file:
            value: int = pickle.load(file)
        return value


@contextlib.contextmanager
def fork_server(slots: int, scratch: Path) -> Iterator[Session]:
    """Run fork_server.py, which forks a process per job and does little else."""
    calls = _Calls(scratch / "calls")
    with subprocess.Popen(
        [sys.executable, HERE / "fork_server.py", str(slots)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        ask, answers = server.stdin, server.stdout

        def run(numbers: Sequence[int]) -> list[int]:
            remaining, paths = iter(numbers), list[str]()

            def send(count: int) -> None:
                lines = [calls.write(number) for number in itertools.islice(remaining, count)]
                paths.extend(result for _, result in lines)
                ask.write("".join(f"{call}\t{result}\n" for call, result in lines).encode())
                ask.flush()

            values: dict[str, int] = {}
            send(IN_FLIGHT)
            while len(values) < len(paths):
                result = answers.readline().decode().rstrip("\n").split("\t")[1]
                values[result] = calls.read(result)
                send(1)
            return [values[path] for path in paths]

        run(range(10))
        yield Session(run, {"server": psutil.Process(server.pid)})


@contextlib.contextmanager
def fresh_interpreter(slots: int, scratch: Path) -> Iterator[Session]:
    """Run one_job.py in a new interpreter per job, one job per slot at once."""
    calls = _Calls(scratch / "calls")

    def run_one(number: int) -> int:
        call, result = calls.write(number)
        command = [sys.executable, os.fspath(HERE / "one_job.py"), call, result]
        subprocess.run(command, check=True, start_new_session=True)
        return calls.read(result)

    with ThreadPoolExecutor(slots) as threads:
        list(threads.map(run_one, range(slots)))
        yield Session(lambda numbers: list(threads.map(run_one, numbers)))


def _warm(slots: int, run: Callable[[Sequence[int]], list[int]]) -> Session:
    """Return the session that calls *run*, after a call that occupies all workers."""
    run(range(20 * slots))
    return Session(run)


@contextlib.contextmanager
def process_pool(slots: int, scratch: Path) -> Iterator[Session]:
    """Run calls in the standard library's pool, whose workers live long."""
    import work

    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(slots, mp_context=spawn) as pool:

        def run(numbers: Sequence[int]) -> list[int]:
            futures = [pool.submit(work.square, number) for number in numbers]
            return [future.result() for future in futures]

        yield _warm(slots, run)


@contextlib.contextmanager
def submitit(slots: int, scratch: Path) -> Iterator[Session]:
    """Run calls in submitit's local executor, which starts two processes per job."""
    import submitit
    import work

    executor = submitit.LocalExecutor(folder=scratch / "submitit")

    def run_one(number: int) -> int:
        value: int = executor.submit(work.square, number).result()
        return value

    with ThreadPoolExecutor(slots) as threads:
        yield Session(lambda numbers: list(threads.map(run_one, numbers)))


@contextlib.contextmanager
def dask(slots: int, scratch: Path) -> Iterator[Session]:
    """Run calls in Dask's cluster of worker processes on this machine."""
    import work
    from distributed import Client, LocalCluster

    logging.disable(logging.WARNING)  # Dask logs each of its processes
    with (
        LocalCluster(
            n_workers=slots,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            local_directory=scratch / "dask",
            silence_logs=50,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield _warm(
            slots,
            lambda numbers: list(client.gather(client.map(work.square, numbers, pure=False))),
        )
    logging.disable(logging.NOTSET)


@contextlib.contextmanager
def ray(slots: int, scratch: Path) -> Iterator[Session]:
    """Run calls in a Ray cluster of this machine."""
    import ray
    import work

    ray.init(
        num_cpus=slots,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=os.fspath(scratch / "ray"),
    )
    try:
        square = ray.remote(work.square)
        yield _warm(
            slots, lambda numbers: list(ray.get([square.remote(number) for number in numbers]))
        )
    finally:
        ray.shutdown()


@contextlib.contextmanager
def parsl(slots: int, scratch: Path) -> Iterator[Session]:
    """Run calls in Parsl's executor for many short tasks, with workers on this machine."""
    # Parsl looks for its own scripts on PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    import parsl
    import work
    from parsl.providers import LocalProvider

    executor = parsl.HighThroughputExecutor(
        address="127.0.0.1",
        max_workers_per_node=slots,
        provider=LocalProvider(init_blocks=1, min_blocks=1, max_blocks=1),
    )
    config = parsl.Config(
        executors=[executor], run_dir=os.fspath(scratch / "parsl"), initialize_logging=False
    )
    with parsl.load(config) as kernel:
        square = parsl.python_app(work.square, data_flow_kernel=kernel)

        def run(numbers: Sequence[int]) -> list[int]:
            return [future.result() for future in [square(number) for number in numbers]]

        yield _warm(slots, run)
    parsl.clear()


@functools.cache
def _lithops_folder() -> str:
    """Return the folder of Lithops' files; Lithops reads ``TMPDIR`` only once per process."""
    exit_stack = contextlib.ExitStack()
    atexit.register(exit_stack.close)
    return os.fspath(exit_stack.enter_context(setting.scratch()))


@contextlib.contextmanager
def lithops(slots: int, scratch: Path) -> Iterator[Session]:
    """Run calls in Lithops' localhost backend, with its storage in files."""
    os.environ["TMPDIR"] = _lithops_folder()
    tempfile.tempdir = None
    import lithops
    import work

    config = {
        "lithops": {"backend": "localhost", "storage": "localhost", "data_cleaner": False},
        "localhost": {"runtime": sys.executable, "max_workers": 1, "worker_processes": slots},
    }
    try:
        with lithops.FunctionExecutor(config=config, log_level="ERROR") as executor:

            def run(numbers: Sequence[int]) -> list[int]:
                executor.map(work.square, [(number,) for number in numbers])
                return list(executor.get_result(show_progressbar=False))

            run(range(slots))
            yield Session(run)
    finally:
        del os.environ["TMPDIR"]
        tempfile.tempdir = None


KINETIC, BARE, FRESH = "kinetic", "bare fork server", "fresh interpreter"

CONTENDERS = (
    Contender(name=BARE, isolated="process", durable="yes", open=fork_server),
    Contender(name=KINETIC, isolated="process+", durable="yes", open=kinetic),
    Contender(name=FRESH, isolated="process", durable="yes", open=fresh_interpreter, share=0.1),
    Contender(name="ProcessPoolExecutor", isolated="no", durable="no", open=process_pool),
    Contender(
        name="Dask LocalCluster", isolated="no", durable="no", open=dask, needs="distributed"
    ),
    Contender(
        name="submitit LocalExecutor",
        isolated="process",
        durable="yes",
        open=submitit,
        share=0.01,
        rounds=2,
        needs="submitit",
    ),
    Contender(name="Ray", isolated="no", durable="no", open=ray, needs="ray"),
    Contender(name="Parsl HTEX", isolated="no", durable="no", open=parsl, needs="parsl"),
    Contender(
        name="Lithops localhost",
        isolated="process",
        durable="yes",
        open=lithops,
        share=0.02,
        rounds=2,
        needs="lithops",
    ),
)
