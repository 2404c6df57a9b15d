"""A stateful stand-in for Google's control APIs, based on Google's published discovery documents.

It checks every request against the documents that google-api-python-client ships. Like Google, it
refuses an unknown path, query, or field, a wrong type or enum, and an output-only or deprecated
field. It keeps the created resources, so that a second run finds them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from aiohttp import web

NAMES = (
    "artifactregistry.v1",
    "cloudbilling.v1",
    "cloudresourcemanager.v3",
    "compute.v1",
    "container.v1",
    "iam.v1",
    "secretmanager.v1",
    "serviceusage.v1",
    "storage.v1",
)
WRITES = ("POST", "PUT", "PATCH", "DELETE")
READING = (":testIamPermissions", ":getIamPolicy")


class Api:
    """One discovery document: its methods and schemas."""

    def __init__(self, name: str) -> None:
        folder = files("googleapiclient") / "discovery_cache" / "documents"
        self.document = json.loads((folder / f"{name}.json").read_text())
        base = self.document["servicePath"]
        self.routes = [
            (
                method["httpMethod"],
                re.compile(
                    "/"
                    + base
                    + re.sub(
                        r"\\\{[^}]*\\\}",
                        "([^/:]+)",
                        re.escape(method.get("flatPath") or method["path"]),
                    )
                ),
                method,
            )
            for method in self._methods(self.document)
        ]

    def _methods(self, holder: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield from holder.get("methods", {}).values()
        for resource in holder.get("resources", {}).values():
            yield from self._methods(resource)

    def match(self, verb: str, path: str) -> tuple[dict[str, Any], tuple[str, ...]] | None:
        """Return the method of a request, and the parts of its path."""
        for route_verb, pattern, method in self.routes:
            if route_verb == verb and (found := pattern.fullmatch(path)):
                return method, found.groups()
        return None

    def problems(self, schema: Mapping[str, Any], value: Any, at: str = "body") -> Iterator[str]:
        """Yield each violation of the published schema in *value*."""
        if "$ref" in schema:
            schema = self.document["schemas"][schema["$ref"]]
        match schema.get("type"):
            case "object" if "properties" in schema:
                if not isinstance(value, dict):
                    yield f"{at}: not an object"
                    return
                for key, member in value.items():
                    known = schema["properties"].get(key)
                    if known is None:
                        yield f"{at}.{key}: unknown name"
                    elif known.get("readOnly") or "Output only" in known.get("description", ""):
                        yield f"{at}.{key}: output only"
                    elif known.get("deprecated"):
                        yield f"{at}.{key}: deprecated"
                    else:
                        yield from self.problems(known, member, f"{at}.{key}")
            case "object" if "additionalProperties" in schema and isinstance(value, dict):
                for key, member in value.items():
                    yield from self.problems(schema["additionalProperties"], member, f"{at}.{key}")
            case "array":
                if not isinstance(value, list):
                    yield f"{at}: not a list"
                    return
                for index, element in enumerate(value):
                    yield from self.problems(schema["items"], element, f"{at}[{index}]")
            case "string":
                if not isinstance(value, str):
                    yield f"{at}: {value!r} is not a string"
                elif "enum" in schema and value not in schema["enum"]:
                    yield f"{at}: {value!r} is none of {schema['enum']}"
            case "integer" if not isinstance(value, int) or isinstance(value, bool):
                yield f"{at}: {value!r} is not an integer"
            case "boolean" if not isinstance(value, bool):
                yield f"{at}: {value!r} is not a boolean"
            case _:
                pass


@cache
def api(name: str) -> Api:
    return Api(name)


def refusal(
    status: int, code: str, message: str, *details: dict[str, Any], reason: str = ""
) -> web.Response:
    error: dict[str, Any] = {"code": status, "message": message, "status": code}
    if details:
        error["details"] = list(details)
    if reason:
        error["errors"] = [{"reason": reason, "message": message}]
    return web.json_response({"error": error}, status=status)


@dataclass
class Google:
    """Google's APIs for one project. Tests set the faults and read the created resources.

    - ``looks``: reads of an operation until it ends.
    - ``unknown``: requests that don't know a new service account yet.
    - ``enabling``: requests that a newly enabled API refuses.
    - ``busy``: changes that a cluster refuses; ``refused`` counts them.
    - ``broken``: why a cluster refuses every change.
    - ``strict``: only one operation at a time may run on a cluster.
    - ``unlisted_zones``: zones that a listing of clusters lacks.
    - ``stockout``: zone without capacity → zones that have it.
    - ``exists``: whether the project exists; ``taken``: whether another one has its ID.
    - ``parent``: the folder or organization in which the project was created.
    - ``unbilled``: requests that don't know a new billing account yet.
    - ``on_write``: called before and after each write takes effect.
    """

    project: str = "acme-1"
    enabled: set[str] = field(default_factory=set[str])
    permissions: set[str] | None = None
    exists: bool = True
    taken: bool = False
    parent: str = ""
    billing: bool = True
    account: str = "billingAccounts/0A-0B"
    accounts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    unbilled: int = 0
    secrets: dict[str, str] = field(default_factory=dict[str, str])
    state: str = "ACTIVE"
    machines: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    quotas: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    looks: int = 1
    unknown: int = 0
    enabling: int = 0
    busy: int = 0
    broken: str = ""
    strict: bool = False
    refused: int = 0
    conflicts: int = 0
    in_use: int = 0
    released_late: int = 0
    stockout: dict[str, str] = field(default_factory=dict[str, str])
    endpoint: str = ""
    token: str = "token"
    unlisted: bool = False
    unlisted_zones: list[str] = field(default_factory=list[str])
    on_write: Callable[[int, str, str], None] = lambda number, when, request: None

    documents: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    policies: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    operations: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    requests: list[str] = field(default_factory=list[str])
    payers: set[str] = field(default_factory=set[str])
    writes: int = 0
    etag: int = 0
    objects: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """The objects that were applied in the cluster, by path."""

    silent: set[str] = field(default_factory=set[str])
    """Paths in the cluster whose requests get no answer."""

    young: Counter[str] = field(default_factory=Counter[str])
    starting: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        self.app = web.Application()
        self.app.router.add_route("*", "/{rest:.*}", self.handle)
        self.url = ""

    @property
    def environ(self) -> dict[str, str]:
        """Return the variables that make kinetic use this stand-in."""
        return {
            f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name.partition('.')[0].upper()}": (
                f"{self.url}/{name.partition('.')[0]}"
            )
            for name in NAMES
        }

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, as Google does."""
        _, name, rest = f"{request.rel_url.raw_path}/".split("/", 2)
        rest = rest.removesuffix("/")
        if name == "token":
            return web.json_response({"access_token": self.token, "expires_in": 3600})
        if name == "kubernetes":
            return await self._kubernetes(request, f"/{rest}")
        full = next(known for known in NAMES if known.partition(".")[0] == name)
        known, path = api(full), f"/{rest}"
        found = known.match(request.method, path)
        self.requests.append(f"{request.method} {name} {path}")
        self.payers.add(request.headers.get("X-Goog-User-Project", ""))
        if found is None:
            return refusal(404, "NOT_FOUND", f"no method {request.method} {path}")
        method, _parts = found
        body = await request.json() if request.can_read_body else None
        allowed = {**method.get("parameters", {}), **known.document.get("parameters", {})}
        bad = [f"query {key}" for key in request.query if key not in allowed]
        if "request" in method:
            bad += known.problems(method["request"], body or {})
        elif body:
            bad.append("a body where none is expected")
        if bad:
            return refusal(400, "INVALID_ARGUMENT", "; ".join(bad))
        if not self.exists and name != "cloudresourcemanager" and "billingAccounts" not in path:
            return refusal(403, "PERMISSION_DENIED", f"{self.project} has been deleted, or denied")
        service = f"{name}.googleapis.com"
        always = name in ("serviceusage", "cloudresourcemanager", "cloudbilling")
        if not always and (service not in self.enabled or self.starting[service] > 0):
            self.starting[service] -= service in self.enabled
            info = {"@type": "…/google.rpc.ErrorInfo", "reason": "SERVICE_DISABLED"}
            return refusal(403, "PERMISSION_DENIED", f"{service} is disabled", info)
        is_write = request.method in WRITES and not path.endswith(READING)
        if is_write:
            self.writes += 1
            number = self.writes
            self.on_write(number, "before", f"{request.method} {path}")
            await asyncio.sleep(0)
        answer = self._answer(name, method["id"], request, path, body or {})
        if is_write:
            self.on_write(number, "after", f"{request.method} {path}")
            await asyncio.sleep(0)
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    async def _kubernetes(self, request: web.Request, path: str) -> web.Response:
        if request.method == "PATCH":
            self.writes += 1
            number = self.writes
            self.on_write(number, "before", f"PATCH {path}")
            await asyncio.sleep(0)
            self.objects[path] = await request.json()
            self.on_write(number, "after", f"PATCH {path}")
            await asyncio.sleep(0)
        if path in self.silent:
            await asyncio.sleep(3600)
        if path not in self.objects:
            return web.json_response({"kind": "Status", "message": "not found"}, status=404)
        return web.json_response(self.objects[path])

    def _answer(
        self, name: str, method: str, request: web.Request, path: str, body: dict[str, Any]
    ) -> dict[str, Any] | web.Response:
        key = f"{name}{path}"
        action = method.rpartition(".")[2]
        if not self.exists and name == "cloudresourcemanager" and action != "create":
            return refusal(403, "PERMISSION_DENIED", "it may not exist")
        if action == "testIamPermissions":
            held = self.permissions
            asked = body["permissions"]
            return {"permissions": [name for name in asked if held is None or name in held]}
        if method.startswith("serviceusage.services.batch"):
            return self._services(action, request, body)
        if name == "cloudbilling":
            return self._billing(path, request, body)
        if ("getIamPolicy" in method or "setIamPolicy" in method) or path.endswith("/iam"):
            return self._policy(name, request, path, body)
        if "/operations/" in path:
            return self._operation(key)
        match name, action:
            case "cloudresourcemanager", "create":
                if self.exists or self.taken:
                    return refusal(409, "ALREADY_EXISTS", f"{body['projectId']} already exists")
                self.exists, self.billing, self.parent = True, False, body.get("parent", "")
                return self._begin(name, "")
            case "cloudresourcemanager", "get":
                return {"projectId": self.project, "state": self.state, "parent": self.parent}
            case "secretmanager", "addVersion":
                self.secrets[path.split("/")[-1].partition(":")[0]] = base64.b64decode(
                    body["payload"]["data"]
                ).decode()
                return {"name": f"{path}/versions/1", "state": "ENABLED"}
            case "secretmanager", "get" if "/versions/" in path:
                if path.split("/")[-3] not in self.secrets:
                    return refusal(404, "NOT_FOUND", path)
                return {"state": "ENABLED"}
            case "compute", "aggregatedList" if not path.endswith("/machineTypes"):
                return {"items": self._everywhere(path.rpartition("/")[2])}
            case "compute", "aggregatedList":
                wanted = re.search(r'name = "(.*?)"', request.query["filter"])
                assert wanted is not None
                return {
                    "items": {
                        f"zones/{zone}": {"machineTypes": [{"name": wanted[1]}]}
                        for zone, machines in self.machines.items()
                        if wanted[1] in machines
                    }
                }
            case "compute", "get" if "/machineTypes/" in path:
                zone, _, machine = path.split("/")[-3:]
                if machine not in self.machines.get(zone, ()):
                    return refusal(404, "NOT_FOUND", machine, reason="notFound")
                return {"name": machine}
            case "compute", "list" if path.endswith("/machineTypes"):
                zone = path.split("/")[-2]
                if zone not in self.machines:
                    return refusal(404, "NOT_FOUND", f"no zone {zone}", reason="notFound")
                return {"items": [{"name": machine} for machine in self.machines[zone]]}
            case "compute", "get" if re.search(r"/regions/[^/]+$", path):
                quotas = [
                    {"metric": metric, "limit": limit, "usage": usage}
                    for metric, (limit, usage) in self.quotas.items()
                ]
                return {"quotas": quotas}
            case "container", "list" if self.unlisted:
                return refusal(403, "PERMISSION_DENIED", "container.clusters.list is missing")
            case _, "list":
                return self._list(name, key)
            case _, "get":
                return self._get(name, key)
            case _, "insert" | "create":
                return self._make(name, key, request, body)
            case _, "delete":
                return self._delete(name, key)
            case _, "patch":
                self.documents[key] = _merged(self.documents[key], body)
                return self._copy(key)
            case "container", "update":
                wanted_config = body["update"]["desiredControlPlaneEndpointsConfig"]
                self.documents[key] = _merged(
                    self.documents[key], {"controlPlaneEndpointsConfig": wanted_config}
                )
                return self._begin(name, key)
            case "container", "setAutoscaling":
                pool = self.documents[key.removesuffix(":setAutoscaling")]
                pool["autoscaling"] = body["autoscaling"]
                return self._begin(name, key)
            case _:
                return refusal(501, "UNIMPLEMENTED", f"the stand-in doesn't know {method}")

    def _everywhere(self, kind: str) -> dict[str, Any]:
        by_location: dict[str, Any] = {}
        for path, document in self.documents.items():
            if found := re.search(rf"/((?:zones|regions)/[^/]+|global)/{kind}/[^/]+$", path):
                by_location.setdefault(found[1], {kind: []})[kind].append(self._shown(document))
        return by_location

    def _billing(self, path: str, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/billingAccounts"):
            return {"billingAccounts": self.accounts}
        if request.method == "PUT":
            self.billing, self.account = True, body["billingAccountName"]
            self.starting["billing"] = self.unbilled
        known = {"billingAccountName": self.account} if self.billing else {}
        return {"billingEnabled": self.billing, "projectId": self.project, **known}

    def _services(
        self, action: str, request: web.Request, body: dict[str, Any]
    ) -> dict[str, Any] | web.Response:
        if action == "batchGet":
            return {
                "services": [
                    {
                        "name": service,
                        "state": "ENABLED"
                        if service.rpartition("/")[2] in self.enabled
                        else "DISABLED",
                    }
                    for service in request.query.getall("names")
                ]
            }
        if not self.billing or self.starting["billing"] > 0:
            self.starting["billing"] -= 1
            return refusal(400, "FAILED_PRECONDITION", "Billing account for project is not found")
        new = set(body["serviceIds"]) - self.enabled
        self.enabled |= new
        self.starting.update(dict.fromkeys(new, self.enabling))
        return self._begin("serviceusage", "")

    def _policy(
        self, name: str, request: web.Request, path: str, body: dict[str, Any]
    ) -> dict[str, Any] | web.Response:
        key = name + path.removesuffix("/iam").partition(":")[0]
        policy = self.policies.setdefault(key, {"etag": "AAAA", "bindings": []})
        if name == "iam" and (key not in self.documents or self._is_young(key)):
            message = f"Permission '{request.path}' denied on resource (or it may not exist)."
            return refusal(403, "PERMISSION_DENIED", message)
        writes = path.endswith(":setIamPolicy") or request.method == "PUT"
        if not writes:
            return policy
        new = body if name == "storage" else body["policy"]
        if new.get("version") != 3:
            return refusal(400, "INVALID_ARGUMENT", "conditional bindings need version 3")
        if self.conflicts > 0:
            self.conflicts -= 1
            self.etag += 1
            policy["etag"] = f"E{self.etag:03d}"
            policy["bindings"].append(
                {"role": "roles/viewer", "members": [f"user:{self.etag}@x.y"]}
            )
            return refusal(409, "ABORTED", "there were concurrent policy changes")
        if new.get("etag") != policy["etag"]:
            return refusal(409, "ABORTED", "there were concurrent policy changes")
        for binding in new["bindings"]:
            for member in binding["members"]:
                if refused := self._unknown_member(member):
                    return refused
        self.etag += 1
        self.policies[key] = {
            "etag": f"E{self.etag:03d}",
            "bindings": new["bindings"],
            "version": 3,
        }
        return self.policies[key]

    def _unknown_member(self, member: str) -> web.Response | None:
        kind, _, email = member.partition(":")
        if kind != "serviceAccount":
            return None
        if ".svc.id.goog[" in email:
            if not any("/clusters/" in key for key in self.documents):
                return refusal(400, "INVALID_ARGUMENT", f"Identity Pool does not exist ({email})")
            return None
        key = f"iam/v1/projects/{self.project}/serviceAccounts/{email}"
        if key not in self.documents or self._is_young(key):
            return refusal(400, "INVALID_ARGUMENT", f"Service account {email} does not exist.")
        return None

    def _is_young(self, key: str) -> bool:
        if self.young[key] <= 0:
            return False
        self.young[key] -= 1
        return True

    def _get(self, name: str, key: str) -> dict[str, Any] | web.Response:
        document = self.documents.get(key)
        if document is None or self._is_young(key):
            return refusal(404, "NOT_FOUND", f"{key} was not found", reason="notFound")
        if foreign := document.get("_foreign"):
            return refusal(403, "PERMISSION_DENIED", str(foreign))
        if document.get("_denied"):  # the number of reads to refuse
            document["_denied"] -= 1
            return refusal(403, "PERMISSION_DENIED", "the permission isn't known here yet")
        self._progress(key)
        if "_leaves" in document:
            document["_leaves"] -= 1
            if document["_leaves"] < 0:
                self._forget(key)
        return self._copy(key) if key in self.documents else refusal(404, "NOT_FOUND", "it is gone")

    def _list(self, name: str, key: str) -> dict[str, Any]:
        if name == "container":
            clusters = [
                self._copy(path) for path in self.documents if re.search(r"/clusters/[^/]+$", path)
            ]
            return {"clusters": clusters, "missingZones": self.unlisted_zones}
        parent = f"{key}/"
        return {
            "accounts" if name == "iam" else "items": [
                self._shown(document)
                | ({"email": path.rpartition("/")[2]} if name == "iam" else {})
                for path, document in self.documents.items()
                if path.startswith(parent) and "/" not in path.removeprefix(parent)
            ]
        }

    def _make(
        self, name: str, key: str, request: web.Request, body: dict[str, Any]
    ) -> dict[str, Any] | web.Response:
        document = dict(
            body.get("cluster") or body.get("nodePool") or body.get("serviceAccount") or body
        )
        title = str(
            request.query.get("repositoryId")
            or request.query.get("secretId")
            or (
                f"{body['accountId']}@{self.project}.iam.gserviceaccount.com"
                if name == "iam"
                else ""
            )
            or document["name"]
        )
        path = f"{key}/{title}"
        if path in self.documents:
            return refusal(409, "ALREADY_EXISTS", f"{title} already exists")
        if name == "container" and self.broken:
            return refusal(400, "FAILED_PRECONDITION", self.broken)
        if name == "container" and (self.busy > 0 or (self.strict and self._is_busy(path))):
            self.busy -= self.busy > 0
            self.refused += 1
            return refusal(
                400, "FAILED_PRECONDITION", "Operation op-7 is currently upgrading the cluster"
            )
        for needed in (document.get("network"), document.get("subnetwork")):
            if needed and f"compute/compute/v1/{needed}" not in self.documents:
                return refusal(400, "INVALID_ARGUMENT", f"{needed} was not found")
        parent, _, pools = key.rpartition("/")
        if pools == "nodePools" and parent not in self.documents:
            return refusal(404, "NOT_FOUND", "no such cluster")
        self.documents[path] = document
        if name == "iam":
            self.young[path] = self.unknown
            return {
                **document,
                "name": f"projects/{self.project}/serviceAccounts/{title}",
                "email": title,
            }
        if name in ("storage", "secretmanager"):
            return document
        if name == "container":
            document |= {
                "status": "PROVISIONING",
                "location": key.split("/locations/")[1].split("/")[0],
            }
            (zone,) = document.get("locations") or [document["location"]]
            if zone in self.stockout:
                document["status"] = "ERROR"
                document["statusMessage"] = "GCE_STOCKOUT"
                return self._begin(name, path, stockout=self.stockout[zone])
            if "nodePools" not in key:
                for pool in document.get("nodePools") or ():
                    self.documents[f"{path}/nodePools/{pool['name']}"] = {
                        **pool,
                        "status": "RUNNING",
                    }
        return self._begin(name, path)

    def _is_busy(self, path: str) -> bool:
        cluster = path.partition("/nodePools")[0]
        return any(
            operation["_left"] > 0 and operation["_target"].partition("/nodePools")[0] == cluster
            for operation in self.operations.values()
        )

    def _delete(self, name: str, key: str) -> dict[str, Any] | web.Response:
        if key not in self.documents:
            return refusal(404, "NOT_FOUND", f"{key} was not found")
        if "/networks/" in key:
            title = key.rpartition("/")[2]
            users = [
                path
                for path, document in self.documents.items()
                if str(document.get("network", "")).endswith(f"/networks/{title}")
            ]
            if users or self.in_use > 0:
                self.in_use -= not users
                return refusal(400, "", f"{users} in use", reason="resourceInUseByAnotherResource")
        if "/networks/" in key and self.released_late > 0:
            self.released_late -= 1
            answer = self._begin(name, key)
            error = {"code": "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", "message": "it is in use"}
            return answer | {"status": "DONE", "error": {"errors": [error]}}
        if name == "storage" and any(path.startswith(f"{key}/o/") for path in self.documents):
            return refusal(409, "", "The bucket you tried to delete is not empty.")
        self._forget(key)
        self.policies.pop(key, None)
        return {} if name in ("iam", "storage") else self._begin(name, key)

    def _forget(self, key: str) -> None:
        children = [path for path in self.documents if path.startswith(f"{key}/")]
        for path in (key, *children):
            del self.documents[path]

    def _begin(self, name: str, target: str, *, stockout: str = "") -> dict[str, Any]:
        title = f"op-{len(self.operations)}"
        path = target.removeprefix(name) if target else "/v1"
        root = re.match(
            r"/(compute/v1|v1)/projects/[^/]+/(global|(locations|regions|zones)/[^/]+)", path
        )
        operation: dict[str, Any]
        match name:
            case "compute" | "container":
                assert root is not None
                link = f"https://{name}.googleapis.com{root[0]}/operations/{title}"
                operation = {"name": title, "selfLink": link, "status": "RUNNING"}
                operation |= (
                    {"kind": "compute#operation"} if name == "compute" else {"operationType": "X"}
                )
                key = f"{name}{root[0]}/operations/{title}"
            case "artifactregistry":
                assert root is not None
                operation = {"name": f"{root[0].removeprefix('/v1/')}/operations/{title}"}
                key = f"{name}{root[0]}/operations/{title}"
            case _:
                operation = {"name": f"operations/{title}"}
                version = "v3" if name == "cloudresourcemanager" else "v1"
                key = f"{name}/{version}/operations/{title}"
        self.operations[key] = {**operation, "_left": self.looks, "_target": target}
        if stockout:
            info = {"reason": "GCE_STOCKOUT", "metadatas": {"zonesAvailable": stockout}}
            self.operations[key]["_error"] = {
                "code": 8,
                "message": "Google Compute Engine: the zone has not enough resources",
                "details": [info],
            }
        return self._settle(key)

    def _operation(self, key: str) -> dict[str, Any] | web.Response:
        if key not in self.operations:
            return refusal(404, "NOT_FOUND", f"no operation {key}")
        self.operations[key]["_left"] -= 1
        return self._settle(key)

    def _settle(self, key: str) -> dict[str, Any]:
        operation = self.operations[key]
        if operation["_left"] <= 0:
            operation["status" if "selfLink" in operation else "done"] = (
                "DONE" if "selfLink" in operation else True
            )
            if error := operation.get("_error"):
                operation["error"] = error
            elif operation["_target"] in self.documents:
                self._finish(operation["_target"])
        return self._shown(operation)

    def _progress(self, key: str) -> None:
        """Let an abandoned operation on *key* continue with each read of the resource."""
        for operation in self.operations.values():
            if operation["_target"] == key and operation["_left"] > 0:
                operation["_left"] -= 1
                if operation["_left"] <= 0 and "_error" not in operation:
                    self._finish(key)

    def _finish(self, key: str) -> None:
        document = self.documents[key]
        if document.get("status") == "PROVISIONING":
            document["status"] = "RUNNING"
            if "/nodePools/" not in key:
                config = {"endpoint": self.endpoint, "allowExternalTraffic": True}
                document["controlPlaneEndpointsConfig"]["dnsEndpointConfig"] = config

    def _copy(self, key: str) -> dict[str, Any]:
        shown = self._shown(self.documents[key])
        if re.search(r"/clusters/[^/]+$", key):
            pools = [
                self._shown(document)
                for path, document in self.documents.items()
                if path.startswith(f"{key}/nodePools/")
            ]
            shown["nodePools"] = pools
        return shown

    def _shown(self, document: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in document.items() if not name.startswith("_")}


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for name, value in new.items():
        current = merged.get(name)
        both = isinstance(current, dict) and isinstance(value, dict)
        merged[name] = _merged(current, value) if both else value
    return merged
