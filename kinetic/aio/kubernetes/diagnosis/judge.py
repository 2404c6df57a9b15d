"""Decide the state of a job from its Job, pods, events, and nodes. No I/O."""

from __future__ import annotations

from dataclasses import replace

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.admission import admission_cause
from kinetic.aio.kubernetes.diagnosis.causes import (
    ADVICE,
    NOT_THE_PROGRAM,
    Cause,
    Diagnosis,
    Outlook,
    ended_state,
    running_state,
    waiting_state,
)
from kinetic.aio.kubernetes.diagnosis.documents import (
    Document,
    age_key,
    annotations_of,
    condition,
    get_dict,
    get_list,
    labels_of,
)
from kinetic.aio.kubernetes.diagnosis.ending import failure, removal, sidecar_failure
from kinetic.aio.kubernetes.diagnosis.facts import JobFacts, Pod
from kinetic.aio.kubernetes.diagnosis.placing import placement_cause
from kinetic.aio.kubernetes.diagnosis.queues import queue_cause
from kinetic.aio.kubernetes.diagnosis.starting import REPLACED, container_obstacle, why_not_started
from kinetic.aio.kubernetes.manifests import FAILURE_COUNTS, QUEUE
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

_STOPPING = "is being stopped"


def judge(facts: JobFacts) -> Diagnosis:
    """Return the state of a job as its user sees it.

    A pod ends about a second before its Job, and the pod's end explains why the Job ends. If no
    other pod replaces an ended pod, the job counts as ended at once. kinetic watches Jobs and pods
    separately, so news of either may be late. Pass the result of `merge_facts`, which also has
    deleted pods.
    """
    state = _job_state(facts)
    return state if facts.job is not None or facts.pods else replace(state, phase=Phase.GONE)


# --- one pod ------------------------------------------------------------------------------


def pod_state(pod: Pod) -> Diagnosis:
    """Return the state of *pod*, regardless of its Job."""
    if pod.ended or pod.gone:
        return _ended_pod_state(pod)
    if pod.terminating:
        cause = removal(pod) or Cause()
        if pod.node_silent:  # only the node, or its removal, ends the pod
            advice = "wait: Kubernetes replaces the pod when that node answers or is deleted"
            cause = replace(cause, advice=advice)
        build = running_state if pod.ran else waiting_state
        return build(cause=cause, lead=(_STOPPING,), executor=pod.uid)
    if not pod.ran:
        return waiting_state(cause=obstacle(pod), executor=pod.uid)
    lead = "running" if pod.runs else "its container is being restarted"
    return running_state(cause=_threat(pod), lead=(lead,), executor=pod.uid)


def obstacle(pod: Pod) -> Cause:
    """Return what keeps a pod that never ran from running, or kept it before its end."""
    # The end of a pod, or its deletion, hides what it waited for.
    pod = Pod(pod.facts.waits.get(pod.uid, pod.document), pod.facts)
    if not pod.spec.get("nodeName"):
        return placement_cause(pod)
    cause, sidecar_cause = why_not_started(pod), sidecar_failure(pod)
    if sidecar_cause is not None and (cause is None or cause.reason is not Reason.NODE_LOST):
        if cause is None or cause.reason is None:
            return sidecar_cause
        more = [*sidecar_cause.more, *cause.clauses]
        return replace(sidecar_cause, more=more, advice=cause.advice or sidecar_cause.advice)
    return cause or Cause(summary="its container is being created")


def _ended_pod_state(pod: Pod) -> Diagnosis:
    """Return the state of *pod*, which ended or no longer exists."""
    cause = failure(pod)
    if cause is None:
        return _success(pod.uid)
    state = ended_state(cause=cause, executor=pod.uid, exit_code=pod.end.get("exitCode"))
    if pod.ran:
        return state
    if cause.reason is Reason.DEADLINE:
        return _unstarted_state(state, obstacle(pod))
    if pod.deleted and (hindrance := obstacle(pod)).outlook is not Outlook.OPEN:
        outlook, advice = hindrance.outlook, hindrance.next_step
        cause = replace(cause, more=hindrance.clauses, advice=advice, outlook=outlook)
    return replace(state, cause=cause)


