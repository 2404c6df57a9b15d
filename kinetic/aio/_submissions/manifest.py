"""Build and read manifests: the immutable JSON description of each submission in the store."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kinetic import accelerators
from kinetic._binding import Binding
from kinetic._packing.discover import Project
from kinetic._runner.protocol import signing, wire
from kinetic._runner.protocol.frames import MALFORMED
from kinetic.aio._connection import Connection
from kinetic.aio._preparing.calls import Call, UploadedCall
from kinetic.aio._submissions import ids
from kinetic.aio._submissions.ids import Identity
from kinetic.aio.ports import Image, Object, Resources
from kinetic.data import Data
from kinetic.errors import NotFound, WireError
from kinetic.job_record import JobRecord, utc_now
from kinetic.options import MapSettings, Options
from kinetic.prices import HOUR_S, Price, price_of

if TYPE_CHECKING:
    from kinetic._progress.standing import Goal

KEPT_OPTIONS = tuple(
    name for name in MapSettings.__slots__ if name not in ("project", "cluster", "progress")
)
"""The options that a manifest keeps; the record in the manifest says where the batch runs."""


_PLACED_OPTIONS = (
    *("accelerator", "spot", "output_dir", "debug", "timeout", "start_timeout", "cpu"),
    *("isolation", "recycle"),
)
"""The function's options that a manifest keeps, for a process that takes the batch over."""


async def read_manifest(connection: Connection, submission_id: str) -> dict[str, Any]:
    """Return the immutable description of a job or a batch, verified before it is parsed."""
    name, store = ids.manifest_name_of(submission_id), connection.platform.store
    try:
        content = await store.get(name)
    except NotFound:
        raise NotFound(
            f"there is no {submission_id} in {store.url}: it was cleaned up, or belongs to another "
            "project, cluster or KINETIC_HOME"
        ) from None
    body = await _verify(connection, content, submission_id)
    try:
        manifest = cast("dict[str, Any]", json.loads(body))
    except MALFORMED as exc:
        raise WireError(
            f"{name} is damaged: {exc}; kinetic.cleanup({submission_id!r}) removes it"
        ) from exc
    try:
        wire.check_version(manifest.get("version"), submission_id)
    except MALFORMED as exc:
        raise WireError(str(exc)) from exc
    return manifest


async def _verify(connection: Connection, content: Object, submission_id: str) -> bytes:
    """Verify the signature of a manifest; return the JSON without it."""
    name, store = content.name, connection.platform.store.url
    scope = f"{name.rpartition('/')[0]}/"
    key, removal = await connection.key(scope), f"kinetic.cleanup({submission_id!r}) removes it"
    try:
        return signing.verified_json(key, scope, name, content.body)
    except KeyError as exc:
        raise WireError(
            f"{name} in {store} is not signed, so kinetic didn't submit it, or it was changed; "
            f"kinetic used nothing of it. {removal}"
        ) from exc
    except ValueError as exc:
        raise WireError(
            f"{name} in {store} is not what its submitter signed: it was changed, or is of another "
            "submission, namespace or KINETIC_HOME; nothing of it was used. Check who can write to "
            f"that store; {removal}"
        ) from exc


def job_record(manifest: Mapping[str, Any], submission_id: str, index: int) -> dict[str, Any]:
    """Return the fields of the handle of a single job, or of an item of a batch."""
    if "group_id" not in manifest or "record" not in manifest:
        return dict(manifest)
    record = dict(manifest["record"])
    job_id = f"{submission_id}-{index}"
    return record | {
        "job_id": job_id,
        "k8s_name": f"{job_id}-1",
        "display_name": f"kinetic-{record['func_name']}-{job_id}",
        "group_id": submission_id,
        "group_kind": "map",
        "group_index": index,
    }


def record_of(connection: Connection, identity: Identity, uploaded: UploadedCall) -> dict[str, Any]:
    """Return the fields of the handle of the first item of a new submission."""
    target, job_id = connection.target, identity.job_id(0)
    is_local = target.backend == "local"
    price = price_of(uploaded.call.options.parsed_accelerator, target.zone, listed=not is_local)
    record = JobRecord(
        job_id=job_id,
        backend=target.backend,
        project=target.project or "",
        cluster_name="" if is_local else target.cluster,
        zone="" if is_local else target.zone,
        namespace="" if is_local else target.namespace,
        bucket_name=connection.platform.store.url.partition("://")[2],
        k8s_name=identity.attempt_name(0, 1),
        image_uri=uploaded.image.uri,
        accelerator=uploaded.call.options.accelerator,
        func_name=uploaded.call.name,
        display_name=f"kinetic-{uploaded.call.name}-{job_id}",
        created_at=utc_now(),
        debug=uploaded.call.options.debug,
        price=asdict(price) if price is not None else None,
    )
    return record.to_dict()


def _identity_fields(identity: Identity) -> dict[str, Any]:
    """Return the fields of a manifest from which `beginning.identity_of` builds the identity."""
    return {
        "version": wire.VERSION,
        "budgets": asdict(identity.budgets),
        "created": identity.created,
        "output_dir": identity.output_base,
        "submitter": asdict(identity.submitter) if identity.submitter is not None else None,
    }


def manifest_of(
    record: dict[str, Any], identity: Identity, uploaded: UploadedCall
) -> dict[str, Any]:
    """Return the description of a single job.

    The description contains the fields of the handle's *record*. ``shared`` names the shared
    objects that the job reads: kinetic collects none of them before the job's end.
    """
    shared = [*uploaded.shared_names, *(ref.uri for ref in uploaded.data)]
    return {**record, **_identity_fields(identity), "shared": shared}


