"""``KINETIC_OUTPUT_PATH``: a local directory for the job's output files.

If the job's output directory is a local path, the job writes there directly. If it is a prefix in
a bucket, the job gets a local folder with the files of the prefix. kinetic uploads a new file when
two scans find it unchanged, and all other files at the end of the job. A file that the job deletes
stays in the bucket.
"""

from __future__ import annotations

import importlib
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..protocol import private

if TYPE_CHECKING:
    from ..protocol.wire import Order
    from .processes import Stopping

VARIABLE = "KINETIC_OUTPUT_PATH"
LOOK_S = 30.0
"""Seconds between two scans."""

AT_ONCE = 16
BIG = 1024 * 1024
"""Upload larger files one by one, because each upload takes memory of the job."""

NAMED = 5
"""How many of the files that were not uploaded a message names."""

SHARE = 0.5
"""The share of a job's grace that uploads may take; the rest is for storing the outcome."""


def begin(order: Order, host: int, hosts: int, work: str | os.PathLike[str]) -> Mirror | None:
    """Prepare this host's output directory; return a `Mirror` if it is in a bucket.

    Raises:
        OSError: The directory can't be made, or its files can't be downloaded.
        RuntimeError: An object can't become a file.
    """
    place = f"{order.output_dir}/hosts/{host}" if hosts > 1 else order.output_dir
    os.environ.pop(VARIABLE, None)
    if place.startswith("/"):
        private.make_folder(place)
        os.environ[VARIABLE] = place
    elif place.startswith("gs://"):
        folder = f"{os.fspath(work)}/output"
        os.mkdir(folder, 0o700)
        mirror = Mirror(place, folder)
        own = f"{order.store}/outputs/{order.group_id or order.job_id}"
        if order.attempt > 1 or not order.output_dir.startswith(own):
            mirror.fetch()  # otherwise no process has written there yet
        os.environ[VARIABLE] = folder
        mirror.start()
        return mirror
    return None


class _Seen(NamedTuple):
    """The fields that tell one state of a file from another."""

    number: int
    size: int
    changed: int


class Mirror:
    """Upload the files of *folder* to *place*, a ``gs://`` prefix."""

    def __init__(self, place: str, folder: str) -> None:
        self._place = place
        self._folder = folder
        bucket, _, prefix = place.removeprefix("gs://").partition("/")
        self._bucket_name, self._prefix = bucket, f"{prefix}/" if prefix else ""
        self._opened: Any = None
        self._before: dict[str, _Seen] = {}
        self._sent: dict[str, _Seen] = {}
        self._why: dict[str, str] = {}
        self._over = threading.Event()
        self._looking: threading.Thread | None = None
        self._process = os.getpid()

    def fetch(self) -> None:
        """Download the files of the prefix, unless they need more than half of the free disk.

        Raises:
            OSError: A download failed.
            RuntimeError: An object can't become a file.
        """
        import shutil  # it maps compression libraries, which every fork would inherit

        downloads: Any = importlib.import_module(".downloads", __package__)
        found = list(self._bucket().list(self._prefix))
        size = sum(one.size for one in found)
        free = shutil.disk_usage(self._folder).free
        if size > free // 2:
            _say(
                f"{self._place} has {size:,} bytes, and the job's disk has {free:,} left; "
                f"{VARIABLE} starts empty"
            )
            return
        downloads.fetch_under(self._bucket(), self._place, found, self._prefix, self._folder)
        self._sent, _ = self._found()

    def start(self) -> None:
        """Start to scan every 30 s."""
        self._looking = threading.Thread(target=self._look_on, name="kinetic-outputs", daemon=True)
        self._looking.start()

    def look(self) -> None:
        """Upload the changed files that have not changed since the last scan."""
        now, _ = self._found()
        self._send({name: seen for name, seen in now.items() if self._before.get(name) == seen})
        self._before = now

    def finish(self, stopping: Stopping, grace: float) -> None:
        """Upload all changed files, and report those that fail.

        A job that was asked to end spends at most half of its *grace* on this.
        """
        if os.getpid() != self._process:
            return  # a fork of the user's code has no thread that uploads
        self._over.set()
        last = threading.Thread(target=self._send_all, name="kinetic-outputs-end", daemon=True)
        last.start()
        while last.is_alive():
            last.join(0.2)
            if stopping.requested and time.monotonic() > stopping.since + grace * SHARE:
                break
        now, others = self._found()
        left = sorted(name for name, seen in now.items() if self._sent.get(name) != seen) + others
        if left:
            more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
            why = next((f" ({self._why[name]})" for name in left if name in self._why), "")
            _say(f"not uploaded to {self._place}: {', '.join(left[:NAMED])}{more}{why}")

    def _look_on(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                self.look()
            except Exception as exc:  # the job keeps running; `finish` reports missing files
                _say(f"can't scan {self._folder}: {exc}")

    def _send_all(self) -> None:
        if self._looking is not None:
            self._looking.join()
        self._send(self._found()[0])

    def _found(self) -> tuple[dict[str, _Seen], list[str]]:
        """Return the files, and the entries that can't be uploaded, such as links to folders."""
        files: dict[str, _Seen] = {}
        others: list[str] = []
        for parent, folders, names in os.walk(self._folder):
            links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
            for name in (*names, *links):
                path = os.path.join(parent, name)
                relative = os.path.relpath(path, self._folder)
                try:
                    about = os.stat(path)
                except FileNotFoundError:
                    if os.path.islink(path):
                        others.append(f"{relative} (a link to nothing)")
                    continue  # the file was deleted meanwhile
                except OSError as exc:
                    others.append(f"{relative} ({exc.strerror})")
                    continue
                if stat.S_ISREG(about.st_mode):
                    files[relative] = _Seen(about.st_ino, about.st_size, about.st_mtime_ns)
                else:
                    others.append(f"{relative} (no regular file)")
        return files, others

    def _send(self, files: dict[str, _Seen]) -> None:
        new = [(name, seen) for name, seen in files.items() if self._sent.get(name) != seen]
        if not new:
            return
        try:
            self._bucket()  # open the bucket once, before several threads use it
        except OSError as exc:
            self._why.update({name: str(exc) for name, _ in new})
            return
        from concurrent.futures import ThreadPoolExecutor  # every fork would run its exit callback

        pool = ThreadPoolExecutor(AT_ONCE, "kinetic-outputs")
        try:
            small = [pool.submit(self._send_one, *one) for one in new if one[1].size <= BIG]
            for sending in small:
                sending.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        for name, seen in new:
            if seen.size > BIG:
                self._send_one(name, seen)

    def _send_one(self, name: str, seen: _Seen) -> None:
        bucket = self._bucket()
        try:
            path = Path(self._folder, name)
            bucket.write(bucket.blob(self._prefix + name), path, metadata={}, absent=False)
        except FileNotFoundError:
            return  # the file was deleted meanwhile
        except (OSError, ValueError) as exc:
            self._why[name] = str(exc)
        else:
            self._sent[name] = seen
            self._why.pop(name, None)

    def _bucket(self) -> Any:
        if self._opened is None:
            gcs: Any = importlib.import_module("..stores.gcs", __package__)
            names: Any = importlib.import_module("..protocol.gcs_names", __package__)
            self._opened = gcs.Bucket(names.Place(self._bucket_name))
        return self._opened


def _say(words: str) -> None:
    print(f"kinetic: {words}", file=sys.stderr, flush=True)
