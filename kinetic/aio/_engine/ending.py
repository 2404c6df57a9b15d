"""Decide how an attempt ends, and act on the decision; no other module does that.

The code that watches, reads, stops, or launches jobs only passes `Evidence` to this module.
`_take_steps` reads the store, lets `decide` name one step, takes the step, and reads again, until
there is nothing to do. Late or repeated evidence does no harm, because each step depends on the
store's present state.

To *claim* an attempt is to create the object that lets one process run it; after a *void* claim,
no process can run it. To *close* an attempt is to write its outcome when its process can't.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from absl import logging

from kinetic._labels import INDEX
from kinetic._messages import describe_error
from kinetic._runner.protocol import outcomes, wire
from kinetic._runner.protocol.outcomes import Death
from kinetic._runner.protocol.retry_budgets import SUBMISSION
from kinetic._tasks import for_each
from kinetic.aio._net.retry import SILENCE_LIMIT_S, is_temporary
from kinetic.aio._submissions.submission import Evidence, Submission
from kinetic.aio.ports import Observation, Phase, displaced
from kinetic.errors import BackendError, KineticError, NotFound, Unavailable, WireError
from kinetic.job_status import Reason

RELAUNCH_S = 60.0
"""How long a submitter may take to launch the next attempt, in seconds; otherwise, the job ends as
its last attempt did."""

ASK_WORKERS_S = 30.0
"""How old the platform's answer about workers may be, in seconds, while their watch knows them."""

SETTLING_AT_ONCE = 64
"""Maximum number of attempts whose ends are read at once; each takes a request or two."""

LOG_LINES = 20
"""Maximum number of log lines in an error."""

LOG_S = 15.0
"""How long to wait for the log of a failed job, in seconds; a lost node never sends it."""


# --- deciding ---


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the platform again: the evidence may be older than the attempt's claim."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the item with the outcome of its last attempt, because no other attempt will start."""

    why: str


Step = Death | Ask | GiveUp
"""A `Death` says to close the open attempt, which died so."""


def decide(
    item: wire.Item, attempt: wire.Attempt, name: str, evidence: Evidence, *, closes: bool
) -> Step | None:
    """Return the next step towards the end of an item, or None to wait for more evidence.

    *attempt* is the item's open attempt, and *name* the attempt's name on the platform. *closes*
    says that this process may close the attempt.
    """
    if item.state.final:
        return None
    observation, executor = evidence.observation, attempt.executor
    is_claimed = executor not in (None, wire.VOID)
    # The end of an earlier attempt says only whether another one follows.
    if item.attempt != evidence.number and not (evidence.final and executor is not None):
        return GiveUp(evidence.final) if evidence.final else None
    # In a running batch, the holder closes attempts; those of a stopped item, any process.
    if not (closes or item.state is wire.ItemState.CANCELLING):
        return None
    if evidence.refusal is not None:
        return None if is_claimed else _refusal_death(evidence.refusal)
    if evidence.final:  # all of the item's processes have ended, not only the one observed
        observation = replace(observation, executor="") if observation is not None else None
    elif observation is not None and observation.name != name:
        return None  # the end of another attempt proves nothing about this one
    elif (
        is_claimed and executor != evidence.claimant and not (observation and observation.executor)
    ):
        # An answer that names no process may be about an earlier job of the same name.
        return Ask()
    # Behind a void claim, no process can begin, so there is no end to wait for.
    if executor != wire.VOID and observation is not None:
        if not observation.phase.is_over:
            return None
        if is_claimed and observation.executor not in ("", executor):
            return None  # the process that ended isn't the one that claimed the attempt
    return _death(observation, is_claimed=is_claimed)


