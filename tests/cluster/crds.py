"""The kinds LeaderWorkerSet and JobSet, as far as their published descriptions matter here.

Pod and job templates are taken as they come: the API server looks at what is made of them.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

INTEGER: Json = {"type": "integer", "format": "int32", "minimum": 0}
STRING: Json = {"type": "string"}
BOOLEAN: Json = {"type": "boolean"}
ANYTHING: Json = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def _object(*required: str, **fields: Json) -> Json:
    return {
        "type": "object",
        "properties": fields,
        **({"required": [*required]} if required else {}),
    }


def _one_of(*words: str) -> Json:
    return {"type": "string", "enum": [*words]}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


LEADER_WORKER_SET = _object(
    "leaderWorkerTemplate",
    replicas=INTEGER | {"default": 1},
    startupPolicy=_one_of("LeaderCreated", "LeaderReady") | {"default": "LeaderCreated"},
    leaderWorkerTemplate=_object(
        "workerTemplate",
        leaderTemplate=ANYTHING,
        workerTemplate=ANYTHING,
        size=INTEGER | {"default": 1},
        restartPolicy=_one_of("Default", "RecreateGroupOnPodRestart", "None")
        | {"default": "RecreateGroupOnPodRestart"},
    ),
)
JOB_SET = _object(
    replicatedJobs=_list(
        _object(
            "name",
            "template",
            name=STRING,
            replicas=INTEGER | {"default": 1},
            template=ANYTHING,
        )
    ),
    network=_object(enableDNSHostnames=BOOLEAN, subdomain=STRING, publishNotReadyAddresses=BOOLEAN),
    successPolicy=_object("operator", operator=_one_of("All", "Any")),
    failurePolicy=_object(maxRestarts=INTEGER),
    suspend=BOOLEAN,
    ttlSecondsAfterFinished=INTEGER,
)


def definition(kind: str, group: str, version: str, spec: Json) -> Json:
    """A CustomResourceDefinition, with a status that is written apart."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "properties": {"spec": spec, "status": ANYTHING}}
    served = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # Groups below k8s.io are for projects that were approved; these are.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": group,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
            },
            "scope": "Namespaced",
            "versions": [served],
        },
    }


DEFINITIONS = (
    definition("LeaderWorkerSet", "leaderworkerset.x-k8s.io", "v1", LEADER_WORKER_SET),
    definition("JobSet", "jobset.x-k8s.io", "v1alpha2", JOB_SET),
)
LABEL = "leaderworkerset.sigs.k8s.io"
COMPLETED = f"{LABEL}/group-index"
TRIAL: Json = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "trial-0",
        "labels": {f"{LABEL}/name": "trial", f"{LABEL}/worker-index": "0"},
        "annotations": {f"{LABEL}/size": "1"},
    },
    "spec": {"containers": [{"name": "main", "image": "example.org/python:1"}]},
}
"""A pod that the webhook gives the label `COMPLETED`, once the API server asks it."""


def collections() -> list[str]:
    """Where the sets of all namespaces are."""
    specs = (one["spec"] for one in DEFINITIONS)
    return [
        f"/apis/{one['group']}/{one['versions'][0]['name']}/{one['names']['plural']}"
        for one in specs
    ]


def webhook(port: int, ca: str) -> Json:
    """Pods of a LeaderWorkerSet are completed by the stand-in; *ca* is base64."""
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "leaderworkerset"},
        "webhooks": [
            {
                "name": "pods.leaderworkerset.example",
                "clientConfig": {"url": f"https://127.0.0.1:{port}/complete", "caBundle": ca},
                "rules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "operations": ["CREATE"],
                        "resources": ["pods"],
                    }
                ],
                "objectSelector": {
                    "matchExpressions": [{"key": f"{LABEL}/name", "operator": "Exists"}]
                },
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "timeoutSeconds": 10,
            }
        ],
    }


def compute_class() -> Json:
    """GKE's ComputeClass, as far as its published description matters here: no other field."""
    accelerator = {"type": STRING, "count": INTEGER}
    rule = _object(
        machineType=STRING,
        spot=BOOLEAN,
        location=_object("zones", zones=_list(STRING)),
        gpu=_object("type", "count", **accelerator, driverVersion=_one_of("default", "latest")),
        tpu=_object("type", "count", "topology", **accelerator, topology=STRING),
    )
    spec = _object(
        "priorities",
        nodePoolAutoCreation=_object("enabled", enabled=BOOLEAN),
        nodePoolConfig=_object(serviceAccount=STRING),
        priorities=_list(rule),
        whenUnsatisfiable=_one_of("DoNotScaleUp", "ScaleUpAnyway"),
    )
    made = definition("ComputeClass", "cloud.google.com", "v1", spec)
    names = {**made["spec"]["names"], "plural": "computeclasses"}
    made["metadata"]["name"] = "computeclasses.cloud.google.com"
    return {**made, "spec": {**made["spec"], "names": names, "scope": "Cluster"}}
