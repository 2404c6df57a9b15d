"""From everything that was seen of a job to what its user sees: facts, then causes, then words."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.admission import refusal
from kinetic.aio.kubernetes.diagnosis.causes import (
    ADVICE,
    Cause,
    Diagnosis,
    Outlook,
    State,
    ended,
    running,
    tell,
    waiting,
)
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part, parts, uid
from kinetic.aio.kubernetes.diagnosis.ending import exit_cause, failure, removal, sidecar_memory
from kinetic.aio.kubernetes.diagnosis.facts import Pod, Seen
from kinetic.aio.kubernetes.diagnosis.placing import placing
from kinetic.aio.kubernetes.diagnosis.queues import QUEUE, queued
from kinetic.aio.kubernetes.diagnosis.starting import hindrance, unstarted
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

_OWN_FINALIZERS = ("batch.kubernetes.io/job-tracking", "orphan", "foregroundDeletion")
"""Finalizers that Kubernetes sets and removes by itself."""

_STOPPING = "is being stopped"
_IGNORED_SIGTERM = "the program did not react to SIGTERM and was killed after its grace"


def judge(seen: Seen) -> Diagnosis:
    """Return what a user sees of a job, by everything that was seen of it so far.

    A pod's end precedes its Job's by a second and explains it; when no other pod follows
    it counts at once. Jobs and pods come by different watches, either of which may be
    late. Give the result of `merged`, so that a cause outlives its pod.
    """
    state = replace(_Course(seen).state(), held=held_fast(seen))
    there = seen.job is not None or seen.pods
    verdict = tell(state)
    return verdict if there else replace(verdict, phase=Phase.GONE)


def judge_pod(pod: Pod) -> Diagnosis:
    """Return what a user sees of one pod, whatever becomes of its Job."""
    return tell(pod_state(pod))


def refused_request(answer: Document) -> Diagnosis:
    """Return what a user sees when the API server refuses (a ``Status``) to create a Job.

    Words that no rule knows are about the Job itself, unless its creation is forbidden (403).
    """
    unknown = Outlook.BLOCKED if answer.get("code") == 403 else Outlook.FINAL
    cause = refusal(str(answer.get("message") or answer.get("reason") or ""), unknown)
    state = replace(waiting(cause), status=JobStatus.FAILED)
    return replace(tell(state), phase=Phase.GONE)


def held_fast(seen: Seen) -> Cause | None:
    """Return what holds an object of the job that is deleted, if a finalizer does."""
    owner = seen.makers[0][0] if seen.makers else "Job"
    idle = [("Pod", pod) for pod in seen.pods if not Pod(pod).runs]
    for kind, one in [(owner, seen.job), *idle]:
        metadata = part(one, "metadata")
        held = [name for name in parts(metadata, "finalizers") if name not in _OWN_FINALIZERS]
        if held and metadata.get("deletionTimestamp"):
            patch = '{"metadata":{"finalizers":null}}'
            return Cause(
                what=f"the {kind} is deleted and stays, held by finalizer {held[0]!r}",
                advice=f"remove finalizer {held[0]!r}, or ask who set it; if nothing else does: "
                f"kubectl patch {kind.lower()} {metadata.get('name')} --type=merge -p '{patch}'",
            )
    return None


# --- one pod ------------------------------------------------------------------------------


def pod_state(pod: Pod) -> State:
    """Return the state of *pod*."""
    if pod.ended or pod.gone:
        return _ended_pod(pod)
    if pod.leaving:
        cause = removal(pod) or Cause()
        return (running if pod.ran else waiting)(cause, _STOPPING, executor=pod.uid)
    if not pod.ran:
        return waiting(obstacle(pod), executor=pod.uid)
    if pod.runs:
        return running(_worry(pod), "running", executor=pod.uid)
    state = running(_worry(pod), "its container is started again", executor=pod.uid)
    return replace(state, exit_code=pod.end.get("exitCode"))


def obstacle(pod: Pod) -> Cause:
    """Return what keeps a pod from running that never ran."""
    if not pod.spec.get("nodeName"):
        return placing(pod)
    return unstarted(pod) or Cause(what="its container is being made")


def _ended_pod(pod: Pod) -> State:
    cause = failure(pod)
    if cause is None:
        return ended(_success(pod), "succeeded", executor=pod.uid, exit_code=0, status=_SUCCEEDED)
    if not pod.ran and not (pod.bad is not None and not pod.stopped):
        cause = _held_up(cause, pod)
    return ended(cause, executor=pod.uid, exit_code=pod.end.get("exitCode"))


_SUCCEEDED = JobStatus.SUCCEEDED


def _success(pod: Pod) -> Cause:
    """Return what may surprise a user who looks at a pod that succeeded."""
    code = "its program ended with exit code 0"
    if pod.disruption is not None:
        return Cause(what=f"{code} while the platform stopped it")
    if pod.answered:
        return Cause(what=f"{code} while the pod was being deleted")
    if any((one.ended or {}).get("reason") == "OOMKilled" for one in pod.programs):
        return Cause(what="a child process was killed, because it ran out of memory")
    return Cause()


def _held_up(cause: Cause, pod: Pod) -> Cause:
    """Return the end of a *pod* that never ran, with what would keep it from starting again."""
    late = cause.reason is Reason.DEADLINE
    held = obstacle(pod) if late or pod.swept else Cause()
    if held.reason is None or (held.outlook is Outlook.OPEN and not late):
        return replace(cause, more=(*cause.more, *(held.clauses if late else ())))
    blocked = held.outlook is not Outlook.OPEN
    return replace(
        cause,
        more=(*cause.more, *held.clauses),
        advice=held.next_step if blocked else cause.next_step,
        reason=held.reason if late else cause.reason,
        outlook=held.outlook,
        secret=held.secret,
    )


def _worry(pod: Pod) -> Cause:
    """Return what may yet end or delay a program that ran."""
    if not pod.runs and pod.bad is not None:
        return replace(exit_cause(pod.bad), outlook=Outlook.OPEN)
    name = pod.spec.get("nodeName")
    if pod.node_silent:
        return Cause(
            what=f"its node {name} does not answer; whether the program still runs is unknown",
            advice="wait: Kubernetes replaces the pod when the node stays away",
            reason=Reason.NODE_LOST,
        )
    if pod.taken_back:  # documents: GKE, 'Spot VMs', and 'Manage disruption in GPU nodes'
        spot = "takes its spot machine back within 30 s"
        what = spot if pod.on_spot else "shuts its machine down soon, for maintenance"
        advice = "it is not the program's fault: let it save what it has"
        return Cause(what=f"the cloud {what}", advice=advice, reason=Reason.PREEMPTED)
    found = (hindrance(pod, one) for one in pod.containers)
    beside = next((one for one in found if one is not None), None) or sidecar_memory(pod)
    return replace(beside, outlook=Outlook.OPEN) if beside is not None else Cause()


# --- all pods of a Job --------------------------------------------------------------------


class _Course:
    """What became of the pods of a Job, the oldest first. One of them at a time is alive."""

    def __init__(self, seen: Seen) -> None:
        self.seen, self.job = seen, seen.any_job
        pods = sorted((Pod(one, seen) for one in (*seen.gone, *seen.pods)), key=_age)
        there = {uid(one) for one in seen.pods}
        self.pods = pods
        self.there = [pod for pod in pods if pod.uid in there]
        self.alive = [pod for pod in self.there if not pod.ended]

    @cached_property
    def over(self) -> list[tuple[Pod, State]]:
        """Pods that don't run any more, and how they ended."""
        alive = {pod.uid for pod in self.alive}
        resumed = condition(self.job, "Suspended", "False") and not self.failed
        return [
            (pod, _ended_pod(pod))
            for pod in self.pods
            if pod.uid not in alive and not (resumed and pod.swept)  # that did not fail
        ]

    @property
    def bad(self) -> list[tuple[Pod, State]]:
        """Those of them that failed."""
        return [(pod, one) for pod, one in self.over if one.status is JobStatus.FAILED]

    @property
    def good(self) -> list[tuple[Pod, State]]:
        """Those of them that succeeded."""
        return [(pod, one) for pod, one in self.over if one.status is JobStatus.SUCCEEDED]

    @property
    def failed(self) -> Document | None:
        """The condition which says that the Job failed."""
        return condition(self.job, "Failed") or condition(self.job, "FailureTarget")

    @property
    def ran(self) -> bool:
        """Whether a program of any of them ever started."""
        return any(pod.ran for pod in self.pods)

    def state(self) -> State:
        """Return the state of the Job."""
        if condition(self.job, "Complete") or condition(self.job, "SuccessCriteriaMet"):
            return self._succeeded()
        if (target := self.failed) is not None:
            return self._failed(target)
        if self.seen.job is None or part(self.job, "metadata").get("deletionTimestamp"):
            return self._deleted()
        if _is_suspended(self.job):
            return self._parked()
        if not self.alive and not self.over:
            return waiting(no_pod(self.seen))
        if not self.alive and (self.good or not self._replaced()):
            return self._settled()
        return self._going_on()

    def _settled(self) -> State:
        """Its last pod ended, and no other follows; the Job says so a moment later."""
        pod, _ = (self.good or self.over)[-1]
        state = self._succeeded() if self.good else self._failed({})
        if not pod.swept or (pod.ran and not (self.good and pod.answered)):
            return state
        # Its Job may have deleted the pod itself, for a reason that only the Job says next.
        return replace(state, status=JobStatus.PENDING, phase=Phase.PENDING, executor="")

    def _going_on(self) -> State:
        """A Job that is not over: what runs or waits, and what happened before."""
        now = pod_state(self.alive[-1]) if self.alive else waiting(no_pod(self.seen))
        stopping = [one for one in self.alive if one.leaving]
        if self.alive and len(stopping) == len(self.alive) and self._replaced():
            now = replace(now, cause=replace(now.cause, advice=_ANOTHER))
        before = [one.cause for _, one in self.bad]
        before += [pod_state(pod).cause for pod in self.alive[:-1] if pod.disruption]
        if not before:
            return now
        if not self.alive and now.cause.reason is None:
            last = self.bad[-1][1]
            cause = Cause(what="Kubernetes starts another pod after a pause")
            now = waiting(cause, executor=last.executor)
            now = replace(now, exit_code=last.exit_code)
        if self.alive and not stopping:
            lead = "another pod runs" if now.phase is Phase.RUNNING else "a new pod waits"
            now = replace(now, lead=(lead, *(one for one in now.lead if one != "running")))
        return replace(now, before=before[-1])

    def _replaced(self) -> bool:
        """Whether the Job makes another pod after the last of these failed."""
        # One that is on its way out counts as if it had ended.
        pods = [pod for pod, _ in self.bad] + self.alive[-1:]
        actions = [self._action(pod) for pod in pods]
        if "FailJob" in actions or "FailIndex" in actions:
            return False
        spec = self.seen.spec
        limits = (spec.get("backoffLimitPerIndex"), spec.get("backoffLimit"), 6)
        limit = next(one for one in limits if one is not None)
        told = int(part(pods[-1].metadata, "annotations").get(_FAILURES) or 0) if pods else 0
        counted = actions.count("Count")
        return max(counted, told + 1 if counted else 0) <= int(limit)

    def _action(self, pod: Pod) -> str:
        """Return what the Job's pod failure policy says about the failure of *pod*."""
        for rule in parts(part(self.seen.spec, "podFailurePolicy"), "rules"):
            codes = part(rule, "onExitCodes")
            code = pod.end.get("exitCode")
            inside = code in parts(codes, "values")
            if codes and code and inside == (codes.get("operator") == "In"):
                return str(rule.get("action"))
            for one in parts(rule, "onPodConditions"):
                if condition(pod.document, str(one.get("type")), str(one.get("status") or "True")):
                    return str(rule.get("action"))
        return "Count"

    def _parked(self) -> State:
        """A suspended Job may have no pods; those that it had are being stopped."""
        held = no_pod(self.seen)
        before = [one.cause for pod, one in self.bad if not pod.swept][-1:]
        state = waiting(held)
        if any(pod.ran for pod in self.alive):
            state = running(held, _STOPPING, executor=self.alive[-1].uid)
        return replace(state, before=before[-1] if before else None)

    def _succeeded(self) -> State:
        """The success of the Job is certain."""
        last = self.good[-1][1] if self.good else None
        cause = last.cause if last is not None else Cause()
        lead = "succeeded"
        failures = [one for pod, one in self.bad if pod.ended]
        if last is not None and failures:
            lead += f" after {len(failures)} failed attempt{'s' if failures[1:] else ''}"
        # The pod that must have succeeded may come later than its Job.
        late = [pod.uid for pod in self.pods if not pod.ended] or [""]
        who = last.executor if last is not None else late[-1]
        state = ended(cause, lead, executor=who, exit_code=0, status=JobStatus.SUCCEEDED)
        return replace(state, before=failures[-1].cause if failures else None)

    def _failed(self, target: Document) -> State:
        """The failure of the Job is certain: *target* is the condition that says so."""
        late = target.get("reason") == "DeadlineExceeded"
        state = self._out_of_time() if late else self._cause(target)
        if self.alive:  # what is being stopped may still commit what it has done
            return self._still(state, _STOPPING)
        if self.seen.job is not None:
            return state
        swept = self.pods and all(pod.swept for pod in self.pods)
        if state.cause.reason is Reason.LOST and swept:
            name = part(self.job, "metadata").get("namespace") or ""
            words = f"the whole namespace {name!r} was deleted with the Job in it"
            return _cancelled(f"{words}, or first its pod and then the Job")
        cause = state.cause
        return replace(state, cause=replace(cause, more=(*cause.more, "the Job was removed since")))

    def _cause(self, target: Document) -> State:
        """The Job's own reason is a consequence: the cause is with its pods."""
        own = self._failures()
        if not own:
            why, said = target.get("reason"), one_line(str(target.get("message") or ""))
            found = re.search(r"exit code (\d+)", said)
            what = f"the Job failed ({why})" + ("" if self.there else ", and its pods are gone")
            reason = Reason.USER_ERROR if found else Reason.LOST
            cause = Cause(
                what=what, more=[said], reason=reason, advice="see its log, if it was kept"
            )
            return ended(cause, exit_code=int(found[1]) if found else None)
        _, last = own[-1]
        if len(own) == 1:
            return last
        others = [one.cause for _, one in own if one.cause.what != last.cause.what]
        lead = f"failed in {len(own)} attempts{', the last' if others else ', each time'}"
        return replace(last, lead=(lead,), before=others[-1] if others else None)

    def _failures(self) -> list[tuple[Pod, State]]:
        """The pods that the Job failed of, by the strongest evidence that there is of any."""
        return (
            [(pod, one) for pod, one in self.bad if not pod.swept]
            or self.bad
            # A program that answered a deletion with exit code 0, which its Job counts as a
            # failure; or the last pod is on its way out, and that is what its Job failed of.
            or [
                (pod, ended(why, executor=pod.uid, exit_code=0 if pod.ended else None))
                for pod in self.pods
                if (pod.answered if pod.ended else pod.leaving) and (why := removal(pod))
            ]
        )

    def _out_of_time(self) -> State:
        """The Job's time was over: what it did until then."""
        limit = self.seen.spec.get("activeDeadlineSeconds")
        what = f"the Job's time limit{f' of {limit} s' if limit else ''} passed"
        pod = next(reversed(self.pods), None)
        held = obstacle(pod) if pod is not None and not pod.ran else Cause()
        held = no_pod(self.seen) if pod is None else held
        last = _ended_pod(pod) if pod is not None and pod not in self.alive else None
        own = [one.cause for each, one in self.bad if each.ended and not each.swept]
        state = ended(Cause(what=what, reason=Reason.DEADLINE))
        if last is not None:
            state = replace(state, executor=last.executor, exit_code=last.exit_code)
        if held.reason is not None or (pod is not None and not pod.ran):
            when = "while a new pod waited" if self.ran else "before the program ever ran"
            blocked = held.reason is not None and held.outlook is not Outlook.OPEN
            late = replace(
                held,
                advice=held.next_step if blocked else ADVICE[Reason.DEADLINE],
                reason=held.reason if held.reason and not self.ran else Reason.DEADLINE,
            )
            before = own[-1] if own else None
            return replace(state, cause=late, lead=(f"{what} {when}",), before=before)
        if own:
            advice = f"{own[-1].next_step}; more time alone (timeout=) does not help"
            cause = Cause(what=what, advice=advice, reason=Reason.DEADLINE)
        else:
            killed = [_IGNORED_SIGTERM] if state.exit_code == 137 else []
            stopped = ["the program was stopped", *killed]
            cause = Cause(what=what, more=stopped, reason=Reason.DEADLINE)
        return replace(state, cause=cause, before=own[-1] if own else None)

    def _deleted(self) -> State:
        """A Job that is on its way out, or gone, before it was over; or that was never made."""
        seen, alive = self.seen, self.alive
        if not seen.any_job and not self.pods:
            name = f" {seen.job_name!r}" if seen.job_name else ""
            return replace(_cancelled(""), cause=Cause(what=f"there is no Job{name}"))
        going = seen.job is not None and (alive or not self.there)
        if alive and not going and not alive[-1].leaving:
            does, cause = "still runs, and costs", Cause()
            if not alive[-1].ran:
                does, cause = "waits to start", obstacle(alive[-1])
            words = f"the Job object is gone, but its pod {does}"
            cause = replace(cause, advice="delete the pod", reason=Reason.CANCELLED)
            return self._still(ended(cause, words))
        when = "by somebody while it ran" if self.ran else "before it ever ran"
        told = _cancelled(
            "the Job is being deleted by somebody" if going else f"the Job was deleted {when}"
        )
        if alive and alive[-1].node_silent:
            node = alive[-1].spec.get("nodeName")
            cause = replace(
                told.cause,
                more=[f"its pod cannot go, because its node {node!r} does not answer"],
                advice="bring that node back or delete it, or force-delete the pod",
            )
            return self._still(replace(told, cause=cause))
        if alive or going:
            return self._still(told)
        for pod in (self.there or self.pods)[-1:]:
            last = _ended_pod(pod)
            well = last.status is JobStatus.SUCCEEDED and not pod.answered
            if self.there and (well or (seen.job is None and not pod.leaving)):
                return replace(last, lead=("the Job was deleted, its pod ran on", *last.lead))
            told = replace(told, executor=last.executor, exit_code=last.exit_code)
            if last.status is JobStatus.FAILED and pod.ended and not pod.swept:
                return replace(told, before=last.cause)
            if not self.ran:
                return replace(told, cause=_held_up(told.cause, pod))
            if last.exit_code == 137:
                return replace(told, cause=replace(told.cause, more=[_IGNORED_SIGTERM]))
        return told

    def _still(self, state: State, *lead: str) -> State:
        """Return *state*, which ends the Job, while a pod of it may still run."""
        now = running if any(pod.ran for pod in self.alive) else waiting
        there = self.seen.job is not None
        at = now(replace(state.cause, outlook=Outlook.OPEN), *lead, *state.lead)
        who = state.executor or next((pod.uid for pod in reversed(self.alive)), "")
        status = at.status if there else JobStatus.NOT_FOUND
        return replace(at, status=status, before=state.before, executor=who)