def _death(observation: Observation | None, *, is_claimed: bool) -> Death:
    """Return how an attempt died; without an observation, the platform has nothing of its name."""
    subject = "its process" if is_claimed else "it never started, and its job"
    if observation is None:
        message = f"{subject} is gone from the platform"
        return Death(message=message, reason=Reason.LOST.value, kind=wire.Kind.LOST)
    reason, code = observation.reason or Reason.LOST, observation.exit_code
    if observation.message:
        message = observation.message
    elif observation.phase is Phase.GONE:
        message = f"{subject} is gone from the platform"
    elif code is None:
        message = f"{subject} ended"
    else:
        number = -code if code < 0 else code - 128 if code > 128 else 0
        is_signal = number in signal.valid_signals()
        cause = f"was killed by {signal.Signals(number).name}" if is_signal else ""
        message = f"{subject} {cause or f'ended with exit code {code}'}"
    return Death(
        message=message,
        reason=reason.value,
        kind=wire.Kind.CANCELLED if reason is Reason.CANCELLED else wire.Kind.LOST,
        exit_code=code,
    )


def _refusal_death(error: Exception) -> Death:
    error_text = outcomes.error_text(error, phase="submission")
    return Death(
        kind=wire.Kind.ERROR,
        reason=SUBMISSION,
        message=error_text.message,
        phase=error_text.phase,
        qualname=error_text.qualname,
        traceback=error_text.traceback,
    )


# --- acting ---


async def settle(submission: Submission, evidence: Evidence) -> None:
    """Find out how an attempt has ended, or close it; on an error, let a later read retry that."""
    index, number = evidence.index, evidence.number
    try:
        item = await _take_steps(submission, evidence)
    except Exception as exc:
        now = asyncio.get_running_loop().time()
        evidence.since = now if evidence.since is None else evidence.since
        name = submission.identity.attempt_name(index, number)
        waiter_error = error_for_waiters(
            f"the end of {name}", exc, now - evidence.since, patient=submission.is_own
        )
        if waiter_error is not None:
            submission.set_error(index, waiter_error)
        if not _is_lasting(exc):
            submission.doubt(evidence)
        return
    evidence.since = None
    submission.clear_error(index)
    if not (item.state.final or item.attempt != number or submission.closes):
        submission.doubt(evidence)  # the process with the lease closes the attempt
        return
    submission.doubtful.pop(index, None)
    if not submission.identity.leased:
        submission.doubt_unseen(index)


async def close_refused(submission: Submission, index: int, number: int, error: Exception) -> bool:
    """Close an attempt that can't be submitted because of *error*.

    Return False if a process has begun the attempt despite the error. The stored outcome has the
    error, for every process that reads the item later.
    """
    item = await _take_steps(submission, Evidence(index, number, None, refusal=error))
    if item.state is wire.ItemState.FAILED and submission.refusals.get(index) is error:
        submission.fail_refused(index, error)
    return submission.attempt(index, number).executor in (None, wire.VOID)


async def give_up(submission: Submission, index: int, why: str) -> wire.Item:
    """End a single job with its last attempt's outcome; *why* says why no attempt can follow."""
    request = wire.Request(kind="stop", items=(index,), cause=why, keep_running=True)
    await submission.requests.append(request)
    return await submission.read_item(index)


async def _take_steps(submission: Submission, evidence: Evidence) -> wire.Item:
    """Take one step after another until there is nothing to do; return the item."""
    index, observation = evidence.index, evidence.observation
    if observation is not None and observation.host:
        submission.host_ends[index, evidence.number] = observation
    platform_replaces = not (submission.identity.leased or submission.relaunches)
    if platform_replaces and observation is not None and observation.last and not evidence.final:
        evidence = replace(evidence, final=observation.message or "its job has ended")
    item = await _read_item(submission, evidence)
    previous: tuple[wire.Item, Step] | None = None
    while True:
        attempt = submission.attempt(index, item.attempt)
        name = submission.identity.attempt_name(index, item.attempt)
        step = decide(item, attempt, name, evidence, closes=submission.closes)
        if step is None or (item, step) == previous:
            return item  # if a step has no effect, another process acts, or the next read decides
        previous = item, step
        match step:
            case Death():
                if not await _close(submission, evidence, item.attempt, step):
                    return item
                item = await submission.read_item(index)
            case Ask():
                asked_at = index, evidence.number
                seen = submission.observations.get(index)
                observation = (await find(submission, [asked_at])).get(asked_at)
                if not submission.is_over(*asked_at, observation, seen):
                    return item
                claimant = submission.attempt(*asked_at).executor
                evidence = replace(evidence, observation=observation, claimant=claimant)
            case GiveUp(why):
                item = await give_up(submission, index, f"not replaced: {why}")


