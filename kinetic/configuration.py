"""Choose the value of each setting, and derive the backend from the settings.

The first source that has a value wins: the argument (anything but None), the ``KINETIC_*`` variable
(anything but empty), the active profile, the default. The setting ``project`` has one more source
after the profile: the variable GOOGLE_CLOUD_PROJECT.

The backend is the argument, else KINETIC_BACKEND, else the profile's, else ``gke`` if a project or
KINETIC_KUBE_CONTEXT is configured, else ``local``. For an accelerator with several hosts, ``gke``
becomes ``pathways``, because the accelerator's pods must start together.

GOOGLE_CLOUD_PROJECT chooses ``gke`` only for an accelerator that this machine lacks, or if a
cluster is configured for kinetic. Cloud Shell, editors, and ``.env`` files also set the variable.
So it doesn't prove that the user wants to upload source and pay for machines.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kinetic import profiles
from kinetic._devices import gpu_ids, has_tpus
from kinetic._messages import nearest, suggest
from kinetic.errors import ConfigurationError

if TYPE_CHECKING:
    from kinetic.accelerators import Accelerator

__all__ = ["VARIABLES", "Target", "home", "profiles_file", "resolve"]

T = TypeVar("T", int, float)

BACKENDS = ("gke", "pathways", "local")

SHIPS = ("all", "git")

PROJECT_SETTINGS = ("ship",)
"""The settings that ``[tool.kinetic]`` in a project's pyproject.toml may have."""

DEFAULTS: Mapping[str, str] = {
    "zone": "us-central1-a",
    "cluster": "kinetic-cluster",
    "namespace": "default",
}

