"""The errors that API answers raise, and the Role that they print for a missing permission."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from kinetic.aio._net.http import HttpError
from kinetic.aio.kubernetes.request import Request, translate_refusal
from kinetic.aio.kubernetes.rights import Right
from kinetic.errors import AuthError, BackendError, Refused, Throttled

BATCH = "/apis/batch/v1/namespaces/team/jobs"
CORE = "/api/v1/namespaces/team"


def failed(status: int, message: str, reason: str = "Forbidden") -> HttpError:
    body = {"kind": "Status", "code": status, "reason": reason, "message": message}
    return HttpError(status, json.dumps(body))


@pytest.mark.parametrize(
    ("method", "path", "query", "right"),
    [
        ("POST", BATCH, {}, ("create", "batch", "jobs", "team", "")),
        ("GET", BATCH, {}, ("list", "batch", "jobs", "team", "")),
        ("GET", BATCH, {"watch": "1"}, ("watch", "batch", "jobs", "team", "")),
        ("GET", BATCH, {"watch": "true"}, ("watch", "batch", "jobs", "team", "")),
        ("GET", f"{BATCH}/a", {}, ("get", "batch", "jobs", "team", "a")),
        ("PATCH", f"{BATCH}/a", {}, ("patch", "batch", "jobs", "team", "a")),
        ("PUT", f"{BATCH}/a/status", {}, ("update", "batch", "jobs/status", "team", "a")),
        ("DELETE", f"{BATCH}/a", {}, ("delete", "batch", "jobs", "team", "a")),
        ("DELETE", BATCH, {}, ("deletecollection", "batch", "jobs", "team", "")),
        ("GET", f"{CORE}/pods/a/log", {}, ("get", "", "pods/log", "team", "a")),
        ("POST", f"{CORE}/pods/a/portforward", {}, ("create", "", "pods/portforward", "team", "a")),
        ("GET", "/api/v1/nodes", {}, ("list", "", "nodes", "", "")),
        ("GET", "/api/v1/nodes/n", {}, ("get", "", "nodes", "", "n")),
        ("GET", "/api/v1/namespaces/team", {}, ("get", "", "namespaces", "", "team")),
        ("GET", "/api/v1/pods", {}, ("list", "", "pods", "", "")),
    ],
)
def test_the_path_of_a_request_determines_its_permission(
    method: str, path: str, query: dict[str, str], right: tuple[str, ...]
) -> None:
    names = ("verb", "group", "resource", "namespace", "name")
    expected = Right(**dict(zip(names, right, strict=True)))
    assert Request(method=method, path=path, query=query).right == expected


USER = {"kind": "User", "apiGroup": "rbac.authorization.k8s.io"}


def printed_documents(text: str) -> list[dict[str, Any]]:
    """Return the documents at the end of an error's *text*."""
    return list(yaml.safe_load_all(text.partition("and this:\n")[2]))


def test_the_error_for_a_missing_permission_prints_the_role_that_grants_it() -> None:
    message = (
        'jobs.batch is forbidden: User "ada@example.com" cannot create resource "jobs" in API '
        'group "batch" in the namespace "team": requires one of ["container.jobs.create"]'
    )
    error = translate_refusal(failed(403, message), Request(method="POST", path=BATCH), "c")
    assert isinstance(error, AuthError)
    text = str(error)
    assert "cannot create jobs in namespace 'team' of c" in text
    assert "verb 'create' on resource 'jobs' of API group 'batch'" in text
    assert "container.jobs.create" in text
    role, binding = printed_documents(text)
    assert role["kind"] == "Role"
    assert role["metadata"] == {"name": "kinetic", "namespace": "team"}
    assert binding["subjects"] == [{**USER, "name": "ada@example.com"}]


def test_an_unusual_permission_is_added_to_the_role() -> None:
    request = Request(method="PUT", path=f"{CORE}/services/s")
    text = str(translate_refusal(failed(403, 'User "a" cannot update'), request, "c"))
    rules = printed_documents(text)[0]["rules"]
    assert rules[-1] == {"apiGroups": [""], "resources": ["services"], "verbs": ["update"]}
    assert rules[0]["resources"] == ["jobs"]


def test_a_resource_outside_namespaces_needs_a_cluster_role_with_nothing_else() -> None:
    request = Request(method="GET", path="/api/v1/nodes")
    text = str(
        translate_refusal(failed(403, 'User "a" cannot list resource "nodes"'), request, "c")
    )
    role, binding = printed_documents(text)
    assert (role["kind"], binding["kind"]) == ("ClusterRole", "ClusterRoleBinding")
    assert role["metadata"] == {"name": "kinetic"}
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}]


def test_a_service_account_is_bound_as_one() -> None:
    message = 'User "system:serviceaccount:team:runner" cannot get'
    text = str(translate_refusal(failed(403, message), Request(method="GET", path=BATCH), "c"))
    (subject,) = printed_documents(text)[1]["subjects"]
    assert subject == {"kind": "ServiceAccount", "namespace": "team", "name": "runner"}


def test_an_anonymous_user_is_asked_to_log_in() -> None:
    message = 'User "system:anonymous" cannot get'
    text = str(translate_refusal(failed(403, message), Request(method="GET", path=BATCH), "c"))
    assert "log in first" in text


@pytest.mark.parametrize(
    "message",
    [
        'jobs "x" is forbidden: exceeded quota: q, requested: count/jobs=1, used: 1, limited: 1',
        'jobs "x" is forbidden: violates PodSecurity "restricted:latest"',
        'jobs "x" is forbidden: unable to create new content in namespace t: being terminated',
        'admission webhook "policy.example.com" denied the request: jobs cannot use GPUs here',
    ],
)
def test_no_role_is_printed_when_something_else_forbids_the_request(message: str) -> None:
    error = translate_refusal(failed(403, message), Request(method="POST", path=BATCH), "c")
    assert isinstance(error, Refused)
    assert message in str(error)
    assert error.answer["message"] == message
    assert "Role" not in str(error)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "<html>Forbidden by the proxy</html>",
            "names no missing permission; check whether a prox",
        ),
        ("", "names no missing permission"),
        (
            "Permission 'container.clusters.connect' denied",
            "a role with container.clusters.connect",
        ),
    ],
)
def test_no_role_is_printed_for_a_refusal_that_is_not_the_api_servers(text: str, says: str) -> None:
    error = translate_refusal(HttpError(403, text), Request(method="GET", path=BATCH), "c")
    assert type(error) is AuthError
    assert says in str(error) and "kind: Role" not in str(error)


def test_a_servers_text_is_shown_on_one_line_and_shortened() -> None:
    answer = HttpError(418, "<html>\n\x1b[2J" + "x" * 10_000)
    error = translate_refusal(answer, Request(method="GET", path=BATCH), "c")
    assert type(error) is BackendError
    assert "\n" not in str(error)
    assert "\x1b" not in str(error)
    assert len(str(error)) < 1000


def test_the_body_may_contain_the_retry_delay() -> None:
    body = '{"kind": "Status", "message": "m", "details": {"retryAfterSeconds": 4}}'
    request = Request(method="GET", path=BATCH)
    error = translate_refusal(HttpError(429, body), request, "c")
    assert isinstance(error, Throttled)
    assert error.retry_after == 4.0
    assert (
        translate_refusal(HttpError(429, body, {"Retry-After": "1"}), request, "c").retry_after
        == 1.0
    )
