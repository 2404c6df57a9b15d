"""A call in a store, as a job finds it, and what a job leaves of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kinetic._runner.protocol import frames, pickles, wire
from kinetic._runner.stores.objects import Objects

KEY = b"k" * 32
SCOPE = "batches/grp-1/"
RUNNER = Path(__file__).resolve().parents[2] / "runner" / "remote_runner.py"


class Calls:
    """Puts calls into a store, and reads what was left there."""

    objects: Objects
    store: str

    def order(self, function: Callable[..., Any], *args: Any, **changes: Any) -> wire.Order:
        """Put a call into the store and describe it; *changes* are of the order."""
        code, arguments = pickles.dumps(function), pickles.dumps((args, {}))
        digest = hashlib.sha256(code).hexdigest()
        self.objects.create(f"functions/{digest}.pkl", code)
        self.objects.create(wire.input_key(SCOPE, 0), arguments)
        usual: dict[str, Any] = {"group_id": "grp-1", "grace": 60.0, "attempt": 1}
        return wire.Order(
            store=self.store,
            scope=SCOPE,
            job_id="grp-1-0",
            index=0,
            function=_input(f"functions/{digest}.pkl", code),
            arguments=_input(wire.input_key(SCOPE, 0), arguments),
            **usual | changes,
        )

    def name(self, what: str, attempt: int = 1) -> str:
        """The name of a claim or an outcome."""
        return wire.attempt_key(SCOPE, 0, attempt, what)

    def claimed(self) -> dict[str, str]:
        """What the claim of the first attempt says."""
        return {**self.objects.stat(self.name("claim")).metadata}

    def outcome(self, attempt: int = 1) -> wire.Outcome:
        """The verified header of what was committed."""
        name = self.name("outcome", attempt)
        header = self.objects.stat(name).metadata
        outcome = wire.Outcome.verified(header, KEY, SCOPE, 0, attempt)
        assert hashlib.sha256(self.objects.get(name)[0]).hexdigest() == outcome.body
        return outcome

    def value(self, attempt: int = 1) -> Any:
        """What was returned."""
        outcome = self.outcome(attempt)
        assert outcome.kind is wire.Kind.VALUE, self.error(attempt)
        name = outcome.value[0] if outcome.value is not None else self.name("outcome", attempt)
        return pickles.load(self.objects.get(name)[0])

    def error(self, attempt: int = 1) -> dict[str, str]:
        """What went wrong, in words."""
        body = self.objects.get(self.name("outcome", attempt))[0]
        return frames.unpack(body).fields["error"]

    def claim(self, executor: str, attempt: int = 1) -> None:
        """Claim an attempt as somebody else."""
        claim = {"executor": executor, "fence": "1"}
        assert self.objects.create(self.name("claim", attempt), b"", claim)

    def close(self, outcome: wire.Outcome, attempt: int = 1) -> None:
        """Commit an outcome as somebody else."""
        outcome = outcome._replace(body=hashlib.sha256(b"").hexdigest())
        metadata = outcome.signed(KEY, SCOPE, 0, attempt)
        assert self.objects.create(self.name("outcome", attempt), b"", metadata)

    def stop(self, slot: int = 0) -> None:
        """Ask for a stop of everything."""
        name = wire.control_key(SCOPE, slot)
        self.objects.create(name, *wire.Request(kind="stop").signed(KEY, SCOPE, name))


def _input(name: str, content: bytes) -> wire.Input:
    digest = hashlib.sha256(content).hexdigest()
    return wire.Input(name=name, start=0, stop=len(content), digest=digest)
