"""Find why the API server didn't create an object: quotas, policies, missing objects."""

from __future__ import annotations

import re
from functools import partial

from kinetic.aio.kubernetes.diagnosis.causes import Cause, Outlook, Rule, quote_message
from kinetic.aio.kubernetes.diagnosis.documents import Document
from kinetic.aio.kubernetes.diagnosis.nodes import parse_quantity
from kinetic.job_status import Reason

_FORBIDDEN_PREFIX = re.compile(r'(pods?|jobs?\.batch)( "[^"]*")? (is|are) forbidden: ')
_QUOTA = re.compile(r"exceeded quota: .*?requested: (?P<asked>.*?), used: .*limited: (?P<limit>.*)")


def refused_request(answer: Document) -> Cause:
    """Return why the API server refused to create a Job; *answer* is its ``Status``."""
    # Of a forbidden request, an administrator can change what the cluster allows.
    unknown = Outlook.BLOCKED if answer.get("code") == 403 else Outlook.FINAL
    return admission_cause(str(answer.get("message") or answer.get("reason") or ""), unknown)


def admission_cause(text: str, unknown: Outlook = Outlook.BLOCKED) -> Cause:
    """Return the cause of a refusal by the API server; *text* is its message or that of an event.

    *unknown* is the outlook for a message that no rule matches.
    """
    message = _FORBIDDEN_PREFIX.sub("", text)
    if (quota := _QUOTA.search(message)) is not None:
        return _quota_cause(quota[0], quota["asked"], quota["limit"])
    summary = "the API server refuses it"
    return quote_message(summary, message, _RULES, _refused_rule("", outlook=unknown))


def _quota_cause(message: str, requested: str, limit: str) -> Cause:
    """Return the cause of an exceeded quota; it is final if the job alone exceeds *limit*."""
    limits = dict(_amounts(limit))
    if any(
        parse_quantity(amount) > parse_quantity(limits.get(name, "inf"))
        for name, amount in _amounts(requested)
    ):
        summary = f"it can never fit: {message}"
        return Cause(summary=summary, reason=Reason.QUOTA, outlook=Outlook.FINAL)
    advice = "wait for other work to end, or have the quota raised"
    if "count/jobs.batch" in requested:
        advice = "delete finished Jobs (kubectl delete job NAME), or have the quota raised"
    return Cause(summary=message, advice=advice, reason=Reason.QUOTA)


def _amounts(text: str) -> list[tuple[str, str]]:
    """Return (resource, amount) pairs of a text such as ``cpu=2,memory=4Gi``."""
    return re.findall(r"([^,=\s]+)=([^,\s]+)", text)


_refused_rule = partial(Rule, reason=Reason.REFUSED)
_final_rule = partial(_refused_rule, outlook=Outlook.FINAL)

_RULES = (
    _final_rule(
        "failed quota: .*must specify",
        "set memory= and cpu= for the function's container",
        reason=Reason.QUOTA,
    ),
    _final_rule(
        r"(maximum|minimum) \S+ usage per \w+ is |max limit to request (limit )?ratio per ",
        "request what the namespace's LimitRange allows, or have it raised",
    ),
    _refused_rule(
        "failed calling webhook",
        "tell the cluster's administrator that the webhook doesn't answer; the job is not at fault",
    ),
    _final_rule(
        'violates PodSecurity "restricted.*runAsNonRoot',
        "set KINETIC_RUN_AS_USER, or run_as_user in the profile, to a user ID that the image can "
        "run as, such as 1000, or omit container_image=",
    ),
    _final_rule("violates PodSecurity", "use a namespace without the restriction that it names"),
    _refused_rule(
        r"(webhook|Policy) ['\"][^'\"]+['\"][^:]* denied (the )?request",
        "change the job as the policy says, or ask the cluster's administrator",
    ),
    _final_rule("because it is being terminated", "use another namespace", reason=Reason.CANCELLED),
    _final_rule('"[^"]*" is invalid: ', "correct the named field"),
    Rule(
        r'service ?account "?[^\s"]+"? not found',
        "create it (kinetic doctor --manifest prints everything a namespace needs), or correct the "
        "name (KINETIC_SERVICE_ACCOUNT)",
    ),
    Rule(
        r'(namespace|\w+ ?class)\S* (with name )?"?[^\s"]+"? ((was|not) found|does not exist)',
        "create it, have an administrator create it, or correct the name",
    ),
    _refused_rule(
        r"etcdserver: |status unknown for quota|request did not complete within "
        r"|admission plugin \S+ failed to complete|the server is currently unable"
        r"|too many requests|the server was unable to return a response in time"
        r"|connection refused|context deadline exceeded|timed out|please apply your changes",
        "wait; Kubernetes retries. If this persists, tell the cluster's administrator",
        outlook=Outlook.OPEN,
    ),
)
