"""Garbage collection: delete shared contents that no job uses any more.

Shared contents are code, functions, requirements, and `Data` in a store, and their unpacked copies
on this machine. The collector keeps contents that an unfinished job, or a batch that wasn't cleaned
up, refers to. It also keeps recently used contents, because a new submission may need them.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Collection as AbstractCollection
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Protocol, TypeVar

from kinetic._runner.job import workspace
from kinetic._runner.protocol import directory_urls, frames, wire
from kinetic._runner.protocol.retry_budgets import INFRASTRUCTURE
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic.collection import Collection, Freed

DAY_S = 24 * 3600.0

STORE_KEPT_S = DAY_S
"""Seconds that a store keeps content after its last use. A submission renews only content that
wasn't used for 12 hours, and may take another 12 hours until it stores its manifest."""

LIMITED_KEPT_S = 60.0
"""Seconds after its last use that content stays in a directory that exceeds its size limit.
A submission to a directory renews what its manifest names once more, after it stores the manifest.
Items of a batch may also refer to `Data`; an upload renews them, and seconds later an input names
them."""

DRAFT_KEPT_S = 3600.0
"""Seconds since the last write after which the draft of an archive counts as abandoned."""

ARCHIVES = "cache/pack"
"""The kind of the archives of projects in the cache."""

ENVIRONMENTS = "cache/environments"
"""The kind of the environments with a project's dependencies in the cache."""

ENVIRONMENT_MARK = "kinetic-ready"
"""The file that marks a complete environment; its time is that of the last use."""

SHARED = ("code", "functions", "requirements", "data")
"""The folders of a store that have shared contents."""

FOOTER_BYTES = 64 * 1024
"""How many bytes to read at the end of an inputs object: its footer names shared contents."""

_REFERENCE = re.compile(rb'"((?:code|functions|requirements)/[^"]+|data/[0-9a-f]+)')

_BATCH = re.compile(rb'"(grp-[^"]+)"')


@dataclass(frozen=True, slots=True)
class Limits:
    """The age limit of unused contents, in seconds, and their size limit in bytes.

    The size limit applies to the store's shared content and to the caches separately. What was used
    in the last ``kept_s`` seconds stays.
    """

    age_s: float = 30 * DAY_S
    size: float = 20e9
    kept_s: float = 0.0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Limits:
        """Read the limits from KINETIC_CACHE_AGE_S and KINETIC_CACHE_SIZE_MB."""
        limits = cls()
        age, size = environ.get("KINETIC_CACHE_AGE_S"), environ.get("KINETIC_CACHE_SIZE_MB")
        with contextlib.suppress(ValueError):  # ignore wrong numbers, which clients refuse
            limits = cls(float(age or limits.age_s), limits.size)
            limits = cls(limits.age_s, float(size) * 1e6 if size else limits.size)
        return limits


NOTHING = Limits(age_s=0.0, size=0.0)
"""The limits of ``kinetic gc --all``: everything goes that no unfinished job or batch needs."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Files that are removed together; ``used`` is their last use, in seconds since 1970.

    A unit of a store has its objects as ``members``.
    """

    kind: str
    name: str
    files: int
    size: int
    used: float
    members: tuple[ListedObject, ...] = ()


def choose_units(
    units: Iterable[Unit], needed: AbstractCollection[str], limits: Limits, now: float
) -> list[Unit]:
    """Return the units to remove: units beyond the age limit, and those used least recently.

    Choose by use only while the remaining units together exceed the size limit. Keep units whose
    name is *needed*.
    """
    oldest = sorted(units, key=lambda unit: unit.used)
    total = sum(unit.size for unit in oldest)
    units_to_remove: list[Unit] = []
    for unit in oldest:
        idle_s = now - unit.used
        if idle_s < limits.kept_s or unit.name in needed:
            continue
        if idle_s >= limits.age_s or total > limits.size:
            units_to_remove.append(unit)
            total -= unit.size
    return units_to_remove


