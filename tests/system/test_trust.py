"""Test each row of the security guide's table: forge, move, cut, or replace each kind of object.

No such object ends a wait, takes memory, runs code, or harms another item.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kinetic import Data, aio, errors
from kinetic._runner.job import spares
from kinetic._runner.protocol import pickles, signing, wire
from kinetic.aio import _shared_objects
from kinetic.aio.local.store import DirectoryStore
from tests.conftest import private_home

from .conftest import soon

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "security.md"
DEADLINE_S = 60.0
"""Only what hangs comes to it."""

MEMORY_KIB = 400 * 1024
"""Above what kinetic reads of any object at once, and far below the size of the planted one."""

LARGE = "large" * 100_000

ENDED = ["one", LARGE, "three"]


class Trap:
    """An object that makes a file when it is unpickled, as an attacker's would."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def same(x: Any) -> Any:
    return x


def size_of(data: str) -> int:
    return len((Path(data) / "file").read_bytes())


@dataclass
class Made:
    """Two ended batches and a job in one home; each test damages a copy of its store."""

    home: Path
    work: Path
    batch: str
    other: str
    job: str
    other_job: str
    copies: int = 0

    def copy(self, patch: pytest.MonkeyPatch) -> Path:
        """A store as it was, for whoever asks next."""
        self.copies += 1
        place = self.work / f"store-{self.copies}"
        # The supervisor may still remove the empty folders for the outputs of ended jobs.
        shutil.copytree(self.home / "store", place, ignore=shutil.ignore_patterns("outputs"))
        patch.setenv("KINETIC_HOME", str(self.home))
        patch.setenv("KINETIC_STORE", str(place))
        return place

    @property
    def trap(self) -> bytes:
        return pickles.dumps(Trap(self.mark))

    @property
    def mark(self) -> Path:
        return self.work / "mark"


async def _make(home: Path, work: Path) -> Made:
    async with aio.Client(backend="local") as client:
        batches = [await client.run_async_map(same, ENDED) for _ in range(2)]
        jobs = [await client.submit(same, text) for text in ("job", "other job")]
        for batch in batches:
            assert await batch.results(cleanup=False) == ENDED
        assert [await job.result(cleanup=False) for job in jobs] == ["job", "other job"]
    ids = [*(one.group_id for one in batches), *(one.job_id for one in jobs)]
    return Made(home, work, *ids)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    with pytest.MonkeyPatch.context() as patch, private_home(patch) as home:
        yield asyncio.run(_make(home, tmp_path_factory.mktemp("trust")))


# --- what is done to an object ---


