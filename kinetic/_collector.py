"""Removes from this machine what many jobs share, and none has used for long.

That is what a store in a directory has of code, functions and `Data`, and what
jobs have unpacked of it. Whatever may still be read stays: what a batch that is
not cleaned up refers to, or a job without an outcome, or what was used so
recently that a submission under way may count on it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from collections import defaultdict
from collections.abc import Collection as AnyOf
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kinetic._runner.job import workspace
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic.collection import Collection, Freed

__all__ = [
    "CACHE_KEPT_S",
    "STORE_KEPT_S",
    "Limits",
    "Unit",
    "chosen",
    "collect",
    "directory_of",
    "local_store",
]

DAY_S = 24 * 3600.0

STORE_KEPT_S = 8 * DAY_S
"""A submission uses what was renewed in the last 7 days as it is: this, and a day for its start."""

CACHE_KEPT_S = 3600.0
"""What a process has unpacked it holds by a lock; this is for those that have not got to it."""

SHARED = ("code", "functions", "requirements", "data")
_NAMED = re.compile(rb'"((?:code|functions|requirements)/[^"]+|data/[0-9a-f]+)')
_SUBMISSION = re.compile(r"(?:job|grp)-[A-Za-z0-9-]+")


@dataclass(frozen=True, slots=True)
class Limits:
    """How long what nobody uses is kept, in seconds, and how many bytes of it at most.

    The bytes are those of the store's shared content, and again those of the caches.
    """

    age_s: float = 30 * DAY_S
    size: float = 20e9

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Limits:
        """As KINETIC_CACHE_AGE_S and KINETIC_CACHE_SIZE_MB say."""
        limits = cls()
        age, size = environ.get("KINETIC_CACHE_AGE_S"), environ.get("KINETIC_CACHE_SIZE_MB")
        with contextlib.suppress(ValueError):  # clients refuse what is no number
            limits = cls(float(age or limits.age_s), limits.size)
            limits = cls(limits.age_s, float(size) * 1e6 if size else limits.size)
        return limits


@dataclass(frozen=True, slots=True)
class Unit:
    """What goes together or not at all; *used* is in seconds since 1970."""

    kind: str
    name: str
    files: int
    size: int
    used: float


def chosen(
    units: Iterable[Unit], needed: AnyOf[str], limits: Limits, kept_s: float, now: float
) -> list[Unit]:
    """Those that go: what is too old, then the least recently used while all is too large.

    Never one that is *needed*, by its name, or was used in the last *kept_s* seconds.
    """
    units = sorted(units, key=lambda unit: unit.used)
    total = sum(unit.size for unit in units)
    going: list[Unit] = []
    for unit in units:
        unused = now - unit.used
        if unused < kept_s or unit.name in needed:
            continue
        if unused >= limits.age_s or total > limits.size:
            going.append(unit)
            total -= unit.size
    return going


def local_store(home: Path, environ: Mapping[str, str]) -> Path:
    """The store of the local platform, where no profile and no client has another."""
    named = environ.get("KINETIC_STORE") or ""
    return Path(named).expanduser() if named and "://" not in named else home / "store"


def directory_of(store: str) -> Path | None:
    """The directory that a store's address names; None if it is none."""
    return DirectoryObjects.from_url(store).root if store.startswith("file://") else None


def collect(home: Path, store: Path | None, limits: Limits) -> Collection:
    """Remove what *limits* say from the caches of *home*, and from the directory *store*.

    It may take long where much goes. What cannot be removed is left.
    """
    freed: defaultdict[str, Freed] = defaultdict(Freed)
    gone = _from_store(DirectoryObjects(store), limits) if store is not None else iter(())
    for unit in (*gone, *_from_cache(home / "cache", limits)):
        before = freed[unit.kind]
        freed[unit.kind] = Freed(before.files + unit.files, before.size + unit.size)
    if store is not None:
        _drop_empty_outputs(store)
    return Collection(dict(freed))


# --- the store ------------------------------------------------------------------------------


