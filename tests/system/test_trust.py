"""Test each row of the security guide's table: forge, move, cut, or replace each kind of object.

No damaged object may make a client hang, take much memory, run code, or harm another item.
"""

from __future__ import annotations

import asyncio
import gc
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
from kinetic._runner.stores.directory import LOG_FILE, DirectoryObjects
from kinetic.aio import _shared_objects
from kinetic.aio.local.store import DirectoryStore
from tests.conftest import private_home

from .conftest import soon

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "security.md"
DEADLINE_S = 60.0
"""Seconds to wait before calling a read hung."""

MEMORY_KIB = 400 * 1024
"""More than kinetic reads of any object at once, and far less than the oversized object."""

LARGE = "large" * 100_000

ENDED = ["one", LARGE, "three"]


class Trap:
    """An object that makes a folder when it is unpickled, like an attacker's object."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def same(x: Any) -> Any:
    return x


def size_of(data: str) -> int:
    return len((Path(data) / "file").read_bytes())


@dataclass
class Original:
    """A home with two ended batches and two ended jobs; each test damages a copy of its store."""

    home: Path
    work: Path
    batch: str
    other: str
    job: str
    other_job: str
    copies: int = 0

    def copy(self, patch: pytest.MonkeyPatch) -> Path:
        """Copy the undamaged store, and make new clients use the copy."""
        self.copies += 1
        store = self.work / f"store-{self.copies}"
        # The supervisor may still remove the empty folders for the outputs of ended jobs.
        shutil.copytree(self.home / "store", store, ignore=shutil.ignore_patterns("outputs"))
        patch.setenv("KINETIC_HOME", str(self.home))
        patch.setenv("KINETIC_STORE", str(store))
        return store

    @property
    def trap(self) -> bytes:
        return pickles.dumps(Trap(self.mark))

    @property
    def mark(self) -> Path:
        return self.work / "mark"


async def _make(home: Path, work: Path) -> Original:
    async with aio.Client(backend="local") as client:
        batches = [await client.run_async_map(same, ENDED) for _ in range(2)]
        jobs = [await client.submit(same, text) for text in ("job", "other job")]
        for batch in batches:
            assert await batch.results(cleanup=False) == ENDED
        assert [await job.result(cleanup=False) for job in jobs] == ["job", "other job"]
    ids = [*(batch.group_id for batch in batches), *(job.job_id for job in jobs)]
    return Original(home, work, *ids)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Original]:
    with pytest.MonkeyPatch.context() as patch, private_home(patch) as home:
        yield asyncio.run(_make(home, tmp_path_factory.mktemp("trust")))


# --- ways to damage an object ---


@dataclass
class Case:
    """The object *name* in a copy of the store, and the names of two others to replace it with."""

    original: Original
    store: Path
    name: str
    sibling: str
    elsewhere: str

    @property
    def path(self) -> Path:
        return self.store / self.name

    def content(self, name: str = "") -> bytes:
        """Read object *name*, by default the object itself."""
        return (self.store / (name or self.name)).read_bytes()

    def put(self, content: bytes) -> None:
        self.path.unlink(missing_ok=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(content)

    def link(self, target: Path) -> None:
        self.path.unlink(missing_ok=True)
        self.path.symlink_to(target)

    def forge(self, metadata: Any) -> None:
        """Write a trap with *metadata*, which may have any type."""
        self.put(_with_header(json.dumps({"m": metadata, "g": 1}).encode(), self.original.trap))


MAGIC = b"\x89KNO\r\n\x1a\n"


def _with_header(header: bytes, body: bytes) -> bytes:
    return MAGIC + len(header).to_bytes(4, "little") + header + body


def nested_too_deep(case: Case) -> None:
    gc.collect()  # Python 3.11 would finalize garbage of other tests in this depth, which fails
    case.put(_with_header(b"[" * 100_000, b"[" * 100_000))


def forged_with_another_key(case: Case) -> None:
    body = case.original.trap
    outcome = wire.Outcome(wire.Kind.VALUE, body=hashlib.sha256(body).hexdigest())
    header = outcome.signed(b"x" * 32, f"batches/{case.original.batch}/", 0, 1)
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
    genuine = case.original.work / f"genuine-{case.original.copies}"
    shutil.copy(case.path, genuine)
    case.link(genuine)


DAMAGES: dict[str, Callable[[Case], None]] = {
    "forged with another key": forged_with_another_key,
    "forged with a signature in no alphabet": lambda case: case.forge(
        {"header": "\udc80", "mac": "ä" * 64, "executor": "\udc80", "tags": "[]"}
    ),
    "forged without a signature": lambda case: case.put(case.original.trap),
    "forged with metadata of other types": lambda case: case.forge([{"mac": 1}]),
    "nested too deep": nested_too_deep,
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


# --- what a client may read after the damage ---

Attached = list[Any] | errors.WireError


async def _read(case: Case) -> Attached:
    """Read the damaged batch and the other one with a new client; return what it got."""
    original = case.original
    async with aio.Client(backend="local") as client:
        listed = await client.list_batches()
        listed_ids = {summary.group_id for summary in listed}
        assert listed_ids <= {original.batch, original.other}
        assert original.other in listed_ids, "the other batch is listed"
        await client.list_jobs()
        other = await client.attach_batch(original.other)
        assert await other.results(cleanup=False) == ENDED
        try:
            batch = await client.attach_batch(original.batch)
        except errors.WireError as exc:
            return exc
        outcomes = {ended.index: ended.outcome async for ended in batch.outcomes()}
        assert sorted(outcomes) == [0, 1, 2]
        return [_value_or_error(outcomes[index]) for index in range(3)]


def _value_or_error(outcome: Any) -> Any:
    try:
        return outcome.unwrap()
    except errors.WireError as exc:
        return type(exc)


def refused(found: Attached) -> bool:
    return isinstance(found, errors.WireError)


def untouched(found: Attached) -> bool:
    return found == ENDED


def one_fails(index: int) -> Callable[[Attached], bool]:
    expected = [errors.WireError if i == index else value for i, value in enumerate(ENDED)]
    return lambda found: found == expected


def either(*allowed: Callable[[Attached], bool]) -> Callable[[Attached], bool]:
    return lambda found: any(check(found) for check in allowed)


@dataclass(frozen=True)
class Kind:
    """A kind of object: its name, what a client may read once it's damaged, and a replacement."""

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
    "worker": Kind("batches/{}/workers/*", untouched, "batches/{}/manifest"),
    # If the metadata of an outcome have its body, kinetic ignores the object's content.
    "outcome": Kind(
        ATTEMPT % (0, "outcome"), either(one_fails(0), untouched), ATTEMPT % (2, "outcome")
    ),
    "value": Kind("batches/{}/values/*", one_fails(1), "batches/{}/manifest"),
    "entry": Kind("groups/{}", untouched, "batches/{}/manifest"),
}


