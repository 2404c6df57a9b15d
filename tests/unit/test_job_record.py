"""What a handle's record is made of."""

from __future__ import annotations

from types import SimpleNamespace

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


def test_a_context_needs_no_time_of_creation() -> None:
    before = utc_now()
    made = JobRecord.from_job_context(SimpleNamespace(**CONTEXT), "gke", "default", "job-1-1")
    assert before <= made.created_at <= utc_now()
    known = SimpleNamespace(**CONTEXT, created_at="2020-01-01T00:00:00Z")
    made = JobRecord.from_job_context(known, "gke", "default", "job-1-1")
    assert made.created_at == "2020-01-01T00:00:00Z"
