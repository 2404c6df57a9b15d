"""Install controllers from downloaded manifests: LeaderWorkerSet, JobSet, or Kueue."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kinetic._tasks import for_each
from kinetic.aio.infra.namespace import Manifest, apply
from kinetic.aio.infra.resources import Action, Change, Document
from kinetic.aio.kubernetes.api import Api
from kinetic.errors import ConfigurationError, NotFound, Unavailable

DIGEST_KEY = "kinetic.dev/sha256"
"""The annotation of an object with the SHA-256 of the file that defines it."""

DIGEST_MARK = "@sha256:"
MAX_CONCURRENT_REQUESTS = 8
"""How many objects to read or apply at a time."""

SERVING_TIMEOUT_S = 60.0
"""Maximum seconds until the API server serves a new kind."""

POLL_S = 0.2
DEFINITION_KIND = "CustomResourceDefinition"
FIRST_KINDS = (DEFINITION_KIND, "Namespace")
LAST_KINDS = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
"""Kinds to apply last. Such a webhook makes the API server ask the controller's server about other
objects, so the objects of the controller's server must exist first."""

KUEUE_CONFIGURATION = ("kueue-manager-config", "controller_manager_config.yaml")
"""The names of the ConfigMap with Kueue's configuration, and of its entry in the ConfigMap."""

PODS_READY = "waitForPodsReady:\n  timeout: 2h\n  recoveryTimeout: 0s\n"
"""How long pods that Kueue admitted may wait for nodes. Kueue's default, 30 minutes, is too short:
GKE takes up to 35 minutes to find that a zone has no TPU slice, and then tries again. With a
``recoveryTimeout``, Kueue would take back a batch of which a worker has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """A controller as a file of manifests; ``digest`` is the SHA-256 of the file."""

    name: str
    digest: str
    documents: tuple[Document, ...]

    @property
    def change(self) -> Change:
        """Return the change that installs the controller."""
        summary = f"{len(self.documents)} objects, sha256:{self.digest}"
        return Change(action=Action.CREATE, kind="controller", name=self.name, reason=summary)

    @property
    def groups(self) -> frozenset[str]:
        """Return the API groups of the kinds that the controller defines."""
        return frozenset(str(definition["spec"]["group"]) for definition in self.definitions)

    @property
    def definitions(self) -> tuple[Document, ...]:
        """Return the CustomResourceDefinitions of the controller."""
        return tuple(document for document in self.documents if document["kind"] == DEFINITION_KIND)


def read_controller(argument: str) -> Controller:
    """Read a controller's manifests from ``FILE`` or ``FILE@sha256:DIGEST``. Reads the disk.

    Raises:
        ConfigurationError: The file can't be read, has another digest, or has no manifests.
    """
    name, _, expected_digest = argument.partition(DIGEST_MARK)
    try:
        content = Path(name).expanduser().read_bytes()
    except OSError as exc:
        raise ConfigurationError(f"can't read the controller {name}: {exc.strerror}") from exc
    digest = hashlib.sha256(content).hexdigest()
    if expected_digest and expected_digest.lower() != digest:
        raise ConfigurationError(
            f"{name} has the SHA-256 {digest}, not {expected_digest.lower()}; download it again, "
            "and check the digest where you got it"
        )
    return Controller(name=Path(name).name, digest=digest, documents=_documents(name, content))


def _documents(name: str, content: bytes) -> tuple[Document, ...]:
    """Parse the file *name*: unpack Lists, omit ``status``, and set kinetic's Kueue options."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        loaded: list[Any] = [*yaml.load_all(content, loader)]
    except yaml.YAMLError as exc:
        raise ConfigurationError(f"{name} isn't YAML: {exc}") from exc
    documents: list[Any] = []
    for document in loaded:
        match document:
            case None:
                continue
            case {"items": list()}:  # a List
                documents += document["items"]
            case _:
                documents.append(document)
    if not documents or not all(map(_is_manifest, documents)):
        raise ConfigurationError(
            f"{name} isn't a file of Kubernetes manifests; name a file such as the manifests.yaml "
            "of a release"
        )
    return tuple(
        _with_pods_ready({key: value for key, value in manifest.items() if key != "status"})
        for manifest in documents
    )


def _with_pods_ready(document: Document) -> Document:
    """Add `PODS_READY` to *document*, if it is Kueue's configuration."""
    name, key = KUEUE_CONFIGURATION
    if (document["kind"], document["metadata"]["name"]) != ("ConfigMap", name):
        return document
    data: Document = document.get("data") or {}
    text = str(data.get(key) or "")
    # Before v1beta2, Kueue has no default limit. A limit of the user stays.
    has_default_limit = re.search(r"^apiVersion: .*/v1beta2$", text, re.MULTILINE)
    if not has_default_limit or re.search("^waitForPodsReady:", text, re.MULTILINE):
        return document
    return {**document, "data": {**data, key: f"{text.rstrip()}\n{PODS_READY}"}}


