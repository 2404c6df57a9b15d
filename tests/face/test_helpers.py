"""Helpers of the standard library work in jobs, wherever the program defines what uses them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import programs

HERE = Path(__file__).parent
PROGRAMS = {
    "script": ("helping.py", ""),
    "module": ("program.py", "import helping; helping.main([])"),
    "notebook": (
        "program.py",
        """
import pathlib, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_cell(pathlib.Path("helping.py").read_text()).raise_error()
sys.stdout.flush()
shell.history_manager.end_session()
""",
    ),
}


@pytest.mark.parametrize(
    "place", ["script", *(pytest.param(name, marks=pytest.mark.full) for name in [*PROGRAMS][1:])]
)
def test_helpers_do_in_a_job_what_they_do_in_a_direct_call(place: str, tmp_path: Path) -> None:
    """Each is made in the job, captured, passed, and returned."""
    (tmp_path / "pyproject.toml").touch()
    shutil.copy(HERE / "helping.py", tmp_path)
    name, program = PROGRAMS[place]
    if program:
        (tmp_path / name).write_text(program)
    # By value, the models of SQLAlchemy would lose what their class statement registers.
    refused = "" if place == "module" else "orm_models: refused\n"
    shown = programs.python(name, cwd=tmp_path)
    assert shown == f"{refused}38 kinds\n", shown


def test_what_a_job_could_not_rebuild_is_refused_with_the_reason(script) -> None:
    code = """
import ctypes

class Pair(tuple):
    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))

class Proxy:
    def __init__(self, inner):
        self.inner = inner
    def __getattr__(self, name):
        return getattr(self.inner, name)

class Reducing:
    def __init__(self, first, second):
        pass
    def __reduce__(self):
        return Reducing, (1,)

class Struct(ctypes.Structure):
    pass

for value in (Pair(1, 2), Proxy([1]), Reducing(1, 2), Struct()):
    try:
        inverse(value)
    except kinetic.errors.PackError as exc:
        words = ("__new__", "__getattr__", "__reduce__", "whole class body")
        print(*(word for word in words if word in str(exc)))
"""
    script(code).prints("__new__ __reduce__", "__getattr__", "__reduce__", "whole class body")
