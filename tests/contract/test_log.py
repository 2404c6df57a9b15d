"""The log of claims and outcomes: several writers, deaths while they write, and damage."""

from __future__ import annotations

import binascii
import fcntl
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kinetic._runner.protocol import wire
from kinetic._runner.stores.directory import LOG_FILE, DirectoryObjects

SCOPE = "batches/grp-000000000000/"

CREATE = f"""
import os, sys
from kinetic._runner.protocol import wire
from kinetic._runner.stores.directory import DirectoryObjects

objects, who = DirectoryObjects(sys.argv[1]), sys.argv[2]
for index in range(int(sys.argv[3])):
    name = wire.attempt_key({SCOPE!r}, index, 1, "claim")
    if objects.create(name, who.encode() * 500, {{"executor": who}}):
        os.write(1, f"{{index}}\\n".encode())
"""


def claim(index: int) -> str:
    return wire.attempt_key(SCOPE, index, 1, "claim")


@pytest.fixture
def objects(tmp_path: Path) -> DirectoryObjects:
    return DirectoryObjects(tmp_path / "s")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "s" / SCOPE / LOG_FILE


def names(objects: DirectoryObjects) -> list[str]:
    return [stored.name for stored in objects.list(SCOPE)]


def has_open_log() -> bool:
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return any(LOG_FILE in os.readlink(path) for path in paths if os.path.islink(path))


def start(root: Path, who: int, count: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CREATE, str(root), str(who), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)


@pytest.mark.full
def test_each_object_has_one_creator_even_if_creators_are_killed(
    objects: DirectoryObjects,
) -> None:
    count, deaths = 3000, 0
    rng = random.Random(7)
    creators = [start(objects.root, who, count) for who in range(3)]
    created: dict[int, list[int]] = {who: [] for who in range(3)}
    while deaths < 6:
        who = rng.randrange(3)
        output = creators[who].stdout
        assert output is not None
        for _ in range(rng.randint(1, 100)):
            created[who] += map(int, output.readline().split())
        creators[who].send_signal(signal.SIGKILL)
        created[who] += map(int, creators[who].communicate()[0].split())
        creators[who] = start(objects.root, who, count)
        deaths += 1
    for who, creator in enumerate(creators):
        created[who] += map(int, creator.communicate(timeout=120)[0].split())
        assert creator.returncode == 0
    assert names(objects) == [claim(index) for index in range(count)]
    for who, indices in created.items():
        for index in indices:  # a killed creator may not have told of its last one
            body, metadata = objects.get(claim(index))
            assert (body, metadata) == (str(who).encode() * 500, {"executor": str(who)})
    told = [index for indices in created.values() for index in indices]
    assert len(told) == len({*told}) >= count - deaths


@pytest.mark.parametrize("left", [1, 20, 60, 200])
def test_half_a_record_is_ignored_and_overwritten(
    objects: DirectoryObjects, log: Path, left: int
) -> None:
    objects.create(claim(0), b"first", {"k": "v"})
    whole = log.read_bytes()
    objects.create(claim(1), bytes(100), {"k": "w" * 100})
    second = log.read_bytes()[len(whole) :]
    log.write_bytes(whole + second[:left])
    reader, writer = DirectoryObjects(objects.root), DirectoryObjects(objects.root)
    assert names(reader) == [claim(0)] and not reader.exists(claim(1))
    assert writer.create(claim(1), b"again")
    assert reader.get(claim(1)) == (b"again", {})
    assert names(DirectoryObjects(objects.root)) == [claim(0), claim(1)]
    assert len(log.read_bytes()) < len(whole) + len(second)


def test_damage_costs_one_record(objects: DirectoryObjects, log: Path) -> None:
    for index in range(5):
        objects.create(claim(index), bytes(50), {"n": str(index)})
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 0xFF
    log.write_bytes(content)
    found = DirectoryObjects(objects.root)
    kept = names(found)
    assert len(kept) == 4
    (lost,) = {claim(index) for index in range(5)} - {*kept}
    assert found.create(lost, b"new") and found.get(lost)[0] == b"new"


def test_the_file_goes_with_the_last_object_and_comes_back(
    objects: DirectoryObjects, log: Path
) -> None:
    other = DirectoryObjects(objects.root)
    for index in range(3):
        objects.create(claim(index), b"")
    assert names(other) == [claim(index) for index in range(3)]
    other.delete([claim(1)])
    assert names(objects) == [claim(0), claim(2)] and objects.create(claim(1), b"again")
    other.delete(names(other))
    assert not log.exists() and not log.parent.exists()
    assert names(objects) == [] and not objects.exists(claim(0))
    assert objects.create(claim(0), b"new") and other.get(claim(0)) == (b"new", {})
    assert not other.create(claim(0), b"late")


