"""The log of claims and outcomes: several writers, deaths while they write, and damage."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
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
    return subprocess.Popen(command, stdout=subprocess.PIPE)


@pytest.mark.full
def test_each_object_has_one_creator_even_if_creators_are_killed(
    objects: DirectoryObjects,
) -> None:
    count, deaths = 3000, 0
    rng = random.Random(7)
    creators = [start(objects.root, who, count) for who in range(3)]
    created: dict[int, list[int]] = {who: [] for who in range(3)}
    while deaths < 6:
        time.sleep(rng.uniform(0.02, 0.1))
        who = rng.randrange(3)
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