VARIABLES: Mapping[str, str] = {
    "KINETIC_BACKEND": "gke, pathways, or local",
    "KINETIC_PROJECT": "the GCP project",
    "GOOGLE_CLOUD_PROJECT": "the GCP project if neither KINETIC_PROJECT nor a profile names one",
    "KINETIC_ZONE": "the GCP zone (us-central1-a)",
    "KINETIC_CLUSTER": "the GKE cluster (kinetic-cluster)",
    "KINETIC_NAMESPACE": "the Kubernetes namespace (default)",
    "KINETIC_KUBE_CONTEXT": "a kubeconfig context, or in-cluster, instead of a GKE cluster",
    "KINETIC_MULTIHOST": "lws or jobset: the object for jobs on several hosts (lws)",
    "KINETIC_JOB_TTL_S": "seconds until a platform forgets a finished job (86400)",
    "KINETIC_SUBMIT_PATIENCE": "seconds a batch waits while the platform refuses jobs (900)",
    "KINETIC_QUEUE": "the Kueue queue of jobs on a cluster",
    "KINETIC_PRIORITY_CLASS": "the priority class of jobs on a cluster",
    "KINETIC_SERVICE_ACCOUNT": "the Kubernetes service account of jobs (kinetic)",
    "KINETIC_RUN_AS_USER": "the user ID of pods; 0 is root (the image's)",
    "KINETIC_POD_ANNOTATIONS": "annotations of pods, as NAME=VALUE,NAME=VALUE (none)",
    "KINETIC_STORE": "the bucket or directory of jobs, instead of the backend's own",
    "KINETIC_BILLING_PROJECT": "the project that pays if the requester pays for a bucket",
    "KINETIC_STORE_CLAIM": "the PersistentVolumeClaim that holds KINETIC_STORE (a hostPath)",
    "KINETIC_BASE_IMAGE_REPO": "the repository of prebuilt base images",
    "KINETIC_PYTHON_IMAGE": "the base of built images (python:{python}-slim)",
    "KINETIC_OUTPUT_DIR": "where jobs write files to keep; in a job, its own directory",
    "KINETIC_PROFILE": "the profile to use, instead of the current profile",
    "KINETIC_PROFILES_FILE": "the file of profiles (profiles.json in KINETIC_HOME)",
    "KINETIC_HOME": "profiles, store, supervisor, and caches of this machine (~/.kinetic)",
    "KINETIC_LOCAL_SLOTS": "limit of CPUs for all local jobs together (all)",
    "KINETIC_LOCAL_IDLE_S": "seconds without a job until the supervisor ends",
    "KINETIC_TMPDIR": "where each local job has its own TMPDIR (your TMPDIR, or /tmp)",
    "KINETIC_LOCAL_FRESH": "1: a fresh interpreter for local jobs and workers (off; on for macOS)",
    "KINETIC_CACHE_AGE_S": "how long caches keep unused contents, in seconds (2592000)",
    "KINETIC_CACHE_SIZE_MB": "how large the caches may be, in MB (20000)",
    "KINETIC_FORCE_DESTROY": "1: `kinetic down` also removes the buckets, with all results (0)",
    "KINETIC_RESERVATION": "the reservation that `kinetic pool add` uses",
    "KINETIC_PRICES": "a JSON file with your own prices: accelerator to US dollars per hour",
    "KINETIC_LOG_LEVEL": "the level of kinetic's own log (as your program configures it)",
    "KINETIC_PROGRESS": "how to show progress: auto, live, plain, or off (auto)",
    "KINETIC_NO_TTY_DEBUG": "1: allow debug=True without a terminal (off)",
    "KINETIC_DEBUG_PORT": "the port where f() with debug=True listens for the editor (5678)",
    "KINETIC_DEBUG_WAIT_S": "seconds a job waits for a debugger, and debug_attach for a job (600)",
    "KINETIC_PACKAGE_ROOT": "the project's root, instead of the one found by its markers",
    "KINETIC_BY_VALUE": "modules and packages to send by value; jobs import all others (none)",
    "KINETIC_NO_DEFAULT_EXCLUDES": "1: also ship the files that are excluded by default (off)",
    "KINETIC_SHIP": "all, or git: the project without what git ignores (all)",
    "KINETIC_CONTEXT_SIZE_WARN_MB": "warn about a larger project archive, in MB (100)",
    "KINETIC_PAYLOAD_SIZE_WARN_MB": "warn about larger pickled arguments, in MB (50)",
    "KINETIC_JOB_ID": "in a job: its ID",
    "KINETIC_GROUP_ID": "in a job of a batch: the batch's ID",
    "KINETIC_INDEX": "in a job: the index of its input in the batch; 0 for a single job",
    "KINETIC_HOSTS": "in a job on several hosts: their number",
    "KINETIC_HOST": "in a job on several hosts: the number of this one, from 0",
    "KINETIC_COORDINATOR": "in a job on several hosts: HOST:PORT of the first one",
    "KINETIC_OUTPUT_PATH": "in a job: a local directory whose files go to KINETIC_OUTPUT_DIR",
    "KINETIC_ATTEMPT": "in a job: the number of its attempt, from 1",
}
"""Every variable that you can set or read, with its meaning and its default."""

DEBUG_PORT, DEBUG_WAIT_S = 5678, 600.0

LOG_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "FATAL": 50}


