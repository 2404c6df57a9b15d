"""Decide the state of a job from its Job, pods, events, and nodes. No I/O."""

from __future__ import annotations

from dataclasses import replace

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.admission import admission_cause
from kinetic.aio.kubernetes.diagnosis.causes import (
    NOT_THE_PROGRAM,
    Cause,
    Diagnosis,
    Outlook,
    State,
    describe,
    ended_state,
    running_state,
    waiting_state,
)
from kinetic.aio.kubernetes.diagnosis.documents import (
    Document,
    age_key,
    condition,
    get_dict,
    get_list,
)
from kinetic.aio.kubernetes.diagnosis.ending import failure, removal, sidecar_memory
from kinetic.aio.kubernetes.diagnosis.facts import JobFacts, Pod
from kinetic.aio.kubernetes.diagnosis.placing import placement_cause
from kinetic.aio.kubernetes.diagnosis.queues import QUEUE, queue_cause
from kinetic.aio.kubernetes.diagnosis.starting import REPLACED, container_obstacle, why_not_started
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

_STOPPING = "is being stopped"

_OWN_FINALIZERS = ("batch.kubernetes.io/job-tracking", "orphan", "foregroundDeletion")
"""Finalizers that Kubernetes sets and removes itself."""


def judge(facts: JobFacts) -> Diagnosis:
    """Return the state of a job as its user sees it.

    A pod ends about a second before its Job, and its end explains the Job's. If no other pod will
    replace it, the job counts as ended at once. Jobs and pods come by two watches, and each of
    them may be late. Pass the result of `merge_facts`, which also has deleted pods.
    """
    state = _job_state(facts)
    if finalizer_clause := _finalizer_clause(facts):
        state = replace(
            state, cause=replace(state.cause, more=[*state.cause.more, finalizer_clause])
        )
    verdict = describe(state)
    return verdict if facts.job is not None or facts.pods else replace(verdict, phase=Phase.GONE)


def judge_pod(pod: Pod) -> Diagnosis:
    """Return the state of one pod, regardless of its Job."""
    return describe(pod_state(pod))


def refused_request(answer: Document) -> Diagnosis:
    """Return the state of a Job that the API server refused to create; *answer* is its ``Status``.

    If no rule explains the message, the refusal is final, except with code 403 (forbidden): an
    administrator can change what the cluster allows.
    """
    unknown = Outlook.BLOCKED if answer.get("code") == 403 else Outlook.FINAL
    cause = admission_cause(str(answer.get("message") or answer.get("reason") or ""), unknown)
    verdict = describe(replace(waiting_state(cause), status=JobStatus.FAILED))
    return replace(verdict, phase=Phase.GONE)


def _finalizer_clause(facts: JobFacts) -> str:
    """Return a clause about a finalizer that delays the deletion of the Job or a pod, or ""."""
    not_running = [pod for pod in facts.pods if not Pod(pod).runs]
    for document in [facts.job, *not_running]:
        metadata = get_dict(document, "metadata")
        names = [name for name in get_list(metadata, "finalizers") if name not in _OWN_FINALIZERS]
        if names and metadata.get("deletionTimestamp"):
            name = metadata.get("name")
            return f"finalizer {names[0]!r} keeps the deleted {name}: its controller must remove it"
    return ""


# --- one pod ------------------------------------------------------------------------------


def pod_state(pod: Pod) -> State:
    """Return the state of *pod*."""
    if pod.ended or pod.gone:
        return _ended_pod_state(pod)
    if pod.terminating:
        cause = removal(pod) or Cause()
        return (running_state if pod.ran else waiting_state)(cause, _STOPPING, executor=pod.uid)
    if not pod.ran:
        return waiting_state(obstacle(pod), executor=pod.uid)
    lead = "running" if pod.runs else "its container is being restarted"
    return running_state(_threat(pod), lead, executor=pod.uid)


