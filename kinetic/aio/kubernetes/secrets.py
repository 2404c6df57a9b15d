"""The Secrets of one namespace: the root key, and one Secret for the pods of each submission."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from kinetic._labels import SUBMISSION
from kinetic._tasks import end_all, for_each
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.diagnosis.documents import (
    Document,
    annotations_of,
    get_dict,
    get_list,
    labels_of,
)
from kinetic.aio.kubernetes.manifests import (
    LABEL_LENGTH,
    NAME,
    Paths,
    object_name,
    opaque_secret,
    secret_manifest,
)
from kinetic.aio.ports import JobSpec
from kinetic.errors import AlreadyThere, ConfigurationError, Conflict, NotFound

ROOT_KEY = "kinetic-root-key"
"""The name of the Secret with the namespace's root key."""

ROOT_BYTES = 32
"""Bytes of the root key."""

ROOT_KEY_ENTRY = "key"
"""The entry with the root key, in its Secret."""

CONTENT_ENTRY = "content"
"""The entry with what `Secrets.keep` stored, in the Secret for one name."""

FENCE = "kinetic.dev/fence"
"""The annotation with the fence, a number that grows when another client takes over a batch."""

MAX_CONCURRENT_REQUESTS = 16
"""How many requests one call of a method sends at a time."""


def submission_secret(job: JobSpec) -> str:
    """Return the name of the Secret that the pods of *job* read.

    All jobs of a batch share one Secret; a single job has its own.
    """
    return object_name(job.order.group_id or job.name, longest=LABEL_LENGTH)


def missing_own_secret(job: Document | None, missing: str) -> str:
    """Return *missing* if this is the name of the job's own Secret; else an empty text.

    A client creates a single job's Secret right after the job. If the client dies in between, the
    Secret never exists.
    """
    names = (annotations_of(job).get(NAME), labels_of(job).get(SUBMISSION))
    own_secrets = [object_name(str(name), longest=LABEL_LENGTH) for name in names if name]
    return missing if missing in own_secrets else ""


def _kept_secret_name(name: str) -> str:
    return object_name(f"kept-{name}", longest=LABEL_LENGTH)