def misspelt_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that nothing reads, and the similar name of each that kinetic reads."""
    similar = {
        name: nearest(name, VARIABLES, limit=1, cutoff=0.9)
        for name in environ
        if name.startswith("KINETIC_") and name not in VARIABLES
    }
    return {name: names[0] for name, names in similar.items() if names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where jobs run, with every setting chosen.

    ``why`` is a phrase that says how the backend was chosen; equality ignores it. ``store`` is a
    bucket or directory instead of the backend's own, ``kube_context`` a context of the kubeconfig
    instead of the cluster's own address. ``run_as_user`` is the user ID of pods. None: the image's
    user or, if the store is a directory, this process's user. ``pod_annotations`` has the name and
    the value of each annotation that pods get. ``store_claim`` is the
    PersistentVolumeClaim by which pods mount the store's directory. None: pods mount the same path
    of their node.
    """

    backend: str
    why: str = field(compare=False)
    project: str | None
    zone: str
    cluster: str
    namespace: str
    store: str | None
    base_image_repo: str | None
    output_dir: str | None
    kube_context: str | None
    run_as_user: int | None = None
    pod_annotations: tuple[tuple[str, str], ...] = ()
    store_claim: str | None = None

    @property
    def region(self) -> str:
        """Return the region of the zone; for an Autopilot cluster, ``zone`` itself is a region."""
        return "-".join(self.zone.split("-")[:2])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The sources of settings; `find` returns the value from the first source that has one."""

    arguments: Mapping[str, str | None]
    environ: Mapping[str, str]
    profile: profiles.Profile | None

    def find(self, name: str) -> tuple[str | None, str]:
        """Return the value, and a phrase that names its source; the phrase of a default is empty.

        If no source has a value, and there is no default, the value is None.
        """
        argument = self.arguments.get(name)
        if argument is not None:
            if not argument:
                raise ConfigurationError(
                    f"the argument {name} is empty; leave it out to use the configured value"
                )
            return argument, f"the argument {name}"
        variable = f"KINETIC_{name.upper()}"
        if value := self.environ.get(variable):
            return value, variable
        if self.profile and (value := self.profile.settings.get(name)):
            return value, f"the profile {self.profile.name!r}"
        return DEFAULTS.get(name), ""

    def value(self, name: str) -> str | None:
        return self.find(name)[0]


def resolve(
    *,
    backend: str | None = None,
    project: str | None = None,
    zone: str | None = None,
    cluster: str | None = None,
    namespace: str | None = None,
    store: str | None = None,
    base_image_repo: str | None = None,
    output_dir: str | None = None,
    accelerator: Accelerator | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Target:
    """Choose every setting; an argument of None leaves its setting to the other sources.

    Reads the file of profiles, and may look for the accelerator's devices on this machine.

    Raises:
        ConfigurationError: The backend doesn't exist, or it needs a cluster and neither a project
            nor a context is configured. Or an argument is empty, the zone is malformed, or a
            numeric setting has a wrong value.
        ProfileError: The profiles can't be read, or the profile doesn't exist.
    """
    _check_numbers(environ)
    settings = _Settings(
        arguments={
            "backend": backend,
            "project": project,
            "zone": zone,
            "cluster": cluster,
            "namespace": namespace,
            "store": store,
            "base_image_repo": base_image_repo,
            "output_dir": output_dir,
        },
        environ=environ,
        profile=_load_profiles(environ).active(environ),
    )
    chosen_backend, why = _choose_backend(settings, accelerator)
    named_project = settings.value("project") or environ.get("GOOGLE_CLOUD_PROJECT") or None
    kube_context = settings.value("kube_context")
    if chosen_backend != "local" and not (named_project or kube_context):
        hint = '. backend="local" runs on this machine without one' if backend is None else ""
        raise ConfigurationError(
            f"No GCP project configured for the backend {chosen_backend!r} ({why}); pass project= "
            "(--project of a command), set KINETIC_PROJECT, or use a profile. For a cluster "
            f"elsewhere, name a context of your kubeconfig in KINETIC_KUBE_CONTEXT{hint}"
        )
    return Target(
        backend=chosen_backend,
        why=why,
        project=named_project,
        zone=checked_zone(*settings.find("zone")),
        cluster=settings.value("cluster") or DEFAULTS["cluster"],
        namespace=settings.value("namespace") or DEFAULTS["namespace"],
        store=settings.value("store"),
        base_image_repo=settings.value("base_image_repo"),
        output_dir=settings.value("output_dir"),
        kube_context=kube_context,
        run_as_user=_parse_user_id(*settings.find("run_as_user")),
        pod_annotations=checked_annotations(*settings.find("pod_annotations")),
        store_claim=settings.value("store_claim"),
    )


_ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]+(-[a-z0-9]+)?")


def checked_zone(zone: str | None, origin: str) -> str:
    """Check that *zone* has the form of a zone or a region; None and "" give the default zone.

    Raises:
        ConfigurationError: *zone* has another form.
    """
    zone = zone or DEFAULTS["zone"]
    if _ZONE.fullmatch(zone) is None:
        raise ConfigurationError(
            f"{zone!r} (from {origin}) isn't a valid zone or region of Google Cloud; write one "
            f"such as {DEFAULTS['zone']}, or omit it"
        )
    return zone


def _parse_user_id(text: str | None, origin: str) -> int | None:
    """Return a user ID as a number, and None for None; Kubernetes takes IDs below 2**31."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) < 2**31):
        raise ConfigurationError(
            f"run_as_user from {origin} must be the number of a user, such as 1000, not {text!r}"
        )
    return int(text)


