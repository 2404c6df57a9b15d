"""The options of ``@kinetic.run`` and of ``run_async_map``: names, types, defaults, and rules.

Each of the two sets of options has two forms with the same names. A frozen dataclass refuses wrong
values. A ``TypedDict`` lets type checkers check the ``**options: Unpack[...]`` of a function.
`show_in_signature` makes ``help()`` list these names.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import posixpath
import re
import time
import types
from collections.abc import AsyncIterable, Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, TypeVar, Unpack, cast

from kinetic import accelerators
from kinetic._binding import Binding
from kinetic._messages import nearest, one_line, suggest
from kinetic._tracebacks import of_the_caller
from kinetic.accelerators import Accelerator
from kinetic.configuration import checked_backend
from kinetic.errors import ConfigurationError

if TYPE_CHECKING:
    from kinetic.data import Data

__all__ = ["MapOptions", "Options", "OtherOptions", "RunOptions"]

F = TypeVar("F", bound=Callable[..., Any])

STARTED = time.time()
"""When this process loaded kinetic, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: ``holds`` checks a value; in the error, ``requirement`` follows "must be"."""

    requirement: str
    holds: Callable[[Any], bool]


def _int_rule(least: int | None = None) -> Rule:
    requirement = "an int" if least is None else f"an int of at least {least}"
    return Rule(requirement, lambda value: _is_int(value) and (least is None or value >= least))


def _or_none(rule: Rule) -> Rule:
    return Rule(f"{rule.requirement}, or None", lambda value: value is None or rule.holds(value))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and _is_number(value) and 0 < value < math.inf


def _is_text_mapping(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    pairs = cast("Mapping[object, object]", value)
    return all(isinstance(text, str) for pair in pairs.items() for text in pair)


def _is_iterable_of_inputs(value: object) -> bool:
    """Return whether *value* is iterable, but not text, bytes, a dict, or a table."""
    if isinstance(value, str | bytes | bytearray | Mapping):
        return False
    # A DataFrame, or a table of Arrow, iterates over its columns or their names.
    if hasattr(value, "columns") and any(hasattr(value, name) for name in ("to_dict", "to_pylist")):
        return False
    # An object that only has __getitem__ isn't an Iterable by type, but iter() takes it.
    return isinstance(value, AsyncIterable | Iterable) or hasattr(value, "__getitem__")


_TEXT = Rule("text", lambda value: isinstance(value, str))
_ID = Rule("an ID such as a handle has", lambda value: isinstance(value, str) and bool(value))
_FLAG = Rule("True or False", lambda value: isinstance(value, bool))
_WAIT = Rule("a number of seconds of at least 0", lambda value: _is_number(value) and value >= 0)
_DIRECTION = Rule("'minimize' or 'maximize'", lambda value: value in ("minimize", "maximize"))
_ON_FAILURE = Rule("tell, retry, or ignore", lambda value: value in ("tell", "retry", "ignore"))
_PATH = Rule(
    "the path of a file, such as 'report.html'",
    lambda value: hasattr(value, "__fspath__") or (isinstance(value, str) and value != ""),
)
_DURATION = Rule("a finite number of seconds greater than 0", _is_positive)
_DOLLARS = Rule("a finite number of US dollars greater than 0", _is_positive)
_TAGS = Rule("a dict of text by text, such as {'team': 'maths'}", _is_text_mapping)

INPUT_MODES = ("auto", "single", "args", "kwargs", "labelled")

_MODE = Rule(
    f"one of {', '.join(INPUT_MODES)}",
    lambda value: isinstance(value, str) and value in INPUT_MODES,
)
_INPUTS = Rule(
    "an iterable with an input for each job (write [...] around a single one, .items() or "
    ".values() after a dict of many, and after a DataFrame of rows .to_dict('records') in pandas, "
    ".to_dicts() in Polars)",
    _is_iterable_of_inputs,
)

_RULES = {
    name: rule
    for rule, names in (
        (_FLAG, "cancel_running_on_fail cleanup fail_fast force items ordered prunable"),
        (_FLAG, "resume return_exceptions seal"),
        (_or_none(_FLAG), "progress"),
        (_or_none(_TEXT), "cluster metric name project"),
        (_ID, "group_id job_id submission"),
        (_int_rule(), "index"),
        (_int_rule(0), "n retries"),
        (_int_rule(1), "workers"),
        (_or_none(_int_rule(0)), "limit"),
        (_or_none(_int_rule(1)), "attempt max_concurrent trials window"),
        (_DURATION, "poll_interval"),
        (_or_none(_DURATION), "batch_timeout"),
        (_or_none(_WAIT), "poll_timeout timeout"),
        (_or_none(_DOLLARS), "budget"),
        (_DIRECTION, "direction"),
        (_MODE, "input_mode"),
        (_INPUTS, "inputs"),
        (_ON_FAILURE, "on_failure"),
        (_PATH, "path"),
        (_or_none(_TAGS), "tags"),
    )
    for name in names.split()
}
"""The rules that `check` applies, by the name of the argument."""

_NAME = _or_none(
    Rule("text that isn't empty", lambda value: isinstance(value, str) and value.strip() != "")
)
_POSITIVE = _or_none(Rule("a number greater than 0", _is_positive))

_SETTING_RULES = {
    **dict.fromkeys(("container_image", "base_image_repo", "zone", "project", "cluster"), _NAME),
    **dict.fromkeys(("backend", "namespace", "output_dir"), _NAME),
    **dict.fromkeys(("spot", "debug"), _FLAG),
    **dict.fromkeys(("timeout", "start_timeout", "cpu"), _POSITIVE),
    "isolation": Rule("'process' or 'worker'", lambda value: value in ("process", "worker")),
    "recycle": _or_none(_int_rule(1)),
}
"""Rules of these fields of `Options`; its ``__post_init__`` checks the other fields separately."""


def check(**values: object) -> None:
    """Check each argument by the rule for its name.

    Raises:
        ConfigurationError: A value is wrong: the message has its name, the rule, and the value.
    """
    _check_by(_RULES, values)


def _check_by(rules: Mapping[str, Rule], values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if not rules[name].holds(value):
            raise ConfigurationError(
                f"{name} must be {rules[name].requirement}, not {_short_repr(value)}"
            )


def check_indices(indices: Any) -> list[int] | None:
    """Return the indices of items as a list; None stays None.

    Raises:
        ConfigurationError: *indices* isn't iterable, or has something that isn't an int.
    """
    if indices is None:
        return None
    if isinstance(indices, str | bytes) or not isinstance(indices, Iterable):
        raise ConfigurationError(
            f"indices must be an iterable of ints, such as [3], or None, not {_short_repr(indices)}"
        )
    listed: list[Any] = [*indices]
    for index in listed:
        if not _is_int(index):
            raise ConfigurationError(f"indices must be ints, not {_short_repr(index)}")
    return listed


def _short_repr(value: object) -> str:
    try:
        return one_line(repr(value), 80)
    except Exception:
        return f"a {type(value).__name__}"


DEFAULT_ACCELERATOR = "tpu-v5e-1"
MIN_MEMORY_BYTES = 1 << 20
"""Minimum memory of a job in bytes; no Python starts in less."""

IMAGE_MODES = ("bundled", "prebuilt")
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]+)?|\[[0-9a-f:]+\](?::[0-9]+)?)"
_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:{_HOST}/)?{_COMPONENT}(?:/{_COMPONENT})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
    r"(?:@[a-z0-9]+:[0-9a-f]{32,})?"
)
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)", re.ASCII)
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}{end}": 1000**n for n, prefix in enumerate("kMGTPE", 1) for end in ("", "B")},
    **{f"{prefix}i{end}": 1024**n for n, prefix in enumerate("KMGTPE", 1) for end in ("", "B")},
    "K": 1000,
    "KB": 1000,
}
_SYSTEM_FOLDERS = ("/proc", "/sys", "/dev")
_SYSTEM_ROOTS = {
    *("/", "/app", "/bin", "/boot", "/etc", "/home", "/lib", "/lib32", "/lib64"),
    *("/root", "/run", "/sbin", "/tmp", "/usr", "/var"),
}


class OtherOptions(TypedDict, total=False):
    """The options of `RunOptions`, except ``init``."""

    accelerator: str
    container_image: str | None
    base_image_repo: str | None
    zone: str | None
    project: str | None
    capture_env_vars: list[str] | tuple[str, ...] | None
    cluster: str | None
    backend: str | None
    namespace: str | None
    volumes: dict[str, Data] | None
    spot: bool
    output_dir: str | None
    debug: bool
    timeout: float | None
    start_timeout: float | None
    cpu: float | None
    memory: str | int | None
    isolation: Literal["process", "worker"]
    recycle: int | None


class RunOptions(OtherOptions, total=False):
    """The options that `RemoteFunction.options` changes; see `run` for their meaning."""

    init: Mapping[str, Callable[[], Any]] | None


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a decorated function.

    ``timeout`` is how many seconds one attempt may run, counted from the call of the function.
    ``start_timeout`` is how many seconds one attempt may wait to start. ``memory`` is bytes, or
    text such as ``"4Gi"``. None leaves a setting to environment, profile, and default.
    ``parsed_accelerator`` is the accelerator that ``accelerator`` and ``spot`` name. ``init`` has
    plain functions.

    Raises:
        ConfigurationError: A value is wrong.
        TypeError: ``volumes`` is not a dict of `Data`.
    """

    accelerator: str = DEFAULT_ACCELERATOR
    container_image: str | None = None
    base_image_repo: str | None = None
    zone: str | None = None
    project: str | None = None
    capture_env_vars: list[str] | tuple[str, ...] | None = None
    cluster: str | None = None
    backend: str | None = None
    namespace: str | None = None
    volumes: dict[str, Data] | None = None
    spot: bool = False
    output_dir: str | None = None
    debug: bool = False
    _: KW_ONLY
    timeout: float | None = None
    start_timeout: float | None = None
    cpu: float | None = None
    memory: str | int | None = None
    isolation: Literal["process", "worker"] = "process"
    init: Mapping[str, Callable[[], Any]] | None = None
    recycle: int | None = None
    parsed_accelerator: Accelerator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parsed = accelerators.parse(self.accelerator, spot=self.spot)
        object.__setattr__(self, "parsed_accelerator", parsed)
        for name in ("timeout", "start_timeout"):
            if getattr(self, name) == math.inf:  # other libraries write "no limit" this way
                object.__setattr__(self, name, None)
        _check_by(_SETTING_RULES, {name: getattr(self, name) for name in _SETTING_RULES})
        if self.container_image not in (None, *IMAGE_MODES):
            checked_image(self.container_image)
        if self.backend is not None:
            checked_backend(self.backend, "the argument backend")
        object.__setattr__(self, "capture_env_vars", _check_patterns(self.capture_env_vars))
        object.__setattr__(self, "volumes", _check_volumes(self.volumes))
        object.__setattr__(self, "init", _check_init(self.init))
        if self.recycle is not None and self.isolation != "worker":
            raise ConfigurationError(
                f"recycle={self.recycle} has no effect with isolation={self.isolation!r}, which "
                "makes a process for each item: set isolation='worker', or recycle=None"
            )
        _ = self.memory_bytes  # raises if ``memory`` is wrong

    @property
    def memory_bytes(self) -> int | None:
        """``memory`` in bytes."""
        return None if self.memory is None else _parse_memory(self.memory)

    def check_init(self, function: Callable[..., Any]) -> None:
        """Check that *function* takes the arguments that ``init`` gives.

        Raises:
            ConfigurationError: It has no parameter of a name, or not for a keyword argument.
        """
        if self.init is None:
            return
        if misfit := Binding(function, self.init).find_init_mismatch():
            raise ConfigurationError(f"init does not fit: {misfit}")

    def changed(self, **changes: Unpack[RunOptions]) -> Self:
        """Return a copy with *changes*, checked like the original settings.

        Raises:
            TypeError: There is no such setting.
        """
        refuse_unknown(changes, type(self), "kinetic has no setting")
        return dataclasses.replace(self, **changes)


