"""Why the API server did not create an object: quotas, policies, missing objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial

from kinetic.aio.kubernetes.diagnosis.causes import ABSENT, Cause, Outlook, Rule, known, quoted
from kinetic.aio.kubernetes.diagnosis.quantities import amount, number
from kinetic.job_status import Reason

_WHAT = re.compile(r'(pods?|jobs?\.batch)( "[^"]*")? (is|are) forbidden: ')
_QUOTA = re.compile(
    r"exceeded quota: (?P<name>[^,]+), requested: (?P<asked>.*?), used: (?P<used>.*?), "
    r"limited: (?P<limit>.*)",
    re.DOTALL,
)


def refusal(text: str, unknown: Outlook = Outlook.BLOCKED) -> Cause:
    """Return the cause of a refusal in the API server's words, such as a FailedCreate event.

    *unknown* is the outlook of words that no rule knows.
    """
    said = _WHAT.sub("", text)
    if (quota := _QUOTA.search(said)) is not None:
        return _exceeded(quota)
    what = "Kubernetes does not create it"
    return known(_RULES, said) or quoted(what, said, Reason.REFUSED, unknown)


def _exceeded(found: re.Match[str]) -> Cause:
    asked, used, limit = (
        dict(re.findall(r"([^,=\s]+)=([^,\s]+)", found[group]))
        for group in ("asked", "used", "limit")
    )
    quota = f"quota {found['name']!r}"
    never = [name for name in asked if name in limit and number(asked[name]) > number(limit[name])]
    wanted = _amounts(asked, never or asked)
    if never and not any(number(limit[name]) for name in never):
        what = f"{quota} allows no {', '.join(never)} in the namespace: the limit is 0"
        advice = "have the quota raised, or use another namespace"
        return Cause(what=what, advice=advice, reason=Reason.QUOTA, outlook=Outlook.FINAL)
    if never:
        allowed = _amounts(limit, never)
        what = f"{quota} allows {allowed}, the pod asks for {wanted}: it can never fit"
        return Cause(what=what, reason=Reason.QUOTA, outlook=Outlook.FINAL)
    taken = ", ".join(
        f"{_amounts(used, [name])} of {amount(name, limit.get(name, '?'))}" for name in asked
    )
    advice = "wait for other work to end, or have the quota raised"
    if things := re.search(r"count/([^.=]+)", found["asked"]):
        kind = things[1]
        advice = f"delete finished {kind} (kubectl delete {kind} NAME), or have the quota raised"
    what = f"{quota} is used up ({taken}), {wanted} more is needed: it is tried again"
    return Cause(what=what, advice=advice, reason=Reason.QUOTA)


def _amounts(quantities: Mapping[str, str], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {amount(name, quantities.get(name, '?'))}" for name in names)


_never = partial(Rule, reason=Reason.REFUSED, outlook=Outlook.FINAL)
_BEYOND = r"(maximum|minimum) \S+ usage per \w+ is |\S+ max limit to request (limit )?ratio per "

_RULES = (
    _never(
        r"failed quota: (?P<name>[^:]+): must specify (?P<what>.+)$",
        "quota {name!r} needs these stated on every container: {what}",
        "set it there; for the function's own container set memory= and cpu=",
        reason=Reason.QUOTA,
    ),
    _never(
        rf"\[?(?P<what>({_BEYOND}).*?)\]?$",
        "the namespace's LimitRange refuses the pod: {what}",
        "ask for less or more, as it says, or have the LimitRange changed",
    ),
    Rule(
        r'failed calling webhook "(?P<name>[^"]+)"(?P<what>.*)',
        "admission webhook {name!r} of the cluster cannot be reached, or does not answer in time"
        "{what}; nothing is wrong with the job",
        "tell the cluster's administrator; it is tried again by itself",
        Reason.REFUSED,
    ),
    _never(
        r'violates PodSecurity "restricted[^"]*": (?P<what>.*runAsNonRoot.*)',
        "the namespace enforces Pod Security 'restricted', which refuses the pod: {what}",
        "set KINETIC_RUN_AS_USER, or run_as_user in the profile, to a user ID that the image can "
        "run as, such as 1000, or leave out container_image=",
    ),
    _never(
        r'violates PodSecurity "(?P<level>[^":]+)[^"]*": (?P<what>.*)',
        "the namespace enforces Pod Security {level!r}, which refuses the pod: {what}",
        "set or remove the fields that it names, or use a namespace that allows them",
    ),
    Rule(
        r"(webhook|Policy) ['\"](?P<name>[^'\"]+)['\"][^:]* denied (the )?request:?"
        r"[\s=]+(?P<what>.*)",
        "the cluster's policy {name!r} refuses it: {what}",
        "change the job as the policy says, or ask the cluster's administrator",
        Reason.REFUSED,
    ),
    Rule(
        r"in namespace (?P<name>\S+) because it is being terminated",
        "the namespace {name} is being deleted, with everything in it",
        "submit it again in another namespace",
        Reason.CANCELLED,
        Outlook.FINAL,
    ),
    _never(
        r'"[^"]*" is invalid: (?P<what>.*)',
        "Kubernetes refuses the specification: {what}",
        "correct the named field",
    ),
    Rule(
        r'service ?account "?(?P<name>[^\s"]+)"? not found',
        "service account {name!r} does not exist in the namespace, so no pod can be made",
        "create it (kinetic doctor --manifest prints all that a namespace needs), or correct the "
        "name (KINETIC_SERVICE_ACCOUNT)",
    ),
    *ABSENT,
    Rule(
        r'User "(?P<who>[^"]+)" cannot (?P<verb>\w+) resource "(?P<what>[^"]+)"',
        "{who} may not {verb} {what}",
        "have an administrator grant {verb} on {what}",
        Reason.REFUSED,
    ),
    Rule(
        r"(etcdserver: |status unknown for quota|request did not complete within "
        r"|admission plugin \S+ failed to complete|the server is currently unable"
        r"|too many requests|the server was unable to return a response in time"
        r"|connection refused|context deadline exceeded|timed out|please apply your changes).*",
        "the API server cannot do it now ({all}); nothing is wrong with the job",
        "it is tried again by itself",
        Reason.REFUSED,
        Outlook.OPEN,
    ),
)
