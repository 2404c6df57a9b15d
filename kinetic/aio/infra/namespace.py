"""What a namespace of the cluster needs before its first job, by server-side apply."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinetic.aio.infra.resources import Action, Change, differences
from kinetic.aio.kubernetes.api import Api
from kinetic.errors import NotFound

MANIFEST = Path(__file__).parents[2] / "doctor" / "namespace.yaml"
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
        """Return the change that makes it."""
        return Change(
            action=Action.CREATE,
            kind=str(self.document["kind"]),
            name=str(self.document["metadata"]["name"]),
        )


def manifests(
    namespace: str, account: str = "", submitters: Mapping[str, str] | None = None
) -> tuple[Manifest, ...]:
    """Return the objects of *namespace*, the namespace first.

    *account* is the service account of Google that the pods act as. *submitters* is the subject
    that may submit jobs; without one, whoever administers the cluster does.
    """
    import yaml

    found: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        *yaml.safe_load_all(MANIFEST.read_text()),
    ]
    made: list[Manifest] = []
    for document in found:
        kind, metadata = str(document["kind"]), dict(document["metadata"])
        if kind != "Namespace":
            metadata["namespace"] = namespace
        if kind == "ServiceAccount" and account:
            metadata["annotations"] = {"iam.gke.io/gcp-service-account": account}
        if kind == "RoleBinding" and metadata["name"] == "kinetic":
            if submitters is None:
                continue
            document = {**document, "subjects": [dict(submitters)]}
        if kind == "RoleBinding":
            subjects = [
                {**one, "namespace": namespace} if one["kind"] == "ServiceAccount" else one
                for one in document["subjects"]
            ]
            document = {**document, "subjects": subjects}
        parent = PATHS[kind].format(namespace=namespace)
        made.append(
            Manifest(
                path=f"{parent}/{metadata['name']}", document={**document, "metadata": metadata}
            )
        )
    return tuple(made)


async def compared(
    api: Api, wanted: tuple[Manifest, ...]
) -> AsyncGenerator[tuple[Manifest, Change]]:
    """Yield each object with what to do about it."""
    for one in wanted:
        change = one.change
        try:
            there = await api.call("GET", one.path)
        except NotFound:
            yield one, change
            continue
        found = [*differences(one.document, there)]
        action = Action.UPDATE if found else Action.KEEP
        yield (
            one,
            Change(action=action, kind=change.kind, name=change.name, reason="; ".join(found)),
        )


async def apply(api: Api, one: Manifest) -> None:
    """Create or update *one*; what others set in it stays."""
    query = {"fieldManager": "kinetic", "force": "true"}
    await api.call("PATCH", one.path, query=query, body=one.document, content_type=APPLY)


def as_yaml(wanted: tuple[Manifest, ...]) -> str:
    """Return them for whoever may apply them."""
    import yaml

    documents = json.loads(json.dumps([one.document for one in wanted]))
    return str(yaml.safe_dump_all(documents, default_flow_style=None, sort_keys=False, width=100))
