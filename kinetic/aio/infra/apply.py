"""Read the resources of a site (a cluster and all it needs), and carry out a plan for them.

Every step can be interrupted and repeated: a step reads before it writes, names are fixed, and
Google's APIs refuse a second resource of the same name. So a repeated step finds what the first one
made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from kinetic._tasks import for_each
from kinetic.aio._net.google import (
    GoogleClient,
    GoogleRequest,
    OperationFailed,
    is_disabled,
    reasons,
    refusal_advice,
)
from kinetic.aio._net.http import HttpError
from kinetic.aio._net.retry import growing_pauses
from kinetic.aio.infra.plan import BROKEN_STATUSES, IN_PROGRESS_STATUSES, is_ours, problem_of
from kinetic.aio.infra.resources import (
    Action,
    Change,
    Document,
    Observed,
    Policy,
    Resource,
    Tell,
    call,
    query,
)
from kinetic.aio.infra.site import Site
from kinetic.errors import AuthError, BackendError, KineticError, Refused, Unavailable

MAX_CONCURRENT_REQUESTS = 16
"""How many resources to read at a time."""

READ_TIMEOUT_S = 30.0
"""Timeout of reading one resource, in seconds."""

STOCKOUT_PHRASES = ("STOCKOUT", "ZONE_RESOURCE_POOL_EXHAUSTED")
"""Phrases in Google's errors about a zone without capacity."""

ZONES_FIELD = "zonesAvailable"
"""The field in Google's error about a zone without capacity that lists zones with capacity."""

MAX_PROPAGATION_S = 120.0
"""Maximum seconds until all of Google's services know a change or show a resource."""

MAX_ENABLING_S = 900.0
"""Maximum seconds for which a service refuses requests after it was enabled."""

MAX_BUSY_S = 3600.0
"""Maximum seconds of an operation on a cluster or pool; an upgrade takes up to an hour."""

MAX_RELEASE_S = 600.0
"""Maximum seconds until GKE has removed what it created in a network."""

UNKNOWN_ACCOUNT_PHRASES = ("does not exist", "may not exist", "unknown service account")
"""Phrases in errors of Google services that don't know a new service account yet."""

STILL_IN_USE = "something in it is still in use"

Wait = tuple[str, float]
"""A reason to wait, and the maximum number of seconds to wait for it."""


def refusal_error(action: str, refusal: HttpError) -> BackendError:
    """Return kinetic's error for a request that Google refuses permanently."""
    message = f"can't {action}: {refusal.message}"
    if advice := refusal_advice(refusal):
        return Refused(f"{message}; {advice}, and run the command again", answer=refusal.body)
    if refusal.status in (401, 403):
        return AuthError(
            f"{message}; ask an owner of the project for the missing role, and run the command "
            "again"
        )
    return Refused(f"{message}; correct that, and run the command again", answer=refusal.body)


async def list_items(
    google: GoogleClient, request: GoogleRequest, items_field: str
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the items that *request* lists; none if the parent is absent or the API is disabled."""
    try:
        async for item in google.list_items(request, items_field):
            yield item
    except HttpError as refusal:
        if refusal.status != 404 and not is_disabled(refusal):
            raise refusal_error(f"list {request.path}", refusal) from refusal


def operation_error(action: str, failure: OperationFailed) -> BackendError:
    """Return kinetic's error for an operation that ended with an error.

    If a zone has no capacity (a stock-out), the ``answer`` of the error has ``zonesAvailable``: the
    zones that Google suggests. `Cloud` adds the ``kind`` of the resource that it couldn't create.
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
            f"can't {action}: a quota is used up ({failure}); request a larger one at "
            "https://console.cloud.google.com/iam-admin/quotas"
        )
    return Refused(f"can't {action}: {failure}; correct that, and run the command again")


