"""Track the jobs that match a selector, and report changes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from kinetic._labels import KIND, SUBMISSION, WORKER
from kinetic.aio.kubernetes.diagnosis.causes import Diagnosis
from kinetic.aio.kubernetes.diagnosis.documents import (
    Document,
    age_key,
    annotations_of,
    get_dict,
    get_list,
    labels_of,
    uid,
)
from kinetic.aio.kubernetes.diagnosis.facts import JobFacts, Pod, merge_facts
from kinetic.aio.kubernetes.manifests import HOSTS, JOB, RANK
from kinetic.aio.kubernetes.observations import (
    RANK_SEPARATOR,
    controller,
    has_job_ended,
    is_news,
    judge_job,
    observations,
    rank_entry,
    unstarted_ends,
)
from kinetic.aio.kubernetes.reflector import Changed, Listed
from kinetic.aio.ports import Observation, Phase


class Waiting:
    """How long a job has waited, and the inquiries about it; times by the loop's clock.

    ``since`` is when the job was first seen to wait, and ``hopeless_since`` when the diagnosis
    first said that it can never start. An inquiry asks the API server why the job waits.
    ``first_explanation`` is the diagnosis before the first inquiry.
    """

    __slots__ = ("first_explanation", "hopeless_since", "inquiry_count", "since")

    def __init__(self) -> None:
        self.since: float | None = None
        self.hopeless_since: float | None = None
        self.inquiry_count = 0
        self.first_explanation = ""


class Entry:
    """The documents of one name: the present Job of this name, and pods of Jobs of this name.

    For a round of workers, there is an entry for each rank: the Job, and the pods of this rank.

    ``ended_job_uid`` is the uid of a Job that has ended, else empty. `finish` then drops the Job's
    documents, because only the Job's deletion still matters. ``reported`` maps the name of each
    attempt to the last observation that clients got of it, and ``last_attempt`` is the name of the
    last attempt. ``answers`` has what inquiries about the Job returned. ``facts`` combines the
    answers with the documents, also those of deleted objects.
    """

    __slots__ = (
        "answers",
        "ended_job_uid",
        "facts",
        "job",
        "last_attempt",
        "name",
        "pods",
        "reported",
        "verdict",
        "waiting",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.job: Document | None = None
        self.pods: dict[str, Document] = {}
        self.reported: dict[str, Observation] = {}
        self.last_attempt = ""
        self.reset()

    def reset(self) -> None:
        """Forget everything about an earlier Job of this name."""
        self.facts = self.answers = JobFacts(name=self.name)
        self.verdict: Diagnosis | None = None
        self.ended_job_uid = ""
        self.waiting = Waiting()

    def judge(self, *, reports_orphans: bool) -> Diagnosis | None:
        """Return the state; None until the Job is seen. *reports_orphans*: see `Table`."""
        pods = [*self.pods.values()]
        job_uid = uid(self.job) if self.job is not None else uid(self.facts.current_or_last_job)
        if job_uid:
            pods = [pod for pod in pods if owner(pod) in (job_uid, "")]
            if self.job is None:  # Kubernetes deletes the pods of a deleted Job a moment later
                pods = [_mark_terminating(pod) for pod in pods]
        elif not self.has_orphans(reports_orphans=reports_orphans):
            return None
        self.update_facts(sorted(pods, key=age_key))
        self.verdict = judge_job(self.facts)
        return self.verdict

    def has_orphans(self, *, reports_orphans: bool) -> bool:
        """Return whether a pod may run whose Job was deleted before the table saw the Job.

        A pod proves that its Job was deleted if *reports_orphans*, or if the pod is terminating.
        """
        return any(
            (reports_orphans or Pod(pod).terminating) and is_process(pod)
            for pod in self.pods.values()
        )

    def update_facts(self, pods: Sequence[Document]) -> None:
        """Merge the current documents, with *pods* of the present Job, into the known facts."""
        now = replace(self.answers, job=self.job, pods=pods)
        self.facts = merge_facts(self.facts, now)

    def put_job(self, job: Document, *, deleted: bool) -> bool:
        """Store the current Job, or its deletion; return whether that may change observations."""
        known = uid(self.job) or uid(self.facts.current_or_last_job) or self.ended_job_uid
        if deleted:
            if uid(job) == known:  # else the document is of an earlier Job of this name
                if not self.ended_job_uid:  # the Job's last state may say how it ended
                    self.facts = replace(self.facts, job=job)
                self.job = None
            return True
        if known and uid(job) != known:
            self.reset()
        if self.ended_job_uid:
            return True
        # Each pod of a round changes the counters of its Job.
        is_same = RANK_SEPARATOR in self.name and _lasting(self.job) == _lasting(job)
        self.job = job
        return not is_same

    def put_pod(self, pod: Document, *, deleted: bool, is_own: bool) -> None:
        """Store a pod, or its deletion; *is_own* says whether the present Job made the pod."""
        if self.ended_job_uid and self.ended_job_uid == owner(pod):
            return
        if not deleted:
            before = self.pods.get(uid(pod), pod)
            if get_dict(pod, "spec").get("nodeName") != get_dict(before, "spec").get("nodeName"):
                # The pod's node may be newer than the list of nodes.
                self.answers = replace(self.answers, nodes=None)
                self.facts = replace(self.facts, nodes=None)
            self.pods[uid(pod)] = pod
        elif self.pods.pop(uid(pod), None) is not None and is_own:
            others = [other for other in self.facts.pods if uid(other) != uid(pod)]
            self.facts = replace(self.facts, pods=[*others, pod])

    def finish(self) -> None:
        """Drop the documents of an ended job, to save memory while the cluster keeps the Job."""
        self.ended_job_uid = uid(self.job)
        if self.job is not None:
            metadata = get_dict(self.job, "metadata")
            self.job = {"metadata": {key: metadata[key] for key in ("name", "uid")}}
        self.facts = self.answers = JobFacts(name=self.name)
        self.pods.clear()


def _lasting(job: Document | None) -> Document:
    """Return what observations of a worker depend on in the Job of its round."""
    metadata, status = get_dict(job, "metadata"), get_dict(job, "status")
    kept = {key: metadata.get(key) for key in ("uid", "deletionTimestamp", "annotations")}
    return {**kept, "spec": get_dict(job, "spec"), "conditions": status.get("conditions")}


def owner(pod: Document) -> str:
    """Return the uid of the Job that made *pod*."""
    return str(controller(pod).get("uid") or "")


def _mark_terminating(pod: Document) -> Document:
    """Return *pod* marked as being deleted, because Kubernetes deletes it after its Job."""
    metadata = get_dict(pod, "metadata")
    deletion_time = metadata.get("deletionTimestamp") or metadata.get("creationTimestamp")
    return {**pod, "metadata": {**metadata, "deletionTimestamp": deletion_time}}


def is_process(pod: Document) -> bool:
    """Return whether *pod* may have a running process: it is on a node, and hasn't ended."""
    return bool(get_dict(pod, "spec").get("nodeName")) and not Pod(pod).ended


