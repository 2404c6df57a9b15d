"""Decide what a worker does next: which item it takes, closes, or leaves to others.

`Pull.steps` is a generator. It yields one operation at a time, such as `Create` or `Wait`, and gets
the answer sent back. So it does no I/O, and tests play it in virtual time. ``docs/workers.md``
gives the rules and their reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from ..protocol import wire
from ..protocol.outcomes import Death, digest, outcome_of_death
from ..protocol.retry_budgets import INFRASTRUCTURE
from ..protocol.workers import (
    ALL_FINAL,
    EXIT_DONE,
    EXIT_REPLACE,
    EXIT_SURPLUS,
    NO_PRODUCER,
    Duty,
    Registration,
    Registry,
    Requests,
    Terms,
    WorkerId,
    duty,
)
from .items import Items

TWIN_S = 30.0
"""How long a second process of the same worker waits before it asks for its replacement."""

CLAIMANT_S = 600.0
"""How long a second process of a single job waits for the outcome of the first."""

SURPLUS_S = 30.0
"""How long a worker without work stays, in case that an item becomes free."""

PASS_S, LONGEST_PASS_S = 5.0, 30.0
"""The pause between two passes over the open items grows from the first to the second."""

BUDGET_S = 60.0
"""How often a worker with work adds up what the items of all workers have used of a budget."""

LAZY_S = 1.0
"""How often a worker without work looks for an input that a producer may store."""

SILENCE_S = 600.0
"""A producer whose lease stays unchanged for this long counts as dead."""

LONGEST_BACKOFF_S, MOST_DOUBLINGS = 60.0, 20
"""Limits of the pause before a retry, which begins with `Terms.backoff_s`."""

LOOKS = ((2.0, 2.0), (600.0, 10.0), (float("inf"), 30.0))
"""How often a running item's requests are read: until which age in seconds, and the pause."""

PROBLEM_CHARACTERS = 500
"""How much a registration has of the problem; a bucket takes metadata of 8 KiB at most."""

FAILED_OPENINGS = 3
"""Ranks that can't open the submission until this ends it, once another rank has opened it."""


# --- operations and their answers ---------------------------------------------------------


class Create(NamedTuple):
    """Create an object. The answer says whether it was absent."""

    name: str
    body: bytes
    metadata: Mapping[str, str]


class Read(NamedTuple):
    """Read an object. The answer has body and metadata, or is None."""

    name: str


class List(NamedTuple):
    """List objects. The answer has pairs of name and metadata, in the order of the names."""

    prefix: str


class Delete(NamedTuple):
    """Delete an object. There is no answer."""

    name: str


class Open(NamedTuple):
    """Open the submission: code and function. The answer is None, or an `OpeningFailure`."""


class Fetch(NamedTuple):
    """Read the input of an item from an input slot.

    The answer says whether it exists. It is an `Ended` if the submitter couldn't encode it.
    """

    item: int
    slot: int


class Ready(NamedTuple):
    """The worker has work. The platform may let it wait for its turn.

    The answer is None if it may work now. Otherwise it is a `News`, which may come before its turn.
    """


class Start(NamedTuple):
    """Run an item's function, in a child. There is no answer."""

    item: int
    attempt: int


class Stop(NamedTuple):
    """Ask the child to end. There is no answer."""


class Wait(NamedTuple):
    """Wait until the time is over, or something happens. The answer is a `News` or an `Ended`."""

    seconds: float


class News(Enum):
    """Why a `Wait` is over."""

    TIME = "the time is over"
    CHANGE = "the store may have changed"
    TERMINATE = "the platform ends this worker"


class Ended(NamedTuple):
    """The child has ended; the outcome isn't stored yet.

    ``log`` is where the item's output begins and ends in the worker's output file.
    """

    outcome: wire.Outcome
    body: bytes
    log: tuple[int, int] | None = None


class OpeningFailure(NamedTuple):
    """The submission can't be opened. ``passing`` says that the cause may pass, as for I/O."""

    outcome: wire.Outcome
    body: bytes
    message: str
    passing: bool


Operation: TypeAlias = Create | Read | List | Delete | Open | Fetch | Ready | Start | Stop | Wait
Steps: TypeAlias = Generator[Operation, Any, Any]


