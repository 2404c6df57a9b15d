"""All jobs of one selector, as far as lists and changes have told, and which of them are news."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kinetic.aio.clusters._job_manifest import HOSTS
from kinetic.aio.clusters._kube_job import Facts, judged, observations, owner, owner_name, settled
from kinetic.aio.clusters._kube_reflect import Changed, Listed
from kinetic.aio.clusters._kube_trim import same
from kinetic.aio.clusters._reasons.documents import Document, condition, part, parts, uid
from kinetic.aio.clusters._reasons.ending import has_ended
from kinetic.aio.clusters._reasons.verdict import Seen, Verdict, merged
from kinetic.aio.ports import Observation, Phase

__all__ = ["Entry", "Table", "thrown_out"]


class Entry:
    """One name: the Job that has it now, and the pods of that Job.

    ``over`` is the uid of a Job of which only the removal can still be news;
    what it was judged by is dropped then. ``told`` has the last word on each of
    its attempts, ``current`` is the name of the last one. ``scenes`` are the pods
    whose nodes were asked for.

    The rest belongs to `kinetic.aio.clusters._kube_worry`: ``since`` when it was
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
        self.verdict: Verdict | None = None
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

    def judge(self, *, orphans: bool) -> Verdict | None:
        """What is to be told now; None when that is not known yet."""
        pods = [*self.pods.values()]
        whose = uid(self.job) if self.job is not None else uid(self.seen.any_job)
        if whose:
            pods = [pod for pod in pods if owner(pod) == whose]
            if self.job is None and "orphan" not in _finalizers(self.seen.any_job):
                pods = [_going(pod) for pod in pods]  # that is told a moment later
        elif not any((orphans or _leaving(pod)) and _is_process(pod) for pod in pods):
            return None  # its Job is about to be told, or was told as gone
        now = Seen(
            job=self.job,
            pods=sorted(pods, key=_born),
            events=self.facts.events,
            nodes=self.facts.nodes,
            workload=self.facts.workload,
            name=self.name,
        )
        self.seen = merged(self.seen, now)
        self.verdict = judged(self.seen)
        return self.verdict

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
    return bool(part(pod, "spec").get("nodeName")) and not has_ended(pod)


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
        metadata = part(document, "metadata")
        name = owner_name(document) if pods else str(metadata.get("name") or "")
        if not name or HOSTS in part(metadata, "annotations"):
            return
        entry = self.entries.get(name)
        if entry is None:
            if deleted:
                return
            entry = self.entries[name] = Entry(name)
        put = _put_pod if pods else _put_job
        if put(entry, document, deleted=deleted):
            self._dirty[name] = None

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
            before, entry.told[said.name] = entry.told.get(said.name), said
            if _is_news(before, said):
                yield said
        if settled(entry.seen, verdict):
            yield from self._never(entry, {said.name for said in words}, verdict)
            entry.finish()

    def _never(self, entry: Entry, told: set[str], verdict: Verdict) -> Iterator[Observation]:
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
                )
                entry.told[name] = said
                yield said

    def _gone(self, entry: Entry) -> Iterator[Observation]:
        del self.entries[entry.name]
        for said in entry.told.values():
            yield replace(said, phase=Phase.GONE)

    def _note_waiting(self, entry: Entry, said: Observation) -> None:
        before, entry.current = entry.current, said.name
        if said.phase is Phase.PENDING:
            self.waiting[entry.name] = entry
            if before == said.name:
                return
        else:
            self.waiting.pop(entry.name, None)
        entry.since, entry.hopeless, entry.asked = None, None, 0


def _put_job(entry: Entry, job: Document, *, deleted: bool) -> bool:
    """Take the Job; whether that may be news."""
    known = uid(entry.job) or uid(entry.seen.any_job) or entry.over
    if deleted:
        if uid(job) != known:
            return False  # of one that had the name before
        if not entry.over:  # its last state may say how it ended
            entry.seen = replace(entry.seen, job=job, name=entry.name)
        entry.job = None
        return True
    if known and uid(job) != known:
        entry.begin_anew()
    if entry.over:
        return False
    before, entry.job = entry.job, job
    return before is None or not same(before, job)


def _put_pod(entry: Entry, pod: Document, *, deleted: bool) -> bool:
    if entry.over and entry.over == owner(pod):
        return False
    if deleted:
        if (last := entry.pods.pop(uid(pod), None)) is not None and owner(pod) == uid(entry.job):
            pods = [one for one in entry.seen.pods if uid(one) != uid(last)]
            entry.seen = replace(entry.seen, pods=[*pods, pod])
        return True
    before = entry.pods.get(uid(pod))
    entry.pods[uid(pod)] = pod
    return before is None or not same(before, pod)


def _is_news(before: Observation | None, said: Observation) -> bool:
    """An end is told once; later words may explain it otherwise, and change nothing."""
    if before is None:
        return True
    if said.phase is not before.phase:
        return True
    return said.phase not in (Phase.ENDED, Phase.GONE) and said != before
