"""What is done for a job before its process exists is exactly what that would have done."""

from __future__ import annotations

import hashlib
import io
import os
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kinetic._runner.job import opening, workspace
from kinetic._runner.job.workspace import Weight, hold, shared
from kinetic._runner.protocol import wire
from kinetic._runner.stores.directory import DirectoryObjects

SCOPE = "jobs/job-1/"
KEY = b"k" * 32


@pytest.fixture
def objects(tmp_path: Path) -> DirectoryObjects:
    return DirectoryObjects(tmp_path / "store")


@pytest.fixture
def site(tmp_path: Path) -> workspace.Site:
    return workspace.Site(work=tmp_path / "work", cache=tmp_path / "cache", mounts=False)


@pytest.fixture
def order(objects: DirectoryObjects, site: workspace.Site, tmp_path: Path) -> wire.Assignment:
    """An order whose project was unpacked before."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("package/module.py", "x = 1\n")
        archive.writestr("tool", "#!/bin/sh\n")
    digest = hashlib.sha256(file.getvalue()).hexdigest()
    objects.create(f"code/{digest}.zip", file.getvalue())
    code = wire.Code(name=f"code/{digest}.zip", digest=digest)

    def build(part: str) -> Weight:
        os.mkdir(f"{part}/package")
        Path(part, "package", "module.py").write_text("x = 1\n")
        Path(part, "tool").write_text("#!/bin/sh\n")
        os.chmod(f"{part}/tool", 0o755)
        return Weight(2, 16)

    shared(f"{site.cache}/code/{digest}", build)
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
        code=code,
        output_dir=str(tmp_path / "outputs" / "0"),
    )


CLAIM = wire.attempt_key(SCOPE, 0, 1, "claim")


def taken_ahead(
    objects: DirectoryObjects, site: workspace.Site, order: wire.Assignment
) -> opening.Taken | None:
    """All steps, one right after the other."""
    ready = opening.make_ready(order, objects, site)
    return None if ready is None else opening.begin(order, KEY, "me", objects, ready)


def test_the_steps_are_taken(
    objects: DirectoryObjects, site: workspace.Site, order: wire.Assignment
) -> None:
    taken = taken_ahead(objects, site, order)
    assert taken is not None and taken.arguments == b"arguments"
    said = {**objects.stat(CLAIM).metadata}
    assert abs(float(said.pop("at")) - time.time()) < 60
    assert said == {"executor": "me", "fence": "1"}
    root = Path(site.work, "workspace")
    assert (root / "package" / "module.py").read_text() == "x = 1\n"
    assert os.stat(root / "tool").st_mode & 0o777 == 0o755
    assert Path(order.output_dir).is_dir()
    assert workspace.clear(taken.tree, site)
    assert not Path(site.work).exists()
    taken.opening.withdraw()
    assert not objects.exists(CLAIM)


def test_what_a_job_has_left_is_not_removed_with_its_workspace(
    objects: DirectoryObjects, site: workspace.Site, order: wire.Assignment
) -> None:
    taken = taken_ahead(objects, site, order)
    assert taken is not None
    Path(site.work, "workspace", "more").touch()
    assert not workspace.clear(taken.tree, site)
    assert Path(site.work, "workspace", "more").exists()


def test_a_copy_is_private(
    objects: DirectoryObjects, site: workspace.Site, order: wire.Assignment, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        index = {"one": 0, "two": 1}[name]
        other = replace(site, work=tmp_path / name)
        assert taken_ahead(objects, other, replace(order, index=index))
        module = tmp_path / name / "workspace" / "package" / "module.py"
        assert module.read_text() == "x = 1\n"
        module.write_text("spoiled")


def test_what_is_made_ready_says_nothing(
    objects: DirectoryObjects, site: workspace.Site, order: wire.Assignment
) -> None:
    before = [one.name for one in objects.list("")]
    ready = opening.make_ready(order, objects, site)
    assert ready is not None and ready.arguments == b"arguments"
    assert [one.name for one in objects.list("")] == before
    assert not Path(order.output_dir).exists()
    assert workspace.clear(ready.tree, site)


@pytest.mark.parametrize("what", ["damaged", "cleaned", "data"])
def test_what_is_not_plain_is_not_made_ready(
    objects: DirectoryObjects, site: workspace.Site, order: wire.Assignment, what: str
) -> None:
    match what:
        case "damaged":
            order = replace(order, arguments=order.arguments._replace(digest="0" * 64))
        case "cleaned":
            objects.delete([order.arguments.name])
        case _:
            order = replace(order, data=(wire.DataRef(uri="gs://bucket/x"),))
    assert opening.make_ready(order, objects, site) is None
    assert not Path(site.work).exists()


@pytest.mark.parametrize("what", ["claimed", "stopped", "closed", "cleaned"])
def test_whatever_came_in_between_is_left_to_the_job(
    objects: DirectoryObjects, site: workspace.Site, order: wire.Assignment, what: str
) -> None:
    ready = opening.make_ready(order, objects, site)
    assert ready is not None
    match what:
        case "claimed":
            objects.create(CLAIM, b"", {"executor": "other", "fence": "1"})
        case "stopped":
            name = wire.control_key(SCOPE, 0)
            objects.create(name, *wire.Request(kind="stop").signed(KEY, SCOPE, name))
        case "closed":
            signed = wire.Outcome(kind=wire.Kind.LOST).signed(KEY, SCOPE, 0, 1)
            objects.create(wire.attempt_key(SCOPE, 0, 1, "outcome"), b"", signed)
        case _:
            objects.delete([order.arguments.name])
    assert opening.begin(order, KEY, "me", objects, ready) is None
    assert not Path(order.output_dir).exists()


def test_a_tree_that_is_not_whole_is_not_held(tmp_path: Path) -> None:
    tree = shared(str(tmp_path / "place"), lambda part: Weight(1, 0))
    assert hold(tree) is None


def test_a_tree_with_a_jax_of_its_own_is_left_to_the_job(tmp_path: Path) -> None:
    """Whether Keras is told to use it depends on what the job itself finds."""

    def build(part: str) -> Weight:
        Path(part, name).touch()
        return Weight(1, 0)

    for name, is_held in {"jax.py": False, "ajax.py": True}.items():
        assert (hold(shared(str(tmp_path / name), build)) is not None) is is_held


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
