"""Why the API server did not create an object: quotas, policies, things that are missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.advice import next_step
from kinetic.aio.kubernetes.diagnosis.quantities import amount, number
from kinetic.aio.kubernetes.diagnosis.verdict import Outlook
from kinetic.job_status import Reason

__all__ = ["Refusal", "refusal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What was refused, by what, and whether waiting may help."""

    reason: Reason
    message: str
    advice: str
    outlook: Outlook


_RANGE = re.compile(
    r"(?P<bound>maximum|minimum) (?P<resource>\S+) usage per (?P<scope>\w+) is "
    r"(?P<limit>[^,\s]+?)(?:\.|,)?(?:\s+but (?:limit|request) is (?P<asked>[^\s,\]]+)"
    r"|\s+No (?:limit|request) is specified|(?=[\s\],]|$))"
)


_RATIO = re.compile(r"\S+ max limit to request (?:limit )?ratio per \w+ is \S+ but [^,\]]*")


def refusal(text: str) -> Refusal:
    """Judge the API server's own words, such as the message of a FailedCreate event."""
    for pattern, judge in _RULES:
        if found := pattern.search(text):
            return judge(found)
    return Refusal(
        reason=Reason.REFUSED,
        message=f"Kubernetes does not create it: {one_line(_bare(text))}",
        advice=next_step(text, "change what it names, or ask the cluster's administrator"),
        outlook=Outlook.BLOCKED,
    )


def _bare(text: str) -> str:
    by = r"^Error creating: |^create Pod \S+ in StatefulSet \S+ failed error: "
    return re.sub(by + r'|pods? "[^"]*" (is|are) forbidden: ', "", text)


def _exceeded(found: re.Match[str]) -> Refusal:
    """``exceeded quota: NAME, requested: a=1, used: a=2, limited: a=2``."""
    asked, used, limit = (_amounts(found[group]) for group in ("asked", "used", "limit"))
    scale = [f"{name}: {limit[name]}" for name in asked if name in limit]
    never = [name for name in asked if name in limit and number(asked[name]) > number(limit[name])]
    wanted = ", ".join(f"{name} {amount(name, asked[name])}" for name in never or asked)
    allowed = ", ".join(
        f"{name} {amount(name, limit[name])}" for name in never or asked if name in limit
    )
    if never and all(name.startswith("count/") or name == "pods" for name in never):
        kinds = ", ".join(name.removeprefix("count/") for name in never)
        words = f"quota {found['name']!r} allows no further {kinds} in the namespace"
        return Refusal(
            reason=Reason.QUOTA,
            message=f"{words} ({', '.join(scale)})",
            advice="have the quota raised, or use another namespace",
            outlook=Outlook.FINAL,
        )
    if never:
        return Refusal(
            reason=Reason.QUOTA,
            message=f"quota {found['name']!r} allows {allowed}, the pod asks for {wanted}: "
            "it can never fit",
            advice="ask for less, or have the quota raised",
            outlook=Outlook.FINAL,
        )
    advice = "wait for other work to end, or have the quota raised"
    if objects := [name for name in asked if name.startswith("count/")]:
        kind = objects[0].removeprefix("count/").partition(".")[0]
        advice = f"delete finished {kind} (kubectl delete {kind} NAME), or have the quota raised"
    taken = ", ".join(
        f"{name} {amount(name, used.get(name, '?'))} of {amount(name, limit.get(name, '?'))}"
        for name in asked
    )
    return Refusal(
        reason=Reason.QUOTA,
        message=f"quota {found['name']!r} is used up ({taken}), {wanted} more is needed: "
        "it is tried again",
        advice=advice,
        outlook=Outlook.OPEN,
    )


def _amounts(text: str) -> dict[str, str]:
    pairs = (part.strip().partition("=") for part in text.split(","))
    return {name: amount for name, _, amount in pairs if amount}


def _unset(found: re.Match[str]) -> Refusal:
    each = re.findall(r"([^\s;]+) for: [^;]*", found["what"]) or found["what"].split(",")
    names = ", ".join(part.strip() for one in each for part in str(one).split(","))
    return Refusal(
        reason=Reason.QUOTA,
        message=f"quota {found['name']!r} needs {names} stated on every pod, and it is not",
        advice="set it: memory= and cpu= of the function do",
        outlook=Outlook.FINAL,
    )


