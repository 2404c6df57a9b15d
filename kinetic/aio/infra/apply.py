"""Observe a setup and carry out a plan. Every step can be interrupted and repeated.

Each step reads before it writes, names are fixed, and Google's APIs refuse a second resource of the
same name. So a repeated step finds what an earlier one created. kinetic stores no state of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kinetic._tasks import bounded
from kinetic.aio._net.google import GoogleClient, GoogleRequest, OperationFailed, is_disabled
from kinetic.aio._net.http import HttpError
from kinetic.aio.infra.plan import BROKEN, is_ours, problem_of
from kinetic.aio.infra.resources import Action, Change, Document, Policy, Resource, Seen, Tell, call
from kinetic.aio.infra.site import Site
from kinetic.aio.infra.waiting import (
    SETTLED_S,
    Patience,
    Wait,
    in_use,
    leaving,
    remaining,
    unready,
    waits,
)
from kinetic.errors import AuthError, BackendError, KineticError, Refused, Unavailable

AT_ONCE = 16
"""How many resources to read at a time."""

READ_S = 30.0
"""Timeout of reading one resource."""

STOCKOUT = ("STOCKOUT", "ZONE_RESOURCE_POOL_EXHAUSTED")
"""Phrases in Google's reasons when a zone lacks capacity."""

ZONES = "zonesAvailable"
"""The field of Google's error about missing capacity that lists zones with capacity."""


def explained(what: str, refusal: HttpError) -> BackendError:
    """Return kinetic's error for a request that Google refuses for good."""
    words = f"can't {what}: {refusal.message}"
    if refusal.status in (401, 403):
        return AuthError(
            f"{words}; ask an owner of the project for the missing role, and run the command again"
        )
    return Refused(f"{words}; correct that, and run the command again", answer=refusal.body)


async def listed(
    google: GoogleClient, request: GoogleRequest, items: str
) -> AsyncGenerator[dict[str, Any]]:
    """Yield each item that *request* lists; none if the parent is absent or the API is disabled.

    Raises:
        AuthError: You may not list the items.
        Refused: Google refuses the request.
    """
    try:
        async for one in google.pages(request, items):
            yield one
    except HttpError as refusal:
        if refusal.status != 404 and not is_disabled(refusal):
            raise explained(f"list {request.path}", refusal) from refusal


def failed(what: str, failure: OperationFailed) -> BackendError:
    """Return kinetic's error for an operation that ended with an error.

    If a zone has no capacity (a stock-out), the ``answer`` of the error has ``zonesAvailable``: the
    zones that Google suggests. If a creation failed, `Cloud` adds the ``kind`` of the resource.
    """
    codes = " ".join(failure.codes)
    if any(one in f"{codes} {failure}".upper() for one in STOCKOUT):
        zones = [*dict.fromkeys(_zones(failure.error))]
        advice = f"Google names zones that have capacity: {', '.join(zones)}"
        return Refused(
            f"can't {what}: Google has no capacity now ({failure}); "
            + (advice if zones else "try another zone"),
            answer={ZONES: zones},
        )
    if "QUOTA" in codes:
        return Refused(
            f"can't {what}: a quota is used up ({failure}); ask for more at "
            "https://console.cloud.google.com/iam-admin/quotas"
        )
    return Refused(f"can't {what}: {failure}; correct that, and run the command again")


def _zones(error: Mapping[str, Any]) -> Iterable[str]:
    """Yield the zones that a stock-out's error names."""
    for holder in (*(error.get("errors") or ()), error):
        for detail in (*(holder.get("errorDetails") or ()), *(holder.get("details") or ())):
            info = detail.get("errorInfo") or detail
            metadata: Document = info.get("metadatas") or info.get("metadata") or {}
            every = str(metadata.get(ZONES) or "").split(",")
            yield from (one.strip() for one in every if one.strip())


