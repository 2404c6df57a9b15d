"""Test the API of keras-kinetic for batches and data."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import kinetic
from kinetic import RemoteCallable, RemoteFunction, collections, data


@kinetic.run(accelerator="cpu")
def scale(by: int, number: int) -> int:
    return by * number


class Model:
    @kinetic.run(accelerator="cpu")
    def predict(self, value: int) -> int:
        return value


def test_a_decorated_function_is_a_remote_callable() -> None:
    assert RemoteCallable is RemoteFunction and isinstance(scale, kinetic.RemoteCallable)


def test_map_of_run_async_starts_a_batch_like_run_async_map(script) -> None:
    code = """
import functools

@remote
def scale(by, number):
    return by * number

class Model:
    by = 5

    @remote
    def predict(self, number):
        return self.by * number

for function in (functools.partial(scale.run_async, 2), functools.partial(scale, 3)):
    print(kinetic.collections.map(function, [1, 2], name="scale").results())
print(kinetic.collections.map(Model().predict.run_async, [1, 2]).results())
print(kinetic.collections.map(scale.run_async, [{"by": 1, "number": 2}], tags={"k": "v"}).tags)
print([batch.name for batch in kinetic.list_batches(name="scale")])
"""
    script(code).prints("[2, 4]", "[3, 6]", "[5, 10]", "{'k': 'v'}", "['scale', 'scale']")


@pytest.mark.parametrize(
    "function",
    [
        None,
        lambda number: scale.run_async(2, number),
        functools.partial(scale.local, 2),
        scale.run_async_map,
        Model().predict.local,
    ],
)
def test_map_refuses_functions_that_submit_in_other_ways(function: object, home: Path) -> None:
    with pytest.raises(TypeError, match=r"takes f.run_async of a function f"):
        collections.map(function, [1])  # type: ignore[arg-type]
    assert not (home / "store").exists()


def test_a_data_reference_is_recognized_by_its_mark() -> None:
    reference = data.make_data_ref("gs://b/x/", True, "/mnt", fuse=True)
    assert data.is_data_ref(reference)
    assert reference == {
        "__data_ref__": True,
        "uri": "gs://b/x/",
        "is_dir": True,
        "mount_path": "/mnt",
        "fuse": True,
        "hf_trust_remote_code": False,
    }
    assert not any(map(data.is_data_ref, ({}, None, {"__data_ref__": 1}, ["__data_ref__"])))


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("gs://bucket/some/prefix/", ("bucket", "some/prefix")),
        ("gs://bucket/object.h5", ("bucket", "object.h5")),
        ("gs://bucket", ("bucket", "")),
        ("gs://bucket/", ("bucket", "")),
    ],
)
def test_a_gcs_uri_is_a_bucket_and_a_prefix_without_slashes(
    uri: str, parts: tuple[str, str]
) -> None:
    assert data.parse_gcs_uri(uri) == parts
