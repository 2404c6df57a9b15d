"""Test the finder that patches `multiprocessing` when a job imports it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import programs

START = """
import importlib.util, sys
import cloudpickle
from kinetic._runner.job import by_value
assert "multiprocessing" not in sys.modules
by_value.patch_multiprocessing()
"""


def run(code: str, folder: Path) -> str:
    """Run a program whose first import path is *folder*; return its output."""
    path = f"import sys; sys.path.insert(0, {str(folder)!r})"
    return programs.output(sys.executable, "-c", f"{path}{START}{code}")


def test_an_import_of_multiprocessing_keeps_the_list_of_finders(tmp_path: Path) -> None:
    """An import that another one interrupts, or that runs in a thread, would skip a finder."""
    (tmp_path / "found.py").write_text("name = 'found'")
    code = f"""
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "editable":
            import multiprocessing

class Editable:
    def find_spec(self, name, path=None, target=None):
        if name == "editable":
            return importlib.util.spec_from_file_location(name, {str(tmp_path / "found.py")!r})

sys.meta_path += [Interrupted(), Editable()]
import editable
from multiprocessing.reduction import ForkingPickler
print(editable.name, "reducer_override" in vars(ForkingPickler))
"""
    assert run(code, tmp_path) == "found True\n"
