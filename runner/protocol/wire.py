"""The contract between client and runner: the names and content of objects, and one rule.

The rule is `item_state`: it alone decides the state of an item from the objects of its
batch. Runner, submitter, and observers share this rule. This module does no I/O.
"""

from __future__ import annotations

import base64
import bisect
import hmac
import json
import math
import re
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from . import notes, signing
from .frames import MALFORMED
from .notes import Note
from .retry_budgets import INFRASTRUCTURE, UNVERIFIED, RetryBudgets

TERMINATION_MESSAGE_BYTES = 4096
RECEIPT_VERSION = 2

CONSTRAINTS = "# kn:constraints\n"
"""The line of a requirements file after which only constraints follow.

An installer reads them from a file of their own.
"""

BILLING_PROJECT = "KINETIC_BILLING_PROJECT"
"""The variable with the project that pays for requests to a bucket whose requester pays."""

SHARED_TMPDIR = "KINETIC_TMPDIR"
"""The variable with the folder in which each job of this machine has its own ``TMPDIR``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A copy of an outcome: its item and attempt, and its metadata, which have a small body."""

    index: int
    attempt: int
    metadata: Mapping[str, str]

    def to_text(self) -> str:
        """Return a termination message; empty if the receipt is too large even without its body."""
        for keys in (("header", "mac", BODY), ("header", "mac")):
            fields = {
                "kinetic": RECEIPT_VERSION,
                "index": self.index,
                "attempt": self.attempt,
                **{key: self.metadata[key] for key in keys if key in self.metadata},
            }
            text = json.dumps(fields, separators=(",", ":"))
            if len(text) <= TERMINATION_MESSAGE_BYTES:
                return text
        return ""


def parse_receipt(text: str) -> Receipt | None:
    """Return the receipt in a termination message; None if *text* isn't a valid receipt."""
    if not text.startswith('{"kinetic":'):
        return None
    try:
        fields = json.loads(text)
        if fields["kinetic"] != RECEIPT_VERSION:
            return None
        metadata = {key: str(fields[key]) for key in ("header", "mac", BODY) if key in fields}
        return Receipt(
            index=int(fields["index"]), attempt=int(fields["attempt"]), metadata=metadata
        )
    except MALFORMED:
        return None


VERSION = 1
"""The version of the formats in a store; a reader refuses any other."""

BLOCK_SIZE = 500
INLINE_BYTES = 256 * 1024
"""Maximum bytes of a value in its outcome's body; a larger value has its own object."""

BODY, BODY_BYTES = "body", 2048
"""The key in the metadata of an outcome for its body, and the maximum bytes of such a body.

One request reads metadata, and a listing those of a thousand objects. Cloud Storage allows 8 KiB.
"""

LOG_BYTES = 1 << 20
"""Maximum bytes to keep of a job's output, where the platform loses the log with the job."""

VOID = "void"
"""The executor in a claim that kinetic makes only to close an attempt that has not started."""

EXIT_VALUE, EXIT_FINAL, EXIT_RETRY = 0, 42, 43
"""Exit codes. 0: the attempt has a value. 43: it has none, and another pod may get one. 42: else.

Only pods exit with 43, for Kubernetes. A local job that ends by itself exits with 0 or 42, even if
another process closed its attempt: the submitter decides by the outcome alone.
"""

EXIT_SETUP, EXIT_UNCOMMITTED, EXIT_STORE_FULL = 70, 74, 75
"""The runner could not prepare the job, or could not write its outcome; the log says why.

75: the disk of the store is full. (EX_SOFTWARE, EX_IOERR, and EX_TEMPFAIL of sysexits.h.)
"""

STORE_FULL, OUT_OF_DISK = "store full", "out of disk"
"""The reasons of an outcome that is an error because a disk is full: the store's, or the pod's."""


def exit_text(status: int) -> str:
    """Describe a process that left no outcome, by its exit code or a negated signal."""
    if status >= 0:
        return f"its process ended with exit code {status}"
    is_known = -status in signal.valid_signals()
    name = signal.Signals(-status).name if is_known else f"signal {-status}"
    is_kill = -status == signal.SIGKILL
    sender = " (by the kernel when memory ran out, or by a user)" if is_kill else ""
    return f"its process was killed by {name}{sender}"


