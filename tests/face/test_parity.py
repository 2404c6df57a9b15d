"""Both faces have the same names with the same signatures, and they are the promised ones."""

from __future__ import annotations

import ast
import asyncio
import inspect
import operator
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kinetic
import kinetic.aio
import kinetic.collections
import kinetic.data
import kinetic.debug
import kinetic.job_status
import kinetic.jobs
import kinetic.options

PAIRS = {
    "JobHandle": (kinetic.jobs.JobHandle, kinetic.aio.JobHandle),
    "BatchHandle": (kinetic.jobs.BatchHandle, kinetic.aio.BatchHandle),
    "module": (kinetic.jobs, kinetic.aio),
}
ONLY_HERE = {
    "JobHandle": {"facing"},
    "BatchHandle": {"created_at", "group_id", "name", "tags"},
    "module": set(),
}
ONLY_THERE = {
    "JobHandle": {"began_at", "bound", "bundle", "debugger", "facts"},
    "BatchHandle": {"bundle", "facts", "let_run"},
    "module": {"Client", "build_image", "content_hash", "image_of", "pack"},
}

# The promised signatures: a parameter without a default has none, a star is a star.
RUN = """
accelerator='tpu-v5e-1', container_image=None, base_image_repo=None, zone=None, project=None,
capture_env_vars=None, cluster=None, backend=None, namespace=None, volumes=None, spot=False,
output_dir=None, debug=False
"""
HANDLE = """
job_id, backend, project, cluster_name, zone, namespace, bucket_name, k8s_name, image_uri,
accelerator, func_name, display_name, created_at, group_id=None, group_kind=None,
group_index=None, debug=False
"""
RESULT = """
self, timeout=None, cleanup=None, cleanup_timeout=180, cleanup_poll_interval=2, stream_logs=None,
on_status_change=None
"""
RESULTS = "self, *, timeout=None, ordered=True, cleanup=True, return_exceptions=False"
MAP = """
inputs, *, input_mode='auto', max_concurrent=64, retries=0, fail_fast=False,
cancel_running_on_fail=False, name=None, tags=None, project=None, cluster=None
"""
PROMISED = [
    f"run({RUN})",
    "Data(path, fuse=False, hf_trust_remote_code=False)",
    f"JobHandle({HANDLE})",
    "JobHandle.from_job_context(ctx, backend_name, namespace, k8s_name)",
    "JobHandle.from_dict(d)",
    "JobHandle.to_dict(self)",
    "JobHandle.status(self)",
    "JobHandle.logs(self, follow=False)",
    "JobHandle.tail(self, n=100)",
    "JobHandle.debug_attach(self, local_port=5678, working_dir=None)",
    f"JobHandle.result({RESULT})",
    "JobHandle.cancel(self, cleanup_timeout=180, cleanup_poll_interval=2)",
    "JobHandle.cleanup(self, k8s=True, gcs=True, cleanup_timeout=180, cleanup_poll_interval=2)",
    "attach(job_id, project=None, cluster=None)",
    "list_jobs(project=None, zone=None, cluster=None, namespace=None)",
    "BatchHandle.statuses(self)",
    "BatchHandle.status_counts(self)",
    "BatchHandle.wait(self, *, timeout=None)",
    "BatchHandle.as_completed(self, *, poll_interval=5.0, timeout=None)",
    f"BatchHandle.results({RESULTS})",
    "BatchHandle.failures(self)",
    "BatchHandle.cancel(self)",
    "BatchHandle.cleanup(self, *, k8s=True, gcs=True)",
    "BatchError(group_id, failures, partial_results)",
    "attach_batch(group_id, project=None, cluster=None, poll_interval=10.0, poll_timeout=None)",
    f"RemoteFunction.run_async_map(self, {MAP})",
    f"collections.map(submit_fn, {MAP})",
    "debug.wait_for_debug_server(handle, timeout=600, poll_interval=5)",
    "debug.cleanup_port_forward(proc)",
    "debug.start_port_forward(pod_name, namespace, local_port, remote_port)",
    "debug.print_attach_instructions(local_port, working_dir=None)",
    "data.make_data_ref(uri, is_dir, mount_path=None, fuse=False, hf_trust_remote_code=False)",
    "data.is_data_ref(obj)",
    "data.parse_gcs_uri(gcs_uri)",
]


