"""Why the API server did not create an object: quotas, policies, things that are missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial

from kinetic.aio.kubernetes.diagnosis.causes import ABSENT, explained
from kinetic.aio.kubernetes.diagnosis.quantities import amount, number
from kinetic.aio.kubernetes.diagnosis.rules import Rule
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, pending
from kinetic.job_status import Reason

_FINAL = Outlook.FINAL
_never = partial(Rule, reason=Reason.REFUSED, outlook=_FINAL)


def refusal(text: str, unknown: Outlook = Outlook.BLOCKED) -> Diagnosis:
    """Judge the API server's own words, such as the message of a FailedCreate event.

    *unknown* is the outlook where no rule knows them.
    """
    said = re.sub(r'(pods?|jobs?\.batch)( "[^"]*")? (is|are) forbidden: ', "", text)
    otherwise = "change what it names, or ask the cluster's administrator"
    what = "Kubernetes does not create it"
    return explained(_RULES, said, what, otherwise, Reason.REFUSED, unknown)


def _exceeded(found: re.Match[str]) -> Diagnosis:
    """``exceeded quota: NAME, requested: a=1, used: a=2, limited: a=2``."""
    asked, used, limit = (
        dict(re.findall(r"([^,=\s]+)=([^,\s]+)", found[group]))
        for group in ("asked", "used", "limit")
    )
    quota = f"quota {found['name']!r}"
    never = [name for name in asked if name in limit and number(asked[name]) > number(limit[name])]
    wanted = _amounts(asked, never or asked)
    if never:
        less = "ask for less, "
        words = f"allows {_amounts(limit, never)}, the pod asks for {wanted}: it can never fit"
        if not any(number(limit[name]) for name in never):
            words = f"allows no {', '.join(never)} in the namespace: the limit is 0"
            less = ""
        advice = f"{less}have the quota raised, or use another namespace"
        return pending(f"{quota} {words}", advice, Reason.QUOTA, _FINAL)
    taken = ", ".join(
        f"{_amounts(used, [name])} of {amount(name, limit.get(name, '?'))}" for name in asked
    )
    words = f"{quota} is used up ({taken}), {wanted} more is needed: it is tried again"
    advice = "wait for other work to end, or have the quota raised"
    if things := re.search(r"count/([^.=]+)", found["asked"]):
        kind = things[1]
        advice = f"delete finished {kind} (kubectl delete {kind} NAME), or have the quota raised"
    return pending(words, advice, Reason.QUOTA)


def _amounts(quantities: Mapping[str, str], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {amount(name, quantities.get(name, '?'))}" for name in names)


def _unset(found: re.Match[str]) -> Diagnosis:
    names = re.sub(r"( for: [^;]*)?[;,] *| for: .*", ", ", found["what"]).removesuffix(", ")
    where = ", ".join(map(repr, dict.fromkeys(re.findall(r" for: ([^;,\s]+)", found["what"]))))
    missing = f"container {where} has it not" if where else "it is not"
    words = f"quota {found['name']!r} needs {names} stated on every container, and {missing}"
    advice = "set it there; for the function's own container memory= and cpu= do"
    return pending(words, advice, Reason.QUOTA, _FINAL)


_BEYOND = re.compile(
    r"(?P<bound>maximum|minimum) (?P<resource>\S+) usage per (?P<scope>\w+) is "
    r"(?P<limit>[^,\s]+?)[.,]?(?:\s+but (?:limit|request) is (?P<asked>[^\s,\]]+)"
    r"|\s+No (?:limit|request) is specified|(?=[\s\],]|$))"
    r"|\S+ max limit to request (?:limit )?ratio per \w+ is \S+ but [^,\]]*"
)
"""What a LimitRange says of all that is out of it, one after the other."""


_STEPS = {"maximum": "ask for less", "minimum": "ask for more"}


def _range(found: re.Match[str]) -> Diagnosis:
    told: list[str] = []
    steps: list[str] = []
    for one in _BEYOND.finditer(found.string):
        most = "at most" if one["bound"] == "maximum" else "at least"
        asked = f"{one['asked']} is asked" if one["asked"] else "and none is stated"
        scope = str(one["scope"]).lower()
        words = f"{most} {one['limit']} of {one['resource']} a {scope}, {asked}"
        told.append(words if one["bound"] else one[0])
        steps.append(_STEPS.get(one["bound"], "bring request and limit closer together"))
    step = steps[0] if len(set(steps)) == 1 else "ask for what it allows"
    words = f"the namespace's LimitRange refuses the pod: {'; '.join(dict.fromkeys(told))}"
    return pending(words, f"{step}, or have the LimitRange changed", Reason.REFUSED, _FINAL)


_RULES = (
    Rule(
        r"exceeded quota: (?P<name>[^,]+), requested: (?P<asked>.*?), used: (?P<used>.*?), "
        r"limited: (?P<limit>.*)",
        judge=_exceeded,
    ),
    Rule(r"failed quota: (?P<name>[^:]+): must specify (?P<what>.+)$", judge=_unset),
    Rule(_BEYOND.pattern, judge=_range),
    _never(
        r"insufficient quota to match these scopes: .*",
        "the namespace has no quota for such pods, and needs one: {all}",
        "use another priority class, or have a quota made for it",
        reason=Reason.QUOTA,
    ),
    Rule(
        r'failed calling webhook "(?P<name>[^"]+)"',
        "admission webhook {name!r} of the cluster cannot be reached, or does not answer in time "
        "({end}), so nothing can be created; nothing is wrong with the job",
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
    # Documents: Binary Authorization, 'View audit logs' and 'Use breakglass'.
    _never(
        r"(Image \S+ )?(denied by Binary Authorization|image policy webhook backend denied).*",
        "Binary Authorization refuses the image: {all}",
        "use an image of a registry that the policy allows, or have it attested and name it by its "
        "digest",
    ),
    # Documents: GKE, 'Autopilot security capabilities': constraints and what violates them.
    _never(
        r"GKE Warden rejected the request because it violates (one or more constraints\.\s*)?"
        r"(Violations details: )?(?P<what>.*?)(Requested by user|\Z)",
        "the policy of GKE ('GKE Warden', of Autopilot) refuses the pod: {what}",
        "take out what it names, or use a Standard cluster or node pool",
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
        "the namespace {name} is being deleted, with all in it",
        "submit again in another namespace",
        Reason.CANCELLED,
        _FINAL,
    ),
    _never(
        r"spec\.\S*resources\.limits: Required value: Limit must be set",
        "Kubernetes refuses the specification, for an accelerator has no limit: {all}",
        "name the accelerator in the limits, equal to the requests",
    ),
    _never(
        r'"(?P<name>[^"]+)" already exists',
        "there is a {name!r} already",
        "take another name, or remove that one if nobody wants it any more",
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
        "name (KINETIC_SERVICE_ACCOUNT); it is tried again by itself",
    ),
    *ABSENT,
    Rule(
        r'User "(?P<who>[^"]+)" cannot (?P<verb>\w+) resource "(?P<what>[^"]+)"',
        "{who} may not {verb} {what}",
        "have an administrator grant {verb} on {what}",
        Reason.REFUSED,
    ),
    Rule(
        r"etcdserver: |status unknown for quota|request did not complete within "
        r"|admission plugin \S+ failed to complete|the server is currently unable"
        r"|too many requests|the server was unable to return a response in time"
        r"|connection refused|context deadline exceeded|timed out|please apply your changes",
        "the API server could not do it just now ({end}); nothing is wrong with the job",
        "it is tried again by itself",
        Reason.REFUSED,
        Outlook.OPEN,
    ),
)