PRUNED = "pruned"
"""The reason in the outcome of an attempt that ended early, because a client pruned it.

The outcome's kind is a value: the item has succeeded, and nothing retries it.
"""

UNSIGNED = "unsigned"
"""The kind of a request without a valid signature: it takes a slot, and has no effect."""

CLEANUP = "cleanup"
"""The cause of a stop request that begins the removal of the objects; later retries are ignored."""

CUT = "cut"
"""The cause of a request ``sealed`` if the iterator of the inputs may have had more."""


# --- names -----------------------------------------------------------------------------


def input_key(scope: str, slot: int) -> str:
    """Return the object name of input slot *slot*, which has inputs or marks their end."""
    return f"{scope}inputs/{slot:08d}"


def control_key(scope: str, slot: int) -> str:
    """Return the object name of request slot *slot*, which has a request to stop or to retry."""
    return f"{scope}control/{slot:08d}"


def group_key(group_id: str) -> str:
    """Return the name of the entry that lists a batch; its metadata describe the batch."""
    return f"groups/{group_id}"


def collected_key(scope: str) -> str:
    """Return the name of the object that marks a collected batch, whose items have no objects."""
    return f"{scope}collected"


def worker_key(scope: str, worker: str) -> str:
    """Return the name of the object with which a worker registers; see `workers`."""
    return f"{scope}workers/{worker}"


def block_prefix(scope: str, index: int) -> str:
    """Return the prefix of the claims and outcomes of 500 items, about one page of a listing."""
    return f"{scope}attempts/{index // BLOCK_SIZE:06d}/"


def span_prefix(scope: str, first: int, last: int) -> str:
    """Return a prefix of the claims and outcomes of the items *first* to *last* of one block."""
    prefix = ""
    for one, other in zip(f"{first:08d}.", f"{last:08d}.", strict=True):
        if one != other:
            break
        prefix += one
    return block_prefix(scope, first) + prefix


def item_prefix(scope: str, index: int) -> str:
    """Return the prefix of the claims and outcomes of one item."""
    return f"{block_prefix(scope, index)}{index:08d}."