def batch_manifest(
    connection: Connection,
    identity: Identity,
    uploaded: UploadedCall,
    settings: MapSettings,
    length: int | None,
    price: Price | None,
    goal: Goal | None,
) -> dict[str, Any]:
    """Return the description by which any process can observe a batch, or take it over.

    ``total`` is None if the number of inputs was unknown at the beginning. The description has the
    names of the captured environment variables; a secret of the platform keeps their values. The
    *price* is in the description, so that every submitter computes with the same price. *goal* is
    what a sweep searches for; no decision about an item depends on it.
    """
    deadline, function = settings.batch_timeout, uploaded.call.function
    return {
        **_identity_fields(identity),
        "group_id": identity.id,
        "name": settings.name,
        "tags": settings.tags or {},
        "created_at": utc_now(),
        "total": length,
        "deadline": identity.created + deadline if deadline is not None else None,
        "price": asdict(price) if price is not None else None,
        "sweep": asdict(goal) if goal is not None else None,
        "terms": {name: getattr(settings, name) for name in KEPT_OPTIONS},
        "placed": _uploaded_fields(uploaded),
        "parameters": Binding(function).positional if function is not None else [],
        "record": record_of(connection, identity, uploaded),
    }


def map_settings_of(manifest: Mapping[str, Any]) -> MapSettings:
    """Return the options with which the user submitted the batch."""
    return MapSettings(**manifest["terms"])


def price_in(manifest: Mapping[str, Any]) -> Price | None:
    """Return the price of a batch's accelerator at the time when the batch began."""
    fields = manifest["price"]
    return Price(**fields) if fields else None


def budget_seconds(manifest: Mapping[str, Any]) -> float:
    """Return how many seconds the ``budget`` pays for; without a price, it has no effect."""
    budget, price = manifest["terms"].get("budget"), price_in(manifest)
    if budget is None or price is None or not price.usd_per_hour:
        return math.inf
    seconds: float = budget / price.usd_per_hour * HOUR_S
    return seconds


SETUP_FAILED = "the setup would fail for each of them"
"""The cause of a stop after a failure of `init`, or of what all items share."""


def stop_cause(manifest: Mapping[str, Any], requests: Iterable[wire.Request]) -> str:
    """Return why kinetic stopped a batch; empty if a user stopped it, or nothing did."""
    terms = manifest["terms"]
    descriptions = {
        "timeout": f"batch_timeout={terms.get('batch_timeout')} s was over",
        "fail_fast": "fail_fast",
        "budget": f"budget={terms.get('budget')} US dollars was spent, by estimate",
        "setup": SETUP_FAILED,
    }
    causes = (descriptions.get(it.cause) for it in requests if it.kind == "stop")
    return next(filter(None, causes), "")


def _uploaded_fields(uploaded: UploadedCall) -> dict[str, Any]:
    """Return the fields from which `uploaded_call_of` rebuilds *uploaded*."""
    options, project, resources = uploaded.call.options, uploaded.project, uploaded.resources
    return {
        "func_name": uploaded.call.name,
        "options": {name: getattr(options, name) for name in _PLACED_OPTIONS},
        "function": uploaded.function._asdict(),
        "init": uploaded.init._asdict() if uploaded.init is not None else None,
        "code": asdict(uploaded.code) if uploaded.code is not None else None,
        "data": [asdict(ref) for ref in uploaded.data],
        "image": asdict(uploaded.image),
        "resources": asdict(resources) | {"accelerator": str(resources.accelerator)},
        "captured": uploaded.captured_names,
        "client": dict(uploaded.client),
        "project": {
            "root": str(project.root) if project.root is not None else None,
            "entry_dir": str(project.entry_dir),
            "cwd": project.cwd,
            "sys_path": project.sys_path,
        },
    }


def uploaded_call_of(manifest: Mapping[str, Any], environment: Mapping[str, str]) -> UploadedCall:
    """Rebuild the part that all attempts of a batch share from its manifest.

    The result lacks the function, and the option ``init``. In ``data_table``, placeholders stand
    for the `Data` that these capture.
    """
    try:
        fields = manifest["placed"]
        project, image = fields["project"], fields["image"]
        code: Any = fields["code"]
        init: Any = fields["init"]
        requirements, resources = image["requirements"], fields["resources"]
        return UploadedCall(
            call=Call(
                function=None, name=fields["func_name"], options=Options(**fields["options"])
            ),
            project=Project(
                root=Path(project["root"]) if project["root"] is not None else None,
                entry_dir=Path(project["entry_dir"]),
                cwd=project["cwd"],
                sys_path=tuple(project["sys_path"]),
            ),
            code=wire.Code.of(code) if code is not None else None,
            function=wire.Input(**fields["function"]),
            init=wire.Input(**init) if init is not None else None,
            data=tuple(wire.DataRef(**ref) for ref in fields["data"]),
            # Pickled inputs number their own `Data` after these, so only the count matters.
            data_table=tuple(Data("gs://shared/") for _ in fields["data"]),
            image=Image(
                **image
                | {
                    "command": tuple(image["command"]),
                    "requirements": wire.Input(*requirements) if requirements else None,
                }
            ),
            resources=Resources(
                **resources | {"accelerator": accelerators.parse(resources["accelerator"])}
            ),
            environment=environment,
            captured_names=tuple(fields["captured"]),
            client=fields["client"],
        )
    except (KeyError, TypeError) as exc:
        raise WireError(
            f"the manifest of {manifest.get('group_id')} lacks a part: {exc!r}; "
            "submit the remaining inputs in a new batch"
        ) from exc
