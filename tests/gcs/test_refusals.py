"""The advice about a refusal follows the reason in the answer, for the client and in a job."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable

import pytest

from kinetic._runner.protocol.wire import BILLING_PROJECT
from kinetic._runner.stores.gcs import GcsObjects, StorageError
from kinetic._runner.stores.gcs import Limits as RunnerLimits
from kinetic.aio import _lease
from kinetic.aio.gcs.http import EMULATOR
from kinetic.aio.gcs.store import GcsStore
from kinetic.errors import AuthError, Refused
from tests.gcs.server import GcsServer

QUICK = RunnerLimits(total_s=30.0, first_s=0.005, longest_s=0.02)


def refusal(message: str, reason: str = "forbidden") -> str:
    """Return the body of an answer as Cloud Storage writes it."""
    detail = {"message": message, "domain": "global", "reason": reason}
    return json.dumps({"error": {"message": message, "errors": [detail]}})


KINDS = {
    "a retention policy": (
        403,
        refusal(
            "Object 'b/x' is subject to bucket's retention policy or object retention and cannot "
            "be deleted or overwritten until 2030-01-01T00:00:00Z",
            "retentionPolicyNotMet",
        ),
        "retention period ends",
    ),
    "a hold": (
        403,
        refusal("Object 'b/x' is under active Event-Based hold", "objectUnderActiveHold"),
        "release the hold",
    ),
    "a key": (
        403,
        refusal("Permission denied on Cloud KMS key. Please ensure that your service account may"),
        "key is enabled",
    ),
    "a destroyed key": (400, refusal("The Cloud KMS key k is destroyed", "invalid"), "key is enab"),
    "a service perimeter": (
        403,
        refusal(
            "Request is prohibited by organization's policy. vpcServiceControlsUniqueIdentifier: a",
            "vpcServiceControls",
        ),
        "service perimeter",
    ),
    "billing": (
        403,
        refusal("The billing account for the owning project is disabled", "accountDisabled"),
        "active billing account",
    ),
    "a quota project": (
        403,
        refusal(
            "Caller does not have required permission to use project p. Grant the caller the "
            "roles/serviceusage.serviceUsageConsumer role",
            "USER_PROJECT_DENIED",
        ),
        "GOOGLE_CLOUD_QUOTA_PROJECT",
    ),
    "a quota": (403, refusal("The daily limit was reached", "dailyLimitExceeded"), "more quota"),
    "the requester pays": (
        400,
        refusal("Bucket is a requester pays bucket but no user project provided.", "required"),
        BILLING_PROJECT,
    ),
    "a policy of the organization": (
        412,
        refusal("Request violates constraint 'constraints/gcp.x'", "conditionNotMet"),
        "policy of the organization",
    ),
    "an address": (403, refusal("There is an IP filter condition"), "IP filter allows"),
    "scopes": (
        403,
        refusal("Request had insufficient authentication scopes.", "insufficientPermissions"),
        "scope cloud-platform",
    ),
}

kinds = pytest.mark.parametrize(("status", "text", "advice"), KINDS.values(), ids=KINDS)

OPERATIONS: dict[str, Callable[[GcsStore], Awaitable[object]]] = {
    "create": lambda store: store.create("new", b"x"),
    "get": lambda store: store.get("there"),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete(["there"]),
    "renew": lambda store: store.renew(["there"]),
}


@kinds
async def test_the_client_gives_the_advice_for_the_reason(
    server: GcsServer, store: GcsStore, status: int, text: str, advice: str
) -> None:
    await store.create("there", b"content")
    server.fail("*", times=10**6, status=status, text=text)
    for operation in OPERATIONS.values():
        with pytest.raises(Refused) as caught:
            await operation(store)
        said = str(caught.value)
        assert advice in said
        assert json.loads(text)["error"]["message"] in said
        assert "credentials lack" not in said and "objectUser" not in said
        assert caught.value.passing  # a batch may wait until someone changes the policy


@pytest.mark.parametrize("kind", ["a retention policy", "a hold"])
async def test_a_lease_that_the_bucket_keeps_ends_its_submission(
    server: GcsServer, store: GcsStore, kind: str
) -> None:
    """Its holder repeats other refusals, because someone may change what forbids them."""
    hold = await _lease.begin(store, "batches/b/", time.monotonic)
    status, text, advice = KINDS["a key"]
    other = server.fail("create", times=2, status=status, text=text)
    status, text, advice = KINDS[kind]
    server.fail("create", times=1, status=status, text=text)
    async with asyncio.timeout(30):
        with pytest.raises(Refused, match=advice):
            await hold.keep(period=0.01)
    assert other.seen == 2


@kinds
async def test_a_job_gives_the_advice_for_the_reason(
    server: GcsServer, status: int, text: str, advice: str
) -> None:
    objects = GcsObjects("gs://kn-test", {EMULATOR: server.url}, QUICK)
    server.fail("*", times=10**6, status=status, text=text)
    for operation in (
        lambda: objects.create("x", b""),
        lambda: objects.list(""),
        lambda: objects.delete(["x"]),
    ):
        with pytest.raises(StorageError) as caught:
            await asyncio.to_thread(operation)
        assert advice in str(caught.value)
        assert "lacks" not in str(caught.value) and "objectUser" not in str(caught.value)


async def test_a_refusal_without_a_known_reason_names_no_role(
    server: GcsServer, store: GcsStore
) -> None:
    server.fail("*", times=9, status=403, text="not now, see https://storage.googleapis.com/x")
    with pytest.raises(AuthError, match="not now") as caught:
        await store.list("")
    assert "role" not in str(caught.value)


@pytest.mark.parametrize("large", [False, True])
async def test_an_object_exists_only_if_it_is_there(
    server: GcsServer, store: GcsStore, large: bool
) -> None:
    """Policies also answer with the status of a failed precondition."""
    body = os.urandom(200_000) if large else b"x"
    objects = GcsObjects("gs://kn-test", {EMULATOR: server.url}, QUICK)
    assert await store.create("there", b"1")
    generation = (await store.get("there")).generation
    fault = server.fail("begin" if large else "create", times=10**6, status=412, text="not here")
    with pytest.raises(Refused, match="not here"):
        await store.create("absent", body)
    if not large:
        with pytest.raises(Refused, match="not here"):
            await store.replace("there", body, generation=generation)
        with pytest.raises(StorageError, match="not here"):
            await asyncio.to_thread(objects.create, "absent", body)
    assert not await store.create("there", body)
    assert large or not await asyncio.to_thread(objects.create, "there", body)
    fault.times = 1  # as if another process deletes the object between two requests
    assert await store.create("absent", body)


async def test_the_billing_project_pays_for_each_request(server: GcsServer) -> None:
    environ = {EMULATOR: server.url, BILLING_PROJECT: "payer"}
    objects = GcsObjects("gs://kn-test", environ, QUICK)
    store = GcsStore("gs://kn-test", environ)
    try:
        await store.create("a", b"1")
        await store.get("a")
        await store.list("")
        await asyncio.to_thread(objects.create, "b", b"2")
        assert (await asyncio.to_thread(objects.get, "b"))[0] == b"2"
        await asyncio.to_thread(objects.delete, ["a", "b"])
    finally:
        await store.aclose()
    assert set(server.payers) == {"payer"}
