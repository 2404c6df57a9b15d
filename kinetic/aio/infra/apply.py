"""Read the resources of a site (a cluster and all it needs), and carry out a plan for them.

Every step can be interrupted and repeated: it reads before it writes, names are fixed, and Google's
APIs refuse a second resource of the same name. So a repeated step finds what an earlier one made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kinetic._tasks import for_each
from kinetic.aio._net.google import GoogleClient, GoogleRequest, OperationFailed, is_disabled
from kinetic.aio._net.http import HttpError
from kinetic.aio.infra.plan import BROKEN_STATUSES, is_ours, problem_of
from kinetic.aio.infra.resources import (
    Action,
    Change,
    Document,
    Observed,
    Policy,
    Resource,
    Tell,
    call,
)
from kinetic.aio.infra.site import Site
from kinetic.aio.infra.waiting import (
    SETTLED_S,
    Backoff,
    Wait,
    wait_if_in_use,
    wait_if_present,
    wait_if_stopping,
    wait_if_temporary,
    wait_if_unready,
)
from kinetic.errors import AuthError, BackendError, KineticError, Refused, Unavailable

MAX_CONCURRENT_REQUESTS = 16
"""How many resources to read at a time."""

READ_TIMEOUT_S = 30.0
"""Timeout of reading one resource, in seconds."""

STOCKOUT_PHRASES = ("STOCKOUT", "ZONE_RESOURCE_POOL_EXHAUSTED")
"""Phrases in Google's reasons when a zone lacks capacity."""

ZONES_FIELD = "zonesAvailable"
"""The field of Google's error about missing capacity that lists zones with capacity."""


def refusal_error(action: str, refusal: HttpError) -> BackendError:
    """Return kinetic's error for a request that Google refuses for good."""
    message = f"can't {action}: {refusal.message}"
    if refusal.status in (401, 403):
        return AuthError(
            f"{message}; ask an owner of the project for the missing role, and run the command "
            "again"
        )
    return Refused(f"{message}; correct that, and run the command again", answer=refusal.body)


async def list_items(
    google: GoogleClient, request: GoogleRequest, items_field: str
) -> AsyncGenerator[dict[str, Any]]:
    """Yield each item that *request* lists; none if the parent is absent or the API is disabled.

    Raises:
        AuthError: You may not list the items.
        Refused: Google refuses the request.
    """
    try:
        async for item in google.list_items(request, items_field):
            yield item
    except HttpError as refusal:
        if refusal.status != 404 and not is_disabled(refusal):
            raise refusal_error(f"list {request.path}", refusal) from refusal


def operation_error(action: str, failure: OperationFailed) -> BackendError:
    """Return kinetic's error for an operation that ended with an error.

    If a zone has no capacity (a stock-out), the ``answer`` of the error has ``zonesAvailable``: the
    zones that Google suggests. If a creation failed, `Cloud` adds the ``kind`` of the resource.
    """
    codes = " ".join(failure.codes)
    if any(phrase in f"{codes} {failure}".upper() for phrase in STOCKOUT_PHRASES):
        zones = [*dict.fromkeys(_zones_with_capacity(failure.error))]
        advice = f"Google names zones that have capacity: {', '.join(zones)}"
        return Refused(
            f"can't {action}: Google has no capacity now ({failure}); "
            + (advice if zones else "try another zone"),
            answer={ZONES_FIELD: zones},
        )
    if "QUOTA" in codes:
        return Refused(
            f"can't {action}: a quota is used up ({failure}); ask for more at "
            "https://console.cloud.google.com/iam-admin/quotas"
        )
    return Refused(f"can't {action}: {failure}; correct that, and run the command again")


def _zones_with_capacity(error: Mapping[str, Any]) -> Iterable[str]:
    """Yield the zones that a stock-out's error names."""
    for source in (*(error.get("errors") or ()), error):
        for detail in (*(source.get("errorDetails") or ()), *(source.get("details") or ())):
            info = detail.get("errorInfo") or detail
            metadata: Document = info.get("metadatas") or info.get("metadata") or {}
            names = str(metadata.get(ZONES_FIELD) or "").split(",")
            yield from (name.strip() for name in names if name.strip())