@dataclass
class Case:
    """The object *name* in a copy of the store, and those whose content may be put in its place."""

    made: Made
    store: Path
    name: str
    sibling: str
    elsewhere: str

    @property
    def path(self) -> Path:
        return self.store / self.name

    def content(self, name: str = "") -> bytes:
        """Of the object itself, or of another one."""
        return (self.store / (name or self.name)).read_bytes()

    def put(self, content: bytes) -> None:
        self.path.unlink(missing_ok=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(content)

    def link(self, target: Path) -> None:
        self.path.unlink(missing_ok=True)
        self.path.symlink_to(target)

    def forge(self, metadata: Any) -> None:
        """A trap beside *metadata*, which need not be any."""
        self.put(_with_header(json.dumps({"m": metadata, "g": 1}).encode(), self.made.trap))


MAGIC = b"\x89KNO\r\n\x1a\n"


def _with_header(header: bytes, body: bytes) -> bytes:
    return MAGIC + len(header).to_bytes(4, "little") + header + body


def forged_with_another_key(case: Case) -> None:
    body = case.made.trap
    outcome = wire.Outcome(wire.Kind.VALUE, body=hashlib.sha256(body).hexdigest())
    header = outcome.signed(b"x" * 32, f"batches/{case.made.batch}/", 0, 1)
    case.forge({"nonce": "x", "executor": "x", "first": "0", "count": "3", **header})


def with_a_bit_flipped(case: Case) -> None:
    content = bytearray(case.content())
    content[-1 if len(content) > 2000 else len(content) // 2] ^= 1
    case.put(bytes(content))


def oversized(case: Case) -> None:
    case.put(case.content())
    os.truncate(case.path, 1 << 29)


def a_pipe(case: Case) -> None:
    case.path.unlink(missing_ok=True)
    os.mkfifo(case.path)


def a_link_to_a_genuine_one(case: Case) -> None:
    genuine = case.made.work / f"genuine-{case.made.copies}"
    shutil.copy(case.path, genuine)
    case.link(genuine)


DAMAGES: dict[str, Callable[[Case], None]] = {
    "forged with another key": forged_with_another_key,
    "forged with a signature in no alphabet": lambda case: case.forge(
        {"header": "\udc80", "mac": "ä" * 64, "executor": "\udc80", "tags": "[]"}
    ),
    "forged without a signature": lambda case: case.put(case.made.trap),
    "forged with metadata of other types": lambda case: case.forge([{"mac": 1}]),
    "nested too deep": lambda case: case.put(_with_header(b"[" * 100_000, b"[" * 100_000)),
    "with a header longer than the file": lambda case: case.put(MAGIC + b"\xff\xff\xff\xff{}"),
    "moved from another item": lambda case: case.put(case.content(case.sibling)),
    "moved from another batch": lambda case: case.put(case.content(case.elsewhere)),
    "cut": lambda case: case.put(case.content()[: len(case.content()) // 2]),
    "cut in its header": lambda case: case.put(case.content()[:20]),
    "emptied": lambda case: case.put(b""),
    "with a bit flipped": with_a_bit_flipped,
    "oversized": oversized,
    "a pipe": a_pipe,
    "a device": lambda case: case.link(Path("/dev/zero")),
    "a link to a genuine one": a_link_to_a_genuine_one,
    "a link to all files": lambda case: case.link(Path("/")),
}


# --- what each kind may come to ---

Attached = list[Any] | errors.WireError


async def _read(case: Case) -> Attached:
    """All that there is to ask of an ended batch, by a process that knows nothing of it."""
    made = case.made
    async with aio.Client(backend="local") as client:
        listed = await client.list_batches()
        assert {one.group_id for one in listed} <= {made.batch, made.other}
        assert made.other in {one.group_id for one in listed}, "the other batch is listed"
        await client.list_jobs()
        other = await client.attach_batch(made.other)
        assert await other.results(cleanup=False) == ENDED
        try:
            batch = await client.attach_batch(made.batch)
        except errors.WireError as exc:
            return exc
        found = {one.index: one.outcome async for one in batch.outcomes()}
        assert sorted(found) == [0, 1, 2]
        return [_told(found[index]) for index in range(3)]


def _told(outcome: Any) -> Any:
    try:
        return outcome.unwrap()
    except errors.WireError as exc:
        return type(exc)


def refused(found: Attached) -> bool:
    return isinstance(found, errors.WireError)


def untouched(found: Attached) -> bool:
    return found == ENDED


def one_fails(index: int) -> Callable[[Attached], bool]:
    expected = [errors.WireError if at == index else value for at, value in enumerate(ENDED)]
    return lambda found: found == expected


def either(*allowed: Callable[[Attached], bool]) -> Callable[[Attached], bool]:
    return lambda found: any(one(found) for one in allowed)


@dataclass(frozen=True)
class Kind:
    """Where it lies in a batch, what may be moved there, and what reading the batch comes to."""

    name: str
    allowed: Callable[[Attached], bool]
    sibling: str


ATTEMPT = "batches/{}/attempts/000000/0000000%d.0001.%s"

READ = {
    "manifest": Kind("batches/{}/manifest", refused, "batches/{}/lease"),
    # A reader of results ignores a body that was cut or swapped.
    "inputs": Kind(
        "batches/{}/inputs/00000000", either(refused, untouched), "batches/{}/inputs/00000001"
    ),
    "control": Kind("batches/{}/control/00000000", untouched, "batches/{}/manifest"),
    "lease": Kind("batches/{}/lease", untouched, "batches/{}/manifest"),
    "claim": Kind(ATTEMPT % (0, "claim"), untouched, ATTEMPT % (2, "claim")),
    "outcome": Kind(ATTEMPT % (0, "outcome"), one_fails(0), ATTEMPT % (2, "outcome")),
    "value": Kind("batches/{}/values/*", one_fails(1), "batches/{}/manifest"),
    "entry": Kind("groups/{}", untouched, "batches/{}/manifest"),
}


def _case(made: Made, kind: Kind, patch: pytest.MonkeyPatch) -> Case:
    store = made.copy(patch)

    def found(name: str, batch: str) -> str:
        here = name.format(batch)
        return str(next(store.glob(here)).relative_to(store)) if "*" in here else here

    case = Case(
        made,
        store,
        found(kind.name, made.batch),
        found(kind.sibling, made.batch),
        found(kind.name, made.other),
    )
    for name in (case.name, case.elsewhere):  # there is no request yet: one that says nothing
        if not (store / name).exists():
            (store / name).parent.mkdir()
            shutil.copy(store / case.sibling, store / name)
    return case


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


FEW = [
    *("forged with a signature in no alphabet", "nested too deep", "moved from another item"),
    *("cut", "emptied", "oversized", "a pipe", "a device"),
]
"""Of each way one, for what is looked at in the same way as an outcome or is not signed."""

WALK = [
    (what, damage)
    for what in READ
    for damage in (DAMAGES if what in ("outcome", "manifest", "inputs") else FEW)
]


@pytest.mark.parametrize(("what", "damage"), WALK)
async def test_what_is_read_of_a_store_harms_nothing_else(
    made: Made, what: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = _case(made, READ[what], monkeypatch)
    DAMAGES[damage](case)
    before = _peak()
    async with asyncio.timeout(DEADLINE_S):
        found = await _read(case)
    assert READ[what].allowed(found), found
    assert _peak() - before < MEMORY_KIB
    assert not made.mark.exists(), "somebody else's code ran"
    shutil.rmtree(case.store)


@pytest.mark.parametrize("damage", FEW)
async def test_a_handle_that_is_not_its_submitters_is_refused(
    made: Made, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Kind("jobs/{}/handle.json", refused, "jobs/{}/inputs/00000000")
    store = made.copy(monkeypatch)
    names = [kind.name.format(made.job), kind.sibling.format(made.job)]
    case = Case(made, store, *names, kind.name.format(made.other_job))
    DAMAGES[damage](case)
    before = _peak()
    async with asyncio.timeout(DEADLINE_S), aio.Client(backend="local") as client:
        with pytest.raises(errors.WireError, match="signed"):
            await client.attach(made.job)
        listed = {one.job_id for one in await client.list_jobs()}
        assert made.job not in listed
        assert await (await client.attach(made.other_job)).result(cleanup=False) == "other job"
    assert _peak() - before < MEMORY_KIB
    assert not made.mark.exists()
    shutil.rmtree(store)


# --- what jobs read ---


def _stored(home: Path, pattern: str) -> Path:
    [found] = (home / "store").glob(pattern)
    return found


async def left_behind(home: Path) -> list[Path]:
    """The workspace of the job that has just ended, which the next one would get."""
    folder = next((home / "local").glob("*/spares"))
    if spares.can_keep(str(home)):
        await soon(lambda: any(folder.iterdir()))
    return [*folder.iterdir()]


@pytest.mark.parametrize("damage", ["with a bit flipped", "forged without a signature"])
@pytest.mark.parametrize("what", ["code", "function", "data"])
async def test_what_a_job_reads_is_verified_before_it_runs(
    home: Path, tmp_path: Path, what: str, damage: str
) -> None:
    """Of the same size it fails the job; of another it is sent again, and the job runs."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_bytes(b"content" * 1000)
    pattern = {"code": "code/*", "function": "functions/*", "data": "data/*/files/file"}[what]
    async with asyncio.timeout(DEADLINE_S), aio.Client(backend="local") as client:
        assert await (await client.submit(size_of, Data(str(tree)))) == 7000
        path = _stored(home, pattern)
        case = Case(Made(home, tmp_path, "", "", "", ""), home / "store", "", "", "")
        case.name = str(path.relative_to(case.store))
        DAMAGES[damage](case)
        for kept in [*(home / "cache").glob("*"), *await left_behind(home)]:
            shutil.rmtree(kept)
        for manifest in case.store.glob("data/*/manifest*"):
            os.utime(manifest, (0, 0))  # old: its files are looked at again
        job = await client.submit(size_of, Data(str(tree)))
        if damage == "with a bit flipped":
            with pytest.raises(errors.JobFailed, match="is not what was submitted"):
                await job
        else:
            assert await job == 7000
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("damage", ["emptied", "cut", "a pipe", "a device", "a link to all files"])
async def test_a_shared_object_of_another_size_is_written_again(
    tmp_path: Path, damage: str
) -> None:
    """As a power cut or another process may leave it."""
    store = DirectoryStore(tmp_path / "store")
    await _shared_objects.ensure(store, "functions/f", b"a function" * 100)
    case = Case(Made(tmp_path, tmp_path, "", "", "", ""), tmp_path / "store", "functions/f", "", "")
    DAMAGES[damage](case)
    await _shared_objects.ensure(store, "functions/f", b"a function" * 100)
    assert (await store.get("functions/f")).body == b"a function" * 100


# --- what is no object of a batch ---


@pytest.mark.parametrize("damage", FEW)
async def test_a_kept_log_that_its_job_has_not_signed_is_not_shown(
    home: Path, tmp_path: Path, damage: str
) -> None:
    """It is the only one there is: that of the platform went with the job."""
    async with asyncio.timeout(DEADLINE_S), aio.Client(backend="local") as client:
        jobs = [await client.submit(same, text) for text in ("job", "other job")]
        names: list[str] = []
        for job in jobs:
            await job.result(cleanup=False)
            identity = (await job._follow()).submission.identity
            await job.cleanup(gcs=False)
            for attempt in (1, 2):
                names.append(wire.log_key(identity.scope, 0, attempt, 0))
                mac = signing.sign(identity.key, identity.scope, names[-1], b"genuine")
                await DirectoryStore(home / "store").create(names[-1], b"genuine", {"mac": mac})
        assert [line async for line in jobs[0].logs()] == ["genuine"]
        case = Case(Made(home, tmp_path, "", "", "", ""), home / "store", *names[:3])
        DAMAGES[damage](case)
        before = _peak()
        with pytest.raises(errors.NoLog):
            _ = [line async for line in jobs[0].logs()]
        assert [line async for line in jobs[1].logs()] == ["genuine"]
    assert _peak() - before < MEMORY_KIB
    assert not (tmp_path / "mark").exists()


ELSEWHERE = {"handle", "code", "function", "data", "log", "receipt", "caches"}
"""Kinds that other tests cover: receipts tests/unit/test_wire.py, caches test_rights.py."""


def test_the_guide_names_every_kind_and_each_is_walked() -> None:
    table = GUIDE.read_text().partition("\n| object |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([a-z]+)\b", table, re.MULTILINE)  # the first word is the kind
    assert len(rows) == len({*rows})
    assert {*rows} == {*READ} | ELSEWHERE