def attempt_key(scope: str, index: int, attempt: int, part: str) -> str:
    """Return the name of an attempt's ``claim`` or ``outcome``, below `item_prefix`."""
    values = (scope, index // BLOCK_SIZE, index, attempt, part)
    return "%sattempts/%06d/%08d.%04d.%s" % values  # noqa: UP031 - takes half the time of an f-string


def parse_attempt_key(name: str) -> tuple[int, int]:
    """Return the item and the number of an attempt, from the name of one of its objects."""
    # A search of the whole name would take ten times as long.
    matched = _ATTEMPT.fullmatch(name, name.rfind("/") + 1)
    if matched is None:
        raise ValueError(f"{name!r} is no object of an attempt")
    return int(matched[1]), int(matched[2])


def debugger_mark(host: int) -> str:
    """Return the part, for `attempt_key`, of the object with the port of the debugger on *host*."""
    return f"debug-{host}"


def attempt_keys(scope: str, index: int, up_to: int) -> list[str]:
    """Return the names of the claims and outcomes of attempts 1 to *up_to*."""
    return [
        attempt_key(scope, index, attempt, part)
        for attempt in range(1, up_to + 1)
        for part in ("claim", "outcome")
    ]


def value_key(scope: str, index: int, attempt: int, executor: str) -> str:
    """Return the name of a value that is too large for its outcome."""
    return f"{scope}values/{index:08d}.{attempt:04d}.{executor}"


def log_prefix(scope: str, index: int, attempt: int) -> str:
    """Return the prefix of an attempt's kept logs, one object for each host."""
    return f"{scope}logs/{index:08d}.{attempt:04d}."


def log_key(scope: str, index: int, attempt: int, host: int) -> str:
    """Return the name of the kept log of *host*; its metadata have the signature as ``mac``."""
    return f"{log_prefix(scope, index, attempt)}{host:04d}"


_ATTEMPT = re.compile(r"(\d{8,})\.(\d{4,})\.(claim|outcome)")


OUTPUT = "output"
"""The field of a claim with the size of the worker's output file, on this machine."""


def claim_metadata(executor: str, worker: str = "") -> dict[str, str]:
    """Return the metadata of a claim that *executor* makes now, perhaps as a *worker*."""
    metadata = {"executor": executor, "at": f"{time.time():.3f}"}
    return {**metadata, "worker": worker} if worker else metadata


# --- the version -------------------------------------------------------------------------


def check_version(version: object, subject: str) -> None:
    """Refuse a format that this version of kinetic can't read.

    Raises:
        ValueError: The version differs.
    """
    if version != VERSION:
        raise ValueError(
            f"{subject} was written in format {version!r}, and this kinetic reads format "
            f"{VERSION}: use the version of kinetic that submitted it"
        )


# --- the order ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The project's archive, and paths in it: ``sys_path``, and ``cwd`` (None if it is outside).

    ``overlay`` has what changed since the archive was made, and a job applies it over the archive.
    None: no file has changed.
    """

    name: str
    digest: str
    overlay: Input | None = None
    sys_path: tuple[str, ...] = ("",)
    cwd: str | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Code:
        """Return the code that JSON describes."""
        overlay = fields.get("overlay")
        decoded: dict[str, Any] = {
            "sys_path": tuple(fields["sys_path"]),
            "overlay": Input(*overlay) if overlay else None,
        }
        return cls(**{**fields, **decoded})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the objects that jobs read."""
        return (self.name,) if self.overlay is None else (self.name, self.overlay.name)


class Input(NamedTuple):
    """Bytes *start* to *stop* of an object, with the digest of those bytes."""

    name: str
    start: int
    stop: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRef:
    """One Data: content under a prefix of the store, or a URI that the job resolves itself.

    ``mount`` is the absolute path of a volume; None means an argument. ``name`` is the file name
    of a single uploaded file.
    """

    uri: str
    digest: str = ""
    is_dir: bool = True
    mount: str | None = None
    fuse: bool = False
    trust_remote_code: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One attempt, as the client describes it to the runner: the function, its inputs, its limits.

    ``timeout`` and ``grace`` are seconds; ``timeout`` counts from the call of the function.
    ``root`` is the project's directory on the machine that submitted it. ``owned`` marks the job
    of a plain call, whose caller raises its error. ``debug_s`` limits the wait for a debugger
    in seconds; None means no debugger. ``stood`` is the caller's directory, or empty. ``prunable``
    says that a client may ask the attempt to stop; see `metrics`.
    """

    version: int = VERSION
    store: str
    scope: str
    job_id: str
    index: int
    attempt: int
    group_id: str | None = None
    fence: int = 1
    budgets: RetryBudgets = field(default_factory=RetryBudgets)
    function: Input
    arguments: Input
    code: Code | None = None
    requirements: Input | None = None
    data: tuple[DataRef, ...] = ()
    output_dir: str = ""
    timeout: float | None = None
    grace: float = 30.0
    root: str = ""
    owned: bool = False
    debug_s: float | None = None
    stood: str = ""
    prunable: bool = False
    client: Mapping[str, str] = field(default_factory=dict[str, str])

    def encode(self) -> str:
        """Return one line of JSON in ASCII, the inverse of `decode`."""
        return _compact(_as_dict(self))

    @classmethod
    def decode(cls, text: str) -> Order:
        """Read what `encode` has written; ignore unknown fields.

        Raises:
            ValueError: *text* is garbled, or of another version.
        """
        fields: Any = json.loads(text)
        try:
            check_version(fields.get("version"), "the job")
            known = {name: fields[name] for name in cls.__slots__}
            for name in ("function", "arguments", "requirements"):
                known[name] = known[name] and Input(*known[name])
            known["budgets"] = RetryBudgets(**known["budgets"])
            known["data"] = tuple([DataRef(**ref) for ref in known["data"]])
            known["code"] = known["code"] and Code.of(known["code"])
            return cls(**known)
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"the order is incomplete or garbled: {exc!r}") from exc

    def turn_to(
        self, job_id: str, index: int, attempt: int, output_dir: str, data: tuple[DataRef, ...]
    ) -> None:
        """Describe another item from now on, without the name of its arguments.

        Only the process of a worker does so, to which no other item's order matters: making an
        order takes eight times as long, and writes to more memory pages.
        """
        assign = object.__setattr__  # the class is frozen
        assign(self, "job_id", job_id)
        assign(self, "index", index)
        assign(self, "attempt", attempt)
        assign(self, "output_dir", output_dir)
        assign(self, "data", data)

    def part_name(self, part: str) -> str:
        """Return the name of the attempt's ``claim``, ``outcome``, or another part."""
        return attempt_key(self.scope, self.index, self.attempt, part)

    def variables(self) -> dict[str, str]:
        """Return the environment variables that tell the function which job this is."""
        variables = {
            "KINETIC_JOB_ID": self.job_id,
            "KINETIC_INDEX": str(self.index),
            "KINETIC_ATTEMPT": str(self.attempt),
            "KINETIC_OUTPUT_DIR": self.output_dir,
        }
        if self.group_id is not None:
            variables["KINETIC_GROUP_ID"] = self.group_id
        return variables


def _as_dict(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


_compact = json.JSONEncoder(separators=(",", ":"), sort_keys=True, default=_as_dict).encode


def start_allowance(debug_s: float | None) -> float:
    """Return how many seconds a job may take until its function is called.

    The hour is for downloading data and installing packages.
    """
    return 3600.0 + (debug_s or 0.0)


# --- the inputs --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """A numbered object in ``inputs/``: a chunk of inputs, or the mark of their end.

    A chunk has *count* inputs from index *first* on; the mark has the *total* of all inputs. The
    fields are stored as the object's metadata, so that a listing returns all slots. ``footer``
    is the SHA-256 of a chunk's footer, which has the digest of each input.
    """

    first: int = 0
    count: int = 0
    footer: str = ""
    size: int = 0
    total: int | None = None

    def signed(self, key: bytes, scope: str, name: str) -> dict[str, str]:
        """Return the metadata, with a signature over them and the slot *name*."""
        if self.total is not None:
            fields = {"total": str(self.total)}
        else:
            counts = {"first": str(self.first), "count": str(self.count), "size": str(self.size)}
            fields = {**counts, "footer": self.footer}
        return {**fields, "mac": signing.sign(key, scope, name, _compact(fields).encode())}

    @classmethod
    def verified(cls, metadata: Mapping[str, str], key: bytes, scope: str, name: str) -> Slot:
        """Read signed metadata.

        Raises:
            ValueError: The signature is missing, wrong, or for another slot.
        """
        fields = {
            field_name: metadata[field_name]
            for field_name in cls.__slots__
            if field_name in metadata
        }
        if not signing.is_signed(metadata, key, scope, name, _compact(fields).encode()):
            raise ValueError(f"{name} is not what its submitter signed")
        if "total" in fields:
            return cls(total=int(fields["total"]))
        first, count, size = (int(fields[field_name]) for field_name in ("first", "count", "size"))
        return cls(first, count, fields["footer"], size)


# --- the outcome -------------------------------------------------------------------------


class Kind(StrEnum):
    """How an attempt ended."""

    VALUE = "value"
    ERROR = "error"
    LOST = "lost"
    CANCELLED = "cancelled"


class Outcome(NamedTuple):
    """The header of an outcome, which is stored as the object's metadata and in receipts.

    The body is a `frames` container, and ``body`` is its SHA-256. A small body is in the metadata,
    another is the object's content. A value that is too large for the body has its own object
    ``value`` (name, SHA-256); the body is then empty. ``started`` and
    ``ended`` are seconds since the epoch by the job's clock, for display. ``note`` is also for
    display; see `notes`. ``writer`` names the worker that wrote the outcome (see `workers`). It is
    empty for another process. ``log`` is where the item's output begins and ends in the output file
    of that worker, in bytes. ``metrics`` says that the attempt has reported; see `metrics`.
    """

    kind: Kind
    reason: str = ""
    executor: str = ""
    phase: str = ""
    exit_code: int | None = None
    started: float | None = None
    ended: float | None = None
    body: str = ""
    value: tuple[str, str] | None = None
    note: Note | None = None
    writer: str = ""
    log: tuple[int, int] | None = None
    metrics: bool = False

    def stored(
        self, key: bytes, scope: str, index: int, attempt: int, body: bytes
    ) -> tuple[bytes, dict[str, str]]:
        """Return content and metadata of the object that has this header and its *body*."""
        metadata = self.signed(key, scope, index, attempt)
        if not body or len(body) > BODY_BYTES:
            return body, metadata
        metadata[BODY] = base64.b64encode(body).decode()
        return b"", metadata

    def signed(self, key: bytes, scope: str, index: int, attempt: int) -> dict[str, str]:
        """Return the metadata, with a signature over the header and its attempt."""
        # Most fields have their defaults, and a short header takes less time at both ends.
        defaults, told = self._field_defaults, dict[str, Any]()
        for name, value in zip(self._fields, self, strict=True):
            if name == "kind" or value != defaults[name]:
                told[name] = value
        header = _compact(told)
        return {"header": header, "mac": signing.seal_of(key, scope, index, attempt, header)}

    @classmethod
    def verified(
        cls, metadata: Mapping[str, str], key: bytes, scope: str, index: int, attempt: int
    ) -> Outcome:
        """Read signed metadata.

        Raises:
            ValueError: The signature is missing, wrong, or for another attempt.
        """
        header, mac = metadata.get("header", ""), metadata.get("mac", "").encode(errors="replace")
        try:
            seal = signing.seal_of(key, scope, index, attempt, header).encode()
        except UnicodeEncodeError:
            seal = b""
        if not (seal and hmac.compare_digest(mac, seal)):
            name = attempt_key(scope, index, attempt, "outcome")
            raise ValueError(f"the outcome {name} is forged or damaged")
        return cls.parse(header)

    @classmethod
    def parse(cls, header: str) -> Outcome:
        """Read a header without checking its signature.

        Raises:
            ValueError: *header* is damaged.
        """
        try:
            known, end = _read_json(header)
            if end != len(header) or not _OUTCOME_FIELDS.issuperset(known):
                known = json.loads(header)
                known = {name: known[name] for name in cls._fields if name in known}
            known["kind"] = _KINDS[known["kind"]]
            if known.get("value"):
                known["value"] = tuple(known["value"])
            if known.get("log"):
                start, stop = known["log"]
                known["log"] = int(start), int(stop)
            if known.get("note") is not None:
                known["note"] = notes.read(known["note"])
            return cls(**known)
        except MALFORMED as exc:
            raise ValueError(f"the header of an outcome is damaged: {exc}") from exc


def body_of(content: bytes, metadata: Mapping[str, str]) -> bytes:
    """Return the body of an outcome; only its digest in the header shows that it isn't damaged."""
    try:
        return base64.b64decode(metadata[BODY])
    except (KeyError, ValueError):
        return content


_KINDS = {kind.value: kind for kind in Kind}
_OUTCOME_FIELDS = frozenset(Outcome._fields)

_read_json = json.JSONDecoder().raw_decode
"""Read the JSON at the beginning of a text, in two thirds of the time that `json.loads` takes."""


# --- the one rule --------------------------------------------------------------------------


class Attempt(NamedTuple):
    """The objects of one attempt in the store.

    ``claimed`` is the time of the claim, in seconds since the epoch by the job's clock. The time
    isn't signed, so it is only for display. ``worker`` names the worker that claimed the attempt
    (see `workers`). ``output`` is the size of that worker's output file at that time.
    """

    executor: str | None = None
    outcome: Outcome | None = None
    claimed: float | None = None
    worker: str = ""
    output: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A numbered object in ``control/``: a request to stop some items or all, or to retry some.

    ``items`` are in ascending order; None means all. ``bases`` maps each item of a retry to the
    last attempt that no longer counts. ``keep_running`` lets claimed attempts finish. A reader
    ignores a request of an unknown kind; if ``must`` is true, the reader raises an error instead.
    ``opens_round`` and ``ranks`` are for workers; see `workers`.
    """

    kind: str
    items: tuple[int, ...] | None = None
    bases: Mapping[int, int] = field(default_factory=dict[int, int])
    cause: str = ""
    keep_running: bool = False
    must: bool = False
    opens_round: bool = False
    ranks: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the slot's content."""
        bases = {str(index): base for index, base in self.bases.items()}
        content = {**_as_dict(self), "bases": bases}
        return json.dumps(content).encode()

    def signed(self, key: bytes, scope: str, name: str) -> tuple[bytes, dict[str, str]]:
        """Return content and metadata of the slot *name*."""
        content = self.to_bytes()
        return content, {"mac": signing.sign(key, scope, name, content)}

    @classmethod
    def verified(
        cls, content: bytes, metadata: Mapping[str, str], key: bytes, scope: str, name: str
    ) -> Request:
        """Read the slot *name*; without a valid signature, the kind is `UNSIGNED`."""
        if not signing.is_signed(metadata, key, scope, name, content):
            return cls(kind=UNSIGNED)
        return cls.from_bytes(content)

    @classmethod
    def from_bytes(cls, content: bytes) -> Request:
        """Read a slot without checking its signature; ignore unknown fields."""
        fields = json.loads(content)
        known = {name: fields[name] for name in cls.__slots__ if name in fields}
        if known.get("items") is not None:
            known["items"] = tuple(sorted(known["items"]))
        known["ranks"] = tuple(known.get("ranks", ()))
        known["bases"] = {int(i): base for i, base in known.get("bases", {}).items()}
        return cls(**known)


class Standing(NamedTuple):
    """The effect on one item of those requests of its batch that a process has read.

    Attempts up to ``base`` don't count, and don't start. ``retried`` is the number of requests up
    to the retry that set the base, 0 without a retry. A ``stopped`` item doesn't start; if it is
    also ``unwanted``, its running attempt has to end. ``removing`` means that a cleanup removes the
    batch's objects: later requests have no effect.
    """

    base: int = 0
    retried: int = 0
    stopped: bool = False
    unwanted: bool = False
    removing: bool = False

    def after(self, index: int | None, request: Request, number: int) -> Standing:
        """Return the standing of item *index* after *request*, the request with this *number*.

        If *index* is None, the standing is that of all items that no request has named.
        """
        if self.removing:
            return self  # no request reopens an item whose objects are being removed
        if request.kind == "stop" and is_named(request, index):
            unwanted = self.unwanted or not request.keep_running
            removing = request.cause == CLEANUP
            return self._replace(stopped=True, unwanted=unwanted, removing=removing)
        if request.kind == "retry" and index is not None and index in request.bases:
            return Standing(request.bases[index], number)
        return self


def standing(index: int, requests: Iterable[Request]) -> Standing:
    """Return the standing of an item after all *requests*, from the first slot on."""
    current = Standing()
    for number, request in enumerate(requests, start=1):
        current = current.after(index, request, number)
    return current


class ItemState(StrEnum):
    """The state of an item, from its objects.

    Only a retry request can change a ``final`` state, and nothing changes `SUCCEEDED`.
    """

    OPEN = "open"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    final: bool

    def __init__(self, value: str) -> None:
        self.final = value not in ("open", "cancelling")


class Item(NamedTuple):
    """The state of an item.

    ``attempt`` is the attempt that decided the state. For an open item, it is the only attempt
    that may start or is running. ``after`` is the reason why the previous attempt failed, and
    ``failures`` counts the failures of an open item that use the user's budget.
    """

    state: ItemState
    attempt: int
    outcome: Outcome | None = None
    after: str = ""
    failures: int = 0

    @property
    def stopped(self) -> bool:
        """Whether the item is cancelled, or will be when its running attempt ends."""
        return self.state in (ItemState.CANCELLING, ItemState.CANCELLED)


_NO_ATTEMPT = Attempt()
_UNVERIFIED = Outcome(Kind.ERROR, UNVERIFIED)


def item_state(
    item_standing: Standing, attempts: Mapping[int, Attempt], budgets: RetryBudgets
) -> Item:
    """Decide the state of an item from the batch's objects alone.

    A value always counts, even after a stop request, or in an attempt up to a retry's base.
    """
    base, stopped = item_standing.base, item_standing.stopped
    failed: tuple[int, Outcome] | None = None
    reasons: list[str] = []
    number = 1
    while (outcome := attempts.get(number, _NO_ATTEMPT).outcome) is not None or number <= base:
        if outcome is not None and outcome.kind is Kind.VALUE:
            return Item(ItemState.SUCCEEDED, number, outcome, reasons[-1] if reasons else "")
        if outcome is not None and number > base and outcome.kind is not Kind.CANCELLED:
            reasons.append(outcome.reason)
            failed = (number, outcome)
        number += 1
    if failed is not None and not (stopped or budgets.cover(reasons)):
        return Item(ItemState.FAILED, *failed, reasons[-2] if len(reasons) > 1 else "")
    if not stopped:
        failures = sum(reason not in INFRASTRUCTURE for reason in reasons)
        return Item(ItemState.OPEN, number, None, reasons[-1] if reasons else "", failures)
    attempt = attempts.get(number)
    if attempt is not None and attempt.executor is not None:
        return Item(ItemState.CANCELLING, number)
    return Item(ItemState.FAILED, *failed) if failed else Item(ItemState.CANCELLED, number)


def retry_base(
    item_standing: Standing, attempts: Mapping[int, Attempt], budgets: RetryBudgets
) -> int | None:
    """Return the base of a request to retry the item; None if there is nothing to retry.

    The base is the number of the last attempt that doesn't count after the retry. For a stopped
    item, the base is the open attempt, because its job may still start. For other items, the base
    is the last closed attempt.
    """
    state = item_state(item_standing, attempts, budgets).state
    if item_standing.removing or state not in (ItemState.FAILED, ItemState.CANCELLED):
        return None
    number = 1
    while number <= item_standing.base or attempts.get(number, _NO_ATTEMPT).outcome is not None:
        number += 1
    return number if item_standing.stopped else number - 1


def is_named(request: Request, index: int | None) -> bool:
    """Return whether a stop request names this item (binary search in up to 10,000 items)."""
    if request.items is None or index is None:
        return request.items is None
    position = bisect.bisect_left(request.items, index)
    return position < len(request.items) and request.items[position] == index


def attempts_of(
    entries: Iterable[tuple[str, Mapping[str, str]]], key: bytes, scope: str
) -> dict[int, dict[int, Attempt]]:
    """Return the attempts by item and by number, from a listing of names and metadata.

    An outcome without a valid signature for its attempt is a failure: `UNVERIFIED`.
    """
    found: dict[int, dict[int, Attempt]] = {}
    for name, metadata in entries:
        if (match := _ATTEMPT.fullmatch(name, name.rfind("/") + 1)) is None:
            continue
        item_attempts = found.setdefault(int(match[1]), {})
        attempt = item_attempts.get(int(match[2]), Attempt())
        if match[3] == "claim":
            executor, worker = metadata.get("executor", ""), metadata.get("worker", "")
            size = metadata.get(OUTPUT, "")
            output = int(size) if size.isdecimal() and len(size) < 20 else None
            attempt = Attempt(executor, attempt.outcome, claim_time(metadata), worker, output)
        else:
            try:
                outcome = Outcome.verified(metadata, key, scope, int(match[1]), int(match[2]))
            except ValueError:
                outcome = _UNVERIFIED
            attempt = attempt._replace(outcome=outcome)
        item_attempts[int(match[2])] = attempt
    return found


def claim_time(metadata: Mapping[str, str]) -> float | None:
    """Return when an attempt was claimed; see `Attempt.claimed`."""
    try:
        seconds = float(metadata["at"])
    except (LookupError, ValueError, TypeError):
        return None
    return seconds if math.isfinite(seconds) else None