def local_store(home: Path, environ: Mapping[str, str]) -> Path:
    """Return the store of local jobs: KINETIC_STORE if it is a path, else a folder in *home*."""
    configured = environ.get("KINETIC_STORE") or ""
    return (
        Path(configured).expanduser() if configured and "://" not in configured else home / "store"
    )


T = TypeVar("T")
R = TypeVar("R")


class ListedObject(Protocol):
    """An object in a listing; see `kinetic.aio.ports.ObjectInfo`."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def used(self) -> float | None: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...


class Objects(Protocol):
    """The operations on the objects of a store that a collection needs."""

    def list(self, prefix: str) -> Sequence[ListedObject]:
        """List the objects whose name begins with *prefix*."""
        ...

    def content(self, name: str, start: int) -> bytes:
        """Read an object from byte *start*; ``KeyError`` if there is none."""
        ...

    def collect(self, objects: Sequence[ListedObject]) -> bool:
        """Delete *objects* and return True; return False if one was renewed since the listing."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects."""
        ...

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """Return ``work(item)`` for all *items*, in order; threads may call *work* concurrently."""
        ...


class Directory:
    """The `Objects` of a store in a directory."""

    def __init__(self, root: Path) -> None:
        self.objects = DirectoryObjects(root)
        self.list, self.delete = self.objects.list, self.objects.delete

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """Implement `Objects.map`, one item after the other."""
        return map(work, items)

    def content(self, name: str, start: int) -> bytes:
        """Implement `Objects.content`."""
        return self.objects.get(name, start)[0]

    def collect(self, objects: Sequence[ListedObject]) -> bool:
        """Implement `Objects.collect`."""
        return self.objects.collect({member.name: member.used for member in objects})


def directory_of(store: str) -> Directory | None:
    """Return the directory that a store's address names; None if the store is of another kind."""
    directory = directory_urls.directory_of(store)
    return Directory(Path(directory)) if directory is not None else None


def collect(
    home: Path,
    limits: Limits,
    store: Objects,
    builds: Objects | None = None,
    *,
    unused_s: float | None = None,
) -> Collection:
    """Remove contents beyond *limits* from the caches of *home*, and unneeded contents from stores.

    The shared contents of *store*, and the build contexts in *builds*, go after *unused_s* seconds
    without use (None: as *limits* say), but not within a day. The size limit applies only to a
    store in a directory. With `NOTHING`, all of *store* that isn't needed goes at once. Also remove
    from *store* the remains of jobs and batches whose process died, and the names of sweeps without
    a batch. Skip files that can't be removed.
    """
    age_s = max(limits.age_s if unused_s is None else unused_s, STORE_KEPT_S)
    builds_limits = store_limits = Limits(age_s, math.inf, STORE_KEPT_S)
    if limits == NOTHING:
        store_limits = NOTHING
    elif isinstance(store, Directory):
        store_limits = Limits(age_s, limits.size, LIMITED_KEPT_S)
    freed: defaultdict[str, Freed] = defaultdict(Freed)
    removed: list[Iterable[Unit]] = [_collect_cache(home / "cache", limits)]
    removed.append(_collect_store(_Store(store), store_limits))
    if builds is not None:
        contexts = _Store(builds)
        units = contexts.units(["contexts"])
        removed.append(contexts.remove_unneeded("builds", units, (), builds_limits))
    for unit in chain.from_iterable(removed):
        previous = freed[unit.kind]
        freed[unit.kind] = Freed(previous.files + unit.files, previous.size + unit.size)
    if isinstance(store, Directory):
        store.objects.sweep(DAY_S)
    return Collection(dict(freed))


# --- the store ------------------------------------------------------------------------------


def _collect_store(store: _Store, limits: Limits) -> Iterator[Unit]:
    """Remove shared content that nothing refers to, and remains of jobs, batches, and sweeps."""
    # After an error, this removes nothing more: an unreadable manifest may refer to any content.
    with contextlib.suppress(OSError):
        # List the content before the manifests. A submission that stores a manifest later has
        # renewed the content that it uses.
        units = store.units(SHARED)
        kinds = {unit.kind for unit in choose_units(units, (), limits, time.time())}
        sweeps = store.objects.list("sweeps/")  # before the batches that they name
        batches, jobs = store.list_within("batches/"), store.list_within("jobs/")
        entries = {listed.name.rpartition("/")[2] for listed in store.objects.list("groups/")}
        yield from store.remove_remains([*batches, *jobs], entries)
        yield from store.remove_records(sweeps, entries)
        if kinds:
            needed = store.needed_names(batches, jobs, data="data" in kinds)
            yield from store.remove_unneeded("store", units, needed, limits)