def _range(found: re.Match[str]) -> Refusal:
    """All that is out of the range: a LimitRange tells every one of them."""
    told = list(dict.fromkeys(_bound(one) for one in _RANGE.finditer(found.string)))
    told += [one_line(one[0]) for one in _RATIO.finditer(found.string)]
    more = {one["bound"] == "minimum" for one in _RANGE.finditer(found.string)}
    ask = "what it allows" if len(more) > 1 else "more" if more == {True} else "less"
    return Refusal(
        reason=Reason.REFUSED,
        message=f"the namespace allows {'; '.join(told)}",
        advice=f"ask for {ask}, or have the LimitRange changed",
        outlook=Outlook.FINAL,
    )


def _bound(found: re.Match[str]) -> str:
    most = "at most" if found["bound"] == "maximum" else "at least"
    asked = f", {found['asked']} is asked" if found["asked"] else ", and none is stated"
    scope = found["scope"].lower()
    return f"{most} {found['limit']} of {found['resource']} a {scope}{asked}"


def _ratio(found: re.Match[str]) -> Refusal:
    return Refusal(
        reason=Reason.REFUSED,
        message=f"the namespace's LimitRange refuses the pod: {one_line(found[0])}",
        advice="bring request and limit closer together",
        outlook=Outlook.FINAL,
    )


def _security(found: re.Match[str]) -> Refusal:
    level = found["level"].split(":")[0]
    return Refusal(
        reason=Reason.REFUSED,
        message=f"the namespace enforces Pod Security {level!r}, which refuses the pod: "
        f"{one_line(found['what'], 600)}",
        advice="set or remove the fields that it names, or use a namespace that allows them",
        outlook=Outlook.FINAL,
    )


def _account(found: re.Match[str]) -> Refusal:
    return Refusal(
        reason=Reason.SETUP,
        message=f"service account {found['name']!r} does not exist in the namespace, so no pod "
        "can be made",
        advice="create it or correct the name; it is tried again by itself",
        outlook=Outlook.BLOCKED,
    )


def _class(found: re.Match[str]) -> Refusal:
    kind, name = found["kind"], found["name"].strip('"')
    return Refusal(
        reason=Reason.SETUP,
        message=f"{kind} {name!r} does not exist in this cluster, so no pod can be made",
        advice="correct the name, or have an administrator make it",
        outlook=Outlook.BLOCKED,
    )


def _unreachable(found: re.Match[str]) -> Refusal:
    causes = [part.strip() for part in (found["what"] or "").split(": ") if part.strip()]
    why = f" ({one_line(': '.join(causes[-2:]), 160)})" if causes else ""
    return Refusal(
        reason=Reason.REFUSED,
        message=f"admission webhook {found['name']!r} of the cluster cannot be reached{why}, so "
        "nothing can be created; nothing is wrong with the job",
        advice="tell the cluster's administrator; it is tried again by itself",
        outlook=Outlook.BLOCKED,
    )


def _busy(found: re.Match[str]) -> Refusal:
    return Refusal(
        reason=Reason.REFUSED,
        message=f"the API server could not do it just now ({one_line(found[0])}); nothing is wrong "
        "with the job",
        advice="it is tried again by itself",
        outlook=Outlook.OPEN,
    )


def _unscoped(found: re.Match[str]) -> Refusal:
    return Refusal(
        reason=Reason.QUOTA,
        message="the namespace has no quota for such pods, and needs one: insufficient quota to "
        f"match these scopes: {one_line(found['what'])}",
        advice="use another priority class, or have a quota made for it",
        outlook=Outlook.FINAL,
    )


def _no_namespace(found: re.Match[str]) -> Refusal:
    return Refusal(
        reason=Reason.SETUP,
        message=f"namespace {found['name']!r} does not exist in this cluster",
        advice="create it or correct the name",
        outlook=Outlook.BLOCKED,
    )


def _denied(found: re.Match[str]) -> Refusal:
    said = one_line(found["what"] or "it gives no cause", 400)
    return Refusal(
        reason=Reason.REFUSED,
        message=f"the cluster's policy {found['name']!r} refuses it: {said}",
        advice="change the job as the policy says, or ask the cluster's administrator",
        outlook=Outlook.FINAL,
    )


def _unverified(found: re.Match[str]) -> Refusal:
    """Documents: Binary Authorization, 'View audit logs' and 'Use breakglass'."""
    return Refusal(
        reason=Reason.REFUSED,
        message=f"Binary Authorization refuses the image: {one_line(found['what'], 600)}",
        advice="use an image of a registry that the policy allows, or have it attested",
        outlook=Outlook.FINAL,
    )


