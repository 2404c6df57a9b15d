"""``KINETIC_OUTPUT_PATH``: what a job writes there is in the bucket, at its end and before."""

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
from kinetic._runner.protocol.gcs_names import Place
from kinetic._runner.stores.gcs import EMULATOR, Bucket, Patience
from tests.gcs.server import GcsServer, Stored
from tests.runner.pods import Pods
from tests.runner.served import served

PLACE = "gs://kn-test/kept/run"


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
    return Mirror(PLACE, str(tmp_path / "output"))


def kept(server: GcsServer) -> dict[str, bytes]:
    """The files of the place, as the bucket has them."""
    prefix = "kept/run/"
    found = {name: one.body for name, one in server.objects.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): body for name, body in found.items()}


# --- the looks ----------------------------------------------------------------------------


def test_a_file_that_two_looks_find_unchanged_is_uploaded_once(
    mirror: Mirror, server: GcsServer, tmp_path: Path
) -> None:
    out = tmp_path / "output"
    (out / "deep").mkdir()
    (out / "deep" / "done 100%").write_text("whole")
    (out / "growing").write_text("a")
    mirror.scan()
    assert kept(server) == {}
    (out / "growing").write_text("ab")
    mirror.scan()
    assert kept(server) == {"deep/done 100%": b"whole"}
    server.requests.clear()
    mirror.scan()
    assert kept(server) == {"deep/done 100%": b"whole", "growing": b"ab"}
    mirror.scan()
    assert server.requests.total() == 1


def test_what_is_written_anew_replaces_and_what_is_deleted_stays(
    mirror: Mirror, server: GcsServer, tmp_path: Path
) -> None:
    out = tmp_path / "output"
    (out / "step").write_text("1")
    (out / "old").write_text("old")
    mirror.scan()
    mirror.scan()
    (out / "new").write_bytes(b"2" * 9_000_000)
    os.replace(out / "new", out / "step")  # as checkpoints are written
    (out / "old").unlink()
    mirror.finish(Stopping(), 30.0)
    assert kept(server) == {"step": b"2" * 9_000_000, "old": b"old"}


def test_what_could_not_be_uploaded_is_said(
    mirror: Mirror, server: GcsServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "output"
    (out / "good").write_text("good")
    (out / "refused").write_text("bad")
    os.mkfifo(out / "pipe")
    (out / "link").symlink_to(tmp_path)
    mirror._upload({"good": mirror._list_files()[0]["good"]})
    server.fail("create", status=403, text="no access")
    mirror.finish(Stopping(), 30.0)
    said = capfd.readouterr().err
    assert said.startswith(f"kinetic: not uploaded to {PLACE}: refused, ")
    assert "pipe (no regular file)" in said and "link (no regular file)" in said
    assert "lacks a permission" in said
    assert kept(server) == {"good": b"good"}


def test_a_job_that_is_asked_to_end_does_not_spend_its_grace_on_uploads(
    mirror: Mirror, server: GcsServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "output" / "large").write_text("x")
    mirror._cached_bucket = Bucket(Place("kn-test"), os.environ, Patience(total_s=0.1, idle_s=3.0))
    server.fail("create", stall=True)
    stopping = Stopping()
    stopping.requested, stopping.since = True, time.monotonic()
    mirror.finish(stopping, 1.0)
    assert time.monotonic() - stopping.since < 3.0
    assert "not uploaded" in capfd.readouterr().err


# --- jobs ---------------------------------------------------------------------------------


def write(name: str, text: str = "") -> list[str]:
    import os
    from pathlib import Path

    out = Path(os.environ["KINETIC_OUTPUT_PATH"])
    found = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text(text)
    return found


def test_what_comes_after_begins_with_what_is_there(pods: Pods, server: GcsServer) -> None:
    """Another job that was given the same place, and another pod of a job that was not."""
    own = f"{pods.store}/outputs/grp-1/0"
    order = pods.order(write, "a/step", "1", output_dir=PLACE)
    for output_dir, second in ((PLACE, order), (own, replace(order, attempt=2, output_dir=own))):
        pods.objects.delete([pods.name("outcome"), pods.name("claim")])
        first = pods.run(replace(order, output_dir=output_dir))
        assert (first.code, pods.value()) == (0, []), first.output
        if second.attempt == 1:
            pods.objects.delete([pods.name("outcome"), pods.name("claim")])
        else:
            pods.objects.delete([pods.name("outcome")])
            pods.close(wire.Outcome(kind=wire.Kind.ERROR, reason="preempted", executor="uid-1"))
        again = pods.run(second, "uid-2")
        assert (again.code, pods.value(second.attempt)) == (0, ["a/step"]), again.output
    assert kept(server) == {"a/step": b"1"}


def test_a_job_may_be_given_the_place_of_an_earlier_one(pods: Pods, server: GcsServer) -> None:
    name = "jobs/outputs/job-earlier/step"
    server.objects[name] = Stored(b"1", {}, 1)
    order = pods.order(write, "b", output_dir=f"{pods.store}/outputs/job-earlier")
    pod = pods.run(order)
    assert (pod.code, pods.value()) == (0, ["step"]), pod.output


def test_a_job_that_raises_has_its_files(pods: Pods, server: GcsServer) -> None:
    def fail() -> None:
        import os
        from pathlib import Path

        Path(os.environ["KINETIC_OUTPUT_PATH"], "last").write_text("words")
        raise ValueError

    assert pods.run(pods.order(fail, output_dir=PLACE)).code != 0
    assert kept(server) == {"last": b"words"}


def stay(fifo: str) -> None:
    import os
    import time
    from pathlib import Path

    Path(os.environ["KINETIC_OUTPUT_PATH"], "before").write_text("the end")
    with open(fifo, "w") as pipe:
        pipe.write("ready")
    time.sleep(600)


def test_a_job_that_is_asked_to_end_has_its_files(pods: Pods, server: GcsServer) -> None:
    fifo = str(pods.folder / "fifo")
    os.mkfifo(fifo)
    pod = pods.start(pods.order(stay, fifo, output_dir=PLACE))
    with open(fifo) as pipe:
        assert pipe.read() == "ready"
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == wire.EXIT_RETRY
    assert kept(server) == {"before": b"the end"}


def test_each_host_has_a_place_of_its_own(pods: Pods, server: GcsServer) -> None:
    order = pods.order(write, "part", "x", output_dir=PLACE)
    where = {"KINETIC_COORDINATOR": "127.0.0.1:1", "KINETIC_JAX": "0", "KINETIC_HOSTS": "2"}
    started = [pods.start(order, f"uid-{n}", KINETIC_HOST=str(n), **where) for n in range(2)]
    assert [pod.wait() for pod in started] == [0, 0], [pod.output for pod in started]
    assert kept(server) == {"hosts/0/part": b"x", "hosts/1/part": b"x"}


def test_a_job_that_writes_nothing_asks_for_nothing(pods: Pods, server: GcsServer) -> None:
    totals = []
    for output_dir in ("", f"{pods.store}/outputs/grp-1/0"):
        pods.objects.delete([pods.name("outcome"), pods.name("claim")])
        order = pods.order(len, "abc", output_dir=output_dir)  # the same call
        server.requests.clear()
        assert pods.run(order).code == 0
        totals.append(server.requests.total())
    assert totals[0] == totals[1]


def test_a_path_is_the_directory_itself(pods: Pods) -> None:
    place = pods.folder / "out"
    assert pods.run(pods.order(write, "x", "y", output_dir=str(place))).code == 0
    assert (place / "x").read_text() == "y"
