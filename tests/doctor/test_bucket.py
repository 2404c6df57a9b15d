"""A bucket as the doctor uses it: what it could not do is no success, and stays in nobody's way."""

from __future__ import annotations

from dataclasses import replace

from kinetic.aio.gcs.store import GcsStore
from kinetic.doctor.bucket import LIMITS, Bucket
from kinetic.doctor.checks import State, run_checks
from tests.gcs.server import GcsServer


async def test_who_cannot_remove_what_was_written_is_told_so() -> None:
    async with GcsServer() as server:
        store = GcsStore("gs://kn-test", {"STORAGE_EMULATOR_HOST": server.url}, limits=LIMITS)
        subject = Bucket("bucket", store)
        removing = server.fail("delete", times=1, stall=True)
        checks = [replace(one, limit_s=2.0) for one in subject.checks(after=())]
        try:
            report = await run_checks(checks)
        finally:
            await subject.aclose()
        assert removing.seen
        assert report["bucket: use"].state is State.FAILED
        assert "no answer" in report["bucket: use"].evidence
        assert not server.objects
