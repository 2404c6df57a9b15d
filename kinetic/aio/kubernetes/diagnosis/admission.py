"""Why the API server did not create an object: quotas, policies, things that are missing."""

from __future__ import annotations

import re

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.quantities import amount, number
from kinetic.aio.kubernetes.diagnosis.rules import Rule, first, next_step
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, pending
from kinetic.job_status import Reason

__all__ = ["refusal"]


_RANGE = re.compile(
    r"(?P<bound>maximum|minimum) (?P<resource>\S+) usage per (?P<scope>\w+) is "
    r"(?P<limit>[^,\s]+?)(?:\.|,)?(?:\s+but (?:limit|request) is (?P<asked>[^\s,\]]+)"
    r"|\s+No (?:limit|request) is specified|(?=[\s\],]|$))"
)


_RATIO = re.compile(r"\S+ max limit to request (?:limit )?ratio per \w+ is \S+ but [^,\]]*")


_FINAL = Outlook.FINAL


def refusal(text: str) -> Diagnosis:
    """Judge the API server's own words, such as the message of a FailedCreate event."""
    return first(_RULES, text) or pending(
        f"Kubernetes does not create it: {one_line(_bare(text))}",
        next_step(text, "change what it names, or ask the cluster's administrator"),
        Reason.REFUSED,
        Outlook.BLOCKED,
    )


def _bare(text: str) -> str:
    by = r"^Error creating: |^create Pod \S+ in StatefulSet \S+ failed error: "
    return re.sub(by + r'|pods? "[^"]*" (is|are) forbidden: ', "", text)


def _exceeded(found: re.Match[str]) -> Diagnosis:
    """``exceeded quota: NAME, requested: a=1, used: a=2, limited: a=2``."""
    asked, used, limit = (_amounts(found[group]) for group in ("asked", "used", "limit"))
    never = [name for name in asked if name in limit and number(asked[name]) > number(limit[name])]
    wanted = ", ".join(f"{name} {amount(name, asked[name])}" for name in never or asked)
    kinds = [name.removeprefix("count/") for name in asked if name.startswith("count/")]
    quota = f"quota {found['name']!r}"
    if never and all(name.startswith("count/") or name == "pods" for name in never):
        names = ", ".join(name.removeprefix("count/") for name in never)
        scale = ", ".join(f"{name}: {limit[name]}" for name in asked if name in limit)
        words = f"{quota} allows no further {names} in the namespace ({scale})"
        advice = "have the quota raised, or use another namespace"
        return pending(words, advice, Reason.QUOTA, _FINAL)
    if never:
        allowed = ", ".join(f"{name} {amount(name, limit[name])}" for name in never)
        words = f"{quota} allows {allowed}, the pod asks for {wanted}: it can never fit"
        return pending(words, "ask for less, or have the quota raised", Reason.QUOTA, _FINAL)
    advice = "wait for other work to end, or have the quota raised"
    if kinds:
        kind = kinds[0].partition(".")[0]
        advice = f"delete finished {kind} (kubectl delete {kind} NAME), or have the quota raised"
    taken = ", ".join(
        f"{name} {amount(name, used.get(name, '?'))} of {amount(name, limit.get(name, '?'))}"
        for name in asked
    )
    words = f"{quota} is used up ({taken}), {wanted} more is needed: it is tried again"
    return pending(words, advice, Reason.QUOTA)


def _amounts(text: str) -> dict[str, str]:
    pairs = (part.strip().partition("=") for part in text.split(","))
    return {name: amount for name, _, amount in pairs if amount}


def _unset(found: re.Match[str]) -> Diagnosis:
    each = re.findall(r"([^\s;]+) for: [^;]*", found["what"]) or found["what"].split(",")
    names = ", ".join(part.strip() for one in each for part in str(one).split(","))
    words = f"quota {found['name']!r} needs {names} stated on every pod, and it is not"
    return pending(words, "set it: memory= and cpu= of the function do", Reason.QUOTA, _FINAL)


def _range(found: re.Match[str]) -> Diagnosis:
    """All that is out of the range: a LimitRange tells every one of them."""
    told = list(dict.fromkeys(_bound(one) for one in _RANGE.finditer(found.string)))
    told += [one_line(one[0]) for one in _RATIO.finditer(found.string)]
    more = {one["bound"] == "minimum" for one in _RANGE.finditer(found.string)}
    ask = "what it allows" if len(more) > 1 else "more" if more == {True} else "less"
    words = f"the namespace allows {'; '.join(told)}"
    return pending(words, f"ask for {ask}, or have the LimitRange changed", Reason.REFUSED, _FINAL)


def _bound(found: re.Match[str]) -> str:
    most = "at most" if found["bound"] == "maximum" else "at least"
    asked = f", {found['asked']} is asked" if found["asked"] else ", and none is stated"
    return f"{most} {found['limit']} of {found['resource']} a {found['scope'].lower()}{asked}"


def _unreachable(found: re.Match[str]) -> Diagnosis:
    causes = [part.strip() for part in (found["what"] or "").split(": ") if part.strip()]
    why = f" ({one_line(': '.join(causes[-2:]), 160)})" if causes else ""
    return pending(
        f"admission webhook {found['name']!r} of the cluster cannot be reached{why}, so nothing "
        "can be created; nothing is wrong with the job",
        "tell the cluster's administrator; it is tried again by itself",
        Reason.REFUSED,
        Outlook.BLOCKED,
    )