async def _read_item(submission: Submission, evidence: Evidence) -> wire.Item:
    """Read the item; if the attempt's outcome alone shows its state, read only the outcome."""
    index, number = evidence.index, evidence.number
    if evidence.refusal is not None:
        # No read is needed: the claim that `_close` creates shows whether the attempt has begun.
        return submission.item(index) or wire.Item(wire.ItemState.OPEN, number)
    receipt = evidence.observation.receipt if evidence.observation is not None else None
    for copy in (receipt, None) if receipt is not None else (None,):
        try:
            item = await submission.read_end(index, number, copy)
        except WireError as exc:  # the outcome's body is damaged; a listing has the signed header
            logging.warning("%s: %s", submission.identity.attempt_name(index, number), exc)
            continue
        if item is not None:
            return item
        break
    return await submission.read_item(index)


async def _close(submission: Submission, evidence: Evidence, number: int, death: Death) -> bool:
    """Close an attempt; return False if that had no effect."""
    index = evidence.index
    await _refuse_cleaned(submission)
    claimant = submission.attempt(index, number).executor
    # A process that arrives late must find that it is too late, so make a void claim first.
    if claimant is None:
        claim = wire.claim_metadata(wire.VOID)
        name = wire.attempt_key(submission.identity.scope, index, number, "claim")
        if not await submission.store.create(name, b"", claim):
            await submission.read_item(index)
            claimant = submission.attempt(index, number).executor
            if claimant is None and submission.is_open(index, number):
                await _refuse_displaced(submission, index, number, "claim")
            return claimant is not None  # decide again, now that the claim is known
        claimant = wire.VOID
    outcome = await _store_outcome(submission, index, number, claimant, death)
    if evidence.refusal is not None and outcome.kind is wire.Kind.ERROR:
        # The error says more than the outcome, so keep it before waiters learn of the failure.
        submission.refusals[index] = evidence.refusal
    return True


async def _store_outcome(
    submission: Submission, index: int, number: int, claimant: str, death: Death
) -> wire.Outcome:
    """Create the outcome of an attempt whose claim was read; an existing outcome stays."""
    identity = submission.identity
    attempt_id = (identity.scope, index, number)
    item = await submission.read_item(index)  # this reads the requests, after the claim was read
    # A stopped item's error needs no log, and a refused attempt has none.
    needs_no_log = item.stopped or death.reason == SUBMISSION
    log = "" if needs_no_log else await _log_tail(submission, index, number)
    outcome, body = outcomes.outcome_of_death(death, item, claimant, log)
    content, metadata = outcome.stored(identity.key, *attempt_id, body)
    await _refuse_cleaned(submission)  # the job may have been cleaned up while its log was read
    name = wire.attempt_key(*attempt_id, "outcome")
    if not await submission.store.create(name, content, metadata):
        await _refuse_displaced(submission, index, number, "outcome")
    return outcome


async def _refuse_displaced(submission: Submission, index: int, number: int, kind: str) -> None:
    """Check that an object has the name that `create` could not use.

    Raises:
        WireError: Something other than an object has the name: the attempt can never be closed.
    """
    store, identity = submission.store, submission.identity
    name = wire.attempt_key(identity.scope, index, number, kind)
    if await store.look(name) is None and await store.look(identity.manifest_name):
        raise displaced(name, store)


async def _refuse_cleaned(submission: Submission) -> None:
    """Refuse to write for a cleaned-up single job: nothing would remove the new object."""
    identity = submission.identity
    if not (identity.leased or await submission.store.look(identity.manifest_name)):
        raise identity.gone_error


