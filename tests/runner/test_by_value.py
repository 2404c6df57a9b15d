"""Test the finder that patches `multiprocessing` when a job imports it."""

from __future__ import annotations

import multiprocessing
import sys
import zipfile
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


def test_the_patch_leaves_alone_a_package_of_the_project_with_the_same_name(tmp_path: Path) -> None:
    package = tmp_path / "multiprocessing"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "reduction.py").write_text("name = 'own'")
    assert run("import multiprocessing.reduction as own; print(own.name)", tmp_path) == "own\n"


def test_the_patch_works_with_a_library_in_a_zip_file(tmp_path: Path) -> None:
    """All modules in the file share one loader."""
    library = tmp_path / "library.zip"
    with zipfile.ZipFile(library, "w") as file:
        for module in Path(multiprocessing.__file__).parent.glob("*.py"):
            file.write(module, f"multiprocessing/{module.name}")
    code = """
import multiprocessing.pool
from multiprocessing.reduction import ForkingPickler
print("library.zip" in multiprocessing.__file__, "reducer_override" in vars(ForkingPickler))
"""
    assert run(code, library) == "True True\n"