class Cloud:
    """Reads and changes resources of *site*; *tell* receives a line about each step."""

    def __init__(
        self, google: GoogleClient, site: Site, tell: Tell, look_s: float = READ_S
    ) -> None:
        self.look_s = look_s
        self._google = google
        self._site = site
        self._tell = tell
        self._turn = asyncio.Lock()
        """GKE takes one change of a cluster at a time."""

    async def observe(self, wanted: Iterable[Resource | Policy]) -> dict[str, Seen]:
        """Return the state of each resource, by key; a failed request becomes a ``problem``."""
        seen: dict[str, Seen] = {}

        async def look(one: Resource | Policy) -> None:
            seen[one.key] = await self._seen(one)

        await bounded(look, [*wanted], at_once=AT_ONCE)
        return seen

    async def _seen(self, one: Resource | Policy) -> Seen:
        try:
            async with asyncio.timeout(self.look_s):
                return Seen(document=await self._google.call(one.read))
        except HttpError as refusal:
            if refusal.status == 404 or is_disabled(refusal):
                return Seen()
            if one.read.api == "iam" and refusal.status == 403 and "not exist" in refusal.message:
                return Seen()  # IAM answers 403 for accounts that don't exist
            words = f"can't read it ({refusal.status}: {refusal.message})"
            return Seen(problem=words, status=refusal.status)
        except (KineticError, TimeoutError) as exc:
            return Seen(problem=str(exc) or f"no answer within {self.look_s:g} s")

    async def enable(self, read: GoogleRequest, write: GoogleRequest, names: Sequence[str]) -> None:
        """Enable the APIs *names*, unless all of them are enabled.

        Raises:
            AuthError: You may not read or enable APIs.
            Refused: Google refuses a request.
        """
        try:
            if not await self.disabled(read, names):
                return
        except HttpError as refusal:
            raise explained("read the project's APIs", refusal) from refusal
        self._tell("enabling the project's APIs")
        await self._followed("enable the project's APIs", write)

    async def disabled(self, read: GoogleRequest, names: Sequence[str]) -> list[str]:
        """Return which of the APIs *names* aren't enabled."""
        found = await self._google.call(read)
        on = {
            str(one["name"]).rpartition("/")[2]
            for one in found.get("services") or ()
            if one.get("state") == "ENABLED"
        }
        return [one for one in names if one not in on]

    async def apply(self, changes: Sequence[Change], wanted: Sequence[Resource | Policy]) -> None:
        """Create and update resources as *changes* says, concurrently, each after what it needs.

        If a resource fails, resources that need it are skipped, and the others continue. Cancelled:
        requests that were sent take effect; run the command again to continue.

        Raises:
            KineticError: The first failure; its notes have the others.
        """
        actions = {f"{one.kind} {one.name}": one for one in changes}

        async def step(one: Resource | Policy) -> None:
            change = actions[one.key]
            match change.action, one:
                case (Action.CREATE, Resource()):
                    await self._create(one)
                case (Action.REPLACE, Resource()):
                    await self._delete(one)
                    await self._create(one)
                case (Action.WAIT, Resource()):
                    if not await self._stays(one):
                        await self._create(one)
                case (Action.UPDATE, Resource()):
                    assert one.update is not None
                    await self._sent(f"update {one.key}", one.update)
                    await self._settled(one)
                case (Action.UPDATE, Policy()):
                    await self._grant(one)
                case _:
                    return
            self._tell(f"{one.key} is ready")

        await _in_order(wanted, {one.key: one.needs for one in wanted}, step)

    async def remove(self, changes: Sequence[Change], present: Sequence[Resource | Policy]) -> None:
        """Remove the resources that *changes* says, each after all resources that depend on it.

        See `apply` for errors and cancellation.
        """
        actions = {f"{one.kind} {one.name}": one.action for one in changes}
        removed = [one for one in present if actions.get(one.key) is Action.REMOVE]
        dependents: dict[str, list[str]] = {one.key: [] for one in removed}
        for one in removed:
            for need in one.needs:
                if need in dependents:
                    dependents[need].append(one.key)

        async def step(one: Resource | Policy) -> None:
            if isinstance(one, Policy):
                await self._revoke(one)
            else:
                await self._delete(one)
            self._tell(f"{one.key} is removed")

        await _in_order(removed, {key: tuple(names) for key, names in dependents.items()}, step)

    async def _create(self, one: Resource) -> None:
        self._tell(f"creating {one.key}")
        what = f"create {one.key}"
        try:
            await self._sent(what, one.create)
        except Refused as exc:
            unusable = one.kind == "node pool" and isinstance(exc.__cause__, OperationFailed)
            if ZONES in exc.answer:
                unusable = True
                exc.answer["kind"] = one.kind
            if unusable:
                await self._delete(one)  # a failed pool would stay in ERROR, without nodes
            if _status(exc) != 409:
                raise
            # It exists: an earlier request, whose reply was lost, or another client made it.
            if (await self._seen(one)).status == 403:
                raise
            if not is_ours(self._site, one, await self._settled(one), adopted=False):
                raise
        await self._settled(one)

    async def _sent(self, what: str, request: GoogleRequest) -> Document:
        """Send *request*, repeat it while Google refuses it for now, and await its operation."""
        if request.api != "container":
            return await self._followed(what, request)
        async with self._turn:
            return await self._followed(what, request)

    def _patience(self, what: str) -> Patience:
        return Patience(self._google.look_s, lambda why: self._tell(f"waiting to {what}: {why}"))

    async def _followed(self, what: str, request: GoogleRequest) -> Document:
        patience = self._patience(what)
        while True:
            try:
                answer: Document = await self._google.call(request)
                if _is_operation(answer):
                    answer = await self._google.done(request.api, answer)
                return answer
            except OperationFailed as failure:
                cause: HttpError | OperationFailed = failure
                error, wait = failed(what, failure), in_use(request, failure)
            except HttpError as refusal:
                cause = refusal
                error, wait = explained(what, refusal), waits(request, refusal)
            if wait is None or not await patience.pause(*wait):
                raise error from cause

    async def _stays(self, one: Resource) -> bool:
        """Wait until *one* is ready (True), or an earlier `down` has removed it (False)."""
        if await self._awaited(one, leaving) is None:
            return False
        await self._settled(one)
        return True

    async def _settled(self, one: Resource) -> Document:
        """Wait until *one* exists and is ready, and return it.

        Raises:
            Refused: *one* is broken.
            Unavailable: *one* didn't appear, or didn't become ready in time.
        """
        document = await self._awaited(one, unready)
        assert document is not None  # `unready` waits for it
        if (status := str(document.get("status") or "")) in BROKEN:
            raise Refused(
                f"{one.key} is {status}: {problem_of(document)}; remove it and run the command "
                "again"
            )
        return document

    async def _awaited(
        self, one: Resource, waiting: Callable[[Document | None], Wait | None]
    ) -> Document | None:
        """Read *one* until *waiting* returns no more reason to wait; None if *one* doesn't exist.

        A failed read is also a reason to wait, because it doesn't show whether *one* exists.

        Raises:
            Unavailable: A reason to wait lasted too long.
        """
        patience = self._patience(f"go on with {one.key}")
        while True:
            seen = await self._seen(one)
            wait = ("it can't be read", SETTLED_S) if seen.problem else waiting(seen.document)
            if wait is None:
                return seen.document
            if not await patience.pause(*wait):
                why = seen.problem or wait[0]
                raise Unavailable(f"{one.key}: {why}; run the command again", retryable=True)

    async def _grant(self, one: Policy) -> None:
        self._tell(f"granting {one.name} its roles")
        await self._edited(
            one, lambda policy: one.completed(policy) if one.missing(policy) else None
        )

    async def _revoke(self, one: Policy) -> None:
        members = [binding.member for binding in one.bindings]
        await self._edited(one, lambda policy: one.without(policy, members))

    async def _edited(self, one: Policy, edit: Callable[[Document], dict[str, Any] | None]) -> None:
        """Read the IAM policy, change it, and write it with its etag.

        If the policy changed meanwhile, Google refuses the etag, and this method starts over.
        """
        what = f"change who may use {one.name}"
        patience = self._patience(what)
        while True:
            policy = await self._sent(what, one.read)
            if (edited := edit(policy)) is None:
                return
            body = {"policy": edited} if one.wrapped else edited
            write = call(api=one.write.api, method=one.write.method, path=one.write.path, body=body)
            try:
                await self._sent(what, write)
            except Refused as exc:
                raced = _status(exc) in (409, 412)
                if not (raced and await patience.pause("others change it", SETTLED_S)):
                    raise
            else:
                return

    async def _delete(self, one: Resource) -> None:
        self._tell(f"removing {one.key}")
        assert one.remove is not None
        if one.kind == "bucket":
            await self._emptied(one)
        if one.kind == "network":
            await self._without_rules(one)
        await self._dropped(one.key, one.remove)
        await self._awaited(one, remaining)

    async def _dropped(self, what: str, request: GoogleRequest) -> None:
        """Send *request*, a removal of *what*; succeed if *what* is gone already."""
        try:
            await self._sent(f"remove {what}", request)
        except Refused as exc:
            if _status(exc) != 404:
                raise

    async def _emptied(self, one: Resource) -> None:
        listing = call(api="storage", method="GET", path=f"{one.read.path}/o")

        async def drop(name: str) -> None:
            from urllib.parse import quote

            path = f"{listing.path}/{quote(name, safe='')}"
            await self._dropped(name, call(api="storage", method="DELETE", path=path))

        names = [str(found["name"]) async for found in listed(self._google, listing, "items")]
        await bounded(drop, names, at_once=AT_ONCE)

    async def _without_rules(self, one: Resource) -> None:
        """Remove the firewall rules that GKE made in the network and sometimes leaves behind."""
        rules = call(
            api="compute",
            method="GET",
            path=f"{one.read.path.partition('/global/')[0]}/global/firewalls",
        )
        async for rule in listed(self._google, rules, "items"):
            name = str(rule.get("name"))
            if str(rule.get("network", "")).endswith(f"/networks/{one.name}") and name.startswith(
                "gke-"
            ):
                removal = call(api="compute", method="DELETE", path=f"{rules.path}/{name}")
                await self._dropped(f"firewall rule {name}", removal)