class Cloud:
    """Reads and changes resources of *site*; *tell* receives a line about each step."""

    def __init__(
        self, google: GoogleClient, site: Site, tell: Tell, timeout_s: float = READ_TIMEOUT_S
    ) -> None:
        self.timeout_s = timeout_s
        self._google = google
        self._site = site
        self._tell = tell
        self._cluster_lock = asyncio.Lock()
        """GKE takes one change of a cluster at a time."""

    async def observe(self, resources: Iterable[Resource | Policy]) -> dict[str, Observed]:
        """Return the state of each resource, by key; a failed request becomes a ``problem``."""
        observed: dict[str, Observed] = {}

        async def read(resource: Resource | Policy) -> None:
            observed[resource.key] = await self._observe_one(resource)

        await for_each(read, [*resources], limit=MAX_CONCURRENT_REQUESTS)
        return observed

    async def _observe_one(self, resource: Resource | Policy) -> Observed:
        """Return the state of *resource*; a failed request becomes a ``problem``."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return Observed(document=await self._google.call(resource.read))
        except HttpError as refusal:
            if refusal.status == 404 or is_disabled(refusal):
                return Observed()
            if (
                resource.read.api == "iam"
                and refusal.status == 403
                and "not exist" in refusal.message
            ):
                return Observed()  # IAM answers 403 for accounts that don't exist
            problem = f"can't read it ({refusal.status}: {refusal.message})"
            return Observed(problem=problem, status=refusal.status)
        except (KineticError, TimeoutError) as exc:
            return Observed(problem=str(exc) or f"no answer within {self.timeout_s:g} s")

    async def enable_apis(
        self, read_request: GoogleRequest, enable_request: GoogleRequest, names: Sequence[str]
    ) -> None:
        """Send *enable_request*, unless *read_request* shows that all APIs *names* are enabled.

        Raises:
            AuthError: You may not read or enable APIs.
            Refused: Google refuses a request.
        """
        try:
            if not await self.disabled_apis(read_request, names):
                return
        except HttpError as refusal:
            raise refusal_error("read the project's APIs", refusal) from refusal
        self._tell("enabling the project's APIs")
        await self._send_with_retries("enable the project's APIs", enable_request)

    async def disabled_apis(self, read_request: GoogleRequest, names: Sequence[str]) -> list[str]:
        """Return which of the APIs *names* are disabled; *read_request* asks for their states."""
        answer = await self._google.call(read_request)
        enabled = {
            str(service["name"]).rpartition("/")[2]
            for service in answer.get("services") or ()
            if service.get("state") == "ENABLED"
        }
        return [name for name in names if name not in enabled]

    async def apply(
        self, changes: Sequence[Change], resources: Sequence[Resource | Policy]
    ) -> None:
        """Create, replace, update, or await each of *resources*, as its change in *changes* says.

        This handles resources concurrently, each after those that it needs. If one fails, it skips
        those that need the failed one, and continues with the others. Cancelled: requests that were
        sent take effect; run the command again to continue.

        Raises:
            KineticError: The first failure; its notes have the others.
        """
        actions = {f"{change.kind} {change.name}": change for change in changes}

        async def step(resource: Resource | Policy) -> None:
            change = actions[resource.key]
            match change.action, resource:
                case (Action.CREATE, Resource()):
                    await self._create(resource)
                case (Action.REPLACE, Resource()):
                    await self._delete(resource)
                    await self._create(resource)
                case (Action.WAIT, Resource()):
                    if not await self._becomes_ready(resource):
                        await self._create(resource)
                case (Action.UPDATE, Resource()):
                    assert resource.update is not None
                    await self._send(f"update {resource.key}", resource.update)
                    await self._wait_until_ready(resource)
                case (Action.UPDATE, Policy()):
                    await self._grant(resource)
                case _:
                    return
            self._tell(f"{resource.key} is ready")

        await _run_in_order(
            resources, {resource.key: resource.needs for resource in resources}, step
        )

    async def remove(self, changes: Sequence[Change], present: Sequence[Resource | Policy]) -> None:
        """Remove those of *present* that *changes* removes, each after those that need it.

        See `apply` for errors and cancellation.
        """
        actions = {f"{change.kind} {change.name}": change.action for change in changes}
        removed = [resource for resource in present if actions.get(resource.key) is Action.REMOVE]
        dependents: dict[str, list[str]] = {resource.key: [] for resource in removed}
        for resource in removed:
            for need in resource.needs:
                if need in dependents:
                    dependents[need].append(resource.key)

        async def step(resource: Resource | Policy) -> None:
            if isinstance(resource, Policy):
                await self._revoke(resource)
            else:
                await self._delete(resource)
            self._tell(f"{resource.key} is removed")

        await _run_in_order(removed, {key: tuple(names) for key, names in dependents.items()}, step)

    async def _create(self, resource: Resource) -> None:
        """Create *resource*, or accept one that kinetic made before; wait until it is ready."""
        self._tell(f"creating {resource.key}")
        action = f"create {resource.key}"
        try:
            await self._send(action, resource.create)
        except Refused as exc:
            is_useless = resource.kind == "node pool" and isinstance(exc.__cause__, OperationFailed)
            if ZONES_FIELD in exc.answer:
                is_useless = True
                exc.answer["kind"] = resource.kind
            if is_useless:
                await self._delete(resource)  # GKE would keep it in the state ERROR, without nodes
            if _status(exc) != 409:
                raise
            # 409: *resource* exists, made by another client or by a request with a lost reply.
            if (await self._observe_one(resource)).status == 403:
                raise
            if not is_ours(
                self._site, resource, await self._wait_until_ready(resource), adopted=False
            ):
                raise
        await self._wait_until_ready(resource)

    async def _send(self, action: str, request: GoogleRequest) -> Document:
        """Send *request* by `_send_with_retries`; send requests to GKE one after the other."""
        if request.api != "container":
            return await self._send_with_retries(action, request)
        async with self._cluster_lock:
            return await self._send_with_retries(action, request)

    def _new_backoff(self, action: str) -> Backoff:
        return Backoff(
            self._google.first_pause_s, lambda reason: self._tell(f"waiting to {action}: {reason}")
        )

    async def _send_with_retries(self, action: str, request: GoogleRequest) -> Document:
        """Send *request*, await its operation, and return the answer; repeat temporary failures."""
        backoff = self._new_backoff(action)
        while True:
            try:
                answer: Document = await self._google.call(request)
                if _is_operation(answer):
                    answer = await self._google.wait_for(request.api, answer)
                return answer
            except OperationFailed as failure:
                cause: HttpError | OperationFailed = failure
                error, wait = operation_error(action, failure), wait_if_in_use(request, failure)
            except HttpError as refusal:
                cause = refusal
                error, wait = refusal_error(action, refusal), wait_if_temporary(request, refusal)
            if wait is None or not await backoff.pause(*wait):
                raise error from cause

    async def _becomes_ready(self, resource: Resource) -> bool:
        """Wait; return True once *resource* is ready, or False if an earlier `down` removed it."""
        if await self._poll(resource, wait_if_stopping) is None:
            return False
        await self._wait_until_ready(resource)
        return True

    async def _wait_until_ready(self, resource: Resource) -> Document:
        """Wait until *resource* exists and is ready, and return it.

        Raises:
            Refused: *resource* is broken.
            Unavailable: *resource* didn't appear, or didn't become ready in time.
        """
        document = await self._poll(resource, wait_if_unready)
        assert document is not None  # `wait_if_unready` waits for it
        if (status := str(document.get("status") or "")) in BROKEN_STATUSES:
            raise Refused(
                f"{resource.key} is {status}: {problem_of(document)}; remove it and run the "
                "command again"
            )
        return document

    async def _poll(
        self, resource: Resource, wait_reason: Callable[[Document | None], Wait | None]
    ) -> Document | None:
        """Read *resource* until *wait_reason* gives no reason to wait; return its document.

        The document is None if *resource* doesn't exist. A failed read is also a reason to wait,
        because it doesn't show whether *resource* exists.

        Raises:
            Unavailable: A reason to wait lasted too long.
        """
        backoff = self._new_backoff(f"go on with {resource.key}")
        while True:
            observed = await self._observe_one(resource)
            wait = (
                ("it can't be read", SETTLED_S)
                if observed.problem
                else wait_reason(observed.document)
            )
            if wait is None:
                return observed.document
            if not await backoff.pause(*wait):
                reason = observed.problem or wait[0]
                raise Unavailable(
                    f"{resource.key}: {reason}; run the command again", retryable=True
                )

    async def _grant(self, policy: Policy) -> None:
        self._tell(f"granting {policy.name} its roles")
        await self._edit_policy(
            policy, lambda stored: policy.with_bindings(stored) if policy.missing(stored) else None
        )

    async def _revoke(self, policy: Policy) -> None:
        members = [binding.member for binding in policy.bindings]
        await self._edit_policy(policy, lambda stored: policy.without_members(stored, members))

    async def _edit_policy(
        self, policy: Policy, edit: Callable[[Document], dict[str, Any] | None]
    ) -> None:
        """Read the IAM policy, and write what *edit* makes of it, unless *edit* returns None.

        If another process changes the policy in between, Google refuses the write, and this method
        starts over.
        """
        action = f"change who may use {policy.name}"
        backoff = self._new_backoff(action)
        while True:
            stored = await self._send(action, policy.read)
            if (edited := edit(stored)) is None:
                return
            body = {"policy": edited} if policy.wrapped else edited
            write = call(
                api=policy.write.api, method=policy.write.method, path=policy.write.path, body=body
            )
            try:
                await self._send(action, write)
            except Refused as exc:
                has_changed = _status(exc) in (409, 412)
                if not (has_changed and await backoff.pause("others change it", SETTLED_S)):
                    raise
            else:
                return

    async def _delete(self, resource: Resource) -> None:
        """Empty *resource* if it is a bucket or network, remove it, and wait until it is absent."""
        self._tell(f"removing {resource.key}")
        assert resource.remove is not None
        if resource.kind == "bucket":
            await self._empty_bucket(resource)
        if resource.kind == "network":
            await self._remove_firewall_rules(resource)
        await self._ensure_removed(resource.key, resource.remove)
        await self._poll(resource, wait_if_present)

    async def _ensure_removed(self, subject: str, request: GoogleRequest) -> None:
        """Send *request*, a removal of *subject*; succeed if *subject* no longer exists."""
        try:
            await self._send(f"remove {subject}", request)
        except Refused as exc:
            if _status(exc) != 404:
                raise

    async def _empty_bucket(self, bucket: Resource) -> None:
        listing = call(api="storage", method="GET", path=f"{bucket.read.path}/o")

        async def remove(name: str) -> None:
            from urllib.parse import quote

            path = f"{listing.path}/{quote(name, safe='')}"
            await self._ensure_removed(name, call(api="storage", method="DELETE", path=path))

        names = [str(item["name"]) async for item in list_items(self._google, listing, "items")]
        await for_each(remove, names, limit=MAX_CONCURRENT_REQUESTS)

    async def _remove_firewall_rules(self, network: Resource) -> None:
        """Remove the firewall rules that GKE made in the network and sometimes leaves behind."""
        rules = call(
            api="compute",
            method="GET",
            path=f"{network.read.path.partition('/global/')[0]}/global/firewalls",
        )
        async for rule in list_items(self._google, rules, "items"):
            name = str(rule.get("name"))
            if str(rule.get("network", "")).endswith(
                f"/networks/{network.name}"
            ) and name.startswith("gke-"):
                removal = call(api="compute", method="DELETE", path=f"{rules.path}/{name}")
                await self._ensure_removed(f"firewall rule {name}", removal)


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
class _Completion:
    """``event`` is set once an item's step has ended; ``ok`` says whether it succeeded."""

    event: asyncio.Event
    ok: bool = False


async def _run_in_order(
    items: Sequence[Any], needs: Mapping[str, Sequence[str]], step: Callable[[Any], Any]
) -> None:
    """Await ``step(item)`` for all *items* concurrently, each after the items that it *needs*.

    *needs* maps the key of an item to other keys. If a step fails, this skips items that need it.
    """
    completions = {item.key: _Completion(asyncio.Event()) for item in items}
    failures: list[KineticError] = []

    async def run_step(item: Any) -> None:
        completion = completions[item.key]
        try:
            for need in needs[item.key]:
                if need in completions:
                    await completions[need].event.wait()
                    if not completions[need].ok:
                        return
            await step(item)
            completion.ok = True
        except KineticError as exc:
            failures.append(exc)
        finally:
            completion.event.set()

    async with asyncio.TaskGroup() as group:
        for item in items:
            group.create_task(run_step(item), name=f"kinetic setup {item.key}")
    if failures:
        first, *others = failures
        for other in others:
            first.add_note(str(other))
        raise first
