"""A job's views of its Data: private files and directories, and volumes.

A view is a copy, or an overlay if the content is large. No other job sees what a job writes
to its view. In a local run, a Data with ``fuse=True`` from kinetic's store becomes a read-only
mount, or a copy if the job can't mount. In a pod, the cluster mounts each Data with ``fuse=True``
before the job starts, and kinetic writes the content of a volume directly to its path.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..protocol import manifest, stand_ins
from ..protocol.manifest import Manifest
from . import kept_views, namespace, workspace

if TYPE_CHECKING:
    from ..protocol.wire import DataRef
    from ..stores.objects import Objects
    from .workspace import JobPlace

FUSE_FOLDER = "/_kinetic/fuse-data"
"""The folder in a pod's container with the numbered mounts of ``fuse`` Data that are arguments."""

SMALL_BYTES = 1 << 18
"""Read a file up to this size in one request."""

KERNEL_FOLDERS = ("/proc", "/sys", "/dev")


def prepare(refs: Sequence[DataRef], objects: Objects, place: JobPlace, *, first: int = 0) -> None:
    """Give this process a private view of each Data, and show volumes at their paths.

    If there are volumes, the process must not have started threads yet. In a file system that only
    this job uses, the views are those of the job before it in this place, unless that one has
    changed them; the number of the first is *first*.

    Raises:
        RuntimeError: A Data is missing in the store or can't be mounted, or a volume's path
            can't be used.
        ValueError: The content differs from what was submitted.
        OSError: The disk is full, or the kernel refuses a mount.
    """
    if place.exclusive:
        paths = _fill_in_place(refs, objects, place, first)
    else:
        paths = _mount_views(refs, objects, place)
    stand_ins.data_paths[:] = paths


def _mount_views(refs: Sequence[DataRef], objects: Objects, place: JobPlace) -> list[str]:
    """Make a view of each Data in the job's directory, and mount the volumes; return the paths."""
    if any(ref.mount is not None for ref in refs):
        _enter_namespace(place)
    volumes: dict[str, str] = {}
    paths: list[str] = []
    for index, ref in enumerate(refs):
        view = _make_view(ref, objects, place, os.path.join(place.work, "data", str(index)))
        if ref.mount is None:
            paths.append(view)
            continue
        point = os.path.normpath(ref.mount)
        _check_point(point, objects, place)
        source = view if ref.is_dir or _names_file(ref, point) else os.path.dirname(view)
        if volumes.setdefault(point, source) != source:
            raise RuntimeError(f"two volumes have the same path, {point}")
        paths.append(point + view.removeprefix(source))
    if volumes:
        namespace.mount_volumes(volumes, os.fspath(place.work))
    return paths


def _fill_in_place(
    refs: Sequence[DataRef], objects: Objects, place: JobPlace, first: int
) -> list[str]:
    """Write each Data to its path in a file system that only this job uses; return the paths."""
    paths = _fuse_paths(refs)
    cache = os.fspath(place.cache)
    filled: list[kept_views.View] = []
    # Start with the outer volumes: their folders must be empty, and inner volumes would fill them.
    for index, ref in sorted(enumerate(refs), key=lambda pair: pair[1].mount or ""):
        if index in paths:
            continue
        view = kept_views.View(cache, first + index, ref)
        if not view.is_unchanged():
            _fill(view, ref, objects, place)
            filled.append(view)
        paths[index] = view.path
    for view in filled:  # an outer volume contains the inner ones
        view.keep()
    kept_views.discard_from(cache, first + len(refs))
    return [paths[index] for index in range(len(refs))]


def _fill(view: kept_views.View, ref: DataRef, objects: Objects, place: JobPlace) -> None:
    """Write the content of *ref* to its path, in place of what an earlier item has left."""
    view.clear()
    folder = root = view.folder
    if ref.mount is not None:
        point = os.path.normpath(ref.mount)
        _check_point(point, objects, place)
        folder = root = os.path.dirname(point) if _names_file(ref, point) else point
        _make_volume_folder(folder, must_be_empty=ref.is_dir)
        if os.listdir(folder):  # other files of the image
            root = f"{folder}/{_file_name(ref)}"
    view.begin(root)
    view.path = _make_view(ref, objects, place, folder)


def _make_volume_folder(folder: str, *, must_be_empty: bool) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        if must_be_empty and os.listdir(folder):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), folder)
    except OSError as exc:
        raise RuntimeError(
            f"a volume cannot be at {folder}: {exc.strerror}; choose a path that doesn't exist in "
            "the image and that its user may create, or pass the Data as an argument"
        ) from exc


def _fuse_paths(refs: Sequence[DataRef]) -> dict[int, str]:
    """Map the index in *refs* of each ``fuse`` Data to its path in the container.

    The n-th ``fuse`` Data, counted from 0, is at its mount path or ``{FUSE_FOLDER}/{n}``.
    """
    paths: dict[int, str] = {}
    for number, index in enumerate(index for index, ref in enumerate(refs) if ref.fuse):
        ref = refs[index]
        folder = ref.mount or f"{FUSE_FOLDER}/{number}"
        if not os.path.isdir(folder):
            raise RuntimeError(
                f"{ref.uri} isn't mounted at {folder}; check that the cluster has "
                "the Cloud Storage FUSE driver, or leave out fuse=True"
            )
        paths[index] = folder if ref.is_dir else f"{folder}/{_file_name(ref)}"
    return paths