def _zones_with_capacity(error: Mapping[str, Any]) -> Iterable[str]:
    """Yield the zones with capacity that the error of a stock-out names."""
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
        """Held during a request to GKE, which accepts one change of a cluster at a time."""

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
            is_absent = refusal.status == 404 or is_disabled(refusal)
            if resource.read.api == "iam" and refusal.status == 403:
                is_absent |= "not exist" in refusal.message  # how IAM reports an absent account
            if is_absent:
                return Observed()
            problem = f"can't read it ({refusal.status}: {refusal.message})"
            return Observed(problem=problem, status=refusal.status)
        except (KineticError, TimeoutError) as exc:
            return Observed(problem=str(exc) or f"no answer within {self.timeout_s:g} s")

    async def enable_apis(self, names: Sequence[str]) -> None:
        """Enable the APIs *names*, unless all of them are enabled."""
        if await self.disabled_apis(names):
            self._tell("enabling the project's APIs")
            path = f"projects/{self._site.project}/services:batchEnable"
            request = call("serviceusage", "POST", path, body={"serviceIds": [*names]})
            await self.send("enable the project's APIs", request)

    async def disabled_apis(self, names: Sequence[str]) -> list[str]:
        """Return which of the APIs *names* are disabled."""
        path = f"projects/{self._site.project}/services"
        paths = [f"{path}/{name}" for name in names]
        request = call("serviceusage", "GET", f"{path}:batchGet", query=query(names=paths))
        try:
            answer = await self._google.call(request)
        except HttpError as refusal:
            raise refusal_error("read which APIs the project has enabled", refusal) from refusal
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

        This handles resources concurrently, each after the resources that it needs. If a resource
        fails, this skips the resources that need it, and continues with the others. Cancelled:
        requests that were sent take effect; run the command again to continue.

        Raises:
            KineticError: The first failure; its notes have the other failures.
        """
        actions = {f"{change.kind} {change.name}": change.action for change in changes}

        async def step(resource: Resource | Policy) -> None:
            match actions[resource.key], resource:
                case (Action.CREATE, Resource()):
                    await self._create(resource)
                case (Action.REPLACE, Resource()):
                    await self._delete(resource)
                    await self._create(resource)
                case (Action.WAIT, Resource()):
                    if await self._poll(resource, _wait_if_stopping) is None:
                        await self._create(resource)
                    else:
                        await self._wait_until_ready(resource)
                case (Action.UPDATE, Resource()):
                    assert resource.update is not None
                    await self.send(f"update {resource.key}", resource.update)
                    await self._wait_until_ready(resource)
                case (Action.UPDATE, Policy()):
                    self._tell(f"granting {resource.name} its roles")
                    await self._edit_policy(resource, resource.with_bindings)
                case _:
                    return
            self._tell(f"{resource.key} is ready")

        await _run_in_order(
            resources, {resource.key: resource.needs for resource in resources}, step
        )

    async def remove(self, changes: Sequence[Change], present: Sequence[Resource | Policy]) -> None:
        """Remove resources of *present* as *changes* says, each after the resources that need it.

        See `apply` for errors and cancellation.
        """
        actions = {f"{change.kind} {change.name}": change.action for change in changes}
        removed = [resource for resource in present if actions.get(resource.key) is Action.REMOVE]
        dependents = {
            resource.key: [other.key for other in removed if resource.key in other.needs]
            for resource in removed
        }

        async def step(resource: Resource | Policy) -> None:
            if isinstance(resource, Policy):
                await self._edit_policy(resource, resource.without_members)
            else:
                await self._delete(resource)
            self._tell(f"{resource.key} is removed")

        await _run_in_order(removed, dependents, step)

    async def _create(self, resource: Resource) -> None:
        """Create *resource*, or accept it if kinetic made it before; wait until it is ready."""
        self._tell(f"creating {resource.key}")
        action = f"create {resource.key}"
        try:
            await self.send(action, resource.create)
        except Refused as exc:
            is_useless = resource.kind == "node pool" and isinstance(exc.__cause__, OperationFailed)
            if ZONES_FIELD in exc.answer:
                is_useless = True
                exc.answer["kind"] = resource.kind
            if is_useless:
                await self._delete(resource)  # else GKE keeps it in the state ERROR
            # Status 409: another client made *resource*, or a request whose reply was lost.
            # Status 403: the user can't see *resource*, so waiting for it is useless.
            if _status(exc) != 409 or (await self._observe_one(resource)).status == 403:
                raise
            found = await self._wait_until_ready(resource)
            if not is_ours(self._site, resource, found, by_keras_kinetic=False):
                raise
        await self._wait_until_ready(resource)

    def _new_backoff(self, action: str) -> _Backoff:
        return _Backoff(
            self._google.first_pause_s, lambda reason: self._tell(f"waiting to {action}: {reason}")
        )

    async def send(self, action: str, request: GoogleRequest) -> Document:
        """Send *request*, await its operation, and return the answer; retry temporary failures.

        Requests to GKE are sent one after the other.
        """
        backoff = self._new_backoff(action)
        async with self._cluster_lock if request.api == "container" else nullcontext():
            while True:
                try:
                    answer: Document = await self._google.call(request)
                    if _is_operation(answer):
                        answer = await self._google.wait_for(request.api, answer)
                    return answer
                except OperationFailed as failure:
                    # GKE keeps load balancers and disks for a while after it has removed a cluster.
                    is_in_use = any("RESOURCE_IN_USE" in code for code in failure.codes)
                    wait = (STILL_IN_USE, MAX_RELEASE_S)
                    if request.method != "DELETE" or not is_in_use or not await backoff.pause(wait):
                        raise operation_error(action, failure) from failure
                except HttpError as refusal:
                    if not await backoff.pause(_wait_if_temporary(request, refusal)):
                        raise refusal_error(action, refusal) from refusal

    async def _wait_until_ready(self, resource: Resource) -> Document:
        """Wait until *resource* exists and is ready, and return its document."""
        document = await self._poll(resource, _wait_if_unready)
        assert document is not None  # `_wait_if_unready` waits for it
        if (status := str(document.get("status") or "")) in BROKEN_STATUSES:
            raise Refused(
                f"{resource.key} is {status}: {problem_of(document)}; remove it and run the "
                "command again"
            )
        return document

    async def _poll(
        self, resource: Resource, wait_reason: Callable[[Document | None], Wait | None]
    ) -> Document | None:
        """Read *resource* until *wait_reason* returns None; return the resource's document.

        The document is None if *resource* doesn't exist. A failed read is also a reason to wait,
        because it doesn't show whether *resource* exists.
        """
        backoff = self._new_backoff(f"continue with {resource.key}")
        while True:
            observed = await self._observe_one(resource)
            wait = wait_reason(observed.document)
            if observed.problem:
                wait = ("it can't be read", MAX_PROPAGATION_S)
            if wait is None:
                return observed.document
            if not await backoff.pause(wait):
                reason = observed.problem or wait[0]
                raise Unavailable(
                    f"{resource.key}: {reason}; run the command again", retryable=True
                )

    async def _edit_policy(
        self, policy: Policy, edit: Callable[[Document], dict[str, Any]]
    ) -> None:
        """Replace the IAM policy with the one that *edit* returns for it."""
        action = f"change who can use {policy.name}"
        backoff = self._new_backoff(action)
        while True:
            edited = edit(await self.send(action, policy.read))
            body = {"policy": edited} if policy.wrapped else edited
            try:
                await self.send(action, replace(policy.write, body=body))
                return
            except Refused as exc:
                # These statuses mean that another process has changed the policy in between.
                is_outdated = _status(exc) in (409, 412)
                wait = ("another process changes it", MAX_PROPAGATION_S)
                if not is_outdated or not await backoff.pause(wait):
                    raise

    async def _delete(self, resource: Resource) -> None:
        """Remove *resource* and what is in a bucket or network; wait until *resource* is absent."""
        self._tell(f"removing {resource.key}")
        assert resource.remove is not None
        if resource.kind == "bucket":
            await self._empty_bucket(resource)
        if resource.kind == "network":
            await self._remove_firewall_rules(resource)
        await self._ensure_removed(resource.key, resource.remove)
        await self._poll(resource, _wait_if_present)

    async def _ensure_removed(self, subject: str, request: GoogleRequest) -> None:
        """Send *request*, which removes *subject*; succeed also if *subject* is absent."""
        try:
            await self.send(f"remove {subject}", request)
        except Refused as exc:
            if _status(exc) != 404:
                raise

    async def _empty_bucket(self, bucket: Resource) -> None:
        listing = replace(bucket.read, path=f"{bucket.read.path}/o")

        async def remove(name: str) -> None:
            path = f"{listing.path}/{quote(name, safe='')}"
            await self._ensure_removed(name, replace(listing, method="DELETE", path=path))

        names = [str(item["name"]) async for item in list_items(self._google, listing, "items")]
        await for_each(remove, names, limit=MAX_CONCURRENT_REQUESTS)

    async def _remove_firewall_rules(self, network: Resource) -> None:
        """Remove the firewall rules that GKE made in the network and sometimes leaves behind."""
        parent = f"projects/{self._site.project}/global/firewalls"
        rules = call("compute", "GET", parent)
        async for rule in list_items(self._google, rules, "items"):
            name, rule_network = str(rule.get("name")), str(rule.get("network", ""))
            if name.startswith("gke-") and rule_network.endswith(f"/networks/{network.name}"):
                removal = call("compute", "DELETE", f"{parent}/{name}")
                await self._ensure_removed(f"firewall rule {name}", removal)


def _status(error: BackendError) -> int:
    """Return the HTTP status that caused an error of kinetic, or 0."""
    cause = error.__cause__
    return cause.status if isinstance(cause, HttpError) else 0


def _is_operation(answer: Document) -> bool:
    """Return whether an answer of Google describes a long-running operation, in any form."""
    return (
        str(answer.get("kind", "")).endswith("#operation")
        or "operationType" in answer
        or str(answer.get("name", "")).startswith("operations/")
        or "/operations/" in str(answer.get("name", ""))
    )


async def _run_in_order(
    items: Sequence[Any], needs: Mapping[str, Sequence[str]], step: Callable[[Any], Any]
) -> None:
    """Await ``step(item)`` for all *items* concurrently, each after the items that it *needs*.

    *needs* maps the key of an item to other keys. If the step of an item fails, this skips the
    items that need it.
    """
    tasks: dict[str, asyncio.Task[bool]] = {}
    failures: list[KineticError] = []

    async def run_step(item: Any) -> bool:
        needed = [tasks[key] for key in needs[item.key] if key in tasks]
        if not all([await task for task in needed]):
            return False
        try:
            await step(item)
        except KineticError as exc:
            failures.append(exc)
            return False
        return True

    async with asyncio.TaskGroup() as group:
        for item in items:
            tasks[item.key] = group.create_task(run_step(item), name=f"kinetic setup {item.key}")
    if failures:
        first, *others = failures
        for other in others:
            first.add_note(str(other))
        raise first


def _wait_if_temporary(request: GoogleRequest, refusal: HttpError) -> Wait | None:
    """Return why Google refuses *request* for now, and how many seconds to wait at most.

    None means that the refusal is final.
    """
    codes = reasons(refusal)
    message = refusal.message.lower()
    if is_disabled(refusal):
        return f"{request.api} is still being enabled", MAX_ENABLING_S
    is_busy = "FAILED_PRECONDITION" in codes and ("operation" in message or "currently" in message)
    if request.api == "container" and refusal.status == 400 and is_busy:
        return f"another operation runs on the cluster ({refusal.message})", MAX_BUSY_S
    if request.api == "serviceusage" and refusal.status == 400 and "billing" in message:
        return "the project's billing account hasn't propagated yet", MAX_PROPAGATION_S
    if "resourceNotReady" in codes:
        return "a resource that it needs isn't ready", MAX_PROPAGATION_S
    if request.method == "DELETE" and "resourceInUseByAnotherResource" in codes:
        return STILL_IN_USE, MAX_RELEASE_S
    if "IamPolicy" in request.path or request.path.endswith("/iam"):
        is_unknown_account = refusal.status in (400, 403, 404) and any(
            phrase in message for phrase in UNKNOWN_ACCOUNT_PHRASES
        )
        if is_unknown_account:
            return "a new account hasn't propagated yet", MAX_PROPAGATION_S
    return None


def _wait_if_unready(document: Document | None) -> Wait | None:
    """Return why and how long to wait for a usable resource; None if it is usable."""
    if document is None:
        return "Google doesn't show it yet", MAX_PROPAGATION_S
    status = str(document.get("status") or "")
    return (f"it is {status}", MAX_BUSY_S) if status in IN_PROGRESS_STATUSES else None


def _wait_if_stopping(document: Document | None) -> Wait | None:
    """Return why and how long to wait if an earlier `down` is removing a resource; else None."""
    is_stopping = document is not None and document.get("status") == "STOPPING"
    return ("it is STOPPING", MAX_BUSY_S) if is_stopping else None


def _wait_if_present(document: Document | None) -> Wait | None:
    """Return why and how long to wait for the end of a removal; None if it has ended."""
    if document is None:
        return None
    status = str(document.get("status") or "")
    return (
        (f"it is {status}", MAX_BUSY_S) if status else ("Google still shows it", MAX_PROPAGATION_S)
    )


class _Backoff:
    """The pauses of one wait, with a separate time limit for each reason to wait.

    *report* receives each reason once. *first_pause_s* is the first pause; the longest pause
    is ten times as long.
    """

    def __init__(self, first_pause_s: float, report: Tell) -> None:
        self._pauses = growing_pauses(first_pause_s, 10 * first_pause_s, 1.5)
        self._report = report
        self._clock = asyncio.get_running_loop().time
        self._waited_s: dict[str, float] = {}
        self._latest_reason = ""
        self._latest_pause_at = 0.0

    async def pause(self, wait: Wait | None) -> bool:
        """Pause, and return True; return False if *wait* is None, or its time limit has passed."""
        if wait is None:
            return False
        now, (reason, limit_s) = self._clock(), wait
        if self._latest_reason:
            self._waited_s[self._latest_reason] += now - self._latest_pause_at
        self._latest_reason, self._latest_pause_at = reason, now
        if reason not in self._waited_s:
            self._waited_s[reason] = 0.0
            self._report(reason)
        if self._waited_s[reason] > limit_s:
            return False
        await asyncio.sleep(next(self._pauses))
        return True
