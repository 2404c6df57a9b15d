"""`up` creates the project and links its billing account on request; `down` keeps both."""

from __future__ import annotations

from typing import Any

import pytest

from kinetic.aio.infra import Infrastructure, Planned, Site
from kinetic.aio.infra.resources import Action
from kinetic.errors import ConfigurationError, Refused
from tests.infra.google import Google
from tests.infra.sites import cut_off, down, opened

ACCOUNT = "012345-6789AB-CDEF01"


async def up(infra: Infrastructure, account: str = ACCOUNT) -> Planned:
    planned = await infra.plan_up(create_project=True, billing_account=account)
    await infra.apply(planned)
    return planned


async def test_a_project_is_created_and_paid_for(infra: Infrastructure, google: Google) -> None:
    google.exists, google.unbilled = False, 2
    with pytest.raises(ConfigurationError, match="--create-project"):
        await infra.plan_up()
    assert google.writes == 0
    planned = await up(infra)
    kinds = [change.kind for change in planned.plan.changes[:4]]
    assert kinds == ["project", "billing", "APIs", "repository"]
    assert google.account == f"billingAccounts/{ACCOUNT}"
    assert any("/clusters/lab" in key for key in google.documents)
    again = await up(infra)
    assert {change.action for change in again.plan.changes} == {Action.KEEP}
    await down(infra)
    assert google.exists
    assert not google.documents


async def test_a_new_project_without_a_billing_account_stops_after_its_creation(
    infra: Infrastructure, google: Google
) -> None:
    google.exists = False
    planned = await infra.plan_up(create_project=True)
    assert "--billing-account" in planned.notes[0]
    with pytest.raises(ConfigurationError, match="--billing-account"):
        await infra.apply(planned)
    assert google.exists and not google.documents


async def test_the_zone_of_a_new_project_decides_on_the_machine(
    infra: Infrastructure, google: Google
) -> None:
    google.exists = False
    google.enabled.add("compute.googleapis.com")
    google.machines = {"us-central1-a": ("n1-standard-4",)}
    await up(infra)
    (pool,) = [
        document for key, document in google.documents.items() if key.endswith("nodePools/system")
    ]
    assert pool["config"]["machineType"] == "n1-standard-4"


async def test_a_project_is_created_in_a_folder(infra: Infrastructure, google: Google) -> None:
    google.exists = False
    settings: dict[str, Any] = {"create_project": True, "billing_account": ACCOUNT}
    planned = await infra.plan_up(**settings, parent="folders/456")
    assert planned.plan.changes[0].reason == "in folders/456"
    await infra.apply(planned)
    assert google.parent == "folders/456"
    again = await infra.plan_up(**settings, parent="organizations/1")
    assert again.plan.changes[0].action is Action.DIFFERS
    assert "folders/456" in again.plan.changes[0].reason


@pytest.mark.parametrize("given", ["456", "folders/", "folders/456/", "projects/456", "Folders/1"])
async def test_an_invalid_parent_is_refused_before_any_request(
    infra: Infrastructure, google: Google, given: str
) -> None:
    google.exists = False
    with pytest.raises(ConfigurationError, match="folders/456"):
        await infra.plan_up(create_project=True, parent=given)
    with pytest.raises(ConfigurationError, match="--create-project"):
        await infra.plan_up(parent=given)
    assert google.requests == []


async def test_an_id_that_another_project_has_is_refused(
    infra: Infrastructure, google: Google
) -> None:
    google.exists, google.taken = False, True
    with pytest.raises(Refused, match="already exists"):
        await up(infra)


async def test_another_billing_account_is_linked(infra: Infrastructure, google: Google) -> None:
    planned = await up(infra)
    (link,) = [change for change in planned.plan.changes if change.kind == "billing"]
    assert link.action is Action.UPDATE and "0A-0B" in link.reason


async def test_only_open_billing_accounts_are_listed(infra: Infrastructure, google: Google) -> None:
    google.exists = False
    google.accounts = [
        {"name": "billingAccounts/1", "displayName": "team", "open": True},
        {"name": "billingAccounts/2", "displayName": "old", "open": False},
    ]
    assert [account.id for account in await infra.billing_accounts()] == ["1"]
    assert not await infra.has_project()
    assert not await infra.is_billed()


@pytest.mark.full
async def test_up_cut_off_at_any_write_can_be_repeated(google: Google, site: Site) -> None:
    for number in range(1, 5):
        for when in ("before", "after"):
            google.exists, google.billing = False, False
            for state in (google.documents, google.enabled, google.policies):
                state.clear()
            async with opened(google, site) as infra:
                await cut_off(google, up(infra), number, when)
            async with opened(google, site) as infra:
                await up(infra)
                again = await infra.plan_up(create_project=True, billing_account=ACCOUNT)
            assert not again.plan.steps, f"cut off {when} write {number}"
