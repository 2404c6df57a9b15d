"""Replace a file atomically."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a temporary path; the file that the block writes there replaces *path* at the end.

    A reader of *path* finds the old file or the new file. If the block fails, the old file stays.

    Raises:
        FileExistsError: *path* is a device, a pipe, or a folder, which a file must not replace.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "isn't a regular file", str(path))
    temporary = path.with_name(f".{os.urandom(8).hex()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
