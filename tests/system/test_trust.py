"""The table of the guide to security, walked: each kind of object forged, moved, cut, put in place.

Whatever lies in a store ends nobody's wait, takes no memory, runs nothing, and harms no other item.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kinetic import Data, aio, errors
from kinetic._runner import frames, pickles, receipts, wire
from kinetic._runner.directory import DirectoryObjects
from kinetic.aio.images import _turn
from kinetic.aio.stores.directory import DirectoryStore
from tests.conftest import private_home

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "security.md"
DEADLINE_S = 60.0
"""Only what hangs comes to it."""

MEMORY_KIB = 400 * 1024
"""More than is read of any object at once, and far less than what is put there."""

LARGE = "large" * 100_000

ENDED = ["one", LARGE, "three"]


class Trap:
    """Rebuilding it makes a file: what somebody who replaces a pickle wants."""

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
    """Two ended batches and a job in a home of their own; damage is done to copies of its store."""

    home: Path
    work: Path
    batch: str
    other: str
    job: str
    other_job: str
    copies: int = 0

    def copy(self) -> Path:
        self.copies += 1
        place = self.work / f"store-{self.copies}"
        shutil.copytree(self.home / "store", place)
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

    def put(self, content: bytes) -> None:
        self.path.unlink(missing_ok=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(content)

    def forge(self, metadata: Any) -> None:
        """A trap beside *metadata*, which need not be any."""
        self.put(_with_header(json.dumps({"m": metadata, "g": 1}).encode(), self.made.trap))


def _with_header(header: bytes, body: bytes) -> bytes:
    return b"\x89KNO\r\n\x1a\n" + len(header).to_bytes(4, "little") + header + body


def forged_with_another_key(case: Case) -> None:
    body = case.made.trap
    outcome = wire.Outcome(wire.Kind.VALUE, body=hashlib.sha256(body).hexdigest())
    header = outcome.signed(b"x" * 32, f"batches/{case.made.batch}/", 0, 1)
    case.forge({"nonce": "x", "executor": "x", "first": "0", "count": "3", **header})


def forged_with_a_signature_in_no_alphabet(case: Case) -> None:
    case.forge({"header": "\udc80", "mac": "ä" * 64, "executor": "\udc80", "tags": "[]"})


def forged_without_a_signature(case: Case) -> None:
    case.put(case.made.trap)


def forged_with_metadata_of_other_types(case: Case) -> None:
    case.forge([{"mac": 1}])


def nested_too_deep(case: Case) -> None:
    case.put(_with_header(b"[" * 100_000, b"[" * 100_000))


def with_a_header_longer_than_the_file(case: Case) -> None:
    case.put(b"\x89KNO\r\n\x1a\n" + b"\xff\xff\xff\xff" + b"{}")


def moved_from_another_item(case: Case) -> None:
    case.put((case.store / case.sibling).read_bytes())


def moved_from_another_batch(case: Case) -> None:
    case.put((case.store / case.elsewhere).read_bytes())


def cut(case: Case) -> None:
    content = case.path.read_bytes()
    case.put(content[: len(content) // 2])


def cut_in_its_header(case: Case) -> None:
    case.put(case.path.read_bytes()[:20])


def emptied(case: Case) -> None:
    case.put(b"")


def with_a_bit_flipped(case: Case) -> None:
    content = bytearray(case.path.read_bytes())
    content[-1 if len(content) > 2000 else len(content) // 2] ^= 1
    case.put(bytes(content))


def oversized(case: Case) -> None:
    content = case.path.read_bytes()
    case.put(content)
    os.truncate(case.path, 1 << 36)


def a_pipe(case: Case) -> None:
    case.path.unlink(missing_ok=True)
    os.mkfifo(case.path)


def _linked(case: Case, target: Path) -> None:
    case.path.unlink(missing_ok=True)
    case.path.symlink_to(target)


def a_device(case: Case) -> None:
    _linked(case, Path("/dev/zero"))


def a_link_to_a_genuine_one(case: Case) -> None:
    genuine = case.made.work / f"genuine-{case.made.copies}"
    shutil.copy(case.path, genuine)
    _linked(case, genuine)


def a_link_to_all_files(case: Case) -> None:
    _linked(case, Path("/"))


DAMAGES: list[Callable[[Case], None]] = [
    forged_with_another_key,
    forged_with_a_signature_in_no_alphabet,
    forged_without_a_signature,
    forged_with_metadata_of_other_types,
    nested_too_deep,
    with_a_header_longer_than_the_file,
    moved_from_another_item,
    moved_from_another_batch,
    cut,
    cut_in_its_header,
    emptied,
    with_a_bit_flipped,
    oversized,
    a_pipe,
    a_device,
    a_link_to_a_genuine_one,
    a_link_to_all_files,
]


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
    """Where it lies in a batch, where others of it lie, and what reading the batch comes to.

    ``body``: its metadata are right when only its end is damaged.
    """

    name: str
    allowed: Callable[[Attached], bool]
    sibling: str = ""
    elsewhere: str = ""


ATTEMPT = "batches/{}/attempts/000000/{:08d}.0001.{}"

READ = {
    "manifest": Kind("batches/{}/manifest", refused, "batches/{}/inputs/00000000"),
    # A body that was cut or swapped is no concern of who reads results.
    "inputs": Kind(
        "batches/{}/inputs/00000000", either(refused, untouched), "batches/{}/inputs/00000001"
    ),
    "control": Kind("batches/{}/control/00000000", untouched, "batches/{}/manifest"),
    "lease": Kind("batches/{}/lease", untouched, "batches/{}/manifest"),
    "claim": Kind(
        ATTEMPT.format("{}", 0, "claim"), untouched, ATTEMPT.format("{}", 2, "claim")
    ),
    "outcome": Kind(
        ATTEMPT.format("{}", 0, "outcome"), one_fails(0), ATTEMPT.format("{}", 2, "outcome")
    ),
    "entry": Kind("groups/{}", untouched, "batches/{}/manifest"),
    "end": Kind("batches/{}/done/00000000", refused, "batches/{}/manifest"),
}