def public(owner: Any) -> dict[str, Any]:
    names = getattr(owner, "__all__", None) or [one for one in dir(owner) if one[0] != "_"]
    members = {name: getattr(owner, name) for name in names}  # loads those that are lazy
    return {name: inspect.getattr_static(owner, name) for name in members}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each."""
    if isinstance(function, classmethod | staticmethod):
        function = function.__func__
    found = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in found]


def promised(signature: str) -> list[tuple[str, Any, Any]]:
    namespace: dict[str, Any] = {}
    exec(f"def function({' '.join(signature.split())}): ...", namespace)
    return parameters(namespace["function"])


@pytest.mark.parametrize("pair", PAIRS)
def test_both_faces_have_the_same_names(pair: str) -> None:
    here, there = (set(public(one)) for one in PAIRS[pair])
    assert here - there - ONLY_HERE[pair] == set()
    assert there - here == ONLY_THERE[pair]


@pytest.mark.parametrize(
    ("pair", "name"),
    [
        (pair, name)
        for pair, (here, there) in PAIRS.items()
        for name in sorted(set(public(here)) & set(public(there)))
    ],
)
def test_both_faces_have_the_same_signatures(pair: str, name: str) -> None:
    here, there = (public(one)[name] for one in PAIRS[pair])
    assert type(here) is type(there)
    if isinstance(here, property):
        assert (here.__doc__ or "").strip()
    elif inspect.isfunction(here) or isinstance(here, classmethod | staticmethod):
        assert parameters(here) == parameters(there)
        assert inspect.getdoc(here), "the words of the other face"


@pytest.mark.parametrize("call", PROMISED, ids=lambda call: call.partition("(")[0])
def test_the_promised_signatures_hold(call: str) -> None:
    """What was added since comes after what was promised, and may be left out."""
    name, _, signature = call.removesuffix(")").partition("(")
    wanted, found = promised(signature), parameters(operator.attrgetter(name)(kinetic))
    assert found[: len(wanted)] == wanted
    assert all(default is not inspect.Parameter.empty for _, _, default in found[len(wanted) :])


@pytest.mark.parametrize(
    "way",
    [
        kinetic.aio.run_async_map,
        kinetic.aio.Client.run_async_map,
        kinetic.jobs.run_async_map,
        kinetic.RemoteFunction.run_async_map,
        kinetic.collections.map,
    ],
    ids=lambda way: f"{way.__module__}.{way.__qualname__}",
)
def test_every_way_to_start_a_batch_shows_the_declared_options(way: Callable[..., Any]) -> None:
    keywords = [one for one in parameters(way) if one[1] is inspect.Parameter.KEYWORD_ONLY]
    assert keywords == parameters(kinetic.options.MapSettings)
    assert "max_concurrent: 'int | None' = 64" in str(inspect.signature(way))


def test_type_checkers_are_told_of_the_declared_options() -> None:
    names = {"Data": kinetic.Data}
    for told, declared in (
        (kinetic.options.MapOptions, kinetic.options.MapSettings),
        (kinetic.options.RunOptions, kinetic.options.Options),
    ):
        fields = inspect.signature(declared).parameters
        hints = typing.get_type_hints(declared, localns=names)
        assert typing.get_type_hints(told, localns=names) == {one: hints[one] for one in fields}
    _, told_of_run = typing.get_overloads(kinetic.run)
    shown = inspect.signature(kinetic.run).parameters
    assert inspect.signature(told_of_run).parameters == shown


@pytest.mark.parametrize(
    "slip",
    [
        lambda: kinetic.run("cpu")(len).run_async_map([1], max_concurent=3),  # type: ignore[call-arg]
        lambda: asyncio.run(kinetic.aio.run_async_map(len, [1], max_concurent=3)),  # type: ignore[call-overload]
        lambda: kinetic.collections.map(kinetic.run("cpu")(len), [1], max_concurent=3),  # type: ignore[call-arg]
    ],
)
def test_an_unknown_option_of_a_batch_names_the_nearest(slip: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="no option 'max_concurent': did you mean 'max_concurrent'"):
        slip()


def test_the_decorators_own_parameters_are_keywords() -> None:
    added = parameters(kinetic.run)[13:]
    assert [name for name, _, _ in added] == ["timeout", "start_timeout", "cpu", "memory"]
    assert {(kind, default) for _, kind, default in added} == {
        (inspect.Parameter.KEYWORD_ONLY, None)
    }


HELPED = {"facing", "logs"}
"""Those that a function of the module helps, and what makes a handle."""


def test_a_method_of_the_sync_face_hands_all_it_is_given_to_its_twin() -> None:
    """It asks what has its own name there. No loop, no condition, and no default of its own."""
    tree = ast.parse(Path(kinetic.jobs.__file__).read_text())
    methods = [
        (f"{one.name}.{method.name}", method)
        for one in tree.body
        if isinstance(one, ast.ClassDef)
        for method in one.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
        if not any(ast.unparse(one) == "overload" for one in method.decorator_list)
    ]
    listed = ("attach", "attach_batch", "cleanup", "list_batches", "list_jobs", "collect")
    functions = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
    methods += [(one.name, one) for one in functions if one.name in listed]
    assert len(methods) > 30
    for name, method in methods:
        assert len([one for one in method.body if not isinstance(one, ast.Expr)]) <= 3, name
        nodes = [node for line in method.body for node in ast.walk(line)]
        if method.name not in HELPED:
            there = ("self._aio", "self._async_handle", "aio")
            asked = [one for one in nodes if isinstance(one, ast.Attribute)]
            names = {one.attr for one in asked if ast.unparse(one.value) in there}
            assert method.name in names, f"{name} asks for {names}"
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        given = {one.arg for one in (*method.args.args, *method.args.kwonlyargs)} - {"self", "cls"}
        assert given <= used, f"{name} ignores {given - used}"


def test_every_name_of_the_package_is_lazy_listed_and_seen_by_type_checkers() -> None:
    tree = ast.parse(Path(kinetic.__file__).read_text())
    block = next(one for one in tree.body if isinstance(one, ast.If))
    seen = {alias.name for line in block.body for alias in line.names}  # type: ignore[attr-defined]
    assert seen - {"__version__"} == set(kinetic.__all__) == set(kinetic._HOMES)
    assert set(dir(kinetic)) == {*kinetic.__all__, "__version__"}
    for name in kinetic.__all__:
        assert getattr(kinetic, name) is not None


def test_a_name_that_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Runner'"):
        kinetic.Runner  # type: ignore[attr-defined]  # noqa: B018


def test_the_numbers_of_the_debugger_are_what_they_were() -> None:
    assert (kinetic.debug.DEBUGPY_PORT, kinetic.debug.DEBUG_WAIT_TIMEOUT) == (5678, 600)


def test_the_names_are_the_same_objects_wherever_they_are_taken_from() -> None:
    assert kinetic.submit is kinetic.aio.submit
    assert kinetic.JobHandle is kinetic.jobs.JobHandle
    assert kinetic.JobStatus is kinetic.job_status.JobStatus
    assert kinetic.BatchError is kinetic.errors.BatchError
    assert kinetic.attach_batch is kinetic.jobs.attach_batch