def _from_store(objects: DirectoryObjects, limits: Limits) -> Iterator[Unit]:
    now = time.time()
    names: defaultdict[str, list[str]] = defaultdict(list)
    units: list[Unit] = []
    with contextlib.suppress(OSError):
        for kind in SHARED:
            for unit, members in _units_of(objects, kind):
                units.append(unit)
                names[unit.name] = members
    kinds = {unit.kind for unit in chosen(units, (), limits, STORE_KEPT_S, now)}
    if not kinds:
        return  # the usual case: nothing else has to be read
    try:
        needed = _needed(objects, data="store/data" in kinds)
    except OSError:
        return
    for unit in chosen(units, needed, limits, STORE_KEPT_S, now):
        with contextlib.suppress(OSError):
            if objects.collect(names[unit.name], now - STORE_KEPT_S):
                yield unit


def _units_of(objects: DirectoryObjects, kind: str) -> Iterator[tuple[Unit, list[str]]]:
    """Each object; of `Data` the manifests and the files that they name, manifests first."""
    members: defaultdict[str, list[tuple[str, int, float]]] = defaultdict(list)
    for one in objects.list(f"{kind}/"):
        name = "/".join(one.name.split("/")[:2]) if kind == "data" else one.name
        members[name].append((one.name, one.size, one.used or 0.0))
    for name, found in members.items():
        found.sort(key=lambda one: not one[0].startswith(f"{name}/manifest"))
        size, used = sum(one[1] for one in found), max(one[2] for one in found)
        yield Unit(f"store/{kind}", name, len(found), size, used), [one[0] for one in found]


def _needed(objects: DirectoryObjects, *, data: bool) -> set[str]:
    """The shared content that batches name, and jobs without an outcome; `Data` if asked for."""
    needed: set[str] = set()
    ended: set[str] = set()
    listed = [one.name for one in objects.list("batches/")]
    telling = ("manifest", "inputs") if data else ("manifest",)  # inputs may be large
    speaking = [name for name in listed if name.split("/")[2] in telling]
    for one in objects.list("jobs/"):
        if one.name.endswith(".outcome"):
            ended.add(one.name.split("/")[1])
        elif one.name.endswith("/handle.json"):
            speaking.append(one.name)
    for name in speaking:
        if name.split("/")[1] not in ended:
            needed |= _named_in(objects, name)
    return needed


def _named_in(objects: DirectoryObjects, name: str) -> set[str]:
    """Wherever a manifest, or inputs, say it: a name that is no name keeps nothing."""
    try:
        path = objects.path(name)
        if path is None:
            return {match.decode() for match in _NAMED.findall(objects.get(name)[0])}
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            return {match[1].decode() for match in _NAMED.finditer(content)}
    except (KeyError, FileNotFoundError, ValueError):  # cleaned up meanwhile, or empty
        return set()


def _drop_empty_outputs(store: Path) -> None:
    """Remove what jobs left that had written nothing, when their supervisor was killed."""
    with contextlib.suppress(OSError), os.scandir(store / "outputs") as entries:
        for entry in entries:
            name = entry.name
            there = (store / "jobs" / name / "handle.json", store / "batches" / name / "manifest")
            if not _SUBMISSION.fullmatch(name) or any(one.exists() for one in there):
                continue
            if time.time() - entry.stat().st_mtime < CACHE_KEPT_S:
                continue
            for folder, _, _ in os.walk(entry.path, topdown=False):
                with contextlib.suppress(OSError):  # there is something in it
                    os.rmdir(folder)


# --- the caches -----------------------------------------------------------------------------


def _from_cache(cache: Path, limits: Limits) -> Iterator[Unit]:
    now = time.time()
    units = [*_trees_of(cache / "code"), *_trees_of(cache / "data")]
    for unit in chosen(units, (), limits, CACHE_KEPT_S, now):
        if workspace.discard(unit.name, now - CACHE_KEPT_S):
            yield unit


def _trees_of(folder: Path) -> Iterator[Unit]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                used = entry.stat(follow_symlinks=False).st_mtime
                tree = workspace.find(entry.path)
                weight = tree.weight if tree is not None else workspace.Weight(0, 0)
                kind = f"cache/{folder.name}"
                yield Unit(kind, entry.path, weight.files, weight.size, used)