def obstacle(pod: Pod) -> Cause:
    """Return what keeps a pod that never ran from running."""
    if not pod.spec.get("nodeName"):
        return placement_cause(pod)
    return why_not_started(pod) or Cause(summary="its container is being created")


def _ended_pod_state(pod: Pod) -> State:
    """Return the state of *pod*, which ended or no longer exists."""
    cause = failure(pod)
    if cause is None:
        succeeded = JobStatus.SUCCEEDED
        return ended_state(Cause(), "succeeded", executor=pod.uid, exit_code=0, status=succeeded)
    state = ended_state(cause, executor=pod.uid, exit_code=pod.end.get("exitCode"))
    if pod.ran or cause.reason is not Reason.DEADLINE:
        return state
    hindrance = obstacle(pod)
    lead = f"{cause.summary} before the program started"
    return replace(
        state, cause=replace(hindrance, reason=hindrance.reason or Reason.DEADLINE), lead=(lead,)
    )


def _threat(pod: Pod) -> Cause:
    """Return what may end or delay the program of *pod*, which has started."""
    if pod.node_silent:
        return Cause(
            summary=(
                f"its node {pod.spec.get('nodeName')} does not answer, so the program may not run"
            ),
            advice=REPLACED,
            reason=Reason.NODE_LOST,
        )
    if pod.node_ending:  # GKE, "Spot VMs" and "Manage disruption in GPU nodes"
        spot = "takes its spot machine back within 30 s"
        threat = spot if pod.on_spot else "shuts its machine down soon, for maintenance"
        advice = f"{NOT_THE_PROGRAM}: let it save its state"
        return Cause(summary=f"the cloud {threat}", advice=advice, reason=Reason.PREEMPTED)
    causes = (container_obstacle(pod, container) for container in pod.containers)
    cause = next(
        (hindrance for hindrance in causes if hindrance is not None), None
    ) or sidecar_memory(pod)
    return replace(cause, outlook=Outlook.OPEN) if cause is not None else Cause()


# --- all pods of a Job --------------------------------------------------------------------


def _job_state(facts: JobFacts) -> State:
    """Return the job's state, by the Job's conditions, deletion or suspension, else by its pods."""
    job, pods = facts.current_or_last_job, _Pods(facts)
    if condition(job, "Complete") or condition(job, "SuccessCriteriaMet"):
        return _succeeded_state(pods)
    if (target := condition(job, "Failed") or condition(job, "FailureTarget")) is not None:
        return _failed_state(facts, pods, target)
    if facts.is_gone_or_deleting:
        return _deleted_state(facts, pods)
    if facts.suspended:
        return _suspended_state(facts, pods)
    if pods.alive is None and pods.ended and not _is_replaced(facts, *pods.ended[-1]):
        return _settled_state(facts, pods)
    return _active_state(facts, pods)


class _Pods:
    """The pods of a Job. ``alive`` is the newest pod that runs or will run, if any.

    ``ended`` has the pods that ended or no longer exist, oldest first, each with its state.
    """

    def __init__(self, facts: JobFacts) -> None:
        found = [Pod(document, facts) for document in sorted(facts.every_pod, key=age_key)]
        alive = [pod for pod in found if not (pod.gone or pod.ended)]
        self.latest = found[-1] if found else None
        self.alive = alive[-1] if alive else None
        self.ran = any(pod.ran for pod in found)
        was_suspended = condition(facts.current_or_last_job, "Suspended", "False") is not None
        self.ended = [
            (pod, _ended_pod_state(pod))
            for pod in found
            if pod not in alive and not (was_suspended and pod.deleted)  # a queue evicted the pod
        ]

    @property
    def succeeded(self) -> list[tuple[Pod, State]]:
        """The pods that succeeded, each with its state."""
        return [ended_pod for ended_pod in self.ended if ended_pod[1].status is JobStatus.SUCCEEDED]

    @property
    def failed(self) -> list[tuple[Pod, State]]:
        """The pods that failed, each with its state."""
        return [ended_pod for ended_pod in self.ended if ended_pod[1].status is JobStatus.FAILED]

    def last_failure(self) -> Cause | None:
        """Return why the last failed pod that wasn't deleted failed; None if there is none."""
        found = [state.cause for pod, state in self.failed if not pod.deleted]
        return found[-1] if found else None