def _unstarted_state(state: Diagnosis, hindrance: Cause) -> Diagnosis:
    """Return *state*, the end by a deadline, with the cause that kept the program from starting."""
    cause = replace(hindrance, reason=hindrance.reason or Reason.DEADLINE)
    if hindrance.outlook is Outlook.OPEN:  # its advice is to wait, but the job has ended
        is_lost = hindrance.reason is Reason.NODE_LOST
        cause = replace(cause, advice=ADVICE[Reason.NODE_LOST if is_lost else Reason.DEADLINE])
    return replace(state, cause=cause, lead=(f"{state.cause.summary} before the program started",))


def _success(executor: str) -> Diagnosis:
    status, lead = JobStatus.SUCCEEDED, ("succeeded",)
    return ended_state(status=status, lead=lead, executor=executor, exit_code=0)


def _threat(pod: Pod) -> Cause:
    """Return what may end or delay the program of *pod*, which has started."""
    if pod.node_silent:
        summary = f"its node {pod.spec.get('nodeName')} does not answer, so the program may not run"
        return Cause(summary=summary, advice=REPLACED, reason=Reason.NODE_LOST)
    if pod.node_ending:  # GKE, "Spot VMs" and "Manage disruption in GPU nodes"
        spot = "takes its spot machine back within 30 s"
        threat = spot if pod.on_spot else "shuts its machine down soon, for maintenance"
        advice = f"{NOT_THE_PROGRAM}: let it save its state"
        return Cause(summary=f"the cloud {threat}", advice=advice, reason=Reason.PREEMPTED)
    causes = (container_obstacle(pod, container) for container in pod.containers)
    cause = next((found for found in causes if found is not None), None) or sidecar_failure(pod)
    return replace(cause, outlook=Outlook.OPEN) if cause is not None else Cause()


# --- all pods of a Job --------------------------------------------------------------------


def _job_state(facts: JobFacts) -> Diagnosis:
    """Return the job's state, by the Job's conditions, deletion, or suspension, or by its pods."""
    job, pods = facts.current_or_last_job, _Pods(facts)
    if condition(job, "Complete") or condition(job, "SuccessCriteriaMet"):
        return _succeeded_state(pods)
    if (target := condition(job, "Failed") or condition(job, "FailureTarget")) is not None:
        return _failed_state(facts, pods, target)
    if facts.is_gone_or_deleting:
        return _deleted_state(facts, pods)
    if facts.suspended:
        state, alive = waiting_state(cause=why_no_pod(facts)), pods.alive
        if alive is not None and alive.ran:
            state = running_state(cause=state.cause, lead=(_STOPPING,), executor=alive.uid)
        return replace(state, earlier_cause=pods.last_failure)
    if pods.alive is not None:
        return replace(pod_state(pods.alive), earlier_cause=pods.last_end)
    if pods.ended and not _is_replaced(facts, *pods.ended[-1]):
        return _state_after_last_pod(facts, pods)
    state = waiting_state(cause=why_no_pod(facts))
    if not pods.failed:
        return state
    last, earlier = pods.ended[-1][1], pods.last_end
    return replace(state, earlier_cause=earlier, executor=last.executor, exit_code=last.exit_code)


class _Pods:
    """The pods of a Job, which has one pod at a time.

    ``alive`` is the newest pod that runs or will run, if any. ``ended`` has the pods that ended, no
    longer exist, or are replaced, oldest first, each with its state. ``failed`` has the states of
    those that failed, and ``failures`` of those that neither their Job nor a user deleted.
    """

    def __init__(self, facts: JobFacts) -> None:
        found = [Pod(document, facts) for document in sorted(facts.every_pod, key=age_key)]
        self.latest = found[-1] if found else None
        self.alive: Pod | None = None
        self.ran = any(pod.ran for pod in found)
        self.ended: list[tuple[Pod, Diagnosis]] = []
        was_suspended = condition(facts.current_or_last_job, "Suspended", "False") is not None
        for pod in found:
            if not (pod.gone or pod.ended):
                if self.alive is not None and (cause := removal(self.alive)) is not None:
                    self.ended.append((self.alive, ended_state(cause=cause)))
                self.alive = pod
            elif not (was_suspended and pod.deleted):  # a pod that a queue evicted isn't counted
                self.ended.append((pod, _ended_pod_state(pod)))
        self.failed = [state for _, state in self.ended if state.status is JobStatus.FAILED]
        kept = (state for pod, state in self.ended if not pod.deleted)
        self.failures = [state for state in kept if state in self.failed]
        self.last_failure = self.failures[-1].cause if self.failures else None
        self.last_end = self.failed[-1].cause if self.failed else None


