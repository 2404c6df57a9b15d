"""Files and directories for jobs."""

from __future__ import annotations

import copy
import os
import re
import threading
import urllib.parse
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from kinetic._tracebacks import of_the_caller, own_frames_left_out
from kinetic.errors import DataError

if TYPE_CHECKING:
    from kinetic._snapshot import Snapshot

__all__ = ["Data", "is_data_ref", "make_data_ref", "parse_gcs_uri"]

JOB_VARIABLE = "KINETIC_JOB_ID"
"""The environment variable that only jobs have."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_HF_OPTIONS = ("split", "config_name", "revision")

_is_used = False
"""Whether this process has a `Data`. Without one, no call searches its arguments."""

T = TypeVar("T")


if TYPE_CHECKING:

    class _Path(str):
        """The type of the function's parameter: a job has the path in place of its `Data`."""

        def __new__(
            cls,
            path: str | os.PathLike[str],
            fuse: bool = False,
            hf_trust_remote_code: bool = False,
        ) -> Self: ...

else:

    class _Path:
        """The base class at run time."""

        __slots__ = ()


@own_frames_left_out.in_methods
class Data(_Path):
    """A file or directory that should be available where the function runs.

    Wraps a local path, a Cloud Storage URI (``gs://bucket/prefix/``), or a Hugging Face dataset
    (``hf://owner/name?split=train``). Pass the object as an argument, also inside lists, tuples,
    and dicts, or as a volume. The function gets the plain path of a directory or file. A job may
    write to that path; its changes reach neither the store nor another job.

    kinetic reads a local path once, when it first hashes or ships the path: this object represents
    those contents. After a change, create another `Data`. kinetic leaves out symbolic links to
    directories, and ships a link to a file as that file. It keeps empty directories, and the
    permission to execute.

    A Cloud Storage URI with a trailing slash names a directory; without the slash, it names a
    single object.

    Args:
        path: A local path, ``gs://…`` or ``hf://…``.
        fuse: Mount the data read-only and read it on demand, instead of copying it.
        hf_trust_remote_code: Let a Hugging Face dataset run its own code in the job.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The path is empty, a URI is malformed, or ``fuse`` is set for ``hf://``.
        FileNotFoundError: There is nothing at the local path.
    """

    __slots__ = ("__weakref__", "_fuse", "_is_dir", "_lock", "_path", "_snapshot", "_trust")

    _path: str
    _fuse: bool
    _trust: bool
    _is_dir: bool
    _snapshot: Snapshot | None

    def __init__(
        self,
        path: str | os.PathLike[str],
        fuse: bool = False,
        hf_trust_remote_code: bool = False,
    ) -> None:
        location = os.fspath(path) if hasattr(path, "__fspath__") else path
        if not isinstance(location, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise of_the_caller(
                TypeError(f"the path of Data must be text or a pathlib.Path, not {path!r:.80}")
            )
        for name, flag in (("fuse", fuse), ("hf_trust_remote_code", hf_trust_remote_code)):
            if not isinstance(flag, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise of_the_caller(
                    TypeError(f"{name} of Data must be True or False, not {flag!r:.80}")
                )
        if not location:
            raise DataError("Data needs a path: it was given an empty one")
        is_dir = _is_directory_uri(location, fuse) if _SCHEME.match(location) else None
        if is_dir is None:
            location = os.path.abspath(os.path.expanduser(location))
            # A job gets the content by its path, and may import a module that defines a `Data`.
            if not os.path.exists(location) and JOB_VARIABLE not in os.environ:
                message = f"Data: there is nothing at {location} (given as {path!r})"
                raise of_the_caller(FileNotFoundError(message))
            is_dir = os.path.isdir(location)
        self.__setstate__((location, bool(fuse), bool(hf_trust_remote_code), is_dir))

    @property
    def path(self) -> str:
        """The absolute local path, or the URI as it was given."""
        return self._path

    @property
    def fuse(self) -> bool:
        """Whether the job mounts the data read-only and reads it on demand."""
        return self._fuse

    @property
    def hf_trust_remote_code(self) -> bool:
        """Whether a Hugging Face dataset may run its own code in the job."""
        return self._trust

    @property
    def is_gcs(self) -> bool:
        """Whether the path is in Cloud Storage."""
        return self._path.startswith("gs://")

    @property
    def is_hf(self) -> bool:
        """Whether the path is a Hugging Face dataset."""
        return self._path.startswith("hf://")

    @property
    def is_dir(self) -> bool:
        """Whether the job receives a directory, not a file."""
        return self._is_dir

    def content_hash(self) -> str:
        """Return the SHA-256 of all file contents in deterministic order, in hex.

        A file's digest covers its relative path, NUL, and its content. The hash covers ``dir:`` or
        ``file:``, then all digests in the order of a sorted walk. The prefix makes a file differ
        from a directory with only that file. Symlinked directories are left out, symlinked files
        are read. The first call reads all files; later calls return the same hash.

        Raises:
            ValueError: The path isn't local, or something in it can't be read.
        """
        if self.is_gcs or self.is_hf:
            message = f"{self._path} is not local: only a local Data has a content hash"
            raise DataError(message, path=self._path)
        return self.__kinetic_snapshot__().digest

    def __kinetic_snapshot__(self, stop: threading.Event | None = None) -> Snapshot:
        """Return the contents of a local path for the engine; the first call walks and hashes it.

        Raises:
            DataError: Something in the path can't be read, is neither a file nor a directory, or
                changes while it is hashed.
            Abandoned: *stop* was set.
        """
        from kinetic import _snapshot

        with self._lock:
            if self._snapshot is None:
                stop = stop or threading.Event()
                self._snapshot = _snapshot.take(self._path, self._is_dir, stop)
            return self._snapshot

    def __repr__(self) -> str:
        fuse = ", fuse=True" if self._fuse else ""
        trust = ", hf_trust_remote_code=True" if self._trust else ""
        return f"Data({self._path!r}{fuse}{trust})"

    def __getstate__(self) -> tuple[str, bool, bool, bool]:
        return self._path, self._fuse, self._trust, self._is_dir

    def __setstate__(self, state: tuple[str, bool, bool, bool]) -> None:
        global _is_used
        _is_used = True
        self._path, self._fuse, self._trust, self._is_dir = state
        self._lock = threading.Lock()
        self._snapshot = None

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (type(self),), self.__getstate__()


def with_paths(arguments: T) -> T:
    """Return *arguments* with paths in place of all `Data` in lists, tuples, and dicts.

    A container without `Data` stays the same object.

    Raises:
        DataError: A `Data` isn't local.
    """
    return _replaced(arguments, ()) if _is_used else arguments


def _replaced(value: Any, within: tuple[int, ...]) -> Any:
    """Do so for *value*; the containers with the IDs *within* contain it."""
    if isinstance(value, Data):
        if value.is_gcs or value.is_hf:
            message = "only a job downloads it; in this process, use a local path"
            raise of_the_caller(DataError(f"{value.path}: {message}", path=value.path))
        return value.path
    container: Any = value
    if not isinstance(value, list | tuple | dict) or id(container) in within:
        return container
    members: list[Any] = [*(container.values() if isinstance(value, dict) else container)]
    new = [_replaced(member, (*within, id(container))) for member in members]
    if all(one is other for one, other in zip(new, members, strict=True)):
        return container
    if isinstance(value, tuple):
        return container._make(new) if hasattr(container, "_make") else tuple(new)
    copied = copy.copy(container)  # a subclass may have attributes
    if isinstance(value, dict):
        copied.update(zip(container, new, strict=True))
    else:
        copied[:] = new
    return copied


def _is_directory_uri(uri: str, fuse: bool) -> bool:
    """Return whether a URI names a directory; warn if its final slash may be missing.

    Raises:
        DataError: The URI is malformed.
    """
    scheme, _, rest = uri.partition("://")
    if scheme == "gs":
        problem = _problem_of_object(rest)
    elif scheme == "hf":
        problem = _problem_of_dataset(rest)
        if fuse:
            problem = "it cannot be mounted: fuse=True works for local paths and gs:// only"
    else:
        problem = "Data takes a local path, gs://bucket/… or hf://owner/name"
    if problem:
        raise DataError(f"{uri if uri.isprintable() else repr(uri)}: {problem}", path=uri)
    name = rest.partition("/")[2]
    is_dir = scheme == "hf" or not name or name.endswith("/")
    if not is_dir and "." not in name.rpartition("/")[2]:
        from kinetic._log import logging

        logging.warning("%s names one object; to name a directory, write %s/", uri, uri)
    return is_dir


def _problem_of_object(rest: str) -> str:
    """Return what is wrong with *rest*, which follows ``gs://``; empty if nothing."""
    bucket, slash, name = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        return f"{bucket!r} isn't the name of a bucket"
    if not slash:
        return f"it names no object; for the whole bucket write gs://{rest}/"
    return "" if name.isprintable() else "it contains a control character"


def _problem_of_dataset(rest: str) -> str:
    """Return what is wrong with *rest*, which follows ``hf://``; empty if nothing."""
    repository, _, query = rest.partition("?")
    if not _REPOSITORY.fullmatch(repository.rstrip("/")):
        return f"{repository!r} isn't a dataset; write hf://name or hf://owner/name"
    try:
        options = urllib.parse.parse_qs(query, strict_parsing=bool(query), keep_blank_values=True)
    except ValueError:
        return f"{query!r} is not of the form split=…&config_name=…&revision=…"
    for option, values in options.items():
        if option not in _HF_OPTIONS:
            return f"unknown option {option!r}; there are {', '.join(_HF_OPTIONS)}"
        if len(values) != 1 or not values[0]:
            return f"{option} needs exactly one value"
    return ""


def make_data_ref(
    uri: str,
    is_dir: bool,
    mount_path: str | None = None,
    fuse: bool = False,
    hf_trust_remote_code: bool = False,
) -> dict[str, object]:
    """Make the dict by which keras-kinetic refers to a `Data`.

    This is for code that makes or reads such dicts; kinetic itself sends other references.
    """
    return {
        "__data_ref__": True,
        "uri": uri,
        "is_dir": is_dir,
        "mount_path": mount_path,
        "fuse": fuse,
        "hf_trust_remote_code": hf_trust_remote_code,
    }


def is_data_ref(obj: object) -> bool:
    """Return whether *obj* is a dict that `make_data_ref` made."""
    if not isinstance(obj, dict):
        return False
    return cast("dict[object, object]", obj).get("__data_ref__") is True


def parse_gcs_uri(gcs_uri: str) -> tuple[str, str]:
    """Split ``gs://bucket/prefix/`` into the bucket and the prefix without outer slashes.

    The prefix of a whole bucket is empty.
    """
    bucket, _, prefix = gcs_uri.removeprefix("gs://").partition("/")
    return bucket, prefix.strip("/")
