"""A real API server validates the manifests that kinetic builds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kinetic import accelerators
from kinetic.aio.kubernetes.diagnosis.admission import refused_request
from kinetic.aio.kubernetes.diagnosis.causes import Outlook
from kinetic.aio.kubernetes.manifests import Placement, job_manifest, object_name, secret_manifest
from kinetic.aio.ports import Resources
from kinetic.job_status import Reason
from tests.cluster.control_plane import ControlPlane
from tests.cluster.rest import Json, Refused
from tests.kubernetes.orders import order

JOBS = "/apis/batch/v1/namespaces/default/jobs"
SECRETS = "/api/v1/namespaces/default/secrets"
AT = Placement(secret="grp-1")


def dry_run(control_plane: ControlPlane, path: str, manifest: dict[str, Any]) -> Json:
    """Return the object that the server would create, without creating it.

    Raises:
        Refused: The server would refuse the manifest, or doesn't know one of its fields.
    """
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    return control_plane.call("POST", path, manifest, **query)


def test_kubernetes_accepts_the_job_of_every_accelerator(control_plane: ControlPlane) -> None:
    for accelerator in accelerators.catalogue():
        spot = replace(accelerator, spot=True)
        resources = Resources(accelerator=spot, memory_bytes=2**30, cpu=0.5)
        dry_run(control_plane, JOBS, job_manifest(order(resources=resources, timeout=0.5), AT))


@pytest.mark.parametrize(
    "at",
    [
        AT,
        Placement(secret="s", queue="research", priority_class="high", run_as_user=1000),
        Placement(secret="s", annotations={"a.example/b": "ü"}),
    ],
)
def test_kubernetes_accepts_every_setting_of_a_cluster_owner(
    control_plane: ControlPlane, at: Placement
) -> None:
    data = [{"uri": "gs://b/x,y", "is_dir": True, "fuse": True, "mount": "/data"}]
    dry_run(control_plane, JOBS, job_manifest(order(data=data), at))


@pytest.mark.parametrize(
    "name", ["", "<lambda>", "größe", "訓練", "x" * 300, "-.-", "A.b_c", "9\0"]
)
def test_kubernetes_accepts_any_name_and_label(control_plane: ControlPlane, name: str) -> None:
    spec = order(name=name, labels={"kinetic.dev/function": name})
    created = dry_run(control_plane, JOBS, job_manifest(spec, AT))
    assert created["metadata"]["name"] == object_name(name)


def test_kubernetes_accepts_a_secret_with_any_variable(control_plane: ControlPlane) -> None:
    labels = {"kinetic.dev/submission": "ä"}
    spec = order(environment={"A B": "1", "x-$(Y)": "ü\n"}, labels=labels)
    dry_run(control_plane, SECRETS, secret_manifest(spec, "s", "default"))
    dry_run(control_plane, JOBS, job_manifest(spec, AT))


def test_a_refused_job_has_its_reason(control_plane: ControlPlane) -> None:
    one_chip = Resources(accelerator=accelerators.parse("tpu-v5e-1"))
    manifest = job_manifest(order(resources=one_chip), AT)
    resources = manifest["spec"]["template"]["spec"]["containers"][0]["resources"]
    del resources["limits"]["google.com/tpu"]
    with pytest.raises(Refused) as caught:
        dry_run(control_plane, JOBS, manifest)
    cause = refused_request(caught.value.status)
    assert (caught.value.code, cause.reason, cause.outlook) == (422, Reason.REFUSED, Outlook.FINAL)
    assert "limits" in cause.summary