def _case(original: Original, kind: Kind, patch: pytest.MonkeyPatch) -> Case:
    store = original.copy(patch)
    give_each_attempt_a_file(store)

    def resolve(name: str, batch: str) -> str:
        pattern = name.format(batch)
        return str(next(store.glob(pattern)).relative_to(store)) if "*" in pattern else pattern

    case = Case(
        original,
        store,
        resolve(kind.name, original.batch),
        resolve(kind.sibling, original.batch),
        resolve(kind.name, original.other),
    )
    for name in (
        case.name,
        case.elsewhere,
    ):  # the batches have no request to damage: add an invalid one
        if not (store / name).exists():
            (store / name).parent.mkdir()
            shutil.copy(store / case.sibling, store / name)
    return case


def give_each_attempt_a_file(store: Path) -> None:
    """Store claims and outcomes as on a shared volume, so that single ones can be damaged."""
    objects = DirectoryObjects(store)
    kept = [(it.name, *objects.get(it.name)) for it in objects.list("batches/")]
    for log in store.glob(f"batches/*/{LOG_FILE}"):
        log.unlink()
    for name, body, metadata in kept:
        DirectoryObjects(store, shared=True).create(name, body, metadata)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


FEW = [
    *("forged with a signature in no alphabet", "nested too deep", "moved from another item"),
    *("cut", "emptied", "oversized", "a pipe", "a device"),
]
"""Representative damages, for kinds that are read like an outcome or aren't signed."""

