"""Running a table of checks: concurrently, in the order of their needs, and despite errors."""

from __future__ import annotations

import anyio
import pytest

from kinetic.doctor.checks import Check, Finding, State, failed, ok, run_checks, skipped, warning
from kinetic.errors import AuthError

FINE = ok("fine")


def check(name: str, *needs: str, finding: Finding = FINE) -> Check:
    async def probe() -> Finding:
        return finding

    return Check(name=name, group="g", probe=probe, needs=needs)


async def test_checks_run_at_once_and_are_reported_in_the_order_of_the_table() -> None:
    met = anyio.Event()

    async def waits() -> Finding:
        await met.wait()
        return FINE

    async def meets() -> Finding:
        met.set()
        return FINE

    table = [
        Check(name=name, group="g", probe=probe) for name, probe in (("a", waits), ("b", meets))
    ]
    report = await run_checks(table)
    assert [result.name for result in report.results] == ["a", "b"]
    assert report.healthy


async def test_a_check_that_needs_a_failed_one_is_skipped_and_names_the_first_cause() -> None:
    table = [check("a", finding=failed("broken", "fix it")), check("b", "a"), check("c", "b")]
    report = await run_checks([*table, check("d")])
    assert [result.state.value for result in report.results] == [
        "failed",
        "skipped",
        "skipped",
        "ok",
    ]
    assert report["c"].because == "a"
    assert not report.healthy


@pytest.mark.parametrize("finding", [warning("so so"), skipped("so so")])
async def test_a_warning_or_a_skipped_check_skips_no_other(finding: Finding) -> None:
    report = await run_checks([check("a", finding=finding), check("b", "a")])
    assert report["b"].state is State.OK
    assert report.healthy


async def test_errors_timeouts_and_bugs_are_findings() -> None:
    async def refused() -> Finding:
        raise AuthError("cannot do it: no right; ask for it\nas here")

    async def silent() -> Finding:
        await anyio.sleep_forever()
        return FINE

    async def bug() -> Finding:
        return {}["x"]  # type: ignore[no-any-return]

    report = await run_checks(
        [
            Check(name="refused", group="g", probe=refused),
            Check(name="silent", group="g", probe=silent, limit_s=0.01, advice="wait"),
            Check(name="bug", group="g", probe=bug),
        ]
    )
    assert report["refused"].evidence == "cannot do it: no right"
    assert report["refused"].advice == "ask for it\nas here"
    assert "0.01 s" in report["silent"].evidence
    assert report["silent"].advice == "wait"
    assert "KeyError('x')" in report["bug"].evidence
    assert {result.state for result in report.results} == {State.FAILED}


async def test_a_check_comes_after_those_it_needs() -> None:
    with pytest.raises(ValueError, match="b must come after a"):
        await run_checks([check("b", "a"), check("a")])


async def test_a_report_is_json() -> None:
    shown = (await run_checks([check("a", finding=warning("w", "do"))])).to_dict()
    assert shown["healthy"] is True
    (shown_check,) = shown["checks"]
    assert shown_check.pop("seconds") >= 0
    assert shown_check == {
        "name": "a", "group": "g", "state": "warning", "evidence": "w", "advice": "do",
        "because": "",
    }  # fmt: skip
