"""Find which PersistentVolumeClaim keeps a pod from getting a node."""

from __future__ import annotations

import re
from dataclasses import replace

from kinetic.aio.kubernetes.diagnosis.causes import Cause, Outlook, Rule, gist, quote_message
from kinetic.aio.kubernetes.diagnosis.documents import get_dict
from kinetic.aio.kubernetes.diagnosis.facts import Pod
from kinetic.job_status import Reason

_ABOUT_CLAIMS = re.compile(
    r"persistent ?volume|volume node affinity|binding volumes|ReadWriteOncePod|PVC", re.IGNORECASE
)
"""The words in the scheduler's messages that are about claims and their volumes."""

_CREATE_AGAIN = "create the claim again with a StorageClass that exists (kubectl get storageclass)"

_RULES = (
    Rule(
        'persistentvolumeclaim "[^"]*" not found',
        "create it, or correct the name (KINETIC_STORE_CLAIM)",
    ),
    Rule(
        "is being deleted",
        "create it again when it is deleted, or use another claim (KINETIC_STORE_CLAIM)",
    ),
    Rule(
        r"storageclass\S* \S+ not found",
        "create that StorageClass, or a PersistentVolume of that class with the claim's size and "
        f"access modes; or {_CREATE_AGAIN}",
    ),
    Rule("no storage class is set", f"{_CREATE_AGAIN}, or create a PersistentVolume that fits it"),
    Rule(
        "waiting for a volume to be created|provisioning volume for claim",
        "wait; if this persists, check that the provisioner of its StorageClass runs",
        outlook=Outlook.OPEN,
    ),
    Rule(
        "PersistentVolume's node affinity|volume node affinity",
        "use nodes in the zone of its volume, or a claim whose volume these nodes can mount",
        reason=Reason.UNSCHEDULABLE,
    ),
    Rule(
        "ReadWriteOncePod",
        "wait for the other pod, or use a claim with the access mode ReadWriteMany",
        outlook=Outlook.OPEN,
    ),
    Rule(
        "",
        "check its StorageClass, size, access modes, and volume "
        "(kubectl describe persistentvolumeclaim)",
    ),
)
"""Advice for the last event about a claim that isn't bound, else for the scheduler's message."""


_NAMED = re.compile(
    r'(?:persistentvolumeclaim|PVC) "(?P<name>[^"]*)"(?P<problem> not found| is being deleted)?',
    re.IGNORECASE,
)


def claim_cause(pod: Pod, message: str) -> Cause | None:
    """Return which claim keeps *pod* from a node, by the scheduler's *message*.

    Return None if the message is about something else.
    """
    claims = {get_dict(claim, "metadata").get("name"): claim for claim in pod.facts.claims}
    phases = {name: get_dict(claims.get(name), "status").get("phase") for name in pod.claims}
    named = _NAMED.search(message)
    unbound = [name for name in phases if phases[name] != "Bound"]
    name = named["name"] if named else next(iter(unbound or phases), "")
    # The scheduler sends no message while it waits for a claim's volume; the claim's events say so.
    is_unbound = "unbound" in message or not message
    is_known = _ABOUT_CLAIMS.search(message) if message else phases.get(name) == "Pending"
    if not (name and is_known):
        return None
    claim = claims.get(name) or {"metadata": {"name": name}}
    events = [
        str(event.get("message") or "")
        for event in (pod.facts.events_about(claim) if is_unbound else ())
        if event.get("reason") != "WaitForFirstConsumer"  # the pod is that consumer
    ]
    if not (message or events):
        return None
    text = next(reversed(events), "") if is_unbound else gist(message)
    storage_class = get_dict(claim, "spec").get("storageClassName")
    subject = f"PersistentVolumeClaim {name!r}"
    subject += f" (StorageClass {storage_class!r})" if storage_class else ""
    problem = " is not bound" if is_unbound else " keeps the pod from a node"
    cause = quote_message(subject + problem, text, _RULES)
    if named is None or not named["problem"]:
        return cause
    problem = named["problem"].replace(" not found", " does not exist in the namespace")
    return replace(cause, summary=subject + problem)