def _autopilot(found: re.Match[str]) -> Diagnosis:
    """Documents: GKE, 'Autopilot security capabilities': constraints and what violates them."""
    told = re.findall(r'\["([^\]]+?)"\]', found["what"])
    said = one_line("; ".join(told) or found["what"], 600)
    words = f"the policy of GKE ('GKE Warden', of Autopilot) refuses the pod: {said}"
    advice = "take out what it names, or use a Standard cluster or node pool"
    return pending(words, advice, Reason.REFUSED, _FINAL)


_RULES = (
    Rule(
        r"exceeded quota: (?P<name>[^,]+), requested: (?P<asked>.*?), used: (?P<used>.*?), "
        r"limited: (?P<limit>.*)",
        judge=_exceeded,
    ),
    Rule(r"failed quota: (?P<name>[^:]+): must specify (?P<what>.+)$", judge=_unset),
    Rule(_RANGE.pattern, judge=_range),
    Rule(
        _RATIO.pattern,
        "the namespace's LimitRange refuses the pod: {all}",
        "bring request and limit closer together",
        Reason.REFUSED,
        _FINAL,
    ),
    Rule(
        r'violates PodSecurity "(?P<level>[^":]+)[^"]*": (?P<what>.*)',
        "the namespace enforces Pod Security {level!r}, which refuses the pod: {what}",
        "set or remove the fields that it names, or use a namespace that allows them",
        Reason.REFUSED,
        _FINAL,
    ),
    Rule(
        r"insufficient quota to match these scopes: (?P<what>.*)",
        "the namespace has no quota for such pods, and needs one: insufficient quota to match "
        "these scopes: {what}",
        "use another priority class, or have a quota made for it",
        Reason.QUOTA,
        _FINAL,
    ),
    Rule(
        r'namespaces? "(?P<name>[^"]+)" not found',
        "namespace {name!r} does not exist in this cluster",
        "create it or correct the name",
    ),
    Rule(
        r'service ?account "?(?P<name>[^\s"]+)"? not found',
        "service account {name!r} does not exist in the namespace, so no pod can be made",
        "create it or correct the name; it is tried again by itself",
    ),
    Rule(
        r"no (?P<kind>PriorityClass) with name (?P<name>\S+) was found"
        r"|(?P<kind2>RuntimeClass|PriorityClass|StorageClass|ResourceClaimTemplate) "
        r'"?(?P<name2>[^\s"]+)"? not found',
        "{kind}{kind2} '{name}{name2}' does not exist in this cluster, so no pod can be made",
        "correct the name, or have an administrator make it",
    ),
    Rule(r'failed calling webhook "(?P<name>[^"]+)"(?:: (?P<what>.*))?', judge=_unreachable),
    # Documents: Binary Authorization, 'View audit logs' and 'Use breakglass'.
    Rule(
        r"(?P<what>[^:]*(?:denied by Binary Authorization|image policy webhook backend denied).*)",
        "Binary Authorization refuses the image: {what}",
        "use an image of a registry that the policy allows, or have it attested",
        Reason.REFUSED,
        _FINAL,
    ),
    Rule(r"GKE Warden rejected the request(?P<what>.*)", judge=_autopilot),
    Rule(
        r"(?:admission webhook \"(?P<name>[^\"]+)\" denied the request(?: without explanation|: )?"
        r"|ValidatingAdmissionPolicy '(?P<policy>[^']+)'[^:]* denied request: )(?P<what>.*)",
        "the cluster's policy '{name}{policy}' refuses it: {what}",
        "change the job as the policy says, or ask the cluster's administrator",
        Reason.REFUSED,
        _FINAL,
    ),
    Rule(
        r"in namespace (?P<name>\S+) because it is being terminated",
        "the namespace {name} is being deleted, with all in it",
        "submit again in another namespace",
        Reason.CANCELLED,
        _FINAL,
    ),
    Rule(
        r"(?P<field>spec\.\S*resources\.limits): Required value: Limit must be set",
        "Kubernetes refuses the specification ({field}): an accelerator is asked for without a "
        "limit",
        "name the accelerator in the limits, equal to the requests",
        Reason.REFUSED,
        _FINAL,
    ),
    Rule(
        r'"[^"]*" is invalid: (?P<what>.*)',
        "Kubernetes refuses the specification: {what}",
        "correct the named field",
        Reason.REFUSED,
        _FINAL,
    ),
    Rule(
        r'User "(?P<who>[^"]+)" cannot (?P<verb>\w+) resource "(?P<what>[^"]+)"',
        "{who} may not {verb} {what}",
        "have an administrator grant {verb} on {what}",
        Reason.REFUSED,
    ),
    Rule(
        r"etcdserver: .*|status unknown for quota.*|request did not complete within .*"
        r"|admission plugin \S+ failed to complete.*|the server is currently unable.*"
        r"|too many requests.*|the server was unable to return a response in time.*"
        r"|connection refused.*|context deadline exceeded.*|please apply your changes.*",
        "the API server could not do it just now ({all}); nothing is wrong with the job",
        "it is tried again by itself",
        Reason.REFUSED,
        Outlook.OPEN,
    ),
)