def _is_replaced(facts: JobFacts, pod: Pod, state: Diagnosis) -> bool:
    """Return whether the Job creates another pod after *pod* ended.

    The Job's rules decide; see `failure_rules`.
    """
    if state.status is JobStatus.SUCCEEDED:
        return False
    for rule in get_list(get_dict(facts.spec, "podFailurePolicy"), "rules"):
        if _covers(rule, pod):
            return bool(rule["action"] == "Ignore")
    # A failure that no rule covers counts towards the Job's limits. A Job that allows failures may
    # replace any such pod, until a condition says that the Job failed.
    failures = int(annotations_of(pod.document).get(FAILURE_COUNTS[0]) or 0)
    per_index, all_failures = facts.spec.get("backoffLimitPerIndex"), facts.spec.get("backoffLimit")
    return all_failures != 0 and (per_index is None or failures < per_index)


def _covers(rule: Document, pod: Pod) -> bool:
    """Return whether a rule of a Job's ``podFailurePolicy`` covers the failure of *pod*."""
    wanted = get_dict(rule, "onExitCodes")
    if not wanted:
        return pod.disruption is not None
    codes = [(program.end or {}).get("exitCode") for program in pod.programs]
    is_listed = wanted.get("operator") == "In"
    return any(code and (code in get_list(wanted, "values")) is is_listed for code in codes)


def _state_after_last_pod(facts: JobFacts, pods: _Pods) -> Diagnosis:
    """Return the state of a Job whose last pod ended; the Job's status follows a moment later."""
    pod, end = pods.ended[-1]
    succeeded = end.status is JobStatus.SUCCEEDED
    state = _succeeded_state(pods) if succeeded else _failed_state(facts, pods, {})
    if not pod.deleted or (pod.ran and not (succeeded and pod.ended_on_request)):
        return state
    # The Job may have deleted the pod. Then only the Job's next status has the reason.
    return replace(state, status=JobStatus.PENDING, phase=Phase.PENDING, executor="")


def _succeeded_state(pods: _Pods) -> Diagnosis:
    """Return the state of a Job that succeeded; its pod's end may not have been seen yet."""
    executor = pods.latest.uid if pods.latest is not None and not pods.latest.ended else ""
    ends = [state for _, state in pods.ended if state.status is JobStatus.SUCCEEDED]
    return replace(ends[-1] if ends else _success(executor), earlier_cause=pods.last_failure)


def _failed_state(facts: JobFacts, pods: _Pods, target: Document) -> Diagnosis:
    """Return the state of a failed Job by its condition *target*, empty if only its pods failed."""
    reason_text, message = str(target.get("reason")), one_line(str(target.get("message") or ""))
    pod, failures = pods.latest, [*(pods.failures or pods.failed)]
    if reason_text == "DeadlineExceeded":
        failures = [*pods.failures]
        state = _deadline_state(facts, pods, message)
    elif failures:
        state = failures.pop()
    elif pod is not None and (cause := removal(pod)) is not None:
        # The Job counts a deleted pod as a failure, even if its program returned 0.
        state = ended_state(cause=cause, executor=pod.uid, exit_code=0 if pod.ended else None)
    else:
        summary = f"the Job failed ({reason_text})"
        state = ended_state(cause=Cause(summary=summary, more=[message], reason=Reason.LOST))
    if pod is not None and pods.alive is None and not state.executor:
        state = replace(state, executor=pod.uid, exit_code=pod.end.get("exitCode"))
    if failures and failures[-1].cause.summary != state.cause.summary:
        state = replace(state, earlier_cause=failures[-1].cause)
    return state if pods.alive is None else _state_while_alive(facts, pods.alive, state)