class _Store:
    """Find and remove what a store doesn't need."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    def list_within(self, folder: str) -> list[ListedObject]:
        """List the objects of the submissions in *folder*; leave out others of the folder."""
        return [listed for listed in self.objects.list(folder) if listed.name.count("/") > 1]

    def units(self, kinds: Iterable[str]) -> list[Unit]:
        """List the shared contents; a unit of `Data` has first its manifest, then its files."""
        members: defaultdict[tuple[str, str], list[ListedObject]] = defaultdict(list)
        for kind in kinds:
            for listed in self.objects.list(f"{kind}/"):
                name = "/".join(listed.name.split("/")[:2]) if kind == "data" else listed.name
                members[kind, name].append(listed)
        units: list[Unit] = []
        for (kind, name), objects in members.items():
            manifest_prefix = f"{name}/manifest"
            objects.sort(key=lambda listed: not listed.name.startswith(manifest_prefix))
            size = sum(listed.size for listed in objects)
            used = max(listed.used or 0.0 for listed in objects)
            units.append(Unit(kind, name, len(objects), size, used, tuple(objects)))
        return units

    def remove_unneeded(
        self, folder: str, units: list[Unit], needed: AbstractCollection[str], limits: Limits
    ) -> Iterator[Unit]:
        """Delete the *units* that `choose_units` chooses; yield the deleted units.

        The kind of a yielded unit begins with *folder*.
        """
        units_to_remove = choose_units(units, needed, limits, time.time())
        for unit, removed in zip(
            units_to_remove, self.objects.map(self._remove, units_to_remove), strict=True
        ):
            if removed:
                yield replace(unit, kind=f"{folder}/{unit.kind}")

    def _remove(self, unit: Unit) -> bool:
        with contextlib.suppress(OSError):
            return self.objects.collect(unit.members)
        return False

    def remove_remains(
        self, submissions: Iterable[ListedObject], entries: AbstractCollection[str]
    ) -> Iterator[Unit]:
        """Delete what dead processes left of batches and single jobs; yield what was deleted.

        Remains are the items' objects of a batch whose results are collected. If a submission has
        neither a manifest nor an ID in *entries*, those of ``groups/``, all its objects are
        remains: its client died before it created the manifest, or they arrived after the cleanup.
        Nothing of a submission is deleted if one of its objects was used within a day.
        """
        by_scope: defaultdict[tuple[str, str], list[ListedObject]] = defaultdict(list)
        for listed in submissions:
            folder, identity, _ = listed.name.split("/", 2)
            by_scope[folder, identity].append(listed)
        oldest_kept = time.time() - DAY_S
        for (folder, identity), objects in by_scope.items():
            names = {listed.name.split("/", 2)[2] for listed in objects}
            if names.isdisjoint(("manifest", "handle.json")) and identity not in entries:
                remains = objects
            else:
                remains = items_of(objects) if "collected" in names else []
            times = [listed.used for listed in objects]
            if remains and all(used is not None and used < oldest_kept for used in times):
                try:
                    self.objects.delete([listed.name for listed in remains])
                except OSError:  # their log grows by it, and the disk may be full
                    continue
                yield Unit(
                    f"store/{folder}",
                    identity,
                    len(remains),
                    sum(listed.size for listed in remains),
                    0,
                )

    def remove_records(
        self, sweeps: Sequence[ListedObject], entries: AbstractCollection[str]
    ) -> Iterator[Unit]:
        """Delete the objects of sweeps' names whose batches are all gone; yield what was deleted.

        List *sweeps* before *entries*: a batch has its entry before a name refers to it.
        """
        for listed in sweeps:
            with contextlib.suppress(KeyError):  # another collection has removed it
                content = self.objects.content(listed.name, 0)
                has_batch = any(match[1].decode() in entries for match in _BATCH.finditer(content))
                if not has_batch and self.objects.collect([listed]):
                    yield Unit("store/sweeps", listed.name, 1, listed.size, 0)

    def needed_names(
        self, batches: Sequence[ListedObject], jobs: Sequence[ListedObject], *, data: bool
    ) -> set[str]:
        """Return the names of shared contents that a batch, or an unfinished job, still refers to.

        A batch refers to contents until its results are collected or it is cleaned up. If *data* is
        false, leave out the `Data` that inputs refer to.
        """
        parts = {listed.name: listed.name.split("/") for listed in batches}
        ended = {path_parts[1] for path_parts in parts.values() if path_parts[2:] == ["collected"]}
        referring = ("manifest", "inputs") if data else ("manifest",)
        referrers = [listed for listed in batches if parts[listed.name][2] in referring]
        for listed in jobs:
            parts[listed.name] = listed.name.split("/")
            if listed.name.endswith(".outcome"):
                outcome = _outcome_of(listed)
                if outcome is not None and outcome.reason not in INFRASTRUCTURE:
                    ended.add(parts[listed.name][1])  # no other attempt follows
            elif listed.name.endswith("/handle.json"):
                referrers.append(listed)
        unfinished = [listed for listed in referrers if parts[listed.name][1] not in ended]
        return {
            name for names in self.objects.map(self._referenced_names, unfinished) for name in names
        }

    def _referenced_names(self, listed: ListedObject) -> set[str]:
        """Return the names of the contents that a manifest, or the footer of inputs, refers to."""
        try:
            start = max(0, listed.size - FOOTER_BYTES) if "/inputs/" in listed.name else 0
            content = self.objects.content(listed.name, start)
            if start:
                content = self._whole_footer(listed, content)
        except KeyError:  # the object was removed after the listing
            return set()
        return {match[1].decode() for match in _REFERENCE.finditer(content)}

    def _whole_footer(self, listed: ListedObject, tail: bytes) -> bytes:
        """Return bytes that include the whole footer of an object that ends with *tail*."""
        try:
            length = frames.footer_length(tail)
        except ValueError:
            length = listed.size  # damaged, so read the whole object for the names in it
        return (
            tail if length <= len(tail) else self.objects.content(listed.name, listed.size - length)
        )


ITEM_FOLDERS = ("inputs/", "logs/", "metrics/", "attempts/", "values/")
"""The folders of a batch with objects of its items, in the order of their removal.

