"""Upload local `Data` to the store, each content only once."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
from absl import logging

from kinetic import _snapshot
from kinetic._messages import format_size
from kinetic._progress.steps import step
from kinetic._runner.protocol import gcs_names
from kinetic._runner.protocol.manifest import Entry, Manifest, prefix
from kinetic._runner.protocol.wire import DataRef
from kinetic._tasks import SharedCalls, for_each
from kinetic.aio import _shared_objects
from kinetic.errors import BackendError, DataError

if TYPE_CHECKING:
    from kinetic._snapshot import Snapshot, Stamp
    from kinetic.aio.ports import ObjectInfo, Store
    from kinetic.data import Data

Progress = Callable[[int, int], None]
"""A function that the loop's thread calls with the bytes stored so far, and the bytes in total."""

MAX_REQUESTS = 32
READERS = 2  # more threads would slow the loop, because all share the interpreter's lock
BIG_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class _File:
    """One file to upload."""

    entry: Entry
    name: str
    path: str
    stamp: Stamp


async def upload(store: Store, data: Data, *, progress: Progress | None = None) -> DataRef:
    """Upload *data* unless the store has it, and return where it is.

    A URI is returned unchanged. The files of a local path are stored under ``data/{hash}/``; files
    that are already there aren't sent again. Worker threads read and hash the files. If several
    calls have the same content, one call sends it and the others wait. If that call is cancelled,
    the next call takes over.

    Raises:
        DataError: A file can't be read, has changed since it was hashed, or can't be mounted.
        BackendError: The store refuses a request, or doesn't answer.

    Cancelled:
        Files without a manifest may stay in the store; a later upload of the
        same content checks and uses them.
    """
    if data.is_gcs or data.is_hf:
        return _data_ref(data, data.path, "")
    # Callers that wait for a snapshot occupy no thread. A store belongs to one loop.
    key = store, id(data)
    snapshot = await _snapshots.run(key, lambda: snapshot_of(data), operation="reading Data")
    if data.fuse and not _shared_objects.has_size_limit(store):
        _check_mountable(snapshot)

    async def send() -> bool:
        stored = await store.look(snapshot.name)
        # Each upload stores or renews the files, and then the manifest that lists them. So if that
        # is fresh, no file is old enough to be removed. Otherwise, `_send` checks every file.
        if stored is not None and stored.size and _shared_objects.is_fresh(stored):
            # A store that exceeds its limit loses what wasn't used for a minute.
            if _shared_objects.has_size_limit(store):
                await store.renew([snapshot.name])
            return False
        with step(f"uploading {os.path.basename(snapshot.path)}") as sending:
            await _send(
                store, snapshot, progress or sending.update, has_manifest=stored is not None
            )
        return True

    if not await _shared_objects.once(store, f"upload of {snapshot.name}", send):
        logging.info("Data cache hit: %s (%s)", data.path, snapshot.digest[:12])
    return _data_ref(data, snapshot.name, snapshot.digest)


_snapshots = SharedCalls["Snapshot"]()


def _check_mountable(snapshot: Snapshot) -> None:
    """Raise `DataError` if a mounted bucket would show a file of *snapshot* under another name."""
    for entry, name in snapshot.manifest.objects(snapshot.digest):
        if not name.endswith(f"/files/{entry.path}") or gcs_names.UNSAFE.search(name):
            raise DataError(
                f"{entry.path!r} of Data({snapshot.path!r}) would have another name in a mounted "
                "bucket; rename it without '%', control characters, and more than 220 bytes in one "
                "part, or leave out fuse=True",
                path=snapshot.path,
            )
    if snapshot.manifest.empty:
        logging.warning(
            "a mounted bucket shows no empty directories, so the job lacks %r of %s",
            snapshot.manifest.empty[0],
            snapshot.path,
        )


async def renew(store: Store, name: str) -> bool:
    """Renew the manifest *name* and its files, unless it's fresh; return whether all exist."""
    stored = await store.look(name)
    if stored is None or _shared_objects.is_fresh(stored):
        return stored is not None
    content = (await store.get(name, limit=None)).body
    try:
        manifest = await anyio.to_thread.run_sync(Manifest.from_bytes, content)
    except ValueError:
        return False  # a damaged manifest counts as absent
    files = {file for _, file in manifest.objects(name.split("/")[1])}
    return not (await store.renew(files) or await store.renew([name]))


