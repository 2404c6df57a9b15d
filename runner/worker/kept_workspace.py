"""The workspace of a worker whose items must all find the project as it was submitted.

The worker copies the project once. Between two items, it restores what the last one has changed.
The kernel tells whether there is anything (see `Watch`). If it can't, the worker takes the
workspace as a job takes that of the job before it (see `spares`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..job import spares, temporary, workspace
from ..job.processes import LINUX
from .watch import Watch

if TYPE_CHECKING:
    from ..protocol.wire import Code
    from ..stores.objects import Objects

_BYTECODE = f"/{spares.BYTECODE}"

SPARE_OUTPUT = "spare-output"
"""The name, beside the workspace, of an empty output directory; see `outputs.SpareFolder`."""


class KeptWorkspace:
    """The workspace in the folder of *place*, which must be empty, or a spare of the project.

    Making it changes the working directory and ``sys.path`` of this process; see
    `workspace.prepare`, also for the errors. *watches* says whether to use `Watch`.
    """

    def __init__(
        self,
        code: Code | None,
        objects: Objects,
        place: workspace.JobPlace,
        *,
        watches: bool = LINUX,
    ) -> None:
        self._code = code
        self._objects = objects
        # In a mount, nothing would show what an item has changed.
        self._place = replace(place, mounts=False)
        self._work = os.fspath(place.work)
        self._root = f"{self._work}/{spares.WORKSPACE}"
        self._own_entries = {spares.WORKSPACE, temporary.LINK, SPARE_OUTPUT}
        if code is not None:
            self._own_entries.add(code.digest + spares.RECORD)
        workspace.prepare(code, objects, self._place)
        self._watch: Watch | None = None
        if watches:
            with contextlib.suppress(OSError):  # then each restore compares all files
                self._watch = Watch(self._root)
        self._take_record()
        self._is_untouched = True

    def descriptors(self) -> list[int]:
        """Return what no process of an item may keep open."""
        return [] if self._watch is None else [self._watch.fileno()]

    def restore(self) -> None:
        """Make the workspace as it was submitted; call this before each item, without processes.

        Raises:
            OSError: The files can't be written.
            RuntimeError: The project is no longer in the store.
        """
        if self._is_untouched:
            self._is_untouched = False
            return
        self._remove_others()
        changed = None if self._watch is None else self._watch.changes()
        if changed is not None and (not changed or self._bring_back(changed)):
            return
        if changed is not None or self._code is None or not self._place.reusable:
            self._discard(self._root)  # otherwise a record shows what differs
        workspace.make(self._code, self._objects, self._place)
        self._remove_others()
        self._take_record()

    def _bring_back(self, changed: Collection[str]) -> bool:
        """Restore what differs in the folders with changes; return False if that isn't possible."""
        within, folders = None, self._record.folders
        if folders.keys().isdisjoint(changed):
            within = {path.rpartition("/")[0].removesuffix(_BYTECODE) for path in changed}
        umask = os.umask(0)
        try:
            if os.path.islink(self._root):  # an item has put a link in its place
                return False
            copied = spares.bring_back(self._root, self._record, self._fill, changed, within)
        except OSError:  # an item's file can't be removed
            return False
        finally:
            os.umask(umask)
        for path in copied:
            self._record.files[path] = spares.state_of(os.lstat(self._root + path))
        self._watch_folders(folders if within is None else within)
        return True

    def _fill(self, missing: Iterable[str]) -> None:
        assert self._code is not None
        workspace.fill(self._code, self._objects, self._place, missing)

    def _take_record(self) -> None:
        if self._watch is not None:
            self._record = spares.take_record(self._root)
            self._watch_folders(self._record.folders)

    def _watch_folders(self, folders: Iterable[str]) -> None:
        """Watch *folders*, which may be new, from now on."""
        assert self._watch is not None
        try:
            for folder in folders:
                self._watch.add((folder, folder + _BYTECODE))
        except OSError:  # then each restore compares all files
            self._watch.close()
            self._watch = None
        else:
            self._watch.changes()  # what this process has changed

    def _remove_others(self) -> None:
        """Remove what the last item has left beside the workspace."""
        for name in os.listdir(self._work):
            if name not in self._own_entries:
                self._discard(f"{self._work}/{name}")

    def _discard(self, path: str) -> None:
        """Remove a file or folder, or at least its name."""
        import shutil  # it maps compression libraries, which every fork would inherit

        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
        if os.path.lexists(path):
            os.rename(path, f"{self._work}/removed-{os.urandom(4).hex()}")
