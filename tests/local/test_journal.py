"""The journal contains only whole lines, even after the disk was full."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kinetic._devices import count_cpus, gpu_ids
from kinetic._supervisor.journal import MAX_NEW_LINES, Journal, read
from kinetic._supervisor.protocol import Decoder, encode
from tests import programs


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    journal, supervisor = Journal(tmp_path / "journal"), {"supervisor": os.getpid()}
    assert read(tmp_path / "journal") == [] and journal.is_stale
    journal.rewrite([])
    journal.append({"name": "ü\n"})
    assert read(tmp_path / "journal") == [supervisor, {"name": "ü\n"}]
    journal.rewrite([{"name": "kept"}])
    journal.append({"name": "more"})
    assert read(tmp_path / "journal") == [supervisor, {"name": "kept"}, {"name": "more"}]
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
    journal.close()


def test_a_torn_line_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b'{"a":1}\n[1]\n{"b":\n{"c":3}\n{"d"')
    assert read(tmp_path / "journal") == [{"a": 1}, {"c": 3}]


def test_it_is_stale_after_many_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.rewrite([])
    for _ in range(MAX_NEW_LINES):
        journal.append({})
    assert not journal.is_stale
    journal.append({})
    assert journal.is_stale
    journal.close()


FILL = """
import resource, signal, sys
from pathlib import Path
from kinetic._supervisor.journal import Journal

path = Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal(path)
journal.rewrite([])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    while True:
        journal.append({"pad": "x" * 100})
except OSError:
    assert journal.is_stale
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
journal.append({"name": "next"})
"""


def test_a_line_that_does_not_fit_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    programs.python("-c", FILL, path)
    lines = read(path)
    assert "supervisor" in lines[0] and lines[-1] == {"name": "next"}
    assert len(lines) > 5 and all(line == {"pad": "x" * 100} for line in lines[1:-1])


def test_messages_are_the_same_wherever_the_stream_is_cut() -> None:
    stream = encode({"op": "a", "text": "ü"}, b"\x00body") + encode({"op": "b"})
    expected = [({"op": "a", "text": "ü"}, b"\x00body"), ({"op": "b"}, b"")]
    for size in (1, 2, 7, len(stream)):
        decoder = Decoder()
        parts = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [message for part in parts for message in decoder.feed(part)] == expected


def test_slots_come_from_the_environment_or_the_machine() -> None:
    assert count_cpus({"KINETIC_LOCAL_SLOTS": "7"}) == 7
    assert count_cpus({"KINETIC_LOCAL_SLOTS": "none"}) == count_cpus({}) >= 1
    assert gpu_ids({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert gpu_ids({"CUDA_VISIBLE_DEVICES": " 1, 0,1 ,-1,2"}) == ("1", "0")
