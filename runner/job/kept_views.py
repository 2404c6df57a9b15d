"""The views of Data in a container whose items run one after another.

An item finds the views of the item before it, unless that one has changed them. So a worker
downloads Data once, and no item sees what another has written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from . import processes, spares

if TYPE_CHECKING:
    from ..protocol.wire import DataRef


class View:
    """View number *number* of an item, which shows *ref*.

    ``folder`` is where its content lies if it isn't a volume, and ``path`` is the path of the
    content.
    """

    def __init__(self, cache: str, number: int, ref: DataRef) -> None:
        self._own = f"{cache}/views/{number}"
        self._record = f"{self._own}/record"
        self._ref = json.dumps(asdict(ref))
        self.folder = f"{self._own}/content"
        self.path = self._root = self._state = ""
        if os.path.exists(self._record):
            with open(self._record) as file:
                known_ref, *known = json.load(file)
            if known_ref == self._ref:
                self.path, self._root, self._state = known

    def is_unchanged(self) -> bool:
        """Return whether the content is there as it was downloaded."""
        try:
            return bool(self._state) and _state_of(self._root)[0] == self._state
        except OSError:
            return False

    def clear(self) -> None:
        """Remove the content that an earlier item has downloaded, perhaps not all of it."""
        for path in filter(None, (self.folder, self._root)):
            processes.remove(path)  # of a mount point, only what is in it

    def begin(self, root: str) -> None:
        """Note that the content will be in *root*, a file or an empty folder."""
        os.makedirs(self._own, mode=0o700, exist_ok=True)
        self._root, self._state = root, ""
        self._write()

    def keep(self) -> None:
        """Let later items use the content as it is now."""
        folder = self._root if os.path.isdir(self._root) else os.path.dirname(self._root)
        if not spares.can_keep(folder):
            return  # a later item couldn't see each change
        self._state, newest = _state_of(self._root)
        if not spares.wait_past(newest, self._record):
            self._state = ""
        self._write()

    def _write(self) -> None:
        new = f"{self._record}.new"
        with open(new, "w") as file:
            json.dump([self._ref, self.path, self._root, self._state], file)
        os.replace(new, self._record)  # the item may be killed at any moment


def _state_of(root: str) -> tuple[str, int]:
    """Return a digest of the states of all files in *root*, and the time of the last change.

    Raises:
        OSError: There is no such file or folder.
    """
    if os.path.isdir(root):
        record = spares.take_record(root)
    else:
        record = spares.Record({}, {"": spares.state_of(os.lstat(root))})
    return hashlib.sha256(json.dumps(record).encode()).hexdigest(), record.newest


def discard_from(cache: str, number: int) -> None:
    """Remove the views from *number* on, which only earlier items have."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(f"{cache}/views"):
            if int(name) >= number:
                processes.remove(f"{cache}/views/{name}")
