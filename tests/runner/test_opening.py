"""What is done for a job before its process exists is exactly what that would have done."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kinetic._runner.job import opening
from kinetic._runner.protocol import wire
from kinetic._runner.stores.directory import DirectoryObjects

SCOPE = "jobs/job-1/"
KEY = b"k" * 32


@pytest.fixture
def objects(tmp_path: Path) -> DirectoryObjects:
    return DirectoryObjects(tmp_path / "store")


@pytest.fixture
def order(objects: DirectoryObjects, tmp_path: Path) -> wire.Assignment:
    objects.create(wire.input_key(SCOPE, 0), b"arguments")
    arguments = hashlib.sha256(b"arguments").hexdigest()
    part = wire.Input(name=wire.input_key(SCOPE, 0), start=0, stop=9, digest=arguments)
    return wire.Assignment(
        store=objects.url,
        scope=SCOPE,
        job_id="job-1",
        index=0,
        attempt=1,
        function=part._replace(name="functions/f.pkl"),
        arguments=part,
        code=None,
        output_dir=str(tmp_path / "outputs" / "0"),
    )


CLAIM = wire.attempt_key(SCOPE, 0, 1, "claim")


def test_the_steps_are_taken(objects: DirectoryObjects, order: wire.Assignment) -> None:
    taken = opening.begin(order, KEY, "me", objects)
    assert taken is not None and taken.arguments == b"arguments"
    said = {**objects.stat(CLAIM).metadata}
    assert abs(float(said.pop("at")) - time.time()) < 60
    assert said == {"executor": "me", "fence": "1"}
    assert Path(order.output_dir).is_dir()
    taken.opening.withdraw()
    assert not objects.exists(CLAIM)


@pytest.mark.parametrize("what", ["damaged", "cleaned", "data", "large"])
def test_what_is_not_plain_is_left_to_the_job(
    objects: DirectoryObjects, order: wire.Assignment, what: str
) -> None:
    match what:
        case "damaged":
            order = replace(order, arguments=order.arguments._replace(digest="0" * 64))
        case "cleaned":
            objects.delete([order.arguments.name])
        case "large":
            content = bytes(opening.READY_BYTES + 1)
            objects.create("large", content)
            digest = hashlib.sha256(content).hexdigest()
            large = wire.Input(name="large", start=0, stop=len(content), digest=digest)
            order = replace(order, arguments=large)
        case _:
            order = replace(order, data=(wire.DataRef(uri="gs://bucket/x"),))
    before = [one.name for one in objects.list("")]
    assert opening.begin(order, KEY, "me", objects) is None
    assert [one.name for one in objects.list("")] == before


@pytest.mark.parametrize("what", ["claimed", "stopped", "closed"])
def test_whatever_came_in_between_is_left_to_the_job(
    objects: DirectoryObjects, order: wire.Assignment, what: str
) -> None:
    match what:
        case "claimed":
            objects.create(CLAIM, b"", {"executor": "other", "fence": "1"})
        case "stopped":
            name = wire.control_key(SCOPE, 0)
            objects.create(name, *wire.Request(kind="stop").signed(KEY, SCOPE, name))
        case _:
            signed = wire.Outcome(kind=wire.Kind.LOST).signed(KEY, SCOPE, 0, 1)
            objects.create(wire.attempt_key(SCOPE, 0, 1, "outcome"), b"", signed)
    assert opening.begin(order, KEY, "me", objects) is None
    assert not Path(order.output_dir).exists()


def test_orders_that_have_most_in_common_keep_what_is_their_own(order: wire.Assignment) -> None:
    whole = order.to_json()
    own = ("job_id", "index", "attempt", "arguments", "output_dir")
    common = {name: value for name, value in whole.items() if name not in own}
    orders = wire.Orders(common)
    data = [{"uri": "data/x", "digest": "y"}]
    for index in range(3):
        mine = {name: whole[name] for name in own} | {"index": index}
        mine["arguments"] = {**mine["arguments"], "start": index}
        if index == 0:
            mine["data"] = data
        assert orders.assignment(mine) == wire.Assignment.from_json({**common, **mine})
        assert len(orders.assignment(mine).data) == (index == 0)