Inputs are removed first: a process of the batch that starts late then finds no input, and ends.
"""

ITEMS = TypeVar("ITEMS", bound=ListedObject)


def items_of(batch: Iterable[ITEMS]) -> list[ITEMS]:
    """Return the objects that a batch with collected results no longer needs, in removal order.

    The outcomes of closed attempts stay. If the process of such an attempt is still alive, it could
    otherwise commit another outcome.
    """
    found: dict[str, list[ITEMS]] = {folder: [] for folder in ITEM_FOLDERS}
    for listed in batch:
        folder = f"{listed.name.split('/', 3)[2]}/"
        if folder in found and not _is_closed(listed):
            found[folder].append(listed)
    return [*chain.from_iterable(found.values())]


def _is_closed(listed: ListedObject) -> bool:
    """Return whether *listed* is an outcome that another process may have written."""
    header = listed.metadata.get("header", "")
    # Parsing takes 4 µs, and nearly all outcomes are values.
    if wire.Kind.LOST not in header and wire.Kind.CANCELLED not in header:
        return False
    outcome = _outcome_of(listed)
    return outcome is not None and outcome.kind in (wire.Kind.LOST, wire.Kind.CANCELLED)


def _outcome_of(listed: ListedObject) -> wire.Outcome | None:
    """Return the outcome in an object's header, unverified; None if the object isn't one."""
    try:
        return wire.Outcome.parse(listed.metadata["header"])
    except frames.MALFORMED:
        return None


# --- the caches -----------------------------------------------------------------------------


def _collect_cache(cache: Path, limits: Limits) -> Iterator[Unit]:
    """Remove what the caches have beyond *limits*; yield what was removed."""
    now = time.time()
    trees = [*_trees_of(cache / "code"), *_trees_of(cache / "data")]
    units = [*trees, *_archives_of(cache / "pack", now)]
    # A process may be about to lock what was just used, so the least recently used goes first. What
    # a process needs after its removal, it makes again.
    chosen = choose_units(units, (), limits, now)
    # A job that waits for its turn has no lock on its environment, and can't make it again.
    kept = replace(limits, kept_s=DAY_S)
    chosen += choose_units(_environments_of(cache / "environments"), (), kept, now)
    discards = {ARCHIVES: _discard_archive, ENVIRONMENTS: _discard_environment}
    for unit in chosen:
        if discards.get(unit.kind, workspace.discard_tree)(unit.name, now):
            yield unit


def prune_archives(folder: Path, limits: Limits) -> None:
    """Remove the archives in *folder* that are beyond *limits* and that no process uses."""
    now = time.time()
    for unit in choose_units(_archives_of(folder, now), (), limits, now):
        _discard_archive(unit.name, now)


def _archives_of(folder: Path, now: float) -> Iterator[Unit]:
    """Yield a unit for each archive of a project in *folder*, and for old drafts of archives."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process has removed it
                status = entry.stat(follow_symlinks=False)
                # A process may be writing a newer draft.
                if not entry.name.endswith(".new") or now - status.st_mtime > DRAFT_KEPT_S:
                    yield Unit(ARCHIVES, entry.path, 1, status.st_size, status.st_mtime)