def _deadline_state(facts: JobFacts, pods: _Pods, message: str) -> Diagnosis:
    """Return the state of a Job that its own deadline ended: what kept it from ending earlier."""
    limit, pod = facts.spec.get("activeDeadlineSeconds"), pods.latest
    described = f" of {limit} s" if limit else ""
    summary = f"the Job's time limit{described} passed (DeadlineExceeded)"
    cause = Cause(summary=summary, more=[message], reason=Reason.DEADLINE)
    state = ended_state(cause=cause)
    if pods.last_failure is not None and pods.ended[-1][1].cause is pods.last_failure:
        # The deadline passed between two pods.
        return replace(state, cause=replace(cause, advice=pods.last_failure.next_step))
    if pod is not None and pod.ran:
        return state
    return _unstarted_state(state, why_no_pod(facts) if pod is None else obstacle(pod))


def _deleted_state(facts: JobFacts, pods: _Pods) -> Diagnosis:
    """Return the state of a Job that never existed, or that is or was deleted before its end."""
    if not facts.current_or_last_job and pods.latest is None:
        cause = Cause(summary=f"there is no Job {facts.job_name!r}")
        return ended_state(cause=cause, status=JobStatus.NOT_FOUND)
    cause, alive = Cause(summary="the Job was deleted", reason=Reason.CANCELLED), pods.alive
    if alive is not None:
        if facts.job is None and not alive.terminating:
            cause = replace(cause, more=["its pod was not"], advice="delete the pod")
        elif alive.node_silent:
            more = [f"node {alive.spec.get('nodeName')!r} does not answer, and keeps its pod"]
            cause = replace(cause, more=more, advice="restore or delete that node")
        return _state_while_alive(facts, alive, ended_state(cause=cause))
    when = "while it ran" if pods.ran else "before it ran"
    cause = replace(cause, summary=f"{cause.summary} {when}")
    state = ended_state(cause=cause, status=JobStatus.NOT_FOUND)
    if not pods.ended:
        return state
    pod, end = pods.ended[-1]
    if facts.job is None and end.status is JobStatus.SUCCEEDED and not pod.ended_on_request:
        return end
    earlier = None if pod.deleted else end.cause
    return replace(state, earlier_cause=earlier, executor=end.executor, exit_code=end.exit_code)


def _state_while_alive(facts: JobFacts, alive: Pod, state: Diagnosis) -> Diagnosis:
    """Return the state of a Job that will end with *state*, while its pod *alive* may still run."""
    lead = [_STOPPING] if alive.terminating or facts.job is not None else []
    build = running_state if alive.ran else waiting_state
    alive_state = build(
        cause=replace(state.cause, outlook=Outlook.OPEN),
        lead=[*lead, *state.lead],
        earlier_cause=state.earlier_cause,
        executor=state.executor or alive.uid,
    )
    if facts.job is not None:
        return alive_state
    return replace(alive_state, status=JobStatus.NOT_FOUND)


# --- no pod -------------------------------------------------------------------------------

_REFUSAL_REASONS = ("FailedCreate", "JobCreationFailed")
"""Reasons of events which say that the API server refused a pod, or a JobSet's Job."""


def why_no_pod(facts: JobFacts) -> Cause:
    """Return why a Job that isn't over has no pod."""
    if facts.suspended:
        if facts.workload is not None or QUEUE in labels_of(facts.current_or_last_job):
            return queue_cause(facts)
        return Cause(
            summary="the Job is suspended",
            advice="resume it, or find the controller that suspended it",
            reason=Reason.QUEUED,
            outlook=Outlook.BLOCKED,
        )
    creations = facts.events_about(None, *_REFUSAL_REASONS, "SuccessfulCreate")
    if creations and creations[-1].get("reason") in _REFUSAL_REASONS:
        return admission_cause(str(creations[-1].get("message") or ""))
    if get_dict(facts.current_or_last_job, "status").get("failed"):
        return Cause(summary="Kubernetes creates another pod after a pause")
    return Cause(summary="Kubernetes has not created its pod yet")
