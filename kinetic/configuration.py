"""Which value holds for each setting, and which backend follows from them.

For each setting the first that says something wins: the argument (anything but
None), the ``KINETIC_*`` variable (anything but empty), the active profile, the
default. Only the project has one more source, GOOGLE_CLOUD_PROJECT, after the
profile.

The backend is the argument, else KINETIC_BACKEND, else the profile's, else
``gke`` when a project or KINETIC_KUBE_CONTEXT is configured, else ``local``. A
``gke`` becomes ``pathways`` for an accelerator of several hosts, whose pods have
to start together.

GOOGLE_CLOUD_PROJECT chooses ``gke`` for an accelerator that this machine does not
have, or beside a cluster that is named for kinetic. Other jobs stay on this machine:
gcloud's shells, editors and ``.env`` files set the variable, so it alone does not say
that somebody wants to upload source and start machines that cost money.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from kinetic import profiles
from kinetic._devices import gpus_here, tpus_here
from kinetic._messages import suggest
from kinetic.errors import ConfigurationError

if TYPE_CHECKING:
    from kinetic.accelerators import Accelerator

__all__ = [
    "BACKENDS",
    "VARIABLES",
    "Target",
    "checked_zone",
    "debug_port",
    "debug_wait_s",
    "home",
    "log_level",
    "number",
    "profiles_file",
    "resolve",
    "sources",
    "submit_patience_s",
    "with_store",
]

BACKENDS = ("gke", "pathways", "local")

DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "zone": "us-central1-a",
        "cluster": "kinetic-cluster",
        "namespace": "default",
    }
)

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "KINETIC_BACKEND": "gke, pathways or local",
        "KINETIC_PROJECT": "the GCP project",
        "GOOGLE_CLOUD_PROJECT": "the GCP project, after the profile's; not for jobs on CPUs",
        "KINETIC_ZONE": "the GCP zone (us-central1-a)",
        "KINETIC_CLUSTER": "the GKE cluster (kinetic-cluster)",
        "KINETIC_NAMESPACE": "the Kubernetes namespace (default)",
        "KINETIC_KUBE_CONTEXT": "a context of the kubeconfig, or in-cluster, and no GKE cluster",
        "KINETIC_MULTIHOST": "lws or jobset: what carries jobs on several hosts of a cluster (lws)",
        "KINETIC_JOB_TTL_S": "after how many seconds a platform forgets a finished job (86400)",
        "KINETIC_SUBMIT_PATIENCE": "how many seconds a batch waits for a refusal to pass (900)",
        "KINETIC_QUEUE": "the Kueue queue of jobs on a cluster",
        "KINETIC_PRIORITY_CLASS": "the priority class of jobs on a cluster",
        "KINETIC_SERVICE_ACCOUNT": "the Kubernetes service account of jobs (kinetic)",
        "KINETIC_RUN_AS_USER": "the user ID of pods; 0 is root (the image's)",
        "KINETIC_STORE": "the bucket or directory of jobs, instead of the backend's own",
        "KINETIC_BASE_IMAGE_REPO": "where prebuilt base images are; on a cluster they need it",
        "KINETIC_PYTHON_IMAGE": "what built images begin with (python:{python}-slim)",
        "KINETIC_OUTPUT_DIR": "where jobs write what is kept; in a job, its own directory",
        "KINETIC_PROFILE": "the profile to use, instead of the current one",
        "KINETIC_PROFILES_FILE": "the file of profiles (profiles.json in KINETIC_HOME)",
        "KINETIC_HOME": "profiles, store, supervisor and caches of this machine (~/.kinetic)",
        "KINETIC_LOCAL_SLOTS": "how many CPUs local jobs may take together (all there are)",
        "KINETIC_LOCAL_IDLE_S": "after how many seconds without a job the supervisor ends",
        "KINETIC_LOCAL_FRESH": "1: a fresh interpreter for each local job (off; on for macOS)",
        "KINETIC_CACHE_AGE_S": "how long caches keep unused contents, in seconds (2592000)",
        "KINETIC_CACHE_SIZE_MB": "how large the caches may be, in MB (20000)",
        "KINETIC_PRICES": "a JSON file with prices of your own: accelerator to US dollars an hour",
        "KINETIC_LOG_LEVEL": "how much of kinetic's own log is seen (what your program says)",
        "KINETIC_PROGRESS": "how progress is shown: auto, live, plain or off (auto)",
        "KINETIC_NO_TTY_DEBUG": "1: debug=True without a terminal (off)",
        "KINETIC_DEBUG_PORT": "where f() with debug=True listens for the editor (5678)",
        "KINETIC_DEBUG_WAIT_S": "how long a job waits for its debugger, and that for the job (600)",
        "KINETIC_PACKAGE_ROOT": "the project's root, instead of the one found by its markers",
        "KINETIC_NO_DEFAULT_EXCLUDES": "1: ship what is left out by default (off)",
        "KINETIC_CONTEXT_SIZE_WARN_MB": "warn about a larger project archive, in MB (100)",
        "KINETIC_PAYLOAD_SIZE_WARN_MB": "warn about larger pickled arguments, in MB (50)",
        "KINETIC_JOB_ID": "in a job: its id",
        "KINETIC_GROUP_ID": "in a job of a batch: the batch's id",
        "KINETIC_INDEX": "in a job: the index of its input in the batch; 0 for a single job",
        "KINETIC_HOSTS": "in a job on several hosts: how many there are",
        "KINETIC_HOST": "in a job on several hosts: which one this is, from 0",
        "KINETIC_COORDINATOR": "in a job on several hosts: where the first one listens, HOST:PORT",
        "KINETIC_OUTPUT_PATH": "in a job: a local directory that is its KINETIC_OUTPUT_DIR",
        "KINETIC_ATTEMPT": "in a job: which attempt this is; 1 for the first",
    }
)
"""Every variable a user may set or read, and its default; who reads it is its own module."""

DEBUG_PORT, DEBUG_WAIT_S, SUBMIT_PATIENCE_S = 5678, 600.0, 900.0

LOG_LEVELS: Mapping[str, int] = MappingProxyType(
    {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "FATAL": 50}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where jobs run and what belongs to it; every choice is made.

    ``why`` says in one phrase how the backend was chosen, and does not tell two
    targets apart. ``store`` is a bucket or directory instead of the backend's
    own, ``kube_context`` a context of the kubeconfig instead of the cluster's
    own address; None means that nobody named one. ``run_as_user`` is the user ID of
    pods; None means that of the image.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The sources of settings; `find` asks them in order."""

    arguments: Mapping[str, str | None]
    environ: Mapping[str, str]
    profile: profiles.Profile | None

    def find(self, name: str) -> tuple[str | None, str]:
        """The value and where it is from; the default has no origin."""
        argument = self.arguments.get(name)
        if argument is not None:
            if not argument:
                raise ConfigurationError(
                    f"{name} is empty; leave it out to take the configured one"
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

    def text(self, name: str) -> str:
        """A setting that has a default."""
        return self.find(name)[0] or DEFAULTS[name]


def resolve(
    *,
    backend: str | None = None,
    project: str | None = None,
    zone: str | None = None,
    cluster: str | None = None,
    namespace: str | None = None,
    base_image_repo: str | None = None,
    output_dir: str | None = None,
    accelerator: Accelerator | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Target:
    """Settle every setting; None means that the caller does not say.

    Reads the profiles, which are a small file, and nothing else.

    Raises:
        ConfigurationError: There is no such backend, a cluster's backend has
            neither project nor context, an argument is empty, the zone is
            malformed, or a variable that is a number is none.
        ProfileError: The profiles cannot be read, or there is no such profile.
    """
    _check_numbers(environ)
    settings = _Settings(
        arguments={
            "backend": backend,
            "project": project,
            "zone": zone,
            "cluster": cluster,
            "namespace": namespace,
            "base_image_repo": base_image_repo,
            "output_dir": output_dir,
        },
        environ=environ,
        profile=_profiles(environ).active(environ),
    )
    chosen, why = _backend(settings, accelerator)
    named_project = settings.value("project") or environ.get("GOOGLE_CLOUD_PROJECT") or None
    kube_context = settings.value("kube_context")
    if chosen != "local" and not (named_project or kube_context):
        raise ConfigurationError(
            f"No GCP project configured for the backend {chosen!r} ({why}): pass project=, set "
            "KINETIC_PROJECT or use a profile; for a cluster elsewhere, name a context of your "
            'kubeconfig in KINETIC_KUBE_CONTEXT; backend="local" runs on this machine without one'
        )
    return Target(
        backend=chosen,
        why=why,
        project=named_project,
        zone=checked_zone(*settings.find("zone")),
        cluster=settings.text("cluster"),
        namespace=settings.text("namespace"),
        store=settings.value("store"),
        base_image_repo=settings.value("base_image_repo"),
        output_dir=settings.value("output_dir"),
        kube_context=kube_context,
        run_as_user=_user_id(*settings.find("run_as_user")),
    )


_ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]+(-[a-z0-9]+)?")


def checked_zone(zone: str | None, origin: str) -> str:
    """Return *zone*, which *origin* names, if it has the form of a zone or a region.

    Raises:
        ConfigurationError: It has another form.
    """
    zone = zone or DEFAULTS["zone"]
    if _ZONE.fullmatch(zone) is None:
        raise ConfigurationError(
            f"{zone!r} (from {origin}) isn't a zone of Google Cloud; write one such as "
            f"{DEFAULTS['zone']}, or leave it out"
        )
    return zone


def _user_id(text: str | None, origin: str) -> int | None:
    """Read a user ID, which Kubernetes takes up to 2**31 - 1."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) < 2**31):
        raise ConfigurationError(
            f"run_as_user from {origin} must be the number of a user, such as 1000, not {text!r}"
        )
    return int(text)


SHOWN = (
    "backend",
    "project",
    "zone",
    "cluster",
    "namespace",
    "kube_context",
    "store",
    "base_image_repo",
    "output_dir",
    "run_as_user",
)
"""The settings that `sources` tells."""


def sources(
    arguments: Mapping[str, str | None], environ: Mapping[str, str] = os.environ
) -> dict[str, tuple[str | None, str]]:
    """Each setting's value, and where it is from; *arguments* are what the caller says.

    Raises:
        ConfigurationError: An argument is empty, or there is no such backend.
        ProfileError: The profiles cannot be read, or there is no such profile.
    """
    settings = _Settings(
        arguments=arguments, environ=environ, profile=_profiles(environ).active(environ)
    )
    found = {name: settings.find(name) for name in SHOWN}
    told = {name: (value, origin or "default") for name, (value, origin) in found.items()}
    told |= {name: (None, "not set") for name, (value, _) in found.items() if value is None}
    if found["project"][0] is None and (shared := environ.get("GOOGLE_CLOUD_PROJECT")):
        told["project"] = shared, "GOOGLE_CLOUD_PROJECT"
    return {**told, "backend": _backend(settings, None)}


_NUMBERS: Mapping[str, tuple[type[int | float], int]] = MappingProxyType(
    {
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
)


def _check_numbers(environ: Mapping[str, str]) -> None:
    """Refuse wrong values here, because other processes read them later, or seldom."""
    for name, (kind, least) in _NUMBERS.items():
        text = environ.get(name) or str(least)
        try:
            right = kind(text) >= least  # nan is not
        except ValueError:
            right = False
        if not right:
            what = "a whole number" if kind is int else "a number"
            raise ConfigurationError(f"{name} must be {what} of at least {least}, not {text!r}")


def number(name: str, environ: Mapping[str, str], default: int) -> int:
    """Return the whole number that the variable *name* holds.

    Raises:
        ConfigurationError: It holds something else.
    """
    _check_numbers(environ)
    return int(environ.get(name) or default)


def with_store(target: Target, store: str) -> Target:
    """Return *target* with its objects in *store*: a directory, or ``gs://bucket``."""
    if not store:
        raise ConfigurationError("store is empty; leave it out for the configured one")
    return replace(target, store=store)


def _backend(settings: _Settings, accelerator: Accelerator | None) -> tuple[str, str]:
    name, origin = settings.find("backend")
    if name is None:
        name, why = _implied_backend(settings, accelerator)
    else:
        name, why = _known_backend(name, origin), f"chosen by {origin}"
    if name == "gke" and accelerator is not None and accelerator.multi_host:
        return "pathways", f"{why}; {accelerator} has {accelerator.hosts} hosts"
    return name, why


def _implied_backend(settings: _Settings, accelerator: Accelerator | None) -> tuple[str, str]:
    """The backend when nobody named one; the module's documentation argues for it."""
    for setting in ("project", "kube_context"):
        value, origin = settings.find(setting)
        if value:
            return "gke", f"{setting} {value!r} comes from {origin}"
    shared = settings.environ.get("GOOGLE_CLOUD_PROJECT")
    cluster, origin = settings.find("cluster")
    if shared and origin:
        return "gke", f"cluster {cluster!r} comes from {origin}, its project from the environment"
    if shared and accelerator is not None and not _is_here(accelerator, settings.environ):
        return "gke", f"this machine has no {accelerator}; GOOGLE_CLOUD_PROJECT is {shared!r}"
    if shared:
        return "local", "GOOGLE_CLOUD_PROJECT alone chooses no cloud; KINETIC_PROJECT does"
    if origin:
        return "local", f"cluster {cluster!r} comes from {origin}, but no project is configured"
    return "local", "no project is configured"


def _is_here(accelerator: Accelerator, environ: Mapping[str, str]) -> bool:
    """Whether this machine has as many devices of the accelerator's kind."""
    match accelerator.kind:
        case "cpu":
            return True
        case "gpu":
            return len(gpus_here(environ)) >= accelerator.count
        case "tpu":
            return tpus_here()


def _known_backend(name: str, origin: str) -> str:
    known = name.strip().lower()
    if known not in BACKENDS:
        hint = suggest(known, BACKENDS, otherwise=f"there are {', '.join(BACKENDS)}")
        raise ConfigurationError(f"there is no backend {name!r} (from {origin}); {hint}")
    return known


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where kinetic keeps its files on this machine, as an absolute path.

    That is KINETIC_HOME, else ``~/.kinetic``; it need not exist.

    Raises:
        ConfigurationError: KINETIC_HOME is not set and the user has no home directory, or the path
            is not UTF-8.
    """
    named = environ.get("KINETIC_HOME")
    path = _absolute(named, environ) if named else _user_home(environ) / ".kinetic"
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"the path of kinetic's files, {str(path)!r}, is not UTF-8; set KINETIC_HOME to a "
            "folder whose name is"
        ) from None
    return path


def profiles_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file of profiles: KINETIC_PROFILES_FILE, else one in `home`."""
    named = environ.get("KINETIC_PROFILES_FILE")
    return _absolute(named, environ) if named else home(environ) / "profiles.json"


def _profiles(environ: Mapping[str, str]) -> profiles.Profiles:
    named = bool(environ.get("KINETIC_PROFILES_FILE"))
    return profiles.load(profiles_file(environ), required=named)


def _absolute(named: str, environ: Mapping[str, str]) -> Path:
    if named == "~" or named.startswith("~/"):
        return _user_home(environ) / named[2:]
    return Path(named).absolute()


def _user_home(environ: Mapping[str, str]) -> Path:
    if named := environ.get("HOME"):
        return Path(named).absolute()
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigurationError(
            "this user has no home directory; set KINETIC_HOME to a directory of your own"
        ) from error


def debug_port(environ: Mapping[str, str] = os.environ) -> int:
    """Return the port of this machine that a blocking call with ``debug=True`` forwards.

    Raises:
        ConfigurationError: KINETIC_DEBUG_PORT is no whole number of at least 0.
    """
    return number("KINETIC_DEBUG_PORT", environ, DEBUG_PORT)


def debug_wait_s(environ: Mapping[str, str] = os.environ) -> float:
    """Return how many seconds a job with ``debug=True`` waits for a debugger to attach.

    As long does `JobHandle.debug_attach` wait for the job to be ready for one.

    Raises:
        ConfigurationError: KINETIC_DEBUG_WAIT_S is no number of at least 0.
    """
    _check_numbers(environ)
    return float(environ.get("KINETIC_DEBUG_WAIT_S") or DEBUG_WAIT_S)


def submit_patience_s(environ: Mapping[str, str] = os.environ) -> float:
    """Return how many seconds a batch that has started waits while the platform refuses jobs.

    Raises:
        ConfigurationError: KINETIC_SUBMIT_PATIENCE is no number of at least 0.
    """
    _check_numbers(environ)
    return float(environ.get("KINETIC_SUBMIT_PATIENCE") or SUBMIT_PATIENCE_S)


def log_level(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the level of KINETIC_LOG_LEVEL, in the numbers of the `logging` module; else None.

    Raises:
        ConfigurationError: It is not DEBUG, INFO, WARNING, ERROR or FATAL.
    """
    named = environ.get("KINETIC_LOG_LEVEL")
    if not named:
        return None
    level = LOG_LEVELS.get(named.strip().upper())
    if level is None:
        hint = suggest(named, LOG_LEVELS, otherwise=f"there are {', '.join(LOG_LEVELS)}")
        raise ConfigurationError(f"KINETIC_LOG_LEVEL has no level {named!r}; {hint}")
    return level