_ANNOTATION = re.compile(r"(?:[a-z0-9.-]{1,253}/)?[a-z0-9](?:[\w.-]{0,61}[a-z0-9])?", re.A | re.I)


def checked_annotations(text: str | None, origin: str) -> tuple[tuple[str, str], ...]:
    """Return the name and the value of each annotation in ``NAME=VALUE,NAME=VALUE``.

    Raises:
        ConfigurationError: *text*, which is from *origin*, has another form.
    """
    found: dict[str, str] = {}
    for entry in text.split(",") if text else ():
        name, separator, value = (part.strip() for part in entry.partition("="))
        if not separator or _ANNOTATION.fullmatch(name) is None:
            raise ConfigurationError(
                f"pod_annotations from {origin} must be annotations such as "
                f"sidecar.istio.io/inject=false, with commas between them; {entry!r} is none"
            )
        if name.startswith("kinetic.dev/"):
            raise ConfigurationError(f"pod_annotations from {origin} can't set kinetic's {name!r}")
        found[name] = value
    return tuple(found.items())


def ship(root: Path, environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return which files of the project at *root* ship, and where the setting comes from.

    ``git`` leaves out what git ignores; ``all`` doesn't. After KINETIC_SHIP and the profile,
    ``[tool.kinetic]`` in the project's pyproject.toml can choose. The default is ``all``, whose
    origin is empty.

    Raises:
        ConfigurationError: The setting has another value, or ``[tool.kinetic]`` can't be read.
        ProfileError: The profiles can't be read, or the profile doesn't exist.
    """
    profile = _load_profiles(environ).active(environ)
    value, origin = _Settings(arguments={}, environ=environ, profile=profile).find("ship")
    if value is None:
        file = root / "pyproject.toml"
        value, origin = _project_settings(file).get("ship"), f"[tool.kinetic] in {file}"
    if value is None:
        return SHIPS[0], ""
    if value not in SHIPS:
        raise ConfigurationError(f'ship from {origin} must be "all" or "git", not {value!r}')
    return value, origin


def _project_settings(file: Path) -> dict[str, Any]:
    """Return the table ``[tool.kinetic]`` of a pyproject.toml; empty if there is none."""
    try:
        content = file.read_bytes()
    except OSError:  # there is none, or the reader of the dependencies reports the error
        return {}
    if b"tool" not in content or b"kinetic" not in content:
        return {}
    import tomllib  # few projects need it

    try:
        tool: Any = tomllib.loads(content.decode()).get("tool")
    except ValueError as exc:
        raise ConfigurationError(f"{file} isn't valid TOML: {exc}") from exc
    tables = cast("dict[str, Any]", tool) if isinstance(tool, dict) else {}
    table: Any = tables.get("kinetic", {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"kinetic in [tool] of {file} must be a table, not {table!r}")
    settings = cast("dict[str, Any]", table)
    for name in settings:
        if name not in PROJECT_SETTINGS:
            hint = suggest(name, PROJECT_SETTINGS)
            raise ConfigurationError(f"[tool.kinetic] in {file} has no setting {name!r}; {hint}")
    return settings


SHOWN = ("backend", *(name for name in profiles.SETTINGS if name != "backend"))
"""The settings that `sources` returns, in the order to show them."""


def sources(arguments: Mapping[str, str | None]) -> dict[str, tuple[str | None, str]]:
    """Return each setting's value and its source; *arguments* are those of the caller.

    Raises:
        ConfigurationError: An argument is empty, or the backend doesn't exist.
        ProfileError: The profiles can't be read, or the profile doesn't exist.
    """
    profile = _load_profiles(os.environ).active(os.environ)
    settings = _Settings(arguments=arguments, environ=os.environ, profile=profile)
    found = {name: settings.find(name) for name in SHOWN}
    shown = {name: (value, origin or "default") for name, (value, origin) in found.items()}
    shown |= {name: (None, "not set") for name, (value, _) in found.items() if value is None}
    if found["project"][0] is None and (project := os.environ.get("GOOGLE_CLOUD_PROJECT")):
        shown["project"] = project, "GOOGLE_CLOUD_PROJECT"
    if found["ship"][0] is None:
        shown["ship"] = SHIPS[0], "default; [tool.kinetic] in pyproject.toml can change it"
    return {**shown, "backend": _choose_backend(settings, None)}


_NUMBER_RULES: Mapping[str, tuple[type[int | float], int]] = {
    "KINETIC_LOCAL_SLOTS": (int, 1),
    "KINETIC_LOCAL_IDLE_S": (float, 0),
    "KINETIC_JOB_TTL_S": (int, 0),
    "KINETIC_CACHE_AGE_S": (float, 0),
    "KINETIC_CACHE_SIZE_MB": (float, 0),
    "KINETIC_DEBUG_PORT": (int, 0),
    "KINETIC_DEBUG_WAIT_S": (float, 0),
    "KINETIC_SUBMIT_PATIENCE": (float, 0),
    "KINETIC_CONTEXT_SIZE_WARN_MB": (float, 0),
    "KINETIC_PAYLOAD_SIZE_WARN_MB": (float, 0),
}


def _check_numbers(environ: Mapping[str, str]) -> None:
    """Check all numeric variables early, because other processes read some of them much later."""
    for name, (kind, least) in _NUMBER_RULES.items():
        text = environ.get(name) or str(least)
        try:
            is_valid = kind(text) >= least  # False for nan
        except ValueError:
            is_valid = False
        if not is_valid:
            required = "a whole number" if kind is int else "a number"
            raise ConfigurationError(f"{name} must be {required} of at least {least}, not {text!r}")


def number(name: str, default: T, environ: Mapping[str, str] = os.environ) -> T:
    """Return the number in the variable *name*, of the type of *default*.

    Raises:
        ConfigurationError: A numeric variable has a wrong value.
    """
    _check_numbers(environ)
    text = environ.get(name)
    return type(default)(text) if text else default


def _choose_backend(settings: _Settings, accelerator: Accelerator | None) -> tuple[str, str]:
    """Return the backend, and a phrase that says why."""
    name, origin = settings.find("backend")
    if name is None:
        name, why = _implied_backend(settings, accelerator)
    else:
        name, why = checked_backend(name, origin), f"chosen by {origin}"
    if name == "gke" and accelerator is not None and accelerator.multi_host:
        return "pathways", f"{why}; {accelerator} has {accelerator.hosts} hosts"
    return name, why


def _implied_backend(settings: _Settings, accelerator: Accelerator | None) -> tuple[str, str]:
    """Return the backend that the other settings imply, and a phrase that says why."""
    for setting in ("project", "kube_context"):
        value, origin = settings.find(setting)
        if value:
            return "gke", f"{setting} {value!r} comes from {origin}"
    project = settings.environ.get("GOOGLE_CLOUD_PROJECT")
    cluster, origin = settings.find("cluster")
    if project and origin:
        return "gke", f"cluster {cluster!r} comes from {origin}, its project from the environment"
    if (
        project
        and accelerator is not None
        and not _is_on_this_machine(accelerator, settings.environ)
    ):
        return "gke", f"this machine has no {accelerator}; GOOGLE_CLOUD_PROJECT is {project!r}"
    if project:
        return "local", "GOOGLE_CLOUD_PROJECT alone chooses no cloud; KINETIC_PROJECT does"
    if origin:
        return "local", f"cluster {cluster!r} comes from {origin}, but no project is configured"
    return "local", "no project is configured"


def _is_on_this_machine(accelerator: Accelerator, environ: Mapping[str, str]) -> bool:
    """Return whether this machine has the accelerator's devices."""
    match accelerator.kind:
        case "cpu":
            return True
        case "gpu":
            return len(gpu_ids(environ)) >= accelerator.count
        case "tpu":
            return has_tpus()


def checked_backend(name: str, origin: str) -> str:
    """Return the backend in lower case.

    Raises:
        ConfigurationError: There is no such backend.
    """
    known = name.strip().lower()
    if known not in BACKENDS:
        hint = suggest(known, BACKENDS)
        raise ConfigurationError(f"there is no backend {name!r} (from {origin}); {hint}")
    return known


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where kinetic keeps its files on this machine, as an absolute path.

    The folder is KINETIC_HOME, else ``~/.kinetic``; it need not exist.

    Raises:
        ConfigurationError: KINETIC_HOME isn't set and the user has no home directory, or the path
            is relative, or isn't UTF-8.
    """
    configured = environ.get("KINETIC_HOME")
    if configured and configured != "~" and not configured.startswith(("~/", "/")):
        raise ConfigurationError(
            f"KINETIC_HOME must be an absolute path, not {configured!r}: each working directory "
            "would have other jobs"
        )
    path = _expand_path(configured, environ) if configured else _user_home(environ) / ".kinetic"
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"the path of kinetic's files, {str(path)!r}, isn't UTF-8; set KINETIC_HOME to a "
            "path in UTF-8"
        ) from None
    return path


def profiles_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file of profiles: KINETIC_PROFILES_FILE, else ``profiles.json`` in `home`."""
    configured = environ.get("KINETIC_PROFILES_FILE")
    return _expand_path(configured, environ) if configured else home(environ) / "profiles.json"


def _load_profiles(environ: Mapping[str, str]) -> profiles.Profiles:
    is_configured = bool(environ.get("KINETIC_PROFILES_FILE"))
    return profiles.load(profiles_file(environ), required=is_configured)


def _expand_path(path: str, environ: Mapping[str, str]) -> Path:
    if path == "~" or path.startswith("~/"):
        return _user_home(environ) / path[2:]
    return Path(path).absolute()


def _user_home(environ: Mapping[str, str]) -> Path:
    if configured := environ.get("HOME"):
        return Path(configured).absolute()
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigurationError(
            "this user has no home directory; set KINETIC_HOME to a directory"
        ) from error


def debug_wait_s() -> float:
    """Return how long, in seconds, a job waits for a debugger, and `debug_attach` for a job."""
    return number("KINETIC_DEBUG_WAIT_S", DEBUG_WAIT_S)


def log_level(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return KINETIC_LOG_LEVEL as a level of the `logging` module; None if it isn't set.

    Raises:
        ConfigurationError: The variable isn't DEBUG, INFO, WARNING, ERROR, or FATAL.
    """
    name = environ.get("KINETIC_LOG_LEVEL")
    if not name:
        return None
    level = LOG_LEVELS.get(name.strip().upper())
    if level is None:
        hint = suggest(name, LOG_LEVELS)
        raise ConfigurationError(f"KINETIC_LOG_LEVEL is {name!r}, which isn't a level; {hint}")
    return level
