"""A pod on its node: from its volumes to its last status."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.cluster.agent import environment, status, volumes
from tests.cluster.agent.container import Container, clock
from tests.cluster.rest import STRATEGIC, Refused

if TYPE_CHECKING:
    from tests.cluster.agent.kubelet import Kubelet

Json = dict[str, Any]

UNREACHABLE = (aiohttp.ClientError, TimeoutError, OSError)
RETRY_S = 0.2
LOOK_AGAIN_S = 0.5
"""Seconds until a missing Secret or image is looked for again."""

TERMINAL = ("Succeeded", "Failed")


def may_pass(refusal: Refused) -> bool:
    """Whether the server may take the same request later: it has too many, or has just begun."""
    return refusal.code in (401, 429) or refusal.code >= 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a pod ends before its processes do, and what its status is to say.

    *grace* is seconds between SIGTERM and SIGKILL. Without *reason* the pod's phase follows from
    its exit codes.
    """

    grace: float
    reason: str = ""
    message: str = ""


class Pod:
    """One pod; `run` is its life, until its object is gone."""

    def __init__(self, kubelet: Kubelet, found: Json) -> None:
        self.object = found
        self.uid: str = found["metadata"]["uid"]
        self.namespace: str = found["metadata"]["namespace"]
        self.name: str = found["metadata"]["name"]
        self.node: str = found["spec"]["nodeName"]
        self.folder = kubelet.folder / "pods" / self.uid
        self._kubelet = kubelet
        self._path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        spec = found["spec"]
        self.containers = [Container(one, self.folder) for one in spec["containers"]]
        self._ip = kubelet.address(
            self.namespace, spec.get("hostname", ""), spec.get("subdomain", "")
        )
        self._began = clock()
        self._ending: Ending | None = None
        self._deadline = float("inf")
        self._news = asyncio.Event()  # something about its end is new
        self._gone = False
        self.ended = asyncio.Event()  # its processes have
        self._over = found.get("status", {}).get("phase") in TERMINAL
        self._conditions: dict[str, Json] = {}
        self._reported: Json = {}
        self._reporting = asyncio.Lock()
        self.silent = False
        self.volumes: dict[str, Any] = {}

    # What it is told

    def update(self, found: Json) -> None:
        """Its object has changed."""
        self.object = found
        if "deletionTimestamp" in found["metadata"]:
            self.end(Ending(grace=found["metadata"].get("deletionGracePeriodSeconds") or 0))

    def end(self, ending: Ending) -> None:
        """End it; what was said first is what its status says, the earliest deadline counts."""
        at = asyncio.get_running_loop().time() + ending.grace
        if self._ending is None or at < self._deadline:
            self._deadline = at
            self._ending = self._ending or ending
            self._news.set()
        if self._over:
            self._news.set()

    def vanish(self) -> None:
        """Its object is gone: nobody asks for it any more."""
        self._gone = True
        self.end(Ending(grace=0))
        self._news.set()

    def fall_silent(self) -> None:
        """Its node is gone: the processes with it, and nothing is ever said about them."""
        self.silent = True
        self.vanish()

    # Its life

    async def run(self) -> None:
        """Until its object is gone; leaves no process and no file."""
        try:
            if not self._over:
                await self._live()
                self._over = True
                self.ended.set()
                await self._report()
            while not self._gone:
                if "deletionTimestamp" in self.object["metadata"]:
                    await self._delete()
                self._news.clear()
                if not self._gone:
                    await self._news.wait()
        finally:
            for one in self.containers:
                one.kill()
            self.ended.set()
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _live(self) -> None:
        self.folder.mkdir(parents=True)
        for name in ("work", "tmp"):
            (self.folder / name).mkdir()
        if (refusal := self._kubelet.next_refusal()) is not None:
            self._ending = Ending(grace=0, reason=refusal[0], message=refusal[1])
            self.containers.clear()  # a kubelet says nothing of the containers of such a pod
            return
        work = asyncio.create_task(self._work(), name=f"work of {self.name}")
        try:
            timer = self._arm()
            while not work.done():
                news = asyncio.create_task(self._news.wait(), name="news")
                await asyncio.wait({work, news}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                await asyncio.wait({news})
                self._news.clear()
                if self._ending is not None and not work.done():
                    await self._bring_to_end(work)
            if timer:
                timer.cancel()
            if not work.cancelled():
                await work
        finally:
            work.cancel()
            await asyncio.wait({work})

    def _arm(self) -> asyncio.TimerHandle | None:
        limit = self.object["spec"].get("activeDeadlineSeconds")
        if limit is None:
            return None
        grace = self.object["spec"].get("terminationGracePeriodSeconds", 30)
        message = "Pod was active on the node longer than the specified deadline"
        ending = Ending(grace=grace, reason="DeadlineExceeded", message=message)
        return asyncio.get_running_loop().call_later(limit, self.end, ending)

    async def _bring_to_end(self, work: asyncio.Task[None]) -> None:
        """SIGTERM, and SIGKILL when its time is over."""
        for one in self.containers:
            one.terminate()
        while not work.done():
            if not any(one.running for one in self.containers):  # others may wait for an image
                work.cancel()
                await asyncio.wait({work})
                return
            left = max(0.0, self._deadline - asyncio.get_running_loop().time())
            news = asyncio.create_task(self._news.wait(), name="news")
            both = {work, news}
            await asyncio.wait(both, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            await asyncio.wait({news})
            self._news.clear()
            if self._deadline <= asyncio.get_running_loop().time():
                for one in self.containers:
                    one.kill()
                await asyncio.wait({work})

    async def _work(self) -> None:
        await self._report()
        sources = await self._mounted()
        await asyncio.gather(*[self._life(one, sources) for one in self.containers])

    async def _prepare(self) -> environment.Sources:
        secrets, configs = environment.references(self.object)
        found = {
            kind: {name: one for name in names if (one := await self._fetch(kind, name))}
            for kind, names in (("secrets", secrets), ("configmaps", configs))
        }
        have = volumes.Contents(
            secrets=found["secrets"], configs=found["configmaps"], token=await self._token()
        )
        self.volumes = volumes.materialise(self.object, self.folder / "volumes", have)
        return environment.Sources(pod=self.object, secrets=found["secrets"])

    async def _token(self) -> str:
        if not volumes.wants_token(self.object):
            return ""
        account = self.object["spec"]["serviceAccountName"]
        path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{account}/token"
        bound = {"kind": "Pod", "apiVersion": "v1", "name": self.name, "uid": self.uid}
        body = {"spec": {"expirationSeconds": 3607, "boundObjectRef": bound}}
        while True:
            try:
                answer = await self._kubelet.session.call("POST", path, body)
            except (Refused, *UNREACHABLE):  # refused where account and namespace are just removed
                await asyncio.sleep(RETRY_S)
            else:
                token: str = answer["status"]["token"]
                return token

    async def _fetch(self, kind: str, name: str) -> Json | None:
        path = f"/api/v1/namespaces/{self.namespace}/{kind}/{name}"
        while True:
            try:
                return await self._kubelet.session.call("GET", path)
            except Refused as refusal:
                if refusal.code == 404:
                    return None
                if not may_pass(refusal):
                    raise
            except UNREACHABLE:
                pass
            await asyncio.sleep(RETRY_S)

    async def _mounted(self) -> environment.Sources:
        """Try until all volumes are there; an event says what is missing, when that changes."""
        reported = ""
        while True:
            try:
                return await self._prepare()
            except volumes.CannotMount as missing:
                if str(missing) != reported:
                    reported = str(missing)
                    await self._event("FailedMount", reported)
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _life(self, one: Container, sources: environment.Sources) -> None:
        """Pull, create, run; again as the restart policy says."""
        await self._pull(one)
        known = environment.variables(one.spec, sources)
        words = environment.command(one.spec, known)
        env = self._kubelet.environment(self, one.spec, known, self.volumes)
        command = self._kubelet.command(one.spec, words, self.volumes)
        while self._ending is None:
            begun = asyncio.Event()
            run = asyncio.create_task(
                one.run(command, env, self.folder / "work", begun), name=f"run of {self.name}"
            )
            try:
                await self._until_begun(run, begun)
                await run
            finally:
                run.cancel()
                await asyncio.wait({run})
            if self._ending is not None or self.object["spec"]["restartPolicy"] == "Never":
                if any(other.exit_code is None for other in self.containers):
                    self._news.set()  # the pod goes on without it
                    await self._report()
                return
            seconds = self._kubelet.back_off_s * 2 ** min(one.restarts, 5)
            await self._report()
            one.again(
                f"back-off {seconds:g}s restarting failed container={one.name} "
                f"pod={self.name}_{self.namespace}({self.uid})"
            )
            await self._report()
            await asyncio.sleep(seconds)

    async def _until_begun(self, run: asyncio.Task[None], begun: asyncio.Event) -> None:
        start = asyncio.create_task(begun.wait(), name="begun")
        await asyncio.wait({run, start}, return_when=asyncio.FIRST_COMPLETED)
        start.cancel()
        await asyncio.wait({start})
        if begun.is_set():
            if self._ending is not None:
                self._news.set()  # it began while its end was being reported
            await self._report()

    async def _pull(self, one: Container) -> None:
        image = one.spec["image"]
        first = True
        while (why := self._kubelet.pull_failure(image)) is not None:
            change = self._kubelet.pulls_change
            one.wait_for("ErrImagePull", why)
            if first:
                await self._event("Failed", f'Failed to pull image "{image}": {why}')
                await self._event("Failed", "Error: ErrImagePull")
            await self._report()
            await asyncio.sleep(LOOK_AGAIN_S)
            backing_off = f'Back-off pulling image "{image}": ErrImagePull: {why}'
            one.wait_for("ImagePullBackOff", backing_off)
            if first:
                await self._event("BackOff", backing_off, "Normal")
                await self._event("Failed", "Error: ImagePullBackOff")
            first = False
            await self._report()
            await change.wait()
        one.wait_for("ContainerCreating")

    # What it tells

    async def _report(self) -> None:
        """Write its status, if it is news; again and again until the server has it."""
        async with self._reporting:
            while not (self._gone or self.silent):
                status = self._status()
                if status == self._reported:
                    return
                body = {"metadata": {"uid": self.uid}, "status": status}
                try:
                    await self._kubelet.session.call(
                        "PATCH", f"{self._path}/status", body, STRATEGIC
                    )
                except Refused as refusal:
                    if refusal.code == 404:
                        return
                    # A conflict: another pod has its name by now, or somebody changed it meanwhile.
                    if refusal.code == 409 and await self._is_replaced():
                        return
                    if refusal.code != 409 and not may_pass(refusal):
                        raise
                except UNREACHABLE:
                    pass
                else:
                    self._reported = status
                    return
                await asyncio.sleep(RETRY_S)

    async def _is_replaced(self) -> bool:
        """Whether the server certainly has no such pod any more, or another of its name."""
        try:
            found = await self._kubelet.session.call("GET", self._path)
        except Refused as refusal:
            return refusal.code == 404
        except UNREACHABLE:
            return False
        there: str = found["metadata"]["uid"]
        return there != self.uid

    def _status(self) -> Json:
        if self._over:
            for one in self.containers:
                if "terminated" not in one.state:
                    one.lost()
        ending = self._ending
        view = status.View(
            containers=self.containers,
            over=self._over,
            reason=ending.reason if ending else "",
            message=ending.message if ending else "",
            ip=self._ip,
            began=self._began,
        )
        return status.of(view, self._conditions)

    async def _event(self, reason: str, message: str, kind: str = "Warning") -> None:
        await self._kubelet.event(self.object, reason, message, kind)

    async def _delete(self) -> None:
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        while not self._gone:
            try:
                await self._kubelet.session.call("DELETE", self._path, body)
            except Refused as refusal:
                if refusal.code in (404, 409):
                    self._gone = True
                    return
            except UNREACHABLE:
                pass
            else:
                return
            await asyncio.sleep(RETRY_S)
