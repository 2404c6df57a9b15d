"""Download Data that isn't in kinetic's store: files in other buckets, and datasets."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import urllib.parse
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..protocol.wire import DataRef
    from ..stores.gcs import Bucket
    from .workspace import JobPlace

MAX_CONCURRENT = 32
LARGE_BYTES = 32 * 1024 * 1024
"""Download larger objects one by one, each in several concurrent ranges."""


def download(ref: DataRef, folder: str, place: JobPlace) -> str:
    """Download the ``gs://…`` or ``hf://…`` URI of *ref* to the empty *folder*; return the path.

    Raises:
        RuntimeError: The source doesn't exist, a name in it isn't a valid file name, or a library
            is missing.
        OSError: The source can't be downloaded, or a file can't be written.
    """
    scheme, _, location = ref.uri.partition("://")
    if scheme == "gs":
        return _from_bucket(ref, location, folder)
    if scheme == "hf":
        return _from_hub(ref, location, folder, place)
    raise RuntimeError(f"{ref.uri} cannot be downloaded: it is neither gs:// nor hf://")


# --- buckets ------------------------------------------------------------------------------


def _from_bucket(ref: DataRef, location: str, folder: str) -> str:
    """Download the object or the prefix *location* (``bucket/name``); return the path."""
    gcs: Any = importlib.import_module("..stores.gcs", __package__)
    gcs_names: Any = importlib.import_module("..protocol.gcs_names", __package__)
    bucket_name, _, name = location.partition("/")
    bucket: Bucket = gcs.Bucket(gcs_names.BucketFolder(bucket_name))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if not ref.is_dir:
        blob = bucket.find(name)
        if blob is None:
            raise RuntimeError(f"there is no object {ref.uri}, or the job may not read it")
        _check_space(ref.uri, [blob], folder)
        target = f"{folder}/{_checked_path(ref.uri, name.rpartition('/')[2])}"
        _fetch(bucket, ref.uri, blob, target)
        return target
    objects = list(bucket.list(name))
    if not objects:
        raise RuntimeError(f"there are no objects under {ref.uri}, or the job may not read them")
    _check_space(ref.uri, objects, folder)
    fetch_under(bucket, ref.uri, objects, name, folder)
    return folder


def fetch_under(bucket: Bucket, uri: str, blobs: Iterable[Any], prefix: str, folder: str) -> None:
    """Download the objects *blobs*, which *uri* names, to files in *folder*.

    The names of the objects start with *prefix*; the paths of the files leave it out.

    Raises:
        RuntimeError: The name of an object isn't a valid file name.
        OSError: An object can't be downloaded, or a file can't be written.
    """
    objects: list[tuple[Any, str]] = []
    folders: set[str] = set()
    for blob in blobs:
        path = str(blob.name)[len(prefix) :]
        if path.rstrip("/") != path or not path:  # consoles show such an object as a folder
            if path.strip("/"):
                os.makedirs(f"{folder}/{_checked_path(uri, path.rstrip('/'))}", exist_ok=True)
            continue
        objects.append((blob, f"{folder}/{_checked_path(uri, path)}"))
        folders.add(os.path.dirname(objects[-1][1]))
    for parent in sorted(folders):
        try:
            os.makedirs(parent, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise _name_conflict(uri, parent) from None
    small = [pair for pair in objects if pair[0].size <= LARGE_BYTES]
    large = [pair for pair in objects if pair[0].size > LARGE_BYTES]
    call_all(functools.partial(_fetch, bucket, uri), small, large, MAX_CONCURRENT)


def call_all(
    transfer: Callable[[Any, Any], object],
    small: Iterable[tuple[Any, Any]],
    large: Iterable[tuple[Any, Any]],
    workers: int,
) -> None:
    """Call *transfer* with the *small* pairs concurrently, then with the *large* ones in turn."""
    pool = ThreadPoolExecutor(workers, "kinetic-transfers")
    try:
        for running in [pool.submit(transfer, *pair) for pair in small]:
            running.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after an error, don't wait
    for pair in large:
        transfer(*pair)


def _fetch(bucket: Bucket, uri: str, blob: Any, target: str) -> None:
    try:
        bucket.fetch(blob, Path(target))
    except KeyError:
        message = f"{blob.name} of {uri} was deleted or replaced while it was downloaded"
        raise RuntimeError(message) from None
    except (FileExistsError, IsADirectoryError):
        raise _name_conflict(uri, target) from None


def _name_conflict(uri: str, path: str) -> RuntimeError:
    name = os.path.basename(path)
    return RuntimeError(
        f"{uri} has both an object and a folder {name!r}, and a disk can't hold both; rename one, "
        "or pass fuse=True if it is a Data"
    )


def _check_space(uri: str, blobs: list[Any], folder: str) -> None:
    size = sum(blob.size for blob in blobs)
    free = shutil.disk_usage(folder).free
    if size > free:
        raise RuntimeError(
            f"{uri} has {size:,} bytes, and the disk of {folder} has {free:,} bytes free; pass "
            "fuse=True to mount the Data instead of copying it"
        )


def _checked_path(uri: str, path: str) -> str:
    if "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise RuntimeError(
            f"{path!r} of {uri} can't be the name of a file; rename the object, or pass fuse=True "
            "if it is a Data"
        )
    return path


# --- Hugging Face -------------------------------------------------------------------------


def _from_hub(ref: DataRef, location: str, folder: str, place: JobPlace) -> str:
    """Save a dataset with the library `datasets`; without it, download the repository's files."""
    name, _, query = location.partition("?")
    options = {key: values[0] for key, values in urllib.parse.parse_qs(query).items()}
    name = name.rstrip("/")
    if importlib.util.find_spec("datasets") is not None:
        library: Any = importlib.import_module("datasets")
        wanted = {"name": options.get("config_name"), "split": options.get("split")}
        wanted["revision"] = options.get("revision")
        trust = {"trust_remote_code": True} if ref.trust_remote_code else {}
        arguments = {key: value for key, value in wanted.items() if value is not None}
        library.load_dataset(name, **arguments, **trust).save_to_disk(folder)
        return folder
    if ref.trust_remote_code or not options.keys() <= {"revision"}:
        raise RuntimeError(_missing_library_message("datasets", ref.uri, place))
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise RuntimeError(
            _missing_library_message("datasets or huggingface_hub", ref.uri, place)
        ) from None
    hub.snapshot_download(
        name, repo_type="dataset", revision=options.get("revision"), local_dir=folder
    )
    return folder


def _missing_library_message(library: str, uri: str, place: JobPlace) -> str:
    return f"{uri} needs {library} where the job runs: {place.install_advice('it')}"