def _enter_namespace(place: JobPlace) -> None:
    try:
        if not place.mounts:
            raise OSError("mounts are switched off here")
        namespace.enter()
    except OSError as exc:
        raise RuntimeError(
            f"volumes need a private mount namespace, which this machine doesn't allow ({exc}); "
            "pass the Data as an argument instead: the function then gets its path"
        ) from exc


def _names_file(ref: DataRef, point: str) -> bool:
    """Return whether the mount *point* is the path of the single file *ref* itself.

    Otherwise *point* is a directory: the Data itself, or the folder that contains its single file.
    """
    named = not ref.is_dir and os.path.basename(point) == _file_name(ref)
    return named and not os.path.isdir(point)


def _file_name(ref: DataRef) -> str:
    return ref.name or ref.uri.rpartition("/")[2]


def _check_point(point: str, objects: Objects, place: JobPlace) -> None:
    """Raise RuntimeError if a volume at *point* would hide files of the kernel or the job."""
    real_path = os.path.realpath(point)
    if not os.path.isabs(point) or real_path == "/":
        raise RuntimeError(f"a volume cannot be at {point!r}; use a path like /data")
    if any(_contains(folder, real_path) for folder in KERNEL_FOLDERS) and not _contains(
        "/dev/shm", real_path
    ):
        raise RuntimeError(f"a volume cannot be at {point}: the kernel's own files are there")
    own_paths = [place.work, place.cache, getattr(objects, "root", place.work)]
    for path in (*own_paths, sys.prefix, os.__file__):
        if _contains(real_path, os.path.realpath(path)):
            raise RuntimeError(f"a volume at {point} would hide {path}, which the job needs")
    if any(_contains(os.path.realpath(path), real_path) for path in own_paths):
        raise RuntimeError(f"a volume cannot be at {point}: kinetic keeps its own files there")


def _contains(folder: str, path: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _make_view(ref: DataRef, objects: Objects, place: JobPlace, folder: str) -> str:
    """Fill the private *folder* with the content of *ref*; return the path of the content."""
    os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
    if "://" in ref.uri:
        downloads: Any = importlib.import_module(".downloads", __package__)
        path: str = downloads.download(ref, folder, place)
        return path
    content = _read_manifest(ref, objects)
    weight = workspace.Weight(len(content.entries), content.size)
    read_only = ref.fuse and _can_mount(place)
    if read_only or workspace.worth_mounting(weight, mounts=place.mounts):
        suffix = ref.uri.rpartition("/")[2].removeprefix("manifest")
        cache_folder = os.path.join(place.cache, "data", ref.digest + suffix)
        tree = workspace.shared_tree(cache_folder, lambda part: _build(part, ref, content, objects))
        if read_only:
            os.mkdir(folder, 0o700)
            namespace.bind(tree.path, folder, read_only=True)
        else:
            layers = os.path.join(place.work, "layers", f"data-{os.path.basename(folder)}")
            workspace.make_view(tree, folder, layers, mounts=place.mounts)
    else:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        _build(folder, ref, content, objects)
    return folder if content.is_dir else f"{folder}/{content.entries[0].path}"


def _can_mount(place: JobPlace) -> bool:
    """Enter a private mount namespace if possible; return whether this process is in one."""
    try:
        _enter_namespace(place)
    except RuntimeError:
        return False
    return True


def _read_manifest(ref: DataRef, objects: Objects) -> Manifest:
    """Read the manifest of *ref*, and verify its hash."""
    try:
        content = Manifest.from_bytes(objects.get(ref.uri)[0])
    except KeyError:
        raise _missing_error(ref.uri) from None
    identity = (content.content_hash(), content.name(ref.digest), content.is_dir)
    if identity != (ref.digest, ref.uri, ref.is_dir) or not (ref.is_dir or content.entries):
        raise ValueError(f"{ref.uri} is not what was submitted: its hash differs")
    return content


def _build(folder: str, ref: DataRef, content: Manifest, objects: Objects) -> workspace.Weight:
    """Fill the empty directory *folder* from the store, and verify the digest of each file."""
    created = {""}
    for entry, name in content.objects(ref.digest):
        parent = entry.path.rpartition("/")[0]
        if parent not in created:
            os.makedirs(f"{folder}/{parent}", exist_ok=True)
            created.add(parent)
        try:
            _build_file(f"{folder}/{entry.path}", entry, name, objects)
        except KeyError:
            raise _missing_error(name) from None
    for path in content.empty:
        os.makedirs(f"{folder}/{path}", exist_ok=True)
    return workspace.Weight(len(content.entries), content.size)


def _build_file(target: str, entry: manifest.Entry, name: str, objects: Objects) -> None:
    """Write the object *name* to the new file *target*, and verify its digest."""
    source = objects.path(name) if entry.size > SMALL_BYTES else None
    digest = manifest.file_hash(entry.path)
    if entry.size <= SMALL_BYTES:
        body = objects.get(name, 0, SMALL_BYTES + 1)[0]
        digest.update(body)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, entry.mode)
        with open(fd, "wb") as file:
            file.write(body)
    else:
        if source is None:
            objects.fetch(name, Path(target), entry.size)
            os.chmod(target, entry.mode)
        else:
            workspace.copy_file(os.fspath(source), target, entry.mode)
        with open(target, "rb", buffering=0) as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    if digest.hexdigest() != entry.digest:
        raise ValueError(f"{name} is not what was submitted: its SHA-256 differs")


def _missing_error(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} is no longer in the store; delete all objects under "
        f"{'/'.join(name.split('/')[:2])}/ and submit again: kinetic then uploads the Data again"
    )