DAMAGED_KINDS = [
    (kind, damage)
    for kind in READ
    for damage in (DAMAGES if kind in ("outcome", "manifest", "inputs") else FEW)
]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "damage"), DAMAGED_KINDS)
async def test_a_damaged_object_harms_nothing_else(
    original: Original, kind: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = _case(original, READ[kind], monkeypatch)
    DAMAGES[damage](case)
    before = _peak()
    async with asyncio.timeout(DEADLINE_S):
        found = await _read(case)
    assert READ[kind].allowed(found), found
    assert _peak() - before < MEMORY_KIB
    assert not original.mark.exists(), "somebody else's code ran"
    shutil.rmtree(case.store)


@pytest.mark.full
@pytest.mark.parametrize("damage", FEW)
async def test_a_handle_that_is_not_its_submitters_is_refused(
    original: Original, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Kind("jobs/{}/handle.json", refused, "jobs/{}/inputs/00000000")
    store = original.copy(monkeypatch)
    names = [kind.name.format(original.job), kind.sibling.format(original.job)]
    case = Case(original, store, *names, kind.name.format(original.other_job))
    DAMAGES[damage](case)
    before = _peak()
    async with asyncio.timeout(DEADLINE_S), aio.Client(backend="local") as client:
        with pytest.raises(errors.WireError, match="signed"):
            await client.attach(original.job)
        listed = {job.job_id for job in await client.list_jobs()}
        assert original.job not in listed
        assert await (await client.attach(original.other_job)).result(cleanup=False) == "other job"
    assert _peak() - before < MEMORY_KIB
    assert not original.mark.exists()
    shutil.rmtree(store)


# --- what jobs read ---


def _stored(home: Path, pattern: str) -> Path:
    [found] = (home / "store").glob(pattern)
    return found


async def left_behind(home: Path) -> list[Path]:
    """Return the workspaces that ended jobs left for reuse by the next job."""
    folder = next((home / "local").glob("*/spares"))
    if spares.can_keep(str(home)):
        await soon(lambda: any(folder.iterdir()))
    return [*folder.iterdir()]


@pytest.mark.parametrize("damage", ["with a bit flipped", "forged without a signature"])
@pytest.mark.parametrize("kind", ["code", "function", "data"])
async def test_what_a_job_reads_is_verified_before_it_runs(
    home: Path, tmp_path: Path, kind: str, damage: str
) -> None:
    """Damaged content of the same size fails the job; of another size, it's uploaded again."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_bytes(b"content" * 1000)
    pattern = {"code": "code/*", "function": "functions/*", "data": "data/*/files/file"}[kind]
    async with asyncio.timeout(DEADLINE_S), aio.Client(backend="local") as client:
        assert await (await client.submit(size_of, Data(str(tree)))) == 7000
        path = _stored(home, pattern)
        case = Case(Original(home, tmp_path, "", "", "", ""), home / "store", "", "", "")
        case.name = str(path.relative_to(case.store))
        DAMAGES[damage](case)
        for kept in [*(home / "cache").glob("*"), *await left_behind(home)]:
            shutil.rmtree(kept)
        for manifest in case.store.glob("data/*/manifest*"):
            os.utime(manifest, (0, 0))  # too old to trust: the client checks the files again
        job = await client.submit(size_of, Data(str(tree)))
        if damage == "with a bit flipped":
            with pytest.raises(errors.JobFailed, match="is not what was submitted"):
                await job
        else:
            assert await job == 7000
    assert not (tmp_path / "mark").exists()


async def test_changed_files_are_verified_before_a_job_uses_them(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overlay of a project is verified as its archive is."""
    monkeypatch.delenv("KINETIC_PACKAGE_ROOT")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    async with asyncio.timeout(DEADLINE_S), aio.Client(backend="local") as client:
        await client.run(abs, -1)
        (tmp_path / "results.csv").write_text("1")
        await client.run(abs, -1)
        path = _stored(home, "code/*.overlay")
        case = Case(Original(home, tmp_path, "", "", "", ""), home / "store", "", "", "")
        case.name = str(path.relative_to(case.store))
        DAMAGES["with a bit flipped"](case)
        with pytest.raises(errors.JobFailed, match="is not what was submitted"):
            await client.run(abs, -1)


@pytest.mark.parametrize("damage", ["emptied", "cut", "a pipe", "a device", "a link to all files"])
async def test_a_shared_object_of_another_size_is_written_again(
    tmp_path: Path, damage: str
) -> None:
    """A power cut or another process may leave it like this."""
    store = DirectoryStore(tmp_path / "store")
    await _shared_objects.ensure(store, "functions/f", b"a function" * 100)
    case = Case(
        Original(tmp_path, tmp_path, "", "", "", ""), tmp_path / "store", "functions/f", "", ""
    )
    DAMAGES[damage](case)
    await _shared_objects.ensure(store, "functions/f", b"a function" * 100)
    assert (await store.get("functions/f")).body == b"a function" * 100


# --- kept logs ---


@pytest.mark.parametrize("damage", FEW)
async def test_a_kept_log_that_its_job_has_not_signed_is_not_shown(
    home: Path, tmp_path: Path, damage: str
) -> None:
    """There is no other log to show, because the platform's log went with the job."""
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
        case = Case(Original(home, tmp_path, "", "", "", ""), home / "store", *names[:3])
        DAMAGES[damage](case)
        before = _peak()
        with pytest.raises(errors.NoLog):
            _ = [line async for line in jobs[0].logs()]
        assert [line async for line in jobs[1].logs()] == ["genuine"]
    assert _peak() - before < MEMORY_KIB
    assert not (tmp_path / "mark").exists()


ELSEWHERE = {"handle", "code", "function", "data", "log", "receipt", "caches"}
"""Kinds with their own tests: receipts in tests/unit/test_wire.py, caches in test_rights.py."""


def test_the_guide_names_every_kind_and_each_is_tested() -> None:
    table = GUIDE.read_text().partition("\n| object |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([a-z]+)\b", table, re.MULTILINE)  # the first word is the kind
    assert len(rows) == len({*rows})
    assert {*rows} == {*READ} | ELSEWHERE
