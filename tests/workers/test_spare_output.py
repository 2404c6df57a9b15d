"""The empty output directory of an item becomes the next item's."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from kinetic._runner.job.outputs import SpareFolder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return the folder of a batch's outputs."""
    found = tmp_path / "outputs" / "grp-0123456789ab"
    found.mkdir(parents=True)
    return found


@pytest.fixture
def spare(tmp_path: Path) -> SpareFolder:
    return SpareFolder(str(tmp_path / "spare"))


def made(folder: Path) -> str:
    folder.mkdir(0o700)
    return str(folder)


def test_an_empty_directory_changes_its_name(base: Path, spare: SpareFolder) -> None:
    first = made(base / "0")
    number = os.stat(first).st_ino
    spare.take(first)
    assert not os.listdir(base), "it disappears with its item"
    spare.give(str(base / "1"))
    assert os.stat(base / "1").st_ino == number
    assert os.listdir(base) == ["1"]


def test_a_directory_with_files_stays(base: Path, spare: SpareFolder) -> None:
    first = made(base / "0")
    (base / "0" / "model").write_text("weights")
    spare.take(first)
    spare.give(str(base / "1"))
    assert os.listdir(base) == ["0"]
    assert (base / "0" / "model").read_text() == "weights"


def test_a_file_that_comes_late_goes_back_to_its_item(
    base: Path, spare: SpareFolder, tmp_path: Path
) -> None:
    spare.take(made(base / "0"))
    (tmp_path / "spare" / "late").write_text("x")
    spare.give(str(base / "1"))
    assert os.listdir(base) == ["0"]
    assert os.listdir(base / "0") == ["late"]


@pytest.mark.parametrize("age_s", [0, 10])
def test_a_file_is_noticed_whenever_the_directory_was_found_empty(
    base: Path, spare: SpareFolder, age_s: int
) -> None:
    """The directory is listed only if its time has changed, or may not show a change."""
    first, long_ago = made(base / "0"), time.time_ns() - age_s * 10**9 - 1
    os.utime(first, ns=(long_ago, long_ago))
    for number in range(5):
        spare.take(str(base / str(number)))
        assert spare.give(str(base / str(number + 1)))
    (base / "5" / "model").write_text("weights")
    spare.take(str(base / "5"))
    assert not spare.give(str(base / "6"))
    assert os.listdir(base) == ["5"]


def test_a_directory_that_stays_empty_is_not_listed_again(base: Path, spare: SpareFolder) -> None:
    first, long_ago = made(base / "0"), time.time_ns() - 10**10 - 1
    os.utime(first, ns=(long_ago, long_ago))
    listed: list[object] = []
    is_over = False

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.listdir" and not is_over:
            listed.extend(arguments)

    sys.addaudithook(note)  # it stays until this process ends
    for number in range(5):
        spare.take(str(base / str(number)))
        assert spare.give(str(base / str(number + 1)))
    is_over = True
    assert listed == [first]


def test_another_directory_of_the_same_name_is_not_taken_for_the_empty_one(
    base: Path, spare: SpareFolder
) -> None:
    first, long_ago = made(base / "0"), time.time_ns() - 10**10 - 1
    os.utime(first, ns=(long_ago, long_ago))
    spare.take(first)
    assert spare.give(str(base / "1"))
    os.rename(base / "1", base / "elsewhere")
    made(base / "1")
    (base / "1" / "model").write_text("weights")
    spare.take(str(base / "1"))
    assert sorted(os.listdir(base)) == ["1", "elsewhere"]


def test_a_directory_that_an_item_has_changed_is_no_spare(base: Path, spare: SpareFolder) -> None:
    first = made(base / "0")
    os.chmod(first, 0o755)
    spare.take(first)
    assert not os.listdir(base)
    spare.give(str(base / "1"))
    assert not os.listdir(base)


def test_a_directory_that_the_user_has_named_stays(tmp_path: Path, spare: SpareFolder) -> None:
    folder = made(tmp_path / "mine")
    spare.take(folder)
    assert os.path.isdir(folder)