def test_a_fork_opens_the_file_anew(objects: DirectoryObjects) -> None:
    """Two processes that shared a description of the file would share its lock."""
    objects.create(claim(0), b"")
    if (pid := os.fork()) == 0:
        code = 1
        try:
            if not has_open_log() and objects.create(claim(1), b"") and has_open_log():
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert names(objects) == [claim(0), claim(1)]


@pytest.mark.parametrize("content", [None, b"", b"kin"])
def test_something_else_in_the_place_of_a_log_is_an_error(
    objects: DirectoryObjects, log: Path, content: bytes | None
) -> None:
    log.parent.mkdir(parents=True)
    if content is None:
        log.mkdir()
    else:
        log.write_bytes(content)
    assert names(objects) == []
    with pytest.raises(OSError, match=LOG_FILE):
        objects.create(claim(0), b"")


def test_what_is_not_of_an_attempt_has_a_file(objects: DirectoryObjects) -> None:
    for name in (f"{SCOPE}manifest", "jobs/job-1/attempts/000000/x", "batches/attempts/x", "a"):
        objects.create(name, b"1")
        assert objects.path(name) is not None
    objects.create(claim(0), b"1")
    assert objects.path(claim(0)) is None
    assert claim(0) in [stored.name for stored in objects.list("")]
    assert objects.replace(claim(0), b"2", 1) == 2 and objects.replace(claim(0), b"3", 1) is None
    assert [stored.generation for stored in objects.look_up([claim(0), claim(1)])] == [2]
    assert objects.renew([claim(0), claim(1)]) == {claim(1)}


def test_a_write_that_fails_halfway_keeps_whole_records(
    objects: DirectoryObjects, log: Path
) -> None:
    """Another process may have read them already, and would miss what is written in their place."""
    for index in range(10):
        objects.create(claim(index), b"")
    reader, other = DirectoryObjects(objects.root), DirectoryObjects(objects.root)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = log.stat().st_size
    other.delete([claim(9)])
    one_record = log.stat().st_size - before
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + one_record * 2 + 3, hard))
    try:
        with pytest.raises(OSError, match=LOG_FILE):
            objects.delete([claim(index) for index in range(5)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    expected = [claim(index) for index in range(2, 9)]
    assert names(reader) == names(objects) == expected
    assert objects.create(claim(20), b"") and not reader.create(claim(20), b"")
    assert names(reader) == names(DirectoryObjects(objects.root)) == [*expected, claim(20)]


def test_a_reader_waits_for_a_writer_before_it_takes_a_record_for_damaged(
    objects: DirectoryObjects, log: Path
) -> None:
    objects.create(claim(0), b"")
    mark = log.read_bytes()[:8]
    reader = DirectoryObjects(objects.root)
    assert names(reader) == [claim(0)]
    with open(log, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0, os.SEEK_END)
        end = file.tell()
        file.write(mark + bytes(40) + mark)  # what a reader may see of two records being written
        file.flush()
        found: list[list[str]] = []
        thread = threading.Thread(target=lambda: found.append(names(reader)))
        thread.start()
        thread.join(0.2)
        assert not found, "it waits for the lock"
        file.truncate(end)
        fcntl.flock(file, fcntl.LOCK_UN)
    thread.join()
    assert objects.create(claim(1), b"")
    assert found == [[claim(0)]] and names(reader) == [claim(0), claim(1)]


def test_a_record_with_strange_content_is_harmless(objects: DirectoryObjects, log: Path) -> None:
    objects.create(claim(0), b"")
    mark = log.read_bytes()[:8]

    def record(name: bytes, metadata: bytes) -> bytes:
        rest = struct.pack("<HIII", len(name), len(metadata), 0, 1) + name + metadata
        return mark + struct.pack("<I", binascii.crc32(rest)) + rest

    folder, _, _ = claim(1).partition("attempts/")[2].rpartition("/")
    with open(log, "ab") as file:
        file.write(record(folder.encode() + b"/\xff\xfe", b"{}"))
        file.write(record(claim(1).partition("attempts/")[2].encode(), b'{"k": 1}'))
        file.write(mark + struct.pack("<IHIII", 0, 1, 1, 1 << 31, 1))
    assert objects.get(claim(1)) == (b"", {})
    assert len(names(objects)) == 3 and objects.create(claim(2), b"new")
    assert DirectoryObjects(objects.root).get(claim(2)) == (b"new", {})