class Table:
    """The jobs of one selector. `feed` takes lists and changes; `news` yields new observations.

    If ``reports_orphans`` is True, a pod whose Job isn't in the table has lost its Job, and `news`
    reports the pod. Otherwise, `news` waits for the Job, unless the pod is being deleted.

    ``waiting`` has the jobs that wait. ``held`` has those whose program has ended in a pod that
    other containers keep on its node. ``mixed_rounds`` has the Jobs of rounds whose pods have other
    containers.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.waiting: dict[str, Entry] = {}
        self.held: dict[str, Entry] = {}
        self.mixed_rounds = set[str]()
        self.reports_orphans = False
        self._listed: set[bool] = set()  # True after a list of pods, False after one of jobs
        self._changed_names: dict[str, None] = {}
        self._placed: set[str] = set()  # submissions of which a pod has run

    @property
    def has_changes(self) -> bool:
        """Whether observations may have changed."""
        return bool(self._changed_names) and len(self._listed) == 2

    def feed(self, update: Listed | Changed, *, pods: bool) -> None:
        """Process a list or a change of pods if *pods* is true, else of jobs."""
        if isinstance(update, Changed):
            self._put(update.document, deleted=update.deleted, pods=pods)
            return
        present = {uid(document) for document in update.items}
        for entry in [*self.entries.values()]:
            known = [*entry.pods.values()] if pods else [entry.job] if entry.job else []
            for document in known:
                if uid(document) not in present:
                    self._put(document, deleted=True, pods=pods)
        for document in update.items:
            self._put(document, deleted=False, pods=pods)
        self._listed.add(pods)

    @property
    def has_strays(self) -> bool:
        """Whether a pod may run whose Job isn't in the table."""
        return any(
            entry.job is None and any(is_process(pod) for pod in entry.pods.values())
            for entry in self.entries.values()
        )

    def learn(self, name: str, answers: JobFacts) -> None:
        """Add the answers to an inquiry about the job *name*; ignore them if the job has ended.

        All ranks of a suspended round wait for the same, so one inquiry is about all of them.
        """
        if (entry := self.entries.get(name)) is None or entry.ended_job_uid:
            return
        concerned = [entry]
        if RANK_SEPARATOR in name and entry.facts.suspended:
            concerned = [it for it in self.entries.values() if uid(it.job) == uid(entry.job)]
        for it in concerned:
            it.answers = replace(answers, name=it.name)
            self._changed_names[it.name] = None

    def _put(self, document: Document, *, deleted: bool, pods: bool) -> None:
        """Store a Job or a pod, or its deletion, in the entries that it concerns."""
        for name in self._entry_names(document, pods=pods):
            if not name or (deleted and name not in self.entries):
                continue
            entry = self.entries.setdefault(name, Entry(name))
            if pods:
                entry.put_pod(document, deleted=deleted, is_own=self._is_own(entry, document))
            elif not entry.put_job(document, deleted=deleted):
                continue
            self._changed_names[name] = None
        if not pods:
            for name in self._lost_ranks(document):
                self.entries[name].put_job(document, deleted=True)
                self._changed_names[name] = None

    def _lost_ranks(self, job: Document) -> list[str]:
        """Return the entries of ranks that *job* has no more: a queue has admitted fewer."""
        if labels_of(job).get(KIND) != WORKER:
            return []
        name, first = self._job_name(job, pods=False), len([*self._entry_names(job, pods=False)])
        ranks = (rank_entry(name, rank) for rank in itertools.count(first))
        return [*itertools.takewhile(self.entries.__contains__, ranks)]

    def _entry_names(self, document: Document, *, pods: bool) -> Iterable[str]:
        name, labels = self._job_name(document, pods=pods), labels_of(document)
        if labels.get(KIND) != WORKER:
            return [name]
        if pods:
            return [rank_entry(name, labels.get(RANK) or annotations_of(document).get(RANK, "0"))]
        count = int(get_dict(document, "spec").get("completions") or 0)
        return [rank_entry(name, rank) for rank in range(count)]

    def has_started_elsewhere(self, entry: Entry) -> bool:
        """Return whether another worker of the same Job has ever run."""
        return any(
            Pod(pod).ran
            for other in self.entries.values()
            if other is not entry and uid(other.job) == uid(entry.job)
            for pod in other.facts.every_pod
        )

    def _job_name(self, document: Document, *, pods: bool) -> str:
        """Return the name of the Job *document*, or of the Job of the pod *document*.

        Return "" for other objects, and for jobs on several hosts.
        """
        if HOSTS in annotations_of(document):
            return ""
        if not pods:
            return str(get_dict(document, "metadata").get("name") or "")
        # If a Job is deleted without its pods, each pod loses its owner, but keeps the label.
        return str(controller(document).get("name") or labels_of(document).get(JOB) or "")

    def _is_own(self, entry: Entry, pod: Document) -> bool:
        """Return whether the present Job of this name made *pod*."""
        return owner(pod) == uid(entry.job)

    def news(self, limit: int = 10**9) -> Iterator[Observation]:
        """Yield the changes of at most *limit* jobs; `has_changes` says whether there are more.

        Yields nothing until jobs and pods have both been listed.
        """
        if len(self._listed) < 2:
            return
        for _ in range(min(limit, len(self._changed_names))):
            name = next(iter(self._changed_names))
            del self._changed_names[name]
            if (entry := self.entries.get(name)) is not None:
                yield from self._changes(entry)
                if name not in self.entries:
                    self.waiting.pop(name, None)
                    self.held.pop(name, None)

    def _changes(self, entry: Entry) -> Iterator[Observation]:
        """Yield the changes of *entry* since the last observations that clients got."""
        if entry.ended_job_uid:
            if entry.job is None:
                yield from self._report_gone(entry)
            return
        verdict = entry.judge(reports_orphans=self.reports_orphans)
        if verdict is None:
            if entry.reported:  # no process of the Job runs any more
                yield from self._report_gone(entry)
            elif not entry.pods:
                del self.entries[entry.name]
            return
        is_gone = entry.job is None and not any(is_process(pod) for pod in entry.facts.pods)
        if is_gone:  # the remaining pods have no process
            verdict = replace(verdict, phase=Phase.GONE)
        current = observations(entry.facts, verdict)
        if is_gone:
            if current[-1].name in entry.reported:
                entry.reported[current[-1].name] = current[-1]
            yield from self._report_gone(entry)
            return
        self._note_waiting(entry, current[-1])
        self._note_held(entry)
        has_ended = has_job_ended(entry.facts, verdict)
        if has_ended:
            current += unstarted_ends(entry.reported, current, verdict)
        for observation in current:
            previous = entry.reported.get(observation.name)
            kept = observation
            if observation.receipt is not None:  # it may contain the function's whole result
                kept = replace(observation, receipt=None)
            entry.reported[observation.name] = kept
            if is_news(previous, observation):
                yield observation
        if has_ended:
            entry.finish()
        elif RANK_SEPARATOR in entry.name:
            yield from self._report_unneeded(entry, {observation.name for observation in current})

    def _report_unneeded(self, entry: Entry, names: Collection[str]) -> Iterator[Observation]:
        """Yield that workers don't come which were expected: a queue resumes with old numbers."""
        for name, observation in [*entry.reported.items()]:
            if observation.phase is Phase.PENDING and name not in names:
                del entry.reported[name]
                yield replace(observation, phase=Phase.GONE, last=True)

    def _report_gone(self, entry: Entry) -> Iterator[Observation]:
        """Remove *entry*, and yield that each of its reported attempts is gone."""
        del self.entries[entry.name]
        for observation in entry.reported.values():
            yield replace(observation, phase=Phase.GONE, last=True)

    def _note_held(self, entry: Entry) -> None:
        """Keep *entry* in ``held`` while containers beside its program hold a pod."""
        self.held.pop(entry.name, None)
        for pod in entry.facts.pods:
            if len(get_list(get_dict(pod, "spec"), "containers")) < 2:
                continue  # a shortcut for most pods, because this runs often
            if RANK_SEPARATOR in entry.name:
                self.mixed_rounds.add(entry.name.partition(RANK_SEPARATOR)[0])
            if Pod(pod).holders and not entry.facts.is_gone_or_deleting:
                self.held[entry.name] = entry

    def is_over_with(self, pod: Pod) -> bool:
        """Return whether the whole Job is over when *pod* has ended; else Kubernetes decides."""
        return pod.succeeded

    def _note_waiting(self, entry: Entry, observation: Observation) -> None:
        """Keep *entry* in ``waiting`` while its last attempt waits; time each attempt anew."""
        previous, entry.last_attempt = entry.last_attempt, observation.name
        submission = observation.labels.get(SUBMISSION, entry.name)
        if observation.phase is Phase.RUNNING:
            self._placed.add(submission)
        if observation.phase is Phase.PENDING:
            if submission in self._placed and not entry.facts.had_node:
                entry.facts = replace(entry.facts, had_node=True)
            self.waiting[entry.name] = entry
            if previous == observation.name:
                return
        else:
            self.waiting.pop(entry.name, None)
        entry.waiting = Waiting()