_FAILURES = "batch.kubernetes.io/job-index-failure-count"
_ANOTHER = "wait: Kubernetes makes another pod when it has ended"


def _age(pod: Pod) -> tuple[str, str]:
    """The API lists pods by name."""
    metadata = pod.metadata
    return str(metadata.get("creationTimestamp") or ""), str(metadata.get("name") or "")


def _cancelled(what: str) -> State:
    return ended(Cause(what=what, reason=Reason.CANCELLED), status=JobStatus.NOT_FOUND)


# --- no pod -------------------------------------------------------------------------------

_REFUSED = ("FailedCreate", "JobCreationFailed")
"""Events which say that the API server refused a pod, or a JobSet's Job."""


def _is_suspended(job: Document) -> bool:
    return bool(part(job, "spec").get("suspend")) or condition(job, "Suspended") is not None


def no_pod(seen: Seen) -> Cause:
    """Return why a Job that is not over has no pod."""
    if _is_suspended(seen.any_job):
        if seen.workload is not None or QUEUE in part(part(seen.any_job, "metadata"), "labels"):
            return queued(seen)
        return Cause(
            what="the Job is suspended: its pods are made only after it is resumed",
            advice="resume it, or see which controller suspended it",
            reason=Reason.QUEUED,
            outlook=Outlook.BLOCKED,
        )
    attempts = seen.about(None, *_REFUSED, "SuccessfulCreate")
    if attempts and attempts[-1].get("reason") in _REFUSED:
        return refusal(str(attempts[-1].get("message") or ""))
    status = part(seen.any_job, "status")
    if status.get("failed"):
        return Cause(what="a pod failed and is gone; Kubernetes makes another one after a pause")
    late = "" if status else ": the Job controller has not looked at it yet"
    return Cause(what=f"no pod has been made yet{late}")
