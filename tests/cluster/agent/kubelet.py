"""All nodes of a test run: their pods, what tests have ordered to go wrong, their port."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.agent import pod as pods
from tests.cluster.agent.container import clock
from tests.cluster.agent.job_sets import JobSets
from tests.cluster.agent.leader_worker_sets import LeaderWorkerSets
from tests.cluster.agent.node import Machine, Node
from tests.cluster.agent.pod import Ending, Pod
from tests.cluster.agent.server import Server
from tests.cluster.agent.volumes import located
from tests.cluster.rest import Account, Refused, Session

Json = dict[str, Any]

ROOT = Path(__file__).parents[3]
RUNNER = "/app"
PLACES = {
    "KINETIC_KEY_FILE": "/var/run/kinetic/key",
    "KINETIC_POD_ACCOUNT_FOLDER": "/var/run/secrets/kubernetes.io/serviceaccount",
}
"""Paths that processes know without being told, and the variables that tell them otherwise."""

PYTHONS = ("python", "python3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What it is started with."""

    account: Account
    certificate: Path
    key: Path
    port: int
    folder: Path


class Kubelet:
    """One process for any number of nodes. Methods without an underscore are what tests order."""

    def __init__(self, settings: Settings, session: Session) -> None:
        self.session = session
        self.port = settings.port
        self.folder = settings.folder
        self.back_off_s = 1.0
        self.pods: dict[str, Pod] = {}
        self._settings = settings
        self._nodes: dict[str, tuple[Node, asyncio.Task[None]]] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._addresses = itertools.count(2)
        self._hosts: dict[str, str] = {}
        self._controllers: set[asyncio.Task[None]] = set()
        self.leader_worker_sets = LeaderWorkerSets(session)
        self._refusals: list[tuple[str, str]] = []
        self._pull_failures: dict[str, str] = {}
        self.pulls_change = asyncio.Event()  # set once other images can be pulled than now
        self._extra: dict[str, str] = {}
        self._images: dict[str, tuple[str, Path]] = {}
        self._purged: set[str] = set()
        self._numbers = itertools.count()

    async def serve(self, orders: asyncio.Queue[Any]) -> None:
        """Until None is in *orders*: then all processes are ended, and the nodes forgotten."""
        runner = await Server(self).start(
            self._settings.certificate, self._settings.key, self._settings.port
        )
        try:
            while (order := await orders.get()) is not None:
                await order(self)
        finally:
            for task in (*self._controllers, *(task for _, task in self._nodes.values())):
                task.cancel()
            for pod in self.pods.values():
                pod.fall_silent()
            tasks = {*self._lives, *self._controllers, *(task for _, task in self._nodes.values())}
            if tasks:
                await asyncio.wait(tasks)
            await runner.cleanup()

    # What nodes tell

    def listed(self, node: str, items: Sequence[Json]) -> None:
        """These are all pods of a node."""
        there = {item["metadata"]["uid"] for item in items}
        for item in items:
            self.changed("ADDED", item)
        for pod in self.pods.values():
            if pod.node == node and pod.uid not in there:
                pod.vanish()

    def changed(self, kind: str, found: Json) -> None:
        """A pod of a node is new, or has changed, or is gone."""
        if kind == "BOOKMARK":
            return
        uid = found["metadata"]["uid"]
        pod = self.pods.get(uid)
        if kind == "DELETED":
            if pod:
                pod.vanish()
            return
        if pod is None:
            pod = self.pods[uid] = Pod(self, found)
            task = asyncio.create_task(pod.run(), name=f"pod {pod.name}")
            self._lives.add(task)
            task.add_done_callback(lambda task: self._ended(uid, task))
        pod.update(found)
        if pod.namespace in self._purged:
            pod.end(Ending(grace=0))

    def _ended(self, uid: str, task: asyncio.Task[None]) -> None:
        self._lives.discard(task)
        self.pods.pop(uid, None)
        complain(task)

    # What pods ask

    def address(self, namespace: str, host: str = "", subdomain: str = "") -> str:
        """An address of loopback that no other pod has; always the same for a host with a name."""
        if host and subdomain:
            whole = f"{host}.{subdomain}.{namespace}"
            if whole not in self._hosts:
                self._hosts[whole] = self.address(namespace)
            return self._hosts[whole]
        number = next(self._addresses)
        return f"127.{64 + number // 62500 % 64}.{number // 250 % 250}.{number % 250 + 1}"

    def resolved(self, text: str, namespace: str, subdomain: str) -> str:
        """Addresses in place of the names of hosts in a subdomain: there is no DNS here."""
        tail = rf"\.{re.escape(subdomain)}(\.{re.escape(namespace)}(\.svc(\.cluster\.local)?)?)?"
        return re.sub(
            rf"(?<![\w.-])([a-z0-9-]+){tail}(?![\w.-])",
            lambda match: self.address(namespace, match[1], subdomain),
            text,
        )

    def next_refusal(self) -> tuple[str, str] | None:
        """Return reason and message if a test has ordered to refuse the next pod."""
        return self._refusals.pop(0) if self._refusals else None

    def pull_failure(self, image: str) -> str | None:
        """Why an image cannot be pulled, when a test has ordered so."""
        for part, why in self._pull_failures.items():
            if part in image:
                return why
        return None

    def environment(
        self, pod: Pod, spec: Json, known: Mapping[str, str], volumes: Mapping[str, Path]
    ) -> dict[str, str]:
        """A container's variables: what an image would bring, and its own, *known*."""
        env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "HOME": str(pod.folder / "work"),
            "TMPDIR": str(pod.folder / "tmp"),
            "HOSTNAME": pod.object["spec"].get("hostname") or pod.name,
            "LANG": "C.UTF-8",
            "CLUSTER_TESTS": str(self.folder),  # by which its processes are found
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": self._settings.account.server.rpartition(":")[2],
            **self._extra,
            **known,
        }
        for name, path in PLACES.items():
            if place := located(env.get(name, path), spec, volumes):
                env[name] = str(place)
        if subdomain := pod.object["spec"].get("subdomain"):
            for name, value in env.items():
                env[name] = self.resolved(value, pod.namespace, subdomain)
        return env

    def command(self, spec: Json, words: Sequence[str], volumes: Mapping[str, Path]) -> list[str]:
        """A command whose paths are this machine's."""
        python, runner = self._content(spec["image"])
        found = [python if words[0] in PYTHONS else words[0]]
        for word in words[1:]:
            place = located(word, spec, volumes) if word.startswith("/") else None
            if word.startswith(f"{RUNNER}/"):
                place = runner / word.removeprefix(f"{RUNNER}/")
            found.append(str(place or word))
        return found

    def _content(self, image: str) -> tuple[str, Path]:
        """Return the interpreter of an image, and the folder at `RUNNER` in it."""
        for part, content in self._images.items():
            if part in image:
                return content
        return sys.executable, ROOT / "runner"

    async def event(self, about: Json, reason: str, message: str, kind: str) -> None:
        """An event as kubelet writes it; again and again until the server has it."""
        metadata = about["metadata"]
        now = clock()
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name']}.{next(self._numbers):x}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "kind": "Pod",
                "apiVersion": "v1",
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": message,
            "source": {"component": "kubelet", "host": about["spec"].get("nodeName", "")},
            "reportingComponent": "kubelet",
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        path = f"/api/v1/namespaces/{metadata['namespace']}/events"
        while True:
            try:
                await self.session.call("POST", path, body)
            except Refused as refusal:
                if not pods.may_pass(refusal):  # the namespace is going
                    print(f"event {reason} is lost: {refusal}", file=sys.stderr)
                    return
            except pods.UNREACHABLE:
                pass
            else:
                return
            await asyncio.sleep(pods.RETRY_S)

    # What tests order

    async def add_node(self, **machine: Any) -> None:
        """A node more (see `Machine`); returns once it is ready for pods."""
        node = Node(self, Machine(**machine))
        task = asyncio.create_task(node.run(), name=f"node {node.name}")
        self._nodes[node.name] = (node, task)
        ready = asyncio.create_task(node.ready.wait(), name="ready")
        await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if task.done():
            await task

    async def remove_node(self, name: str) -> None:
        """End its pods' processes, and delete it."""
        if name in self._nodes:
            _, task = self._nodes.pop(name)
            task.cancel()
            await asyncio.wait({task})
        for pod in self.pods.values():
            if pod.node == name:
                pod.fall_silent()
        try:
            await self.session.call("DELETE", f"/api/v1/nodes/{name}")
        except Refused as refusal:
            if refusal.code != 404:
                raise

    async def purge(self, namespace: str) -> None:
        """Kill all processes of a namespace, also of pods that are yet to come; wait for it."""
        self._purged.add(namespace)
        meant = [pod for pod in self.pods.values() if pod.namespace == namespace]
        for pod in meant:
            pod.end(Ending(grace=0))
        for pod in meant:
            await pod.ended.wait()

    async def fail_pull(self, part: str, why: str) -> None:
        """Images whose name contains *part* cannot be pulled from now on."""
        self._pull_failures[part] = why
        self._news_of_pulls()

    async def refuse(self, reason: str, message: str) -> None:
        """Refuse the next pod, although it is bound to a node."""
        self._refusals.append((reason, message))

    async def start_controllers(self) -> None:
        """Begin to do what the controllers of LeaderWorkerSet and JobSet do."""
        job_sets = JobSets(self.session)
        parts = (
            self.leader_worker_sets.sets,
            self.leader_worker_sets.pods,
            job_sets.sets,
            job_sets.jobs,
        )
        for part in parts:
            task = asyncio.create_task(part(), name=f"controller {part.__qualname__}")
            task.add_done_callback(complain)
            self._controllers.add(task)

    async def set_image(self, part: str, python: str, runner: str) -> None:
        """Give images with *part* in their name another interpreter and another runner."""
        self._images[part] = (python, Path(runner))

    async def set_environment(self, **variables: str) -> None:
        """More variables for every container that starts from now on."""
        self._extra = variables

    async def reset(self) -> None:
        """Nothing goes wrong any more."""
        self._pull_failures.clear()
        self._refusals.clear()
        self._extra = {}
        self._images.clear()
        self._news_of_pulls()

    def _news_of_pulls(self) -> None:
        self.pulls_change.set()
        self.pulls_change = asyncio.Event()


def complain(task: asyncio.Task[None]) -> None:
    """Say on standard error what a task died of: the tests fail for it at their end."""
    if not task.cancelled() and (error := task.exception()):
        traceback.print_exception(error, file=sys.stderr)
