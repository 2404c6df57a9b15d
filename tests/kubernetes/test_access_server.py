"""Requests to a real API server: changes, refusals, permissions, and an unresponsive server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinetic import configuration
from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.kubernetes.access import open_access, open_pod
from kinetic.aio.kubernetes.api import Api, Limits
from kinetic.errors import (
    AlreadyThere,
    AuthError,
    Conflict,
    Expired,
    NotFound,
    Refused,
    Unavailable,
)
from tests.cluster.fixtures import Namespace

LIMITS = Limits(
    retry=RetryPolicy(total_s=110.0, first_pause_s=0.05, longest_pause_s=0.5),
    rights_s=60.0,
)
WARY = replace(LIMITS, idle_s=1.0)
"""For a server that stops answering; a request that was slow rather than lost may be repeated."""

Open = Callable[..., Awaitable[Api]]


@pytest.fixture
async def opening(namespace: Namespace) -> AsyncIterator[Open]:
    """Provide a function that opens a client of the cluster by its context."""
    clients: list[Api] = []

    async def client(context: str, limits: Limits = LIMITS) -> Api:
        target = configuration.resolve(environ={"KINETIC_KUBE_CONTEXT": context})
        access = await open_access(target, {"KUBECONFIG": str(namespace.kubeconfig)})
        clients.append(Api(access, limits))
        return clients[-1]

    yield client
    for api in clients:
        await api.aclose()


@pytest.fixture
async def api(opening: Open) -> Api:
    return await opening("admin")


def note(name: str, **data: str) -> dict[str, Any]:
    """Make a ConfigMap's document."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": {"of": "this-test"}},
        "data": data,
    }


async def test_objects_are_created_read_changed_and_deleted(namespace: Namespace, api: Api) -> None:
    notes = namespace.path("configmaps")
    created = await api.call("POST", notes, body=note("a", text="ü"))
    with pytest.raises(AlreadyThere, match='configmaps "a" already exists'):
        await api.call("POST", notes, body=note("a"))
    changed = await api.call(
        "PATCH",
        f"{notes}/a",
        body={"data": {"more": "1"}},
        content_type="application/merge-patch+json",
    )
    assert changed["data"] == {"text": "ü", "more": "1"}
    with pytest.raises(Conflict, match="the object has been modified"):
        await api.call("PUT", f"{notes}/a", body=created)
    found = await api.call("GET", notes, query={"labelSelector": "of in (this-test,that)"})
    assert [item["metadata"]["name"] for item in found["items"]] == ["a"]
    await api.call("DELETE", notes, query={"labelSelector": "of=this-test"})
    with pytest.raises(NotFound, match='configmaps "a" not found'):
        await api.call("GET", f"{notes}/a")
    with pytest.raises(NotFound):
        await api.call("GET", namespace.path("no.such.group/v1/things"))


async def test_a_refusal_quotes_the_api_server(namespace: Namespace, api: Api) -> None:
    with pytest.raises(Refused, match=r"metadata\.name: Invalid value") as caught:
        await api.call("POST", namespace.path("configmaps"), body=note("Not Legal"))
    assert caught.value.answer["code"] == 422
    with pytest.raises(Refused) as caught:
        await api.call("POST", namespace.path("configmaps"), body={"kind": "Secret"})
    assert caught.value.answer["code"] == 400


async def test_a_watch_yields_lines_of_json_until_its_timeout(
    namespace: Namespace, api: Api
) -> None:
    notes = namespace.path("configmaps")
    listed = await api.call("GET", notes)
    query = {"watch": "1", "resourceVersion": listed["metadata"]["resourceVersion"]}
    query["fieldSelector"] = "metadata.name=a"  # every namespace also has kube-root-ca.crt
    events = []
    async with aclosing(api.lines(notes, query={**query, "timeoutSeconds": "5"})) as lines:
        await api.call("POST", notes, body=note("a"))
        async for line in lines:
            events.append(json.loads(line))  # noqa: PERF401 # easier to read
    assert [event["type"] for event in events] == ["ADDED"]
    assert events[0]["object"]["metadata"]["name"] == "a"


async def test_a_token_that_is_too_old_raises_expired(namespace: Namespace, api: Api) -> None:
    notes = namespace.path("configmaps")
    for name in ("a", "b"):
        await api.call("POST", notes, body=note(name))
    page = (await api.call("GET", notes, query={"limit": "1"}))["metadata"]
    await api.call("DELETE", f"{notes}/b")
    namespace.control_plane.forget()
    query = {"limit": "1", "continue": page["continue"]}
    with pytest.raises(Expired, match="list again"):
        await api.call("GET", notes, query=query)


def printed_role(message: str) -> Iterator[dict[str, Any]]:
    import yaml

    start = message.index("apiVersion: rbac")
    yield from yaml.safe_load_all(message[start:])


