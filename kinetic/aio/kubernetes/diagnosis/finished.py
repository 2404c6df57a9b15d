"""How pods ended, and what became of all those of a Job: which run, and whether others follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from kinetic.aio.kubernetes.diagnosis.documents import condition, part, parts, uid
from kinetic.aio.kubernetes.diagnosis.ending import ending, removal
from kinetic.aio.kubernetes.diagnosis.pods import Pod, unseen
from kinetic.aio.kubernetes.diagnosis.starting import obstacle
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, Seen, pending, running
from kinetic.job_status import JobStatus, Reason

_FAILURES = "batch.kubernetes.io/job-index-failure-count"

End = tuple[Pod, Diagnosis]
"""A pod that has ended or is there no more, and how it ended."""


def past(pod: Pod) -> Diagnosis:
    """How a pod ended that has ended or is there no more."""
    last = ending(pod) if pod.ended else (removal(pod) or _UNSEEN).ended(pod.uid)
    if pod.ran:
        return last
    if last.reason is Reason.DEADLINE and pod.ended:
        return held_up(last, " before the program ever ran", obstacle(pod))
    return until_then(last, pod) if last.reason is Reason.LOST and pod.swept else last


_UNSEEN = pending(
    "the pod is gone, and how its program ended was not seen", "run it again", Reason.LOST
)


def until_then(last: Diagnosis, pod: Pod) -> Diagnosis:
    """The end of *pod*, which never ran, with what kept it from starting and would do so again."""
    held = obstacle(pod)
    if held.reason is None or held.outlook is Outlook.OPEN:
        return last
    return replace(held_up(last, "; until then", held), reason=last.reason)


def held_up(last: Diagnosis, before: str, held: Diagnosis) -> Diagnosis:
    """The end of what never ran, for *held* kept it back: nothing is tried again."""
    message = f"{last.message}{before}: {held.message}"
    advice = last.advice
    if held.advice and held.outlook is not Outlook.OPEN:
        advice = f"{held.advice.partition(';')[0]}, then submit it again"
    return replace(last, message=message, advice=advice, reason=held.reason or last.reason)


class Course:
    """What became of all the ``pods`` of a Job, the oldest first; some are still ``there``."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.pods = sorted((Pod(one, seen) for one in (*seen.gone, *seen.pods)), key=_age)
        there = {uid(one) for one in seen.pods}
        self.there = [pod for pod in self.pods if pod.uid in there]
        self.alive = [pod for pod in self.there if not pod.ended]
        self.several = seen.completions > 1

    @property
    def ran(self) -> bool:
        """Whether a program of any of them was ever started."""
        return any(pod.ran for pod in self.pods)

    @cached_property
    def over(self) -> list[End]:
        """How they ended that do not run any more, also where only events tell of that."""
        job = self.seen.any_job
        why = condition(job, "Failed") or condition(job, "FailureTarget")
        alive = {pod.uid for pod in self.alive}
        pods = [pod for pod in self.pods if pod.uid not in alive]
        if why:
            pods = [_as_it_fell(pod) for pod in pods]
        elif condition(job, "Suspended", "False"):  # what that stopped did not fail
            pods = [pod for pod in pods if not pod.swept]
        if not pods and (why or self.seen.status.get("failed")):  # before anybody looked
            known = {str(pod.metadata.get("name")) for pod in self.alive}
            pods = [pod for pod in unseen(self.seen, known) if pod.ended]
        return [(pod, past(pod)) for pod in pods]

    @cached_property
    def settled(self) -> tuple[list[End], list[End]]:
        """The ends of what is done, and of what failed and is not tried again: of each index."""
        done: list[End] = []
        failures: list[End] = []
        by_index: dict[int | None, list[End]] = {}
        for pod, one in self.over:
            by_index.setdefault(pod.index, []).append((pod, one))
        for index, ends in by_index.items():
            good = [(pod, one) for pod, one in ends if one.status is JobStatus.SUCCEEDED]
            if good:
                done += good if index is None else good[:1]
            elif not self.replaced([pod for pod, _ in ends]):
                failures.append(ends[-1])
        return done, failures

    def replaced(self, over: Sequence[Pod]) -> bool:
        """Whether the Job controller makes another pod after the last of these failed."""
        actions = [self.action(pod) for pod in over if pod.status.get("phase") != "Succeeded"]
        if "FailJob" in actions or "FailIndex" in actions:
            return False
        counted = len(actions) - actions.count("Ignore")
        limit = self.seen.spec.get("backoffLimitPerIndex")
        if limit is None:
            given = self.seen.spec.get("backoffLimit")
            return counted <= (6 if given is None else int(given))
        told = int(part(over[-1].metadata, "annotations").get(_FAILURES) or 0)
        return max(counted, told + 1 if counted else 0) <= int(limit)

    def action(self, pod: Pod) -> str:
        """What the Job's pod failure policy says about the failure of *pod*."""
        for rule in parts(part(self.seen.spec, "podFailurePolicy"), "rules"):
            codes = part(rule, "onExitCodes")
            for one in pod.containers if codes else ():
                code = (one.state("terminated") or {}).get("exitCode")
                inside = code in parts(codes, "values")
                named = codes.get("containerName") in (None, one.name)
                if code and named and inside == (codes.get("operator") == "In"):
                    return str(rule.get("action"))
            for one in parts(rule, "onPodConditions"):
                if condition(pod.document, str(one.get("type")), str(one.get("status") or "True")):
                    return str(rule.get("action"))
        return "Count"

    @property
    def bad(self) -> list[End]:
        """Those of them that failed."""
        return [(pod, one) for pod, one in self.over if one.status is JobStatus.FAILED]

    @property
    def indexes(self) -> tuple[list[int], list[int]]:
        """Those that are complete, and those that failed for good: by the Job's word and theirs."""
        status, (done, failures) = self.seen.status, self.settled
        own = [(pod, one) for pod, one in failures if pod.ended and not pod.swept]
        complete = _numbers(status.get("completedIndexes"), done)
        return complete, _numbers(status.get("failedIndexes"), own)

    def still(self, cause: Diagnosis) -> Diagnosis:
        """*cause*, which ends them, while some of them may still run."""
        now = running("") if any(pod.ran for pod in self.alive) else pending("")
        return replace(
            cause,
            status=now.status if self.seen.job is not None else JobStatus.NOT_FOUND,
            phase=now.phase,
            executor=cause.executor or next((pod.uid for pod in reversed(self.alive)), ""),
            outlook=Outlook.OPEN,
        )