async def _log_tail(submission: Submission, index: int, number: int) -> str:
    """Return the last lines of an attempt's log; empty if the log can't be read."""
    name = submission.identity.attempt_name(index, number)
    # A long line comes in several pieces, so more than LOG_LINES pieces may come.
    lines: deque[str] = deque(maxlen=LOG_LINES)
    try:
        async with (
            asyncio.timeout(LOG_S),
            aclosing(submission.cluster.logs(name, tail=LOG_LINES)) as log,
        ):
            async for line in log:
                lines.append(line)  # after a timeout, `lines` has what was read
    except Exception as exc:
        logging.debug("can't read the whole log of %s: %s", submission.identity.job_id(index), exc)
    if not lines:
        try:
            lines.extend(await submission.kept_log(index, number))
        except Exception as exc:
            logging.debug(
                "can't read the stored log of %s: %s", submission.identity.job_id(index), exc
            )
    return "\n".join(lines)[-8192:]


# --- failing to find out ---


def error_for_waiters(
    subject: str, error: Exception, silent_s: float, *, patient: bool = False
) -> Exception | None:
    """Log that *subject* can't be read; return the error for waiters, or None if they keep waiting.

    Waiters get the error at once if the object is removed or damaged, or a permission is missing.
    Otherwise they get it after a minute. A submitter is *patient*: it gets an error only if the
    object is removed or damaged.
    """
    is_known = isinstance(error, KineticError)
    # A cleanup has removed the object, maybe that of a Ctrl-C in this process.
    level = logging.INFO if isinstance(error, NotFound) else logging.WARNING
    exc_info = None if is_known else error
    logging.log(level, "can't read %s: %s", subject, describe_error(error), exc_info=exc_info)
    refused = is_known and not is_temporary(error)
    if _is_lasting(error) or (refused and not patient):
        return error
    if patient or silent_s < SILENCE_LIMIT_S:  # a submitter's job may run for days
        return None
    return Unavailable(
        f"{subject} could not be read for {SILENCE_LIMIT_S:g} s: {describe_error(error)}; kinetic "
        "keeps checking: wait again when the store answers",
        retryable=True,
    )


def _is_lasting(error: Exception) -> bool:
    """Return whether *error* is permanent, because an object is damaged or removed."""
    if isinstance(error, BackendError):  # an administrator can grant a missing permission
        return isinstance(error, NotFound)
    return isinstance(error, KineticError)


# --- asking the platform ---


async def reconcile(submission: Submission, index: int, *, explained: bool = False) -> wire.Item:
    """Read an item; if it's open, ask the platform whether its attempt has ended, and close it.

    *explained* also asks why the item waits.
    """
    item = await submission.read_item(index)
    submission.clear_error(index)
    if item.state.final:
        return item
    await ask(submission, [index], explained=explained)
    return submission.item(index) or item


async def reconcile_items(submission: Submission, indices: Collection[int]) -> list[int]:
    """Do so with items of a batch, in few requests; return those that are still open."""
    await submission.read_each(indices)
    await ask(submission, submission.begun(indices))
    return submission.unfinished(indices)


@dataclass(frozen=True, slots=True)
class Question:
    """The state of an open attempt when the platform was asked about it."""

    index: int
    number: int
    claimant: str | None
    previous: Observation | None


async def ask(submission: Submission, indices: Collection[int], *, explained: bool = False) -> None:
    """Ask the platform about open items in one request, and settle attempts that have ended.

    The caller must have just read the items.
    """
    asked = [
        Question(
            index, item.attempt, submission.claimant(index), submission.observations.get(index)
        )
        for index in indices
        if (item := submission.item(index)) is not None
        and not (item.state.final or submission.is_damaged(index))
    ]
    last_launched = submission.last_launched
    names = [
        (question.index, number)
        for question in asked
        for number in submission.identity.attempts_to_ask(question.number)
    ]
    found = await find(submission, names, explained=explained)
    # An attempt that the platform lacks may have stored its outcome since the caller's read. If
    # only the store shows what runs, the platform lacks each item that no worker has taken.
    if absent := [
        question.index
        for question in asked
        if (question.index, question.number) not in found
        and not (submission.listed and question.claimant is None)
    ]:
        await submission.read_each(absent)
    ended: list[Evidence] = []
    for question in asked:
        if submission.is_open(question.index, question.number):
            evidence = _find_evidence(submission, question, found, last_launched)
            if evidence is not None:
                ended.append(evidence)
    await for_each(lambda evidence: settle(submission, evidence), ended, limit=SETTLING_AT_ONCE)
    if not submission.identity.leased:
        for question in asked:
            submission.doubt_unseen(question.index)


