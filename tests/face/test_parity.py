"""Test that the sync and async APIs have the same names and the promised signatures."""

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
    "Sweep": (kinetic.jobs.Sweep, kinetic.aio.Sweep),
    "module": (kinetic.jobs, kinetic.aio),
}
ONLY_SYNC = {
    "JobHandle": {"facing"},
    "BatchHandle": {"created_at", "group_id", "name", "tags"},
    "Sweep": {"batch"},
    "module": set(),
}
ONLY_ASYNC = {
    "JobHandle": {
        *("account", "began_at", "bound", "bundle", "debugger", "facts", "forward_debugger"),
        "shown_status",
    },
    "BatchHandle": {
        *("bundle", "facts", "is_cut", "let_run", "resume_alone", "running_times", "show"),
        *("shown_statuses", "snapshots"),
    },
    "Sweep": {"abandon", "bundle", "facts", "follow", "is_over", "proposals", "read"},
    "module": {"Client", "build_image", "content_hash", "image_of", "pack"},
}

# The promised signatures, in Python's notation.
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
    names = getattr(owner, "__all__", None) or [name for name in dir(owner) if name[0] != "_"]
    members = {name: getattr(owner, name) for name in names}  # loads lazy names
    return {name: inspect.getattr_static(owner, name) for name in members}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Return the name, kind, and default of each parameter."""
    if isinstance(function, classmethod | staticmethod):
        function = function.__func__
    found = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in found]


def promised(signature: str) -> list[tuple[str, Any, Any]]:
    namespace: dict[str, Any] = {}
    exec(f"def function({' '.join(signature.split())}): ...", namespace)
    return parameters(namespace["function"])


@pytest.mark.parametrize("pair", PAIRS)
def test_both_apis_have_the_same_names(pair: str) -> None:
    sync_names, async_names = (set(public(owner)) for owner in PAIRS[pair])
    assert sync_names - async_names - ONLY_SYNC[pair] == set()
    assert async_names - sync_names == ONLY_ASYNC[pair]


@pytest.mark.parametrize(
    ("pair", "name"),
    [
        (pair, name)
        for pair, (sync_owner, async_owner) in PAIRS.items()
        for name in sorted(set(public(sync_owner)) & set(public(async_owner)))
    ],
)
def test_both_apis_have_the_same_signatures(pair: str, name: str) -> None:
    sync_member, async_member = (public(owner)[name] for owner in PAIRS[pair])
    assert type(sync_member) is type(async_member)
    if isinstance(sync_member, property):
        assert (sync_member.__doc__ or "").strip()
    elif inspect.isfunction(sync_member) or isinstance(sync_member, classmethod | staticmethod):
        assert parameters(sync_member) == parameters(async_member)
        assert inspect.getdoc(sync_member), "it has the docstring of the async API"


@pytest.mark.parametrize("call", PROMISED, ids=lambda call: call.partition("(")[0])
def test_the_promised_signatures_hold(call: str) -> None:
    """Later parameters come after the promised ones, and have defaults."""
    name, _, signature = call.removesuffix(")").partition("(")
    expected, found = promised(signature), parameters(operator.attrgetter(name)(kinetic))
    assert found[: len(expected)] == expected
    assert all(default is not inspect.Parameter.empty for _, _, default in found[len(expected) :])


@pytest.mark.parametrize(
    "function",
    [
        kinetic.aio.run_async_map,
        kinetic.aio.Client.run_async_map,
        kinetic.jobs.run_async_map,
        kinetic.RemoteFunction.run_async_map,
        kinetic.collections.map,
    ],
    ids=lambda function: f"{function.__module__}.{function.__qualname__}",
)
def test_every_function_that_starts_a_batch_has_the_declared_options(
    function: Callable[..., Any],
) -> None:
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    keywords = [parameter for parameter in parameters(function) if parameter[1] is keyword_only]
    assert keywords == parameters(kinetic.options.MapSettings)
    assert "max_concurrent: 'int | None' = 64" in str(inspect.signature(function))


def test_the_types_of_options_match_the_declared_options() -> None:
    names = {"Data": kinetic.Data}
    for typed, settings in (
        (kinetic.options.MapOptions, kinetic.options.MapSettings),
        (kinetic.options.RunOptions, kinetic.options.Options),
    ):
        fields = inspect.signature(settings).parameters
        hints = typing.get_type_hints(settings, localns=names)
        expected = {name: hints[name] for name in fields}
        assert typing.get_type_hints(typed, localns=names) == expected
    _, with_settings, with_init = typing.get_overloads(kinetic.run)
    shown = dict(inspect.signature(kinetic.run).parameters)
    del shown["init"]  # its type decides which overload it is
    for overload in (with_settings, with_init):
        declared = dict(inspect.signature(overload).parameters)
        del declared["init"]
        assert declared == shown


@pytest.mark.parametrize(
    "call",
    [
        lambda: kinetic.run("cpu")(len).run_async_map([1], max_concurent=3),  # type: ignore[call-arg]
        lambda: asyncio.run(kinetic.aio.run_async_map(len, [1], max_concurent=3)),  # type: ignore[call-overload]
        lambda: kinetic.collections.map(kinetic.run("cpu")(len), [1], max_concurent=3),  # type: ignore[call-arg]
    ],
)
def test_an_unknown_option_of_a_batch_names_the_nearest(call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="no option 'max_concurent': did you mean 'max_concurrent'"):
        call()


def test_parameters_that_the_public_package_lacks_are_keywords() -> None:
    added = parameters(kinetic.run)[13:]
    assert [name for name, _, _ in added] == [
        *("timeout", "start_timeout", "cpu", "memory", "isolation", "init", "recycle")
    ]
    assert {kind for _, kind, _ in added} == {inspect.Parameter.KEYWORD_ONLY}
    assert [default for _, _, default in added] == [*[None] * 4, "process", None, None]


WITH_OTHER_BODIES = {"facing", "logs"}
"""Methods that don't call their counterpart directly."""