async def _send(
    store: Store, snapshot: Snapshot, progress: Progress, *, has_manifest: bool
) -> None:
    """Send the missing files and the manifest; *has_manifest* says that an old manifest exists."""
    files, size = len(snapshot.files), format_size(snapshot.size)
    verb = "Checking stored" if has_manifest else "Uploading"
    logging.info("%s data: %s (%d files, %s)", verb, snapshot.path, files, size)
    for link in snapshot.links:
        logging.warning("%s is a link to a directory; Data leaves it out", link)
    await _Transfer(store, snapshot, progress).run()
    # The manifest comes last, so a fresh manifest proves that all its files exist.
    content = await anyio.to_thread.run_sync(snapshot.manifest.to_bytes)
    await _shared_objects.ensure(store, snapshot.name, content)


class _Transfer:
    """Uploads the files of one snapshot concurrently, each with the content that was hashed."""

    def __init__(self, store: Store, snapshot: Snapshot, progress: Progress) -> None:
        self._store = store
        self._snapshot = snapshot
        self._progress = progress
        self._sent_bytes = 0
        self._stored_names: frozenset[str] = frozenset()
        self._reads = asyncio.Semaphore(READERS)
        self._big_file_reads = asyncio.Semaphore(BIG_AT_ONCE)

    async def run(self) -> None:
        """Delete damaged files from the store, renew the old ones, and send the missing ones."""
        folder = prefix(self._snapshot.digest)
        listed = await self._store.list(folder)
        # Leave manifests out: a fresh manifest must prove that its files were renewed before it.
        infos = [info for info in listed if not info.name.startswith(f"{folder}manifest")]
        if wrong := await anyio.to_thread.run_sync(self._wrong_sizes, infos):
            await self._store.delete(wrong)
            infos = [info for info in infos if info.name not in wrong]
        within = _shared_objects.DAY_S
        aged = [info.name for info in infos if not _shared_objects.is_fresh(info, within)]
        missing = await self._store.renew(aged) if aged else set[str]()
        self._stored_names = frozenset(info.name for info in infos) - missing
        snapshot = self._snapshot
        objects = snapshot.manifest.objects(snapshot.digest)
        files = (
            _File(entry, name, path, stamp)
            for (entry, name), path, stamp in zip(
                objects, snapshot.files, snapshot.stamps, strict=True
            )
        )
        await for_each(self._send, files, limit=MAX_REQUESTS)

    def _wrong_sizes(self, infos: list[ObjectInfo]) -> set[str]:
        """Return objects of a wrong size, as a power failure leaves; `run` replaces them."""
        objects = self._snapshot.manifest.objects(self._snapshot.digest)
        sizes = {name: entry.size for entry, name in objects}
        return {info.name for info in infos if sizes.get(info.name, info.size) != info.size}

    async def _send(self, file: _File) -> None:
        if file.name not in self._stored_names:
            if file.entry.size >= _snapshot.LARGE_FILE_BYTES:
                async with self._big_file_reads:
                    await self._send_big(file)
            else:
                root = self._snapshot.path
                async with self._reads:
                    body = await anyio.to_thread.run_sync(
                        _snapshot.read, file.path, file.entry, root, abandon_on_cancel=True
                    )
                await self._store.create(file.name, body, shared=True)
        self._sent_bytes += file.entry.size
        self._progress(self._sent_bytes, self._snapshot.size)

    async def _send_big(self, file: _File) -> None:
        """Create the object of a file that is too large to be held in memory."""
        stop = threading.Event()

        def check() -> None:
            if not _is_unchanged(file, stop):
                raise _snapshot.changed_error(file.path, self._snapshot.path)

        try:
            await self._store.create(file.name, Path(file.path), shared=True, check=check)
        except BackendError:
            # "The file has changed" is more useful than the store's error.
            await anyio.to_thread.run_sync(check, abandon_on_cancel=True)
            raise
        finally:
            stop.set()


async def snapshot_of(data: Data) -> Snapshot:
    """Walk and hash a local *data* in a worker thread; only the first call reads files.

    Raises:
        DataError: A file can't be read.

    Cancelled: the thread stops at the next file.
    """
    stop = threading.Event()
    try:
        return await anyio.to_thread.run_sync(
            data.__kinetic_snapshot__, stop, abandon_on_cancel=True
        )
    finally:
        stop.set()


def _is_unchanged(file: _File, stop: threading.Event) -> bool:
    """Return whether the file still has the content that was hashed."""
    if _snapshot.is_unchanged(file.path, file.stamp):
        return True
    try:
        return _snapshot.sha256(file.path, file.entry.path, stop) == file.entry.digest
    except OSError:
        return False


def _data_ref(data: Data, uri: str, digest: str) -> DataRef:
    return DataRef(
        uri=uri,
        digest=digest,
        is_dir=data.is_dir,
        fuse=data.fuse,
        trust_remote_code=data.hf_trust_remote_code,
        name="" if data.is_dir or data.is_gcs else os.path.basename(data.path),
    )