def settings_of(function: Callable[..., Any]) -> tuple[Callable[..., Any], Options]:
    """Return the plain function, and the settings of its decorator or else the defaults.

    Also finds the settings of a function inside ``functools.partial``, and of a bound method.

    Raises:
        TypeError: *function* can't be called.
    """
    if not callable(function):
        raise of_the_caller(
            TypeError(
                f"kinetic runs functions, not {type(function).__name__}; pass the function and its "
                "arguments, as in submit(train, 0.1)"
            )
        )
    found = _find_decorated(function)
    return (function, Options()) if found is None else found


def _find_decorated(function: Any) -> tuple[Callable[..., Any], Options] | None:
    """Return the plain function and its settings; None if *function* isn't decorated."""
    # Look at the type: functools.wraps can copy an instance's attribute to a plain wrapper.
    if hasattr(type(cast("object", function)), "__kinetic__"):
        return function.__wrapped__, function.__kinetic__
    if isinstance(function, functools.partial) and (found := _find_decorated(function.func)):
        return functools.partial(found[0], *function.args, **function.keywords), found[1]
    if isinstance(function, types.MethodType) and (found := _find_decorated(function.__func__)):
        return types.MethodType(found[0], function.__self__), found[1]
    return None


def checked_image(name: str) -> str:
    """Return *name* if it can name a container image and isn't a misspelled mode.

    Raises:
        ConfigurationError: *name* can't name an image, or resembles ``bundled`` or ``prebuilt``.
    """
    if similar := nearest(name, IMAGE_MODES, cutoff=0.8):
        raise ConfigurationError(
            f"container_image={name!r} resembles {similar[0]!r}: write that, or the image's whole "
            f"name, as in docker.io/library/{name.lower()}:latest"
        )
    if _IMAGE.fullmatch(name) is None:
        hint = "leave the scheme out" if "://" in name else "write it as registry/name:tag"
        raise ConfigurationError(
            f"container_image={name!r} isn't the name of a container image: {hint}, or use "
            '"bundled" or "prebuilt"'
        )
    return name


