"""All sets of pods of one selector, as far as lists and changes have told; what is news of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kinetic.aio.clusters._group_judge import judge_group, word
from kinetic.aio.clusters._group_manifest import LIFE
from kinetic.aio.clusters._job_manifest import JOB
from kinetic.aio.clusters._kube_table import Entry, Table
from kinetic.aio.clusters._kube_trim import same
from kinetic.aio.clusters._reasons.documents import Document, part, uid
from kinetic.aio.clusters._reasons.ending import has_ended
from kinetic.aio.clusters._reasons.verdict import Seen, merged
from kinetic.aio.ports import Observation, Phase

__all__ = ["GroupTable"]


class GroupTable(Table):
    """As `Table`, of sets in place of Jobs: a set and its pods have one label in common.

    With *hints* it is told of every process that has ended, in a word of its own: one that does
    not close the attempt, but lets it be looked at. Only pods that have *label* are of these sets.
    *makers* gives kind and name of what makes the pods of the set of a name.
    """

    def __init__(
        self,
        *,
        label: str = "",
        hints: bool = True,
        makers: Callable[[str], Sequence[tuple[str, str]]] = lambda name: (),
    ) -> None:
        super().__init__()
        self._label = label
        self._makers = makers
        self._hints = hints
        self._hinted: dict[str, frozenset[str]] = {}

    def _put(self, document: Document, *, deleted: bool, pods: bool) -> None:
        metadata = part(document, "metadata")
        labels = part(metadata, "labels")
        name = str((labels.get(JOB) if pods else metadata.get("name")) or "")
        entry = self.entries.get(name)
        if not name or (entry is None and deleted):
            return
        if pods and self._label and self._label not in labels:
            return
        if entry is None:
            entry = self.entries[name] = Entry(name)
        put = _put_pod if pods else _put_set
        if put(entry, document, deleted=deleted):
            self._dirty[name] = None

    def _told(self, entry: Entry) -> Iterator[Observation]:
        now = Seen(
            job=entry.job,
            pods=[
                pod for pod in entry.pods.values() if _is_of(pod, entry.job or entry.seen.any_job)
            ],
            events=entry.facts.events,
            nodes=entry.facts.nodes,
            workload=entry.facts.workload,
            name=entry.name,
            makers=self._makers(entry.name),
        )
        entry.seen = merged(entry.seen, now)
        if not self._is_known(entry):
            return
        news = word(entry.seen)
        entry.verdict, said = judge_group(entry.seen), news.said
        if self._hints:
            for who in sorted(news.ended - self._hinted.get(entry.name, frozenset())):
                yield replace(said, phase=Phase.ENDED, executor=who)
            self._hinted[entry.name] = news.ended
        before, entry.told[said.name] = entry.told.get(said.name), said
        self._note_waiting(entry, said)
        if said.phase is Phase.GONE:
            del self.entries[entry.name]
            self._hinted.pop(entry.name, None)
        if before != said:
            yield said

    def _is_known(self, entry: Entry) -> bool:
        """Whether the set was told, or has none: it is told a moment later than its pods."""
        if entry.seen.any_job:
            return True
        if not entry.pods or all(has_ended(pod) for pod in entry.pods.values()):
            del self.entries[entry.name]
            return False
        going = (part(pod, "metadata").get("deletionTimestamp") for pod in entry.pods.values())
        return self.orphans or any(going)


def _is_of(pod: Document, of: Document) -> bool:
    """Whether the set *of* has made it, and not one that had the name before."""
    lives = [part(part(one, "metadata"), "annotations").get(LIFE) for one in (of, pod)]
    return not of or lives[0] == lives[1]


def _put_set(entry: Entry, found: Document, *, deleted: bool) -> bool:
    """Take the set; whether that may be news."""
    known = uid(entry.job) or uid(entry.seen.any_job)
    if deleted:
        if uid(found) != known:
            return False  # of one that had the name before
        entry.seen = replace(entry.seen, job=found, name=entry.name)
        entry.job = None
        return True
    if known and uid(found) != known:
        entry.begin_anew()
    before, entry.job = entry.job, found
    return before is None or not same(before, found)


def _put_pod(entry: Entry, pod: Document, *, deleted: bool) -> bool:
    if deleted:
        known = entry.pods.pop(uid(pod), None)
        if known is not None and _is_of(pod, entry.seen.any_job):
            others = [one for one in entry.seen.pods if uid(one) != uid(pod)]
            entry.seen = replace(entry.seen, pods=[*others, pod])
        return True
    before = entry.pods.get(uid(pod))
    entry.pods[uid(pod)] = pod
    return before is None or not same(before, pod)
