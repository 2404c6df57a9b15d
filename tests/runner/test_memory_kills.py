"""Test the count of processes killed for memory in both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinetic._runner.pod.attempt import oom_kills

VERSION_2 = "low 0\nhigh 0\nmax 31\noom 1\noom_kill 2\noom_group_kill 0\n"
VERSION_1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"


@pytest.mark.parametrize(
    ("found", "count"), [([VERSION_2, ""], 2), ([VERSION_1], 3), ([""], 0), ([], 0)]
)
def test_the_first_file_that_has_a_count_is_used(
    tmp_path: Path, found: list[str], count: int
) -> None:
    paths = [tmp_path / "absent"]
    for number, text in enumerate(found):
        paths.append(tmp_path / str(number))
        paths[-1].write_text(text)
    assert oom_kills([str(path) for path in paths]) == count