def _check_patterns(value: object) -> tuple[str, ...] | None:
    """Return the patterns of ``capture_env_vars`` as a tuple; None stays None."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, list | tuple | set | frozenset):
        raise ConfigurationError(
            f"capture_env_vars must be a list of names such as ['WANDB_*'], not {value!r}"
        )
    patterns = cast("Collection[object]", value)  # isinstance doesn't tell the type of the items
    names: list[str] = []
    for name in patterns:
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigurationError(
                f"capture_env_vars has {name!r}, which isn't the name of a variable; kinetic "
                "reads the values from the environment when you call the function"
            )
        names.append(name)
    return tuple(names if isinstance(value, list | tuple) else sorted(names))


def _check_volumes(value: object) -> dict[str, Data] | None:
    """Return the volumes by normalized mount path; None stays None."""
    if value is None:
        return None
    if not isinstance(value, dict):
        message = "volumes must be a dict like {'/data': Data('./data')}"
        raise of_the_caller(TypeError(f"{message}, not {type(value).__name__}"))
    from kinetic.data import Data

    entries = cast("dict[object, object]", value)
    volumes: dict[str, Data] = {}
    for path, data in entries.items():
        mount = _mount_path(path)
        if not isinstance(data, Data):
            message = f"volumes[{path!r}] must be kinetic.Data, not {type(data).__name__}"
            raise of_the_caller(TypeError(f"{message}: write Data(...) around the path"))
        if mount in volumes:
            raise ConfigurationError(f"volumes has {mount!r} twice")
        volumes[mount] = data
    return volumes


def _check_init(value: object) -> Mapping[str, Callable[[], Any]] | None:
    """Return a copy of ``init`` with plain functions; None without any."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            "init must be a dict from arguments to the functions that make them, such as "
            f"{{'model': load_model}}, not {_short_repr(value)}"
        )
    functions: dict[str, Callable[[], Any]] = {}
    for name, make in cast("Mapping[object, object]", value).items():
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"init has {name!r}, which isn't the name of an argument")
        if not callable(make):
            raise ConfigurationError(
                f"init[{name!r}] must be a function, not {_short_repr(make)}: write the name of "
                "the function that makes the value, without parentheses"
            )
        functions[name], _ = settings_of(make)
        if misfit := Binding(functions[name]).find_mismatch((), {}):
            raise ConfigurationError(f"init[{name!r}] must take no arguments: {misfit}")
    return functions or None


