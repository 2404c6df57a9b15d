"""Say what to do about a refusal of a Google API, by the reason in its answer.

The HTTP status alone says little: 403 is a missing permission, but also a retention policy, a key,
a service perimeter, or billing. Client and runner share this table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from .wire import BILLING_PROJECT


def _rule(pattern: str, advice: str) -> tuple[re.Pattern[str], str]:
    return re.compile(pattern, re.IGNORECASE), advice


_RETAINED = (
    _rule(
        r"retentionPolicyNotMet|retention policy|retention period|object retention",
        "wait until the retention period ends, or ask the bucket's owner to change it; for "
        "kinetic's store, use a bucket without a retention policy",
    ),
    _rule(
        r"ActiveHold|active \S+ hold|hold is released|hold is removed",
        "ask the owner of the object to release the hold; for kinetic's store, use a bucket "
        "without a default hold",
    ),
)
"""Refusals to replace or delete an object because its bucket keeps it (Google, "Retention policies
and retention policy locks", and "Object holds")."""

_RULES = (
    *_RETAINED,
    _rule(
        r"requester pays|no user project|userProjectMissing",
        f"set {BILLING_PROJECT} to the project that pays for the requests",
    ),
    _rule(
        r"requires a quota project|USER_PROJECT_DENIED|serviceusage\.services\.use",
        "name a quota project that you may use: set GOOGLE_CLOUD_QUOTA_PROJECT, or run "
        "`gcloud auth application-default set-quota-project PROJECT`",
    ),
    _rule(
        r"SERVICE_DISABLED|accessNotConfigured",
        "enable the API in that project, then wait a few minutes",
    ),
    _rule(
        r"SCOPE_INSUFFICIENT|insufficient authentication scopes",
        "use credentials with the scope cloud-platform: log in again, or change the access scopes "
        "of the machine",
    ),
    _rule(
        r"vpcServiceControls|VPC Service Controls|SECURITY_POLICY_VIOLATED"
        r"|prohibited by organization's policy",
        "a service perimeter blocks the request: send it from inside the perimeter, or ask its "
        "administrator for access",
    ),
    _rule(
        r"constraints/|violates? .*constraint|constraint .*violated|organization policy|orgpolicy",
        "a policy of the organization blocks the request: change the resource so that it meets the "
        "policy, or ask the policy's administrator for an exception",
    ),
    _rule(
        r"\bKMS key|cloudkms|kmsKey",
        "check that the key is enabled, and that the account that the message names may use it",
    ),
    _rule(
        r"billing (account|is)|BILLING_DISABLED|accountDisabled|AccountProblem",
        "link the project to an active billing account",
    ),
    _rule(r"IP filter", "send the request from an address that the bucket's IP filter allows"),
    _rule(r"quota ?(exceeded|limit)|exceed.* quota|LimitExceeded", "wait, or ask for more quota"),
)
"""Reasons and messages of refusals, and what to do; the first that matches counts."""


def reasons(error: object) -> frozenset[str]:
    """Return the machine-readable reasons in *error*, the error document of an answer."""
    if not isinstance(error, Mapping):
        return frozenset()
    document = cast("Mapping[str, Any]", error)
    details = [*(document.get("details") or ()), *(document.get("errors") or ())]
    return frozenset(
        str(reason)
        for reason in (document.get("status"), *(detail.get("reason") for detail in details))
        if reason
    )


def advice(text: str) -> str:
    """Return what to do about a refusal with these reasons and message; "" if it's unknown."""
    return next((said for pattern, said in _RULES if pattern.search(text)), "")


def is_retained(error: object) -> bool:
    """Return whether *error*, the error document of an answer, says that a bucket keeps an object.

    For an object that kinetic writes again and again, no waiting helps.
    """
    if not isinstance(error, Mapping):
        return False
    document = cast("Mapping[str, Any]", error)
    text = " ".join((*sorted(reasons(document)), str(document.get("message"))))
    return any(pattern.search(text) for pattern, _ in _RETAINED)


def missing_permission(api: str, text: str) -> str:
    """Return the permission of *api* that *text* names, such as storage.objects.get; else ""."""
    # A role or a host may look alike: roles/cloudbuild.builds.editor, storage.googleapis.com.
    match = re.search(rf"(?<![\w/.]){api}\.(?!googleapis\b)[a-zA-Z]+s\.[a-zA-Z]+", text)
    return match[0] if match else ""
