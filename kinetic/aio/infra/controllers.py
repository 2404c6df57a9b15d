"""Controllers that you downloaded as a file of manifests: LeaderWorkerSet, JobSet, or Kueue."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from kinetic._tasks import bounded
from kinetic.aio.infra.namespace import Manifest, apply
from kinetic.aio.infra.resources import Action, Change, Document
from kinetic.aio.kubernetes.api import Api
from kinetic.errors import ConfigurationError, NotFound, Unavailable

DIGEST = "kinetic.dev/sha256"
"""The annotation with the SHA-256 of the file that an object is from."""

PIN = "@sha256:"
AT_ONCE = 8
"""How many objects to read or apply at a time."""

SERVED_S = 60.0
"""How long the API server may take to serve a new kind."""

LOOK_S = 0.2
DEFINITION = "CustomResourceDefinition"
FIRST = (DEFINITION, "Namespace")
LAST = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
"""Kinds to apply last. They name a server of the controller that the API server asks about other
objects, so that server's objects must exist first."""

KUEUE_CONFIGURATION = ("kueue-manager-config", "controller_manager_config.yaml")
"""The ConfigMap with Kueue's configuration, and its key."""

READY = "2h"
"""How long pods that Kueue admitted may wait for nodes. Kueue's default, 30 minutes, is too short:
GKE takes up to 35 minutes to find that a zone has no TPU slice, and then tries again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """A file of manifests, with its SHA-256 as ``digest``."""

    name: str
    digest: str
    documents: tuple[Document, ...]

    @property
    def change(self) -> Change:
        """Return the change that installs the controller."""
        about = f"{len(self.documents)} objects, sha256:{self.digest}"
        return Change(action=Action.CREATE, kind="controller", name=self.name, reason=about)

    @property
    def groups(self) -> frozenset[str]:
        """Return the API groups of the kinds that the controller defines."""
        return frozenset(str(one["spec"]["group"]) for one in self.definitions)

    @property
    def definitions(self) -> tuple[Document, ...]:
        """Return the CustomResourceDefinitions of the controller."""
        return tuple(one for one in self.documents if one["kind"] == DEFINITION)


def read_controller(argument: str) -> Controller:
    """Read a controller's manifests from ``FILE`` or ``FILE@sha256:DIGEST``. Blocks.

    Raises:
        ConfigurationError: The file can't be read, has another digest, or has no manifests.
    """
    name, _, wanted = argument.partition(PIN)
    try:
        content = Path(name).expanduser().read_bytes()
    except OSError as exc:
        raise ConfigurationError(f"can't read the controller {name}: {exc.strerror}") from exc
    digest = hashlib.sha256(content).hexdigest()
    if wanted and wanted.lower() != digest:
        raise ConfigurationError(
            f"{name} has the SHA-256 {digest}, not {wanted.lower()}; download it again, and check "
            "the digest where you got it"
        )
    return Controller(name=Path(name).name, digest=digest, documents=_documents(name, content))


def _documents(name: str, content: bytes) -> tuple[Document, ...]:
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        found: list[Any] = [one for one in yaml.load_all(content, loader) if one is not None]
    except yaml.YAMLError as exc:
        raise ConfigurationError(f"{name} isn't YAML: {exc}") from exc
    documents: list[Any] = []
    for one in found:
        items = cast("Document", one).get("items") if isinstance(one, dict) else None
        documents += items if isinstance(items, list) else [one]  # a List has items
    if not documents or not all(map(_is_manifest, documents)):
        raise ConfigurationError(
            f"{name} isn't a file of Kubernetes manifests; name one such as the manifests.yaml of "
            "a release"
        )
    whole: list[dict[str, Any]] = documents
    return tuple(
        _patient({key: part for key, part in one.items() if key != "status"}) for one in whole
    )


def _patient(document: Document) -> Document:
    """If *document* is Kueue's configuration and sets no limit, let pods wait `READY` for nodes.

    A configuration older than v1beta2 stays as it is: with it, Kueue has no default limit.
    """
    name, key = KUEUE_CONFIGURATION
    if (document["kind"], document["metadata"]["name"]) != ("ConfigMap", name):
        return document
    data: Document = document.get("data") or {}
    text = str(data.get(key) or "")
    limits = re.search(r"^apiVersion: .*/v1beta2$", text, re.MULTILINE)
    if not limits or re.search("^waitForPodsReady:", text, re.MULTILINE):
        return document
    patient = f"{text.rstrip()}\nwaitForPodsReady:\n  timeout: {READY}\n"
    return {**document, "data": {**data, key: patient}}


def _is_manifest(one: object) -> bool:
    if not isinstance(one, dict):
        return False
    document = cast("Document", one)
    metadata = document.get("metadata")
    named = isinstance(metadata, dict) and cast("Document", metadata).get("name")
    return bool(document.get("apiVersion") and document.get("kind") and named)


async def planned(api: Api, one: Controller) -> Change:
    """Return the change that a controller needs, by how many of its objects are from its file."""
    kinds = Kinds(api, one)
    kept = 0

    async def look(document: Document) -> None:
        nonlocal kept
        try:
            there = await api.call("GET", (await kinds.manifest(document)).path)
        except NotFound:
            return
        notes: Document = there["metadata"].get("annotations") or {}
        kept += notes.get(DIGEST) == one.digest

    await bounded(look, one.documents, at_once=AT_ONCE)
    if kept == len(one.documents):
        return replace(one.change, action=Action.KEEP, reason="")
    if not kept:
        return one.change
    reason = f"{len(one.documents) - kept} of {one.change.reason}"
    return replace(one.change, action=Action.UPDATE, reason=reason)


async def install(api: Api, one: Controller) -> None:
    """Apply all objects of a controller: CustomResourceDefinitions first, and webhooks last.

    Cancelled: what was applied stays; run it again to continue.

    Raises:
        Forbidden: You lack the permission to apply one of them.
        ConfigurationError: The cluster doesn't know one of its kinds.
        Refused: The API server refuses one of them.
    """
    kinds = Kinds(api, one)

    async def give(document: Document) -> None:
        await apply(api, await kinds.manifest(document))

    for part in _in_order(one.documents):
        await bounded(give, part, at_once=AT_ONCE)
        for definition in one.definitions if part[0]["kind"] in FIRST else ():
            await kinds.served(definition)


def _in_order(documents: Sequence[Document]) -> list[list[Document]]:
    parts: list[list[Document]] = [[], [], []]
    for one in documents:
        parts[0 if one["kind"] in FIRST else 2 if one["kind"] in LAST else 1].append(one)
    return [one for one in parts if one]


class Kinds:
    """Find the API paths of objects, in a controller's definitions or from the API server."""

    def __init__(self, api: Api, controller: Controller) -> None:
        self._api = api
        self._digest = controller.digest
        self._name = controller.name
        self._known: dict[str, Mapping[str, tuple[str, bool]]] = {}
        self._turn = asyncio.Lock()
        self._own = {
            (f"{spec['group']}/{version['name']}", spec["names"]["kind"]): (
                str(spec["names"]["plural"]),
                spec["scope"] == "Namespaced",
            )
            for spec in (one["spec"] for one in controller.definitions)
            for version in spec["versions"]
        }

    async def manifest(self, document: Document) -> Manifest:
        """Return the object to apply, with its path and an annotation of its file's digest.

        Raises:
            ConfigurationError: The API server doesn't know its kind.
        """
        version, kind = str(document["apiVersion"]), str(document["kind"])
        found = self._own.get((version, kind)) or (await self._of(version)).get(kind)
        if found is None:
            raise ConfigurationError(
                f"the cluster has no kind {kind} of {version}, which {self._name} needs; take a "
                "release for this version of Kubernetes"
            )
        plural, namespaced = found
        metadata = dict(document["metadata"])
        metadata["annotations"] = {**(metadata.get("annotations") or {}), DIGEST: self._digest}
        where = ""
        if namespaced:
            metadata.setdefault("namespace", "default")
            where = f"/namespaces/{metadata['namespace']}"
        path = f"{_root(version)}{where}/{plural}/{metadata['name']}"
        return Manifest(path=path, document={**document, "metadata": metadata})

    async def _of(self, version: str) -> Mapping[str, tuple[str, bool]]:
        async with self._turn:
            if version not in self._known:
                try:
                    found = await self._api.call("GET", _root(version))
                except NotFound:
                    found = {}
                self._known[version] = {
                    str(one["kind"]): (str(one["name"]), bool(one["namespaced"]))
                    for one in found.get("resources") or ()
                    if "/" not in str(one["name"])
                }
            return self._known[version]

    async def served(self, definition: Document) -> None:
        """Wait until the API server serves all versions of a new kind.

        Raises:
            Unavailable: The API server doesn't serve them within `SERVED_S` seconds.
        """
        spec: Document = definition["spec"]
        wanted = [one["name"] for one in spec["versions"] if one.get("served")]
        try:
            async with asyncio.timeout(SERVED_S):
                async for there in self._versions(spec):
                    if there.issuperset(wanted):
                        return
        except TimeoutError:
            raise Unavailable(
                f"the API server doesn't serve {definition['metadata']['name']} within "
                f"{SERVED_S:g} s; run the command again",
                retryable=True,
            ) from None

    async def _versions(self, spec: Document) -> AsyncGenerator[set[str]]:
        while True:
            there: set[str] = set()
            for one in spec["versions"]:
                try:
                    found = await self._api.call("GET", f"/apis/{spec['group']}/{one['name']}")
                except NotFound:
                    continue
                if any(each["name"] == spec["names"]["plural"] for each in found["resources"]):
                    there.add(one["name"])
            yield there
            await asyncio.sleep(LOOK_S)


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"