async def test_the_error_for_a_missing_permission_prints_a_role_that_is_enough(
    namespace: Namespace, opening: Open
) -> None:
    dev, admin = await opening("dev"), await opening("admin")
    jobs = namespace.path("batch/v1/jobs")
    with pytest.raises(AuthError, match="verb 'list' on resource 'jobs'") as caught:
        await dev.call("GET", jobs)
    await grant(namespace, admin, str(caught.value))
    await wait_until_allowed(dev, "GET", jobs)
    secrets, pods = namespace.path("secrets"), namespace.path("pods")
    await dev.call("POST", secrets, body={"metadata": {"name": "s"}})
    await dev.call("DELETE", secrets, query={"labelSelector": "a=b"})
    async with aclosing(dev.lines(pods, query={"watch": "1", "timeoutSeconds": "1"})) as lines:
        assert [line async for line in lines] == []
    with pytest.raises(NotFound):
        await dev.call("GET", f"{pods}/x/log")
    with pytest.raises(AuthError, match=r"resources: \[services\]\n  verbs: \[list\]"):
        await dev.call("GET", namespace.path("services"))
    with pytest.raises(AuthError, match="kind: ClusterRole\n"):
        await dev.call("GET", "/api/v1/nodes")


async def grant(namespace: Namespace, admin: Api, message: str) -> None:
    """Create the Role and RoleBinding that *message* prints."""
    for document in printed_role(message):
        assert document["metadata"]["namespace"] == namespace.name
        collection = namespace.path(f"rbac.authorization.k8s.io/v1/{document['kind'].lower()}s")
        await admin.call("POST", collection, body=document)


async def wait_until_allowed(api: Api, method: str, path: str) -> None:
    """Wait until a granted permission takes effect, which takes the server a moment."""
    async with asyncio.timeout(60):
        while True:
            try:
                await api.call(method, path)
                return
            except AuthError:
                await asyncio.sleep(0.02)


async def test_a_pod_of_the_cluster_has_access_through_its_service_account(
    namespace: Namespace, api: Api, tmp_path: Path
) -> None:
    account = namespace.path("serviceaccounts/kinetic/token")
    answer = await api.call("POST", account, body={"spec": {"expirationSeconds": 600}})
    (tmp_path / "token").write_text(answer["status"]["token"])
    (tmp_path / "ca.crt").write_bytes(namespace.admin.ca.read_bytes())
    (tmp_path / "namespace").write_text(namespace.name)
    port = str(namespace.control_plane.port)
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
    environ["KINETIC_POD_ACCOUNT_FOLDER"] = str(tmp_path)
    pod = Api(await open_pod(environ), LIMITS)
    assert pod.default_namespace == namespace.name
    with pytest.raises(AuthError) as caught:
        await pod.call("GET", namespace.path("batch/v1/jobs"))
    subject = {"kind": "ServiceAccount", "namespace": namespace.name, "name": "kinetic"}
    assert list(printed_role(str(caught.value)))[1]["subjects"] == [subject]
    await pod.aclose()


@pytest.mark.timeout(120)
async def test_an_expired_token_is_read_again_from_the_kubeconfig(
    namespace: Namespace, api: Api
) -> None:
    secrets = namespace.path("secrets")
    await api.call("GET", secrets)
    namespace.control_plane.expire_token("admin")
    names = [f"n{number:02}" for number in range(20)]
    body = {"apiVersion": "v1", "kind": "Secret"}
    calls = (api.call("POST", secrets, body=body | {"metadata": {"name": name}}) for name in names)
    await asyncio.gather(*calls)
    found = await api.call("GET", secrets)
    assert [item["metadata"]["name"] for item in found["items"]] == names


@pytest.mark.timeout(120)
async def test_a_server_that_stops_answering_is_noticed_and_asked_again(
    namespace: Namespace, api: Api, opening: Open
) -> None:
    notes, wary = namespace.path("configmaps"), await opening("admin", WARY)
    version = (await api.call("GET", notes))["metadata"]["resourceVersion"]
    query = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
    lines = wary.lines(notes, query=query, idle_s=5.0)  # starting the watch may take a while
    await api.call("POST", notes, body=note("a"))
    assert b'"ADDED"' in await anext(lines)
    with namespace.control_plane.frozen_api():
        request = asyncio.create_task(wary.call("GET", f"{notes}/a"))
        with pytest.raises(Unavailable):
            async for _ in lines:  # a bookmark may still arrive
                pass
        await asyncio.sleep(2 * WARY.idle_s)
        assert not request.done()
    assert (await request)["metadata"]["name"] == "a"


async def test_several_clusters_and_users_stay_apart_in_one_loop(
    namespace: Namespace, opening: Open
) -> None:
    admin, dev = await opening("admin"), await opening("dev")
    notes = namespace.path("configmaps")

    async def kind_or_forbidden(api: Api) -> str:
        try:
            return str((await api.call("GET", notes))["kind"])
        except AuthError:
            return "forbidden"

    answers = await asyncio.gather(*(kind_or_forbidden(api) for api in (admin, dev) * 20))
    assert answers == ["ConfigMapList", "forbidden"] * 20