def _autopilot(found: re.Match[str]) -> Refusal:
    """Documents: GKE, 'Autopilot security capabilities': constraints and what violates them."""
    told = re.findall(r'\["([^\]]+?)"\]', found["what"])
    said = one_line("; ".join(told) or found["what"], 600)
    return Refusal(
        reason=Reason.REFUSED,
        message=f"the policy of GKE ('GKE Warden', of Autopilot) refuses the pod: {said}",
        advice="take out what it names, or use a Standard cluster or node pool",
        outlook=Outlook.FINAL,
    )


def _ending(found: re.Match[str]) -> Refusal:
    return Refusal(
        reason=Reason.CANCELLED,
        message=f"the namespace {found['name'].strip(chr(34))} is being deleted, with all in it",
        advice="submit again in another namespace",
        outlook=Outlook.FINAL,
    )


def _unlimited(found: re.Match[str]) -> Refusal:
    return Refusal(
        reason=Reason.REFUSED,
        message=f"Kubernetes refuses the specification ({found['field']}): an accelerator is "
        "asked for without a limit",
        advice="name the accelerator in the limits, equal to the requests",
        outlook=Outlook.FINAL,
    )


def _invalid(found: re.Match[str]) -> Refusal:
    return Refusal(
        reason=Reason.REFUSED,
        message=f"Kubernetes refuses the specification: {one_line(found['what'], 400)}",
        advice="correct the named field",
        outlook=Outlook.FINAL,
    )


def _forbidden(found: re.Match[str]) -> Refusal:
    who, verb, what = found["who"], found["verb"], found["what"]
    return Refusal(
        reason=Reason.REFUSED,
        message=f"{who} may not {verb} {what}",
        advice=f"have an administrator grant {verb} on {what}",
        outlook=Outlook.BLOCKED,
    )


_RULES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Refusal]], ...] = tuple(
    (re.compile(pattern, re.DOTALL), judge)
    for pattern, judge in (
        (
            (
                r"exceeded quota: (?P<name>[^,]+), requested: (?P<asked>.*?), "
                r"used: (?P<used>.*?), limited: (?P<limit>.*)"
            ),
            _exceeded,
        ),
        (r"failed quota: (?P<name>[^:]+): must specify (?P<what>.+)$", _unset),
        (_RANGE.pattern, _range),
        (_RATIO.pattern, _ratio),
        (r'violates PodSecurity "(?P<level>[^"]+)": (?P<what>.*)', _security),
        (r"insufficient quota to match these scopes: (?P<what>.*)", _unscoped),
        (r'namespaces? "(?P<name>[^"]+)" not found', _no_namespace),
        (r'service ?account "?(?P<name>[^\s"]+)"? not found', _account),
        (r"no (?P<kind>PriorityClass) with name (?P<name>\S+) was found", _class),
        (
            (
                r'(?P<kind>RuntimeClass|PriorityClass|StorageClass|ResourceClaimTemplate) "?'
                r'(?P<name>[^\s"]+)"? not found'
            ),
            _class,
        ),
        (r'failed calling webhook "(?P<name>[^"]+)"(?:: (?P<what>.*))?', _unreachable),
        (
            (
                r"(?P<what>[^:]*(?:denied by Binary Authorization"
                r"|image policy webhook backend denied).*)"
            ),
            _unverified,
        ),
        (r"GKE Warden rejected the request(?P<what>.*)", _autopilot),
        (
            (
                r'admission webhook "(?P<name>[^"]+)" denied the request'
                r"(?: without explanation|: (?P<what>.*))?"
            ),
            _denied,
        ),
        (
            r"ValidatingAdmissionPolicy '(?P<name>[^']+)'[^:]* denied request: (?P<what>.*)",
            _denied,
        ),
        (r"in namespace (?P<name>\S+) because it is being terminated", _ending),
        (
            r"(?P<field>spec\.\S*resources\.limits): Required value: Limit must be set",
            _unlimited,
        ),
        (r'"[^"]*" is invalid: (?P<what>.*)', _invalid),
        (
            r'User "(?P<who>[^"]+)" cannot (?P<verb>\w+) resource "(?P<what>[^"]+)"',
            _forbidden,
        ),
        (
            (
                r"etcdserver: .*|status unknown for quota.*|request did not complete within .*"
                r"|admission plugin \S+ failed to complete.*|the server is currently unable"
                r".*|too many requests.*|the server was unable to return a response in time.*"
                r"|connection refused.*|context deadline exceeded.*|please apply your changes.*"
            ),
            _busy,
        ),
    )
)
