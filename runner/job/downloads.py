"""Download Data that isn't in kinetic's store: files in other buckets, and datasets."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import urllib.parse
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..protocol.wire import DataRef
    from ..stores.gcs import Bucket
    from .workspace import Site

AT_ONCE = 32
BIG = 32 * 1024 * 1024
"""Download larger objects one by one, each in several concurrent ranges."""


def download(ref: DataRef, folder: str, site: Site) -> str:
    """Download the ``gs://…`` or ``hf://…`` URI of *ref* to the new *folder*; return the path.

    Raises:
        RuntimeError: The source doesn't exist, a name in it isn't a valid file name, or a library
            is missing.
        OSError: The source can't be downloaded, or a file can't be written.
    """
    scheme, _, rest = ref.uri.partition("://")
    if scheme == "gs":
        return _from_bucket(ref, rest, folder)
    if scheme == "hf":
        return _from_hub(ref, rest, folder, site)
    raise RuntimeError(f"{ref.uri} cannot be downloaded: it is neither gs:// nor hf://")


# --- buckets ------------------------------------------------------------------------------


def _from_bucket(ref: DataRef, rest: str, folder: str) -> str:
    gcs: Any = importlib.import_module("..stores.gcs", __package__)
    gcs_names: Any = importlib.import_module("..protocol.gcs_names", __package__)
    bucket_name, _, name = rest.partition("/")
    bucket: Bucket = gcs.Bucket(gcs_names.Place(bucket_name))
    os.mkdir(folder, 0o700)
    if not ref.is_dir:
        found = bucket.find(name)
        if found is None:
            raise RuntimeError(f"there is no object {ref.uri}, or you may not read it")
        _check_space(ref.uri, [found], folder)
        target = f"{folder}/{_relative(ref.uri, name.rpartition('/')[2])}"
        _fetch(bucket, ref.uri, found, target)
        return target
    objects = list(bucket.list(name))
    if not objects:
        raise RuntimeError(f"there is nothing at {ref.uri}, or you may not read it")
    _check_space(ref.uri, objects, folder)
    fetch_under(bucket, ref.uri, objects, name, folder)
    return folder


def fetch_under(bucket: Bucket, uri: str, found: Iterable[Any], prefix: str, folder: str) -> None:
    """Download the objects *found*, which *uri* names, to files in *folder*.

    The names of the objects start with *prefix*; the paths of the files leave it out.

    Raises:
        RuntimeError: The name of an object isn't a valid file name.
        OSError: An object can't be downloaded, or a file can't be written.
    """
    objects: list[tuple[Any, str]] = []
    made: set[str] = set()
    for one in found:
        path = str(one.name)[len(prefix) :]
        if path.rstrip("/") != path or not path:  # consoles create such objects to show a folder
            if path.strip("/"):
                os.makedirs(f"{folder}/{_relative(uri, path.rstrip('/'))}", exist_ok=True)
            continue
        objects.append((one, f"{folder}/{_relative(uri, path)}"))
        made.add(os.path.dirname(objects[-1][1]))
    for parent in sorted(made):
        try:
            os.makedirs(parent, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise _both(uri, parent) from None
    _fetch_all(bucket, uri, objects)


def _fetch_all(bucket: Bucket, uri: str, objects: list[tuple[Any, str]]) -> None:
    small = [one for one in objects if one[0].size <= BIG]
    pool = ThreadPoolExecutor(AT_ONCE, "kinetic-data")
    try:
        running = [pool.submit(_fetch, bucket, uri, found, target) for found, target in small]
        for one in running:
            one.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # the job may have to end now
    for found, target in objects:
        if found.size > BIG:
            _fetch(bucket, uri, found, target)


def _fetch(bucket: Bucket, uri: str, found: Any, target: str) -> None:
    try:
        bucket.fetch(found, Path(target))
    except KeyError:
        words = f"{found.name} of {uri} was deleted or replaced while it was downloaded"
        raise RuntimeError(words) from None
    except (FileExistsError, IsADirectoryError):
        raise _both(uri, target) from None


def _both(uri: str, path: str) -> RuntimeError:
    name = os.path.basename(path)
    return RuntimeError(
        f"{uri} has both an object and a folder {name!r}, and a disk can't hold both; mount it "
        "with fuse=True, or rename one"
    )


def _check_space(uri: str, found: list[Any], folder: str) -> None:
    size = sum(one.size for one in found)
    free = shutil.disk_usage(folder).free
    if size > free:
        raise RuntimeError(
            f"{uri} has {size:,} bytes, and the disk of {folder} has {free:,} left; mount it with "
            "fuse=True instead of copying it"
        )


def _relative(uri: str, path: str) -> str:
    if "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise RuntimeError(f"{path!r} of {uri} can't be the name of a file; mount it instead")
    return path


# --- Hugging Face -------------------------------------------------------------------------


def _from_hub(ref: DataRef, rest: str, folder: str, site: Site) -> str:
    """Save the dataset with the library `datasets`; without it, download the repository's files."""
    name, _, query = rest.partition("?")
    options = {key: values[0] for key, values in urllib.parse.parse_qs(query).items()}
    name = name.rstrip("/")
    if importlib.util.find_spec("datasets") is not None:
        library: Any = importlib.import_module("datasets")
        wanted = {"name": options.get("config_name"), "split": options.get("split")}
        wanted["revision"] = options.get("revision")
        trust = {"trust_remote_code": True} if ref.trust_remote_code else {}
        given = {key: value for key, value in wanted.items() if value is not None}
        library.load_dataset(name, **given, **trust).save_to_disk(folder)
        return folder
    if ref.trust_remote_code or not options.keys() <= {"revision"}:
        raise RuntimeError(_missing("datasets", ref.uri, site))
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise RuntimeError(_missing("datasets or huggingface_hub", ref.uri, site)) from None
    hub.snapshot_download(
        name, repo_type="dataset", revision=options.get("revision"), local_dir=folder
    )
    return folder


def _missing(library: str, uri: str, site: Site) -> str:
    return f"{uri} needs {library} where the job runs: {site.install_advice('it')}"
