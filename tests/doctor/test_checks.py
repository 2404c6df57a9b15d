"""What runs a table of checks: at once, after what they need, and whatever they do."""

from __future__ import annotations

import anyio
import pytest

from kinetic.doctor.checks import Check, Finding, Result, State, carry_out
from kinetic.errors import AuthError

FINE = Finding(State.OK, "fine")


def check(name: str, *needs: str, finding: Finding = FINE, **more: object) -> Check:
    async def look() -> Finding:
        return finding

    return Check(name=name, group="g", look=look, needs=needs, **more)  # type: ignore[arg-type]


async def test_checks_run_at_once_and_are_reported_in_the_order_of_the_table() -> None:
    met, told = anyio.Event(), list[str]()

    async def waits() -> Finding:
        await met.wait()
        return FINE

    async def meets() -> Finding:
        met.set()
        return FINE

    table = [Check(name=name, group="g", look=look) for name, look in (("a", waits), ("b", meets))]
    report = await carry_out(table, lambda result: told.append(result.name))
    assert [one.name for one in report.results] == ["a", "b"]
    assert told == ["b", "a"]
    assert report.healthy


async def test_what_needs_a_failed_check_is_skipped_with_the_name_of_the_first_cause() -> None:
    bad = Finding(State.FAILED, "broken", "mend it")
    table = [check("a", finding=bad), check("b", "a"), check("c", "b"), check("d")]
    report = await carry_out(table)
    assert [one.state.value for one in report.results] == ["failed", "skipped", "skipped", "ok"]
    assert report["c"].because == "a"
    assert report["c"].evidence == "not asked, because 'a' failed"
    assert not report.healthy


@pytest.mark.parametrize("state", [State.WARNING, State.SKIPPED])
async def test_what_is_no_failure_holds_nobody_up(state: State) -> None:
    report = await carry_out([check("a", finding=Finding(state, "so so")), check("b", "a")])
    assert report["b"].state is State.OK
    assert report.healthy


async def test_errors_silence_and_slips_are_findings() -> None:
    async def refused() -> Finding:
        raise AuthError("cannot do it: no right; ask for it\nas here")

    async def silent() -> Finding:
        await anyio.sleep_forever()
        return FINE

    async def slip() -> Finding:
        return {}["x"]  # type: ignore[no-any-return]

    report = await carry_out(
        [
            Check(name="refused", group="g", look=refused),
            Check(name="silent", group="g", look=silent, limit_s=0.01, advice="wait"),
            Check(name="slip", group="g", look=slip),
        ]
    )
    assert report["refused"].evidence == "cannot do it: no right"
    assert report["refused"].advice == "ask for it\nas here"
    assert report["silent"].evidence == "no answer within 0.01 s"
    assert report["silent"].advice == "wait"
    assert "the check itself failed: KeyError('x')" in report["slip"].evidence
    assert {one.state for one in report.results} == {State.FAILED}


async def test_a_need_stands_before_who_needs_it() -> None:
    with pytest.raises(ValueError, match="b needs a"):
        await carry_out([check("b", "a"), check("a")])


async def test_a_report_is_json() -> None:
    report = await carry_out([check("a", finding=Finding(State.WARNING, "w", "do"))])
    shown = report.to_dict()
    assert shown["healthy"] is True
    (one,) = shown["checks"]
    assert one.pop("seconds") >= 0
    assert one == {
        "name": "a", "group": "g", "state": "warning", "evidence": "w", "advice": "do",
        "because": "",
    }  # fmt: skip
    assert isinstance(report["a"], Result)