def _find_evidence(
    submission: Submission,
    question: Question,
    found: Mapping[tuple[int, int], Observation],
    last_launched: int,
) -> Evidence | None:
    """Return the platform's evidence that an open attempt has ended, if any."""
    index, number = question.index, question.number
    executor = submission.attempt(index, number).executor
    observation = found.get((index, number))
    # The platform's answer replaces the earlier doubt; if needed, a caller notes a new doubt.
    doubted = submission.doubtful.pop(index, None)
    since = doubted.since if doubted is not None else None
    seen = doubted.observation if doubted is not None and observation is None else None
    if seen is not None and seen.executor == executor and seen.phase is not Phase.RUNNING:
        return doubted  # this evidence has more details than the job's absence
    if observation is None and executor in submission.worker_ends:
        name = submission.identity.attempt_name(index, number)
        observation = replace(submission.worker_ends[executor], name=name, receipt=None)
    if observation is None and not submission.identity.leased:
        if all(other <= number for _, other in found):
            return _evidence_of_absence(submission, question, found, last_launched)
        name = submission.identity.attempt_name(index, number)
        message = "its process is gone, and the platform has started another process"
        reason = Reason.PREEMPTED
        observation = Observation(name=name, phase=Phase.GONE, reason=reason, message=message)
    # A process that makes a void claim may die before it closes the attempt.
    is_void = executor == wire.VOID
    if is_void or submission.is_over(index, number, observation, question.previous):
        return Evidence(index, number, observation, question.claimant, since=since)
    return None


def _evidence_of_absence(
    submission: Submission,
    question: Question,
    found: Mapping[tuple[int, int], Observation],
    last_launched: int,
) -> Evidence | None:
    """Return the evidence that a single job has ended, if the platform lacks its open attempt.

    Return None while the platform or the submitter may still start that attempt in place of the
    previous one: its absence then proves nothing.
    """
    index, number = question.index, question.number
    if number <= last_launched:
        return Evidence(index, number, None, question.claimant)
    last = next((observation for observation in found.values() if observation.last), None)
    # While the platform has an earlier attempt that isn't the last, it may replace that attempt.
    if number > 1 and (submission.relaunches or last is not None or not found):
        subject = "its job"
        if submission.relaunches:
            subject = "the process that submitted it"
            now = asyncio.get_running_loop().time()
            waited_s = now - submission.missed_since.setdefault(number, now)
            # Unless it is this process, the submitter may have died, or be suspended.
            if submission.last_launched or waited_s < RELAUNCH_S:
                return None
        final = (last.message if last is not None else "") or f"{subject} is gone"
        return Evidence(index, number - 1, last, final=final)
    claimed = submission.attempt(index, number).executor is not None
    if claimed or (not found and submission.identity.is_launch_over):
        return Evidence(index, number, None, question.claimant)
    return None


async def find(
    submission: Submission, attempts: Collection[tuple[int, int]], *, explained: bool = False
) -> dict[tuple[int, int], Observation]:
    """Ask the platform about *attempts*, pairs of item and number, in one request."""
    identity, cluster = submission.identity, submission.cluster
    names = {identity.attempt_name(*attempt): attempt for attempt in attempts}
    if identity.leased:
        return await _find_items(submission, names) if names else {}
    found = await cluster.find(names=[*names], explained=explained) if names else []
    attributed = map(submission.attributed, found)
    return {
        names[observation.name]: observation
        for observation in attributed
        if observation.name in names
    }


