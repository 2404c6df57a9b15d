"""Test the upload of files below ``KINETIC_OUTPUT_PATH``, at a job's end and before."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kinetic._runner.job.outputs import Mirror
from kinetic._runner.job.processes import Stopping
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.gcs_names import BucketFolder
from kinetic._runner.stores.gcs import EMULATOR, Bucket, Limits
from tests.gcs.server import GcsServer, Stored
from tests.runner.pods import Pods, worker_variables
from tests.runner.served import served

OUTPUT_DIR = "gs://kn-test/uploaded_files/run"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    with served() as server:
        monkeypatch.setenv(EMULATOR, server.url)
        yield server


@pytest.fixture
def pods(in_bucket: Pods) -> Pods:
    return in_bucket


@pytest.fixture
def mirror(server: GcsServer, tmp_path: Path) -> Mirror:
    (tmp_path / "output").mkdir()
    return Mirror(OUTPUT_DIR, str(tmp_path / "output"))


def uploaded_files(server: GcsServer) -> dict[str, bytes]:
    """Return the uploaded files below `OUTPUT_DIR` by their relative name."""
    prefix = "uploaded_files/run/"
    return {
        name.removeprefix(prefix): stored.body
        for name, stored in server.objects.items()
        if name.startswith(prefix)
    }


# --- scans --------------------------------------------------------------------------------


def test_a_file_that_two_scans_find_unchanged_is_uploaded_once(
    mirror: Mirror, server: GcsServer, tmp_path: Path
) -> None:
    out = tmp_path / "output"
    (out / "deep").mkdir()
    (out / "deep" / "done 100%").write_text("whole")
    (out / "growing").write_text("a")
    mirror.scan()
    assert uploaded_files(server) == {}
    (out / "growing").write_text("ab")
    mirror.scan()
    assert uploaded_files(server) == {"deep/done 100%": b"whole"}
    server.requests.clear()
    mirror.scan()
    assert uploaded_files(server) == {"deep/done 100%": b"whole", "growing": b"ab"}
    mirror.scan()
    assert server.requests.total() == 1


def test_a_changed_file_is_replaced_and_a_deleted_one_stays_uploaded(
    mirror: Mirror, server: GcsServer, tmp_path: Path
) -> None:
    out = tmp_path / "output"
    (out / "step").write_text("1")
    (out / "old").write_text("old")
    mirror.scan()
    mirror.scan()
    (out / "new").write_bytes(b"2" * 9_000_000)
    os.replace(out / "new", out / "step")  # like a program that writes checkpoints
    (out / "old").unlink()
    mirror.finish(Stopping(), 30.0)
    assert uploaded_files(server) == {"step": b"2" * 9_000_000, "old": b"old"}


def test_files_that_could_not_be_uploaded_are_reported(
    mirror: Mirror, server: GcsServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "output"
    (out / "good").write_text("good")
    (out / "refused").write_text("bad")
    os.mkfifo(out / "pipe")
    (out / "link").symlink_to(tmp_path)
    mirror._upload({"good": mirror._list_files()["good"]})
    server.fail("create", status=403, text="no access")
    mirror.finish(Stopping(), 30.0)
    warning = capfd.readouterr().err
    assert warning.startswith(f"kinetic: these files were not uploaded to {OUTPUT_DIR}: refused (")
    assert "403 (no access)" in warning and "service account" in warning
    assert uploaded_files(server) == {"good": b"good"}


def test_uploads_after_sigterm_take_at_most_half_the_grace_period(
    mirror: Mirror, server: GcsServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "output" / "large").write_text("x")
    mirror._cached_bucket = Bucket(
        BucketFolder("kn-test"), os.environ, Limits(total_s=0.1, idle_s=3.0)
    )
    server.fail("create", stall=True)
    stopping = Stopping()
    stopping.requested, stopping.since = True, time.monotonic()
    mirror.finish(stopping, 1.0)
    assert time.monotonic() - stopping.since < 3.0
    assert "not uploaded" in capfd.readouterr().err


# --- jobs ---------------------------------------------------------------------------------


def write(name: str, text: str = "") -> list[str]:
    """Write a file in the output directory and return the files that were there before."""
    import os
    from pathlib import Path

    out = Path(os.environ["KINETIC_OUTPUT_PATH"])
    before = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text(text)
    return before


def test_a_later_pod_finds_the_uploaded_files(pods: Pods, server: GcsServer) -> None:
    """This holds for another job with the same directory and for a job's second attempt."""
    default = f"{pods.store}/outputs/grp-1-0"
    order = pods.order(write, "a/step", "1", output_dir=OUTPUT_DIR)
    retry = replace(order, attempt=2, output_dir=default)
    for output_dir, second in ((OUTPUT_DIR, order), (default, retry)):
        pods.objects.delete([pods.key("outcome"), pods.key("claim")])
        first = pods.run(replace(order, output_dir=output_dir))
        assert (first.code, pods.value()) == (0, []), first.output
        if second.attempt == 1:
            pods.objects.delete([pods.key("outcome"), pods.key("claim")])
        else:
            pods.objects.delete([pods.key("outcome")])
            pods.close(wire.Outcome(kind=wire.Kind.ERROR, reason="preempted", executor="uid-1"))
        again = pods.run(second, "uid-2")
        assert (again.code, pods.value(second.attempt)) == (0, ["a/step"]), again.output
    assert uploaded_files(server) == {"a/step": b"1"}


