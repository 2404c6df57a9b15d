"""Facts of batches for reports: ordinary ones, hostile ones, and ones of the maximum size."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from kinetic._progress.standing import Goal
from kinetic._progress.tally import State
from kinetic._report.digest import choose_curves
from kinetic._report.facts import Attempt, BatchReport, Curve, Curves, Example, Item

__all__ = ["HOSTILE", "STARTED", "hostile", "largest", "search", "sweep"]

STARTED = 1_790_000_000.0

HOSTILE = [
    "<img src=x onerror=\"document.title='pwned'\">",
    "</script><script>document.title='pwned'</script>",
    "<!--<script>",
    "{{script}}{{facts}}",
    "\u202eright to left\u202c",
    "שלום עולם",
    "two\u2028lines\u2029\x00\x07\x1b[31mred",
    "&lt;b&gt; &amp; ]]>",
    "javascript:document.title='pwned'",
    "\ud800 alone",
    "x" * 3000,
    "'\"`${document.title='pwned'}",
]


def sweep(size: int, *, seed: int = 1) -> BatchReport:
    """Return a sweep over learning rates with failures and retries, run by 16 slots."""
    rng = random.Random(seed)
    free = [STARTED + 1.0] * 16
    items: list[Item] = []
    for index in range(size):
        rate, layers = 10 ** rng.uniform(-5, -1), rng.choice([2, 4, 8])
        slot = min(range(len(free)), key=free.__getitem__)
        attempts: list[Attempt] = []
        for number in (1, 2):
            begun, ended = free[slot], free[slot] + rng.lognormvariate(1, 0.5)
            free[slot] = ended + 0.1
            good = rng.random() > 0.2
            attempts.append(
                Attempt(
                    number=number,
                    kind="value" if good else "error",
                    reason="" if good else "user error",
                    message="" if good else f"ValueError: loss is nan at step {index}",
                    begun=begun,
                    ended=ended,
                )
            )
            if good:
                break
        succeeded = attempts[-1].kind == "value"
        items.append(
            Item(
                index=index,
                state=State.SUCCEEDED if succeeded else State.FAILED,
                attempts=tuple(attempts),
                input={"rate": rate, "layers": layers, "optimizer": rng.choice(["adam", "sgd"])},
                result={"loss": rate * layers, "epochs": index % 7} if succeeded else {},
            )
        )
    failed = [item.index for item in items if item.state is State.FAILED]
    trace = "Traceback (most recent call last):\n  …\nValueError: loss is nan"
    return BatchReport(
        group_id="grp-1",
        name="sweep",
        function="train",
        tags={"team": "vision"},
        where="local",
        max_concurrent=16,
        created=STARTED,
        read_at=max(free),
        total=size,
        items=tuple(items),
        examples={
            index: Example(message=items[index].message, traceback=trace) for index in failed[:1]
        },
    )


def search(size: int, *, seed: int = 1, name: str = "search") -> BatchReport:
    """Return a sweep with a pruner, whose trials report their loss and accuracy per step."""
    rng = random.Random(seed)
    free = [STARTED + 1.0] * 8
    items: list[Item] = []
    curves: dict[int, Curve] = {}
    goal = Goal(direction="minimize", metric="loss", first=1, reduction=3)
    for index in range(size):
        rate, layers = 10 ** rng.uniform(-5, -1), rng.choice([2, 4, 8])
        floor = abs(math.log10(rate) + 3) / 4 + layers / 50
        last = min(27, max(1, int(1 / (floor * floor)) + rng.randrange(3)))
        curve = [
            (step, {"loss": floor + 2 / step + rng.gauss(0, 0.02), "accuracy": 1 - floor / step})
            for step in range(1, last + 1)
        ]
        slot = min(range(len(free)), key=free.__getitem__)
        begun, ended = free[slot], free[slot] + last * rng.uniform(0.9, 1.1)
        free[slot] = ended + 0.1
        is_pruned = last < 27
        attempt = Attempt(
            number=1, kind="value", reason="pruned" if is_pruned else "", begun=begun, ended=ended
        )
        step, values = curve[-1]
        items.append(
            Item(
                index=index,
                state=State.PRUNED if is_pruned else State.SUCCEEDED,
                attempts=(attempt,),
                input={"rate": rate, "layers": layers},
                result={} if is_pruned else values,
                pruned={"step": step, **{f"value.{key}": value for key, value in values.items()}}
                if is_pruned
                else {},
                has_tail=True,
            )
        )
        curves[index] = curve
    chosen = choose_curves([*curves], items, goal, 200)
    return BatchReport(
        group_id=f"grp-{name}",
        name=name,
        function="train",
        where="local",
        max_concurrent=8,
        created=STARTED,
        read_at=max(free),
        total=size,
        goal=goal,
        metric="loss",
        curves=Curves(by_item={index: curves[index] for index in chosen}, reported=size),
        items=tuple(items),
    )


def hostile(size: int) -> BatchReport:
    """Return the sweep with texts of an attacker who wants the page to run code."""
    report = sweep(size)

    def word(number: int) -> str:
        return HOSTILE[number % len(HOSTILE)]

    items = [
        replace(
            item,
            input={word(item.index): word(item.index + 1), "__proto__": item.index, word(0): 3},
            result={word(1): item.index * 1.5, "constructor": word(item.index)}
            if item.state is State.SUCCEEDED
            else {},
            attempts=tuple(
                attempt._replace(
                    message=attempt.message and word(item.index),
                    reason=attempt.reason and word(2),
                )
                for attempt in item.attempts
            ),
        )
        for item in report.items
    ]
    failed = [item.index for item in items if item.state is State.FAILED]
    return replace(
        report,
        group_id=word(1),
        name=word(1),
        function=word(0),
        tags={word(0): word(1), word(6): word(4)},
        where=word(2),
        accelerator=word(3),
        items=tuple(items),
        examples={
            index: Example(message=word(index), traceback=word(1), log=word(0)) for index in failed
        },
    )


def largest(size: int) -> BatchReport:
    """Return items of the maximum size: full notes, ten attempts, and all messages different."""
    rng = random.Random(2)

    def text(length: int) -> str:
        return "".join(map(chr, rng.choices(range(0x4E00, 0x9FA5), k=length)))

    items: list[Item] = []
    for index in range(size):
        times = [STARTED + index + step / 7 for step in range(20)]
        attempts = [
            Attempt(
                number=number,
                kind="lost",
                reason=text(30),
                message=text(300),
                begun=times[2 * number - 2],
                ended=times[2 * number - 1],
            )
            for number in range(1, 11)
        ]
        numbers = {f"n{column}": rng.random() * 10**column for column in range(8)}
        texts = {f"t{column}": text(60) for column in range(2)}
        items.append(
            Item(
                index=index,
                state=State.LOST,
                attempts=tuple(attempts),
                input={**numbers, **texts},
                result={f"r{name}": value for name, value in numbers.items()},
            )
        )
    return replace(
        sweep(1),
        tags={text(300): text(300) for _ in range(50)},
        total=size,
        read_at=STARTED + size + 10,
        items=tuple(items),
        examples={
            index: Example(message=text(9000), traceback=text(9000), log=text(9000))
            for index in range(min(size, 20))
        },
    )
