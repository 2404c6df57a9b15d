"""``KINETIC_OUTPUT_PATH``: a local directory for the job's output files.

If the job's output directory is a local path, the job writes there directly. If it is a prefix in
a bucket, the job gets a local folder with the files of the prefix. kinetic uploads a new or changed
file when two scans find it in the same state. At the end of the job, it uploads the remaining
files. A file that the job deletes stays in the bucket.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..job_log import say
from ..protocol import private

if TYPE_CHECKING:
    from ..protocol.wire import Order
    from .processes import Stopping

VARIABLE = "KINETIC_OUTPUT_PATH"
SCAN_S = 30.0
"""Seconds between two scans."""

SETTLED_NS, COARSE_NS = 100_000_000, 1_000_000
"""A directory whose time is older, in nanoseconds, has another time after its next change.

This doesn't hold for a file system whose times are multiples of the second number.
"""

MAX_CONCURRENT = 16
LARGE_BYTES = 1024 * 1024
"""Upload larger files one by one, because each upload takes memory of the job."""

MAX_NAMED_FILES = 5
"""Maximum number of files that the message about missing uploads names."""


def prepare(order: Order, host: int, hosts: int, work: str | os.PathLike[str]) -> Mirror | None:
    """Prepare this host's output directory; return a `Mirror` if it is in a bucket, else None.

    Raises:
        OSError: The directory can't be made, or its files can't be downloaded.
        RuntimeError: The name of an object can't be the path of a file.
    """
    url = f"{order.output_dir}/hosts/{host}" if hosts > 1 else order.output_dir
    if url and prepare_local(url):  # each function costs a fork memory, and most jobs have none
        return None
    if url.startswith("gs://"):
        folder = f"{os.fspath(work)}/output"
        os.mkdir(folder, 0o700)
        mirror = Mirror(url, folder)
        own_prefix = f"{order.store}/outputs/{order.group_id or order.job_id}"
        if order.attempt > 1 or not order.output_dir.startswith(own_prefix):
            mirror.fetch()  # otherwise the prefix is new, and still empty
        os.environ[VARIABLE] = folder
        mirror.start()
        return mirror
    os.environ.pop(VARIABLE, None)
    return None


def prepare_local(url: str) -> bool:
    """Prepare the output directory *url* if it is a path of this machine; return whether it is.

    Raises:
        OSError: The directory can't be made.
    """
    if not url.startswith("/"):
        return False
    try:
        if not os.path.isdir(url):
            private.make_folder(url)
    except OSError:
        os.environ.pop(VARIABLE, None)
        raise
    os.environ[VARIABLE] = url
    return True


OWN_FOLDER = re.compile(r"(/.*/outputs/(?:job|grp)-(?:local-)?[0-9a-f]{12})(/[0-9]+)?")
"""Matches output directories that kinetic named; kinetic removes no directory that a user named."""


def drop_if_empty(folder: str) -> None:
    """Remove an output directory that kinetic has named, if it is empty."""
    if OWN_FOLDER.fullmatch(folder):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


class SpareFolder:
    """The empty output directory of an item, which the next item gets under its own name.

    On some disks, removing a directory takes milliseconds. *path* is its name between two items.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._former = ""
        self._empty: tuple[int, ...] = ()  # the state of a directory that was found empty

    def take(self, folder: str) -> None:
        """Take the output directory *folder* of an item that has ended, if it is empty."""
        if not OWN_FOLDER.fullmatch(folder):
            return
        with contextlib.suppress(OSError):  # as if they are on two file systems
            if self._is_empty(folder):
                os.rename(folder, self._path)  # it replaces only an empty directory
                self._former = folder
                return
        drop_if_empty(folder)

    def give(self, folder: str) -> bool:
        """Make the directory *folder*, if one is kept; call this without processes of items.

        Return whether it was made.
        """
        former, self._former = self._former, ""
        if not former or not OWN_FOLDER.fullmatch(folder):
            return False
        with contextlib.suppress(OSError):
            # A process of the last item may have written to the directory that it stood in.
            is_empty = self._is_empty(self._path)
            os.rename(self._path, folder if is_empty else former)
            return is_empty
        return False

    def _is_empty(self, folder: str) -> bool:
        """Return whether *folder* is an empty directory, as kinetic makes them."""
        status = os.lstat(folder)
        changed = status.st_mtime_ns
        state = status.st_dev, status.st_ino, status.st_mode, status.st_uid, changed
        if state == self._empty:
            return True
        is_own = status.st_mode == stat.S_IFDIR | 0o700 and status.st_uid == os.geteuid()
        age_ns = time.time_ns() - changed
        if not is_own or os.listdir(folder):
            return False
        # A file that comes in the same tick of the file system's clock doesn't show in the time.
        is_settled = age_ns > SETTLED_NS and changed % COARSE_NS
        self._empty = state if is_settled else ()
        return True


class _FileState(NamedTuple):
    """The fields that tell one state of a file from another."""

    inode: int
    size: int
    mtime_ns: int