def _mount_path(path: object) -> str:
    """Return *path* normalized; refuse a relative path, and a path that hides a system folder."""
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise ConfigurationError(
            f"volumes has {path!r}, which is not an absolute path such as '/data'"
        )
    mount = "/" + posixpath.normpath(path).lstrip("/")
    if ".." in path.split("/"):
        raise ConfigurationError(f"volumes has {path!r}: write the path without '..'")
    if mount in _SYSTEM_ROOTS or any(
        f"{mount}/".startswith(f"{folder}/") for folder in _SYSTEM_FOLDERS
    ):
        raise ConfigurationError(
            f"volumes can't be mounted at {mount!r}: a job needs the system's files there"
        )
    return mount


def _parse_memory(value: object) -> int:
    """Return the bytes of an int, or of text such as ``4Gi`` or ``4GiB``; K and k mean 1000."""
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value.strip())
        unit = _UNITS.get(match[2]) if match else None
        if match is None or unit is None:
            raise ConfigurationError(
                f"memory is {value!r}: write a number and a unit, such as '512Mi', '4Gi' or '2G'"
            )
        size = int(float(match[1]) * unit)
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        raise ConfigurationError(
            f"memory must be bytes or text such as '4Gi', not {type(value).__name__}"
        )
    if size < MIN_MEMORY_BYTES:
        raise ConfigurationError(
            f"memory is {value!r}, that is {size} bytes; a job needs at least 1 MiB: write a unit, "
            "such as '4Gi'"
        )
    return size