async def _find_items(
    submission: Submission, names: Mapping[str, tuple[int, int]]
) -> dict[tuple[int, int], Observation]:
    """Ask the platform about attempts that workers run."""
    observations = await _find_workers(submission, names.values())
    found = {names[it.name]: it for it in observations if it.name in names}
    workers = {it.executor: it for it in observations if INDEX not in it.labels}
    for name, attempt in names.items():
        claim = submission.attempt(*attempt)
        if attempt in found or claim.executor is None:
            continue
        # The platform may not know yet which item a worker has claimed, so the claim counts: the
        # attempt runs as long as that process runs.
        if claim.executor in workers:
            found[attempt] = submission.observation_of(workers[claim.executor], *attempt)
            continue
        # The platform may have forgotten the worker, and show only the one in its place.
        is_new = claim.executor not in submission.worker_ends
        if is_new and _is_disrupted(submission, claim, workers.values()):
            submission.worker_ends[claim.executor] = Observation(
                name=name,
                phase=Phase.GONE,
                executor=claim.executor,
                reason=Reason.PREEMPTED,
                message="the platform stopped its worker while it ran",
            )
    return found


def _is_disrupted(
    submission: Submission, claim: wire.Attempt, workers: Iterable[Observation]
) -> bool:
    """Return whether one of *workers* replaces the claimant because the platform has ended it."""
    from kinetic._runner.protocol.workers import WorkerId  # most jobs need none

    if (claimant := WorkerId.parse(claim.worker)) is None:
        return False
    rank = f"{submission.identity.round_name(claimant.round)}.{claimant.job}.{claimant.rank}."
    return any(it.name.startswith(rank) and it.disruptions > claimant.disruptions for it in workers)


async def _find_workers(
    submission: Submission, attempts: Iterable[tuple[int, int]]
) -> Collection[Observation]:
    """Return what the platform says of workers."""
    seen = [it for it in submission.worker_observations.values() if it.phase is Phase.RUNNING]
    running = {None, *(it.executor for it in seen)}
    # Where only the store shows items, a large batch is read every few seconds. The answer matters
    # only for a claimant that the watch doesn't report as running.
    is_known = all(submission.attempt(*it).executor in running for it in attempts)
    return seen if is_known and _has_asked(submission) else await ask_for_workers(submission)


def _has_asked(submission: Submission) -> bool:
    """Return whether the platform was asked for workers lately; the watch is enough until then."""
    age_s = asyncio.get_running_loop().time() - submission.workers_asked
    return submission.listed and age_s < ASK_WORKERS_S


async def ask_for_workers(submission: Submission) -> Collection[Observation]:
    """Ask the platform for workers, and note the changes that no watch has reported."""
    known = {**submission.worker_observations}
    submission.workers_asked = asyncio.get_running_loop().time()
    found = await submission.cluster.find(labels=submission.identity.labels)
    answers = {it.name: it for it in found}
    for name, seen in known.items():
        now = answers.get(name) or replace(seen, phase=Phase.GONE)
        # If a watch has reported the worker since the question, the answer may be older.
        if now.phase is not seen.phase and submission.worker_observations.get(name) is seen:
            submission.note_worker(now)
    return found


async def check_workers(submission: Submission) -> None:
    """Ask for workers if only a watch has shown them for some time: it may have missed an end."""
    if submission.listed and submission.worker_observations and not _has_asked(submission):
        await ask_for_workers(submission)


async def host_end(submission: Submission, index: int, number: int) -> Observation | None:
    """Return the observation of a host whose failure ended an attempt; ask the platform once.

    Return None if the first host ended the attempt, or the platform doesn't know which host did.
    """
    host_ends = submission.host_ends
    if (index, number) not in host_ends:
        observation = (await find(submission, [(index, number)])).get((index, number))
        has_host = observation is not None and observation.host
        host_ends[index, number] = observation if has_host else None
    return host_ends[index, number]
