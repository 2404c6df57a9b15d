"""Fixtures for trees on disk, a directory store, and jobs in real processes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.job import namespace, workspace
from kinetic._runner.protocol import wire
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic.aio._preparing import data_upload
from kinetic.aio.local.store import DirectoryStore
from kinetic.data import Data

# Ask before there are threads, because this forks.
NAMESPACE = namespace.available()
ROOT = Path(__file__).parents[2]
NOBODY = 65534

SCRIPT = """
import ctypes, errno, json, os, platform, resource, shutil, stat, subprocess, sys, tempfile
import threading, zipfile
from pathlib import Path
job = json.load(sys.stdin)
sys.path.insert(0, job["root"])
from kinetic._runner.stores import directory
from kinetic._runner.job import namespace
from kinetic._runner.job import workspace as trees
from kinetic._runner.job import views
from kinetic._runner.protocol import stand_ins, wire
from kinetic._runner.job import workspace
if job["uid"] is not None:
    os.setgroups([])
    os.setresgid(job["uid"], job["uid"], job["uid"])
    os.setresuid(job["uid"], job["uid"], job["uid"])
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # dumpable, like a process after exec
refs = [wire.DataRef(**ref) for ref in job["refs"]]
code = wire.Code.of(job["code"]) if job["code"] else None
place = workspace.JobPlace(work=Path(job["work"]), cache=Path(job["cache"]), mounts=job["mounts"])
objects = directory.DirectoryObjects(Path(job["store"]))
answer = {}
try:
    exec(job["before"])
    views.prepare(refs, objects, place)
    workspace.prepare(code, objects, place)
    paths = [stand_ins.data_path(k) for k in range(len(refs))]
    exec(job["body"])
except Exception as error:
    answer["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(answer))
"""


@dataclass
class Machine:
    """One machine: its directories and the user that runs its jobs."""

    folder: Path
    uid: int | None = None
    runs: int = field(default=0, init=False)

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def objects(self) -> DirectoryObjects:
        return DirectoryObjects(self.store)

    def own(self, *paths: Path) -> None:
        """Make the user of the jobs the owner of *paths* and all below."""
        if self.uid is None:
            return
        for path in paths:
            os.chown(path, self.uid, self.uid)
            for folder, folders, files in os.walk(path):
                for name in (*folders, *files):
                    os.chown(os.path.join(folder, name), self.uid, self.uid, follow_symlinks=False)

    def start(
        self,
        body: str,
        *refs: wire.DataRef,
        code: wire.Code | None = None,
        mounts: bool = True,
        before: str = "",
    ) -> subprocess.Popen[str]:
        """Start a job that prepares its views and then executes *body*."""
        self.runs += 1
        work = self.folder / f"work-{self.runs}"
        work.mkdir()
        self.own(self.folder)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        order = {
            "root": str(ROOT),
            "uid": self.uid,
            "refs": [asdict(ref) for ref in refs],
            "code": asdict(code) if code else None,
            "work": str(work),
            "cache": str(self.cache),
            "store": str(self.store),
            "mounts": mounts,
            "before": textwrap.dedent(before),
            "body": textwrap.dedent(body),
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(order))
        process.stdin.close()
        process.stdin = None
        return process

    def run(self, body: str, *refs: wire.DataRef, **options: Any) -> dict[str, Any]:
        """Run a job and return the ``answer`` that *body* filled."""
        process = self.start(body, *refs, **options)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        return json.loads(output.splitlines()[-1])

    def place(self) -> workspace.JobPlace:
        """Make the place of a job that runs in this process, which may not mount."""
        self.runs += 1
        work = self.folder / f"work-{self.runs}"
        work.mkdir()
        return workspace.JobPlace(work=work, cache=self.cache, mounts=False)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine whose jobs run as this user."""
    folder = tmp_path / "machine"
    folder.mkdir()
    return Machine(folder)


@pytest.fixture
def store(machine: Machine) -> DirectoryStore:
    """Return the store of `machine`."""
    return DirectoryStore(machine.store)


Tree = Mapping[str, "bytes | None"]
MakeTree = Callable[..., Path]


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """Return a function that writes files; the content ``None`` makes an empty directory."""

    def make_tree(name: str, tree: Tree, executable: Sequence[str] = ()) -> Path:
        root = tmp_path / name
        root.mkdir(parents=True)
        for path, content in tree.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                target.mkdir(exist_ok=True)
            else:
                target.write_bytes(content)
                target.chmod(0o755 if path in executable else 0o644)
        return root

    return make_tree


Ship = Callable[..., Awaitable[wire.DataRef]]


@pytest.fixture
def ship(store: DirectoryStore, make_tree: MakeTree) -> Ship:
    """Return a function that uploads a path or a new tree; *mount* makes it a volume."""
    count = itertools.count(1)

    async def ship(
        source: Path | Tree, mount: str | None = None, *, file: str = "", **options: Any
    ) -> wire.DataRef:
        root = source if isinstance(source, Path) else make_tree(f"tree-{next(count)}", source)
        ref = await data_upload.upload(store, Data(str(root / file), **options))
        return replace(ref, mount=mount)

    return ship