def test_a_job_may_use_the_output_directory_of_an_earlier_job(
    pods: Pods, server: GcsServer
) -> None:
    name = "jobs/outputs/job-earlier/step"
    server.objects[name] = Stored(b"1", {}, 1)
    order = pods.order(write, "b", output_dir=f"{pods.store}/outputs/job-earlier")
    pod = pods.run(order)
    assert (pod.code, pods.value()) == (0, ["step"]), pod.output


def test_files_of_a_job_that_raises_are_uploaded(pods: Pods, server: GcsServer) -> None:
    def fail() -> None:
        import os
        from pathlib import Path

        Path(os.environ["KINETIC_OUTPUT_PATH"], "last").write_text("words")
        raise ValueError

    assert pods.run(pods.order(fail, output_dir=OUTPUT_DIR)).code != 0
    assert uploaded_files(server) == {"last": b"words"}


def stay(fifo: str) -> None:
    import os
    import time
    from pathlib import Path

    Path(os.environ["KINETIC_OUTPUT_PATH"], "before").write_text("the end")
    with open(fifo, "w") as pipe:
        pipe.write("ready")
    while True:
        time.sleep(0.05)  # a signal just before a sleep is handled after it


def test_files_of_a_job_that_gets_sigterm_are_uploaded(pods: Pods, server: GcsServer) -> None:
    fifo = str(pods.folder / "fifo")
    os.mkfifo(fifo)
    pod = pods.start(pods.order(stay, fifo, output_dir=OUTPUT_DIR))
    with open(fifo) as pipe:
        assert pipe.read() == "ready"
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == wire.EXIT_RETRY
    assert uploaded_files(server) == {"before": b"the end"}


def test_each_host_has_its_own_output_directory(pods: Pods, server: GcsServer) -> None:
    order = pods.order(write, "part", "x", output_dir=OUTPUT_DIR, group_id=None)
    variables = worker_variables(outputs=OUTPUT_DIR)
    variables |= {"KINETIC_COORDINATOR": "127.0.0.1:1", "KINETIC_JAX": "0", "KINETIC_HOSTS": "2"}
    started = [pods.start(order, f"uid-{n}", KINETIC_HOST=str(n), **variables) for n in range(2)]
    assert [pod.wait() for pod in started] == [0, 0], [pod.output for pod in started]
    assert uploaded_files(server) == {"hosts/0/part": b"x", "hosts/1/part": b"x"}


def test_a_job_that_writes_no_files_costs_no_more_requests(pods: Pods, server: GcsServer) -> None:
    totals = []
    for output_dir in ("", f"{pods.store}/outputs/grp-1-0"):
        pods.objects.delete([pods.key("outcome"), pods.key("claim")])
        order = pods.order(len, "abc", output_dir=output_dir)
        server.requests.clear()
        assert pods.run(order).code == 0
        totals.append(server.requests.total())
    assert totals[0] == totals[1]