def _status(error: BackendError) -> int:
    """Return the HTTP status that caused an error of kinetic, or 0."""
    cause = error.__cause__
    return cause.status if isinstance(cause, HttpError) else 0


def _is_operation(answer: Document) -> bool:
    """Return whether an answer is one of Google's three forms of an operation."""
    return (
        str(answer.get("kind", "")).endswith("#operation")
        or "operationType" in answer
        or str(answer.get("name", "")).startswith("operations/")
        or "/operations/" in str(answer.get("name", ""))
    )


@dataclass(slots=True)
class _Ended:
    event: asyncio.Event
    ok: bool = False


async def _in_order(
    items: Sequence[Any], needs: Mapping[str, Sequence[str]], step: Callable[[Any], Any]
) -> None:
    """Await ``step(item)`` for all *items* concurrently, each after the items that it *needs*."""
    ended = {one.key: _Ended(asyncio.Event()) for one in items}
    failures: list[KineticError] = []

    async def one_of(item: Any) -> None:
        mine = ended[item.key]
        try:
            for need in needs[item.key]:
                if need in ended:
                    await ended[need].event.wait()
                    if not ended[need].ok:
                        return
            await step(item)
            mine.ok = True
        except KineticError as exc:
            failures.append(exc)
        finally:
            mine.event.set()

    async with asyncio.TaskGroup() as group:
        for item in items:
            group.create_task(one_of(item), name=f"kinetic setup {item.key}")
    if failures:
        first, *others = failures
        for other in others:
            first.add_note(str(other))
        raise first
