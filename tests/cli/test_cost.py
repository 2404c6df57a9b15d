"""The command line shows the estimated costs of jobs and batches, and a spent budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import FILE, Kinetic

pytestmark = pytest.mark.usefixtures("small_project")


@pytest.fixture
def inputs(tmp_path: Path) -> str:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(f'{{"x": {number}}}\n' for number in range(3)))
    return str(file)


@pytest.fixture
def priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a price of one dollar per second."""
    (tmp_path / "prices.json").write_text(json.dumps({"cpu": 3600.0}))
    monkeypatch.setenv("KINETIC_PRICES", str(tmp_path / "prices.json"))


@pytest.mark.usefixtures("priced")
def test_a_batch_has_its_cost_so_far_and_a_spent_budget_is_its_reason(
    kinetic: Kinetic, inputs: str
) -> None:
    common = ("run", f"{FILE}:double", "--map", inputs, "--accelerator", "cpu")
    assert kinetic(*common, "--budget", "1000", "--name", "enough").code == 0
    spent = kinetic(*common, "--budget", "0.000001", "--max-concurrent", "1", "--name", "little")
    assert spent.code == 1 and "budget=1e-06 US dollars was spent, by estimate" in spent.out
    rows = {row["name"]: row for row in kinetic("batches", "list", "--json").json["items"]}
    assert rows["enough"]["status"] == "SUCCEEDED" and rows["enough"]["cost"].startswith("$")
    assert rows["enough"]["estimate"]["estimate"] is True
    assert rows["enough"]["estimate"]["usd"] > 0
    assert rows["little"]["counts"]["SUCCEEDED"] == 1
    assert rows["little"]["reason"] == "budget=1e-06 US dollars was spent, by estimate"
    assert "cost" in kinetic("batches", "status", rows["enough"]["group_id"]).out


@pytest.mark.usefixtures("priced")
def test_a_job_and_an_item_have_their_cost_so_far(kinetic: Kinetic, inputs: str) -> None:
    common = ("run", f"{FILE}:double", "--accelerator", "cpu")
    assert kinetic(*common, "--map", inputs).code == 0
    job = kinetic(*common, "-a", "x=1", "--detach", "--json").json["job_id"]
    assert kinetic("jobs", "result", job, "--timeout", "60").code == 0
    rows = kinetic("jobs", "list", "--items", "--json").json["items"]
    assert len(rows) == 4
    for row in rows:
        estimate = row["estimate"]
        assert estimate["usd_per_hour"] == 3600.0
        assert 0 < estimate["usd"] == 3600 * estimate["hours"]
        assert row["cost"] == f"${estimate['usd']:,.2f}"
    status = kinetic("jobs", "status", job).out
    assert "cost" in status and "estimate" not in status