def test_a_sync_method_passes_all_arguments_to_its_async_counterpart() -> None:
    """It calls the async method of the same name, without loops, conditions, or other defaults."""
    tree = ast.parse(Path(kinetic.jobs.__file__).read_text())
    methods = [
        (f"{node.name}.{method.name}", method)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
        if not any(ast.unparse(decorator) == "overload" for decorator in method.decorator_list)
    ]
    listed = ("attach", "attach_batch", "cleanup", "list_batches", "list_jobs", "collect")
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    methods += [(function.name, function) for function in functions if function.name in listed]
    assert len(methods) > 30
    for name, method in methods:
        assert len([line for line in method.body if not isinstance(line, ast.Expr)]) <= 3, name
        nodes = [node for line in method.body for node in ast.walk(line)]
        if method.name not in WITH_OTHER_BODIES:
            owners = ("self._aio", "self._async_handle", "aio")
            attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
            names = {node.attr for node in attributes if ast.unparse(node.value) in owners}
            assert method.name in names, f"{name} calls {names}"
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        arguments = {argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)}
        unused = arguments - {"self", "cls"} - used
        assert not unused, f"{name} ignores {unused}"


def test_every_public_name_is_lazy_and_listed_for_type_checkers() -> None:
    tree = ast.parse(Path(kinetic.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name for line in block.body for alias in line.names}  # type: ignore[attr-defined]
    assert imported - {"__version__"} == set(kinetic.__all__) == set(kinetic._MODULES)
    assert set(dir(kinetic)) == {*kinetic.__all__, "__version__"}
    for name in kinetic.__all__:
        assert getattr(kinetic, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Runner'"):
        kinetic.Runner  # type: ignore[attr-defined]  # noqa: B018


def test_the_constants_of_the_debugger_keep_their_values() -> None:
    assert (kinetic.debug.DEBUGPY_PORT, kinetic.debug.DEBUG_WAIT_TIMEOUT) == (5678, 600)


def test_a_name_is_the_same_object_in_each_module() -> None:
    assert kinetic.submit is kinetic.aio.submit
    assert kinetic.JobHandle is kinetic.jobs.JobHandle
    assert kinetic.JobStatus is kinetic.job_status.JobStatus
    assert kinetic.BatchError is kinetic.errors.BatchError
    assert kinetic.attach_batch is kinetic.jobs.attach_batch