def _discard_archive(path: str, unused_since: float) -> bool:
    """Remove an archive, unless a process has a lock on it or used it after *unused_since*."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # another process has removed it
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_mtime > unused_since:
            return False
        os.unlink(path)
        return True
    except OSError:  # a process uses it, or has removed it
        return False
    finally:
        os.close(lock)


def _environments_of(folder: Path) -> Iterator[Unit]:
    """Yield a unit for each environment in *folder*; one that is incomplete was never used."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            content, used = _size_of(Path(entry.path)), 0.0
            with contextlib.suppress(OSError):
                used = os.stat(f"{entry.path}/{ENVIRONMENT_MARK}").st_mtime
            yield Unit(ENVIRONMENTS, entry.path, content.files, content.size, used)


def _discard_environment(path: str, unused_since: float) -> bool:
    """Remove an environment, unless a process has a lock on it or used it after *unused_since*."""
    mark = f"{path}/{ENVIRONMENT_MARK}"
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # another process has removed it
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.exists(mark):
            if os.stat(mark).st_mtime > unused_since:
                return False
            os.unlink(mark)  # makes it incomplete in one step
        shutil.rmtree(path)
        return True
    except OSError:  # a process uses, makes, or removes it
        return False
    finally:
        os.close(lock)


def _trees_of(folder: Path) -> Iterator[Unit]:
    """Yield a unit for each unpacked file or tree in *folder*; its name is the path."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                used = entry.stat(follow_symlinks=False).st_mtime
                kind = f"cache/{folder.name}"
                if (tree := workspace.find_tree(entry.path)) is not None:
                    yield Unit(kind, entry.path, tree.weight.files, tree.weight.size, used)
                else:  # a killed process left half of it, unless one that builds it has its lock
                    half = _size_of(Path(entry.path))
                    yield Unit(kind, entry.path, half.files, half.size, 0.0)


def sizes(home: Path, environ: Mapping[str, str]) -> dict[str, Freed]:
    """Return the files and bytes in each folder of the caches and of the local store."""
    found: dict[str, Freed] = {}
    for title, folder in (("cache", home / "cache"), ("store", local_store(home, environ))):
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        for name in names:
            if (folder / name).is_dir() and not name.startswith("."):
                found[f"{title}/{name}"] = _size_of(folder / name)
    return found


def _size_of(folder: Path) -> Freed:
    count = size = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # another process has removed it
                size += os.lstat(f"{at}/{name}").st_size
                count += 1
    return Freed(count, size)
