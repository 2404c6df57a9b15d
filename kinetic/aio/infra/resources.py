"""Types that this package shares: a wanted resource, its observed state, and a change."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from kinetic.aio._net.google import GoogleRequest

Document = Mapping[str, Any]
Query = tuple[tuple[str, str], ...]
Tell = Callable[[str], None]
"""A function that receives one line about a step."""


def silent(_: str) -> None:
    """Ignore a line about a step."""


VERSIONS: Mapping[str, str] = {
    "artifactregistry": "/v1/",
    "cloudbilling": "/v1/",
    "cloudresourcemanager": "/v3/",
    "compute": "/compute/v1/",
    "container": "/v1/",
    "iam": "/v1/",
    "secretmanager": "/v1/",
    "serviceusage": "/v1/",
    "storage": "/storage/v1/",
}
"""How the paths of each API begin."""


def call(
    api: str, method: str, path: str, *, query: Query = (), body: Document | None = None
) -> GoogleRequest:
    """Return a request; *path* comes after the API's version."""
    return GoogleRequest(api, VERSIONS[api] + path, query, method, body)


def query(**values: str | Sequence[str]) -> Query:
    """Return *values* as a URL query, in which a name repeats for each element of its list."""
    return tuple(
        (name, element)
        for name, value in values.items()
        for element in ((value,) if isinstance(value, str) else value)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One resource of a site, with the requests that read, create, and remove it.

    A plan that creates the resource shows ``description``. An existing resource must have
    ``wanted_fields``; ``update`` is the request that sets these fields, or None if the API can't
    change them. A plan only reports differences from ``reported_fields``. ``needs`` has the keys of
    resources that must exist first. ``usd_per_hour`` is the cost while no job runs.
    """

    kind: str
    name: str
    read: GoogleRequest
    create: GoogleRequest
    update: GoogleRequest | None = None
    remove: GoogleRequest | None = None
    wanted_fields: Document = field(default_factory=dict[str, Any], hash=False)
    reported_fields: Document = field(default_factory=dict[str, Any], hash=False)
    needs: tuple[str, ...] = ()
    usd_per_hour: float | None = None
    description: str = ""

    @property
    def key(self) -> str:
        """Return the key by which other resources name this one in ``needs``."""
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One role for one member, under a condition if ``expression`` isn't empty."""

    role: str
    member: str
    title: str = ""
    expression: str = ""

    @property
    def condition(self) -> dict[str, str] | None:
        """Return the condition as IAM writes it."""
        return {"title": self.title, "expression": self.expression} if self.expression else None

    def __str__(self) -> str:
        return f"{self.role} for {self.member}" + (f" ({self.title})" if self.title else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """kinetic's bindings in the IAM policy of one resource; other bindings stay as they are.

    ``requires`` has the keys of resources that must exist first. ``wrapped`` says whether the
    request ``write`` puts the policy into a field ``policy``.
    """

    name: str
    read: GoogleRequest
    write: GoogleRequest
    bindings: tuple[Binding, ...]
    requires: tuple[str, ...] = ()
    wrapped: bool = True
    kind: str = "access"
    usd_per_hour: float | None = None

    @property
    def key(self) -> str:
        """Return the key by which other resources name this one in ``needs``."""
        return f"{self.kind} {self.name}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the keys of what the policy requires, and of the accounts in its bindings.

        Google refuses a policy that names an account that doesn't exist.
        """
        emails = (binding.member.removeprefix("serviceAccount:") for binding in self.bindings)
        return (*self.requires, *(f"service account {email}" for email in emails))

    def missing(self, policy: Document) -> tuple[Binding, ...]:
        """Return the bindings that *policy* lacks."""
        entries: Sequence[Document] = policy.get("bindings") or ()
        return tuple(
            binding
            for binding in self.bindings
            if not any(
                _matches(entry, binding) and binding.member in (entry.get("members") or ())
                for entry in entries
            )
        )

    def with_bindings(self, policy: Document) -> dict[str, Any]:
        """Return *policy* with its missing ``bindings`` added."""
        bindings = [dict(entry) for entry in policy.get("bindings") or ()]
        for binding in self.missing(policy):
            entry = next((stored for stored in bindings if _matches(stored, binding)), None)
            if entry is None:
                entry = dict[str, Any](role=binding.role, members=[])
                if binding.condition:
                    entry["condition"] = binding.condition
                bindings.append(entry)
            entry["members"] = [*entry["members"], binding.member]
        return {**policy, "bindings": bindings, "version": 3}

    def without_members(self, policy: Document) -> dict[str, Any]:
        """Return *policy* without kinetic's members, also those that IAM marks as deleted."""
        ours = {binding.member for binding in self.bindings}
        bindings: list[dict[str, Any]] = []
        for entry in policy.get("bindings") or ():
            kept = [
                member
                for member in entry.get("members") or ()
                if member.removeprefix("deleted:").partition("?")[0] not in ours
            ]
            if kept:
                bindings.append({**entry, "members": kept})
        return {**policy, "bindings": bindings, "version": 3}


def resource(
    kind: str,
    name: str,
    api: str,
    parent: str,
    body: Document,
    *,
    create_query: Query = (),
    patched: Document | None = None,
    patch_query: Query = (),
    **fields: Any,
) -> Resource:
    """Return a resource of the usual form: POST to its parent, GET and DELETE at its own path.

    *create_query* is the query of the POST request. *patched* are fields that the POST request
    also sets. If an existing resource differs in these fields, a PATCH request with *patch_query*
    corrects it.
    """
    path = f"{parent}/{name}"
    if patched is not None:
        update = call(api, "PATCH", path, query=patch_query, body=patched)
        fields |= {"wanted_fields": patched, "update": update}
    return Resource(
        kind=kind,
        name=name,
        read=call(api, "GET", path),
        create=call(api, "POST", parent, query=create_query, body={**body, **(patched or {})}),
        remove=call(api, "DELETE", path),
        **fields,
    )


def policy(
    name: str, api: str, path: str, *bindings: Binding, requires: tuple[str, ...], read: str = "GET"
) -> Policy:
    """Return a policy of the usual form: getIamPolicy and setIamPolicy at the resource's *path*."""
    version = (("options.requestedPolicyVersion", "3"),)
    return Policy(
        name=name,
        read=call(api, read, f"{path}:getIamPolicy", query=version),
        write=call(api, "POST", f"{path}:setIamPolicy"),
        bindings=bindings,
        requires=requires,
    )


def _matches(entry: Document, binding: Binding) -> bool:
    condition: Document = entry.get("condition") or {}
    return (
        entry.get("role") == binding.role
        and str(condition.get("expression") or "") == binding.expression
    )


class Action(enum.Enum):
    """The effect of a change.

    Two actions block a plan: FOREIGN (kinetic didn't create the resource) and UNSEEN (kinetic can't
    read it). DIFFERS only reports a difference. ASK leaves the change to an administrator.
    """

    CREATE = "create"
    UPDATE = "update"
    REPLACE = "replace"
    WAIT = "wait"
    KEEP = "keep"
    DIFFERS = "differs"
    REMOVE = "remove"
    FOREIGN = "foreign"
    UNSEEN = "unseen"
    ASK = "ask"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The observed state of one resource: its document, None if it doesn't exist, or a ``problem``.

    ``status`` is the HTTP status of a refusal, or 0. ``usd_per_hour`` is the present cost while no
    job runs; None if it is that of the wanted resource, or unknown.
    """

    document: Document | None = None
    problem: str = ""
    status: int = 0
    usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One step of a plan. ``reason`` says why; ``usd_per_hour`` is the cost that the step adds."""

    action: Action
    kind: str
    name: str
    reason: str = ""
    usd_per_hour: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the change as ``--json`` shows it."""
        return {**asdict(self), "action": self.action.value}


def differences(want: Any, have: Any, path: str = "") -> Iterator[str]:
    """Yield how *have* differs from *want* in the fields that *want* names.

    Google leaves empty fields out of an answer, so a missing field equals an empty one.
    """
    if isinstance(want, Mapping):
        fields = cast("Mapping[str, Any]", want)
        existing: Document = cast("Document", have) if isinstance(have, Mapping) else {}
        for name, value in fields.items():
            yield from differences(value, existing.get(name), f"{path}.{name}" if path else name)
    elif isinstance(want, list | tuple):
        items = cast("Sequence[Any]", want)
        existing_items: Sequence[Any] = (
            cast("Sequence[Any]", have) if isinstance(have, list) else ()
        )
        if len(items) != len(existing_items):
            yield f"{path} has {len(existing_items)} entries instead of {len(items)}"
            return
        for index, (item, existing_item) in enumerate(zip(items, existing_items, strict=True)):
            yield from differences(item, existing_item, f"{path}[{index}]")
    elif want != have and not (not want and not have) and str(want) != str(have):
        yield f"{path} is {have!r} instead of {want!r}"
