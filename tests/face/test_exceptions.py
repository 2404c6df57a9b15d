"""The exceptions of a function arrive as they are, by a plain call and by a handle."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import programs

HERE = Path(__file__).parent


@pytest.mark.parametrize("ways", [[], pytest.param(["both"], marks=pytest.mark.full)])
def test_every_kind_of_exception_arrives_as_in_a_direct_call(
    tmp_path: Path, ways: list[str]
) -> None:
    (tmp_path / "pyproject.toml").touch()
    shutil.copy(HERE / "raising.py", tmp_path)
    shown = programs.python("-W", "error", "raising.py", *ways, cwd=tmp_path)
    assert shown == "99 kinds\n", shown


@pytest.mark.full
def test_an_exception_of_another_base_arrives_in_a_batch_and_in_asyncio(script) -> None:
    code = """
class Aborted(BaseException):
    def __init__(self, *, code):
        self.code = code

@remote
def abort(code):
    raise Aborted(code=code)

(failed,) = abort.run_async_map([3]).outcomes()
print(type(failed.outcome.error).__name__, failed.outcome.error.__cause__.code)

async def main():
    try:
        await kinetic.aio.run(abort, 4)
    except Aborted as error:
        print(error.code)

asyncio.run(main())
"""
    script(code).prints("JobFailed 3", "4")


DOCTEST = """
>>> class Absent(Exception): pass
>>> def find(): raise Absent("x")
>>> try: remote(find)()
... except Absent: print("caught")
caught
"""


def test_a_module_s_class_of_the_same_name_replaces_no_other(script, tmp_path: Path) -> None:
    """A doctest defines it in the name of the module."""
    (tmp_path / "store.py").write_text(f"class Absent(Exception): pass\n__doc__ = {DOCTEST!r}\n")
    code = """
import doctest, store
print(doctest.testmod(store, extraglobs={"remote": remote}))
"""
    script(code).prints("TestResults(failed=0, attempted=3)")
