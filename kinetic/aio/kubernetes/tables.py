"""All jobs of one selector, as far as lists and changes have told, and which of them are news."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

from absl import logging

from kinetic._messages import one_line
from kinetic._runner.protocol import wire
from kinetic.aio._net.http import json_object
from kinetic.aio._net.retry import growing
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.diagnosis.causes import Diagnosis, Outlook
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part, parts, uid
from kinetic.aio.kubernetes.diagnosis.facts import OUTCOME, Pod, Seen, merged
from kinetic.aio.kubernetes.diagnosis.judge import judge, judge_pod
from kinetic.aio.kubernetes.manifests import ATTEMPT, HOSTS, JOB, LABELS, NAME, other_attempt_name
from kinetic.aio.ports import Observation, Phase
from kinetic.errors import Expired, Throttled, Unavailable
from kinetic.job_status import JobStatus, Reason

RECEIPT = "receipt"
"""Where it has the receipt."""

_POD = frozenset(
    {
        "activeDeadlineSeconds",
        "affinity",
        "nodeName",
        "nodeSelector",
        "overhead",
        "resources",
        "restartPolicy",
        "schedulerName",
        "schedulingGates",
        "tolerations",
    }
)
_CONTAINER = ("name", "image", "command", "resources", "restartPolicy")
_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "finalizers",
    "labels",
    "annotations",
    "ownerReferences",
)

_IDENTITY = ("uid", "deletionTimestamp", "annotations")
_JOB_STATUS = ("conditions", "failed", "failedIndexes", "completedIndexes")


def trimmed(document: Document) -> Document:
    """What `kinetic.aio.kubernetes.diagnosis` reads of a Job or a pod, and who it is."""
    metadata = part(document, "metadata")
    spec = part(document, "spec")
    if "containers" in spec:
        kept: dict[str, Any] = {key: spec[key] for key in _POD & spec.keys()}
        for field in ("initContainers", "containers"):
            if field in spec:
                kept[field] = [
                    {key: one[key] for key in _CONTAINER if key in one} for one in spec[field]
                ]
    else:
        kept = {key: value for key, value in spec.items() if key != "template"}
    return {
        "metadata": _shared({key: metadata[key] for key in _METADATA if key in metadata}),
        "spec": _shared(kept),
        "status": _shared(_with_receipts(part(document, "status"))),
    }


MEMO = 2048
"""Parts that are remembered; those that all jobs of a batch have in common are a few hundred."""

_memo: dict[Any, Any] = {}


def _shared(value: Any) -> Any:
    """*value*, or what it equals and was seen shortly before; so with each part of it.

    Documents of a batch differ in little, and those of thousands of live jobs are kept.
    """
    key: Any
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        value = {sys.intern(name): _shared(one) for name, one in pairs}
        key = (dict, *value, *map(_known, value.values()))
    elif isinstance(value, list):
        value = [*map(_shared, cast("Iterable[Any]", value))]
        key = (list, *map(_known, value))
    else:
        key = _known(value)
    if len(_memo) >= MEMO:
        _memo.clear()
    return _memo.setdefault(key, value)


def _known(one: Any) -> Any:
    """What stands for a part in a key; the part that has the key keeps it alive."""
    return (type(one), one) if isinstance(one, (str, int, float)) else id(one)


def same(before: Document, now: Document) -> bool:
    """Whether *now*, trimmed like *before*, says nothing new: half of all changes do not."""
    if any(
        part(before, "metadata").get(key) != part(now, "metadata").get(key) for key in _IDENTITY
    ):
        return False
    if before["spec"] != now["spec"]:
        return False
    if "containers" in now["spec"] or now["spec"].get("completions") != 1:
        return bool(before["status"] == now["status"])
    return all(before["status"].get(key) == now["status"].get(key) for key in _JOB_STATUS)


def _with_receipts(status: Document) -> Document:
    """The copy of an outcome in a termination message is not what the program said."""
    statuses = parts(status, "containerStatuses")
    if not any(part(part(one, "state"), "terminated").get("message") for one in statuses):
        return status
    return {**status, "containerStatuses": [_with_receipt(one) for one in statuses]}


def _with_receipt(container: Document) -> Document:
    ended = part(part(container, "state"), "terminated")
    receipt = wire.parse(str(ended.get("message") or ""))
    if receipt is None:
        return container
    said = {key: value for key, value in ended.items() if key != "message"} | {RECEIPT: receipt}
    with contextlib.suppress(ValueError):  # of another version
        said[OUTCOME] = wire.Outcome.parse(receipt.metadata["header"]).reason
    return {**container, "state": {"terminated": said}}


def _receipt_of(pod: Document | None) -> wire.Receipt | None:
    ends = (one.state("terminated") or {} for one in Pod(pod or {}).programs)
    return next((end[RECEIPT] for end in ends if end.get(RECEIPT)), None)


ENDED = "kinetic.dev/ended"
"""The annotation with why a client ended a Job that could not start; every observer reads it."""


_COUNTS = (
    "batch.kubernetes.io/job-index-failure-count",
    "batch.kubernetes.io/job-index-ignored-failure-count",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was asked for beside jobs and pods, because a state needed an explanation."""

    events: Sequence[Document] = ()
    nodes: Sequence[Document] | None = None
    workload: Document | None = None
    absent: Collection[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Why a client ends a Job that could not start."""

    reason: Reason
    message: str

    def to_text(self) -> str:
        """As the annotation carries it."""
        return json.dumps({"reason": self.reason.value, "message": self.message})

    @staticmethod
    def of(job: Document | None) -> End | None:
        """What the annotation of *job* says."""
        text = part(part(job, "metadata"), "annotations").get(ENDED)
        if not text:
            return None
        try:
            found = json.loads(str(text))
            return End(reason=Reason(found["reason"]), message=str(found["message"]))
        except (ValueError, KeyError, TypeError):
            return End(reason=Reason.LOST, message=one_line(str(text)))


def owner(pod: Document) -> str:
    """The uid of the Job that made *pod*."""
    return str(_controller(pod).get("uid") or "")


def owner_name(pod: Document) -> str:
    """The name of the Job that made *pod*."""
    return str(_controller(pod).get("name") or "")


def _controller(pod: Document) -> Document:
    nobody: Document = {}
    owners = parts(part(pod, "metadata"), "ownerReferences")
    return next((one for one in owners if one.get("controller")), nobody)


def judged(seen: Seen) -> Diagnosis:
    """What is to be told of the Job, also where a client has ended it."""
    verdict = judge(seen)
    end = End.of(seen.any_job)
    if end is None or any(_started(pod) for pod in (*seen.pods, *seen.gone)):
        return verdict
    alive = [pod for pod in seen.pods if not Pod(pod).ended]
    if verdict.phase is Phase.GONE or verdict.status is JobStatus.SUCCEEDED:
        return verdict
    return replace(
        verdict,
        status=JobStatus.PENDING if alive else JobStatus.FAILED,
        phase=Phase.PENDING if alive else Phase.ENDED,
        reason=end.reason,
        exit_code=None,
        executor="",
        message=end.message,
        advice="",
        outlook=Outlook.OPEN if alive else Outlook.FINAL,
    )


def _started(pod: Document) -> bool:
    """Whether its program surely ran: a kubelet says "unknown" of one that it never started."""
    states = [part(one.status, "state") for one in Pod(pod).programs]
    return any("running" in state or part(state, "terminated").get("startedAt") for state in states)


def settled(seen: Seen, verdict: Diagnosis) -> bool:
    """Whether nothing will change any more but that it is removed."""
    over = condition(seen.job, "Complete") or condition(seen.job, "Failed")
    return over is not None and verdict.phase is Phase.ENDED


def _is_last(seen: Seen, verdict: Diagnosis) -> bool:
    """Whether no pod of it is left that may run, and its Job, by its own word, makes no other."""
    if verdict.phase not in (Phase.ENDED, Phase.GONE):
        return False
    if verdict.status is JobStatus.SUCCEEDED or settled(seen, verdict):
        return True
    return seen.job is None or bool(part(seen.job, "metadata").get("deletionTimestamp"))


def observations(seen: Seen, verdict: Diagnosis) -> list[Observation]:
    """The port's words: one for each attempt, the one that *verdict* is about at the end.

    The Job replaces a pod that was disrupted. That one carries the number of
    the next attempt, in its annotations; the name and the labels of that are
    told, as they were ordered but for the number.
    """
    about = _about((seen.any_job, *seen.pods, *seen.gone))
    labels = _labels(about)
    first = _number(labels.get(ATTEMPT))
    if first is None:
        name = str(part(about, "annotations").get(NAME) or seen.job_name)
        pod = next(reversed([*seen.gone, *seen.pods]), None)
        word = _observation(about, labels, name, verdict, last=_is_last(seen, verdict))
        return [replace(word, receipt=_receipt_of(pod))]
    pods = {first + _starts_before(pod): pod for pod in (*seen.gone, *seen.pods)}
    now = _current(seen, verdict, pods, first)
    told = {
        number: judge_pod(Pod(pod, seen))
        for number, pod in pods.items()
        if number != now  # that is what the verdict says
    }
    found: list[Observation] = []
    name = str(part(about, "annotations").get(NAME) or seen.job_name)
    for number in (*sorted(told), now):
        said = verdict if number == now else told[number]
        whose = {**labels, ATTEMPT: str(number)}
        last = number == now and _is_last(seen, verdict)
        its_name = other_attempt_name(name, first, number)
        word = _observation(about, whose, its_name, said, last=last)
        found.append(replace(word, receipt=_receipt_of(pods.get(number))))
    return found


def name_of(document: Document) -> str:
    """The name of the attempt that a Job was made for, or that a pod carries out."""
    about = part(document, "metadata")
    name = str(part(about, "annotations").get(NAME) or about.get("name") or "")
    first = _number(_labels(about).get(ATTEMPT))
    if first is None:
        return name
    return other_attempt_name(name, first, first + _starts_before(document))


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _starts_before(pod: Document) -> int:
    """How many pods of its Job failed before this one, for whatever reason."""
    annotations = part(part(pod, "metadata"), "annotations")
    return sum(_number(str(annotations.get(key))) or 0 for key in _COUNTS)


def _current(seen: Seen, verdict: Diagnosis, pods: Mapping[int, Document], first: int) -> int:
    """The attempt that the verdict on the whole Job is about."""
    if not pods:
        return first
    alive = any(not Pod(pod).ended for pod in seen.pods)
    if verdict.phase is Phase.PENDING and not alive:
        return max(pods) + 1  # its pod is about to be made
    named = (number for number, pod in pods.items() if uid(pod) == verdict.executor)
    return next(named, max(pods))


def _observation(
    about: Document, labels: Mapping[str, str], name: str, verdict: Diagnosis, *, last: bool
) -> Observation:
    created = str(about.get("creationTimestamp") or "")
    return Observation(
        name=name,
        phase=verdict.phase,
        labels=labels,
        # What waits is no process yet.
        executor="" if verdict.phase is Phase.PENDING else verdict.executor,
        exit_code=verdict.exit_code,
        reason=verdict.reason,
        message=verdict.text,
        host=verdict.host,
        created_at=created.replace("Z", "+00:00"),
        last=last,
    )


def _about(documents: Iterable[Document]) -> Document:
    """The metadata of the first that carries the job's name."""
    found = [part(one, "metadata") for one in documents]
    named = (one for one in found if NAME in part(one, "annotations"))
    return next(named, found[0] if found else {})


def _labels(about: Document) -> Mapping[str, str]:
    text = part(about, "annotations").get(LABELS)
    if text:
        try:
            found: Any = json.loads(str(text))
        except ValueError:
            found = None
        if isinstance(found, dict):
            return cast("dict[str, str]", found)
    return {key: str(value) for key, value in part(about, "labels").items()}


PAGE = 250
"""Objects in one answer: some 20 ms of work for the event loop."""

GONE = 410
TRIES = 3
"""How often a list that expires begins anew, and how many errors of a watch end in a new list."""

WARN_AFTER = 5
"""Failures in a row before a watch warns: some seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """How a watch stays alive; in seconds.

    ``idle_s`` is the silence after which a connection counts as dead. ``life_s`` is
    how long the server keeps one watch open. After a watch that ended within
    ``brief_s`` and brought nothing, the pause grows. The server's own wish for a
    pause counts up to ``longest_wish_s``: a sleeping watch is blind.
    """

    page: int = PAGE
    idle_s: float = 100.0
    life_s: float = 280.0
    brief_s: float = 5.0
    first_pause_s: float = 0.2
    longest_pause_s: float = 4.0
    longest_wish_s: float = 30.0

    def pauses(self) -> Iterator[float]:
        """Yield growing pauses, half of each random."""
        return growing(self.first_pause_s, self.longest_pause_s, jitter=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Everything that exists now."""

    items: list[Document]
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """One object as it is now, or as it was when it was deleted."""

    document: Document
    deleted: bool


async def listing(api: Api, path: str, selector: str, page: int = PAGE) -> Listed:
    """Read all that *selector* finds, as of one moment.

    A list that takes longer than the server remembers its beginning starts over.
    """
    for _ in range(TRIES):
        try:
            return await _pages(api, path, selector, page)
        except Expired:
            continue
    raise Unavailable(
        f"listing {path} took so long that its beginning was forgotten, {TRIES} times; try again",
        retryable=True,
    )


async def _pages(api: Api, path: str, selector: str, page: int) -> Listed:
    items: list[Document] = []
    query = {"labelSelector": selector, "limit": str(page)}
    while True:
        answer = await api.call("GET", path, query=query)
        items += (trimmed(one) for one in answer.get("items") or ())
        metadata = part(answer, "metadata")
        if not (more := str(metadata.get("continue") or "")):
            return Listed(items=items, version=_version(answer))
        query["continue"] = more


async def reflect(
    api: Api, path: str, selector: str, rhythm: Rhythm
) -> AsyncGenerator[Listed | Changed]:
    """Yield what exists, then every change, forever; a further `Listed` replaces all before.

    A watch resumes where it stopped, for as long as the server remembers that version.
    After that, and after errors that repeat, everything is listed anew.

    Raises:
        BackendError: The server refuses the read for good.
    """
    loop = asyncio.get_running_loop()
    version: str | None = None  # of what was told last; None to list everything anew
    refusals, failures, pauses = 0, 0, rhythm.pauses()
    while True:
        begun, before, why = loop.time(), version, "the server ended it at once"
        wish = 0.0
        try:
            if version is None:
                found = await listing(api, path, selector, rhythm.page)
                version, refusals = found.version, 0
                yield found
                continue
            async with aclosing(_events(api, path, selector, version, rhythm)) as events:
                async for event in events:
                    document: dict[str, Any] = event.get("object") or {}
                    version = _version(document) or version
                    if event.get("type") in ("ADDED", "MODIFIED", "DELETED"):  # else a bookmark
                        refusals = 0
                        deleted = event["type"] == "DELETED"
                        yield Changed(document=trimmed(document), deleted=deleted)
        except Expired as exc:
            version, why = None, str(exc)
        except (Unavailable, Throttled) as exc:
            why, wish = str(exc), min(exc.retry_after or 0.0, rhythm.longest_wish_s)
            refusals += isinstance(exc, _ErrorEvent)
            if refusals >= TRIES:
                version = None
        lasted = loop.time() - begun >= rhythm.brief_s
        if before is not None and (lasted or version not in (None, before)):
            failures, pauses = 0, rhythm.pauses()
        failures += 1
        if failures == WARN_AFTER:
            what = "listing" if before is None else "watching"
            logging.warning("%s %s was interrupted: %s; retrying", what, path, why)
        await asyncio.sleep(max(wish, next(pauses)))


class _ErrorEvent(Unavailable):
    """An event of a watch tells that the server can't go on now."""


async def _events(
    api: Api, path: str, selector: str, version: str, rhythm: Rhythm
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the events of one connection, from *version* on.

    Raises:
        Expired: The server no longer remembers *version*.
        Unavailable: The server can't go on now, or something else answers for it.
    """
    query = {
        "watch": "1",
        "labelSelector": selector,
        "resourceVersion": version,
        "allowWatchBookmarks": "true",
        "timeoutSeconds": str(int(rhythm.life_s * random.uniform(0.8, 1.0)) or 1),
    }
    async with aclosing(api.lines(path, query=query, idle=rhythm.idle_s)) as lines:
        async for line in lines:
            if not line.strip():
                continue
            event = json_object(line.decode(errors="replace"))
            if not event:
                raise Unavailable(
                    f"watching {path}: {line[:100]!r} is no event of a Kubernetes API server; "
                    "check whether a proxy answers for the server",
                    retryable=True,
                )
            if event.get("type") == "ERROR":
                status = part(event, "object")
                said = str(status.get("message") or status.get("reason") or "no reason given")
                if status.get("code") == GONE or status.get("reason") in ("Expired", "Gone"):
                    raise Expired(f"watching {path}: {said}")
                raise _ErrorEvent(f"watching {path}: {said}", retryable=True)
            yield event


def _version(document: Document) -> str:
    return str(part(document, "metadata").get("resourceVersion") or "")


class Entry:
    """One name: the Job that has it now, and the pods of that Job.

    ``over`` is the uid of a Job of which only the removal can still be news;
    what it was judged by is dropped then. ``told`` has the last word on each of
    its attempts, ``current`` is the name of the last one. ``scenes`` are the pods
    whose nodes were asked for.

    The rest belongs to `kinetic.aio.kubernetes.watch`: ``since`` when it was
    first seen to wait, ``hopeless`` since when it waits in vain, ``asked`` how
    often more was asked about it, ``asked_as`` what was known before.
    """

    __slots__ = (
        "asked",
        "asked_as",
        "current",
        "facts",
        "hopeless",
        "job",
        "name",
        "over",
        "pods",
        "scenes",
        "seen",
        "since",
        "told",
        "verdict",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.job: Document | None = None
        self.pods: dict[str, Document] = {}
        self.seen = Seen(name=name)
        self.verdict: Diagnosis | None = None
        self.told: dict[str, Observation] = {}
        self.facts = Facts()
        self.over = ""
        self.since: float | None = None
        self.hopeless: float | None = None
        self.asked = 0
        self.asked_as = ""
        self.current = ""
        self.scenes: set[str] = set()

    def begin_anew(self) -> None:
        """Another Job has the name."""
        self.seen = Seen(name=self.name)
        self.facts = Facts()
        self.verdict, self.over = None, ""
        self.since, self.hopeless, self.asked, self.asked_as = None, None, 0, ""

    def judge(self, *, orphans: bool) -> Diagnosis | None:
        """What is to be told now; None when that is not known yet."""
        pods = [*self.pods.values()]
        whose = uid(self.job) if self.job is not None else uid(self.seen.any_job)
        if whose:
            pods = [pod for pod in pods if owner(pod) in (whose, "")]
            if self.job is None and "orphan" not in _finalizers(self.seen.any_job):
                pods = [_going(pod) for pod in pods]  # that is told a moment later
        elif not any((orphans or _leaving(pod)) and _is_process(pod) for pod in pods):
            return None  # its Job is about to be told, or was told as gone
        self.see(sorted(pods, key=_born))
        self.verdict = judged(self.seen)
        return self.verdict

    def see(self, pods: Sequence[Document], makers: Sequence[tuple[str, str]] = ()) -> None:
        """Add what is known now, with *pods* of the present Job, to what was seen before."""
        now = Seen(
            job=self.job,
            pods=pods,
            events=self.facts.events,
            nodes=self.facts.nodes,
            workload=self.facts.workload,
            absent=self.facts.absent,
            name=self.name,
            makers=makers,
        )
        self.seen = merged(self.seen, now)

    def put_job(self, job: Document, *, deleted: bool) -> bool:
        """Take the Job as it is now; return whether that may be news."""
        known = uid(self.job) or uid(self.seen.any_job) or self.over
        if deleted:
            if uid(job) != known:
                return False  # it is an earlier Job of this name
            if not self.over:  # its last state may say how it ended
                self.seen = replace(self.seen, job=job, name=self.name)
            self.job = None
            return True
        if known and uid(job) != known:
            self.begin_anew()
        if self.over:
            return False
        before, self.job = self.job, job
        return before is None or not same(before, job)

    def put_pod(self, pod: Document, *, deleted: bool, own: bool) -> bool:
        """Take a pod, *own* if the present Job made it; return whether that may be news."""
        if self.over and self.over == owner(pod):
            return False
        before = self.pods.get(uid(pod))
        if deleted:
            if self.pods.pop(uid(pod), None) is not None and own:
                others = [one for one in self.seen.pods if uid(one) != uid(pod)]
                self.seen = replace(self.seen, pods=[*others, pod])
            return True
        self.pods[uid(pod)] = pod
        return before is None or not same(before, pod)

    def finish(self) -> None:
        """Only its removal can still be news."""
        self.over = uid(self.job)
        if self.job is not None:  # finished Jobs are kept for a day: thousands of them
            metadata = part(self.job, "metadata")
            self.job = {"metadata": {key: metadata[key] for key in ("name", "uid")}}
        self.seen = Seen(name=self.name)
        self.facts = Facts()
        self.pods.clear()


def _born(pod: Document) -> tuple[str, str]:
    metadata = part(pod, "metadata")
    return str(metadata.get("creationTimestamp") or ""), str(metadata.get("name") or "")


def thrown_out(pod: Document) -> bool:
    """Whether its node was closed under it, or is lost: only the node itself says which."""
    target = condition(pod, "DisruptionTarget")
    return target is not None and target.get("reason") == "DeletionByTaintManager"


def _finalizers(job: Document) -> Sequence[str]:
    return parts(part(job, "metadata"), "finalizers")


def _going(pod: Document) -> Document:
    """A pod whose Job was deleted goes, too."""
    metadata = part(pod, "metadata")
    moment = metadata.get("deletionTimestamp") or metadata.get("creationTimestamp")
    return {**pod, "metadata": {**metadata, "deletionTimestamp": moment}}


def _leaving(pod: Document) -> bool:
    return bool(part(pod, "metadata").get("deletionTimestamp"))


def _is_process(pod: Document) -> bool:
    """Whether it may run without its Job: on a node, and not ended."""
    return bool(part(pod, "spec").get("nodeName")) and not Pod(pod).ended


class Table:
    """Feed it what the collections of jobs and of pods tell, in any order; ask for the news.

    With ``orphans``, what is not among the jobs is gone: a pod of it is told then.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.waiting: dict[str, Entry] = {}
        self.curious: dict[str, Entry] = {}
        self.orphans = False
        self._synced: set[bool] = set()
        self._dirty: dict[str, None] = {}

    @property
    def dirty(self) -> bool:
        """Whether there may be news."""
        return bool(self._dirty) and len(self._synced) == 2

    def feed(self, word: Listed | Changed, *, pods: bool) -> None:
        """Take a word about the jobs, or about their *pods*."""
        if isinstance(word, Changed):
            self._put(word.document, deleted=word.deleted, pods=pods)
            return
        present = {uid(one) for one in word.items}
        for entry in [*self.entries.values()]:
            known = [*entry.pods.values()] if pods else [entry.job] if entry.job else []
            for one in known:
                if uid(one) not in present:
                    self._put(one, deleted=True, pods=pods)
        for one in word.items:
            self._put(one, deleted=False, pods=pods)
        self._synced.add(pods)

    @property
    def strays(self) -> bool:
        """Whether there is a pod whose Job was not told."""
        return any(
            one.job is None and any(_is_process(pod) for pod in one.pods.values())
            for one in self.entries.values()
        )

    def learn(self, name: str, facts: Facts) -> None:
        """Take what was asked for about one job."""
        if (entry := self.entries.get(name)) is not None and not entry.over:
            entry.facts = facts
            self._dirty[name] = None

    def learn_scene(self, name: str, pod: str, node: Document) -> None:
        """Take how the node was when the pod of this uid was thrown out."""
        if (entry := self.entries.get(name)) is not None and not entry.over:
            entry.seen = replace(entry.seen, scenes={**entry.seen.scenes, pod: node})
            self._dirty[name] = None

    def _put(self, document: Document, *, deleted: bool, pods: bool) -> None:
        name = self._name(document, pods=pods)
        if not name or (deleted and name not in self.entries):
            return
        entry = self.entries.setdefault(name, Entry(name))
        news = (
            entry.put_pod(document, deleted=deleted, own=self._is_own(entry, document))
            if pods
            else entry.put_job(document, deleted=deleted)
        )
        if news:
            self._dirty[name] = None

    def _name(self, document: Document, *, pods: bool) -> str:
        """Return the name of the Job that *document* is, or is a pod of; "" for others."""
        metadata = part(document, "metadata")
        if HOSTS in part(metadata, "annotations"):
            return ""
        if not pods:
            return str(metadata.get("name") or "")
        # A pod that was orphaned has no owner any more.
        return owner_name(document) or str(part(metadata, "labels").get(JOB) or "")

    def _is_own(self, entry: Entry, pod: Document) -> bool:
        """Return whether the Job that has the name now made *pod*."""
        return owner(pod) == uid(entry.job)

    def news(self, most: int = 10**9) -> Iterator[Observation]:
        """What is to be told of at most so many jobs with changes; `dirty` says if there are more.

        Nothing is told before jobs and pods have both been listed.
        """
        if len(self._synced) < 2:
            return
        for _ in range(min(most, len(self._dirty))):
            name = next(iter(self._dirty))
            del self._dirty[name]
            if (entry := self.entries.get(name)) is not None:
                yield from self._told(entry)
                if name not in self.entries:
                    self.waiting.pop(name, None)

    def _told(self, entry: Entry) -> Iterator[Observation]:
        if entry.over:
            if entry.job is None:
                yield from self._gone(entry)
            return
        verdict = entry.judge(orphans=self.orphans)
        if verdict is None:
            if entry.told:  # nothing of it runs any more
                yield from self._gone(entry)
            elif not entry.pods:
                del self.entries[entry.name]
            return
        gone = entry.job is None and not any(_is_process(pod) for pod in entry.seen.pods)
        if gone:  # what is left of its pods is no process
            verdict = replace(verdict, phase=Phase.GONE)
        words = observations(entry.seen, verdict)
        if gone:
            entry.told.update((said.name, said) for said in words[-1:] if said.name in entry.told)
            yield from self._gone(entry)
            return
        self._note_waiting(entry, words[-1])
        if any(thrown_out(pod) and uid(pod) not in entry.scenes for pod in entry.seen.pods):
            entry.scenes.update(uid(pod) for pod in entry.seen.pods)
            self.curious[entry.name] = entry
        for said in words:
            before = entry.told.get(said.name)
            entry.told[said.name] = replace(said, receipt=None)  # a copy of each value is much
            if _is_news(before, said):
                yield said
        if settled(entry.seen, verdict):
            yield from self._never(entry, {said.name for said in words}, verdict)
            entry.finish()

    def _never(self, entry: Entry, told: set[str], verdict: Diagnosis) -> Iterator[Observation]:
        """Attempts that were about to come when the Job ended."""
        for name in entry.told.keys() - told:
            before = entry.told[name]
            if before.phase is not Phase.ENDED:
                said = replace(
                    before,
                    phase=Phase.ENDED,
                    executor="",
                    reason=verdict.reason,
                    message=verdict.text,
                    last=True,
                )
                entry.told[name] = said
                yield said

    def _gone(self, entry: Entry) -> Iterator[Observation]:
        del self.entries[entry.name]
        for said in entry.told.values():
            yield replace(said, phase=Phase.GONE, last=True)

    def _note_waiting(self, entry: Entry, said: Observation) -> None:
        before, entry.current = entry.current, said.name
        if said.phase is Phase.PENDING:
            self.waiting[entry.name] = entry
            if before == said.name:
                return
        else:
            self.waiting.pop(entry.name, None)
        entry.since, entry.hopeless, entry.asked = None, None, 0


def _is_news(before: Observation | None, said: Observation) -> bool:
    """An end is told once; later words may explain it otherwise, and change nothing.

    But where another attempt might have followed, that none will is news.
    """
    if before is None:
        return True
    if said.phase is not before.phase:
        return True
    if said.last and not before.last:
        return True
    return said.phase not in (Phase.ENDED, Phase.GONE) and said != before