def _is_replaced(facts: JobFacts, pod: Pod, state: State) -> bool:
    """Return whether the Job creates another pod after *pod* ended.

    A Job of kinetic allows no failure. It only replaces a disrupted pod, unless the pod's exit code
    ends the Job. A Job that allows failures may replace any pod until a condition says it failed.
    """
    if state.status is JobStatus.SUCCEEDED:
        return False
    rules = get_list(get_dict(facts.spec, "podFailurePolicy"), "rules")
    ignored = any(rule.get("action") == "Ignore" for rule in rules)
    final = [code for rule in rules for code in get_list(get_dict(rule, "onExitCodes"), "values")]
    if pod.end.get("exitCode") in final:
        return False
    limits = (facts.spec.get("backoffLimitPerIndex"), facts.spec.get("backoffLimit"))
    return (pod.disruption is not None and ignored) or 0 not in limits


def _settled_state(facts: JobFacts, pods: _Pods) -> State:
    """Return the state of a Job whose last pod ended; the Job's status follows a moment later."""
    pod, _ = (pods.succeeded or pods.ended)[-1]
    state = _succeeded_state(pods) if pods.succeeded else _failed_state(facts, pods, {})
    if not pod.deleted or (pod.ran and not (pods.succeeded and pod.ended_on_request)):
        return state
    # The Job may have deleted the pod. Then only the Job's next status has the reason.
    return replace(state, status=JobStatus.PENDING, phase=Phase.PENDING, executor="")


def _active_state(facts: JobFacts, pods: _Pods) -> State:
    """Return the state of a Job that isn't over: its pod's state, and why an earlier pod ended."""
    earlier = pods.last_failure()
    if pods.alive is not None:
        return replace(pod_state(pods.alive), earlier_cause=earlier)
    state = replace(waiting_state(why_no_pod(facts)), earlier_cause=earlier)
    if earlier is None:
        return state
    last = pods.failed[-1][1]
    return replace(state, executor=last.executor, exit_code=last.exit_code)


def _suspended_state(facts: JobFacts, pods: _Pods) -> State:
    """Return the state of a suspended Job, whose pod, if any, is being stopped."""
    state, alive = waiting_state(why_no_pod(facts)), pods.alive
    if alive is not None and alive.ran:
        state = running_state(why_no_pod(facts), _STOPPING, executor=alive.uid)
    return replace(state, earlier_cause=pods.last_failure())


def _succeeded_state(pods: _Pods) -> State:
    """Return the state of a Job that succeeded; its pod's end may not have been seen yet."""
    if pods.succeeded:
        return replace(pods.succeeded[-1][1], earlier_cause=pods.last_failure())
    executor = pods.latest.uid if pods.latest is not None and not pods.latest.ended else ""
    return ended_state(
        Cause(), "succeeded", executor=executor, exit_code=0, status=JobStatus.SUCCEEDED
    )


def _failed_state(facts: JobFacts, pods: _Pods, target: Document) -> State:
    """Return the state of a failed Job; its condition *target* is empty if only its pods say so."""
    reason_text, message = str(target.get("reason")), one_line(str(target.get("message") or ""))
    deadline_passed, pod = reason_text == "DeadlineExceeded", pods.latest
    failures = [ended_pod for ended_pod in pods.failed if not ended_pod[0].deleted]
    if not deadline_passed and (failures or pods.failed):
        failures = failures or pods.failed
        state = failures.pop()[1]
    elif pod is not None and not deadline_passed and (cause := removal(pod)) is not None:
        # The Job counts a deleted pod as a failure, even if its program returned 0.
        state = ended_state(cause, executor=pod.uid, exit_code=0 if pod.ended else None)
    else:
        reason = Reason.DEADLINE if deadline_passed else Reason.LOST
        state = ended_state(
            Cause(summary=f"the Job failed ({reason_text})", more=[message], reason=reason)
        )
        if pod is not None and pods.alive is None:
            state = replace(state, executor=pod.uid, exit_code=pod.end.get("exitCode"))
    if failures and failures[-1][1].cause.summary != state.cause.summary:
        state = replace(state, earlier_cause=failures[-1][1].cause)
    return state if pods.alive is None else _state_while_alive(facts, pods.alive, state)


