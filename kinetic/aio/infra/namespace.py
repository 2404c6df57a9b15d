"""Create the objects that a namespace needs before its first job, by server-side apply."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from kinetic.aio.infra.resources import Action, Change, differences
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.rights import MANIFEST, binding_of, subject
from kinetic.aio.kubernetes.sets import KINDS
from kinetic.errors import NotFound

SETS = tuple(kind.group for kind in KINDS.values())
"""The API groups of the controllers that run jobs on several hosts."""

NO_SETS_NOTE = (
    "jobs on several hosts need LeaderWorkerSet, which isn't installed; choose a VERSION at "
    "https://github.com/kubernetes-sigs/lws/releases, download its manifests.yaml, and run the "
    "command again with --controller manifests.yaml"
)
"""The note of a plan for a cluster that has no controller for jobs on several hosts."""

APPLY = "application/apply-patch+yaml"
PATHS = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One object of the cluster that `up` or `init` applies."""

    path: str
    document: Mapping[str, Any]

    @property
    def change(self) -> Change:
        """Return the change that creates this object."""
        return Change(
            action=Action.CREATE,
            kind=str(self.document["kind"]),
            name=str(self.document["metadata"]["name"]),
        )


def manifests(namespace: str, account: str = "", user: str = "") -> tuple[Manifest, ...]:
    """Return the objects of *namespace*, the namespace first.

    *account* is the Google service account that the pods act as. A separate binding permits *user*
    to submit jobs; without *user*, only administrators of the cluster can submit jobs.
    """
    import yaml

    templates: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        *yaml.safe_load_all(MANIFEST.read_text()),
    ]
    prepared: list[Manifest] = []
    for document in templates:
        kind, metadata = str(document["kind"]), dict(document["metadata"])
        if kind != "Namespace":
            metadata["namespace"] = namespace
        if kind == "ServiceAccount" and account:
            metadata["annotations"] = {"iam.gke.io/gcp-service-account": account}
        if kind == "RoleBinding" and metadata["name"] == "kinetic":
            if not user:
                continue
            metadata["name"] = binding_of(user)
            document = {**document, "subjects": [subject(user)]}
        if kind == "RoleBinding":
            subjects = [
                {"namespace": namespace, **item} if item["kind"] == "ServiceAccount" else item
                for item in document["subjects"]
            ]
            document = {**document, "subjects": subjects}
        parent = PATHS[kind].format(namespace=namespace)
        name = urllib.parse.quote(metadata["name"], safe="")
        prepared.append(
            Manifest(path=f"{parent}/{name}", document={**document, "metadata": metadata})
        )
    return tuple(prepared)


async def compare(api: Api, manifest: Manifest) -> Change:
    """Compare *manifest* with the object in the cluster; return the change that it needs."""
    try:
        existing = await api.call("GET", manifest.path)
    except NotFound:
        return manifest.change
    changed = [*differences(manifest.document, existing)]
    action = Action.UPDATE if changed else Action.KEEP
    return replace(manifest.change, action=action, reason="; ".join(changed))


async def apply(api: Api, manifest: Manifest) -> None:
    """Create or update an object; fields that only other programs have set stay unchanged."""
    query = {"fieldManager": "kinetic", "force": "true"}
    await api.call("PATCH", manifest.path, query=query, body=manifest.document, content_type=APPLY)


async def has_sets(api: Api) -> bool:
    """Return whether the cluster has a controller for jobs on several hosts."""
    for group in SETS:
        with suppress(NotFound):
            await api.call("GET", f"/apis/{group}")
            return True
    return False


def as_yaml(wanted: tuple[Manifest, ...]) -> str:
    """Return the manifests as YAML documents, for an administrator to apply."""
    import yaml

    documents = json.loads(json.dumps([manifest.document for manifest in wanted]))
    return str(yaml.safe_dump_all(documents, default_flow_style=None, sort_keys=False, width=100))
