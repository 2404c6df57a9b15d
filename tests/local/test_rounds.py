"""Which workers of a round start, are replaced, and end; without processes."""

from __future__ import annotations

from kinetic._runner.protocol.workers import EXIT_DONE, EXIT_REPLACE, EXIT_SURPLUS, WorkerId
from kinetic._supervisor.protocol import JobHeader
from kinetic._supervisor.rounds import FIRST_PAUSE_S, LONGEST_PAUSE_S, Rounds, Start

HEADER = JobHeader(name="grp-a-0", labels={}, command=("python",), runner="", edition="")


def begun(workers: int) -> Rounds:
    rounds = Rounds("s1")
    names = [start.header.name for start in rounds.scale(HEADER, b"secret", 0, workers)]
    assert names == [f"grp-a-0.s1.{rank}.0" for rank in range(workers)]
    return rounds


def replaced(result: Start | list[str] | None) -> Start:
    assert isinstance(result, Start)
    return result


def test_a_round_grows_and_never_shrinks() -> None:
    rounds = begun(2)
    assert [*rounds.scale(HEADER, b"secret", 0, 1)] == []
    (third,) = rounds.scale(HEADER, b"secret", 0, 3)
    assert WorkerId.parse(third.header.worker) == WorkerId(0, "s1", 2)


def test_a_round_that_was_begun_grows_without_its_secrets() -> None:
    rounds = begun(2)
    assert [*rounds.grow("grp-a-0", 2)] == [*rounds.grow("grp-b-0", 5)] == []
    (third,) = rounds.grow("grp-a-0", 3)
    assert third.header.name == "grp-a-0.s1.2.0" and third.body == b"secret"
    assert rounds.count("grp-a-0") == 3
    rounds.ended("grp-a-0.s1.0.0", EXIT_DONE, 60.0)
    assert [*rounds.grow("grp-a-0", 9)] == [], "a round that is over has grown"


def test_a_worker_that_dies_is_replaced_after_pauses_that_grow() -> None:
    rounds = begun(1)
    pauses = []
    for restarts in range(1, 12):
        start = replaced(rounds.ended(f"grp-a-0.s1.0.{restarts - 1}", EXIT_REPLACE, 0.1))
        assert start.header.name == f"grp-a-0.s1.0.{restarts}" and start.body == b"secret"
        assert WorkerId.parse(start.header.worker) == WorkerId(0, "s1", 0, restarts)
        pauses.append(start.pause_s)
    assert pauses[:2] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S] and pauses[-1] == LONGEST_PAUSE_S
    assert replaced(rounds.ended("grp-a-0.s1.0.11", -9, 60.0)).pause_s == 0.0


def test_a_second_report_of_an_end_changes_nothing() -> None:
    rounds = begun(1)
    replaced(rounds.ended("grp-a-0.s1.0.0", EXIT_REPLACE, 60.0))
    assert rounds.ended("grp-a-0.s1.0.0", EXIT_REPLACE, 60.0) is None
    assert rounds.ended("grp-b-0.s1.0.0", EXIT_REPLACE, 60.0) is None


def test_a_worker_without_work_is_not_replaced_and_the_last_one_ends_the_round() -> None:
    rounds = begun(3)
    assert rounds.ended("grp-a-0.s1.0.0", EXIT_SURPLUS, 60.0) is None
    assert rounds.ended("grp-a-0.s1.1.0", EXIT_DONE, 60.0) == ["grp-a-0.s1.2.0"]
    assert rounds.ended("grp-a-0.s1.2.0", -15, 60.0) is None
    assert [*rounds.scale(HEADER, b"secret", 0, 5)] == [], "a late request began the round again"


def test_a_deleted_round_replaces_nobody() -> None:
    rounds = begun(2)
    assert rounds.delete(["grp-a-0"], None) == ["grp-a-0.s1.0.0", "grp-a-0.s1.1.0"]
    assert rounds.ended("grp-a-0.s1.0.0", -15, 60.0) is None
    assert rounds.delete(["grp-a-0"], None) == []
