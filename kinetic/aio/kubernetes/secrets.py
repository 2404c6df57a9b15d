"""The Secrets of one namespace: the root key, and one Secret for the pods of each submission."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from kinetic._tasks import for_each
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.diagnosis.documents import Document, get_dict, get_list
from kinetic.aio.kubernetes.manifests import (
    LABEL,
    MAX_SECRET_BYTES,
    NAME,
    Paths,
    label_value,
    object_name,
    secret_manifest,
    usual_labels,
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
"""The entry with what `Secrets.keep` stored, in a Secret of its own."""

SUBMISSION = "kinetic.dev/submission"
"""The label with the submission that a Secret belongs to."""

FENCE = "kinetic.dev/fence"
"""The annotation with the fence, a number that grows when another client takes over a batch."""

MAX_CONCURRENT_DELETIONS = 16
"""How many Secrets one call deletes at a time."""


def submission_secret(job: JobSpec) -> str:
    """Return the name of the Secret that the pods of *job* read.

    All jobs of a batch share one Secret; a single job has its own.
    """
    return object_name(job.order.group_id or job.name, longest=LABEL)


def lacks_own_secret(job: Document | None, missing: str) -> str:
    """Return *missing* if this is the name of the job's own Secret; else an empty text.

    A client creates a single job's Secret right after the job. If the client dies in between, the
    Secret never exists.
    """
    metadata = get_dict(job, "metadata")
    job_names = (
        get_dict(metadata, "annotations").get(NAME),
        get_dict(metadata, "labels").get(SUBMISSION),
    )
    own_secrets = (object_name(str(job_name), longest=LABEL) for job_name in job_names if job_name)
    return missing if missing in own_secrets else ""


def _kept_secret_name(name: str) -> str:
    return object_name(f"kept-{name}", longest=LABEL)


class Secrets:
    """The Secrets of a namespace. The object remembers only Secrets that it made for batches.

    A batch has one Secret for its pods. A fence is a number that grows when another client takes
    over the batch. Each client creates the Secret, or marks it with its fence, before it launches
    jobs. The client that completes the batch deletes the Secret. A client that lost the batch to
    another finds a later fence and doesn't delete the Secret, however late its request arrives.
    """

    def __init__(self, api: Api, paths: Paths) -> None:
        self._api = api
        self._paths = paths
        self._creations: dict[str, tuple[int, asyncio.Task[None]]] = {}

    async def root_key(self) -> bytes:
        """Return the namespace's root key; the first client creates it.

        Raises:
            ConfigurationError: The Secret doesn't contain a valid key.
        """
        try:
            return _decode_root_key(await self._read(ROOT_KEY))
        except NotFound:
            pass
        manifest = self._manifest(ROOT_KEY, {ROOT_KEY_ENTRY: os.urandom(ROOT_BYTES)}, ROOT_KEY)
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
        if len(content) > MAX_SECRET_BYTES:
            raise ConfigurationError(
                f"{name} has {len(content)} bytes for a Secret, which holds {MAX_SECRET_BYTES}; "
                "capture fewer variables of the environment, or ship the content as Data"
            )
        manifest = self._manifest(_kept_secret_name(name), {CONTENT_ENTRY: content}, name)

        async def replace_content() -> bool:
            await self._api.call("PUT", self._path(_kept_secret_name(name)), body=manifest)
            return True

        await self._create_or(manifest, replace_content)

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

        async def drop_one(name: str) -> None:
            await self._wait_for_creation(name)
            await self._delete(_kept_secret_name(name))
            await self._delete(object_name(name, longest=LABEL))

        await for_each(drop_one, names, limit=MAX_CONCURRENT_DELETIONS)

    async def finish(self, name: str, fence: int) -> None:
        """Delete the Secret for the pods of batch *name*, unless its fence exceeds *fence*."""
        await self._wait_for_creation(name)
        path = self._path(object_name(name, longest=LABEL))
        try:
            metadata = get_dict(await self._api.call("GET", path), "metadata")
            if int(get_dict(metadata, "annotations").get(FENCE) or 0) > fence:
                return
            preconditions = {key: metadata[key] for key in ("uid", "resourceVersion")}
            await self._api.call("DELETE", path, body={"preconditions": preconditions})
        except (NotFound, Conflict):
            return  # another client has deleted or marked the Secret since it was read

    async def _wait_for_creation(self, name: str) -> None:
        """Wait until a creation in progress has ended, so that it doesn't follow a deletion."""
        _, creation = self._creations.pop(object_name(name, longest=LABEL), (0, None))
        if creation is not None:
            await asyncio.wait({creation})

    async def ensure(self, job: JobSpec, name: str) -> None:
        """Create the Secret of a batch before its first job; concurrent calls create it once."""
        fence = job.order.fence
        known_fence, creation = self._creations.get(name, (0, None))
        failed = (
            creation is not None
            and creation.done()
            and (creation.cancelled() or creation.exception())
        )
        if creation is None or failed or known_fence != fence:
            creation = asyncio.create_task(
                self._create_for_batch(job, name), name=f"kinetic secret {name}"
            )
            self._creations[name] = fence, creation
            creation.add_done_callback(_retrieve_exception)
        await asyncio.shield(creation)

    async def give(self, job: JobSpec, name: str, owner: Mapping[str, Any]) -> None:
        """Create the Secret of a single job; Kubernetes deletes it with *owner*, the Job."""
        labels = self._labels(job)
        manifest = secret_manifest(job, name, self._paths.namespace, labels=labels, owner=owner)

        async def check_owner() -> bool:
            existing = get_dict(await self._read(name), "metadata")
            owners = {
                str(reference.get("uid")) for reference in get_list(existing, "ownerReferences")
            }
            if owners == {str(owner["metadata"]["uid"])}:
                return True
            # The Secret belongs to an earlier Job of this name. Kubernetes will delete it soon.
            options = {"preconditions": {"uid": existing["uid"]}}
            await self._api.call("DELETE", self._path(name), body=options)
            return False

        await self._create_or(manifest, check_owner)

    async def aclose(self) -> None:
        """Cancel creations in progress."""
        tasks = [task for _, task in self._creations.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _create_for_batch(self, job: JobSpec, name: str) -> None:
        """Create a batch's Secret. If it exists, only raise its fence: its content is fixed.

        The fence is the number of the newest submitter. An older submitter, whose number is lower,
        then doesn't delete the Secret.
        """
        fence = job.order.fence
        manifest = secret_manifest(job, name, self._paths.namespace, labels=self._labels(job))
        manifest["metadata"]["annotations"] = {FENCE: str(fence)}

        async def mark() -> bool:
            existing = await self._read(name)
            known_annotations = get_dict(get_dict(existing, "metadata"), "annotations")
            if int(known_annotations.get(FENCE) or 0) < fence:
                annotations = {**known_annotations, FENCE: str(fence)}
                metadata = {**get_dict(existing, "metadata"), "annotations": annotations}
                body = {**existing, "metadata": metadata}
                await self._api.call("PUT", self._path(name), body=body)
            return True

        await self._create_or(manifest, mark)

    async def _create_or(
        self, manifest: Mapping[str, Any], settle: Callable[[], Awaitable[bool]]
    ) -> None:
        """Create *manifest*; if its name is taken, call *settle*. Repeat until either succeeds.

        *settle* returns True if the existing Secret serves as well, and False after deleting it.
        """
        while True:
            try:
                await self._create(manifest)
                return
            except AlreadyThere:
                pass
            try:
                if await settle():
                    return
            except (NotFound, Conflict):
                continue  # another client removed or changed the Secret: start over

    def _labels(self, job: JobSpec) -> dict[str, str]:
        submission = job.labels.get(SUBMISSION, job.name)
        return usual_labels(submission) | {SUBMISSION: submission}

    def _manifest(self, name: str, content: Mapping[str, bytes], submission: str) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {
                "name": name,
                "namespace": self._paths.namespace,
                "labels": usual_labels(submission) | {SUBMISSION: label_value(submission)},
                "annotations": {NAME: submission},
            },
            "data": {key: base64.b64encode(value).decode() for key, value in content.items()},
        }

    async def _create(self, manifest: Mapping[str, Any]) -> Document:
        return await self._api.call("POST", self._paths.secrets, body=manifest)

    async def _read(self, name: str) -> Document:
        return await self._api.call("GET", self._path(name))

    async def _delete(self, name: str) -> None:
        with contextlib.suppress(NotFound):
            await self._api.call("DELETE", self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._paths.secrets}/{name}"


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # retrieved, because every caller that waited may have been cancelled


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
            "restore the earlier key, or delete the Secret to have another one created; results "
            "that were signed with the earlier key can then no longer be read"
        )
    return key