class Mirror:
    """Upload the files of *folder* to *url*, a ``gs://`` prefix."""

    def __init__(self, url: str, folder: str) -> None:
        self._url = url
        self._folder = folder
        bucket, _, prefix = url.removeprefix("gs://").partition("/")
        self._bucket_name, self._prefix = bucket, f"{prefix}/" if prefix else ""
        self._cached_bucket: Any = None
        self._previous: dict[str, _FileState] = {}
        self._uploaded: dict[str, _FileState] = {}
        self._errors: dict[str, str] = {}
        self._finishing = threading.Event()
        self._scanner: threading.Thread | None = None
        self._owner_pid = os.getpid()

    def fetch(self) -> None:
        """Download the files of the prefix, unless they need more than half of the free disk.

        Raises:
            OSError: A download failed.
            RuntimeError: The name of an object can't be the path of a file.
        """
        import shutil  # it maps compression libraries, which every fork would inherit

        blobs = list(self._bucket().list(self._prefix))
        size = sum(blob.size for blob in blobs)
        free = shutil.disk_usage(self._folder).free
        if size > free // 2:
            say(
                f"{self._url} has {size:,} bytes, more than half of the {free:,} bytes that are "
                f"free on the job's disk; the directory {VARIABLE} starts empty"
            )
            return
        _downloads().fetch_under(self._bucket(), self._url, blobs, self._prefix, self._folder)
        self._uploaded = self._list_files()

    def start(self) -> None:
        """Start a thread that calls `scan` every `SCAN_S` seconds."""
        self._scanner = threading.Thread(
            target=self._scan_regularly, name="kinetic-outputs", daemon=True
        )
        self._scanner.start()

    def scan(self) -> None:
        """Upload the new and changed files that the previous scan found in the same state."""
        current = self._list_files()
        self._upload(
            {name: state for name, state in current.items() if self._previous.get(name) == state}
        )
        self._previous = current

    def finish(self, stopping: Stopping, grace: float) -> None:
        """Upload all changed files, and log the names of the files that weren't uploaded.

        If the platform asked the job to end, the upload may take half of *grace* (seconds).
        """
        if os.getpid() != self._owner_pid:
            return  # this is a fork of the job, and the job itself uploads
        self._finishing.set()
        uploader = threading.Thread(
            target=self._upload_all, name="kinetic-outputs-end", daemon=True
        )
        uploader.start()
        while uploader.is_alive():
            uploader.join(0.2)
            # The other half of the grace is for storing the outcome.
            if stopping.requested and time.monotonic() > stopping.since + grace / 2:
                break
        current = self._list_files()
        unsent = sorted(name for name in current if self._uploaded.get(name) != current[name])
        if unsent:
            more_count = len(unsent) - MAX_NAMED_FILES
            more = f" and {more_count} more" if more_count > 0 else ""
            reason = next(
                (f" ({self._errors[name]})" for name in unsent if name in self._errors), ""
            )
            names = ", ".join(unsent[:MAX_NAMED_FILES])
            say(f"these files were not uploaded to {self._url}: {names}{more}{reason}")

    def _scan_regularly(self) -> None:
        while not self._finishing.wait(SCAN_S):
            try:
                self.scan()
            except Exception as exc:  # the job keeps running; `finish` reports missing files
                say(f"can't scan {self._folder}: {exc}")

    def _upload_all(self) -> None:
        if self._scanner is not None:
            self._scanner.join()
        self._upload(self._list_files())

    def _list_files(self) -> dict[str, _FileState]:
        """Return the state of each file by its relative path."""
        files: dict[str, _FileState] = {}
        for parent, _, names in os.walk(self._folder):
            for name in names:
                path = os.path.join(parent, name)
                with contextlib.suppress(OSError):  # the file was deleted meanwhile
                    status = os.stat(path)
                    if stat.S_ISREG(status.st_mode):
                        state = _FileState(status.st_ino, status.st_size, status.st_mtime_ns)
                        files[os.path.relpath(path, self._folder)] = state
        return files

    def _upload(self, files: dict[str, _FileState]) -> None:
        """Upload those *files* that differ from their last upload; keep failures in ``_errors``."""
        changed = [pair for pair in files.items() if self._uploaded.get(pair[0]) != pair[1]]
        if not changed:
            return
        with contextlib.suppress(OSError):  # `_upload_file` reports the error
            self._bucket()  # open the bucket once, before several threads use it
        small = [pair for pair in changed if pair[1].size <= LARGE_BYTES]
        large = [pair for pair in changed if pair[1].size > LARGE_BYTES]
        _downloads().call_all(self._upload_file, small, large, MAX_CONCURRENT)

    def _upload_file(self, name: str, state: _FileState) -> None:
        try:
            path = Path(self._folder, name)
            self._bucket().write(self._prefix + name, path, metadata={}, only_if_absent=False)
        except FileNotFoundError:
            return  # the file was deleted meanwhile
        except (OSError, ValueError) as exc:
            self._errors[name] = str(exc)
        else:
            self._uploaded[name] = state
            self._errors.pop(name, None)

    def _bucket(self) -> Any:
        if self._cached_bucket is None:
            gcs: Any = importlib.import_module("..stores.gcs", __package__)
            names: Any = importlib.import_module("..protocol.gcs_names", __package__)
            self._cached_bucket = gcs.Bucket(names.BucketFolder(self._bucket_name))
        return self._cached_bucket


def _downloads() -> Any:
    # If the warm parent imported this module, every fork would run its thread pools' exit callback.
    return importlib.import_module(".downloads", __package__)
