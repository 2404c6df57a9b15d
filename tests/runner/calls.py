"""Put calls into a store as a submitter does, and read what their jobs commit."""

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
    """Put calls into a store, and read their claims and outcomes."""

    objects: Objects
    store: str

    def order(self, function: Callable[..., Any], *args: Any, **changes: Any) -> wire.Order:
        """Put a call into the store and return its order, with the fields in *changes*."""
        code, arguments = pickles.dumps(function), pickles.dumps((args, {}))
        digest = hashlib.sha256(code).hexdigest()
        self.objects.create(f"functions/{digest}.pkl", code)
        self.objects.create(wire.input_key(SCOPE, 0), arguments)
        defaults: dict[str, Any] = {"group_id": "grp-1", "grace": 60.0, "attempt": 1}
        return wire.Order(
            store=self.store,
            scope=SCOPE,
            job_id="grp-1-0",
            index=0,
            function=_input(f"functions/{digest}.pkl", code),
            arguments=_input(wire.input_key(SCOPE, 0), arguments),
            **defaults | changes,
        )

    def key(self, kind: str, attempt: int = 1) -> str:
        """Return the key of a claim, an outcome, or another object of an attempt."""
        return wire.attempt_key(SCOPE, 0, attempt, kind)

    def claim_metadata(self) -> dict[str, str]:
        """Return the metadata of the first attempt's claim."""
        return {**self.objects.stat(self.key("claim")).metadata}

    def outcome(self, attempt: int = 1) -> wire.Outcome:
        """Verify the committed outcome and return it."""
        key = self.key("outcome", attempt)
        header = self.objects.stat(key).metadata
        outcome = wire.Outcome.verified(header, KEY, SCOPE, 0, attempt)
        assert hashlib.sha256(self.body(attempt)).hexdigest() == outcome.body
        return outcome

    def body(self, attempt: int = 1) -> bytes:
        """Return the body of the outcome."""
        key = self.key("outcome", attempt)
        return wire.body_of(self.objects.get(key)[0], self.objects.stat(key).metadata)

    def value(self, attempt: int = 1) -> Any:
        """Return the value that the function returned."""
        outcome = self.outcome(attempt)
        assert outcome.kind is wire.Kind.VALUE, self.error(attempt)
        if outcome.value is not None:
            return pickles.load(self.objects.get(outcome.value[0])[0])
        return pickles.load(self.body(attempt))

    def error(self, attempt: int = 1) -> dict[str, str]:
        """Return the error fields of the outcome: type, message, traceback, and others."""
        return frames.unpack(self.body(attempt)).fields["error"]

    def claim(self, executor: str, attempt: int = 1) -> None:
        """Claim an attempt as another executor."""
        claim = {"executor": executor}
        assert self.objects.create(self.key("claim", attempt), b"", claim)

    def close(self, outcome: wire.Outcome, attempt: int = 1) -> None:
        """Commit an outcome as another executor."""
        outcome = outcome._replace(body=hashlib.sha256(b"").hexdigest())
        metadata = outcome.signed(KEY, SCOPE, 0, attempt)
        assert self.objects.create(self.key("outcome", attempt), b"", metadata)

    def stop(self, slot: int = 0) -> None:
        """Request that the batch stop."""
        key = wire.control_key(SCOPE, slot)
        self.objects.create(key, *wire.Request(kind="stop").signed(KEY, SCOPE, key))


def _input(name: str, content: bytes) -> wire.Input:
    digest = hashlib.sha256(content).hexdigest()
    return wire.Input(name=name, start=0, stop=len(content), digest=digest)