def _age(pod: Pod) -> tuple[str, str]:
    """The API lists them by name."""
    metadata = pod.metadata
    return str(metadata.get("creationTimestamp") or ""), str(metadata.get("name") or "")


def _as_it_fell(pod: Pod) -> Pod:
    """A pod that its failed Job deleted, for it had been started too often: as its last start fell.

    It may have been started again by then.
    """
    limit = pod.seen.spec.get("backoffLimit")
    often = sum(one.restarts for one in pod.containers) >= int(6 if limit is None else limit)
    again = often and pod.ended and pod.spec.get("restartPolicy") == "OnFailure"
    if not pod.leaving or pod.disruption or not (again or (pod.starts and not pod.ended)):
        return pod
    statuses = [
        one if pod.ended else {**one, "state": one.get("lastState") or one.get("state")}
        for one in parts(pod.status, "containerStatuses")
    ]
    metadata = {**pod.metadata, "deletionTimestamp": None}
    status = {**pod.status, "phase": "Failed", "containerStatuses": statuses}
    return Pod({**pod.document, "metadata": metadata, "status": status}, pod.seen)


def _numbers(text: object, ends: Sequence[End]) -> list[int]:
    """``0,2-4`` as numbers, and the indexes of *ends*."""
    found = {pod.index for pod, _ in ends if pod.index is not None}
    for span in str(text or "").split(","):
        first, _, last = span.partition("-")
        if first.isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return sorted(found)