class MapOptions(TypedDict, total=False):
    """The keyword arguments of `run_async_map`, for signatures that pass them on."""

    input_mode: str
    max_concurrent: int | None
    retries: int
    fail_fast: bool
    cancel_running_on_fail: bool
    name: str | None
    tags: Mapping[str, str] | None
    project: str | None
    cluster: str | None
    window: int | None
    batch_timeout: float | None
    budget: float | None
    prunable: bool
    progress: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MapSettings:
    """How a batch runs; `kinetic.aio.Client.run_async_map` explains each setting.

    Raises:
        ConfigurationError: A value is wrong.
    """

    input_mode: str = "auto"
    max_concurrent: int | None = 64
    retries: int = 0
    fail_fast: bool = False
    cancel_running_on_fail: bool = False
    name: str | None = None
    tags: Mapping[str, str] | None = None
    project: str | None = None
    cluster: str | None = None
    window: int | None = None
    batch_timeout: float | None = None
    budget: float | None = None
    prunable: bool = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.batch_timeout == math.inf:  # other libraries write "no limit" this way
            object.__setattr__(self, "batch_timeout", None)
        check(**{name: getattr(self, name) for name in self.__slots__})
        if self.tags is not None:  # a copy, because the caller may change the dict
            object.__setattr__(self, "tags", dict(self.tags))

    @classmethod
    def of(cls, **options: Unpack[MapOptions]) -> Self:
        """Return the settings in the keyword arguments of `run_async_map`.

        Raises:
            ConfigurationError: A value is wrong.
            TypeError: There is no such option.
        """
        refuse_unknown(options, cls, "run_async_map has no option")
        settings = cls(**options)
        # Not in `__post_init__`: the manifests of earlier batches may have this combination.
        if settings.cancel_running_on_fail and not settings.fail_fast:
            raise ConfigurationError(
                "cancel_running_on_fail=True has no effect with fail_fast=False: set "
                "fail_fast=True, or leave cancel_running_on_fail out"
            )
        return settings

    def window_for(self, length: int | None) -> int | None:
        """Return the window; by default twice `max_concurrent` if *length* isn't known (None)."""
        if self.window is None and length is None and self.max_concurrent is not None:
            return 2 * self.max_concurrent
        return self.window


def show_in_signature(settings: type[Any]) -> Callable[[F], F]:
    """Return a decorator that puts the fields of *settings* into a function's signature.

    `inspect.signature` and ``help`` then show them instead of ``*args`` and ``**options``.
    """
    variadic_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    added_parameters = inspect.signature(settings).parameters.values()

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        parameters = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind not in variadic_kinds
        ]
        decorated: Any = function
        decorated.__signature__ = signature.replace(parameters=[*parameters, *added_parameters])
        return function

    return decorate


def refuse_unknown(given: Iterable[str], settings: type[Any], prefix: str) -> None:
    """Check that the *given* names are fields of *settings*.

    Raises:
        TypeError: A name isn't a field. The message has *prefix*, the name, and where kinetic takes
            such an option. If there is no such option, the message has the nearest fields.
    """
    known = [*inspect.signature(settings).parameters]
    for name in given:
        if name not in known:
            hint = usage_hint(name) or suggest(name, known)
            raise of_the_caller(TypeError(f"{prefix} {name!r}: {hint}"))


def usage_hint(name: str) -> str:
    """Return where to give the option *name*; empty if there is no such option."""
    if name in RunOptions.__annotations__:
        return f"{name} is an option of the decorator: run({name}=...), or f.options({name}=...)"
    if name in MapOptions.__annotations__:
        return f"{name} is an option of run_async_map, as in run_async_map(inputs, {name}=...)"
    return ""