class Leave(Exception):
    """The worker ends with an exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


class Pull:
    """One worker of a submission.

    Args:
        me: This worker.
        executor: What the platform calls its process; no two processes share it.
        key: The key of the submission.
        scope: The prefix of the submission's objects.
        terms: What the submission says to all workers.
        clock: Returns seconds; only differences count.
        age_s: For how long the submission exists.
        once: Whether this worker takes one item at most; then a client starts another worker.
    """

    def __init__(
        self,
        me: WorkerId,
        executor: str,
        key: bytes,
        scope: str,
        terms: Terms,
        clock: Callable[[], float],
        age_s: float = 0.0,
        *,
        once: bool = False,
    ) -> None:
        self.me = me
        self.executor = executor
        self.terms = terms
        self.requests = Requests()
        self.registry = Registry()
        self.items = Items(terms.budgets, self.requests)
        self.terminating = False
        self._key = key
        self._scope = scope
        self._clock = clock
        self._once = once
        self._name = str(me)
        self._own_class = me.rank % terms.workers  # the next fresh item of this worker's own class
        self._candidates: list[int] = []  # open items of the last pass, the next one last
        self._not_before: dict[tuple[int, int], float] = {}
        self._began = clock() - age_s
        self._next_sum = clock() + BUDGET_S
        self._surplus_since: float | None = None
        self._lease: tuple[str, float] | None = None  # what the lease says, and since when

    def steps(self) -> Generator[Operation, Any, int]:
        """Work until nothing is left for this worker; return its exit code.

        Raises:
            OSError: The caller has thrown it in, because the result of an operation is unknown. The
                worker must then end with `EXIT_REPLACE`. Only a look while an item runs may fail.
        """
        try:
            if self.terms.single:
                yield from self._work_on_single_job()
            else:
                yield from self._work()
        except Leave as leave:
            return leave.code
        raise AssertionError("a worker ends only by leaving")

    def _work(self) -> Steps:
        if (yield Read(f"{self._scope}manifest")) is None:  # a cleanup has removed it
            raise Leave(EXIT_SURPLUS)
        failure = yield Open()
        yield from self._register(failure)
        yield from self._read_requests()
        yield from self._read_slots()
        if failure is not None:
            yield from self._report_failed_opening(failure)
        yield from self._stop_by_terms()  # this worker may replace one, or have waited for long
        pause, next_pass = PASS_S, self._clock()
        while True:
            self._leave_if_over()  # no claim that this worker can't keep
            index = self._next_item()
            if index is not None:
                pause, next_pass = PASS_S, self._clock()
                self._surplus_since = None
                if (yield from self._has_turn(index)) and (yield from self._run(index)):
                    self._leave_if_once(index)
            elif self._clock() >= next_pass:
                if (yield from self._pass()):
                    pause = PASS_S
                else:
                    next_pass = self._clock() + pause
                    pause = min(pause * 1.5, LONGEST_PASS_S)
            else:
                rest = next_pass - self._clock()
                if (yield from self._wait(rest if self.items.total is not None else LAZY_S)):
                    pause, next_pass = PASS_S, self._clock()
            yield from self._stop_by_terms()

    # --- beginning ---

    def _register(self, failure: OpeningFailure | None) -> Steps:
        """Say that this worker has begun, which proves that those before it have ended."""
        problem = failure.message[:PROBLEM_CHARACTERS] if failure else ""
        mine = Registration(self.me, self.executor, problem)
        name, metadata = mine.signed(self._key, self._scope)
        created = yield Create(name, b"", metadata)
        yield from self._read_registry()
        if self.registry.successor(self.me) is not None:
            raise Leave(EXIT_REPLACE)
        if not created:
            # Either this is a second process of the same worker, or the first was suspended and is
            # gone. Its own end tells: then the platform starts the next, or keeps the first.
            yield from self._sleep(TWIN_S)
            raise Leave(EXIT_REPLACE)

    def _report_failed_opening(self, failure: OpeningFailure) -> Steps:
        """End the submission with the error, unless another worker could open it."""
        self._leave_if_over()
        if not self.registry.opened or self.registry.failed_openings >= FAILED_OPENINGS:
            yield from self._list_open_blocks()
            for index in range(self.items.stored):
                if self._may_take(index) and (yield from self._run(index, failure)):
                    break
            if not failure.passing:
                yield from self._append_stop("setup", cancel_running=False)
        yield from self._pass()  # it leaves if nothing is open any more
        raise Leave(EXIT_REPLACE)

    # --- reading ---

    def _read_requests(self) -> Steps:
        """Read the requests that were written since; leave if this worker's round is over."""
        while True:
            name = wire.control_key(self._scope, self.requests.count)
            if (found := (yield Read(name))) is None:  # the missing next slot proves that it's all
                break
            request = wire.Request.verified(found[0], found[1], self._key, self._scope, name)
            self.requests.add(request)
            if request.kind in ("stop", "retry"):
                self.items.read_requests(request.items or [*request.bases] or None)
            if request.kind == "retry":
                self._began = self._clock()  # the time of `lifetime_s` starts again

    def _leave_if_over(self) -> None:
        if self.requests.removing or self.requests.round != self.me.round:
            raise Leave(EXIT_SURPLUS)
        if self.requests.done:
            # Only "all final" may end the other workers: after another cause, one may still run.
            is_done = self.requests.done == ALL_FINAL
            raise Leave(EXIT_DONE if is_done else EXIT_SURPLUS)

    def _read_slots(self) -> Steps:
        """Read the input slots that were stored since."""
        items = self.items
        if not items.slots:
            for name, metadata in (yield List(f"{self._scope}inputs/")):
                if name != wire.input_key(self._scope, len(items.slots)):
                    break  # a listing may overtake a slot that is stored meanwhile
                items.add_slot(wire.Slot.verified(metadata, self._key, self._scope, name))
        while items.total is None:
            name = wire.input_key(self._scope, len(items.slots))
            if (found := (yield Read(name))) is None:
                break
            items.add_slot(wire.Slot.verified(found[1], self._key, self._scope, name))

    def _read_registry(self) -> Steps:
        for name, metadata in (yield List(f"{self._scope}workers/")):
            registration = Registration.verified(name, metadata, self._key, self._scope)
            if registration is not None:
                self.registry.add(registration)

    def _list_span(self, first: int, last: int) -> Steps:
        """List the attempts of some items of a block; return the indexes of those that have any."""
        listing = yield List(wire.span_prefix(self._scope, first, last))
        found = wire.attempts_of(listing, self._key, self._scope)
        self.items.merge(found)
        return [*found]

    def _list_open_blocks(self) -> Steps:
        for block in self.items.open_blocks():
            open_items = [index for index in block if not self.items.is_final(index)]
            found = yield from self._list_span(open_items[0], open_items[-1])
            self._note_retries(found)
            self.items.conclude(open_items)

    # --- choosing ---

    def _next_item(self) -> int | None:
        """Return an item to claim: an own retry, a fresh item of the own class, or another's."""
        own_retries = [index for index, _ in self._not_before if self._may_take(index)]
        if own_retries:
            return own_retries[0]
        while self._own_class < self.items.stored:
            index = self._own_class
            self._own_class += self.terms.workers
            if self._may_take(index):
                return index
        while self._candidates:
            index = self._candidates.pop()
            if self._may_take(index):
                return index
        return None

    def _may_take(self, index: int) -> bool:
        """Return whether this worker may claim the item now, by what it knows."""
        # Without its input, others know of the item, or it was never stored.
        if index >= self.items.stored or self.items.is_final(index):
            return False
        item = self.items.state(index)
        if item.state is not wire.ItemState.OPEN:
            return False
        attempt = self.items.attempts(index).get(item.attempt)
        if attempt is not None and attempt.executor is not None:
            return False
        if self._shall_leave() and (self._once or self._duty(index) is Duty.FRESH):
            return False
        return self._clock() >= self._not_before.get((index, item.attempt), 0.0)

    def _has_turn(self, index: int) -> Steps:
        """Wait until this worker may run an item; return whether it may still take *index*."""
        news: News | None = News.CHANGE
        while news is not None:
            news = yield Ready()
            if news is News.TERMINATE:
                raise Leave(EXIT_REPLACE)
            if news is News.CHANGE:
                yield from self._read_requests()  # as a request to leave
                self._leave_if_over()
            if self.me.rank in self.requests.leaving:
                yield from self._read_registry()  # who stays may have registered meanwhile
            if not self._may_take(index):  # the wait may have been long
                return False
        return True

    def _duty(self, index: int) -> Duty:
        base = self.requests.standing(index).base
        item = self.items.state(index)
        return duty(item, self.items.attempts(index), base, self.registry, self.me)

    def _shall_leave(self) -> bool:
        """Return whether a client has asked this rank to leave, and another stays."""
        leaving = self.requests.leaving
        if self.me.rank not in leaving:
            return False
        # Only registered ranks count: one that the platform never places would take no item. But if
        # each worker takes one item, the client has others started.
        return self._once or bool(self.registry.ranks(self.me) - leaving)

    # --- one item ---

    def _claim(self, index: int) -> Steps:
        """Claim the open attempt of an item; return whether this worker has it."""
        number = self.items.state(index).attempt
        metadata = self._claim_metadata()
        created: bool = yield Create(self._claim_name(index, number), b"", metadata)
        if not created:  # the listing tells who was faster, there and in the items beside it
            block = index - index % wire.BLOCK_SIZE
            found = yield from self._list_span(block, block + wire.BLOCK_SIZE - 1)
            self._note_retries(found)
            return False
        claim = wire.Attempt(self.executor, None, None, self._name)
        self.items.merge({index: {number: claim}})
        self._not_before.pop((index, number), None)
        return True

    def _claim_name(self, index: int, number: int) -> str:
        return wire.attempt_key(self._scope, index, number, "claim")

    def _claim_metadata(self) -> dict[str, str]:
        return wire.claim_metadata(self.executor, worker=self._name)

    def _run(self, index: int, failure: OpeningFailure | None = None) -> Steps:
        """Claim an item, check it, run it, and commit its outcome; return whether it ran.

        With a *failure* to open the submission, this is the item's outcome.
        """
        number = self.items.state(index).attempt
        if not (yield from self._claim(index)):
            return False
        # Requests are read after the claim, and a client writes a stop before it reads claims. So
        # one of the two sees the other.
        yield from self._read_requests()
        # The input is read after the requests: a cleanup writes its stop, and then deletes inputs.
        found = yield from self._input_exists(index)
        if not found:
            yield Delete(self._claim_name(index, number))
            raise Leave(EXIT_SURPLUS)
        if not self._may_start(index, number):
            yield from self._commit(index, number, _CANCELLED, b"")
            self._leave_if_over()
            return False
        if failure is not None:
            ended = Ended(failure.outcome, failure.body)
        elif isinstance(found, Ended):
            ended = found
        else:
            yield Start(index, number)
            ended = yield from self._watch(index)
        yield from self._commit(index, number, ended.outcome._replace(log=ended.log), ended.body)
        # A failure in `init` that the platform has caused says nothing about other items.
        by_platform = self.terminating or ended.outcome.reason in INFRASTRUCTURE
        in_init = ended.outcome.phase == "init" and not by_platform
        if in_init and not (yield from self._has_called()):
            yield from self._append_stop("setup", cancel_running=False)
        if self.terminating and not self.terms.single:
            raise Leave(EXIT_REPLACE)
        return True

    def _leave_if_once(self, index: int) -> None:
        """Leave if the item that has run here was the only one for this worker."""
        if self._once:
            is_value = self.items.state(index).state is wire.ItemState.SUCCEEDED
            raise Leave(EXIT_DONE if is_value else EXIT_SURPLUS)

    def _has_called(self) -> Steps:
        """Return whether any item got beyond ``init``, so that it works on some machine."""
        yield from self._list_open_blocks()
        return any(
            attempt.outcome is not None and attempt.outcome.phase not in ("init", "submission")
            for index in range(self.items.stored)
            for attempt in self.items.attempts(index).values()
        )

    # The next two are methods, because tests replace them by wrong rules.

    def _input_exists(self, index: int) -> Steps:
        """Return whether the input exists (see `Fetch`); a cached copy would prove nothing."""
        return (yield Fetch(index, self.items.slot_of(index)))

    def _may_start(self, index: int, number: int) -> bool:
        item = self.items.state(index)
        is_open = (item.state, item.attempt) == (wire.ItemState.OPEN, number)
        is_current = self.requests.round == self.me.round and not self.requests.done
        return is_open and is_current and not self.terminating

    def _watch(self, index: int) -> Steps:
        """Wait until the child has ended; end it if the item is unwanted, or the worker must."""
        began, stopped = self._clock(), False
        while True:
            age = self._clock() - began
            pause = next(pause for until, pause in LOOKS if age < until)
            news = yield Wait(pause)
            if isinstance(news, Ended):
                return news
            self.terminating = self.terminating or news is News.TERMINATE
            try:
                yield from self._read_requests()
                yield from self._stop_by_terms()
            except OSError:
                pass  # the item needs no store while it runs, and the next look may succeed
            unwanted = self.requests.standing(index).unwanted
            if not stopped and (self.terminating or unwanted):
                stopped = True
                yield Stop()

    def _commit(self, index: int, number: int, outcome: wire.Outcome, body: bytes) -> Steps:
        """Create the outcome of an attempt that this worker has claimed."""
        stopped = self.requests.standing(index).unwanted
        if stopped and outcome.kind is not wire.Kind.VALUE:
            kept = {name: getattr(outcome, name) for name in ("started", "ended", "log", "metrics")}
            if outcome.metrics:  # the last of them are in the body
                kept["body"] = outcome.body
            else:
                body = b""
            outcome = _CANCELLED._replace(**kept)
        outcome = outcome._replace(executor=self.executor, writer=self._name)
        yield from self._store(index, number, outcome, body)

    def _store(self, index: int, number: int, outcome: wire.Outcome, body: bytes) -> Steps:
        """Create an outcome. If there is one already, that one counts."""
        content, metadata = outcome.stored(self._key, self._scope, index, number, body)
        name = wire.attempt_key(self._scope, index, number, "outcome")
        if not (yield Create(name, content, metadata)):
            block = index - index % wire.BLOCK_SIZE
            found = yield from self._list_span(block, block + wire.BLOCK_SIZE - 1)
            self._note_retries(found)
            return
        self.items.merge({index: {number: wire.Attempt(None, outcome)}})
        item = self.items.state(index)
        if item.state is wire.ItemState.SUCCEEDED or not self.requests.standing(index).stopped:
            # Under a stop, another attempt may have a value which this worker hasn't read.
            self.items.conclude([index])
        if item.state is wire.ItemState.OPEN:
            # Another worker may start the retry after one backoff, so that it runs elsewhere.
            self._not_before[index, item.attempt] = self._clock() + 2 * self._backoff_s(item)

    def _close(self, index: int) -> Steps:
        """Create the outcome of an attempt whose claimant has been replaced."""
        yield from self._read_requests()  # after the claim was seen, so that a stop counts
        item = self.items.state(index)
        claim = self.items.attempts(index).get(item.attempt, wire.Attempt())
        claimant = WorkerId.parse(claim.worker)
        successor = None if claimant is None else self.registry.successor(claimant)
        if claimant is None or successor is None:
            return
        disrupted = successor.disruptions > claimant.disruptions
        cause = "the platform stopped its worker" if disrupted else "its worker died"
        death = Death(reason="preempted" if disrupted else "lost", message=f"{cause} while it ran")
        outcome, body = outcome_of_death(death, item, claim.executor or "")
        yield from self._store(index, item.attempt, outcome._replace(writer=self._name), body)

    # --- no item to take ---

    def _pass(self) -> Steps:
        """Read everything that may have changed. Return whether there is something to do."""
        self._leave_if_over()
        yield from self._read_requests()
        self._leave_if_over()
        yield from self._read_slots()
        yield from self._read_registry()
        if self.registry.successor(self.me) is not None:
            raise Leave(EXIT_REPLACE)
        yield from self._list_open_blocks()
        duties = {
            index: it
            for block in self.items.open_blocks()
            for index in block
            if not self.items.is_final(index)
            # A stopped item of another round starts no more, and only a client can close it.
            if (it := self._duty(index)) is not Duty.FOREIGN or not self.items.state(index).stopped
        }
        dead = [index for index, it in duties.items() if it is Duty.DEAD]
        for index in dead:
            yield from self._close(index)
        self._note_retries(dead)
        # Begin at this worker's own part of the open items, so that few claims collide.
        free = [index for index in duties if self._may_take(index)]
        start = len(free) * (self.me.rank % self.terms.workers) // self.terms.workers
        self._candidates = (free[start:] + free[:start])[::-1]
        if dead or self._candidates:
            self._surplus_since = None
            return True
        shall_leave = self._shall_leave()
        if self._once and (shall_leave or not self._has_unclaimed(duties)):
            raise Leave(EXIT_SURPLUS)
        if not duties and self.items.total is None and self.requests.all_stopped:
            raise Leave(EXIT_SURPLUS)  # later inputs don't start, and a retry finds the round over
        if not duties and (self.items.total is not None or not shall_leave):
            yield from self._finish()
        elif self._is_surplus(duties):
            since = self._surplus_since = self._surplus_since or self._clock()
            if shall_leave or self._clock() - since >= SURPLUS_S:
                raise Leave(EXIT_SURPLUS)
        else:
            self._surplus_since = None
        return False

    def _has_unclaimed(self, indexes: Iterable[int]) -> bool:
        """Return whether this worker can claim one of these items later, as after a backoff."""
        for index in indexes:
            item = self.items.state(index)
            attempt = self.items.attempts(index).get(item.attempt, wire.Attempt())
            if item.state is wire.ItemState.OPEN and attempt.executor is None:
                return True
        return False

    def _note_retries(self, indexes: Iterable[int]) -> None:
        """Let each retry wait for its backoff, from when this worker first saw the failure."""
        for index in indexes:
            item = self.items.state(index)
            if item.after and item.state is wire.ItemState.OPEN:
                due = self._clock() + self._backoff_s(item)
                self._not_before.setdefault((index, item.attempt), due)

    def _backoff_s(self, item: wire.Item) -> float:
        """Return the pause before a retry; it doubles with each failure of the item's own."""
        first = self.terms.backoff_s
        doublings = min(max(0, item.failures - 1), MOST_DOUBLINGS)
        return min(first * 2.0**doublings, max(first, LONGEST_BACKOFF_S))

    def _is_surplus(self, duties: Mapping[int, Duty]) -> bool:
        """Return whether others are responsible for all that is open."""
        fresh_is_others = self._shall_leave()
        if self.items.total is None and not fresh_is_others:
            return False  # an input may come that no worker has taken
        return all(
            it is Duty.OTHERS or (it is Duty.FRESH and fresh_is_others) for it in duties.values()
        )

    def _finish(self) -> Steps:
        """Declare the round over: exactly the next slot proves that no request came meanwhile."""
        if self.items.total is None and not (yield from self._is_producer_silent()):
            return
        cause = ALL_FINAL if self.items.total is not None else NO_PRODUCER
        yield from self._append(wire.Request(kind="done", cause=cause))
        yield from self._read_requests()
        self._leave_if_over()

    def _is_producer_silent(self) -> Steps:
        """Return whether the lease has stayed the same for long, by this worker's clock."""
        found = yield Read(f"{self._scope}lease")
        text = repr(found)
        if self._lease is None or self._lease[0] != text:
            self._lease = text, self._clock()
        return self._clock() - self._lease[1] >= SILENCE_S

    # --- stops ---

    def _stop_by_terms(self) -> Steps:
        """Append the stop that the submission's terms ask for, unless it is there."""
        terms, running = self.terms, False
        if self.requests.all_stopped:
            return
        if terms.budget_s is not None and self._clock() >= self._next_sum:
            yield from self._list_open_blocks()  # which adds the time of each new outcome
            self._next_sum = self._clock() + BUDGET_S
        if terms.lifetime_s is not None and self._clock() - self._began >= terms.lifetime_s:
            cause, running = "timeout", True
        elif terms.budget_s is not None and self.items.spent_s >= terms.budget_s:
            cause, running = "budget", True
        elif terms.fail_fast and self.items.failed:
            cause, running = "fail_fast", terms.cancel_running
        else:
            return
        yield from self._append_stop(cause, cancel_running=running)

    def _append_stop(self, cause: str, *, cancel_running: bool) -> Steps:
        while not self.requests.all_stopped:
            request = wire.Request(kind="stop", cause=cause, keep_running=not cancel_running)
            yield from self._append(request)
            yield from self._read_requests()

    def _append(self, request: wire.Request) -> Steps:
        """Create exactly the next slot; if another has it, its request comes first."""
        name = wire.control_key(self._scope, self.requests.count)
        content, metadata = request.signed(self._key, self._scope, name)
        yield Create(name, content, metadata)

    # --- waiting ---

    def _wait(self, seconds: float) -> Steps:
        """Wait; return whether there may be something to do before the next pass."""
        own = [due for due in self._not_before.values() if due > self._clock()]
        seconds = min([seconds, *(due - self._clock() for due in own)])
        news = yield Wait(seconds)
        if news is News.TERMINATE:
            raise Leave(EXIT_REPLACE)
        if self.items.total is None:
            known = len(self.items.slots), self.requests.count
            if news is News.CHANGE:
                yield from self._read_requests()  # as a request to leave
            yield from self._read_slots()
            return (len(self.items.slots), self.requests.count) != known
        return news is News.CHANGE

    def _sleep(self, seconds: float) -> Steps:
        until = self._clock() + seconds
        while (rest := until - self._clock()) > 0:
            if (yield Wait(rest)) is News.TERMINATE:
                raise Leave(EXIT_REPLACE)

    # --- a job without a batch ---

    def _work_on_single_job(self) -> Steps:
        """Run the only item. No registration is needed: no other process waits for this rank."""
        failure = yield Open()
        self.items.add_slot(wire.Slot(0, 1))
        self.items.add_slot(wire.Slot(total=1))
        if self.me.restarts:
            yield from self._close_replaced()
        deadline = self._clock() + CLAIMANT_S
        while True:
            item = self.items.state(0)
            if item.state.final:
                is_value = item.state is wire.ItemState.SUCCEEDED
                raise Leave(EXIT_DONE if is_value else EXIT_SURPLUS)
            if self.terminating:
                raise Leave(EXIT_REPLACE)
            claim = self.items.attempts(0).get(item.attempt, wire.Attempt())
            if claim.executor == wire.VOID:
                raise Leave(EXIT_SURPLUS)  # a client closes it
            if claim.executor is None and self._may_take(0):
                if not (yield from self._run(0, failure)):
                    yield from self._read_requests()  # before a verdict on what a listing shows
                elif not self.terminating:
                    self._leave_if_once(0)
            elif claim.executor is None:
                yield from self._sleep(self._not_before[0, item.attempt] - self._clock())
            elif self._clock() < deadline:
                # Another process of this worker has it, and would end with this one.
                yield from self._sleep(TWIN_S)
                yield from self._list_span(0, 0)
                yield from self._read_requests()
            else:
                raise Leave(EXIT_REPLACE)

    def _close_replaced(self) -> Steps:
        """Close the attempts of the processes before this one, each of which makes one at most."""
        while True:
            yield from self._list_span(0, 0)
            yield from self._read_requests()  # after the claims were seen, so that a stop counts
            item = self.items.state(0)
            if item.state.final or item.attempt > self.me.restarts:
                return
            claim = self.items.attempts(0).get(item.attempt, wire.Attempt())
            # The process ended before its claim. Without an outcome, its attempt would be this
            # one's, which has another number.
            if claim.executor is None:
                void = wire.claim_metadata(wire.VOID)
                yield Create(self._claim_name(0, item.attempt), b"", void)
            else:
                outcome, body = outcome_of_death(_REPLACED, item, claim.executor)
                yield from self._store(0, item.attempt, outcome._replace(writer=self._name), body)


_CANCELLED = wire.Outcome(wire.Kind.CANCELLED, "cancelled", phase="cancelled", body=digest(b""))
_REPLACED = Death(
    reason="preempted",
    message=(
        "the job ended without an outcome: its pod was evicted or refused, or its node removed; "
        "Kubernetes restarted it"
    ),
)
