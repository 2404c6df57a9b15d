"""The runner as files, and as the one file that an image of the user's own needs."""

from __future__ import annotations

import base64
import io
import os
import textwrap
import zipfile
from collections.abc import Mapping
from pathlib import Path

from kinetic import _runner

__all__ = ["runner_files", "single_file"]

ENTRY = "remote_runner.py"

_SCRIPT = '''"""The runner of kinetic {version}, in one file; its place is /app/remote_runner.py."""

import base64
import io
import os
import runpy
import sys
import tempfile
import zipfile

FILES = """
{files}
"""

here = os.path.dirname(os.path.realpath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
folder = tempfile.mkdtemp(prefix="kinetic-runner-")
with zipfile.ZipFile(io.BytesIO(base64.b64decode(FILES))) as archive:
    archive.extractall(folder)
runpy.run_path(os.path.join(folder, "{entry}"), run_name="__main__")
'''


def runner_files() -> dict[str, bytes]:
    """The runner that is part of this kinetic, by the names of its files; reads the disk."""
    folder = Path(os.path.realpath(_runner.__path__[0]))
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.py"))}


def single_file(files: Mapping[str, bytes], version: str) -> str:
    """A script that is the runner of *files*: it unpacks them and runs their entry; pure."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name])
    encoded = base64.b64encode(buffer.getvalue()).decode()
    lines = "\n".join(textwrap.wrap(encoded, 96))
    return _SCRIPT.format(version=version, files=lines, entry=ENTRY)