class Secrets:
    """The Secrets of a namespace. This object remembers only Secrets that it created for batches.

    A batch has one Secret for its pods. A fence is a number that grows when another client takes
    over the batch. Each client creates the Secret, or marks it with its fence, before it launches
    jobs. The client that completes the batch deletes the Secret. A client that lost the batch to
    another finds a larger fence and doesn't delete the Secret.
    """

    def __init__(self, api: Api, paths: Paths) -> None:
        self._api = api
        self._paths = paths
        self._creations: dict[tuple[str, int], asyncio.Task[None]] = {}  # by name and fence

    async def root_key(self) -> bytes:
        """Return the namespace's root key; the first client creates it.

        Raises:
            ConfigurationError: The Secret doesn't contain a valid key.
        """
        with contextlib.suppress(NotFound):
            return _decode_root_key(await self._read(ROOT_KEY))
        content = {ROOT_KEY_ENTRY: os.urandom(ROOT_BYTES)}
        manifest = opaque_secret(ROOT_KEY, self._paths.namespace, content, ROOT_KEY)
        try:
            secret = await self._create(manifest | {"immutable": True})
        except AlreadyThere:  # another client, or an earlier try of this request, created it
            secret = await self._read(ROOT_KEY)
        return _decode_root_key(secret)

    async def keep(self, name: str, content: bytes) -> None:
        """Store *content* under *name*, replacing earlier content of this name.

        Raises:
            ConfigurationError: *content* is too large.
        """
        secret_name = _kept_secret_name(name)
        namespace = self._paths.namespace
        manifest = opaque_secret(secret_name, namespace, {CONTENT_ENTRY: content}, name)

        async def replace_content() -> bool:
            await self._api.call("PUT", self._path(secret_name), body=manifest)
            return True

        await self._create_or_reuse(manifest, replace_content)

    async def kept(self, name: str) -> bytes:
        """Return the content that `keep` stored under *name*.

        Raises:
            NotFound: No content is stored under *name*.
        """
        try:
            return _decode_entry(await self._read(_kept_secret_name(name)), CONTENT_ENTRY)
        except NotFound as exc:
            raise NotFound(
                f"there is no secret {name!r} in namespace {self._paths.namespace} of "
                f"{self._api.cluster}"
            ) from exc

    async def drop(self, names: Collection[str]) -> None:
        """Delete what `keep` stored for the batches *names*, and the Secrets for their pods."""
        secret_names = [object_name(name, longest=LABEL_LENGTH) for name in names]
        await self._wait_for_creations(secret_names)
        kept_names = [_kept_secret_name(name) for name in names]
        await for_each(self._delete, [*kept_names, *secret_names], limit=MAX_CONCURRENT_REQUESTS)

    async def finish(self, name: str, fence: int) -> None:
        """Delete the Secret for the pods of batch *name*, unless its fence exceeds *fence*."""
        name = object_name(name, longest=LABEL_LENGTH)
        await self._wait_for_creations([name])
        # If another client has deleted or marked the Secret since it was read, keep it.
        with contextlib.suppress(NotFound, Conflict):
            secret = await self._read(name)
            if _fence_of(secret) <= fence:  # a larger one is of a client that took the batch over
                await self._delete_version(secret, "uid", "resourceVersion")

    async def _wait_for_creations(self, names: Collection[str]) -> None:
        """Wait until creations in progress have ended, so that they don't follow a deletion."""
        for key in [key for key in self._creations if key[0] in names]:
            await asyncio.wait({self._creations.pop(key)})

    async def ensure_for_batch(self, job: JobSpec, name: str) -> None:
        """Create the Secret of a batch before its first job; concurrent calls create it once."""
        key = name, job.order.fence
        creation = self._creations.get(key)
        if creation is None or (creation.done() and (creation.cancelled() or creation.exception())):
            creation = asyncio.create_task(self._create_for_batch(job, name), name="kinetic secret")
            self._creations[key] = creation
        await asyncio.shield(creation)

    async def aclose(self) -> None:
        """Cancel creations in progress."""
        await end_all(self._creations.values())

    async def _create_for_batch(self, job: JobSpec, name: str) -> None:
        """Create a batch's Secret. If it exists, only raise its fence: its content is fixed."""
        fence = job.order.fence
        manifest = secret_manifest(job, name, self._paths.namespace)
        manifest["metadata"]["annotations"][FENCE] = str(fence)

        async def mark() -> bool:
            existing = await self._read(name)
            if _fence_of(existing) < fence:  # so that no older submitter deletes the Secret
                annotations = {**annotations_of(existing), FENCE: str(fence)}
                metadata = {**get_dict(existing, "metadata"), "annotations": annotations}
                body = {**existing, "metadata": metadata}
                await self._api.call("PUT", self._path(name), body=body)
            return True

        await self._create_or_reuse(manifest, mark)

    async def create_for_job(self, job: JobSpec, name: str, owner: Mapping[str, Any]) -> None:
        """Create the Secret of a single job; Kubernetes deletes it with *owner*, the Job."""
        manifest = secret_manifest(job, name, self._paths.namespace, owner)

        async def check_owner() -> bool:
            existing = await self._read(name)
            owners = get_list(get_dict(existing, "metadata"), "ownerReferences")
            if [reference.get("uid") for reference in owners] == [owner["metadata"]["uid"]]:
                return True
            # The Secret belongs to an earlier Job of this name. Kubernetes will delete it soon.
            await self._delete_version(existing, "uid")
            return False

        await self._create_or_reuse(manifest, check_owner)

    async def _create_or_reuse(
        self, manifest: Mapping[str, Any], reuse: Callable[[], Awaitable[bool]]
    ) -> None:
        """Create *manifest*; if its name is taken, call *reuse*. Repeat until either succeeds.

        *reuse* returns True if the existing Secret serves as well, and False after deleting it.
        """
        while True:
            with contextlib.suppress(AlreadyThere):
                await self._create(manifest)
                return
            # If another client has removed or changed the Secret meanwhile, start over.
            with contextlib.suppress(NotFound, Conflict):
                if await reuse():
                    return

    async def _create(self, manifest: Mapping[str, Any]) -> Document:
        return await self._api.call("POST", self._paths.secrets, body=manifest)

    async def _read(self, name: str) -> Document:
        return await self._api.call("GET", self._path(name))

    async def _delete(self, name: str) -> None:
        with contextlib.suppress(NotFound):
            await self._api.call("DELETE", self._path(name))

    async def _delete_version(self, secret: Document, *keys: str) -> None:
        """Delete *secret*, unless its metadata under *keys* has changed since it was read."""
        metadata = get_dict(secret, "metadata")
        options = {"preconditions": {key: metadata[key] for key in keys}}
        await self._api.call("DELETE", self._path(str(metadata["name"])), body=options)

    def _path(self, name: str) -> str:
        return f"{self._paths.secrets}/{name}"


def _fence_of(secret: Document) -> int:
    return int(annotations_of(secret).get(FENCE) or 0)


def _decode_entry(secret: Document, entry: str) -> bytes:
    return base64.b64decode(str(get_dict(secret, "data").get(entry) or ""))


def _decode_root_key(secret: Document) -> bytes:
    try:
        key = _decode_entry(secret, ROOT_KEY_ENTRY)
    except binascii.Error:
        key = b""
    if len(key) != ROOT_BYTES:
        namespace = get_dict(secret, "metadata").get("namespace")
        raise ConfigurationError(
            f"Secret {ROOT_KEY!r} in namespace {namespace!r} holds no key of {ROOT_BYTES} bytes: "
            "restore the earlier key, or delete the Secret, so that kinetic creates another one; "
            "kinetic then can't read results that were signed with the earlier key"
        )
    return key