def _is_manifest(value: object) -> bool:
    match value:
        case {"apiVersion": str(), "kind": str(), "metadata": {"name": str()}}:
            return True
        case _:
            return False


async def plan_install(api: Api, controller: Controller) -> Change:
    """Return the change that *controller* needs: KEEP if all objects have the file's digest."""
    kinds = Kinds(api, controller)
    unchanged_count = 0

    async def count_if_unchanged(document: Document) -> None:
        nonlocal unchanged_count
        try:
            existing = await api.call("GET", (await kinds.manifest(document)).path)
        except NotFound:
            return
        annotations: Document = existing["metadata"].get("annotations") or {}
        unchanged_count += annotations.get(DIGEST_KEY) == controller.digest

    await for_each(count_if_unchanged, controller.documents, limit=MAX_CONCURRENT_REQUESTS)
    if unchanged_count == len(controller.documents):
        return replace(controller.change, action=Action.KEEP, reason="")
    if not unchanged_count:
        return controller.change
    reason = f"{len(controller.documents) - unchanged_count} of {controller.change.reason}"
    return replace(controller.change, action=Action.UPDATE, reason=reason)


async def install(api: Api, controller: Controller) -> None:
    """Apply all objects of a controller: CustomResourceDefinitions first, and webhooks last.

    Cancelled: applied objects stay; install the controller again to continue.
    """
    kinds = Kinds(api, controller)

    async def apply_one(document: Document) -> None:
        await apply(api, await kinds.manifest(document))

    documents = controller.documents
    first = [document for document in documents if document["kind"] in FIRST_KINDS]
    last = [document for document in documents if document["kind"] in LAST_KINDS]
    others = [
        document for document in documents if document["kind"] not in (*FIRST_KINDS, *LAST_KINDS)
    ]
    await for_each(apply_one, first, limit=MAX_CONCURRENT_REQUESTS)
    for definition in controller.definitions:
        await kinds.wait_until_served(definition)
    for stage in (others, last):
        await for_each(apply_one, stage, limit=MAX_CONCURRENT_REQUESTS)


class Kinds:
    """Finds the API path of each object, from the controller's definitions or the API server."""

    def __init__(self, api: Api, controller: Controller) -> None:
        self._api = api
        self._digest = controller.digest
        self._name = controller.name
        # version → kind → (name of the kind in paths, whether its objects have a namespace)
        self._kinds: dict[str, dict[str, tuple[str, bool]]] = defaultdict(dict)
        for spec in (definition["spec"] for definition in controller.definitions):
            names, namespaced = spec["names"], spec["scope"] == "Namespaced"
            for version in spec["versions"]:
                kinds = self._kinds[f"{spec['group']}/{version['name']}"]
                kinds[names["kind"]] = (str(names["plural"]), namespaced)

    async def manifest(self, document: Document) -> Manifest:
        """Return *document* with its path, and with an annotation of the file's digest."""
        version, kind = str(document["apiVersion"]), str(document["kind"])
        if kind not in self._kinds[version]:
            self._kinds[version] |= await self._served_kinds(version)
        if kind not in self._kinds[version]:
            raise ConfigurationError(
                f"the cluster has no kind {kind} of {version}, which {self._name} needs; use a "
                "release for the cluster's version of Kubernetes"
            )
        plural, namespaced = self._kinds[version][kind]
        metadata = dict(document["metadata"])
        metadata["annotations"] = {**(metadata.get("annotations") or {}), DIGEST_KEY: self._digest}
        namespace_path = ""
        if namespaced:
            metadata.setdefault("namespace", "default")
            namespace_path = f"/namespaces/{metadata['namespace']}"
        path = f"{_root(version)}{namespace_path}/{plural}/{metadata['name']}"
        return Manifest(path=path, document={**document, "metadata": metadata})

    async def _served_kinds(self, version: str) -> dict[str, tuple[str, bool]]:
        """Return the kinds of *version* that the API server serves; values are as in `_kinds`."""
        try:
            answer = await self._api.call("GET", _root(version))
        except NotFound:
            return {}
        return {
            str(resource["kind"]): (str(resource["name"]), bool(resource.get("namespaced")))
            for resource in answer.get("resources") or ()
            if "/" not in str(resource["name"])
        }

    async def wait_until_served(self, definition: Document) -> None:
        """Wait until the API server serves all versions of a new kind."""
        spec: Document = definition["spec"]
        missing = [
            f"{spec['group']}/{version['name']}"
            for version in spec["versions"]
            if version.get("served")
        ]
        try:
            async with asyncio.timeout(SERVING_TIMEOUT_S):
                while missing:
                    if spec["names"]["kind"] in await self._served_kinds(missing[-1]):
                        missing.pop()
                    else:
                        await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Unavailable(
                f"the API server doesn't serve {definition['metadata']['name']} within "
                f"{SERVING_TIMEOUT_S:g} s; run the command again",
                retryable=True,
            ) from None


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"
