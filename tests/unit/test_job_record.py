"""Test how the record of a job is built from a job's context."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

from kinetic.job_record import JobRecord, utc_now

CONTEXT = {
    "job_id": "job-1",
    "project": "p",
    "cluster_name": "c",
    "zone": "z",
    "bucket_name": "b",
    "image_uri": "i",
    "accelerator": "cpu",
    "func_name": "f",
    "display_name": "d",
}


def test_the_creation_time_of_a_context_is_optional() -> None:
    before = utc_now()
    record = JobRecord.from_job_context(SimpleNamespace(**CONTEXT), "gke", "default", "job-1-1")
    assert before <= record.created_at <= utc_now()
    context = SimpleNamespace(**CONTEXT, created_at="2020-01-01T00:00:00Z")
    record = JobRecord.from_job_context(context, "gke", "default", "job-1-1")
    assert record.created_at == "2020-01-01T00:00:00Z"


def test_a_context_may_have_the_function_in_place_of_its_name() -> None:
    fields = {name: value for name, value in CONTEXT.items() if name != "func_name"}
    for func, name in ((utc_now, "utc_now"), (functools.partial(utc_now), "partial")):
        context = SimpleNamespace(**fields, func=func, args=(), kwargs={}, env_vars={})
        record = JobRecord.from_job_context(context, "gke", "default", "job-1-1")
        assert record.func_name == name
    with pytest.raises(TypeError, match="func_name"):
        JobRecord.from_job_context(SimpleNamespace(**fields), "gke", "default", "job-1-1")