def _deleted_state(facts: JobFacts, pods: _Pods) -> State:
    """Return the state of a Job that never existed, or that is or was deleted before its end."""
    if not facts.current_or_last_job and pods.latest is None:
        return ended_state(
            Cause(summary=f"there is no Job {facts.job_name!r}"), status=JobStatus.NOT_FOUND
        )
    alive, last_ended = pods.alive, pods.ended[-1] if pods.ended else None
    if alive is not None:
        cause = Cause(summary="the Job was deleted", reason=Reason.CANCELLED)
        if facts.job is None and not alive.terminating:
            cause = replace(cause, more=["its pod was not"], advice="delete the pod")
        elif alive.node_silent:
            more = [f"node {alive.spec.get('nodeName')!r} does not answer, and keeps its pod"]
            cause = replace(cause, more=more, advice="restore or delete that node")
        return _state_while_alive(facts, alive, ended_state(cause, status=JobStatus.NOT_FOUND))
    when = "while it ran" if pods.ran else "before it ran"
    cause = Cause(summary=f"the Job was deleted {when}", reason=Reason.CANCELLED)
    state = ended_state(cause, status=JobStatus.NOT_FOUND)
    if last_ended is None:
        return state
    pod, end = last_ended
    if facts.job is None and end.status is JobStatus.SUCCEEDED and not pod.ended_on_request:
        return end
    state = replace(state, executor=end.executor, exit_code=end.exit_code)
    return state if pod.deleted else replace(state, earlier_cause=end.cause)


def _state_while_alive(facts: JobFacts, alive: Pod, state: State) -> State:
    """Return the state of a Job that will end with *state*, while its pod *alive* may still run."""
    lead = [_STOPPING] if alive.terminating or facts.job is not None else []
    build = running_state if alive.ran else waiting_state
    alive_state = build(replace(state.cause, outlook=Outlook.OPEN), *lead, *state.lead)
    return replace(
        alive_state,
        status=alive_state.status if facts.job is not None else JobStatus.NOT_FOUND,
        earlier_cause=state.earlier_cause,
        executor=state.executor or alive.uid,
    )


# --- no pod -------------------------------------------------------------------------------

_REFUSAL_REASONS = ("FailedCreate", "JobCreationFailed")
"""Reasons of events which say that the API server refused a pod, or a JobSet's Job."""


def why_no_pod(facts: JobFacts) -> Cause:
    """Return why a Job that isn't over has no pod."""
    if facts.suspended:
        if facts.workload is not None or QUEUE in get_dict(
            get_dict(facts.current_or_last_job, "metadata"), "labels"
        ):
            return queue_cause(facts)
        return Cause(
            summary="the Job is suspended",
            advice="resume it, or find the controller that suspended it",
            reason=Reason.QUEUED,
            outlook=Outlook.BLOCKED,
        )
    attempts = facts.about(None, *_REFUSAL_REASONS, "SuccessfulCreate")
    if attempts and attempts[-1].get("reason") in _REFUSAL_REASONS:
        return admission_cause(str(attempts[-1].get("message") or ""))
    if get_dict(facts.current_or_last_job, "status").get("failed"):
        return Cause(summary="Kubernetes creates another pod after a pause")
    return Cause(summary="Kubernetes has not created its pod yet")
